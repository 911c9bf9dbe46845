"""What a plan knows of a stage: how it gathers batches, what they take, what it defers, how many replicas it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cauc_ray.numbers.types import Floats


@dataclass(frozen=True, slots=True)
class BatchSeconds:
    """Seconds of a batch of n rows: per_call + per_row n."""

    per_call: float
    per_row: float

    def of(self, n: int) -> float:
        """Return the seconds of a batch of so many rows."""
        return self.per_call + self.per_row * n


@dataclass(frozen=True, slots=True)
class RouterSeconds:
    """What routers take, each one thing at a time.

    per_request: seconds to read a request and to write its answer.   per_call: to send a call and to take its end.
    replicas: routers that share requests evenly.
    """

    per_request: float = 0.0
    per_call: float = 0.0
    replicas: int = 1

    def of(self, n_requests: float, n_calls: float = 0.0) -> float:
        """Return the seconds of requests and calls, as though all routers were one."""
        return (self.per_request * n_requests + self.per_call * n_calls) / self.replicas

    def load(self, stages: Sequence[PlannedStage], rate: float) -> float:
        """Return the share of their time that routers work at a rate of requests a second, where calls are full."""
        calls = reaches(stages) / [stage.batch_size for stage in stages]
        return self.of(rate, rate * float(calls.sum()))

    def with_replicas(self, n: int) -> RouterSeconds:
        """Return so many routers in place of one."""
        return replace(self, replicas=n)


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a chain.

    batch_size: rows in a full batch.   batch_wait_s: how long a row waits for one.   deferral: the share of its rows
    that go on, 0 at the last stage.   queue_rows: rows that may wait before the stage ahead is held back, None
    where that never happens.
    """

    name: str
    batch_size: int
    batch_wait_s: float
    seconds: BatchSeconds
    deferral: float
    replicas: int = 1
    queue_rows: int | None = None

    @property
    def batch_s(self) -> float:
        """Return the seconds of a full batch."""
        return self.seconds.of(self.batch_size)

    @property
    def row_s(self) -> float:
        """Return the seconds of a row in a full batch."""
        return self.batch_s / self.batch_size

    def with_replicas(self, n: int) -> PlannedStage:
        """Return the stage with so many replicas."""
        return replace(self, replicas=n)


def reaches(stages: Sequence[PlannedStage]) -> Floats:
    """Return the share of all rows that reach each stage, float (M,)."""
    return np.cumprod([1.0, *(stage.deferral for stage in stages[:-1])])


def loads(stages: Sequence[PlannedStage], rate: float) -> Floats:
    """Return each stage's load at a rate of rows a second, float (M,): the share of its capacity in full batches.

    From 1 on its queue grows without end. Below, its replicas may be busy for a larger share of the time, since
    batches that are not full take longer for each row.
    """
    each: Floats = np.array([stage.row_s / stage.replicas for stage in stages])
    return reaches(stages) * rate * each


def with_drift(stages: Sequence[PlannedStage], factor: float) -> tuple[PlannedStage, ...]:
    """Return the stages with every deferral rate times a factor, 1 at most."""
    return tuple(replace(stage, deferral=min(1.0, factor * stage.deferral)) for stage in stages)


def with_replicas(stages: Sequence[PlannedStage], counts: Sequence[int]) -> tuple[PlannedStage, ...]:
    """Return the stages with so many replicas each."""
    return tuple(stage.with_replicas(n) for stage, n in zip(stages, counts, strict=True))
