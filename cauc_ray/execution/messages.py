"""Rows and calls as the controller knows them: small, plain, no payload among it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cauc_ray.numbers.types import Bools, Ints


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
