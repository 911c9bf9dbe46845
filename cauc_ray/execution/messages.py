"""What the controller and the stages say to each other: small, plain, no payload among it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cauc_ray.numbers.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one input block that go to a stage together.

    block: its number.   indices: int (n,), places in the block.   state: the call that left their state, None
    before the first stage.   state_rows: int (n,), places in that state.   ready_at: seconds since the epoch,
    when they became ready for the stage.
    """

    block: int
    indices: Ints
    state: int | None
    state_rows: Ints
    ready_at: float

    def __len__(self) -> int:
        return len(self.indices)

    def cut(self, n: int) -> tuple[Rows, Rows]:
        """Return the first n rows and the others."""
        return self._take(slice(None, n)), self._take(slice(n, None))

    def _take(self, part: slice) -> Rows:
        return Rows(self.block, self.indices[part], self.state, self.state_rows[part], self.ready_at)


@dataclass(frozen=True, slots=True)
class Call:
    """One batch for one replica of a stage.   attempt: 1, or more where a failed batch was cut in two."""

    id: int
    stage: int
    replica: int
    rows: tuple[Rows, ...]
    attempt: int

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.rows)

    @property
    def ready_at(self) -> float:
        """Return when the row that waited longest became ready."""
        return min(rows.ready_at for rows in self.rows)


@dataclass(frozen=True, slots=True)
class CallResult:
    """What a stage says of a call of n rows; the deferred rows' state goes beside it, as an object of its own.

    predictions: int32 (n,).   confidences: float64 (n,).   accepted: bool (n,).   costs: float64 (n,), of this
    call alone.   started_at: seconds since the epoch.   compute_s: wall time in model and policy.   device_s:
    time on an accelerator, None without one.   error: why the call failed; the arrays are empty then.
    failures: why rows of a call that did not fail have no answer, by place; they are neither accepted nor deferred.
    """

    predictions: Ints
    confidences: Floats
    accepted: Bools
    costs: Floats
    started_at: float
    compute_s: float
    device_s: float | None
    node: str
    error: str | None = None
    failures: Mapping[int, str] = field(default_factory=dict)

    @property
    def n_deferred(self) -> int:
        """Return how many rows go on."""
        return len(self.accepted) - int(self.accepted.sum()) - len(self.failures)
