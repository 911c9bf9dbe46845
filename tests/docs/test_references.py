"""The generated parts of the pages."""

import importlib.util

import pytest
from pages import PAGES, ROOT

SCRIPT = ROOT / "docs" / "references.py"


@pytest.fixture(scope="module")
def references():
    spec = importlib.util.spec_from_file_location("references", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "<!-- generated: " in page.read_text()], ids=lambda p: p.name
)
def test_generated_parts_are_current(references, page):
    """`python docs/references.py` writes them anew."""
    assert references.written(page.read_text()) == page.read_text()


def test_a_stale_part_is_written_anew(references):
    page = (ROOT / "docs" / "reference" / "methods.md").read_text()
    assert references.written(page.replace("| `base` | ours |", "| `base` | theirs |")) == page
