"""The table of promises in tests/README.md names tests that exist."""

import ast
import re

import pytest
from pages import ROOT

TABLE = (ROOT / "tests" / "README.md").read_text()


def missing_tests(text):
    """Yield the files and functions of tests that a text names between backticks, and which do not exist."""
    for path, name in re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", text):
        file = ROOT / "tests" / path
        if not file.exists():
            yield path
        elif name and name not in {getattr(node, "name", None) for node in ast.parse(file.read_text()).body}:
            yield f"{path}::{name}"


def test_each_promise_names_tests_that_exist():
    rows = [line for line in TABLE.splitlines() if line.startswith("| ") and ".py" in line]
    assert len(rows) > 50
    assert list(missing_tests(TABLE)) == []


@pytest.mark.parametrize("name", ["docs/test_promises.py::test_ghost", "docs/test_ghost.py"])
def test_a_planted_mistake_is_reported(name):
    assert list(missing_tests(f"{TABLE}\n| a promise | `{name}` | suite |")) == [name]
