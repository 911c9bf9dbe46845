"""Single numbers that sum up a whole curve: of quality over the share of last-model calls, and over cost.

Each depends on conventions that its name does not state: where a curve starts and ends, what lies between its points,
how equal points are counted. CONVENTIONS states them in one sentence each, to be stored with the number.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cauc_ray.numbers.types import Bools, Floats, Ints

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
        f"model, linear between points of the running maximum of quality as the share rises; {_ENDS}; "
        "undefined unless the last model is better, and where never reached."
    ),
    "aiq": (
        "Trapezoid area under the non-decreasing upper concave hull of quality over mean cost, from the method's own "
        "cheapest point to the largest cost among the compared methods, level after its best point, divided by "
        "that largest cost: what lies below the own cheapest cost counts as 0."
    ),
}

# Shares are counts over n, or sums of such: further digits are rounding errors.
_SHARE_DIGITS = 12
# Two equal means over the same rows may differ by this much through rounding.
_ROUNDING = 1e-12


def deferral_area(
    shares: Floats, quality: Floats, first: float, last: float, oracle_area: float | None = None
) -> float | None:
    """Return the area of quality over the share of examples deferred to the last model (Gupta et al., ICLR 2024).

    shares: float (P,) in [0, 1], in any order.   quality: float (P,).   first, last: quality of the two models alone.
    oracle_area: by oracle_deferral_area, to normalise: (area - chance) / (oracle area - chance), where deferral at
    random has chance = (first + last) / 2; None for the area itself.
    Chance and oracle use these two models only: if a method fuses, or calls models in between, neither 0 nor 1 is a
    bound, and the number only compares methods on one chain.
    Returns None if the oracle is no better than chance, for example if both models are right on the same rows.

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

    first_correct, last_correct: bool (N,), whether the first and the last model are right on each row.
    With g and l the shares of gains and losses, the curve rises by g, stays level and falls by l, each at slope 1:
    first + g (1 - g / 2) - l^2 / 2.

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
    there = int(np.argmax(recovered >= q))
    if there == 0:
        return float(at[0])
    return float(np.interp(q, recovered[there - 1 : there + 1], at[there - 1 : there + 1]))


def aiq(costs: Floats, quality: Floats, largest_cost: float) -> float | None:
    """Return the average improvement in quality (Hu et al., RouterBench, 2024), by CONVENTIONS["aiq"].

    costs, quality: float (P,), of a method's operating points.   largest_cost: among all methods compared.
    Returns None if all costs are 0.

    >>> aiq(np.array([1.0, 2.0, 3.0]), np.array([0.5, 0.75, 0.5]), largest_cost=4.0)
    0.53125
    """
    if largest_cost == 0:
        return None
    hull = upper_hull(costs, quality)
    best = hull[-1]
    area = np.trapezoid(np.append(quality[hull], quality[best]), np.append(costs[hull], largest_cost))
    return round(float(area / largest_cost), 12)  # at the largest cost, only a rounding error is left


def upper_hull(costs: Floats, quality: Floats, *, falling: bool = False) -> Ints:
    """Return the indices of the points on the upper concave hull, by rising cost, int (H,).

    costs, quality: float (P,). The hull runs from the cheapest point (the best of equal cost) to the best one (the
    cheapest of equal quality), or, if falling, to the most expensive one. Mixing two neighbours at random realises
    the points between them.

    >>> upper_hull(np.array([3.0, 2.0, 1.0]), np.array([0.9, 0.6, 0.5]))
    array([2, 0])
    """
    order = np.lexsort((-quality, costs))
    # Only records can be on a hull that never falls; among equal costs, only the first is one.
    rising = costs[order] if falling else np.maximum.accumulate(quality[order])
    found: list[int] = []
    for point in order[np.r_[True, rising[1:] > rising[:-1]]].tolist():
        while len(found) > 1 and not _above(costs, quality, found[-2], found[-1], point):
            found.pop()
        found.append(point)
    return np.array(found)


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
