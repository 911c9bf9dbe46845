"""How calls fail, and what then becomes of their rows, as the rules say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cauc_ray.cascade.rows import Call, Fault, Rows, Trouble

# How a call has failed: the model names rows that it cannot answer; it raises on a row while it answers others; no row
# was answered, by whose fault; or nothing came back.
Failure: TypeAlias = Literal["named", "raised"] | Fault | Literal["error"]


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
