"""How far a run is and how fast it goes: counted by its controller, shown to people, reported to Ray's metrics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

RATE_WINDOW_S = 10.0
# Batches, blocks and starting replicas make the rate of ten seconds too noisy to predict an end.
ETA_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Where a stage's rows are, since the run was started or resumed.

    Attributes:
        name: The stage.
        queued: Rows that wait.
        in_flight: Rows at a replica.
        accepted: Rows that it answered.
        deferred: Rows that it sent on.
        failed: Rows that it failed on.
        degraded: Rows that were answered without it, because it was down.
        replicas: Copies of the model that work.
        starting: Copies that are being started.
        quarantined: Copies that were replaced because they failed what others answered.
        busy_s: Seconds that replicas computed, all together.
        cost: What its calls cost, in the policy's unit.
        reason: The most common one of the failed rows.
    """

    name: str
    queued: int = 0
    in_flight: int = 0
    accepted: int = 0
    deferred: int = 0
    failed: int = 0
    degraded: int = 0
    replicas: int = 0
    starting: int = 0
    quarantined: int = 0
    busy_s: float = 0.0
    cost: float = 0.0
    reason: str = ""

    @property
    def accepted_share(self) -> float | None:
        """Return the share of its answers that the stage kept, None before the first."""
        answers = self.accepted + self.deferred
        return self.accepted / answers if answers else None

    @property
    def handled(self) -> int:
        """Return the rows that its models had."""
        return self.accepted + self.deferred + self.failed


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is.

    Attributes:
        at: When the controller last looked after everything, in seconds by the node's monotonic clock.
        n_rows: Rows of the whole input, None if unknown before its end.
        n_finished: Rows of blocks that are done, earlier attempts included.
        stages: Each stage.
    """

    at: float
    n_rows: int | None
    n_finished: int
    stages: tuple[StageProgress, ...]

    @property
    def n_ended(self) -> int:
        """Return the rows that ended since the run was started or resumed, committed or not."""
        return sum(stage.accepted + stage.failed + stage.degraded for stage in self.stages)


@dataclass(frozen=True, slots=True)
class RunRates:
    """How fast a run goes; None where that is not known yet.

    Attributes:
        n_done: Rows that ended, in earlier attempts too; the last of them may not be committed yet.
        rows_per_s: Of those, over the last ten seconds.
        stage_rows_per_s: Rows that each stage's models had, likewise.
        eta_s: Seconds to the end at the rate of the last minute.
    """

    n_done: int
    rows_per_s: float | None
    stage_rows_per_s: tuple[float | None, ...]
    eta_s: float | None


class RateMeter:
    """Rates from the progress of a run that is looked at again and again."""

    def __init__(self) -> None:
        self._seen: deque[RunProgress] = deque()
        self._n_earlier = 0

    def add(self, progress: RunProgress) -> RunRates:
        """Take another look and return the rates up to it."""
        if not any(stage.replicas for stage in progress.stages):
            self._seen.clear()  # the rate is unknown until something works
        while self._seen and self._seen[-1].at >= progress.at:
            self._seen.pop()  # the controller has not reported since
        self._seen.append(progress)
        while len(self._seen) > 2 and self._seen[1].at <= progress.at - ETA_WINDOW_S:
            self._seen.popleft()
        # Finished are rows of earlier attempts, and those that ended here, but these by whole blocks: they exceed what
        # ended here by the earlier ones at most, and by just these when all is committed, as at the start.
        self._n_earlier = max(self._n_earlier, progress.n_finished - progress.n_ended)
        n_done = self._n_earlier + progress.n_ended
        eta_s = None
        if progress.n_rows is not None:
            n_left = max(0, progress.n_rows - n_done)
            rate = self._rate(lambda at: at.n_ended, ETA_WINDOW_S)
            eta_s = n_left / rate if rate else None if n_left else 0.0
        return RunRates(
            n_done=n_done,
            rows_per_s=self._rate(lambda at: at.n_ended, RATE_WINDOW_S),
            stage_rows_per_s=tuple(
                self._rate(lambda at, index=index: at.stages[index].handled, RATE_WINDOW_S)  # type: ignore[misc]
                for index in range(len(progress.stages))
            ),
            eta_s=eta_s,
        )

    def _rate(self, count: Callable[[RunProgress], int], window_s: float) -> float | None:
        """Return what a count grew by each second, over a window or the shorter time that is known."""
        now = self._seen[-1]
        base = next((seen for seen in reversed(self._seen) if seen.at <= now.at - window_s), self._seen[0])
        return max(0.0, (count(now) - count(base)) / (now.at - base.at)) if now.at > base.at else None
