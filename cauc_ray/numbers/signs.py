"""Gains against losses on the same rows: which of two ways is right where one alone is, and how sure the sign is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.binomial import binomial_tail
from cauc_ray.numbers.types import Bools

# Of each side of an interval, and of a sign that counts as established: 5 % of being wrong.
CONFIDENCE = 0.95

# Of an interval's ends, which people read in hundredths of a point.
_PRECISION = 1e-9


@dataclass(frozen=True, slots=True)
class Signs:
    """Of n rows, n_gain where the first way alone is right and n_loss where the second is.

    rate: (n_gain - n_loss) / n.   low, high: its interval, exact given how many rows differ; each side errs at most
    1 time in 20, so that it lies above 0 exactly where the gain is established.
    p_gain, p_loss: of so many gains, or losses, or more, were both as likely (exact, one-sided).
    """

    n: int
    n_gain: int
    n_loss: int
    rate: float
    low: float
    high: float
    p_gain: float
    p_loss: float

    @property
    def gains(self) -> bool:
        """Return whether the first way is established to be right more often."""
        return self.p_gain <= 1 - CONFIDENCE

    @property
    def loses(self) -> bool:
        """Return whether it is established to be right less often."""
        return self.p_loss <= 1 - CONFIDENCE

    @property
    def open(self) -> bool:
        """Return whether the two differ on some rows, which do not tell the better one."""
        return self.n_gain + self.n_loss > 0 and not (self.gains or self.loses)


def signs(n_gain: int, n_loss: int, n: int) -> Signs:
    """Return what gains and losses say: the sign test (McNemar, Psychometrika 1947), one-sided and exact.

    Where no row differs the interval is the point 0 and both p-values are 1.
    Raises DataError unless there are rows, and as many as gains and losses.

    >>> found = signs(9, 1, 100)
    >>> round(found.p_gain, 4), found.gains, round(found.low, 3)
    (0.0107, True, 0.021)
    """
    n_differ = n_gain + n_loss
    if n < 1 or min(n_gain, n_loss) < 0 or n_differ > n:
        raise DataError(f"gains and losses are counted among the rows, got {n_gain} and {n_loss} of {n}")
    rate = (n_gain - n_loss) / n
    if n_differ == 0:
        return Signs(n, 0, 0, rate, 0.0, 0.0, 1.0, 1.0)
    p_gain, p_loss = (binomial_tail(hits, n_differ, 0.5) for hits in (n_loss, n_gain))
    most, least = _upper(n_gain, n_differ, p_loss), 1 - _upper(n_loss, n_differ, p_gain)
    return Signs(
        n=n,
        n_gain=n_gain,
        n_loss=n_loss,
        rate=rate,
        low=(2 * least - 1) * n_differ / n,
        high=(2 * most - 1) * n_differ / n,
        p_gain=p_gain,
        p_loss=p_loss,
    )


def signs_of(correct: Bools, other: Bools) -> Signs:
    """Return the signs of one way against another.   correct, other: bool (N,), whether each is right on each row."""
    gains, losses = int(np.sum(correct & ~other)), int(np.sum(other & ~correct))
    return signs(gains, losses, len(correct))


def _upper(n_hits: int, n: int, at_half: float) -> float:
    """Return the share at which so few hits of n, or fewer, still have the probability that an interval leaves out.

    It is binomial.risk_upper_bound to fewer digits, by the Illinois rule in a few steps of it.   at_half: the
    probability at 1/2, on whose right side the share lies however it is rounded.
    """
    if n_hits == n:
        return 1.0
    left_out = 1 - CONFIDENCE
    ends = [n_hits / n, 0.5] if at_half <= left_out else [max(0.5, n_hits / n), 1.0]
    excess = [binomial_tail(n_hits, n, end) - left_out for end in ends]
    share, before, same_side = ends[1], ends[0], -1
    while abs(share - before) > _PRECISION:
        before, share = share, (ends[0] * excess[1] - ends[1] * excess[0]) / (excess[1] - excess[0])
        there = binomial_tail(n_hits, n, share) - left_out
        side = 0 if there > 0 else 1
        if side == same_side:
            excess[1 - side] /= 2  # else the other end would stay for ever
        ends[side], excess[side], same_side = share, there, side
    return share
