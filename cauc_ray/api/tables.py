"""How tables for people are drawn, on standard output."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

_PIPE_WIDTH = 200


def line(text: str) -> None:
    """Print a line as it is."""
    Console(soft_wrap=True).print(text, markup=False, highlight=False)


def amount(value: float) -> str:
    """Return a number of any size in few letters."""
    if value >= 1e7:
        return f"{value / 1e6:,.4g} M" if value < 1e10 else f"{value:.3e}"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def add_row(table: Table, *cells: str) -> None:
    """Add cells as they are: a name may hold what rich takes for markup."""
    table.add_row(*(Text(cell) for cell in cells))


def new_table(title: str, headings: Sequence[str]) -> Table:
    """Return a table without rows: names on the left, numbers on the right."""
    table = Table(title=Text(title), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for place, heading in enumerate(headings):
        table.add_column(Text(heading), justify="left" if place == 0 else "right", no_wrap=place == 0)
    return table


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


def number(value: float | None) -> str:
    """Return a number in four digits, a dash for none."""
    return "–" if value is None else f"{value:.4g}"


def percent(value: float | None, *, sign: bool = False) -> str:
    """Return a share in percent, a dash for none."""
    if value is None:
        return "–"
    return f"{100 * value:+.2f} %" if sign else f"{100 * value:.1f} %"


def with_interval(value: float | None, interval: Sequence[float] | None) -> str:
    """Return a share with its interval in percent, a dash for none."""
    if value is None or interval is None:
        return "–"
    return f"{percent(value)} ({100 * interval[0]:.1f} – {100 * interval[1]:.1f})"


def relative(cost: float | None) -> str:
    """Return how a relative cost ends a sentence, nothing for none."""
    return "" if cost is None else f", {cost:.2f} of the last model alone"
