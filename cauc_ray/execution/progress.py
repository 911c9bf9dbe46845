"""How far a run is: counted by its controller, shown to people, told to Ray's metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Where a stage's rows are, since the run was started or resumed.

    queued, in_flight: rows waiting, and at a replica.   accepted, deferred, failed, degraded: rows that ended so
    (degraded: answered without a stage that was down, counted at that stage).   replicas, starting: copies of the
    model that work, and that are being started.   quarantined: those that were replaced because they failed what
    others answered.   busy_s: seconds that replicas computed, all together.   cost: what its calls cost, in the
    policy's unit.   reason: the most common one of the failed rows.
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


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run is.

    at: seconds since the epoch, when the controller last said so.   n_rows: of the whole input, None where it is
    not known before its end.
    n_finished: rows of blocks that are done, by earlier attempts too.
    """

    at: float
    n_rows: int | None
    n_finished: int
    stages: tuple[StageProgress, ...]
