"""Metrics of predictions, confidences and curves, with their conventions stated.

Numbers that sum up a whole curve, of quality over the share of last-model calls or over cost, depend on conventions
that their names do not state: where a curve starts and ends, what lies between its points, how equal points are
counted. CONVENTIONS states them in one sentence each, to be stored with the number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Literal

import numpy as np

from cauc_ray.numbers.intervals import NormalTest, share
from cauc_ray.numbers.threads import in_threads
from cauc_ray.numbers.types import Bools, Floats, Ints, Summed

# Bins of the calibration error (Guo et al. 2017).
N_BINS = 15
EDGES: Floats = np.arange(1, N_BINS) / N_BINS

_ENDS = (
    "points of equal share count as their mean, and shares 0 and 1, where no point has them, are those of the first "
    "and the last model alone"
)
CONVENTIONS: Mapping[str, str] = {
    "deferral_area": (
        f"Trapezoid area of quality over the share of examples that call the last model, from 0 to 1; {_ENDS}; "
        "normalised, 0 is deferral at random and 1 the oracle's, both from the first model to the last: a method that "
        "fuses, or calls models in between, can exceed 1."
    ),
    "oracle_deferral_area": (
        "Area as deferral_area's where examples are deferred by the last model's correctness less the first's: "
        "gains first, then ties, then losses."
    ),
    "apgr": (
        "Share of the gap between the first and the last model that is recovered, on average over the share of "
        f"last-model calls by the trapezoid rule on all operating points; {_ENDS}; "
        "undefined unless the last model is better."
    ),
    "cpt": (
        "Smallest share of last-model calls that recovers the asked share of the gap between the first and the last "
        "model, linear between points of the running maximum of quality as the share rises, of the points that are "
        f"on validation's upper hull of cost and accuracy; {_ENDS}; undefined unless the last model is better, and "
        "where never reached."
    ),
    "aiq": (
        "Trapezoid area of quality over mean cost, through the points that are on validation's non-decreasing upper "
        "hull of cost and accuracy, from the method's cheapest point to the largest cost among the compared methods, "
        "level after its most expensive point, divided by that largest cost: what lies below its cheapest cost counts "
        "as 0."
    ),
}

# Rows of a block, whose arrays stay in the processor's cache.
_BLOCK_ROWS = 1 << 16

# Shares are counts over n, or sums of such: further digits are rounding errors.
_SHARE_DIGITS = 12

# Classes with larger numbers are numbered anew.
_MOST_CLASSES = 1 << 20

# Two equal means over the same rows may differ by this much through rounding.
_ROUNDING = 1e-12


def accuracy(predictions: Ints, labels: Ints) -> float:
    """Return the share of rows whose prediction is the label.

    >>> accuracy(np.array([0, 1, 1]), np.array([0, 1, 0])) == 2 / 3
    True
    """
    return float(np.mean(predictions == labels))


def macro_f1(predictions: Ints, labels: Ints) -> float:
    """Return the unweighted mean of the classes' F1, over the classes that some row has, as WILDS counts them.

    It is scikit-learn's f1_score(average="macro", labels=unique(labels)).

    Args:
        predictions: Int (N,), not negative.
        labels: Int (N,), not negative.

    >>> macro_f1(np.array([0, 0, 1, 2]), np.array([0, 1, 1, 1])) == (2 / 3 + 2 / 4) / 2
    True
    """
    predictions, labels = numbered(predictions, labels)
    k = int(max(predictions.max(initial=-1), labels.max(initial=-1))) + 1
    hits, of_labels = np.bincount(labels[predictions == labels], minlength=k), np.bincount(labels, minlength=k)
    either, present = of_labels + np.bincount(predictions, minlength=k), of_labels > 0
    return float((2 * hits[present] / either[present]).mean())


def numbered(predictions: Ints, labels: Ints) -> tuple[Ints, Ints]:
    """Return both with classes from 0 on where their numbers are too large to count by, as keys of answers are."""
    if max(predictions.max(initial=-1), labels.max(initial=-1)) < _MOST_CLASSES:
        return predictions, labels
    whole = np.unique(np.concatenate([predictions.ravel(), labels.ravel()]), return_inverse=True)[1]
    return whole[: predictions.size].reshape(predictions.shape), whole[predictions.size :].reshape(labels.shape)


def nll(log_probabilities: Floats, labels: Ints) -> float:
    """Return the mean negative log probability of the labels, in nats.

    Args:
        log_probabilities: Float (N, K).
        labels: Int (N,).
    """
    return float(-log_probabilities[np.arange(len(labels)), labels].mean(dtype=np.float64))


def brier(probabilities: Floats, labels: Ints) -> float:
    """Return the mean over rows of sum_k (p_k - [k is the label])^2 (Brier, 1950): between 0 and 2.

    Args:
        probabilities: Float (N, K).
        labels: Int (N,).
    """
    of_label = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    squares = (probabilities.astype(np.float64) ** 2).sum(axis=1)
    return float((squares - 2 * of_label + 1).mean())


def calibration_error(
    confidences: Floats, correct: Bools, bins: Literal["equal-width", "equal-mass"] = "equal-width"
) -> float:
    """Return the expected calibration error: sum over bins of n_b / n |accuracy_b - mean confidence_b|.

    Args:
        confidences: Float (N,) in [0, 1].
        correct: Bool (N,).
        bins: Equal-width bins are [b / 15, (b + 1) / 15), with confidence 1 in the last (Guo et al. 2017); equal-mass
            bins hold the rows in order of confidence, their sizes differing by one at most.

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
    return bins_of(confidences, np.arange(1, n_bins) / n_bins)


def bins_of(values: Floats, edges: Floats) -> Ints:
    """Return how many edges each value reaches, int (N,).

    Args:
        values: Float (N,).
        edges: Up to 127, float (B - 1,).
    """
    # Of few edges, a comparison with each is faster than a binary search, which mispredicts its branches.
    reached = np.zeros(len(values), dtype=np.int8)
    for edge in edges:
        reached += values >= edge
    return reached.astype(np.intp)


@dataclass(frozen=True, slots=True)
class CalibrationSums(Summed):
    """Sums over n rows for the calibration error and its test.

    Attributes:
        gaps: Float64 (B,), by bin, right answers minus confidences.
        variances: Float64 (B,), the variances of the gaps if confidences are calibrated.
        excess: Spiegelhalter's statistic before its division.
        excess_variance: Its variance.
    """

    n: int = 0
    gaps: Floats = field(default_factory=lambda: np.zeros(N_BINS))
    variances: Floats = field(default_factory=lambda: np.zeros(N_BINS))
    excess: float = 0.0
    excess_variance: float = 0.0

    @classmethod
    def of(cls, confidences: Floats, correct: Bools, edges: Floats = EDGES) -> CalibrationSums:
        """Return the sums of rows.

        Args:
            confidences: Float (n,).
            correct: Bool (n,).
            edges: Edges between the bins, (B - 1,).
        """
        blocks = [slice(start, start + _BLOCK_ROWS) for start in range(0, max(1, len(correct)), _BLOCK_ROWS)]
        of_blocks = in_threads(lambda rows: cls._of_block(confidences[rows], correct[rows], edges), blocks)
        return reduce(cls.__add__, of_blocks)

    @classmethod
    def _of_block(cls, confidences: Floats, correct: Bools, edges: Floats) -> CalibrationSums:
        p = confidences.astype(np.float64)
        gaps, variances, slope = correct - p, p * (1 - p), 1 - 2 * p
        index = bins_of(p, edges)
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


def worsening(before: Floats, after: Floats, correct: Bools) -> NormalTest:
    """Test whether right answers are nearer to the confidences p before a change than to those after it, q.

    Both are equally near, in squares, if answers are right with probability m = (p + q) / 2: sum (p - q) (c - m), with
    c = 1 where right, then has mean 0 and variance sum (p - q)^2 m (1 - m). Above 0, the change made them worse.

    Args:
        before: Confidences, float (N,).
        after: Confidences in the same answers, float (N,).
        correct: Which of these are right, bool (N,).

    >>> worsening(np.full(100, 0.9), np.full(100, 0.6), np.arange(100) < 90).z
    3.464...
    """
    change, middle = before - after, (before + after) / 2
    deviation = math.sqrt((change**2 * middle * (1 - middle)).sum())
    return NormalTest(float((change * (correct - middle)).sum()) / deviation if deviation else 0.0)


@dataclass(frozen=True, slots=True)
class Reliability:
    """A reliability diagram of B equal-width bins; NaN in bins without rows.

    Attributes:
        centres: Float64 (B,).
        confidence: Float64 (B,), mean.
        accuracy: Float64 (B,).
        low: Lower end of its 95 % Wilson interval, float64 (B,).
        high: Upper end, float64 (B,).
        counts: Rows, int (B,).
    """

    centres: Floats
    confidence: Floats
    accuracy: Floats
    low: Floats
    high: Floats
    counts: Ints


def reliability_bins(confidences: Floats, correct: Bools) -> Reliability:
    """Return the reliability diagram whose gaps calibration_error adds up, over the same bins.

    Args:
        confidences: Float (N,) in [0, 1].
        correct: Bool (N,).

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
        accuracy=np.array([interval.value for interval in shares]),
        low=np.array([interval.low for interval in shares]),
        high=np.array([interval.high for interval in shares]),
        counts=counts,
    )


def aurc(confidences: Floats, correct: Bools) -> float:
    """Return the area under the risk-coverage curve: the mean over k of the error among the k most confident.

    Rows of equal confidence are averaged over all their orders (each counts with their mean error), so the value does
    not depend on the order of the rows.

    Args:
        confidences: Float (N,).
        correct: Bool (N,).

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


def deferral_area(
    shares: Floats, quality: Floats, first: float, last: float, oracle_area: float | None = None
) -> float | None:
    """Return the area of quality over the share of examples deferred to the last model (Gupta et al., ICLR 2024).

    Chance and oracle use the first and the last model only: if a method fuses, or calls models in between, neither 0
    nor 1 is a bound, and the number only compares methods on one chain.

    Args:
        shares: Float (P,) in [0, 1], in any order.
        quality: Float (P,).
        first: Quality of the first model alone.
        last: Quality of the last model alone.
        oracle_area: By oracle_deferral_area, to normalise: (area - chance) / (oracle area - chance), where deferral at
            random has chance = (first + last) / 2; None for the area itself.

    Returns:
        The area; None unless the oracle is better than chance, for example if both models are right on the same rows.

    >>> deferral_area(np.array([0.0, 0.5, 1.0]), np.array([0.6, 0.8, 0.8]), first=0.6, last=0.8)
    0.75
    """
    at, values = _curve(shares, quality, first, last)
    area = float(np.trapezoid(values, at))
    if oracle_area is None:
        return area
    chance = (first + last) / 2
    if oracle_area - chance <= _ROUNDING:
        return None
    return float((area - chance) / (oracle_area - chance))


def oracle_deferral_area(first_correct: Bools, last_correct: Bools) -> float:
    """Return the largest possible deferral_area: gains are deferred first, then ties, losses last.

    With g and l the shares of gains and losses, the curve rises by g, stays level and falls by l, each at slope 1:
    first + g (1 - g / 2) - l^2 / 2.

    Args:
        first_correct: Right answers of the first model, bool (N,).
        last_correct: Right answers of the last model, bool (N,).

    >>> oracle_deferral_area(np.array([True, False]), np.array([True, True]))
    0.875
    """
    gain, loss = float(np.mean(last_correct & ~first_correct)), float(np.mean(first_correct & ~last_correct))
    return float(np.mean(first_correct)) + gain * (1 - gain / 2) - loss**2 / 2


def apgr(shares: Floats, quality: Floats, first: float, last: float) -> float | None:
    """Return the average performance gap recovered of two models (Ong et al., RouteLLM, ICLR 2025).

    Arguments as deferral_area's. The gap recovered at a point is (quality - first) / (last - first); it may
    exceed 1. Returns None unless the last model is better: without a gap it is undefined, and with a negative
    one a better router would have a lower value.

    >>> apgr(np.array([0.5]), np.array([0.75]), first=0.5, last=0.75)
    0.75
    """
    area = deferral_area(shares, quality, first, last)
    return None if area is None or last - first <= _ROUNDING else (area - first) / (last - first)


def cpt(shares: Floats, quality: Floats, first: float, last: float, q: float) -> float | None:
    """Return the smallest share of last-model calls that recovers q of the gap (Ong et al., RouteLLM, ICLR 2025).

    Arguments as deferral_area's; q: share of the gap, as 0.5 for CPT(50%).
    Quality need not rise with the share, and interpolating the share over a quality that is not monotone gives
    a value that depends on the order of the points. The running maximum is monotone, and can be realised: the last
    model need not be called more often than at the best point so far. Returns None if q is never reached, and if
    apgr is undefined.

    >>> cpt(np.array([0.5]), np.array([0.75]), first=0.5, last=0.75, q=0.5)
    0.25
    """
    at, values = _curve(shares, quality, first, last)
    if last - first <= _ROUNDING:
        return None
    recovered = np.maximum.accumulate((values - first) / (last - first))
    if recovered[-1] < q:
        return None
    first_reached = int(np.argmax(recovered >= q))
    if first_reached == 0:
        return float(at[0])
    around = slice(first_reached - 1, first_reached + 1)
    return float(np.interp(q, recovered[around], at[around]))


def aiq(costs: Floats, quality: Floats, largest_cost: float) -> float | None:
    """Return the average improvement in quality (Hu et al., RouterBench, 2024), by CONVENTIONS["aiq"].

    A method mixes neighbouring points at random, so that its quality is linear between them. Which points are mixed is
    chosen on other rows than those of costs and quality (upper_hull): the best of many points is good by chance.

    Args:
        costs: Mean costs of the chosen operating points, float (P,), P at least 1.
        quality: Their quality, float (P,).
        largest_cost: Largest mean cost among all methods compared.

    Returns:
        Area over the largest cost; None if all costs are 0.

    >>> aiq(np.array([1.0, 2.0]), np.array([0.5, 0.75]), largest_cost=4.0)
    0.53125
    """
    if largest_cost == 0:
        return None
    order = np.lexsort((quality, costs))
    area = np.trapezoid(np.append(quality[order], quality[order[-1]]), np.append(costs[order], largest_cost))
    return round(float(area / largest_cost), 12)  # at the largest cost, only a rounding error is left


def upper_hull(costs: Floats, quality: Floats, *, falling: bool = False) -> Ints:
    """Return the indices of the points on the upper concave hull, by rising cost, int (H,).

    Mixing two neighbours at random realises the points between them.

    Args:
        costs: Float (P,).
        quality: Float (P,).
        falling: Whether the hull ends at the most expensive point, not at the best one (the cheapest of equal quality).
            It begins at the cheapest (the best of equal cost).

    >>> upper_hull(np.array([3.0, 2.0, 1.0]), np.array([0.9, 0.6, 0.5]))
    array([2, 0])
    """
    order = np.lexsort((-quality, costs))
    # Only records can be on a hull that never falls; among equal costs, only the first is one.
    rising = costs[order] if falling else np.maximum.accumulate(quality[order])
    hull: list[int] = []
    for point in order[np.r_[True, rising[1:] > rising[:-1]]].tolist():
        while len(hull) > 1 and not _above(costs, quality, hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return np.array(hull)


def _above(costs: Floats, quality: Floats, left: int, middle: int, right: int) -> bool:
    """Return whether the middle point lies above the line from the left one to the right one."""
    run, rise = costs[right] - costs[left], quality[right] - quality[left]
    return bool((quality[middle] - quality[left]) * run > rise * (costs[middle] - costs[left]))


def _curve(shares: Floats, quality: Floats, first: float, last: float) -> tuple[Floats, Floats]:
    """Return the shares from 0 to 1, each once and rising, and the quality at each, float64 (P,)."""
    at, groups = np.unique(np.round(shares.astype(np.float64), _SHARE_DIGITS), return_inverse=True)
    values = np.bincount(groups, weights=quality) / np.bincount(groups)
    if at[0] > 0:
        at, values = np.append(0.0, at), np.append(first, values)
    if at[-1] < 1:
        at, values = np.append(at, 1.0), np.append(values, last)
    return at, values
