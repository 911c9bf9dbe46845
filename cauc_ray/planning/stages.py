"""The stages and routers of a plan, and their load at a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cauc_ray.numbers.types import Floats
from cauc_ray.planning.timings import Timing


@dataclass(frozen=True, slots=True)
class RouterSeconds:
    """Seconds that routers take, each one thing at a time.

    Attributes:
        per_request: Seconds to read a request and to write its answer.
        per_call: Seconds to send a call and to take its end.
        replicas: Number of routers, which share requests evenly.
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


NO_TIME = RouterSeconds()


@dataclass(frozen=True, slots=True)
class PlannedStage:
    """A stage of a chain.

    Attributes:
        name: Its name.
        batch_size: Rows in a full batch.
        batch_wait_s: Seconds that a row waits for a full batch.
        seconds: Seconds of its batches.
        deferral: Share of its rows that are deferred, 0 at the last stage.
        replicas: Number of its replicas.
    """

    name: str
    batch_size: int
    batch_wait_s: float
    seconds: Timing
    deferral: float
    replicas: int = 1

    @property
    def batch_s(self) -> float:
        """Return the seconds of a full batch."""
        return self.seconds.of(self.batch_size)


def reaches(stages: Sequence[PlannedStage]) -> Floats:
    """Return the share of all rows that reach each stage, float (M,)."""
    return np.cumprod([1.0, *(stage.deferral for stage in stages[:-1])])


def loads(stages: Sequence[PlannedStage], rate: float) -> Floats:
    """Return each stage's load at a rate of rows a second, float (M,): the share of its capacity in full batches.

    From 1 on its queue grows without end. Below, its replicas may be busy for a larger share of the time, since
    batches that are not full take longer for each row.
    """
    row_s: Floats = np.array([stage.batch_s / stage.batch_size / stage.replicas for stage in stages])
    return reaches(stages) * rate * row_s


def with_replicas(stages: Sequence[PlannedStage], counts: Sequence[int]) -> tuple[PlannedStage, ...]:
    """Return the stages with so many replicas each."""
    return tuple(replace(stage, replicas=n) for stage, n in zip(stages, counts, strict=True))
