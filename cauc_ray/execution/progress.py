"""How far a run is: counted by its controllers, shown to people, told to Ray's metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
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
    n_finished: rows committed, by earlier attempts too.
    """

    at: float
    n_rows: int | None
    n_finished: int
    stages: tuple[StageProgress, ...]


def together(shards: Sequence[RunProgress]) -> RunProgress:
    """Add up what several controllers of one run have done; n_rows is the same for all of them."""
    stages = []
    for parts in zip(*(shard.stages for shard in shards), strict=True):
        counts = {key: sum(getattr(part, key) for part in parts) for key in _COUNTS}
        reasons = Counter[str]()
        for part in parts:
            reasons[part.reason] += part.failed
        stages.append(StageProgress(parts[0].name, **counts, reason=reasons.most_common(1)[0][0]))
    return RunProgress(
        at=max(shard.at for shard in shards),
        n_rows=shards[0].n_rows,
        n_finished=sum(shard.n_finished for shard in shards),
        stages=tuple(stages),
    )


_COUNTS = tuple(key for key in StageProgress.__dataclass_fields__ if key not in ("name", "reason"))
