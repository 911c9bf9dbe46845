"""What happens to calls and replicas, as shells tell the scheduler, and what then becomes of rows, as its rules say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from cauc_ray.cascade.rows import Call, CallResult, Fault, Rows, Trouble
from cauc_ray.cascade.suspects import Verdict


@dataclass(frozen=True, slots=True)
class CallEnded:
    """A call has a result.   goes_on: what holds the deferred rows, in their order."""

    call: Call
    result: CallResult
    goes_on: Any


@dataclass(frozen=True, slots=True)
class CallFailed:
    """Nothing came of a call, for no fault of its replica."""

    call: Call
    trouble: Literal["down", "overloaded", "error"]
    reason: str


@dataclass(frozen=True, slots=True)
class CallPostponed:
    """A call could not be computed for no fault of its own; it is tried again after a pause."""

    call: Call
    pause_s: float


@dataclass(frozen=True, slots=True)
class RowsLost:
    """Objects of a call are lost: its owners start again from the input."""

    call: Call
    reason: str


@dataclass(frozen=True, slots=True)
class ReplicaReady:
    """A replica is ready."""

    stage: int
    replica: int


@dataclass(frozen=True, slots=True)
class ReplicaLost:
    """A replica died or was given up.   own_fault: False where it certainly was not, as when its whole node died."""

    stage: int
    replica: int
    reason: str
    own_fault: bool = True


@dataclass(frozen=True, slots=True)
class ReplicasCounted:
    """A stage's replicas were counted.   why: there are none, where that may last; None where that is unknown."""

    stage: int
    why: str | None = None


@dataclass(frozen=True, slots=True)
class StageDown:
    """A stage that has others before it is left out until a replica is ready."""

    stage: int


@dataclass(frozen=True, slots=True)
class VerdictReached:
    """A new verdict on an input of a stage.

    Attributes:
        stage: The stage.
        digest: Of the input.
        verdict: The verdict.
        deadly: Whether a replica ended, not only hung.
    """

    stage: int
    digest: bytes
    verdict: Verdict
    deadly: bool


@dataclass(frozen=True, slots=True)
class TimePassed:
    """Rows may have waited for too long, and calls have lost all who wait for them."""


CallEvent: TypeAlias = CallEnded | CallFailed | CallPostponed | RowsLost
StageEvent: TypeAlias = ReplicaReady | ReplicaLost | ReplicasCounted | StageDown | VerdictReached
Event: TypeAlias = CallEvent | StageEvent | TimePassed

# How a call has failed: the model names rows that it cannot answer; it raises on a row while it answers others; no row
# was answered, by whose fault; or nothing came back.
Failure: TypeAlias = Literal["named", "raised"] | Fault | Literal["down", "overloaded", "error"]


@dataclass(frozen=True, slots=True)
class Again:
    """A call's rows are tried again."""

    call: Call


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Rows will not be answered by their stage."""

    rows: Sequence[Rows]
    trouble: Trouble
    reason: str


@dataclass(frozen=True, slots=True)
class CountFailure:
    """A failure counts against the stage, which is paused after several.

    Attributes:
        reason: The reason.
        rows: Those of the call, where they may not be the cause.
        for_good: Whether this single failure pauses the stage, and what is at its replicas comes to nothing, too.
    """

    reason: str
    rows: Sequence[Rows] = ()
    for_good: bool = False


Fate: TypeAlias = Again | GiveUp | CountFailure
