"""Count how often claims from few labels hold: `python -m jobs.paper.claims SETS FILE`.

SETS is the folder that `python -m jobs.paper.public_sets` writes; FILE is docs/measured/claims.json for the page.
Calibration, validation and test are drawn anew from all rows of a set, which is the population that is claimed about.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.display import Grid
from cauc_ray.errors import CaucWarning
from cauc_ray.files.documents import write_json
from cauc_ray.numbers.types import Floats, Ints
from jobs.paper.folders import convert
from jobs.paper.pages import rounded

SETS = {
    "emotion10k_task_icl0": ("qwen-1_8b", "qwen-7b", "llama-2-13b-hf", "qwen-14b"),
    "cifar10": ("resnet20", "resnet32", "resnet44", "resnet56"),
}
SPLITS = ("calibration", "validation", "test")
N_DRAWS = 200
# Rows of each split of a draw; the budget, between the costs of the cheapest and of the most expensive model.
SIZES, BUDGET = (500, 500, 2000), 0.4
METHODS, SEARCHES, RULES = ("base", "rf", "stacked"), (False, True), ("plain", "0.95")
_COLUMNS = [
    ["set, method", "text", "name"],
    ["draws", "text", "n_draws"],
    ["test accuracy within its prediction interval (%)", "points", "covered"],
    ["budget exceeded (%)", "points", "exceeded"],
    ["mean cost over the budget (%)", "points", "cost"],
    ["at 95 % confidence: budget exceeded (%)", "points", "exceeded_at_confidence"],
    ["mean cost over the budget (%)", "points", "cost_at_confidence"],
]


@dataclass(frozen=True, slots=True)
class Population:
    """All rows of a logit table, whatever their split.

    Attributes:
        logits: Of each model, shape (N, K).
        labels: Shape (N,).
        costs: Mean cost of a call of each model.
    """

    logits: Mapping[str, Floats]
    labels: Ints
    costs: Mapping[str, float]

    @classmethod
    def read(cls, table: LogitTable, models: Sequence[str]) -> Population:
        """Read a table's rows."""
        chains = [table.read_chain(models, split) for split in SPLITS]
        logits = (np.concatenate(parts) for parts in zip(*(chain.logits for chain in chains), strict=True))
        labels = np.concatenate([chain.labels for chain in chains])
        costs = map(float, chains[0].costs.means)
        return cls(dict(zip(models, logits, strict=True)), labels, dict(zip(models, costs, strict=True)))

    @property
    def budget(self) -> float:
        """Return the budget of every draw."""
        cheapest, most_expensive = min(self.costs.values()), max(self.costs.values())
        return cheapest + BUDGET * (most_expensive - cheapest)

    def logits_of(self, policy: cauc_ray.Policy, rows: Ints | slice = slice(None)) -> dict[str, Floats]:
        """Return what a policy reads of some rows."""
        return {model: self.logits[model][rows] for model in policy.models}

    def draws(self, n_draws: int) -> Iterator[list[Ints]]:
        """Yield the rows of each split of each draw."""
        for seed in range(n_draws):
            rows = np.random.default_rng(seed).permutation(len(self.labels))[: sum(SIZES)]
            yield np.split(rows, np.cumsum(SIZES)[:-1])


def measure(population: Population, method: str, search: bool, n_draws: int) -> dict[str, float | None]:
    """Return the shares of draws in which each claim of a method holds, and its mean cost over the budget."""
    # A search by stacked has no budgets at a confidence.
    rules = RULES[:1] if search and method == "stacked" else RULES
    covered, costs = list[bool](), {rule: list[float]() for rule in rules}
    for calibration, validation, test in population.draws(n_draws):
        parts = [
            ({model: z[rows] for model, z in population.logits.items()}, population.labels[rows])
            for rows in (calibration, validation)
        ]
        for rule in rules:
            policy = cauc_ray.fit(
                *parts[0],
                costs=population.costs,
                validation=parts[1],
                method=method,
                search=search,
                budget=population.budget if rule == "plain" else f"{population.budget}@{rule}",
            )
            answers = policy.predict(population.logits_of(policy))
            costs[rule].append(float(answers.cost.mean()) / population.budget)
            if rule == "plain":
                labels = population.labels[test]
                evaluation = cauc_ray.evaluate(population.logits_of(policy, test), policy, labels=labels).as_json()
                low, high = evaluation["expected_interval"]
                covered.append(low <= float(np.mean(answers.prediction[test] == labels)) <= high)
    exceeded, cost = ({rule: float(np.mean(of(costs[rule]))) for rule in rules} for of in (_above, np.asarray))
    return {
        "covered": float(np.mean(covered)),
        "exceeded": exceeded["plain"],
        "cost": cost["plain"],
        "exceeded_at_confidence": exceeded.get("0.95"),
        "cost_at_confidence": cost.get("0.95"),
    }


def _above(costs: Sequence[float]) -> Any:
    return np.array(costs) > 1


def claims(sets: Path, n_draws: int = N_DRAWS) -> dict[str, Any]:
    """Return a row for each set of a folder that is there, method, and whether chains are searched."""
    rows = []
    with warnings.catch_warnings(action="ignore", category=CaucWarning):
        for (name, models), method, search in product(SETS.items(), METHODS, SEARCHES):
            if (sets / name).is_dir():
                population = Population.read(LogitTable(sets / name), models)
                title = f"{name}, {method}{' after a search' if search else ''}"
                rows.append({"name": title, "n_draws": n_draws, **measure(population, method, search, n_draws)})
                print(rows[-1], flush=True)
    return {"sizes": SIZES, "rows": rounded(rows)}


def grids(made: Mapping[str, Any]) -> Iterator[Grid]:
    """Yield the table of the page."""
    yield Grid.of("", made["rows"], _COLUMNS)


def write_claims(sets: Path, output: Path) -> None:
    """Measure the claims on the sets of a folder, and write them into a file."""
    write_json(output, claims(sets))


if __name__ == "__main__":
    sys.exit(convert("jobs.paper.claims", __doc__, write_claims))
