"""The paper's propositions as numbers: what a stage's threshold promises, and what it gives away, beside what came.

Both speak of conditional accuracies, which nobody knows. They are estimated over bins of equal width, cut once more at
the threshold, so that a bin is accepted or deferred whole. Of these estimates each inequality holds to rounding, on
every sample; what bins leave open is how far the estimates are from the population's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Ints

N_BINS = 15


@dataclass(frozen=True, slots=True)
class AcceptedAccuracy:
    """Proposition 1 on n rows that reached a stage.

    epsilon: estimate of E|eta(P) - P|.   epsilon_by_chance: what it would be on average if confidences were calibrated.
    coverage: the share of the rows that is accepted.   mean_confidence, accuracy: of these.
    bound: threshold - epsilon / coverage, below 0 where it says nothing. The last three are NaN where none is accepted.
    """

    n: int
    epsilon: float
    epsilon_by_chance: float
    coverage: float
    mean_confidence: float
    accuracy: float
    bound: float


@dataclass(frozen=True, slots=True)
class ThresholdRegret:
    """Proposition 2 in its general form, on n rows that reached a stage; losses are errors plus weighed costs.

    reference_loss: 1 - threshold.   cost_weight: what a unit of cost counts, in errors.   fallback_loss: its mean.
    fallback_variation: estimate of Delta_fb = E|L_fb(P) - reference loss|.
    regret: estimate of the loss above that of an oracle which knows both conditional losses and sees the confidence.
    bound: epsilon + fallback_variation.
    """

    n: int
    reference_loss: float
    cost_weight: float
    fallback_loss: float
    fallback_variation: float
    regret: float
    bound: float


def accuracy_bound(threshold: float, epsilon: float, coverage: float) -> float:
    """Return the least accuracy of accepted rows (paper, proposition 1): threshold - epsilon / coverage.

    NaN where coverage is 0: of no rows nothing is said.

    >>> round(accuracy_bound(0.9, 0.01, 0.5), 6)
    0.88
    """
    return threshold - epsilon / coverage if coverage > 0 else math.nan


def accepted_accuracy(confidences: Floats, correct: Bools, threshold: float) -> AcceptedAccuracy:
    """Measure proposition 1 at a threshold; a confidence equal to it is accepted.

    confidences: float (n,) in [0, 1], of the rows that reached the stage.   correct: bool (n,), whether its answer is
    right. Raises DataError where they are not of the same rows, or of none.

    >>> found = accepted_accuracy(np.array([0.9, 0.9, 0.6]), np.array([True, False, True]), 0.8)
    >>> found.accuracy, found.bound <= found.accuracy
    (0.5, True)
    """
    bins = _Bins.of(confidences, threshold)
    bins.require(correct)
    n, accepted = len(correct), confidences >= threshold
    epsilon = float(np.abs(bins.sums(correct - confidences)).sum()) / n
    # The mean magnitude of a bin's gap, were it normal with the variance that calibrated confidences give it.
    by_chance = float(np.sqrt(2 / np.pi * bins.sums(confidences * (1 - confidences))).sum()) / n
    n_accepted = int(accepted.sum())
    coverage = n_accepted / n
    return AcceptedAccuracy(
        n=n,
        epsilon=epsilon,
        epsilon_by_chance=by_chance,
        coverage=coverage,
        mean_confidence=float(confidences[accepted].mean()) if n_accepted else math.nan,
        accuracy=float(correct[accepted].mean()) if n_accepted else math.nan,
        bound=accuracy_bound(threshold, epsilon, coverage),
    )


def threshold_regret(
    confidences: Floats,
    correct: Bools,
    fallback_correct: Bools,
    fallback_costs: Floats,
    threshold: float,
) -> ThresholdRegret:
    """Measure proposition 2 at a threshold.

    confidences, correct: as accepted_accuracy has them.   fallback_correct: bool (n,), whether the rest of the cascade
    is right where the row goes on, also for rows that do not.   fallback_costs: float (n,), what the rest costs.
    A threshold is best where it is 1 less the fallback's loss. The weight of a unit of cost is therefore the one at
    which the fallback's mean loss is 1 - threshold, so that only its variation is left; 0 where the threshold is above
    the fallback's own accuracy, which no cost explains. Raises DataError as accepted_accuracy does.

    >>> half = np.array([True, False])
    >>> threshold_regret(np.array([0.9, 0.9]), half, half, np.array([0.0, 0.0]), 0.5).regret
    0.0
    """
    bins = _Bins.of(confidences, threshold)
    bins.require(correct, fallback_correct, fallback_costs)
    n, reference = len(correct), 1 - threshold
    error, cost = 1 - float(fallback_correct.mean()), float(fallback_costs.mean())
    weight = max(0.0, (reference - error) / cost) if cost > 0 else 0.0
    of_fallback = bins.sums(1.0 - fallback_correct + weight * fallback_costs)
    of_accepting = bins.sums(1.0 - correct)
    taken = np.where(bins.accepted, of_accepting, of_fallback)
    variation = float(np.abs(of_fallback - reference * bins.counts).sum()) / n
    epsilon = float(np.abs(bins.sums(correct - confidences)).sum()) / n
    return ThresholdRegret(
        n=n,
        reference_loss=reference,
        cost_weight=weight,
        fallback_loss=error + weight * cost,
        fallback_variation=variation,
        regret=float((taken - np.minimum(of_accepting, of_fallback)).sum()) / n,
        bound=epsilon + variation,
    )


@dataclass(frozen=True, slots=True)
class _Bins:
    """Bins of equal width, each cut at the threshold.   index: int (n,).   counts: int (B,).   accepted: bool (B,)."""

    index: Ints
    counts: Ints
    accepted: Bools

    @classmethod
    def of(cls, confidences: Floats, threshold: float) -> _Bins:
        edges = np.union1d(np.arange(1, N_BINS) / N_BINS, [threshold])
        index = np.searchsorted(edges, confidences, side="right")
        counts = np.bincount(index, minlength=len(edges) + 1)
        return cls(index, counts, np.append(-np.inf, edges) >= threshold)

    def require(self, *rows: Floats | Bools) -> None:
        shapes = [each.shape for each in (self.index, *rows)]
        if len(set(shapes)) > 1 or self.index.ndim != 1 or not len(self.index):
            raise DataError(f"guarantees need arrays of the same rows, (n,) and at least one; got {shapes}")

    def sums(self, values: Floats) -> Floats:
        """Return the sum of the rows' values in each bin, float64 (B,)."""
        sums: Floats = np.bincount(self.index, weights=values, minlength=len(self.counts)).astype(np.float64)
        return sums
