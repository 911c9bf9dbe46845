"""Metrics of predictions and confidences, with their conventions stated."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

import numpy as np

from cauc_ray.numbers.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Share:
    """A share of n rows with a Wilson interval of the given level; all NaN where n is 0."""

    value: float
    low: float
    high: float
    n: int


def share(n_hits: int, n: int, level: float = 0.95) -> Share:
    """Return n_hits / n with its score interval (Wilson, JASA 1927).

    >>> share(90, 100)
    Share(value=0.9, low=0.8256343384950865, high=0.9447708629393249, n=100)
    """
    if n == 0:
        return Share(float("nan"), float("nan"), float("nan"), 0)
    z = NormalDist().inv_cdf(0.5 + level / 2)
    value = n_hits / n
    centre = (value + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (value * (1 - value) / n + z * z / (4 * n * n)) ** 0.5
    # At 0 and 1 the interval ends there exactly; rounding would put it a hair to the side.
    low = 0.0 if n_hits == 0 else centre - half
    high = 1.0 if n_hits == n else centre + half
    return Share(value, low, high, n)


def accuracy(predictions: Ints, labels: Ints) -> float:
    """Return the share of rows whose prediction is the label.

    >>> accuracy(np.array([0, 1, 1]), np.array([0, 1, 0])) == 2 / 3
    True
    """
    return float(np.mean(predictions == labels))


def macro_f1(predictions: Ints, labels: Ints) -> float:
    """Return the unweighted mean of the classes' F1, as scikit-learn's f1_score(average="macro") has it.

    predictions, labels: int (N,), not negative. The classes are those that occur among the predictions or
    the labels; WILDS counts only those among the labels, which differs where a class is predicted that no
    row has.

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
    confidences: Floats,
    correct: Bools,
    bins: Literal["equal-width", "equal-mass"] = "equal-width",
    n_bins: int = 15,
) -> float:
    """Return the expected calibration error: sum over bins of n_b / n |accuracy_b - mean confidence_b|.

    confidences: float (N,) in [0, 1].   correct: bool (N,).
    Equal-width bins are [b / n_bins, (b + 1) / n_bins), with confidence 1 in the last (Guo et al. 2017 use
    15 of them); equal-mass bins hold the rows in order of confidence, their sizes differing by one at most.

    >>> calibration_error(np.array([0.8, 0.8, 0.8, 0.8]), np.array([True, True, True, False]))  # |0.75 - 0.8|
    0.05...
    """
    n = len(confidences)
    if bins == "equal-width":
        gaps = calibration_gaps(confidences, correct, n_bins)
    else:
        order = np.argsort(confidences, kind="stable")
        index = np.empty(n, dtype=np.intp)
        index[order] = np.arange(n) * n_bins // n
        excess = np.asarray(correct, np.float64) - confidences
        gaps = np.bincount(index, weights=excess, minlength=n_bins).astype(float)
    return float(np.abs(gaps).sum() / n)


def calibration_gaps(confidences: Floats, correct: Bools, n_bins: int = 15) -> Floats:
    """Return by how much more rows of each equal-width bin are right than their confidences say, float64 (n_bins,).

    Summed over the rows of a bin: gaps of several sets of rows add up to those of all, of which calibration_error is
    the sum of magnitudes over the number of rows. Arguments are those of calibration_error.
    """
    excess = np.asarray(correct, np.float64) - confidences
    gaps: Floats = np.bincount(equal_width_bins(confidences, n_bins), weights=excess, minlength=n_bins).astype(float)
    return gaps


def equal_width_bins(confidences: Floats, n_bins: int) -> Ints:
    """Return the equal-width bin of each confidence, as calibration_error has them, int (N,)."""
    # Against the bins' edges: multiplying by n_bins would put some edges into the bin below.
    edges = np.arange(1, n_bins) / n_bins
    return np.searchsorted(edges, confidences, side="right")


def aurc(confidences: Floats, correct: Bools) -> float:
    """Return the area under the risk-coverage curve: the mean over k of the error among the k most confident.

    confidences: float (N,).   correct: bool (N,).
    Rows of equal confidence count in every order of them alike (their mean error in place of each one's), so
    that the value does not depend on the order of the rows.

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
