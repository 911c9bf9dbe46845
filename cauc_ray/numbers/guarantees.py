"""The paper's propositions as numbers: a stage's guaranteed accuracy and regret next to what was observed.

Both are about conditional accuracies, which are unknown. They are estimated over bins of equal width, split once more
at the threshold so that each bin is accepted or deferred as a whole. For these estimates the inequalities are valid up
to rounding on every sample; the estimates themselves may differ from the population's values.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import numpy as np

from cauc_ray.numbers.metrics import EDGES, CalibrationSums
from cauc_ray.numbers.types import Bools, Floats


@dataclass(frozen=True, slots=True)
class StageGuarantees:
    """Propositions 1 and 2 (in general form) on the n rows that reached a stage; losses are errors plus weighed costs.

    epsilon: estimate of E|eta(P) - P|.   epsilon_by_chance: what it would be on average if confidences were calibrated.
    coverage: the share of rows that is accepted.   accepted_accuracy: of these rows.   accepted_accuracy_bound:
    threshold - epsilon / coverage, its lower bound; both are NaN if no row is accepted.
    threshold_regret: estimate of the excess loss over an oracle that knows both conditional losses and sees the
    confidence.   threshold_regret_bound: epsilon + fallback_variation.
    fallback_variation: estimate of Delta_fb = E|L_fb(P) - reference loss|.   fallback_loss: its mean.
    reference_loss: 1 - threshold.   cost_weight: what a unit of cost counts, in errors.
    """

    n: int
    epsilon: float
    epsilon_by_chance: float
    coverage: float
    accepted_accuracy: float
    accepted_accuracy_bound: float
    threshold_regret: float
    threshold_regret_bound: float
    fallback_variation: float
    fallback_loss: float
    reference_loss: float
    cost_weight: float

    def as_json(self) -> dict[str, float | None]:
        """Return the numbers by name; None for accuracies if no row was accepted."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


def stage_guarantees(
    confidences: Floats, correct: Bools, fallback_correct: Bools, fallback_costs: Floats, threshold: float
) -> StageGuarantees:
    """Evaluate both propositions at a threshold; a confidence equal to it is accepted.

    confidences: float (n,) in [0, 1], of the rows that reached the stage.   correct: bool (n,), whether its answer is
    right.   fallback_correct: bool (n,), whether the rest of the cascade is right where the row goes on, also for rows
    that do not.   fallback_costs: float (n,), what the rest costs.
    A threshold is best where it is 1 less the fallback's loss. The weight of a unit of cost is therefore the one at
    which the fallback's mean loss is 1 - threshold, so that only its variation is left; 0 where the threshold is above
    the fallback's own accuracy, which no cost explains.

    >>> found = stage_guarantees(np.array([0.9, 0.9, 0.6]), np.array([True, False, True]), np.ones(3), np.zeros(3), 0.8)
    >>> found.accepted_accuracy, found.accepted_accuracy_bound <= found.accepted_accuracy
    (0.5, True)
    """
    edges: Floats = np.union1d(EDGES, [threshold])
    index = np.searchsorted(edges, confidences, side="right")

    def by_bin(values: Floats) -> Floats:
        return np.bincount(index, weights=values, minlength=len(edges) + 1).astype(np.float64)

    n, reference, accepted = len(correct), 1 - threshold, confidences >= threshold
    calibration = CalibrationSums.of(confidences, correct, edges)
    coverage = int(accepted.sum()) / n

    error, cost = 1 - float(fallback_correct.mean()), float(fallback_costs.mean())
    weight = max(0.0, (reference - error) / cost) if cost > 0 else 0.0
    of_fallback, of_accepting = by_bin(1.0 - fallback_correct + weight * fallback_costs), by_bin(1.0 - correct)
    taken = np.where(np.append(-np.inf, edges) >= threshold, of_accepting, of_fallback)
    variation = float(np.abs(of_fallback - reference * by_bin(np.ones(n))).sum()) / n
    return StageGuarantees(
        n=n,
        epsilon=calibration.error,
        epsilon_by_chance=calibration.error_by_chance,
        coverage=coverage,
        accepted_accuracy=float(correct[accepted].mean()) if coverage else math.nan,
        accepted_accuracy_bound=threshold - calibration.error / coverage if coverage else math.nan,
        threshold_regret=float((taken - np.minimum(of_accepting, of_fallback)).sum()) / n,
        threshold_regret_bound=calibration.error + variation,
        fallback_variation=variation,
        fallback_loss=error + weight * cost,
        reference_loss=reference,
        cost_weight=weight,
    )
