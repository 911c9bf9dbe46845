"""What a simulation measures: over the whole cascade, and of each stage, within a window of time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.types import Floats
from cauc_ray.planning.stages import PlannedStage


@dataclass(frozen=True, slots=True)
class Window:
    """When measuring begins and ends, in seconds."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class StageFigures:
    """What a stage did in the window.

    busy: share of its replicas' time that they computed.   fill: rows of its calls over what full ones hold, None
    without a call.   wait_s: mean seconds from when a row reached the stage to when its call began to be computed.
    waiting_rows: so many waited on average.   most_queued: rows in its queue at once, at most.
    """

    name: str
    calls: int
    rows: int
    busy: float
    fill: float | None
    wait_s: float | None
    waiting_rows: float
    most_queued: int


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from a request's arrival to its answer, over n of them."""

    mean: float
    p50: float
    p99: float
    n: int

    @classmethod
    def of(cls, seconds: Floats) -> Latency | None:
        """Summarise latencies, float (n,); None where there are none."""
        if not len(seconds):
            return None
        p50, p99 = np.percentile(seconds, [50, 99])
        return cls(float(seconds.mean()), float(p50), float(p99), len(seconds))


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulated cascade did.

    rows_per_s: answered within the window.   latency: of those, None for a backlog or where none was answered.
    n_arrived, n_answered, n_left: rows over the whole time.   grows: whether more and more rows wait: a stage's load
    is 1 or more, or its queue grew.
    window_s: seconds of the window; of a backlog, from the first call to the end of the last.
    """

    rows_per_s: float
    latency: Latency | None
    n_arrived: int
    n_answered: int
    n_left: int
    grows: bool
    window_s: float
    stages: tuple[StageFigures, ...]


class StageMeter:
    """Sums of a stage's calls within a window from first to last, in seconds."""

    def __init__(self, stage: PlannedStage, first: float, last: float) -> None:
        self._stage = stage
        self._first, self._last = first, last
        self._calls = self._rows = self._most_queued = 0
        self._busy_s = self._wait_s = 0.0

    def started(self, n: int, starts: float, ends: float, wait_s: float) -> None:
        """Count a call of n rows that begins to be computed."""
        self._busy_s += max(0.0, min(ends, self._last) - max(starts, self._first))
        if self._first <= starts <= self._last:
            self._calls += 1
            self._rows += n
            self._wait_s += wait_s

    def queued(self, n: int) -> None:
        """Note the length of the queue."""
        self._most_queued = max(self._most_queued, n)

    def figures(self, window_s: float) -> StageFigures:
        """Return what was measured.   window_s: seconds of the window."""
        return StageFigures(
            name=self._stage.name,
            calls=self._calls,
            rows=self._rows,
            # Sums of floats may exceed what they sum up to by a rounding.
            busy=min(1.0, self._busy_s / (window_s * self._stage.replicas)) if window_s else 0.0,
            fill=self._rows / (self._calls * self._stage.batch_size) if self._calls else None,
            wait_s=max(0.0, self._wait_s / self._rows) if self._rows else None,
            waiting_rows=max(0.0, self._wait_s / window_s) if window_s else 0.0,
            most_queued=self._most_queued,
        )
