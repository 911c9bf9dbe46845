"""What the controller and the stages say to each other: small, plain, no payload among it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cauc_ray.errors import printable
from cauc_ray.numbers.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one input block that go to a stage together.

    block: its number.   indices: int (n,), places in the block.   parcel: the object that holds their columns and
    state.   places: int (n,), places in that object.   ready_at: seconds since the epoch, when they became ready
    for the stage.   column_bytes, state_bytes: what a row takes of that object.
    """

    block: int
    indices: Ints
    parcel: int
    places: Ints
    ready_at: float
    column_bytes: float
    state_bytes: float = 0.0

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def n_bytes(self) -> float:
        """Return what the rows take."""
        return len(self) * (self.column_bytes + self.state_bytes)

    def cut(self, n: int) -> tuple[Rows, Rows]:
        """Return the first n rows and the others."""
        return self._take(slice(None, n)), self._take(slice(n, None))

    def where(self, mask: Bools) -> Rows:
        """Return those of the rows that a mask (n,) marks."""
        return self._take(mask)

    def _take(self, part: slice | Bools) -> Rows:
        return replace(self, indices=self.indices[part], places=self.places[part])


@dataclass(frozen=True, slots=True)
class Call:
    """One batch for one replica of a stage.

    output: the object that will hold the columns and state of the rows that go on.   attempt: 1, or more where
    rows are tried again.   alone: nothing else is at the replica meanwhile, so that if this dies, it is to blame.
    failed_on: the replicas that failed on these very rows and answered others afterwards, once for each failure.
    n_unproven: how often the row failed while its stage had never answered any.   probe: it asks a replica in doubt
    for a row that the stage has answered before; nobody needs the answer.
    """

    id: int
    stage: int
    replica: int
    rows: tuple[Rows, ...]
    output: int
    attempt: int = 1
    alone: bool = False
    failed_on: tuple[int, ...] = ()
    n_unproven: int = 0
    probe: bool = False

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.rows)

    def where(self, mask: Bools) -> tuple[Rows, ...]:
        """Return those of its rows that a mask (n,) marks, part by part without the empty ones."""
        ends = np.cumsum([len(rows) for rows in self.rows])
        parts = zip(self.rows, np.split(mask, ends[:-1]), strict=True)
        return tuple(rows.where(own) for rows, own in parts if own.any())

    @property
    def ready_at(self) -> float:
        """Return when the row that waited longest became ready."""
        return min(rows.ready_at for rows in self.rows)


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a stage says of a call of n rows; the deferred rows' columns and state go beside it.

    predictions: int32 (n,).   confidences: float64 (n,).   accepted: bool (n,).   costs: float64 (n,), of this
    call alone.   started_at: seconds since the epoch.   compute_s: wall time in model and policy, None where
    nobody knows.   policy_s: of that, the policy's step.   device_s: seconds of forward passes on a GPU, None where the
    model measures none.
    error: why the call failed; the arrays are empty then.   failures: why rows of a call that did not fail have no
    answer, by place; they are neither accepted nor deferred.   state_bytes: of a deferred row's state.
    """

    predictions: Ints
    confidences: Floats
    accepted: Bools
    costs: Floats
    started_at: float
    compute_s: float | None
    policy_s: float
    device_s: float | None
    node: str
    error: str | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    state_bytes: float = 0.0

    @classmethod
    def broken(cls, started_at: float, node: str, error: str) -> CallResult:
        """Return the result of a call that nothing came back of but an error."""
        nothing = np.zeros(0)
        return cls(
            predictions=np.zeros(0, dtype=np.int32),
            confidences=nothing,
            accepted=np.zeros(0, dtype=bool),
            costs=nothing,
            started_at=started_at,
            compute_s=None,
            policy_s=0.0,
            device_s=None,
            node=node,
            error=printable(error),
        )

    @property
    def n_answered(self) -> int:
        """Return how many rows the model answered."""
        return len(self.accepted) - len(self.failures)

    @property
    def n_deferred(self) -> int:
        """Return how many rows go on."""
        return self.n_answered - int(self.accepted.sum())
