"""The report of a run: every table, every figure, and what is missing."""

from __future__ import annotations

from collections.abc import Sequence

from cauc_ray.api.grids import PaperTable
from cauc_ray.comparison.measuring import published
from cauc_ray.paper.figures import Drawn
from cauc_ray.paper.plan import NotRun

HEAD = """# The paper's tables and figures, from logit tables

Numbers under "In the paper", and in columns that say so, are quoted from {source}; all others were measured in this \
run. Temperatures, fusion and methods are fitted on the calibration split, thresholds chosen on the validation split, \
and everything is measured on the test split.
"""


def report(
    tables: Sequence[PaperTable],
    figures: Sequence[Drawn],
    not_run: Sequence[NotRun],
    failed: Sequence[str],
    warned: Sequence[str],
) -> str:
    """Return the report as Markdown; it stands beside the folder of the figures."""
    parts = [HEAD.format(source=published()["source"])]
    if failed:
        parts += ["## Failed", _bullets(failed)]
    parts += [table.markdown() for table in tables]
    for each in figures:
        parts += [f"## {each.title}", f"![{each.title}](figures/{each.name}.png)", each.caption]
    if not_run:
        parts += ["## Not run here", _bullets([str(each) for each in not_run])]
    if warned:
        parts += ["## Warnings", _bullets(warned)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
