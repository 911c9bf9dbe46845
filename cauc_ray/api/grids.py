"""Tables as people read them, in Markdown and on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.table import Table
from rich.text import Text

Mark = Literal["", "bold", "underline"]

_AROUND: dict[Mark, tuple[str, str]] = {"": ("", ""), "bold": ("**", "**"), "underline": ("<ins>", "</ins>")}


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell's text, and how it stands out."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text.   headings: of its columns.   n_left: how many columns, from the first, align to the left."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    n_left: int = 1

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [f"**{_escaped(self.title)}**", "", _line(_escaped(heading) for heading in self.headings)]
        lines.append(_line(":--" if place < self.n_left else "--:" for place in range(len(self.headings))))
        for row in self.rows:
            lines.append(_line(f"{_AROUND[c.mark][0]}{_escaped(c.text)}{_AROUND[c.mark][1]}" for c in row))
        return "\n".join([*lines, *(f"\n{_escaped(note)}" for note in self.notes)]) + "\n"

    def rich(self) -> Table:
        """Return it for a terminal."""
        table = Table(title=Text(self.title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for place, heading in enumerate(self.headings):
            is_left = place < self.n_left
            table.add_column(Text(heading), justify="left" if is_left else "right", no_wrap=is_left)
        for row in self.rows:
            table.add_row(*(Text(cell.text, style=cell.mark) for cell in row))
        return table


@dataclass(frozen=True, slots=True)
class PaperTable:
    """One of the paper's tables.

    name: of its files.   title, about: what it shows, and how its numbers are to be read.   rows: its numbers, flat,
    for machines.   grids: the same for people.   quoted: the paper's own.
    """

    name: str
    title: str
    about: str
    rows: tuple[dict[str, Any], ...]
    grids: tuple[Grid, ...]
    quoted: Grid

    def markdown(self) -> str:
        """Return the table as a section of a report."""
        parts = [f"## {self.title}", self.about, *(grid.markdown() for grid in self.grids), self.quoted.markdown()]
        return "\n\n".join(parts)


def percent(value: float | None) -> str:
    """Return a share in percent."""
    return "–" if value is None else f"{100 * value:.2f}"


def number(value: float | None) -> str:
    """Return a cost or a time."""
    return "–" if value is None else f"{value:.4g}"


def ratio(value: float | None) -> str:
    """Return a cost over another."""
    return "–" if value is None else f"{value:.3f}"


def marked(texts: Sequence[str], values: Sequence[float | None], best: Mark = "bold") -> tuple[Cell, ...]:
    """Return cells of which the one of the highest value stands out, or all that share it; None has no part in that."""
    known = [value for value in values if value is not None]
    return tuple(
        Cell(text, best if value is not None and value == max(known) else "")
        for text, value in zip(texts, values, strict=True)
    )


def cells(*texts: str) -> tuple[Cell, ...]:
    """Return cells of plain text."""
    return tuple(Cell(text) for text in texts)


def _line(texts: Any) -> str:
    return f"| {' | '.join(texts)} |"


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is: names of models hold its signs."""
    for sign in "\\|*_<>[]`":
        text = text.replace(sign, f"\\{sign}")
    return text
