"""Evidence on the mean of bounded differences, by betting; it is valid for any number of rows, and at any time.

A bet multiplies a capital of 1 by 1 + b x with each difference x in [-1, 1], b fixed. Where the mean of x is at most 0
(b > 0), or at least 0 (b < 0), the capital's mean never rises, so the probability that it ever reaches 1 / a is at most
a (Ville, 1939; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024). The same is
true of the average of several bets.
"""

from __future__ import annotations

import math

import numpy as np

from cauc_ray.numbers.types import Floats

# Shares of the capital that are bet. The best is about mean / variance of a difference, which is unknown.
_BETS = 0.95 * 0.5 ** np.arange(8)
# Bets on a mean above 0, and on one below it.
SIDES = np.stack([_BETS, -_BETS])


def log_capital(differences: Floats) -> Floats:
    """Return the logarithms of the capitals after differences in [-1, 1], float64 (2, bets)."""
    capital: Floats = np.log1p(SIDES[..., None] * differences).sum(axis=-1)
    return capital


def log_average(capitals: Floats) -> Floats:
    """Return the logarithms of the average capitals, float64 (...).   capitals: logarithms, float64 (..., bets)."""
    highest = capitals.max(axis=-1)
    average: Floats = highest + np.log(np.exp(capitals - highest[..., None]).mean(axis=-1))
    return average


def is_mean_below(values: Floats, limit: float, highest: float, confidence: float) -> bool:
    """Return whether values in [0, highest] show that their mean is below a limit.

    Where it is not, the probability that they do is at most 1 - confidence.

    >>> is_mean_below(np.full(100, 0.2), 0.5, 1.0, 0.95), is_mean_below(np.full(100, 0.5), 0.5, 1.0, 0.95)
    (True, False)
    """
    on_side = log_average(log_capital((limit - values) / max(limit, highest - limit)))[0]
    return bool(on_side >= -math.log1p(-confidence))


def mean_interval(values: Floats, lowest: float, highest: float, error_rate: float) -> tuple[float, float]:
    """Return an interval of the mean of values in [lowest, highest], for any number of them.

    Args:
        values: Float64 (n,).
        lowest: The lowest value that there can be.
        highest: The highest one.
        error_rate: Probability at most that the interval does not hold the mean.

    >>> low, high = mean_interval(np.repeat([1.0, 11.0], [700, 300]), 1.0, 11.0, 0.05)
    >>> round(low, 1), round(high, 1)
    (3.5, 4.5)
    """
    if lowest == highest:
        return lowest, highest
    distinct, counts = np.unique(values, return_counts=True)
    limit = math.log(2 / error_rate)

    def bound(side: int, inside: float, outside: float) -> float:
        while abs(outside - inside) > 1e-6 * (highest - lowest):
            middle = (inside + outside) / 2
            steps = np.log1p(_BETS[:, None] * side * (distinct - middle) / (highest - lowest))
            if log_average(steps @ counts) >= limit:
                outside = middle
            else:
                inside = middle
        return outside

    mean = float(values.mean())
    return bound(1, mean, lowest), bound(-1, mean, highest)
