"""Rows, their owners, calls and call results: small, without the data of the rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from cauc_ray.errors import printable
from cauc_ray.models.answers import Wire, wires
from cauc_ray.numbers.answer_keys import NO_ANSWER
from cauc_ray.numbers.types import Bools, Floats, Ints

# Who is at fault where no row of a call was answered: the replica (it fails on a row known to be good, too), the stage
# (a wrong key, a server that is down), the caller (the worker does not have a policy), or unknown.
Fault: TypeAlias = Literal["replica", "stage", "policy", "unknown"]
# Why a stage has not answered rows: it cannot answer any, not in time, has too much to do, failed; it is the rows' own
# fault; or the pool's limits of deferral or money are reached.
Trouble: TypeAlias = Literal["down", "timeout", "overloaded", "error", "refused", "limited"]
# What a row may be asked for besides its answer: calibrated logits after its last stage, and that model's own.
Vector: TypeAlias = Literal["scores", "logits", "given"]
# Answers in words, object (n,), None where there is none.
Texts: TypeAlias = npt.NDArray[np.object_]
# Positions in a call, a slice where they are neighbours.
Positions: TypeAlias = Ints | slice

# Repeated, as a request is made: numpy.full takes three times as long for a few rows.
NO_OPTION, NO_STAGE, UNKNOWN = np.array([-1], np.int32), np.array([-1], np.int8), np.array([np.nan])


@dataclass(frozen=True, slots=True)
class CallResult:
    """The answers to a call of n rows; what deferred rows carry is returned next to it.

    Attributes:
        predictions: int32 (n,).
        confidences: float64 (n,).
        accepted: The rows that stop, bool (n,).
        costs: Of this call, float64 (n,).
        started_at: Seconds since the epoch.
        compute_s: Wall time in model and policy, None where it is unknown.
        policy_s: Of that, the policy's step.
        device_s: Seconds of forward passes on a GPU, None where the model measures none.
        node: The node that computed it.
        error: Why no row was answered; the arrays are empty then.
        failures: Why some rows have no answer, by position; they are neither accepted nor carried on.
        state_bytes: Size of a deferred row's state.
        fault: Who is at fault where no row was answered.
        raised: Failed rows on which the model raised, or gave no finite number, while it answered others.
        waiting: Failed rows whose answer is yet to come: nobody's fault.
        carried: The rows whose state is returned next to it, in their order, bool (n,).
        vectors: Those that parts want, float64 (n, K).
        own_costs: Costs that the model reported of this call, float64 (n,); None where it reports none or no part wants
            the model's own vectors.
        likeliest: As Step.likeliest returns them, int16 (n,); None where no policy has a reference.
        next: The stage of a row that does not stop, int8 (n,); None for the one after.
        texts: What the model has said, object (n,), where that is the answer held now; None elsewhere, and of models
            that score options.
        tokens: Of prompts, and generated, as the model reports them, int (n, 2); None where it does not.
        n_batches: Batches that the model was given one after the other.
        wire: Of a remote call, None of others.
    """

    predictions: Ints = field(default_factory=lambda: np.zeros(0, np.int32))
    confidences: Floats = field(default_factory=lambda: np.zeros(0))
    accepted: Bools = field(default_factory=lambda: np.zeros(0, bool))
    costs: Floats = field(default_factory=lambda: np.zeros(0))
    started_at: float = 0.0
    compute_s: float | None = None
    policy_s: float = 0.0
    device_s: float | None = None
    node: str = ""
    error: str | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    state_bytes: float = 0.0
    fault: Fault | None = None
    raised: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()
    carried: Bools | None = None
    vectors: Mapping[Vector, Floats] = field(default_factory=dict)
    own_costs: Floats | None = None
    likeliest: Ints | None = None
    next: Ints | None = None
    texts: Texts | None = None
    tokens: Ints | None = None
    n_batches: int = 1
    wire: Wire | None = None

    @classmethod
    def joined(cls, results: Sequence[CallResult]) -> CallResult:
        """Return the results of a call's batches as one, the first one of which no row was answered if there is one.

        Vectors are left out.
        """
        failed = next((result for result in results if result.error is not None), None)
        if len(results) == 1 or failed is not None:
            return failed or results[0]
        starts = np.cumsum([0, *(len(result.accepted) for result in results)]).tolist()
        placed = list(zip(starts, results, strict=False))
        device_s = [result.device_s for result in results if result.device_s is not None]
        arrays = {"predictions": -1, "confidences": np.nan, "accepted": False, "costs": 0.0}
        optional = {"carried": False, "likeliest": -1, "next": -1, "texts": None, "tokens": 0}
        joined = {name: _joined(results, name, unknown) for name, unknown in (arrays | optional).items()}
        sums: dict[str, Any] = {name: sum(getattr(result, name) or 0 for result in results) for name in _SUMMED}
        return replace(
            results[0],
            **joined,
            **sums,
            device_s=sum(device_s) if device_s else None,
            failures={start + row: why for start, result in placed for row, why in result.failures.items()},
            raised=frozenset(start + row for start, result in placed for row in result.raised),
            waiting=frozenset(start + row for start, result in placed for row in result.waiting),
            state_bytes=max(result.state_bytes for result in results),
            vectors={},
            own_costs=None,
            wire=wires(result.wire for result in results),
        )

    @classmethod
    def broken(cls, started_at: float, node: str, error: str, fault: Fault = "unknown", **fields: Any) -> CallResult:
        """Return the result of a call that nothing came back of but an error."""
        return cls(started_at=started_at, node=node, error=printable(error), fault=fault, **fields)

    @property
    def n_answered(self) -> int:
        """Return how many rows the model answered."""
        return len(self.accepted) - len(self.failures)

    @property
    def n_deferred(self) -> int:
        """Return how many rows go on."""
        return self.n_answered - int(self.accepted.sum())


_SUMMED = ("compute_s", "policy_s", "n_batches")


def _joined(results: Sequence[CallResult], name: str, unknown: Any) -> Any:
    """Return arrays (n, …) of batches as one; None if no batch has one, unknown for those of a batch that has none."""
    values = [getattr(result, name) for result in results]
    example = next((array for array in values if array is not None), None)
    if example is None:
        return None
    filled = zip(values, results, strict=True)
    return np.concatenate(
        [
            np.full((len(result.accepted), *example.shape[1:]), unknown, example.dtype) if array is None else array
            for array, result in filled
        ]
    )


class Owner:
    """A block of the input, or a request, and what has become of its n rows.

    Attributes:
        block: Number of the block; 0 for a request.
        n: Number of rows.
        names: What the shell knows the rows by.
        restarts: How often all of it was started again, because objects were lost with their nodes.
        predictions: Of the last stage that answered, int32 (n,).
        confidences: Of that stage, float64 (n,).
        stages: That stage, int8 (n,), -1 where none has answered.
        costs: float64 (n,).
        texts: Answers in words, object (n,); None of models that score options.
        sources: The stage that has given that answer, int8 (n,), -1 where none has.
        visited: A bit for each stage that was called, int64 (n,).
        degraded: Rows answered without a stage that should have, bool (n,).
        failures: The stage and the reason, by position; stage -1 where the row could not be read.
        at: The stage that a row waits for or is at, int8 (n,), -1 once it needs none.
        n_left: Rows that need something.
        live: False once its answers are no longer wanted.
        closed: Stages that have taken too long, whose answers are not wanted.
        deadline: When the last answer is wanted, in seconds.
        hurries: Whether that is sooner than stages are expected to answer.
        kind: Rows whose owners have different ones share no call.
        priority: Rows of owners with a lower one go first.
    """

    def __init__(self, block: int, n: int, names: Any = None, restarts: int = 0) -> None:
        self.block, self.n, self.names, self.restarts = block, n, names, restarts
        self.predictions: Ints = NO_OPTION.repeat(n)
        self.confidences: Floats = UNKNOWN.repeat(n)
        self.stages: Ints = NO_STAGE.repeat(n)
        self.costs: Floats = np.zeros(n)
        self.texts: Texts | None = None
        self.sources: Ints = NO_STAGE.repeat(n)
        self.visited: Ints = np.zeros(n, dtype=np.int64)
        self.degraded: Bools = np.zeros(n, dtype=bool)
        self.failures: dict[int, tuple[int, str]] = {}
        self.at: Ints = np.zeros(n, dtype=np.int8)
        self.n_left = n
        self.live = True
        self.closed: set[int] = set()
        self.deadline = inf
        self.hurries = False
        self.kind: Any = None
        self.priority = 0

    def note(self, ended: Ended, rows: Rows, positions: Positions) -> Bools:
        """Take a call's answers for some of the rows; of deferred ones too: they count if the next stage is down.

        Args:
            ended: The call's end.
            rows: The rows.
            positions: Their positions in the call.

        Returns:
            Which of them are deferred, bool (m,).
        """
        result, indices = ended.result, rows.indices
        self.costs[indices] += result.costs[positions]
        self.visited[indices] |= 1 << ended.stage
        predictions, confidences = result.predictions[positions], result.confidences[positions]
        if predictions.min(initial=0) < 0:  # an encoder gives no answers
            mask = predictions >= 0
            indices, predictions, confidences = indices[mask], predictions[mask], confidences[mask]
        self._note_texts(rows.indices, ended, positions)
        self.predictions[indices] = predictions
        self.confidences[indices] = confidences
        self.stages[indices] = ended.stage
        goes_on: Bools = ~result.accepted[positions]
        return goes_on

    def _note_texts(self, indices: Ints, ended: Ended, positions: Positions) -> None:
        """Take what a model has said where it is the answer held now."""
        if ended.result.texts is None:
            return
        texts = ended.result.texts[positions]
        is_own = np.array([text is not None for text in texts], dtype=bool)
        is_own |= ended.result.predictions[positions] == NO_ANSWER  # where a stage takes back what was said before
        self.texts = np.full(self.n, None) if self.texts is None else self.texts
        self.texts[indices[is_own]] = texts[is_own]
        self.sources[indices[is_own]] = ended.stage

    def left_out(self, indices: Ints, stage: int, trouble: Trouble, reason: str) -> int:
        """Note rows that a stage has not answered.

        Where it is down, or the limits of a pool that degrades are reached, the answer before is theirs, if there is
        one.

        Returns for how many it is.
        """
        self.at[indices] = -1
        answered = (self.stages[indices] >= 0) & (trouble in ("down", "limited"))
        self.degraded[indices[answered]] = True
        failed = indices[~answered]
        self.stages[failed] = -1
        self.failures.update(dict.fromkeys(failed.tolist(), (stage, reason)))
        return int(np.count_nonzero(answered))

    def wants(self, stage: int) -> bool:
        """Return whether a stage's answers to its rows are still wanted."""
        return self.live and stage not in self.closed

    def fingerprint(self) -> bytes | None:
        """Return a digest of what may end or hang a replica, the same for two owners of the same; None if unknown."""
        return None


@dataclass(slots=True, eq=False)
class Rows:
    """Rows of one owner that go to a stage together. Nothing of it changes.

    Attributes:
        owner: The owner.
        indices: Positions in the owner, int (n,).
        source: What holds their columns and state, which only the shell can read.
        positions: Positions in the source, int (n,).
        ready_at: When they became ready for the stage, in seconds.
        row_bytes: What a row takes of the source.
        state_bytes: Of these, its state.
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
        # Ten times as fast as replace(): it is done for each call.
        indices, positions = self.indices[chosen], self.positions[chosen]
        return Rows(self.owner, indices, self.source, positions, self.ready_at, self.row_bytes, self.state_bytes)


@dataclass(slots=True, eq=False)
class Call:
    """Rows for one call of a stage.

    Attributes:
        stage: The stage.
        rows: The rows.
        due: When it may go out.
        attempt: 1, or more where rows are tried again.
        isolated: Whether its replica has nothing else meanwhile, so that if it ends, these rows are to blame.
        failed_on: Replicas on which these very rows failed, once for each failure.
        n_unproven: How often they failed while the stage had never answered any.
        probe: Whether it only asks a replica in doubt for a row that the stage has answered before.
        replica: The replica that has it.
        good_row: A row that the stage has answered, for a replica that may have none.
        handle: The shell's.
        sent_at: When it was sent.
        began_at: When its model is known to have begun.
        suspected_at: When a replica first ended or hung while it had these rows.
        deadly: Whether that replica ended.
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
    deadly: bool = False
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
        fresh = {"attempt": self.attempt + 1, "replica": -1, "good_row": None, "handle": None, "began_at": None}
        return replace(self, due=due, **(fresh | changes))

    def without_sources(self) -> Call:
        """Return the call without what holds its rows, for records."""
        return replace(self, rows=[replace(rows, source=None) for rows in self.rows], good_row=None, handle=None)

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


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a call.

    Attributes:
        stage: Its stage.
        result: Its result.
        goes_on: What holds the deferred rows, in their order.
        held_at: Where it has those of each row of the call, int (n,).
        now: The time.
    """

    stage: int
    result: CallResult
    goes_on: Any
    held_at: Ints
    now: float
