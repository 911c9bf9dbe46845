"""Foreign words in Markdown: names and ids that must not become markup."""

from __future__ import annotations

import re
from typing import Any


class Verbatim(str):
    """Text that is Markdown already."""

    __slots__ = ()


def escape_markdown(value: Any) -> Any:
    r"""Return a value as Markdown (and the HTML within it) shows it; what is Markdown already stays.

    >>> escape_markdown("a|b<c> *d*")
    'a\\|b&lt;c&gt; \\*d\\*'
    """
    if isinstance(value, Verbatim) or not isinstance(value, str):
        return value
    text = " ".join(value.split())
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]{}|~#!$@])", r"\\\1", text)


def fenced(text: str) -> Verbatim:
    """Return a command as a block of code, whatever it holds."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return Verbatim(f"{fence}sh\n{text}\n{fence}")
