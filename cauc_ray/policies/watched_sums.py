"""Sums over a stage's answers from which what they are worth is told, whatever the number of rows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

import numpy as np

from cauc_ray.numbers.metrics import Share, calibration_gaps, equal_width_bins, share
from cauc_ray.numbers.reliability import CalibrationTest
from cauc_ray.numbers.types import Bools, Floats

N_ERROR_BINS = 15


def _no_bins() -> Floats:
    return np.zeros(N_ERROR_BINS)


@dataclass(frozen=True, slots=True)
class StageSums:
    """What has been seen of one stage's answers; sums of several sets of rows add up.

    n, confidence, cost, squared_cost: over all answers.   n_outcomes, right: over those with a known label.
    gaps, variances: float64 (15,), of these by bin of confidence: right less confidence, and the variance that this has
    where confidences are calibrated.   excess, excess_variance: of Spiegelhalter's statistic.
    n_compared, agreed: over those that the whole cascade was asked for too.
    """

    n: int = 0
    confidence: float = 0.0
    cost: float = 0.0
    squared_cost: float = 0.0
    n_outcomes: int = 0
    right: int = 0
    gaps: Floats = field(default_factory=_no_bins)
    variances: Floats = field(default_factory=_no_bins)
    excess: float = 0.0
    excess_variance: float = 0.0
    n_compared: int = 0
    agreed: int = 0

    def __add__(self, other: StageSums) -> StageSums:
        return StageSums(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    @classmethod
    def of_answers(cls, confidences: Floats, costs: Floats) -> StageSums:
        """Return the sums of answers.   confidences, costs: float64 (n,)."""
        return cls(
            n=len(costs),
            confidence=float(confidences.sum()),
            cost=float(costs.sum()),
            squared_cost=float((costs**2).sum()),
        )

    @classmethod
    def of_outcomes(cls, confidences: Floats, correct: Bools) -> StageSums:
        """Return the sums of answers whose labels are known.   confidences: float64 (n,).   correct: bool (n,)."""
        slope, variances = 1 - 2 * confidences, confidences * (1 - confidences)
        bins = equal_width_bins(confidences, N_ERROR_BINS)
        return cls(
            n_outcomes=len(correct),
            right=int(correct.sum()),
            gaps=calibration_gaps(confidences, correct, N_ERROR_BINS),
            variances=np.bincount(bins, weights=variances, minlength=N_ERROR_BINS).astype(float),
            excess=float(((correct - confidences) * slope).sum()),
            excess_variance=float((slope**2 * variances).sum()),
        )

    @classmethod
    def of_agreements(cls, agreed: Bools) -> StageSums:
        """Return the sums of answers that the whole cascade was asked for too.   agreed: bool (n,)."""
        return cls(n_compared=len(agreed), agreed=int(agreed.sum()))

    @property
    def accuracy(self) -> Share:
        """Return the share of known answers that are right."""
        return share(self.right, self.n_outcomes)

    @property
    def agreement(self) -> Share:
        """Return the share of compared answers that the whole cascade would have given."""
        return share(self.agreed, self.n_compared)

    @property
    def mean_confidence(self) -> float | None:
        """Return the answers' mean confidence."""
        return self.confidence / self.n if self.n else None

    @property
    def mean_cost(self) -> tuple[float, float] | None:
        """Return the answers' mean cost, and half of its 95 % interval's width, by its normal limit."""
        if not self.n:
            return None
        mean = self.cost / self.n
        variance = max(0.0, self.squared_cost / self.n - mean**2)
        return mean, 1.96 * math.sqrt(variance / self.n)

    @property
    def calibration_error(self) -> float | None:
        """Return the known answers' calibration error over 15 equal-width bins."""
        return float(np.abs(self.gaps).sum()) / self.n_outcomes if self.n_outcomes else None

    @property
    def calibration_error_by_chance(self) -> float | None:
        """Return what calibrated confidences would have on average, were each bin's gap normal."""
        if not self.n_outcomes:
            return None
        return math.sqrt(2 / math.pi) * float(np.sqrt(self.variances).sum()) / self.n_outcomes

    @property
    def calibration_test(self) -> CalibrationTest | None:
        """Return Spiegelhalter's test, as reliability.spiegelhalter_z has it."""
        if self.excess_variance == 0:
            return None
        z = self.excess / math.sqrt(self.excess_variance)
        return CalibrationTest(z, math.erfc(abs(z) / math.sqrt(2)))
