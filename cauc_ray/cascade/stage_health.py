"""What is known of a stage: whether it is well, and how long its calls take."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from functools import cached_property
from statistics import median

# A stage is paused after this many failed calls in a row.
FAILURES_TO_PAUSE = 8
# Seconds that rows wait for a replica, and how often the time in which its model loads; then the stage is down.
DOWN_AFTER_S, LOADS = 3.0, 1.5


class StageHealth:
    """What is known of a stage's replicas and of its last calls. Times are seconds and come from outside.

    Attributes:
        is_down: Whether it is left out until a replica is ready.
        most_replicas: The most that it has had at once.
        load_s: How long its model takes to load, 0 if unknown.
        paused: Whether it is paused: until a call succeeds, which can only be a probe or an earlier one.
        why_paused: Why it is paused, if it is.
        succeeded_at: When it last answered a call.
    """

    def __init__(self, down_after_s: float, *, pauses: bool) -> None:
        """Take how long rows wait for a replica, and whether failed calls pause the stage."""
        self._down_after_s, self._pauses = down_after_s, pauses
        self.is_down = False
        self.most_replicas = 0
        self.load_s = 0.0
        self._without_since: float | None = None
        self._why_without: str | None = None
        self._n_failures = 0
        self.paused = False
        self.why_paused = ""
        self.succeeded_at = -math.inf

    def replicas(self, n: int, now: float, why: str | None = None) -> None:
        """Note how many replicas take calls.   why: there are none, where that may last: no row waits for one then."""
        self._why_without = why
        if n > 0:
            self._without_since = None
        elif self._without_since is None:
            self._without_since = now
        self.most_replicas = max(self.most_replicas, n)

    def missing(self, now: float) -> bool:
        """Return whether there has been no replica for longer than rows wait for one."""
        since = self._without_since
        return since is not None and (
            self._why_without is not None or now - since > self._down_after_s + LOADS * self.load_s
        )

    def why_not(self, now: float) -> str | None:
        """Return why the stage takes no rows now, None where it does."""
        if self.is_down:
            return "it is down"
        if self.missing(now):
            return self._why_without or "it has no replica"
        return self.why_paused if self.paused else None

    def succeeded(self, now: float) -> None:
        """Note a call that was answered."""
        self._n_failures, self.paused = 0, False
        self.succeeded_at = now

    def failed(self, reason: str, *, for_good: bool = False) -> None:
        """Note a failed call; for_good: this single failure is enough to pause the stage."""
        self.why_paused = f"its last calls have failed: {reason}"
        self._n_failures += FAILURES_TO_PAUSE if for_good else 1
        self.paused = self._pauses and self._n_failures >= FAILURES_TO_PAUSE


# So many calls are remembered; it takes a few to know anything. With much fewer, two routers of an overloaded stage
# forget how long calls take while they refuse rows, and take too many again.
CALLS, FEWEST = 25, 3


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """How long the last calls of a stage have taken, in seconds; 0 before that is known.

    Attributes:
        call_s: A call, its wait for those of other routers included.
        long_call_s: What one in five takes, or longer.
        compute_s: What the model computes for a call.
        row_s: What it computes for one row.
    """

    call_s: float = 0.0
    long_call_s: float = 0.0
    compute_s: float = 0.0
    row_s: float = 0.0


class ServiceTime:
    """Remembers the last calls of a stage, and works out what they show only when it is asked."""

    def __init__(self) -> None:
        self._calls: deque[tuple[float, float, int]] = deque(maxlen=CALLS)
        self._n_first = 0

    def note(self, call_s: float, compute_s: float, n_rows: int, *, is_first: bool) -> None:
        """Remember how long a call of so many rows has taken, and its model computed for it.

        is_first: of its replica, which may take a hundred times as long as the next.
        """
        if is_first:
            self._n_first += 1
        else:
            self._calls.append((call_s, compute_s, n_rows))
        self.__dict__.pop("seconds", None)

    @cached_property
    def seconds(self) -> CallSeconds:
        """Return medians, once a few calls were answered and some of them were not the first of their replica."""
        if not self._calls or self._n_first + len(self._calls) < FEWEST:
            return CallSeconds()
        calls = sorted(call for call, _, _ in self._calls)
        return CallSeconds(
            median(calls),
            calls[len(calls) * 4 // 5],
            median(compute for _, compute, _ in self._calls),
            median(compute / n for _, compute, n in self._calls),
        )
