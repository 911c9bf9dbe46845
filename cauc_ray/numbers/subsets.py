"""The sweep of one threshold on several subsets of the same examples: one sort of their confidences serves all."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.sweep import Events, Objective, most_within, sweep
from cauc_ray.numbers.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class SubsetPoint:
    """What a threshold had on each of H subsets.

    quality: float64 (H,), -inf where no threshold was within the budget.   cost: float64 (H,), mean per example.
    """

    quality: Floats
    cost: Floats


@dataclass(frozen=True, slots=True)
class SubsetFrontiers:
    """What thresholds had on each of H subsets, at the P operating points of all examples.

    confidences: float64 (P - 1,), rising: point p holds for thresholds in (confidences[p - 1], confidences[p]].
    jumps: int (J,), rising from 0, the points where some quality may change.   quality: float64 (H, J), from each to
    the next.   ends: int (P - 1,), the last of the moves before each point.   sizes: int (H,), of the subsets.
    first: float64 (H,), the sum of costs at point 0.   spent: float64 (H, E), what each move adds to it, at least 0.
    """

    confidences: Floats
    jumps: Ints
    quality: Floats
    ends: Ints
    sizes: Ints
    first: Floats
    spent: Floats

    def best(self, budget: float | None) -> SubsetPoint:
        """Return each subset's highest quality within the budget, at its least cost: what Frontier.best chooses."""
        quality, cost = np.full((2, len(self.first)), -np.inf)
        # A cascade's cost never falls along the points: those within a budget are the first ones.
        n_jumps = [len(self.jumps)] * len(self.first) if budget is None else self._n_jumps(budget)
        for subset, n in enumerate(n_jumps):
            if n:
                jump = int(self.quality[subset, :n].argmax())
                quality[subset] = self.quality[subset, jump]
                cost[subset] = self._cost(subset, int(self.jumps[jump]))
        return SubsetPoint(quality, cost)

    def at(self, threshold: float) -> SubsetPoint:
        """Return what a given threshold had on each subset."""
        point = int(np.searchsorted(self.confidences, threshold, side="left"))
        jump = int(np.searchsorted(self.jumps, point, side="right")) - 1
        cost = np.array([self._cost(subset, point) for subset in range(len(self.first))])
        return SubsetPoint(self.quality[:, jump], cost)

    def _n_jumps(self, budget: float) -> Ints:
        """Return how many of the jumps are within the budget on each subset, int (H,)."""
        paths = np.cumsum(self.spent, axis=1)
        n_points = np.zeros(len(paths), dtype=np.int64)
        for subset, left in enumerate(most_within(budget) * self.sizes - self.first):
            if left >= 0:
                n_moves = paths[subset].searchsorted(left, side="right")
                n_points[subset] = 1 + self.ends.searchsorted(n_moves, side="left")
        return np.searchsorted(self.jumps, n_points, side="left")

    def _cost(self, subset: int, point: int) -> float:
        n_moves = self.ends[point - 1] + 1 if point else 0
        return float((self.first[subset] + self.spent[subset, :n_moves].sum()) / self.sizes[subset])


def sweep_subsets(
    confidences: Floats,
    predictions: Ints,
    labels: Ints,
    costs: Costs,
    members: Bools,
    objective: Objective = "accuracy",
) -> SubsetFrontiers:
    """Sweep the threshold of a cascade of all models on H subsets of the examples at once.

    members: bool (H, N), which examples each subset holds, at least one.   The others are those of sweep.
    """
    events = Events(confidences)
    values = events.values[events.ends]
    # As numbers: what they are multiplied with needs no conversion, which takes longer than the product.
    counted = members.astype(np.float64)
    if objective == "accuracy":
        correct = (predictions == labels[:, None]).T.astype(np.int8)
        jumps, n_correct = _n_correct(correct, events, members, counted)
        quality = n_correct / counted.sum(axis=1)[:, None]
    else:
        # F1 is no sum over examples: each subset has its own path.
        jumps = np.arange(len(values) + 1)
        quality = _f1_of_each(confidences, predictions, labels, members, values)
    of_stops = np.broadcast_to(costs.cumulative, predictions.shape)
    spent = np.take(counted, events.rows, axis=1)
    spent *= events.changes(of_stops.T)
    return SubsetFrontiers(
        confidences=values,
        jumps=jumps,
        quality=quality,
        ends=events.ends,
        sizes=members.sum(axis=1),
        first=np.vecdot(counted, np.ascontiguousarray(of_stops[:, 0])),
        spent=spent,
    )


def _n_correct(correct: Ints, events: Events, members: Bools, counted: Floats) -> tuple[Ints, Ints]:
    """Return the points at which some example becomes right or wrong, and how many are right, (J,) and (H, J).

    correct: int8 (S, N), by the stage where an example stops.   counted: members as numbers.
    Most moves change nothing: a later stage gives the same answer.
    """
    changes = events.changes(correct)
    moves = np.flatnonzero(changes)
    points = 1 + np.searchsorted(events.ends, moves, side="left")
    moved = np.cumsum(members[:, events.rows[moves]] * changes[moves], axis=1, dtype=np.int64)
    last_of_point = np.flatnonzero(np.diff(points, append=-1))
    first = np.vecdot(counted, correct[0].astype(np.float64)).astype(np.int64)[:, None]
    jumps = np.append(0, points[last_of_point])
    return jumps, first + np.pad(moved[:, last_of_point], ((0, 0), (1, 0)))


def _f1_of_each(confidences: Floats, predictions: Ints, labels: Ints, members: Bools, values: Floats) -> Floats:
    """Return each subset's macro-F1 at the points of all examples, (H, P)."""
    free = Costs("", np.zeros(predictions.shape[1]))
    # Point p ends where the threshold passes values[p]; the last one never does.
    thresholds = np.append(values, np.inf)
    frontiers = [sweep(confidences[rows], predictions[rows], labels[rows], free, "macro-f1") for rows in members]
    return np.stack([frontier.quality[frontier.index(thresholds)] for frontier in frontiers])
