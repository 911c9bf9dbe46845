"""What people see while something goes on; on standard error, gone when done, not drawn where nobody watches."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cauc_ray.api.tables import amount
from cauc_ray.execution.progress import RateMeter, RunProgress, RunRates

# What takes less than this needs no progress bar.
_PATIENCE_S = 2.0


@contextmanager
def busy(doing: str) -> Iterator[None]:
    """Show that something is going on, once it has taken two seconds."""
    progress = _progress(TextColumn(doing), BarColumn(), TimeElapsedColumn())
    progress.add_task(doing, total=None)
    timer = threading.Timer(_PATIENCE_S, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if progress.live.is_started:
            progress.stop()


@contextmanager
def waiting(for_what: str) -> Iterator[Callable[[str], None]]:
    """Show what is waited for; yields what to call when that changes."""
    with _progress(TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task(for_what, total=None)

        def on_wait(says: str) -> None:
            progress.update(task, description=says)

        yield on_wait


def _counted() -> tuple[ProgressColumn, ...]:
    """Return the columns of things that are done one after the other."""
    return (
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
    )


@contextmanager
def steps(n: int) -> Iterator[Callable[[str], None]]:
    """Show n steps as they begin; yields what to call at the start of each."""
    with _progress(*_counted()) as progress:
        task = progress.add_task("", total=n, completed=-1)

        def step(description: str) -> None:
            progress.update(task, description=description, advance=1)

        yield step


@contextmanager
def methods_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show which of several methods is being fitted; yields what to call with its name, its place and their number."""
    with _progress(*_counted()) as progress:
        task = progress.add_task("reading", total=None)

        def on_method(name: str, place: int, of: int) -> None:
            progress.update(task, description=name, completed=place, total=of)

        yield on_method


@contextmanager
def collect_progress() -> Iterator[Callable[[Mapping[str, RunProgress]], None]]:
    """Show each model's rows as they are answered; yields what to call with the progress by model."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    progress = _progress(*columns)
    tasks: dict[str, TaskID] = {}

    def on_progress(models: Mapping[str, RunProgress]) -> None:
        # Only now is there something to show: an error before this shall be one line.
        progress.start()
        for name, at in models.items():
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=at.n_rows)
            progress.update(tasks[name], completed=at.n_finished)

    try:
        yield on_progress
    finally:
        if progress.live.is_started:
            progress.stop()


@contextmanager
def run_progress(cost_unit: str) -> Iterator[Callable[[RunProgress], None]]:
    """Show a run stage by stage; yields what to call with its progress, about twice a second."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda progress: None
        return
    # Drawn at each look and at no other time. Standard output is not Live's to redirect: see _progress.
    live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)
    meter, started = RateMeter(), time.monotonic()

    def on_progress(progress: RunProgress) -> None:
        # Only now is there something to show: an error before this shall be one line.
        live.start()
        view = run_view(progress, meter.add(progress), cost_unit, time.monotonic() - started)
        live.update(view, refresh=True)

    try:
        yield on_progress
    finally:
        live.stop()


def run_view(progress: RunProgress, rates: RunRates, cost_unit: str, elapsed_s: float) -> RenderableType:
    """Return a run as people see it: a row for each stage, what failed if anything, and all of it in one line."""
    parts: list[RenderableType] = [_stages(progress, rates, cost_unit)]
    trouble = [
        f"{what}: {', '.join(counts)}"
        for what in ("failed", "degraded", "quarantined")
        if (counts := [f"{n:,} at {stage.name}" for stage in progress.stages if (n := getattr(stage, what))])
    ]
    if trouble:
        parts.append(Text("; ".join(trouble), style="yellow"))
    return Group(*parts, _whole(progress, rates, elapsed_s))


def _stages(progress: RunProgress, rates: RunRates, cost_unit: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    # Names give way first where the terminal is narrow, then the last heading; numbers never.
    table.add_column("stage")
    for heading in ("queued", "in flight", "replicas", "rows/s", "accepted"):
        table.add_column(heading, justify="right", no_wrap=True, min_width=8)
    table.add_column(Text(f"cost ({cost_unit})"), justify="right", min_width=9)
    for stage, rows_per_s in zip(progress.stages, rates.stage_rows_per_s, strict=True):
        share = stage.accepted_share
        table.add_row(
            Text(stage.name, no_wrap=True, overflow="ellipsis"),
            f"{stage.queued:,}",
            f"{stage.in_flight:,}",
            f"{stage.replicas}" + (f" +{stage.starting}" if stage.starting else ""),
            "–" if rows_per_s is None else amount(rows_per_s),
            "–" if share is None else f"{100 * share:.1f} %",
            Text(amount(stage.cost), no_wrap=True),
        )
    return table


def _whole(progress: RunProgress, rates: RunRates, elapsed_s: float) -> Table:
    of = "" if progress.n_rows is None else f" of {progress.n_rows:,}"
    left = "" if rates.eta_s is None else f", {_clock(rates.eta_s)} left"
    pace = "" if rates.rows_per_s is None else f"{amount(rates.rows_per_s)} rows/s  "
    text = f"{rates.n_done:,}{of} rows  {pace}{_clock(elapsed_s)} gone{left}"
    line = Table.grid(padding=(0, 2, 0, 0))
    if progress.n_rows is None:
        line.add_row(Text(text))
    else:
        line.add_column(max_width=40)
        line.add_column(no_wrap=True)
        line.add_row(ProgressBar(total=max(1, progress.n_rows), completed=rates.n_done), Text(text))
    return line


def _clock(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{s:02}" if hours else f"{minutes}:{s:02}"


def _progress(*columns: ProgressColumn) -> Progress:
    """Return a bar on standard error that goes away when done, and is not drawn where nobody watches.

    It leaves standard output alone: a verb that redirects it meanwhile would get back what was open then.
    """
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal, redirect_stdout=False)
