"""A method that has several policies, among which validation chooses at each budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.methods import Curve, cascade_of, curve_of
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import Answers, Examples


class Variants:
    """Policies of one method, of which none is chosen, nor its threshold: a setting is an index of an operating point.

    policy: one of n_policies by its index.   points: of all of them on validation.
    """

    def __init__(self, policy: Callable[[int], Policy], points: Sequence[OperatingPoints], note: str = "") -> None:
        """Join points.   points: of each policy, by its thresholds.   note: for tables."""
        self.policy, self.n_policies, self.note = policy, len(points), note
        self._variants = np.repeat(np.arange(len(points)), [len(one.settings) for one in points])
        self._thresholds, cost, quality = (
            np.concatenate([getattr(one, name) for one in points]) for name in ("settings", "cost", "quality")
        )
        self.points = OperatingPoints(np.arange(len(cost), dtype=np.float64), cost, quality, points[0].unit)

    @property
    def default(self) -> float:
        """Return the best point."""
        return float(self.points.index_of_best())

    def chosen(self, budget: float | None) -> Policy:
        """Return the policy that is best within a budget on validation. Raises BudgetError."""
        return self.policy(int(self._variants[self.points.index_of_best(budget)]))

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a setting."""
        policy, threshold = self.policy(int(self._variants[int(setting)])), self._thresholds[int(setting)]
        return cascade_of(policy)(examples).answers(threshold)

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure settings on labelled examples."""
        at = settings.astype(np.int64)
        cost, accuracy, f1, last = (np.empty(len(at)) for _ in range(4))
        for variant in np.unique(self._variants[at]).tolist():
            own = np.flatnonzero(self._variants[at] == variant)
            trace = cascade_of(self.policy(variant))(examples)
            found = curve_of(trace, examples.chain, self._thresholds[at[own]])
            cost[own], accuracy[own], f1[own], last[own] = found.cost, found.accuracy, found.macro_f1, found.last_share
        return Curve(settings, cost, accuracy, f1, last)
