"""Axes: where a value stands in a drawing, and which values are written beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# An axis of costs so many times as dear at its end as at its beginning is logarithmic; beyond that, costs next to
# nothing would have all of the room.
_LOG_FROM, _LOG_TO = 25, 1e9


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear or logarithmic axis from a value to another, drawn between two places."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def at(self, value: float) -> float:
        """Return where a value stands, to a hundredth."""
        low, high, value = (math.log(v) if self.is_log else v for v in (self.low, self.high, value))
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 2)

    def ticks(self, most: int) -> tuple[float, ...]:
        """Return round values to write, at most about so many."""
        return _log_ticks(self.low, self.high, most) if self.is_log else _linear_ticks(self.low, self.high, most)


def cost_axis(costs: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis that has room for costs, logarithmic where they span much."""
    low, high = min(costs), max(costs)
    if _LOG_FROM * low <= high <= _LOG_TO * low and low > 0:
        room = (high / low) ** 0.07
        return Axis(low / room, high * room, start, end, is_log=True)
    room = 0.06 * (high - low) or 0.5 * high or 1.0
    return Axis(max(0.0, low - room), high + room, start, end)


def share_axis(shares: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis that has room for shares."""
    low, high = min(shares), max(shares)
    room = 0.08 * (high - low) or 0.02
    return Axis(max(0.0, low - room), min(1.0, high + room), start, end)


def path(points: Iterable[tuple[float, float]]) -> str:
    """Return the path through points, as SVG has it."""
    return "".join(f"{'L' if place else 'M'}{x:g} {y:g}" for place, (x, y) in enumerate(points))


def _linear_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    if not high > low:
        return (low,)
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= least * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    digits = max(0, 2 - math.floor(math.log10(step)))
    return tuple(round(n * step, digits) for n in range(first, last + 1))


def _log_ticks(low: float, high: float, most: int) -> tuple[float, ...]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        within = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(within) <= most:
            return tuple(within)
    every = math.ceil(len(within) / most)
    return tuple(within[::every])
