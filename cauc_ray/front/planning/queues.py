"""Rows that wait for a stage of a simulated cascade: those yet to arrive as one sorted array, others in parcels."""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np

from cauc_ray.numbers.types import Floats

NEVER = float("inf")


class WaitingRows(Protocol):
    """Rows in the order in which they can be taken."""

    oldest_ready: float

    def count(self, now: float) -> int:
        """Return the rows that wait now."""

    def take(self, n: int) -> tuple[Floats, float]:
        """Take n rows. Returns when each arrived at the cascade, float (n,), and the sum of when they were ready."""

    def ready_at(self, n: int) -> float:
        """Return when n rows will wait, as far as that is known; NEVER otherwise."""


class Arrivals:
    """Rows that arrive at the first stage.   times: float (N,), rising; oldest_ready is the next one's time."""

    def __init__(self, times: Floats) -> None:
        self._times = times
        self._taken = 0
        self.oldest_ready = self.ready_at(1)

    def arrived(self, now: float) -> int:
        """Return how many have arrived by now, those that were taken included."""
        return int(self._times.searchsorted(now, "right"))

    def time_of(self, place: int) -> float:
        """Return when the row at a place, counted from 0, arrives; NEVER beyond the last."""
        return float(self._times[place]) if place < len(self._times) else NEVER

    def count(self, now: float) -> int:
        """Return the rows that wait now."""
        return self.arrived(now) - self._taken

    def take(self, n: int) -> tuple[Floats, float]:
        """Take n rows: when each arrived, and the sum of that."""
        rows = self._times[self._taken : self._taken + n]
        self._taken += n
        self.oldest_ready = self.ready_at(1)
        return rows, float(rows.sum())

    def ready_at(self, n: int) -> float:
        """Return when n rows will wait."""
        return self.time_of(self._taken + n - 1)


class Parcels:
    """Rows that stages have deferred, in the order in which they came."""

    def __init__(self) -> None:
        self._parcels: deque[tuple[float, Floats]] = deque()
        self._n = 0
        self.oldest_ready = NEVER

    def push(self, rows: Floats, now: float) -> None:
        """Have rows wait from now on.   rows: when each arrived at the cascade."""
        if not self._n:
            self.oldest_ready = now
        self._parcels.append((now, rows))
        self._n += len(rows)

    def count(self, now: float) -> int:
        """Return the rows that wait."""
        return self._n

    def take(self, n: int) -> tuple[Floats, float]:
        """Take n rows: when each arrived at the cascade, and the sum of when they were ready."""
        self._n -= n
        taken, ready_sum = [], 0.0
        while n:
            ready, rows = self._parcels.popleft()
            if len(rows) > n:
                self._parcels.appendleft((ready, rows[n:]))
                rows = rows[:n]
            taken.append(rows)
            ready_sum += ready * len(rows)
            n -= len(rows)
        self.oldest_ready = self._parcels[0][0] if self._parcels else NEVER
        return taken[0] if len(taken) == 1 else np.concatenate(taken), ready_sum

    def ready_at(self, n: int) -> float:
        """Return NEVER: what will be deferred is not known."""
        return NEVER
