"""CARROT (Somerstep et al., arXiv 2502.03261): the model of the highest estimated accuracy less a price of its cost.

Both are estimated for the query: here, as in the published CARROT-KNN, by the means over its nearest known queries,
of cosine distance and equal weight. The published one that fine-tunes RoBERTa on texts is not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.baselines.benchmark_routing import near_shares, unit_weights
from cauc_ray.baselines.routing import Read, fit_router, note_of_router
from cauc_ray.numbers.multinomial import folds_of
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.routers import ValueRouter, ordered_choices

# Numbers of neighbours that cross-validation chooses among.
SIZES = tuple(2**power for power in range(1, 10))


class CarrotPolicy(ValueRouter):
    """CARROT-KNN.

    Arrays: known queries, (n, d), whether each of M models was right on them, (n, M), and, where calls have costs of
    their own, these, (n, M). Where estimates order two models' costs otherwise than their mean costs do, the higher
    estimate counts for both: one price then orders a row's choices.

    Attributes:
        k_costs: Neighbours of a cost; null where every call of a model costs the same.
    """

    OWN: ClassVar[tuple[str, ...]] = (*ValueRouter.OWN, "k_costs")

    method: Literal["carrot"] = "carrot"
    k_costs: int | None = Field(default=None, ge=1)

    def values(self, vectors: Floats) -> Floats:
        """Return each model's estimated accuracy, float64 (n, M)."""
        assert self.k is not None
        return self._near("correct", self.k, vectors)

    def worth_of(self, first: Floats) -> Floats:
        """Return what is compared with the threshold at each model in the order of ends, float64 (n, S)."""
        vectors = self.vectors(first)
        costs = np.array([stage.cost for stage in self.answering])
        order = np.argsort(costs, kind="stable")
        if self.k_costs is not None:
            costs = np.maximum.accumulate(self._near("costs", self.k_costs, vectors)[:, order], axis=1)
        else:
            costs = costs[order]
        return ordered_choices(self.values(vectors)[:, order], costs)

    def _near(self, name: str, k: int, vectors: Floats) -> Floats:
        means: Floats = near_shares(vectors, self.arrays.once("known", unit_weights), self.arrays[name], (k,), (0.0,))[
            0, 0
        ]
        return means


def fit(fitting: Fitting) -> Sequence[Policy]:
    """Remember the calibration queries, and choose the numbers of neighbours by cross-validation.

    One number is for all models' accuracies, and another for all their costs.
    """
    return fit_router(fitting, CarrotPolicy, _known_queries)


def _known_queries(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    queries, chain = vectors(fitting.calibration), fitting.calibration.chain
    correct = fitting.calibration.correct()
    arrays: dict[str, Any] = {"known": queries, "correct": correct.astype(np.uint8)}
    numbers = {"k": neighbours(queries, correct.astype(np.float64))}
    if chain.per_call_costs:
        arrays["costs"] = chain.costs.per_call
        numbers["k_costs"] = neighbours(queries, chain.costs.per_call)
    return arrays, numbers


def neighbours(queries: Floats, targets: Floats) -> int:
    """Return the number of neighbours whose means explain most of the targets' variance on rows of other folds.

    Args:
        queries: Vectors, float32 (n, d).
        targets: Of the queries, float64 (n, M); the share of each column counts alike.
    """
    folds, spread = folds_of(len(queries)), targets.var(axis=0)
    sizes = [size for size in SIZES if all(size <= len(training) for _, training in folds)]
    if not folds or not sizes or not spread.any():
        return len(queries)
    errors = np.zeros(len(sizes))
    for rows, training in folds:
        means = near_shares(queries[rows], queries[training], targets[training], sizes, (0.0,))[0]
        squares = ((means - targets[rows]) ** 2).sum(axis=1)
        errors += (squares[:, spread > 0] / spread[spread > 0]).sum(axis=1)
    best: int = sizes[int(errors.argmin())]
    return best


METHOD = Method("carrot", "router", fit, note=note_of_router("nearest neighbours in place of RoBERTa"), reads="neither")
