"""The rows that wait for a stage, in the order in which they go.

Rows of a higher priority go first, however long others wait. Requests of one priority take turns: a batch's worth in a
turn, half of one where shorter requests wait, which the next batch has. Rows without a deadline go in the order in
which they came.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import inf

from cauc_ray.cascade.rows import Rows


@dataclass(slots=True)
class WaitingRows:
    """A queue of rows.

    Attributes:
        batch_size: Rows in a full batch.
        n_rows: Rows that wait.
        n_bytes: What they take.
    """

    batch_size: int
    n_rows: int = 0
    n_bytes: float = 0.0
    _levels: dict[int, deque[Rows]] = field(default_factory=dict)  # by priority, in its order

    @property
    def first(self) -> Rows:
        """Return the rows that go first."""
        return next(iter(self._levels.values()))[0]

    def push(self, rows: Rows) -> None:
        """Have rows wait behind those of their priority."""
        priority = rows.owner.priority
        if priority not in self._levels:
            self._levels[priority] = deque()
            if len(self._levels) > 1:
                self._levels = dict(sorted(self._levels.items()))
        self._levels[priority].append(rows)
        self.n_rows += len(rows)
        self.n_bytes += rows.n_bytes

    def take(self, n: int) -> list[Rows]:
        """Take up to n rows whose owners are of one kind."""
        kind, batch = self.first.owner.kind, list[Rows]()
        for priority, level in list(self._levels.items()):
            n -= self._take_turns(level, kind, n, batch)
            if not level:
                del self._levels[priority]
        self._uncount(*batch)
        return batch

    def take_all(self) -> list[Rows]:
        """Take everything that waits."""
        waiting = list(chain.from_iterable(self._levels.values()))
        self._levels, self.n_rows, self.n_bytes = {}, 0, 0.0
        return waiting

    def take_surplus(self, priority: int, is_full: Callable[[], bool]) -> Iterator[Rows]:
        """Take rows of a lower priority, the last first, as long as the queue is full."""
        while self._levels and is_full() and (lowest := next(reversed(self._levels))) > priority:
            rows = self._levels[lowest].pop()
            if not self._levels[lowest]:
                del self._levels[lowest]
            self._uncount(rows)
            yield rows

    def ahead_of(self, priority: int) -> tuple[int, float, int]:
        """Return what goes before rows of a priority that come now: rows, their bytes, and pieces of rows."""
        later = [rows for at, level in self._levels.items() if at > priority for rows in level]
        n_bytes = self.n_bytes - sum(rows.n_bytes for rows in later) if later else self.n_bytes
        return self.n_rows - sum(map(len, later)), n_bytes, sum(map(len, self._levels.values())) - len(later)

    def look_elsewhere(self) -> None:
        """Have the next rows come from the middle of what waits: neighbours may all fail for the same reason."""
        level = next(iter(self._levels.values()), deque[Rows]())
        longest = max(level, key=len, default=None)
        if longest is not None and len(longest) > 1:
            level.remove(longest)
            front, rest = longest.cut(len(longest) // 2)
            level.append(front)
            level.appendleft(rest)

    def _take_turns(self, level: deque[Rows], kind: object, n: int, batch: list[Rows]) -> int:
        """Take up to n rows of one kind and priority; return how many are taken.

        Of those that would fill a batch alone, half of it where shorter ones wait, too.
        """
        longer: list[Rows] = []
        other_kinds: list[Rows] = []
        left = n
        while level and left > (n - n // 2 if longer else 0):
            rows = level.popleft()
            if rows.owner.kind != kind:
                other_kinds.append(rows)
            elif len(rows) > self.batch_size and rows.owner.deadline < inf:
                longer.append(rows)
            else:
                left -= _cut(rows, left - (n - n // 2 if longer else 0), level, batch)
        while longer and left:
            left -= _cut(longer.pop(0), left, level, batch)
        level.extendleft(reversed(other_kinds + longer))
        return n - left

    def _uncount(self, *batch: Rows) -> None:
        for rows in batch:
            n = len(rows)
            self.n_rows -= n
            self.n_bytes -= n * rows.row_bytes


def _cut(rows: Rows, n: int, level: deque[Rows], batch: list[Rows]) -> int:
    """Move up to n of some rows to a batch, and return how many; the rest goes next, or has another turn."""
    if (n_rows := len(rows)) > n:
        rows, rest = rows.cut(n)
        (level.append if rows.owner.deadline < inf else level.appendleft)(rest)
    batch.append(rows)
    return min(n_rows, n)
