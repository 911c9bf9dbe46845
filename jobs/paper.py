"""Make the paper's tables and figures from logit tables: `python -m jobs.paper --config FILE`."""

from __future__ import annotations

import sys

from rich.console import Console

from cauc_ray.api.config import FilePath
from cauc_ray.api.tables import line
from cauc_ray.execution.tasks import Outcome
from cauc_ray.files.paths import AnyPath
from cauc_ray.paper import Paper, PaperConfig, run_paper
from jobs.job import Job, JobConfig, JobResult, JobRun, main

WIDTH = 220  # a log has no width of its own


class PaperJob(JobConfig, PaperConfig):
    """What fills the paper's tables and figures."""

    BY_CONTENT = True

    output: FilePath

    def inputs(self) -> set[AnyPath]:
        """Return the sets that are named, and what is read beside them."""
        return set(self.reads())


def work(config: PaperJob, run: JobRun) -> JobResult:
    """Measure all that the config names, task by task, and write tables, figures and a report."""

    def on_outcome(outcome: Outcome, place: int, of: int) -> None:
        how = f"{outcome.seconds:.1f} s" if outcome.error is None else f"failed: {outcome.error}"
        run.progress.say(f"[{place}/{of}] {outcome.task}: {how}")
        run.progress.report(place, of, "tasks")

    paper = run_paper(config, config.output, address=run.address, on_outcome=on_outcome)
    return JobResult(paper.as_json(), lambda: show(paper, str(config.output)), paper.failed)


def show(paper: Paper, output: str) -> None:
    """Print all tables, and what is missing."""
    console = Console(width=WIDTH)
    for table in paper.tables:
        line(f"\n== {table.title}")
        for grid in table.grids:
            console.print(grid.rich())
            for note in grid.notes:
                line(note)
    for each in paper.figures:
        line(f"\n== {each.title}: {output}/figures/{each.name}.png\n{each.caption}")
    line("")
    for missing in paper.not_run:
        line(f"not run here: {missing}")
    line(f"everything is in {output}, see report.md; {paper.seconds:.0f} s")


JOB = Job("paper", "Make the paper's tables and figures from logit tables.", (PaperJob,), work)

if __name__ == "__main__":
    sys.exit(main(JOB, sys.argv[1:]))
