"""The numbers of docs/mmlu-pro.md: `python -m jobs.paper.answers COMPARISON FILE`.

COMPARISON is what `cauc compare --config jobs/paper/answers.yaml` writes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from cauc_ray.comparison.result import Comparison
from cauc_ray.display import Grid, percent
from cauc_ray.files.documents import write_json
from cauc_ray.policies.by_method import SINGLE
from jobs.paper.folders import convert
from jobs.paper.pages import rounded

# Figures of a row: the set and the method of the comparison.
FIGURES = {
    "random": ("both", "random"),
    "verbal_threshold": ("verbal", "confidence"),
    "sequence_threshold": ("sequence", "confidence"),
    "verbal": ("verbal", "answers"),
    "sequence": ("sequence", "answers"),
    "both": ("both", "answers"),
}
_COLUMNS = [
    ["chain", "text", "chain"],
    ["last model alone", "points", "last"],
    ["at random", "points", "random"],
    ["threshold: verbal", "points", "verbal_threshold"],
    ["threshold: sequence", "points", "sequence_threshold"],
    ["answers: verbal", "points", "verbal"],
    ["answers: sequence", "points", "sequence"],
    ["answers: both", "points", "both"],
    ["both less last model", "gain", "gain", "gain_low", "gain_high"],
    ["both less better threshold", "gain", "margin", "margin_low", "margin_high"],
    ["both less random", "gain", "surplus", "surplus_low", "surplus_high"],
]


def measured(comparison: Comparison) -> dict[str, Any]:
    """Return the rows of the page: one for each budget and chain, with accuracies and differences on test."""
    rows = {(row["set"], row["chain"], row["method"], row["budget"]): row for row in comparison.summary}
    paired = {(row["set"], row["chain"], row["method"], row["budget"]): row for row in comparison.rows}
    lines = []
    for facts in comparison.chains:
        if facts["set"] != "both":
            continue
        chain, last = facts["chain"], f"{SINGLE}:{facts['models'][-1]}"
        for budget in sorted({row["budget"] for row in comparison.rows}):
            accuracies = {
                name: rows[of_set, chain, method, budget]["accuracy_mean"] for name, (of_set, method) in FIGURES.items()
            }
            line = {"chain": " → ".join(map(_name, facts["models"])), "budget": budget, "n": facts["n"]}
            line |= {"last": rows["both", chain, last, budget]["accuracy_mean"], **accuracies}
            line |= _less("gain", paired["both", chain, last, budget])
            line |= _less("margin", paired["both", chain, "confidence", budget])
            lines.append(line | _less("surplus", paired["both", chain, "random", budget]))
    return {"n_seeds": len(comparison.about["seeds"]), "rows": rounded(lines)}


def _less(name: str, row: Mapping[str, Any]) -> dict[str, float]:
    """Return how much more accurate the reference is than a method, as Holm adjusts it."""
    low, high = row["difference_interval"]
    return {name: -row["difference"], f"{name}_low": -high, f"{name}_high": -low}


def _name(model: str) -> str:
    return model.removeprefix("Meta-").removesuffix("-Instruct-Turbo").replace("Llama-3.1-", "Llama 3.1 ")


def grids(made: Mapping[str, Any]) -> Iterator[Grid]:
    """Yield a table for each budget."""
    rows = sorted(made["rows"], key=lambda row: row["budget"])
    for budget, of_budget in groupby(rows, key=lambda row: row["budget"]):
        yield Grid.of(
            f"Accuracy (%) at {percent(budget)} of the most expensive model's cost", list(of_budget), _COLUMNS
        )


def write_answers(comparison: Path, file: Path) -> None:
    """Write the numbers of a comparison."""
    write_json(file, measured(Comparison.load(comparison)))


if __name__ == "__main__":
    sys.exit(convert("jobs.paper.answers", __doc__, write_answers))
