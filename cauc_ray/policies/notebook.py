"""The display of results: small tables, as text in a terminal, as HTML in a notebook."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, slots=True)
class SmallTable:
    """A caption, a header, and rows of texts: a name, then numbers."""

    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """Return it as lines.

        >>> print(SmallTable("costs", ["model", "USD"], [["small", "1"], ["large", "10"]]).text())
        costs
        model  USD
        small    1
        large   10
        """
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        lines = [
            "  ".join(f"{text:{'<' if index == 0 else '>'}{widths[index]}}" for index, text in enumerate(row)).rstrip()
            for row in (self.header, *self.rows)
        ]
        return "\n".join([self.caption, *lines]).rstrip()

    def html(self) -> str:
        """Return it as HTML, in which all text is escaped.

        >>> SmallTable("2 < 3", ["a&b"], []).html()
        '<table><caption>2 &lt; 3</caption><tr><th>a&amp;b</th></tr></table>'
        """
        head = "".join(f"<th>{escape(name)}</th>" for name in self.header)
        body = "".join(
            f"<tr>{''.join(_cell(text, is_first=index == 0) for index, text in enumerate(row))}</tr>"
            for row in self.rows
        )
        return f"<table><caption>{escape(self.caption)}</caption><tr>{head}</tr>{body}</table>"


class Shown:
    """A result that is displayed as a small table."""

    __slots__ = ()

    @abstractmethod
    def small_table(self) -> SmallTable:
        """Return its display."""

    def __repr__(self) -> str:
        return self.small_table().text()

    def __str__(self) -> str:
        return self.small_table().text()

    def _repr_html_(self) -> str:
        return self.small_table().html()


def _cell(text: str, *, is_first: bool) -> str:
    return f'<td style="text-align:{"left" if is_first else "right"}">{escape(text)}</td>'


def share_text(share: float | None) -> str:
    """Return a share in percent, a dash for None.

    >>> share_text(0.914), share_text(None)
    ('91.4 %', '–')
    """
    return "–" if share is None else f"{100 * share:.1f} %"
