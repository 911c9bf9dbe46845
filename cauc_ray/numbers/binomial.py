"""Exact binomial tails and the confidence bound that inverts them, in numbers of standard Python alone."""

from __future__ import annotations

import math

from cauc_ray.errors import DataError

# Below this a continued fraction's denominator counts as 0, which it only passes on its way.
_TINY = 1e-300
_PRECISION = 1e-15
_MOST_TERMS = 100_000


def binomial_tail(n_hits: int, n: int, probability: float) -> float:
    """Return P(X <= n_hits) for X ~ Binomial(n, probability), exactly up to rounding.

    It is the p-value of the hypothesis that errors are as likely as that or likelier, where n_hits of n rows are wrong.
    Raises DataError unless 0 <= n_hits <= n and 0 <= probability <= 1.

    >>> binomial_tail(0, 59, 0.05)  # 0.95 ** 59
    0.0484...
    """
    _require_counts(n_hits, n)
    if not 0 <= probability <= 1:
        raise DataError(f"a probability lies between 0 and 1, got {probability}")
    if n_hits == n or probability == 0:
        return 1.0
    if probability == 1:
        return 0.0
    # The tail is the regularised incomplete beta I_{1-p}(n - k, k + 1).
    return _incomplete_beta(n - n_hits, n_hits + 1, probability)


def risk_upper_bound(n_wrong: int, n: int, confidence: float) -> float:
    """Return the exact upper confidence bound of a risk (Clopper and Pearson, Biometrika 1934), one-sided.

    The largest risk at which so few wrong rows of n still have a probability of 1 - confidence; 1 where n is 0, since
    nothing is known of it then. Raises DataError unless 0 <= n_wrong <= n and 0 < confidence < 1.

    >>> risk_upper_bound(0, 59, 0.95)  # 1 - 0.05 ** (1 / 59)
    0.0495...
    """
    _require_counts(n_wrong, n)
    if not 0 < confidence < 1:
        raise DataError(f"a confidence lies between 0 and 1, got {confidence}")
    if n_wrong == n:
        return 1.0
    low, high = n_wrong / n, 1.0
    while low < (middle := low + (high - low) / 2) < high:
        if binomial_tail(n_wrong, n, middle) > 1 - confidence:
            low = middle
        else:
            high = middle
    return high


def least_accepted(risk: float, confidence: float) -> int:
    """Return of how many rows none may be wrong for the bound of their risk to lie at the given one or below.

    >>> least_accepted(0.05, 0.95)
    59
    """
    n = max(1, math.ceil(math.log1p(-confidence) / math.log1p(-risk)) - 1)
    while binomial_tail(0, n, risk) > 1 - confidence:
        n += 1
    return n


def _require_counts(n_hits: int, n: int) -> None:
    if not 0 <= n_hits <= n:
        raise DataError(f"counted are 0 to n rows of n, got {n_hits} of {n}")


def _incomplete_beta(a: int, b: int, p: float) -> float:
    """Return I_{1-p}(a, b) for 0 < p < 1.

    It takes p, not x = 1 - p: of a small risk nothing may be lost.
    """
    x = 1 - p
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log1p(-p) + b * math.log(p)
    front = math.exp(log_front)
    # The fraction converges fast on this side of the mean; the other side is its complement.
    if x < (a + 1) / (a + b + 2):
        return min(1.0, front * _fraction(a, b, x) / a)
    return max(0.0, 1 - front * _fraction(b, a, p) / b)


def _fraction(a: int, b: int, x: float) -> float:
    """Return the continued fraction of the incomplete beta (DLMF 8.17.22) by Lentz's method."""
    c, d = 1.0, _inverse(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, _MOST_TERMS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d, c = _inverse(1 + term * d), 1 + term / (c if abs(c) > _TINY else _TINY)
            value *= c * d
        if abs(c * d - 1) < _PRECISION:
            break
    return value


def _inverse(value: float) -> float:
    return 1 / (value if abs(value) > _TINY else _TINY)
