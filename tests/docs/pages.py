"""The pages of the documentation, and the blocks of code in them."""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "deployments" / "README.md"]
# Whether it runs, its indentation, language and text.
BLOCK = re.compile(
    r"(?:<!-- (not run|background)[^>]* -->\n+)?^( *)```(\w+)[^\n]*\n(.*?)^\2```", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class Snippet:
    """A block of code of a page.   how: what a comment before it says of running it."""

    how: str
    language: str
    text: str


def snippets(page):
    """Yield the blocks of a page, without their indentation."""
    for how, indent, language, text in BLOCK.findall(page.read_text()):
        yield Snippet(how, language, re.sub(rf"^{indent}", "", text, flags=re.MULTILINE))
