"""What people see on standard error while something goes on: a display on a terminal, else a line a minute."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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

from cauc_ray.display import amount, count_text
from cauc_ray.execution.progress import RateMeter, RunProgress, RunRates

if TYPE_CHECKING:
    from cauc_ray.execution.metrics import JobMetrics

# What takes less than this needs no progress bar.
PATIENCE_S = 2.0
# Where nobody watches, as in the log of a job, a line comes this often.
LINE_EVERY_S = 60.0


@dataclass(slots=True)
class Status:
    """How far something is.   doing: what it is.   detail: how far."""

    doing: str
    detail: str = ""
    _metrics: JobMetrics | None = field(default=None, repr=False)
    _begun: bool = field(default=False, repr=False)

    def begin(self, line: str) -> None:
        """Write the first line at once where standard error is not a terminal, which shows a bar."""
        if not self._begun and not Console(stderr=True).is_terminal:
            _write(line)
        self._begun = True

    def count(self, done: int, total: int | None, unit: str) -> None:
        """Note how much is done, of a total if it is known, also for Ray's metrics."""
        self.detail = f"{done:,}" + ("" if total is None else f" of {total:,}") + f" {unit}"
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():
            return
        if self._metrics is None:
            from cauc_ray.execution.metrics import JobMetrics

            self._metrics = JobMetrics(self.doing)
        self._metrics.report(done, total, unit)


@contextmanager
def _status(doing: str) -> Iterator[Status]:
    """Yield what to tell how far something is; where standard error is not a terminal, write it there every minute."""
    status, ended, started = Status(doing), threading.Event(), time.monotonic()

    def write() -> None:
        while not ended.wait(LINE_EVERY_S):
            detail = f": {status.detail}" if status.detail else ""
            _write(f"{status.doing}{detail}, {_clock(time.monotonic() - started)}")

    if not Console(stderr=True).is_terminal:
        threading.Thread(target=write, daemon=True).start()
    try:
        yield status
    finally:
        ended.set()


def _write(line: str) -> None:
    with suppress(OSError, ValueError):  # nobody reads it any more
        sys.stderr.write(f"cauc: {line}\n")
        sys.stderr.flush()


@contextmanager
def progress(doing: str, unit: str = "steps", *, at_once: bool = False) -> Iterator[Callable[..., None]]:
    """Show how far something is, once it has taken two seconds; at once: also write what it does first.

    Yields what to call with what is done or waited for, and for things that are counted with how many are done and
    their number.
    """
    bar = _progress(TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn())
    task = bar.add_task(doing, total=None)
    timer = threading.Timer(PATIENCE_S, bar.start)
    timer.daemon = True
    timer.start()

    def on_next(what: object, done: int | None = None, of: int | None = None) -> None:
        if at_once:
            status.begin(str(what))
        if done is None:
            status.detail = str(what)
            bar.update(task, description=str(what))
        else:
            status.count(done, of, unit)
            bar.update(task, description=f"{status.detail}: {what}", completed=done, total=of)

    with _status(doing) as status:
        try:
            yield on_next
        finally:
            timer.cancel()
            if bar.live.is_started:
                bar.stop()


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
    with _status("collect") as status:

        def on_progress(models: Mapping[str, RunProgress]) -> None:
            # Only now is there something to show: an error before this shall be one line.
            status.begin(starting(len(models)))
            progress.start()
            for name, at in models.items():
                if name not in tasks:
                    tasks[name] = progress.add_task(name)
                progress.update(tasks[name], completed=at.n_finished, total=at.n_rows)
            totals = [model.n_rows for model in models.values() if model.n_rows is not None]
            done = sum(model.n_finished for model in models.values())
            status.count(done, sum(totals) if len(totals) == len(models) else None, "rows")

        try:
            yield on_progress
        finally:
            if progress.live.is_started:
                progress.stop()


@contextmanager
def run_progress(cost_unit: str) -> Iterator[Callable[[RunProgress], None]]:
    """Show a run stage by stage; yields what to call with its progress, about twice a second."""
    console = Console(stderr=True)
    # Drawn at each look and at no other time. Standard output is not Live's to redirect: see _progress.
    live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False)
    meter, started = RateMeter(), time.monotonic()
    with _status("run") as status:

        def on_progress(progress: RunProgress) -> None:
            status.begin(starting(len(progress.stages)))
            status.count(progress.n_finished, progress.n_rows, "rows")
            if not console.is_terminal:
                return
            # Only now is there something to show: an error before this shall be one line.
            live.start()
            view = run_view(progress, meter.add(progress), cost_unit, time.monotonic() - started)
            live.update(view, refresh=True)

        try:
            yield on_progress
        finally:
            live.stop()


def starting(n_stages: int) -> str:
    """Return the first line on something that starts stages."""
    return f"starting {count_text(n_stages, 'stage')} …"


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
