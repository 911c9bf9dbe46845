"""Sweep budgets over sets of logits, chains, methods and seeds: `python -m jobs.sweep --config FILE`."""

from __future__ import annotations

import sys

from rich.console import Console

from cauc_ray.api.config import Location
from cauc_ray.api.tables import line
from cauc_ray.comparison.sweeping import Sweep, SweepConfig, run_sweep
from cauc_ray.comparison.sweeping.tables import grids
from cauc_ray.execution.tasks import Outcome
from jobs.job import Job, JobConfig, JobResult, JobRun, main

WIDTH = 200  # a log has no width of its own


class SweepJob(JobConfig, SweepConfig):
    """Sets × chains × methods × seeds × budgets."""

    BY_CONTENT = True

    output: Location


def work(config: SweepJob, run: JobRun) -> JobResult:
    """Measure all that the config names, task by task, and write the tables."""

    def on_outcome(outcome: Outcome, place: int, of: int) -> None:
        if outcome.error is not None:
            run.progress.say(f"failed: {outcome.task}: {outcome.error}")
        run.progress.report(place, of, "tasks")

    sweep = run_sweep(config, config.output, address=run.address, on_outcome=on_outcome)
    return JobResult(sweep.as_json(), lambda: show(sweep), sweep.missing)


def show(sweep: Sweep) -> None:
    """Print accuracy, its spread over seeds and the cost to that of the last model, method by budget."""
    console = Console(width=WIDTH)
    line("Accuracy in percent ± its standard deviation over seeds, at cost relative to the last model")
    for grid in grids(sweep.summary):
        console.print(grid.rich())
    line(f"{len(sweep.rows):,} rows in {sweep.seconds:.0f} s")


JOB = Job("sweep", "Sweep budgets over sets of logits, chains, methods and seeds.", (SweepJob,), work)

if __name__ == "__main__":
    sys.exit(main(JOB, sys.argv[1:]))
