"""How results display themselves: a sheet of lines and tables, as text for terminals and as HTML for notebooks."""

from __future__ import annotations

import os
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from html import escape
from shutil import get_terminal_size
from textwrap import wrap
from types import MappingProxyType
from typing import Any, Literal, Protocol, TypeAlias

from rich.cells import cell_len

from cauc_ray.errors import masked

Mark: TypeAlias = Literal["", "bold", "underline"]

# Spaces between columns, and the narrowest column of texts.
_GAP, _LEAST_TEXT = 2, 24
_AROUND: Mapping[Mark, tuple[str, str]] = {"": ("", ""), "bold": ("**", "**"), "underline": ("<ins>", "</ins>")}


def number(value: float | None) -> str:
    """Return a number in four digits, a dash for None."""
    return "–" if value is None else f"{value:.4g}"


def decimals(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    """Return a number with so many decimals, a dash for None.

    >>> decimals(0.3333, 3), decimals(2.0, sign=True), decimals(None)
    ('0.333', '+2.00', '–')
    """
    return "–" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"


def points(share: float | None, *, sign: bool = False) -> str:
    """Return a share in percent, without a unit, for a column that names it; a dash for None.

    >>> points(0.91237), points(-0.01, sign=True)
    ('91.24', '-1.00')
    """
    return decimals(None if share is None else 100 * share, sign=sign)


def percent(value: float | None, *, sign: bool = False) -> str:
    """Return a share in percent, a dash for None.

    >>> percent(0.914), percent(None)
    ('91.4 %', '–')
    """
    return "–" if value is None else f"{points(value, sign=True)} %" if sign else f"{100 * value:.1f} %"


def amount(value: float | None) -> str:
    """Return a number of any size in few letters, a dash for None."""
    if value is None:
        return "–"
    if value >= 1e7:
        return f"{value / 1e6:,.4g} M" if value < 1e10 else f"{value:.3e}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def count_text(count: int | str, noun: str) -> str:
    """Return a count, or an amount as text, with its noun, whose plural ends in s.

    >>> count_text(1, "replica"), count_text(1200, "replica"), count_text("0.5", "request")
    ('1 replica', '1,200 replicas', '0.5 requests')
    """
    text = count if isinstance(count, str) else f"{count:,}"
    return f"{text} {noun}{'' if text == '1' else 's'}"


class _Interval(Protocol):
    """A share, or a difference of shares, with its interval."""

    @property
    def value(self) -> float: ...

    @property
    def low(self) -> float: ...

    @property
    def high(self) -> float: ...


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """Return a share with its interval in percent, a dash for None."""
    if value is None or interval is None:
        return "–"
    return f"{percent(value)} ({100 * interval[0]:.1f} – {100 * interval[1]:.1f})"


def share_text(share: _Interval | None) -> str:
    """Return a share with its interval in percent, a dash for None."""
    return "–" if share is None else with_interval(share.value, (share.low, share.high))


def gain_text(gain: _Interval | None) -> str:
    """Return a difference of shares with its interval in percentage points, a dash for None."""
    return "–" if gain is None else points_with_interval(gain.value, gain.low, gain.high)


def points_with_interval(gain: float | None, low: float | None = None, high: float | None = None) -> str:
    """Return a difference of shares in percentage points with its interval, a dash for None.

    >>> points_with_interval(-0.011, -0.02, -0.002)
    '-1.10 (-2.00 to -0.20)'
    """
    if gain is None:
        return "–"
    return f"{points(gain, sign=True)} ({points(low, sign=True)} to {points(high, sign=True)})"


def cost_with_interval(cost: float, interval: Sequence[float]) -> str:
    """Return a mean cost with its interval."""
    return f"{number(cost)} ({number(interval[0])} – {number(interval[1])})"


def relative(cost: float | None, model: str) -> str:
    """Return how a cost relative to a model's ends a sentence, nothing for None."""
    return "" if cost is None else f", {cost:.2f} of {model} alone"


# How a column shows the values of a row.
FORMATS: Mapping[str, Callable[..., str]] = {
    "text": str,
    "count": "{:,}".format,
    "amount": amount,
    "share": with_interval,
    "yes": lambda value: "yes" if value else "no",
    "number": number,
    "times": lambda ratio: "–" if ratio is None else f"{number(ratio)} ×",
    "decimals": decimals,
    "ratio": partial(decimals, digits=3),
    "percent": percent,
    "points": points,
    "signed": partial(points, sign=True),
    "interval": lambda low, high: f"{points(low)} – {points(high)}",
    "gain": points_with_interval,
}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text.

    Attributes:
        title: Its title.
        headings: Headings of the columns; empty for a table without.
        rows: Cells by row.
        notes: Lines below the table.
        n_left: Number of columns, from the first, that align to the left.
        texts: Indexes of columns of texts, which align to the left and may be folded.
        marks: How cells stand out, by the indexes of their row and column.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    n_left: int = 1
    texts: tuple[int, ...] = ()
    marks: Mapping[tuple[int, int], Mark] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        title: str,
        rows: Sequence[Mapping[str, Any]],
        columns: Sequence[Sequence[str]],
        marks: Mapping[tuple[int, str], Mark] = MappingProxyType({}),
        notes: Sequence[str] = (),
        n_left: int = 1,
        texts: tuple[int, ...] = (),
    ) -> Grid:
        """Return a table of rows.

        Args:
            title: Its title.
            rows: Values by key.
            columns: Of each its heading, one of FORMATS, and the keys of a row whose values that takes.
            marks: Of cells, by the index of the row and the first of those keys.
            notes: Lines below the table.
            n_left: Number of columns, from the first, that align to the left.
            texts: Indexes of columns of texts.

        >>> columns = [("model", "text", "model"), ("cost", "number", "usd")]
        >>> Grid.of("costs", [{"model": "small", "usd": 1.50}], columns).rows
        (('small', '1.5'),)
        """
        lines = tuple(tuple(FORMATS[form](*(row[key] for key in keys)) for _, form, *keys in columns) for row in rows)
        first = [keys[0] for _, _, *keys in columns]
        marked = {(row, at): mark for (row, key), mark in marks.items() for at, of in enumerate(first) if of == key}
        return cls(title, tuple(heading for heading, *_ in columns), lines, tuple(notes), n_left, texts, marked)

    def is_left(self, column: int) -> bool:
        """Return whether a column aligns to the left."""
        return column < self.n_left or column in self.texts

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [f"**{markdown_text(self.title)}**", ""] if self.title else []
        lines.append(_line(map(markdown_text, self.headings)))
        lines.append(_line(":--" if self.is_left(index) else "--:" for index in range(len(self.headings))))
        for place, row in enumerate(self.rows):
            around = [_AROUND[self.marks.get((place, column), "")] for column in range(len(row))]
            lines.append(_line(f"{at[0]}{markdown_text(text)}{at[1]}" for text, at in zip(row, around, strict=True)))
        return "\n".join([*lines, *(f"\n{markdown_text(note)}" for note in self.notes)]) + "\n"

    def html(self) -> str:
        """Return it as HTML, in which all text is escaped.

        >>> Grid("2 < 3", ("a&b",), ()).html()
        '<table><caption>2 &lt; 3</caption><thead><tr><th style="text-align:left">a&amp;b</th></tr></thead></table>'
        """
        title = f"<caption>{_html_text(self.title)}</caption>" if self.title else ""
        head = f"<thead>{self._html_row('th', self.headings)}</thead>" if self.headings else ""
        rows = "".join(self._html_row("td", row, place) for place, row in enumerate(self.rows))
        body = f"<tbody>{rows}</tbody>" if rows else ""
        return f"<table>{title}{head}{body}</table>{''.join(map(_paragraph, self.notes))}"

    def _html_row(self, tag: str, cells: Sequence[str], row: int | None = None) -> str:
        texts = []
        for index, text in enumerate(cells):
            is_bold = row is not None and self.marks.get((row, index)) == "bold"
            content = f"<b>{_html_text(text)}</b>" if is_bold else _html_text(text)
            texts.append(f'<{tag} style="text-align:{"left" if self.is_left(index) else "right"}">{content}</{tag}>')
        return f"<tr>{''.join(texts)}</tr>"

    def lines(self, width: int | None = None, bold: str = "{}") -> Iterator[str]:
        """Yield it as lines of text: names on the left, numbers on the right, none of them cut.

        Args:
            width: Width of the terminal, None for any. Columns that do not fit follow below, next to the first column.
            bold: Format of cells with the mark bold.

        >>> for line in Grid("", ("model", "mean cost"), (("small", "1.5"), ("large", "10"))).lines(12):
        ...     print(line)
               mean
        model  cost
        ───────────
        small   1.5
        large    10
        """
        rows = [[cell.splitlines() or [""] for cell in row] for row in self.rows]
        columns = [[text for cell in cells for text in cell] for cells in zip(*rows, strict=True)]
        headings = self.headings or ("",) * len(columns)
        least = [max(map(cell_len, column), default=0) for column in columns] or [0] * len(headings)
        widths = [max(size, cell_len(heading)) for size, heading in zip(least, headings, strict=True)]
        if width is not None and sum(widths) + _GAP * (len(widths) - 1) > width:
            words = [max(map(cell_len, heading.split()), default=0) for heading in headings]
            widths = [max(sizes) for sizes in zip(least, words, strict=True)]
            for index in self.texts:
                taken = sum(widths) - widths[index] + _GAP * (len(widths) - 1)
                widths[index] = min(widths[index], max(width - taken, _LEAST_TEXT))
                for row in rows:
                    row[index] = [line for text in row[index] for line in _folded(text, widths[index])]
        heads = [_folded(heading, size) for heading, size in zip(headings, widths, strict=True)]
        for place, block in enumerate(_blocks(widths, width)):
            if place:
                yield ""
            yield from self._block_lines(block, widths, heads if self.headings else None, rows, bold)

    def _block_lines(
        self,
        block: Sequence[int],
        widths: Sequence[int],
        heads: Sequence[Sequence[str]] | None,
        rows: Sequence[Sequence[Sequence[str]]],
        bold: str,
    ) -> Iterator[str]:
        """Yield some columns of the table, below those before them."""

        def line(texts: Iterable[str], row: int | None = None) -> str:
            padded = []
            for index, text in zip(block, texts, strict=True):
                pad = " " * (widths[index] - cell_len(text))
                marked = bold.format(text) if row is not None and self.marks.get((row, index)) == "bold" else text
                padded.append(marked + pad if self.is_left(index) else pad + marked)
            return (" " * _GAP).join(padded).rstrip()

        if heads is not None:
            height = max(len(heads[index]) for index in block)
            for place in range(height):
                yield line(["", *heads[index]][max(0, 1 + place - height + len(heads[index]))] for index in block)
            yield "─" * (sum(widths[index] for index in block) + _GAP * (len(block) - 1))
        for number, row in enumerate(rows):
            for place in range(max(len(row[index]) for index in block)):
                yield line((row[index][place] if place < len(row[index]) else "" for index in block), number)


def _blocks(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """Return the columns of a table in blocks that fit a width, each with the first column."""
    blocks, taken = [[0]], widths[0]
    for index, size in enumerate(widths[1:], start=1):
        if width is not None and taken + _GAP + size > width and len(blocks[-1]) > 1:
            blocks.append([0])
            taken = widths[0]
        blocks[-1].append(index)
        taken += _GAP + size
    return blocks


@dataclass(frozen=True, slots=True)
class Sheet:
    """The display of a result: a title, what matters most, and details.

    Attributes:
        title: One line.
        parts: Lines and tables, in order.
        details: More of them, which commands print, a notebook folds away, and `str` leaves out.
    """

    title: str
    parts: Sequence[str | Grid] = ()
    details: Sequence[str | Grid] = ()

    def text(self) -> str:
        """Return it as text, as wide as the terminal, without colours.

        >>> print(Sheet("costs", ["of 2 models", Grid("", ("model", "USD"), (("small", "1"), ("large", "10")))]).text())
        costs
        of 2 models
        <BLANKLINE>
        model  USD
        ──────────
        small    1
        large   10
        """
        return "\n".join(self._lines())

    def html(self) -> str:
        """Return it as HTML, in which all text is escaped, in the colours of the page."""
        details = "".join(map(_html_part, self.details))
        folded = f"<details><summary>details</summary>{details}</details>" if details else ""
        title = f"<strong>{escape(masked(self.title))}</strong>"
        return f"<div>{title}{''.join(map(_html_part, self.parts))}{folded}</div>"

    def print(self) -> None:
        """Print it on standard output, with its title in bold on a terminal."""
        is_bold = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        print(*self._lines("\x1b[1m{}\x1b[0m" if is_bold else "{}"), sep="\n")

    def _lines(self, bold: str = "{}") -> Iterator[str]:
        # A pipe has no width of its own: its lines are not folded.
        width = get_terminal_size((0, 0)).columns or None
        yield from map(bold.format, _folded(self.title, width))
        before: str | Grid = ""
        for part in (*self.parts, *self.details):
            if isinstance(part, Grid) or isinstance(before, Grid):
                yield ""
            if isinstance(part, Grid):
                yield from map(bold.format, _folded(part.title, width) if part.title else ())
                yield from part.lines(width, bold)
            for text in part.notes if isinstance(part, Grid) else part.splitlines():
                yield from _folded(text, width)
            before = part


def _folded(text: str, width: int | None) -> list[str]:
    """Return a line in lines of a width."""
    text = masked(text)
    return [text] if width is None else wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


class Shown:
    """A result that displays itself as a sheet, in terminals, in notebooks and by `cauc show`."""

    __slots__ = ()

    @abstractmethod
    def sheet(self) -> Sheet:
        """Return the display."""

    def __repr__(self) -> str:
        sheet = self.sheet()
        return Sheet(sheet.title, sheet.parts).text()

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return self.sheet().html()


class Figures(Shown, dict[str, Any]):
    """Figures by name, as --json prints them, that display themselves."""

    __slots__ = ()

    def as_json(self) -> dict[str, Any]:
        """Return the figures as a plain dictionary."""
        return dict(self)


def _html_part(part: str | Grid) -> str:
    return part.html() if isinstance(part, Grid) else _paragraph(part)


def _paragraph(text: str) -> str:
    return f'<p style="margin:.3em 0">{_html_text(text)}</p>'


def _html_text(text: str) -> str:
    return escape(masked(text)).replace("\n", "<br>")


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def markdown_text(text: str) -> str:
    r"""Return text, in one line, that Markdown and the HTML within it show as it is: names of models hold its signs.

    >>> print(markdown_text("a_b < [c]"))
    a\_b &lt; \[c\]
    """
    line = " ".join(masked(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]{}|~#!$@])", r"\\\1", line)
