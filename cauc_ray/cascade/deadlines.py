"""When owners' rows have waited long enough for a stage."""

from __future__ import annotations

import heapq
import weakref
from collections.abc import Iterator
from itertools import count
from math import inf

from cauc_ray.cascade.rows import Owner


class Deadlines:
    """Deadlines of owners at stages, by time. An owner that has ended is not kept until its deadline."""

    def __init__(self) -> None:
        self._deadlines: list[tuple[float, int, weakref.ref[Owner], int]] = []
        self._number = count()

    def add(self, owner: Owner, stage: int, at_s: float) -> None:
        """Note when rows of an owner must be answered by a stage."""
        if at_s < inf:
            heapq.heappush(self._deadlines, (at_s, next(self._number), weakref.ref(owner), stage))

    def next_at(self) -> float | None:
        """Return the next deadline of which anybody needs to know."""
        while self._deadlines:
            at_s, _, reference, stage = self._deadlines[0]
            if (owner := reference()) is not None and owner.wants(stage):
                return at_s
            heapq.heappop(self._deadlines)
        return None

    def late(self, now: float) -> Iterator[tuple[Owner, int]]:
        """Take the owners that wait for a stage, or are at it, beyond their deadline there."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, reference, stage = heapq.heappop(self._deadlines)
            if (owner := reference()) is not None and owner.wants(stage) and (owner.at == stage).any():
                yield owner, stage
