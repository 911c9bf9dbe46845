"""What is known of a stage of a service: whether it is well, how long its calls take, which inputs end its replicas."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

from cauc_ray.cascade.rows import Owner

# A stage is paused after this many failed calls in a row.
FAILURES_TO_PAUSE = 8
# Rows wait so long for a replica where there is none, and so many times what its model takes to load; then the stage
# is down.
DOWN_AFTER_S, LOADS = 3.0, 1.5


class StageHealth:
    """What is known of a stage's replicas and of its last calls. Times are seconds and come from outside.

    Attributes:
        most_replicas: The most that it has had at once.
        load_s: How long its model takes to load, 0 if unknown.
    """

    def __init__(self, down_after_s: float = DOWN_AFTER_S) -> None:
        self._down_after_s = down_after_s
        self.most_replicas = 0
        self.load_s = 0.0
        self._without_since: float | None = None
        self._why_without: str | None = None
        self._n_failures = 0
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

    @property
    def paused(self) -> bool:
        """Return whether the stage is paused: until a call succeeds, which can only be a probe or an earlier one."""
        return self._n_failures >= FAILURES_TO_PAUSE

    def why_not(self, now: float) -> str | None:
        """Return why the stage takes no rows now, None where it does."""
        if self.missing(now):
            return self._why_without or "it has no replica"
        return self.why_paused if self.paused else None

    def succeeded(self, now: float) -> None:
        """Note a call that was answered."""
        self._n_failures = 0
        self.succeeded_at = now

    def failed(self, reason: str, *, for_good: bool = False) -> None:
        """Note a failed call; for_good: this single failure is enough to pause the stage."""
        self.why_paused = f"its last calls have failed: {reason}"
        self._n_failures += FAILURES_TO_PAUSE if for_good else 1


# So many calls are remembered; it takes a few to know anything.
CALLS, FEWEST = 9, 3


class ServiceTime:
    """Remembers the last calls of a stage. All figures are seconds, and 0 before they are known.

    call_s: a call, its wait for those of other routers included.   long_call_s: what one in five takes, or longer.
    compute_s: what the model computes for a call; row_s: for one row of it.
    """

    def __init__(self) -> None:
        self.call_s = self.long_call_s = self.compute_s = self.row_s = 0.0
        self._calls: deque[tuple[float, float, int]] = deque(maxlen=CALLS)

    def note(self, call_s: float, compute_s: float, n_rows: int) -> None:
        """Remember how long a call of so many rows has taken, and its model computed for it."""
        self._calls.append((call_s, compute_s, n_rows))
        if len(self._calls) < FEWEST:
            return
        # Medians: the first call of a model may take a hundred times as long as the next.
        calls = sorted(call for call, _, _ in self._calls)
        self.call_s, self.long_call_s = median(calls), calls[len(calls) * 4 // 5]
        self.compute_s = median(compute for _, compute, _ in self._calls)
        self.row_s = median(compute / n for _, compute, n in self._calls)


# So long an input that has ended replicas is refused at once, and so many are remembered.
REFUSED_S = 300.0
MOST_REMEMBERED = 1000

Verdict: TypeAlias = Literal["clear", "suspected", "guilty"]


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What is known of an input.

    Attributes:
        verdict: The verdict.
        since: When the input was first suspected.
        until: When it is forgotten.
        deadly: Whether a replica ended, not only hung.
    """

    verdict: Verdict
    since: float
    until: float
    deadly: bool


class Suspects:
    """Remembers inputs of a stage by their digests.

    An input is suspected once a replica ended in a call that had it, until it is answered, and guilty once one ended
    while it computed nothing else.

    Attributes:
        news: New verdicts for other routers: digest, verdict, and whether a replica ended.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, Suspicion] = {}
        self.news: list[tuple[bytes, Verdict, bool]] = []

    def verdict(self, owner: Owner, now: float) -> Verdict:
        """Return the verdict on an owner's input."""
        known = self.of(owner, now)
        return "clear" if known is None else known.verdict

    def of(self, owner: Owner, now: float) -> Suspicion | None:
        """Return what is known of an owner's input, None if it is clear."""
        if not self._known:  # no digest is worked out as long as none is needed
            return None
        known = self._known.get(owner.fingerprint() or b"")
        return known if known is not None and now < known.until else None

    def note(self, owner: Owner, verdict: Verdict, now: float, *, deadly: bool = True) -> None:
        """Remember a verdict on an owner's input.   deadly: whether a replica ended, not only hung."""
        if (verdict == "clear" and not self._known) or (digest := owner.fingerprint()) is None:
            return
        known = self._known.get(digest)
        if verdict != ("clear" if known is None else known.verdict):
            self.news.append((digest, verdict, deadly))
        self.learn(digest, verdict, now, deadly=deadly)

    def learn(self, digest: bytes, verdict: Verdict, now: float, *, deadly: bool) -> None:
        """Take a verdict, also of another router."""
        known = self._known.pop(digest, None)
        if known is not None and known.verdict == "guilty" and verdict == "suspected":
            verdict = "guilty"  # what another router has suspected meanwhile
        if verdict != "clear":
            since = now if known is None else known.since
            self._known[digest] = Suspicion(verdict, since, now + REFUSED_S, deadly)
        if len(self._known) > MOST_REMEMBERED:
            del self._known[next(iter(self._known))]
