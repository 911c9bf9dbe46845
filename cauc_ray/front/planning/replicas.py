"""The replicas of a simulated stage: each computes one batch and may have one more waiting."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from statistics import median

from cauc_ray.cascade.pace import CALLS, FEWEST
from cauc_ray.front.planning.stages import BatchSeconds
from cauc_ray.numbers.types import Floats


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedCall:
    """A batch at a replica.

    rows: when each arrived at the cascade, float (n,).   ready_sum: the sum of when they were ready for the stage.
    """

    rows: Floats
    ready_sum: float


@dataclass(frozen=True, slots=True)
class Started:
    """A call that a replica begins to compute, and when it will end."""

    replica: int
    call: SimulatedCall
    starts: float
    ends: float


class SimulatedReplicas:
    """A stage's replicas. A call goes to the one with the fewest calls, the first of those, and stays there.

    calls_each: 2, or 1 where none may wait at a replica.
    """

    def __init__(self, n: int, seconds: BatchSeconds, calls_each: int) -> None:
        self.n = n
        self.n_calls = 0
        self._seconds = seconds
        self._may_wait = calls_each > 1
        self._computing: list[SimulatedCall | None] = [None] * n
        self._waiting: list[SimulatedCall | None] = [None] * n
        self._idle = list(range(n))
        # Those that compute and have none waiting. Some have become idle or full since they were put here.
        self._open: list[int] = []
        self._listed = [False] * n
        self._since = [0.0] * n
        self._lately: deque[float] = deque(maxlen=CALLS)

    @property
    def has_idle(self) -> bool:
        """Say whether a replica has nothing to compute."""
        return bool(self._idle)

    @property
    def has_room(self) -> bool:
        """Say whether a replica takes another call."""
        return bool(self._idle) or (self._may_wait and self.n_calls < 2 * self.n)

    def send(self, call: SimulatedCall, now: float) -> Started | None:
        """Send a call where there is room. Returns it if it starts at once."""
        self.n_calls += 1
        if self._idle:
            return self._start(heapq.heappop(self._idle), call, now)
        while True:
            replica = heapq.heappop(self._open)
            self._listed[replica] = False
            if self._computing[replica] is not None and self._waiting[replica] is None:
                self._waiting[replica] = call
                return None

    def ended(self, replica: int, now: float) -> tuple[SimulatedCall, Started | None]:
        """Take back the call that a replica has computed. Returns it, and the one that starts in its place."""
        done, following = self._computing[replica], self._waiting[replica]
        assert done is not None
        self.n_calls -= 1
        self._lately.append(self._seconds.of(len(done.rows)))
        self._computing[replica] = self._waiting[replica] = None
        if following is not None:
            return done, self._start(replica, following, now)
        heapq.heappush(self._idle, replica)
        return done, None

    def expected_idle_at(self) -> float:
        """Return when the replica that a call would wait at can be expected to be idle, judging by the last calls."""
        while self._computing[self._open[0]] is None or self._waiting[self._open[0]] is not None:
            self._listed[heapq.heappop(self._open)] = False
        return self._since[self._open[0]] + (median(self._lately) if len(self._lately) >= FEWEST else 0.0)

    def rows(self) -> int:
        """Return the rows that are at replicas."""
        return sum(len(call.rows) for call in (*self._computing, *self._waiting) if call is not None)

    def _start(self, replica: int, call: SimulatedCall, now: float) -> Started:
        self._computing[replica], self._since[replica] = call, now
        if self._may_wait and not self._listed[replica]:
            self._listed[replica] = True
            heapq.heappush(self._open, replica)
        return Started(replica, call, now, now + self._seconds.of(len(call.rows)))
