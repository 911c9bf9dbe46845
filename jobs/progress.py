"""How far a job is: lines in its log, and Ray metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import ray

from cauc_ray.execution.metrics import JobMetrics

# The log has a line at most so often.
EVERY_S = 5.0


@dataclass(slots=True)
class Progress:
    """Tells how far a job is.   job: its name."""

    job: str
    _started: tuple[float, int] | None = None
    _last: int = 0
    _said_at: float = -EVERY_S
    _metrics: JobMetrics | None = field(default=None, repr=False)

    def report(self, done: int, total: int | None, unit: str) -> None:
        """Say that so much is done, of a total where that is known; as often as one likes.

        The rate is that of this attempt: what an earlier one had done when the first report came does not count.
        """
        now = time.monotonic()
        if self._metrics is None and ray.is_initialized():
            self._metrics = JobMetrics(self.job)
        if self._metrics is not None:
            self._metrics.report(done, total, unit)
        if self._started is None or done < self._last:  # a job may count several things, one after the other
            self._started = (now, done)
        self._last = done
        if now - self._said_at >= EVERY_S or done == total:
            self._said_at = now
            self.say(self._line(now, done, total, unit))

    def say(self, line: str) -> None:
        """Write a line to the job's log."""
        print(line, flush=True)

    def _line(self, now: float, done: int, total: int | None, unit: str) -> str:
        assert self._started is not None
        of = "" if total is None else f" of {total:,}"
        text = f"{self.job}: {done:,}{of} {unit}"
        seconds, new = now - self._started[0], done - self._started[1]
        if new <= 0 or seconds <= 0:
            return text
        text += f", {new / seconds:.3g} a second"
        return text if total is None or done >= total else f"{text}, {(total - done) * seconds / new:,.0f} s left"
