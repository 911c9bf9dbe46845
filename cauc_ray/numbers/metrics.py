"""Metrics of predictions and confidences, with their conventions stated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cauc_ray.numbers.intervals import NormalTest, share
from cauc_ray.numbers.types import Bools, Floats, Ints, Summed

# Bins of the calibration error (Guo et al. 2017).
N_BINS = 15
EDGES: Floats = np.arange(1, N_BINS) / N_BINS


def accuracy(predictions: Ints, labels: Ints) -> float:
    """Return the share of rows whose prediction is the label.

    >>> accuracy(np.array([0, 1, 1]), np.array([0, 1, 0])) == 2 / 3
    True
    """
    return float(np.mean(predictions == labels))


def macro_f1(predictions: Ints, labels: Ints) -> float:
    """Return the unweighted mean of the classes' F1, equal to scikit-learn's f1_score(average="macro").

    predictions, labels: int (N,), not negative. The classes are those that occur among the predictions or
    the labels; WILDS counts only those among the labels, which differs if a class is predicted that no row
    has.

    >>> macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1])) == (2 / 3 + 2 / 3) / 2
    True
    """
    k = int(max(predictions.max(initial=-1), labels.max(initial=-1))) + 1
    hits = np.bincount(labels[predictions == labels], minlength=k)
    either = np.bincount(labels, minlength=k) + np.bincount(predictions, minlength=k)
    return float((2 * hits[either > 0] / either[either > 0]).mean())


def nll(log_probabilities: Floats, labels: Ints) -> float:
    """Return the mean negative log probability of the labels, in nats.

    log_probabilities: float (N, K).   labels: int (N,).
    """
    return float(-log_probabilities[np.arange(len(labels)), labels].mean(dtype=np.float64))


def brier(probabilities: Floats, labels: Ints) -> float:
    """Return the mean over rows of sum_k (p_k - [k is the label])^2 (Brier, 1950): between 0 and 2.

    probabilities: float (N, K).   labels: int (N,).
    """
    of_label = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    squares = (probabilities.astype(np.float64) ** 2).sum(axis=1)
    return float((squares - 2 * of_label + 1).mean())


def calibration_error(
    confidences: Floats, correct: Bools, bins: Literal["equal-width", "equal-mass"] = "equal-width"
) -> float:
    """Return the expected calibration error: sum over bins of n_b / n |accuracy_b - mean confidence_b|.

    confidences: float (N,) in [0, 1].   correct: bool (N,).
    Equal-width bins are [b / 15, (b + 1) / 15), with confidence 1 in the last (Guo et al. 2017); equal-mass bins hold
    the rows in order of confidence, their sizes differing by one at most.

    >>> calibration_error(np.array([0.8, 0.8, 0.8, 0.8]), np.array([True, True, True, False]))  # |0.75 - 0.8|
    0.05...
    """
    if bins == "equal-width":
        return CalibrationSums.of(confidences, correct).error
    n = len(confidences)
    index = np.empty(n, dtype=np.intp)
    index[np.argsort(confidences, kind="stable")] = np.arange(n) * N_BINS // n
    gaps = np.bincount(index, weights=np.asarray(correct, np.float64) - confidences, minlength=N_BINS)
    return float(np.abs(gaps).sum() / n)


def equal_width_bins(confidences: Floats, n_bins: int) -> Ints:
    """Return the index of each confidence's equal-width bin, as in calibration_error, int (N,)."""
    # Compare with the bins' edges: multiplying by n_bins would put some edges into the bin below.
    edges = np.arange(1, n_bins) / n_bins
    return np.searchsorted(edges, confidences, side="right")


@dataclass(frozen=True, slots=True)
class CalibrationSums(Summed):
    """Sums over n rows for the calibration error and its test.

    gaps: float64 (B,), by bin, right answers minus confidences.   variances: float64 (B,), the variances of the gaps if
    confidences are calibrated.   excess, excess_variance: of Spiegelhalter's statistic.
    """

    n: int = 0
    gaps: Floats = field(default_factory=lambda: np.zeros(N_BINS))
    variances: Floats = field(default_factory=lambda: np.zeros(N_BINS))
    excess: float = 0.0
    excess_variance: float = 0.0

    @classmethod
    def of(cls, confidences: Floats, correct: Bools, edges: Floats = EDGES) -> CalibrationSums:
        """Return the sums of rows.   confidences: float (n,).   correct: bool (n,).   edges: of the bins, (B - 1,)."""
        p = confidences.astype(np.float64)
        gaps, variances, slope = correct - p, p * (1 - p), 1 - 2 * p
        index = np.searchsorted(edges, p, side="right")
        return cls(
            n=len(p),
            gaps=np.bincount(index, weights=gaps, minlength=len(edges) + 1).astype(float),
            variances=np.bincount(index, weights=variances, minlength=len(edges) + 1).astype(float),
            excess=float((gaps * slope).sum()),
            excess_variance=float((slope**2 * variances).sum()),
        )

    @property
    def error(self) -> float:
        """Return the expected calibration error."""
        return float(np.abs(self.gaps).sum()) / self.n

    @property
    def error_by_chance(self) -> float:
        """Return the calibration error expected of calibrated confidences, with normal gaps in each bin."""
        return float(np.sqrt(2 / np.pi * self.variances).sum()) / self.n

    @property
    def test(self) -> NormalTest | None:
        """Return a test of calibration without bins (Spiegelhalter, Statistics in Medicine 1986).

        z = sum (c - p) (1 - 2 p) / sqrt(sum (1 - 2 p)^2 p (1 - p)) for c = 1 where right: the number of standard
        deviations by which the Brier score exceeds that of calibrated confidences. Above 0, confidences are too
        extreme. None if every confidence is 0, 1/2 or 1: such rows add nothing to the variance.

        >>> CalibrationSums.of(np.array([0.9, 0.9]), np.array([True, False])).test.z
        1.885...
        """
        return NormalTest(self.excess / math.sqrt(self.excess_variance)) if self.excess_variance else None


@dataclass(frozen=True, slots=True)
class Reliability:
    """A reliability diagram of B equal-width bins; NaN in bins without rows.

    centres: float64 (B,).   confidence: float64 (B,), mean.   accuracy, low, high: float64 (B,), with the Wilson
    interval of level 0.95.   counts: int (B,), rows.
    """

    centres: Floats
    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats
    counts: Ints


def reliability_bins(confidences: Floats, correct: Bools) -> Reliability:
    """Return the reliability diagram whose gaps calibration_error adds up, over the same bins.

    confidences: float (N,) in [0, 1].   correct: bool (N,).

    >>> reliability_bins(np.array([0.9, 0.92, 0.3]), np.array([True, False, False])).accuracy[[13, 4]]
    array([0.5, 0. ])
    """
    index = equal_width_bins(confidences, N_BINS)
    counts = np.bincount(index, minlength=N_BINS)
    hits = np.bincount(index[correct], minlength=N_BINS)
    shares = [share(int(n_hits), int(n)) for n_hits, n in zip(hits, counts, strict=True)]
    sums = np.bincount(index, weights=confidences, minlength=N_BINS)
    return Reliability(
        centres=(np.arange(N_BINS) + 0.5) / N_BINS,
        confidence=np.where(counts > 0, sums / np.maximum(counts, 1), np.nan),
        accuracy=np.array([each.value for each in shares]),
        low=np.array([each.low for each in shares]),
        high=np.array([each.high for each in shares]),
        counts=counts,
    )


def aurc(confidences: Floats, correct: Bools) -> float:
    """Return the area under the risk-coverage curve: the mean over k of the error among the k most confident.

    confidences: float (N,).   correct: bool (N,).
    Rows of equal confidence are averaged over all their orders (each counts with their mean error), so the
    value does not depend on the order of the rows.

    >>> aurc(np.array([0.9, 0.8]), np.array([True, False]))
    0.25
    """
    order = np.argsort(-confidences, kind="stable")
    ranked = confidences[order]
    errors = 1.0 - np.asarray(correct, np.float64)[order]
    starts = np.flatnonzero(np.r_[True, ranked[1:] != ranked[:-1]])
    sizes = np.diff(np.r_[starts, len(ranked)])
    spread = np.repeat(np.add.reduceat(errors, starts) / sizes, sizes)
    return float((np.cumsum(spread) / np.arange(1, len(ranked) + 1)).mean())
