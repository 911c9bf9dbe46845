"""Rows, who they belong to, and the calls that have them: small, without the data that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, TypeAlias

import numpy as np

from cauc_ray.cascade.results import CallResult
from cauc_ray.numbers.types import Bools, Floats, Ints

# Why a stage has not answered rows: it cannot answer any, not in time, has too much to do, failed; or it is the rows'
# own fault.
Trouble: TypeAlias = Literal["down", "timeout", "overloaded", "error", "refused"]


# Positions in a call, a slice where they are neighbours.
Positions: TypeAlias = Ints | slice

# Repeated, as a request is made: numpy.full takes three times as long for a few rows.
NO_OPTION, NO_STAGE, UNKNOWN = np.array([-1], np.int32), np.array([-1], np.int8), np.array([np.nan])


@dataclass(slots=True, eq=False)
class Owner:
    """What rows belong to, a block of the input or a request, and what has become of its n rows; arrays (n,).

    block: which one; 0 for a request.   names: what the shell knows the rows by.   predictions: int32, of the last
    stage that answered.   confidences, costs: float64.   stages: int8, that one, -1 where none has.   degraded:
    bool, rows answered without a stage that should have.   failures: the stage and the reason, by position; stage -1
    where the row could not be read.   at: int8, the stage that a row waits for or is at, -1 once it needs none.
    restarts: how often all of it was started again, because objects were lost with their nodes.   live: False once its
    answers are no longer wanted.   closed: stages that have taken too long, whose answers are not wanted.   deadline:
    when the last answer is wanted, in seconds.   kind: rows whose owners have different ones share no call.
    """

    block: int
    n: int
    names: Any = None
    restarts: int = 0
    predictions: Ints = field(init=False)
    confidences: Floats = field(init=False)
    stages: Ints = field(init=False)
    costs: Floats = field(init=False)
    degraded: Bools = field(init=False)
    failures: dict[int, tuple[int, str]] = field(default_factory=dict)
    at: Ints = field(init=False)
    n_left: int = field(init=False)
    live: bool = True
    closed: set[int] = field(default_factory=set)
    deadline: float = inf
    kind: Any = None

    def __post_init__(self) -> None:
        self.predictions = NO_OPTION.repeat(self.n)
        self.confidences = UNKNOWN.repeat(self.n)
        self.stages = NO_STAGE.repeat(self.n)
        self.costs = np.zeros(self.n)
        self.degraded = np.zeros(self.n, dtype=bool)
        self.at = np.zeros(self.n, dtype=np.int8)
        self.n_left = self.n

    def note(
        self, stage: int, indices: Ints, result: CallResult, positions: Positions, carried: Any, held_at: Ints
    ) -> Bools:
        """Take a call's answers. Returns which of the rows go on, bool (m,).

        indices: int (m,), positions here.   positions: theirs in the call.   carried: what holds what rows carry, and
        held_at, int (n,), where it has those of each row of the call.
        What rows that go on have so far is kept too: it is their answer if the next stage is down.
        """
        self.costs[indices] += result.costs[positions]
        predictions, confidences = result.predictions[positions], result.confidences[positions]
        goes_on: Bools = ~result.accepted[positions]
        if predictions.min(initial=0) < 0:  # an encoder gives no answers
            known = predictions >= 0
            indices, predictions, confidences = indices[known], predictions[known], confidences[known]
        self.predictions[indices] = predictions
        self.confidences[indices] = confidences
        self.stages[indices] = stage
        return goes_on

    def left_out(self, indices: Ints, stage: int, trouble: Trouble, reason: str) -> int:
        """Note rows that a stage has not answered: where it is down, the answer before is theirs, if there is one.

        Returns for how many it is.
        """
        self.at[indices] = -1
        known = (self.stages[indices] >= 0) & (trouble == "down")
        self.degraded[indices[known]] = True
        failed = indices[~known]
        self.stages[failed] = -1
        self.failures.update(dict.fromkeys(failed.tolist(), (stage, reason)))
        return int(np.count_nonzero(known))

    def wants(self, stage: int) -> bool:
        """Return whether a stage's answers to its rows are still wanted."""
        return self.live and stage not in self.closed

    def fingerprint(self) -> bytes | None:
        """Return a digest of what may end or hang a replica, the same for two owners of the same; None if unknown."""
        return None


@dataclass(slots=True, eq=False)
class Rows:
    """Rows of one owner that go to a stage together. Nothing of it changes.

    indices: int (n,), positions in the owner.   source: what holds their columns and state, which only the shell can
    read.   positions: int (n,), in it.   ready_at: when they became ready for the stage, in seconds.
    row_bytes: what a row takes of the source, of which state_bytes are its state.
    """

    owner: Owner
    indices: Ints
    source: Any
    positions: Ints
    ready_at: float
    row_bytes: float
    state_bytes: float = 0.0

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def n_bytes(self) -> float:
        """Return what the rows take."""
        return len(self) * self.row_bytes

    def cut(self, n: int) -> tuple[Rows, Rows]:
        """Return the first n rows and the others."""
        return self.part(slice(None, n)), self.part(slice(n, None))

    def part(self, chosen: slice | Bools) -> Rows:
        """Return some of the rows."""
        return replace(self, indices=self.indices[chosen], positions=self.positions[chosen])


@dataclass(slots=True, eq=False)
class Call:
    """Rows for one call of a stage, due at a time; and, once it is sent, the replica that has it.

    attempt: 1, or more where rows are tried again.   isolated: nothing else is at the replica meanwhile, so that if it
    ends, these rows are to blame.   failed_on: replicas on which these very rows failed, once for each failure.
    n_unproven: how often they failed while the stage had never answered any.   probe: whether it asks a replica in
    doubt for a row that the stage has answered before; its answer is not needed.   good_row: one that the stage has
    answered, for a replica that may have none.   handle: the shell's.
    sent_at, began_at: when it was sent, and when its model is known to have begun.   suspected_at: when a replica ended
    or hung while it had these rows.   given_up: its rows are asked of another replica; only its end is waited for.
    """

    stage: int
    rows: Sequence[Rows]
    due: float
    attempt: int = 1
    isolated: bool = False
    failed_on: tuple[int, ...] = ()
    n_unproven: int = 0
    probe: bool = False
    replica: int = -1
    good_row: Rows | None = None
    handle: Any = None
    sent_at: float = 0.0
    began_at: float | None = None
    suspected_at: float | None = None
    given_up: bool = False
    _n: int = field(init=False)

    def __post_init__(self) -> None:
        self._n = sum(len(rows) for rows in self.rows)

    def __len__(self) -> int:
        return self._n

    @property
    def ready_at(self) -> float:
        """Return when the row that waited longest became ready."""
        return min(rows.ready_at for rows in self.rows)

    def again(self, due: float, **changes: Any) -> Call:
        """Return the call as it is to be tried again."""
        fresh: dict[str, Any] = {"attempt": self.attempt + 1, "replica": -1, "good_row": None, "handle": None}
        fresh |= {"began_at": None, "given_up": False}
        return replace(self, due=due, **(fresh | changes))

    @property
    def wanted(self) -> bool:
        """Return whether its answers are still wanted."""
        return any(rows.owner.wants(self.stage) for rows in self.rows)

    def by_owner(self) -> list[list[Rows]]:
        """Return each owner's rows."""
        owners = dict.fromkeys(rows.owner for rows in self.rows)
        return [[rows for rows in self.rows if rows.owner is owner] for owner in owners]

    def pieces(self) -> Iterator[tuple[Rows, slice]]:
        """Return each owner's rows with their positions in the call."""
        start = 0
        for rows in self.rows:
            end = start + len(rows)
            yield rows, slice(start, end)
            start = end

    def where(self, mask: Bools) -> list[Rows]:
        """Return those of its rows that a mask (n,) marks."""
        return [rows.part(mask[positions]) for rows, positions in self.pieces() if mask[positions].any()]

    def halves(self) -> tuple[list[Rows], list[Rows]]:
        """Return its rows, two or more, in two halves."""
        first = np.arange(len(self)) < len(self) // 2
        return self.where(first), self.where(~first)
