"""What confidences promise against what came: the reliability diagram, a test without bins, accepted rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.metrics import equal_width_bins, share
from cauc_ray.numbers.types import Bools, Floats, Ints


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


@dataclass(frozen=True, slots=True)
class CalibrationTest:
    """A statistic that is standard normal where confidences are calibrated, and its two-sided p-value."""

    z: float
    p_value: float


def reliability_bins(confidences: Floats, correct: Bools, n_bins: int = 15) -> Reliability:
    """Return the reliability diagram whose gaps metrics.calibration_error adds up, over the same bins.

    confidences: float (N,) in [0, 1].   correct: bool (N,). Raises DataError where they are not that, or empty.

    >>> reliability_bins(np.array([0.9, 0.8, 0.3]), np.array([True, False, False]), n_bins=2).accuracy
    array([0. , 0.5])
    """
    _require_rows(confidences, correct)
    index = equal_width_bins(confidences, n_bins)
    counts = np.bincount(index, minlength=n_bins)
    hits = np.bincount(index[correct], minlength=n_bins)
    shares = [share(int(n_hits), int(n)) for n_hits, n in zip(hits, counts, strict=True)]
    sums = np.bincount(index, weights=confidences, minlength=n_bins)
    return Reliability(
        centres=(np.arange(n_bins) + 0.5) / n_bins,
        confidence=np.where(counts > 0, sums / np.maximum(counts, 1), np.nan),
        accuracy=np.array([each.value for each in shares]),
        low=np.array([each.low for each in shares]),
        high=np.array([each.high for each in shares]),
        counts=counts,
    )


def spiegelhalter_z(confidences: Floats, correct: Bools) -> CalibrationTest | None:
    """Test calibration without bins (Spiegelhalter, Statistics in Medicine 1986).

    z = sum (c - p) (1 - 2 p) / sqrt(sum (1 - 2 p)^2 p (1 - p)) for c = 1 where right: by how many standard
    deviations the Brier score exceeds what calibrated confidences would give. Above 0 they are too extreme.
    Arguments and errors as reliability_bins'. Returns None where every confidence is 0, 1/2 or 1: such rows have no
    part in the variance.

    >>> spiegelhalter_z(np.array([0.9, 0.9]), np.array([True, False])).z
    1.885...
    """
    _require_rows(confidences, correct)
    p = confidences.astype(np.float64)
    slope = 1 - 2 * p
    variance = float((slope**2 * p * (1 - p)).sum())
    if variance == 0:
        return None
    z = float(((correct - p) * slope).sum()) / math.sqrt(variance)
    return CalibrationTest(z, math.erfc(abs(z) / math.sqrt(2)))


def _require_rows(confidences: Floats, correct: Bools) -> None:
    if confidences.shape != correct.shape or correct.ndim != 1 or not len(correct):
        raise DataError(
            f"reliability needs confidences and correctness of the same rows, (N,) and at least one; "
            f"got {confidences.shape} and {correct.shape}"
        )
    bad = np.flatnonzero(~((confidences >= 0) & (confidences <= 1)))
    if len(bad):
        row = int(bad[0])
        raise DataError(f"row {row}: confidence {confidences[row]} is not in [0, 1]")
