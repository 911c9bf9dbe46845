"""Docstrings in Google's form, which describe options and the keys of files."""

from __future__ import annotations

import inspect
import re
import textwrap


def sections(docstring: str | None) -> dict[str, str]:
    """Return the sections of a docstring (Args, Attributes, …) by title, and the text before them by an empty title."""
    about, *titled = re.split(r"\n\n(?=[A-Z]\w+:\n)", inspect.cleandoc(docstring or ""))
    parts = (section.partition(":\n") for section in titled)
    return {"": about, **{title: textwrap.dedent(body) for title, _, body in parts}}


def items(docstring: str | None, title: str) -> dict[str, str]:
    """Return the texts of the items of a docstring's section by name, each on one line."""
    section = sections(docstring).get(title, "")
    named = (" ".join(item.split()).partition(": ") for item in re.split(r"\n(?=\S)", section))
    return {name: text for name, _, text in named}
