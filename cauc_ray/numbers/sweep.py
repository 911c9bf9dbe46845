"""The exact sweep of a stopping threshold over all of its distinct operating points.

An example stops at the first stage whose confidence reaches the threshold, which is also the first whose
running maximum does. As the threshold rises past a running maximum the example moves on to the stage where
the maximum next rises, or to the last: a few events per example. One sort of the events and one cumulative
sum give cost and quality at every threshold there can be.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cauc_ray.errors import BudgetError, DataError
from cauc_ray.numbers.chain import Costs, cost_text
from cauc_ray.numbers.metrics import numbered
from cauc_ray.numbers.types import Bools, Floats, Ints

Objective: TypeAlias = Literal["accuracy", "macro-f1"]

# Confidences lie in (0, 1]: the first threshold stops every example at stage 0, the second stops none early.
STOP_ALL, STOP_NONE = 0.0, 2.0

# Mean costs are sums of thousands of float64 terms: rounding must not exclude a point that equals the budget.
COST_TOLERANCE = 1e-9


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """A threshold with its mean cost per example and its quality on the swept examples."""

    threshold: float
    cost: float
    quality: float


def pareto(cost: Floats, quality: Floats | Ints) -> Ints:
    """Return the indices of the Pareto-optimal points, by rising cost.   cost, quality: (P,)."""
    # A cascade's points come by rising cost.
    order = np.arange(len(cost)) if (cost[1:] >= cost[:-1]).all() else np.lexsort((-quality, cost))
    ranked = quality[order]
    better: Ints = order[np.append(True, ranked[1:] > np.maximum.accumulate(ranked)[:-1])]
    points: Ints = better[np.append(cost[better[1:]] > cost[better[:-1]], True)]
    return points


@dataclass(frozen=True, slots=True)
class OperatingPoints:
    """A method's cost and quality at P settings, on the examples where one of them is chosen.

    Attributes:
        settings: Float64 (P,).
        cost: Mean per example, float64 (P,).
        quality: Float64 (P,).
        unit: Unit of the cost.
    """

    settings: Floats
    cost: Floats
    quality: Floats
    unit: str

    def index_of_best(self, budget: float | None = None) -> int:
        """Return which point has the highest quality within the budget (paper, eq. 11); the cheapest among equals.

        Args:
            budget: Mean cost per example, or None for no limit.

        Raises:
            BudgetError: No point is within it.
        """
        within = self._within(budget)
        best = self.quality == self.quality[within].max()
        return int(np.where(within & best, self.cost, np.inf).argmin())

    def index_of_most_expensive(self, budget: float) -> int:
        """Return which point is the most expensive within the budget. Raises BudgetError as index_of_best does."""
        return int(np.where(self._within(budget), self.cost, -np.inf).argmax())

    def pareto(self, most: int) -> OperatingPoints:
        """Return the Pareto-optimal points by rising cost, thinned to at most a number (2 or more).

        index_of_best chooses the same points among them as among all. If there are more, those are kept that are
        best within budgets spaced evenly from the cheapest point's cost to the best one's, both ends included:
        at such a budget nothing is lost, and at any other no more than by rounding it down to the next of them.
        """
        points = pareto(self.cost, self.quality)
        if len(points) > most:
            cost = self.cost[points]
            within = np.searchsorted(cost, np.linspace(cost[0], cost[-1], most), side="right")
            points = points[np.unique(within) - 1]
        return self.some(points)

    def some(self, points: Ints | Bools) -> OperatingPoints:
        """Return some of the points."""
        return OperatingPoints(self.settings[points], self.cost[points], self.quality[points], self.unit)

    def _within(self, budget: float | None) -> Bools:
        if budget is None:
            return np.full(len(self.cost), True)
        within: Bools = self.cost <= most_within(budget)
        if not within.any():
            raise BudgetError(
                f"budget {cost_text(budget, self.unit, 6)} is below the cheapest operating point, "
                f"{cost_text(self.cost.min(), self.unit, 6)}; raise the budget or put a cheaper model first"
            )
        return within


@dataclass(frozen=True, slots=True)
class Frontier(OperatingPoints):
    """All P operating points of a method with one threshold, by rising threshold; settings are thresholds to publish.

    Along them a cascade's cost never falls, and neither does a price-based router's if all calls of a model cost the
    same. Quality is accuracy or macro-F1.

    Attributes:
        confidences: Float64 (P - 1,), rising: point p is valid for thresholds in (confidences[p - 1], confidences[p]].
    """

    confidences: Floats

    def index(self, thresholds: Floats) -> Ints:
        """Return the index of each threshold's point, int (same shape)."""
        return np.searchsorted(self.confidences, thresholds, side="left")

    def best(self, budget: float | None = None) -> OperatingPoint:
        """Return the point of highest quality within the budget; see OperatingPoints.index_of_best."""
        point = self.index_of_best(budget)
        return OperatingPoint(float(self.settings[point]), float(self.cost[point]), float(self.quality[point]))

    def at(self, threshold: float) -> OperatingPoint:
        """Return a threshold's point."""
        point = int(self.index(np.array(threshold)))
        return OperatingPoint(threshold, float(self.cost[point]), float(self.quality[point]))


def sweep(
    confidences: Floats,
    predictions: Ints,
    labels: Ints,
    costs: Costs,
    objective: Objective = "accuracy",
    calls: Bools | None = None,
    events: Events | None = None,
) -> Frontier:
    """Return all distinct operating points of one threshold shared by the non-final stages.

    A confidence equal to the threshold stops.

    Args:
        confidences: Float64 (N, S - 1), of the non-final stages; inf where an example stops at every threshold, -inf
            where it stops at none.
        predictions: Int (N, S), the answer of each example if it stopped at each stage.
        labels: Int (N,).
        costs: Costs of the M models.
        objective: Quality: accuracy, or macro-F1 (see metrics.macro_f1).
        calls: Bool (S, M), which models are called if an example stops at each stage; None for a cascade of all models,
            which calls the stage's own model and those before it.
        events: Moves that the confidences make; None to sort them.

    >>> frontier = sweep(np.array([[0.9], [0.6]]), np.array([[0, 0], [0, 1]]), np.array([0, 1]),
    ...                  Costs("GFLOPs", np.array([1.0, 4.0])))
    >>> frontier.cost, frontier.quality, frontier.settings
    (array([1., 3., 5.]), array([0.5, 1. , 1. ]), array([0.  , 0.75, 2.  ]))
    """
    n, m = predictions.shape
    if n == 0 or confidences.shape != (n, m - 1) or labels.shape != (n,):
        raise DataError(
            f"a sweep needs confidences (N, S - 1), predictions (N, S) and labels (N,); got "
            f"{confidences.shape}, {predictions.shape} and {labels.shape}"
        )
    events = events or Events.of(confidences)
    of_stops = costs.cumulative if calls is None else costs.of_calls(calls)
    ends = events.ends
    cost_change = np.cumsum(events.changes(np.broadcast_to(of_stops, (n, m)).T))[ends]
    cost = of_stops[..., 0].mean() + np.concatenate([[0.0], cost_change / n])

    if objective == "accuracy":
        correct = (predictions == labels[:, None]).T.astype(np.int8)
        n_correct = np.cumsum(events.changes(correct), dtype=np.int64)[ends]
        quality = (int(correct[0].sum()) + np.concatenate([[0], n_correct])) / n
    else:
        quality = _macro_f1_path(events, predictions, labels)
    return _reachable(events.values[ends], cost, quality, costs.unit)


def stops_of(worth: Floats, threshold: float | Floats) -> Ints:
    """Return the first step whose worth reaches a threshold, else the last, int (n,).

    Args:
        worth: Float (n, S).
        threshold: One for all rows, or (n,).
    """
    stops = np.zeros(len(worth), dtype=np.int64)
    goes_on = np.ones(len(stops), dtype=bool)
    for worth_of_stage in worth[:, :-1].T:
        goes_on &= worth_of_stage < threshold
        stops += goes_on
    return stops


def _reachable(values: Floats, cost: Floats, quality: Floats, unit: str) -> Frontier:
    """Return the points that some finite threshold realises.

    Args:
        values: Confidences that separate the E + 1 points, rising, float64 (E,); no finite threshold lies below -inf or
            above inf.
        cost: Float64 (E + 1,).
        quality: Float64 (E + 1,).
        unit: Unit of the cost.
    """
    real = np.isfinite(values)
    if not real.all():
        points = np.append(values > -np.inf, True) & np.append(True, values < np.inf)
        values, cost, quality = values[real], cost[points], quality[points]
    return Frontier(midpoints(values), cost, quality, unit, values)


def midpoints(confidences: Floats) -> Floats:
    """Return the threshold to publish for each of P points, float64 (P,).   confidences: as in Frontier.

    Thresholds lie midway between neighbours, so rounding flips no example. If confidences are probabilities, the ends
    stop every possible example and none; otherwise they lie 1 beyond the outermost confidence, or at the next float
    where 1 is less than the gap between two floats.
    """
    if not len(confidences):
        return np.array([STOP_ALL])
    low, high = confidences[:-1], confidences[1:]
    middle = low + (high - low) / 2
    # Adjacent floats have no middle; the upper one still belongs to the point.
    middle = np.where(middle > low, middle, high)
    first, last = confidences[0], confidences[-1]
    lowest = STOP_ALL if first >= STOP_ALL else min(first - 1, np.nextafter(first, -np.inf))
    highest = STOP_NONE if last < STOP_NONE else max(last + 1, np.nextafter(last, np.inf))
    return np.concatenate([[lowest], middle, [highest]])


def reached_shares(confidences: Floats, thresholds: Floats) -> Floats:
    """Return the share of examples that reach each stage at each threshold, float64 (P, M).

    Args:
        confidences: Float64 (N, M - 1).
        thresholds: Float64 (P,).
    """
    highest = np.maximum.accumulate(confidences, axis=1)
    reached = [np.searchsorted(np.sort(column), thresholds, side="left") for column in highest.T]
    return np.stack([np.full(len(thresholds), len(confidences)), *reached], axis=1) / len(confidences)


def most_within(budget: float) -> float:
    """Return the largest mean cost that counts as within a budget, with room for rounding."""
    return budget + COST_TOLERANCE * abs(budget)


@dataclass(frozen=True, slots=True)
class Events:
    """Moves of examples to deeper stages, in order of the confidence that the rising threshold passes.

    Attributes:
        values: Confidences passed, rising, float64 (E,).
        positions: Stage left times N plus the row of each move, int (E,).
        rises: Which examples leave each stage at a threshold of their own, bool (S - 1, N).
    """

    values: Floats
    positions: Ints
    rises: Bools

    @classmethod
    def of(cls, confidences: Floats) -> Events:
        """Return the moves of examples with some confidences, float64 (N, S - 1)."""
        highest = np.array(confidences.T, order="C")
        for stage in range(1, len(highest)):  # maximum.accumulate takes ten times as long
            np.maximum(highest[stage], highest[stage - 1], out=highest[stage])
        rises: Bools = np.ones(highest.shape, dtype=bool)
        np.greater(highest[1:], highest[:-1], out=rises[1:])
        positions = np.flatnonzero(rises)
        values = highest.ravel()[positions]
        order = np.argsort(values)
        return cls(values[order], positions[order], rises)

    def of_rows(self, rows: Ints) -> Events:
        """Return the moves of some examples, ascending int (n,), without another sort."""
        places = np.full(self.rises.shape, -1)
        places[:, rows] = np.arange(len(self.rises) * len(rows)).reshape(-1, len(rows))
        positions = places.ravel()[self.positions]
        chosen = positions >= 0
        return Events(self.values[chosen], positions[chosen], self.rises.take(rows, axis=1))

    @property
    def ends(self) -> Ints:
        """Return the last move of each distinct value, int."""
        return np.flatnonzero(np.append(self.values[1:] != self.values[:-1], [True] * bool(len(self.values))))

    def changes(self, of_stage: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return each move's change of a quantity that examples have at each stage, (M, N) -> (E,)."""
        change = np.empty(self.rises.shape, dtype=of_stage.dtype)
        following = np.array(of_stage[-1])
        for stage in range(len(change) - 1, -1, -1):
            np.subtract(following, of_stage[stage], out=change[stage])
            np.copyto(following, of_stage[stage], where=self.rises[stage])
        return change.ravel()[self.positions]

    def rows_and_stages(self) -> tuple[Ints, Ints, Ints]:
        """Return the row, the stage left and the stage reached of each move, int (E,)."""
        before, rows = np.divmod(self.positions, self.rises.shape[1])
        stages = np.arange(len(self.rises) + 1, dtype=np.int64)[:, None]
        moves = self.changes(np.broadcast_to(stages, (len(stages), self.rises.shape[1])))
        return rows, before, before + moves


def _macro_f1_path(events: Events, predictions: Ints, labels: Ints) -> Floats:
    """Return macro-F1 at every operating point, float64 (P,).

    A move changes the F1 of two classes: that of the old answer and that of the new one. Sorted by class, cumulative
    counts give each class's F1 initially and after each of its changes; the differences, summed in order of confidence,
    give the sum over classes.
    """
    predictions, labels = numbered(predictions, labels)
    k, first = int(max(predictions.max(), labels.max())) + 1, predictions[:, 0]
    rows, before, after = events.rows_and_stages()
    old, new = predictions[rows, before], predictions[rows, after]
    moved = np.flatnonzero(old != new)
    # Each class's initial counts, at time 0, then what each move removes and adds.
    classes = np.append(np.arange(k), np.stack([old[moved], new[moved]], axis=1))
    answers = np.append(np.bincount(first, minlength=k), np.tile([-1, 1], len(moved)))
    right = classes[k:] == np.repeat(labels[rows[moved]], 2)
    hits = np.append(np.bincount(labels[first == labels], minlength=k), np.where(right, answers[k:], 0))
    time = np.append(np.zeros(k, dtype=np.int64), np.repeat(moved + 1, 2))

    order = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(order < k)
    either = np.bincount(labels, minlength=k)[classes[order]] + _grouped_cumsum(answers[order], starts)
    f1 = np.divide(2.0 * _grouped_cumsum(hits[order], starts), either, out=np.zeros(len(order)), where=either > 0)
    f1_sum = np.cumsum(np.bincount(time[order], _changes(f1, starts), len(events.values) + 1))
    # Rounded, so that equal macro-F1 values stay equal after thousands of additions; without rows, a class has F1 0.
    macro: Floats = np.round(f1_sum[np.append(0, events.ends + 1)] / len(np.unique(labels)), 12)
    return macro


def _grouped_cumsum(values: Ints, starts: Ints) -> Ints:
    """Return cumulative sums that restart at each of starts, the first of which is 0."""
    total = np.cumsum(values)
    before = total[starts] - values[starts]
    return total - np.repeat(before, np.diff(np.append(starts, len(values))))


def _changes(values: Floats, starts: Ints) -> Floats:
    """Return each value minus the one before it; at starts, minus 0."""
    changes = np.diff(values, prepend=0.0)
    changes[starts] = values[starts]
    return changes
