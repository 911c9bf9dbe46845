"""Make the paper's tables and figures from logit tables: `python -m jobs.paper CONFIG -o OUT`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from cauc_ray.errors import CaucError
from cauc_ray.front.paper import Paper, load_config, run_paper
from cauc_ray.front.paper.tasks import Outcome
from cauc_ray.front.show import line

PIPE_WIDTH = 220  # a pipe has no width of its own


def main(argv: Sequence[str]) -> int:
    """Run what a config names. Returns 0; 1 where something of it failed; 2 on bad input, with one line."""
    options = parser().parse_args(argv)
    try:
        config = load_config(options.config, options.logits)
        paper = run_paper(config, options.output, address=options.address, on_outcome=say)
    except CaucError as error:
        print(f"jobs.paper: error: {error}", file=sys.stderr)
        return 2
    show(paper, options.output)
    print(json.dumps({**paper.as_json(), "output": options.output}, allow_nan=False))
    return 1 if paper.failed else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the job's options."""
    made = argparse.ArgumentParser(prog="python -m jobs.paper", description=__doc__, allow_abbrev=False)
    made.add_argument("config", metavar="CONFIG", help="what fills which table, such as jobs/paper.yaml")
    made.add_argument("-o", "--output", metavar="OUT", required=True, help="a new folder")
    made.add_argument("--logits", metavar="DIR", help="the folder of all sets (default: the config's)")
    made.add_argument("--address", help="of a Ray cluster (default: RAY_ADDRESS, else one started for this)")
    return made


def say(outcome: Outcome, place: int, of: int) -> None:
    """Print what came of a task."""
    how = f"{outcome.seconds:.1f} s" if outcome.error is None else f"failed: {outcome.error}"
    line(f"[{place}/{of}] {outcome.task}: {how}")


def show(paper: Paper, output: str) -> None:
    """Print all tables, and what is missing."""
    console = Console(width=None if Console().is_terminal else PIPE_WIDTH)
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
    for warning in paper.warned:
        line(f"warning: {warning}")
    for failure in paper.failed:
        line(f"failed: {failure}")
    line(f"everything is in {output}, see report.md; {paper.seconds:.0f} s")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
