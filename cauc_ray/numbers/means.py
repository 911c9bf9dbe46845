"""Whether two means over different rows differ by more than sampling explains."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of n independent rows and their deviation, in the same unit."""

    value: float
    deviation: float
    n: int


@dataclass(frozen=True, slots=True)
class MeanDifference:
    """By how many standard errors one mean exceeds another, and the two-sided p-value of their being the same."""

    z: float
    p_value: float


def mean_difference(one: Mean, other: Mean) -> MeanDifference:
    """Compare two means by their own deviations (the two-sample z test, whose normal limit needs dozens of rows).

    Where neither varies, a difference beyond the rounding of float32 is infinitely many errors large.

    >>> round(mean_difference(Mean(1.1, 0.5, 400), Mean(1.0, 0.5, 400)).z, 3)
    2.828
    """
    error = math.sqrt(one.deviation**2 / one.n + other.deviation**2 / other.n)
    apart = one.value - other.value
    if abs(apart) <= 1e-6 * max(abs(one.value), abs(other.value)):
        return MeanDifference(0.0, 1.0)
    z = apart / error if error > 0 else math.copysign(math.inf, apart)
    return MeanDifference(z, math.erfc(abs(z) / math.sqrt(2)))
