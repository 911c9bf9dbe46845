"""The pages of the documentation, and the blocks of code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deployments" / "README.md"]
# Whether it runs, its indentation, language and text.
BLOCK = re.compile(
    r"(?:<!-- (not run|background)[^>]* -->\n+)?^( *)```(\w+)[^\n]*\n(.*?)^\2```", re.DOTALL | re.MULTILINE
)
