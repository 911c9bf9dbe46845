"""Whether a stage takes rows of requests: it has replicas, and its last calls have not all failed."""

from __future__ import annotations

import math

# Calls of a stage pause after this many failed calls in a row, except for one every so many seconds.
FAILURES_TO_PAUSE = 8
PAUSE_S = 1.0
# Rows wait so long for a replica where there is none; then the stage is down.
DOWN_AFTER_S = 3.0


class StageHealth:
    """What is known of a stage's replicas and of its last calls. Times are seconds and come from outside.

    down_after_s: how long rows wait where there is no replica.   most_replicas: that it has had at once.
    """

    def __init__(self, down_after_s: float = DOWN_AFTER_S) -> None:
        self._down_after_s = down_after_s
        self.most_replicas = 0
        self._without_since: float | None = None
        self._n_failures = 0
        self._paused_until = 0.0
        self.why_paused = ""
        self.succeeded_at = -math.inf

    def replicas(self, n: int, now: float) -> None:
        """Note how many replicas take calls."""
        if n > 0:
            self._without_since = None
        elif self._without_since is None:
            self._without_since = now
        self.most_replicas = max(self.most_replicas, n)

    def missing(self, now: float) -> bool:
        """Return whether there has been no replica for longer than rows wait for one."""
        return self._without_since is not None and now - self._without_since > self._down_after_s

    @property
    def paused(self) -> bool:
        """Return whether calls are paused, except for one that checks whether the stage has recovered."""
        return self._n_failures >= FAILURES_TO_PAUSE

    def why_not(self, now: float, *, calling: bool) -> str | None:
        """Return why the stage takes no rows now, None where it does.   calling: whether a call is under way."""
        if self.missing(now):
            return "it has no replica"
        if self.paused and (calling or now < self._paused_until):
            return self.why_paused
        return None

    def succeeded(self, now: float) -> None:
        """Note a call that was answered."""
        self._n_failures = 0
        self.succeeded_at = now

    def failed(self, reason: str, now: float, *, for_good: bool = False) -> None:
        """Note a failed call; for_good: this single failure is enough to pause calls."""
        self.why_paused = f"its last calls have failed: {reason}"
        self._n_failures += FAILURES_TO_PAUSE if for_good else 1
        if self.paused:
            self._paused_until = now + PAUSE_S
