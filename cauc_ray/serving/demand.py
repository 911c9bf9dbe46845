"""What clients ask for: whether more requests come soon, and how many replicas they need."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence

from cauc_ray.cascade.stage import Stage
from cauc_ray.numbers.types import Ints

# The most requests that were open at once are remembered for one to two of these.
OPEN_WINDOW_S = 0.5


class OpenRequests:
    """Counts open requests.

    Clients that send their next request when they have their answer come back together: waiting for
    them pays while fewer requests are open than recently, and never for a single client.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n_open = 0
        self._most = self._most_before = 0
        self._window_ends = 0.0

    def came(self, n: int) -> None:
        """Count n requests that are open from now on."""
        self._turn_window()
        self._n_open += n
        self._most = max(self._most, self._n_open)

    def left(self, n: int) -> None:
        """Count n requests that are no longer open."""
        self._n_open -= n

    def expects_more(self) -> bool:
        """Return whether fewer requests are open than there were at once a moment ago."""
        self._turn_window()
        return self._n_open < max(self._most, self._most_before)

    def _turn_window(self) -> None:
        now = self._clock()
        if now < self._window_ends:
            return
        # A window that nobody looked into was as empty as it is now.
        lately = now < self._window_ends + OPEN_WINDOW_S
        self._most_before = self._most if lately else self._n_open
        self._most = self._n_open
        self._window_ends = now + OPEN_WINDOW_S


# The rate at which rows come is of so many seconds.
WINDOW_S = 10.0


class Demand:
    """Works out how many replicas the stages need for the rows that come.

    That is the rate at which rows come, refused ones included, times the shares that other stages send on, times the
    seconds for a row; and what waits, in a window's time. The shares are of the same window: another policy may send
    on more or less than the one before.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self._stages = stages
        # By the second: rows by the stage that they begin at, and what each stage had answered and sent on before.
        self._came: deque[tuple[int, Counter[int], list[tuple[int, Counter[int]]]]] = deque()
        self._reckoned_at, self._reached = -1, [0.0] * len(stages)

    def came(self, n: int, stages: int | Ints, now: float) -> None:
        """Count n rows that go to a stage, all of them or each to its own, int8 (n,)."""
        if not self._came or self._came[-1][0] != int(now):
            self._came.append(
                (int(now), Counter(), [(at.accepted + at.deferred, at.sent.copy()) for at in self._stages])
            )
        self._came[-1][1].update({stages: n} if isinstance(stages, int) else stages.tolist())

    def replicas(self, stage: int, now: float) -> float:
        """Return how many replicas of a stage, busy all the time, the requests need."""
        if int(now) != self._reckoned_at:
            self._reckoned_at, self._reached = int(now), self._reach(now)
        at = self._stages[stage]
        return (self._reached[stage] + at.n_waiting) / WINDOW_S * at.seconds.row_s

    def _reach(self, now: float) -> list[float]:
        """Return how many of the rows that came in the last window's time are likely to reach each stage."""
        while self._came and self._came[0][0] < now - WINDOW_S:
            self._came.popleft()
        rows = [float(sum(came[first] for _, came, _ in self._came)) for first in range(len(self._stages))]
        if not self._came:
            return rows
        for before, (n_before, sent_before) in zip(self._stages, self._came[0][2], strict=True):
            n_answered = before.accepted + before.deferred
            if n_answered == n_before:  # as far as is known, it sends on what it always has
                n_before, sent_before = 0, Counter[int]()
            for to, n in before.sent.items():
                rows[to] += rows[before.number] * (n - sent_before[to]) / max(1, n_answered - n_before)
        return rows
