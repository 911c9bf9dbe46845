"""Tables as people read them: how numbers are written, and how rows look on a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from cauc_ray.errors import masked
from cauc_ray.policies.notebook import share_text

Mark: TypeAlias = Literal["", "bold", "underline"]

_PIPE_WIDTH = 200
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
    """Return a share in percent, a dash for None."""
    return f"{points(value, sign=True)} %" if sign and value is not None else share_text(value)


def amount(value: float | None) -> str:
    """Return a number of any size in few letters, a dash for None."""
    if value is None:
        return "–"
    if value >= 1e7:
        return f"{value / 1e6:,.4g} M" if value < 1e10 else f"{value:.3e}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """Return a share with its interval in percent, a dash for None."""
    if value is None or interval is None:
        return "–"
    return f"{percent(value)} ({100 * interval[0]:.1f} – {100 * interval[1]:.1f})"


def cost_with_interval(cost: float, interval: Sequence[float]) -> str:
    """Return a mean cost with its interval."""
    return f"{number(cost)} ({number(interval[0])} – {number(interval[1])})"


def relative(cost: float | None) -> str:
    """Return how a relative cost ends a sentence, nothing for None."""
    return "" if cost is None else f", {cost:.2f} of the last model alone"


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
    "gain": lambda gain, *interval: (
        "–" if gain is None else "{} ({} – {})".format(*(points(each, sign=True) for each in (gain, *interval)))
    ),
}


@dataclass(frozen=True, slots=True)
class Grid:
    """A table of text.

    headings: of its columns.   n_left: how many columns, from the first, align to the left.   marks: how cells stand
    out, by the indexes of their row and column.
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    n_left: int = 1
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
    ) -> Grid:
        """Return a table of rows.

        columns: of each its heading, one of FORMATS, and the keys of a row whose values that takes.   marks: of cells,
        by the index of the row and the first of those keys.

        >>> columns = [("model", "text", "model"), ("cost", "number", "usd")]
        >>> Grid.of("costs", [{"model": "small", "usd": 1.50}], columns).rows
        (('small', '1.5'),)
        """
        lines = tuple(tuple(FORMATS[form](*(row[key] for key in keys)) for _, form, *keys in columns) for row in rows)
        first = [keys[0] for _, _, *keys in columns]
        marked = {(row, at): mark for (row, key), mark in marks.items() for at, of in enumerate(first) if of == key}
        return cls(title, tuple(heading for heading, *_ in columns), lines, tuple(notes), n_left, marked)

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [f"**{_escaped(self.title)}**", "", _line(_escaped(heading) for heading in self.headings)]
        lines.append(_line(":--" if index < self.n_left else "--:" for index in range(len(self.headings))))
        for place, row in enumerate(self.rows):
            around = [_AROUND[self.marks.get((place, column), "")] for column in range(len(row))]
            lines.append(_line(f"{at[0]}{_escaped(text)}{at[1]}" for text, at in zip(row, around, strict=True)))
        return "\n".join([*lines, *(f"\n{_escaped(note)}" for note in self.notes)]) + "\n"

    def rich(self) -> Table:
        """Return it for a terminal."""
        table = new_table(self.title, self.headings, self.n_left)
        for place, row in enumerate(self.rows):
            marks = (self.marks.get((place, column), "") for column in range(len(row)))
            table.add_row(*(Text(text, style=mark) for text, mark in zip(row, marks, strict=True)))
        return table


def new_table(title: str, headings: Sequence[str], n_left: int = 1) -> Table:
    """Return a table without rows: names on the left, numbers on the right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for index, heading in enumerate(headings):
        is_left = index < n_left
        table.add_column(Text(heading), justify="left" if is_left else "right", no_wrap=is_left)
    return table


def add_row(table: Table, *texts: str) -> None:
    """Add cells as they are: a name may hold what rich takes for markup."""
    table.add_row(*(Text(text) for text in texts))


def print_table(table: Table) -> None:
    """Print a table as wide as it needs to be."""
    terminal = Console()
    # A pipe has no width of its own: its lines are not folded. A terminal that is too narrow folds lines by itself,
    # where rich would leave figures out.
    least = Measurement.get(terminal, terminal.options.update(width=_PIPE_WIDTH), table).minimum
    fits = terminal.width >= least + 2 * len(table.columns)
    wide = terminal.width if fits else least + 3 * len(table.columns)
    width = wide if terminal.is_terminal else _PIPE_WIDTH
    Console(width=width).print(table)


def print_rows(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[Sequence[str]]) -> None:
    """Print rows as a table.   columns: as Grid.of takes them."""
    print_table(Grid.of(title, rows, columns).rich())


def line(text: str) -> None:
    """Print a line as it is."""
    Console(soft_wrap=True).print(masked(text), markup=False, highlight=False)


def _line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(texts)} |"


def _escaped(text: str) -> str:
    """Return text that Markdown shows as it is: names of models hold its signs."""
    for sign in "\\|*_<>[]`":
        text = text.replace(sign, f"\\{sign}")
    return text
