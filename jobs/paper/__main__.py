"""Make the paper's tables and figures from logit tables: `python -m jobs.paper --config FILE [-o DIR]`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cauc_ray.api import live
from cauc_ray.cli.command import warnings_on_stderr
from cauc_ray.display import Sheet
from cauc_ray.errors import CaucError, one_line
from jobs.paper.config import PaperConfig
from jobs.paper.pages import write_page
from jobs.paper.report import Paper, make_paper


def main(arguments: Sequence[str]) -> int:
    """Make what a config names. Returns an exit code as the command does: 5 if some of it failed."""
    parser = argparse.ArgumentParser(prog="python -m jobs.paper", description=__doc__)
    parser.add_argument("--config", metavar="FILE", required=True, help="tables, figures and their logit tables")
    parser.add_argument("-o", "--output", metavar="DIR", help="a folder, new or of an earlier attempt")
    parser.add_argument("--address", help="of a Ray cluster, or local (default: RAY_ADDRESS, else this process)")
    parser.add_argument(
        "--page",
        metavar="FILE",
        help="also write the tables' numbers there, and figures next to them, for a page of docs/",
    )
    flags = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    page = flags.pop("page", None)
    try:
        config = PaperConfig.read(flags.pop("config"), flags)
        config = config.model_copy(update={"address": config.address or os.environ.get("RAY_ADDRESS") or None})
        with warnings_on_stderr("paper"), live.progress("paper", "cells") as on_cell:
            paper = make_paper(config, on_cell)
    except CaucError as error:
        print(f"paper: error: {one_line(error)}", file=sys.stderr)
        return error.exit_code
    show(paper)
    if page is not None:
        write_page(Path(page), paper.as_json(), paper.config.output)
    return 5 if paper.failed else 0


def show(paper: Paper) -> None:
    """Print the tables, and what is missing."""
    for table in paper.tables:
        Sheet(table.title, table.grids).print()
        print()
    for what, why in paper.not_run.items():
        print(f"not run: {what}: {why}")
    for failure in paper.failed:
        print(f"paper: failed: {failure}", file=sys.stderr)
    print(f"written to {paper.config.output / 'report.md'}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
