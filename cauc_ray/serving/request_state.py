"""Requests on their way through the cascade, and the calls that take rows of several."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, cast

import numpy as np

from cauc_ray.cascade.bundles import Bundle, Part
from cauc_ray.cascade.isolation import row_of
from cauc_ray.cascade.rows import Call, CallResult, Ended, Owner, Positions, Rows, Trouble, Vector
from cauc_ray.data.values import concat_column
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.logits import widened
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy, joined_states
from cauc_ray.protocol.tensors import RequestError

if TYPE_CHECKING:
    from cauc_ray.serving.policies_live import InForce, Member

RETRY_AFTER_S = 1.0
# Repeated, as in Owner: faster than numpy.full for a few rows.
_NO_OPTION = np.array([-1], np.int16)


class StageError(Exception):
    """A failed call of a stage.

    Attributes:
        kind: "died" (its replica ended, so another may do it), "gone" (its replica no longer existed), or "failed" (the
            model or the code around it raised).
        message: The reason.
    """

    def __init__(self, kind: Literal["died", "gone", "failed"], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Visit:
    """Rows of a request that a stage has answered.

    Attributes:
        stage: The stage.
        confidences: Confidences after it, float64 (m,).
        costs: Costs of the call, float64 (m,).
        n_on: Rows that the policy defers.
        waited_s: Seconds that they took at the stage.
        at_ns: When they were answered, in nanoseconds since the epoch.
    """

    stage: int
    confidences: Floats
    costs: Floats
    n_on: int
    waited_s: float
    at_ns: int


@dataclass(frozen=True, slots=True)
class Missed:
    """Rows of a request that a stage has not answered.

    Attributes:
        stage: The stage.
        trouble: Why it has not answered.
        n: Number of rows.
        degrades: Whether the rows get an earlier stage's answer.
    """

    stage: int
    trouble: Trouble
    n: int
    degrades: bool


class Sample(Protocol):
    """Chosen rows of a request, which are followed through the stages.

    Attributes:
        chosen: The rows, bool (n,).
        logs: Whether their models' own logits are wanted.
    """

    chosen: Bools
    logs: bool

    def note(self, request: RequestState, ended: Ended, rows: Rows, positions: Positions, on: Bools) -> Bools:
        """Take a call's answers for some rows; return which of them go to a later stage.

        Args:
            request: The request.
            ended: The call's result.
            rows: The call's rows.
            positions: Their positions in the request.
            on: Which of them the policy defers, bool (m,).
        """


@dataclass(frozen=True, slots=True)
class Question:
    """What a client has asked, without its rows.

    Attributes:
        in_force: The policies at that time.
        member: The policy that answers.
        answer_id: Id of the answer.
        drawn: Whether the policy was drawn among several.
        headers: Headers of the request.
        started_ns: When it came, in nanoseconds since the epoch.
    """

    in_force: InForce
    member: Member
    answer_id: str
    drawn: bool
    headers: Mapping[str, str]
    started_ns: int


class RequestState(Owner):
    """A request of n rows. Its policy is the one that was active when it arrived.

    Attributes:
        policy: The policy that decides.
        key: Key by which stages know the policy.
        columns: The input, each (n, ...).
        last_stage: The deepest stage for its rows.
        degrades: Whether rows that a later stage does not answer keep the answer of the one before.
        likeliest: Likeliest options of the best answers so far, int16 (n,), as Step.likeliest has them; only where the
            policy has a reference.
        asks_for: Requested vectors.
        vectors: Vectors of the best answers, float64 (n, K).
        question: What the client has asked, None for a shadow request.
        number: Number of the request in the order of arrival, -1 for a shadow request.
        sample: Its rows in the shadow sample, None for none.
        visits: What stages have answered, in order.
        missed: What stages have not answered, in order.
        reason: Why rows are degraded, as of the first one.
        tokens: Of each row's prompts, and generated, as far as models report them, int (n, 2).
    """

    def __init__(
        self,
        policy: Policy,
        key: str,
        columns: Batch,
        n: int,
        last_stage: int,
        *,
        priority: int = 0,
        degrades: bool = False,
        asks_for: frozenset[Vector] = frozenset(),
        question: Question | None = None,
        number: int = -1,
        sample: Sample | None = None,
    ) -> None:
        super().__init__(0, n)
        self.policy, self.key, self.columns, self.last_stage = policy, key, columns, last_stage
        self.degrades, self.asks_for, self.priority = degrades, asks_for, priority
        self.question, self.number, self.sample = question, number, sample
        # Joined arrays of two types would become one type, and of two shapes a column of objects: a model may read
        # them differently, or not at all, and a row's answer would depend on its neighbours.
        self.kind = frozenset((name, column.dtype.str, column.shape[1:]) for name, column in columns.items())
        self.likeliest = _NO_OPTION.repeat(n)
        self.vectors: dict[Vector, Floats] = {}
        self.visits: list[Visit] = []
        self.missed: list[Missed] = []
        self.reason: str | None = None
        self.tokens: Ints = np.zeros((n, 2), dtype=np.int64)
        self._digest: bytes | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def shadow(self) -> bool:
        """Return whether it is a shadow request, which no client waits for."""
        return self.number < 0

    @property
    def capped(self) -> bool:
        """Return whether some of the policy's stages are not to be called."""
        return self.last_stage < len(self.policy.stages) - 1

    @property
    def is_answered(self) -> bool:
        """Return whether the request has ended with an answer."""
        return self.done.done() and not self.done.cancelled() and self.done.exception() is None

    def note(self, ended: Ended, rows: Rows, positions: Positions) -> Bools:
        """Take a call's answers for some rows as the best so far. Returns which of them go on, bool (m,)."""
        on = super().note(ended, rows, positions)
        stage, result, indices = ended.stage, ended.result, rows.indices
        self.visits.append(
            Visit(
                stage,
                result.confidences[positions],
                result.costs[positions],
                int(np.count_nonzero(on)),
                ended.now - rows.ready_at,
                time.time_ns(),
            )
        )
        if result.tokens is not None:
            self.tokens[indices] += result.tokens[positions]
        if result.likeliest is not None and self.policy.reference is not None:
            self.likeliest[indices] = result.likeliest[positions]
        for name in self.asks_for:
            self._keep(name, indices, result.vectors[name][positions])
        if self.sample is not None:
            on = self.sample.note(self, ended, rows, positions, on)
        if self.capped and stage == self.last_stage:
            on[:] = False
        return on

    def left_out(self, indices: Ints, stage: int, trouble: Trouble, reason: str) -> int:
        """Let rows that a stage has not answered stop with the best so far, or refuse the request."""
        self.at[indices] = -1
        degrades = self.degrades and bool((self.stages[indices] >= 0).all())
        self.missed.append(Missed(stage, trouble, len(indices), degrades))
        if degrades:
            self.degraded[indices] = True
            self.reason = self.reason or reason
            return len(indices)
        if trouble == "refused":
            self.fail(RequestError(reason, 422))
        elif trouble == "overloaded" and stage == 0:
            self.fail(RequestError(f"{reason}; try again later", 429, RETRY_AFTER_S))
        else:
            self.fail(RequestError(reason, 503, RETRY_AFTER_S))
        return 0

    def fingerprint(self) -> bytes:
        """Return a digest of the input: the same for two requests that hold the same."""
        if self._digest is None:
            digest = blake2b(digest_size=16)
            for name, column in sorted(self.columns.items()):
                digest.update(repr((name, column.dtype.str, column.shape)).encode())
                values = column.ravel() if column.dtype == object else [column.tobytes()]
                for content in (value if isinstance(value, bytes) else repr(value).encode() for value in values):
                    digest.update(len(content).to_bytes(8))
                    digest.update(content)
            self._digest = digest.digest()
        return self._digest

    def parameters(self) -> dict[str, Any]:
        """Return how the request was answered, for its response and the log."""
        called = {visit.stage for visit in self.visits}
        question = self.question and {"policy_id": self.question.member.id, "answer_id": self.question.answer_id}
        return {
            **(question or {}),
            "stage": max(self.stages.tolist()),
            "stages_called": ",".join(name for stage, name in enumerate(self.policy.models) if stage in called),
            "cost": math.fsum(self.costs.tolist()),
            "cost_unit": self.policy.cost_unit,
            "degraded": self.reason is not None,
            **({} if self.reason is None else {"reason": self.reason}),
        }

    def source(self, row: int) -> str:
        """Return what a row's confidence is based on: the stage that has given the answer, and its confidences."""
        stage = int(self.stages[row] if self.texts is None else self.sources[row])
        return self.policy.stages[stage].source if stage >= 0 else ""

    def release(self, row: int) -> None:
        """Keep one row's input in the place of all: once all rows are answered, only probes read any."""
        self.columns = {
            name: np.broadcast_to(column[row : row + 1].copy(), column.shape) for name, column in self.columns.items()
        }

    def finish(self) -> None:
        """End the request: no row needs anything more."""
        if not self.done.done():
            self.done.set_result(None)

    def fail(self, error: Exception) -> None:
        """End the request without an answer."""
        self.live = False
        if not self.done.done():
            self.done.set_exception(error)

    def _keep(self, name: Vector, rows: Ints, values: Floats) -> None:
        k = values.shape[1]
        whole = self.vectors[name] = widened(self.vectors.get(name, np.full((self.n, k), -np.inf)), k)
        whole[rows] = -np.inf
        whole[rows, :k] = values


@dataclass(frozen=True, slots=True)
class StageCall:
    """A call of a stage.

    Attributes:
        bundles: Columns and states of the rows, in their order.
        parts: Neighbouring rows with the same policy, one of each bundle.
        policies: Policies by the parts' keys.
        keeps: Rows whose state comes back even if they stop, bool (n,), those of samples; None for none.
        wants: Requested vectors.
        good_row: A row that the stage has answered before, to distinguish a bad input from a broken replica; None where
            the replica has one.
        replica: Name of the replica.
        router: Name of the router.
        needed_replicas: Replicas of this stage that the router needs.
    """

    bundles: Sequence[Bundle]
    parts: Sequence[Part]
    policies: Mapping[str, Policy]
    keeps: Bools | None = None
    wants: frozenset[Vector] = frozenset()
    good_row: Batch | None = None
    replica: str = ""
    router: str = ""
    needed_replicas: float = 0.0


@dataclass(frozen=True, slots=True)
class FactsCall:
    """Asks a replica for its model's facts.

    Attributes:
        life: The version of the router that asks.
        replica: Name of the replica.
    """

    life: str
    replica: str


# A call's result, and the states of deferred rows.
Answer: TypeAlias = tuple[CallResult, Floats | None]


def requests_of(call: Call) -> list[RequestState]:
    """Return whose a call's rows are, one for each piece of rows."""
    return [cast("RequestState", rows.owner) for rows in call.rows]


def stage_call(call: Call, replica: str, *, router: str, needed_replicas: float) -> StageCall:
    """Return a call as a stage takes it."""
    pieces = list(zip(requests_of(call), call.pieces(), strict=True))
    wants, keeps = frozenset[Vector]().union(*(request.asks_for for request, _ in pieces)), None
    for request, (rows, positions) in pieces:
        if (sample := request.sample) is not None:
            if call.stage < request.last_stage:
                keeps = np.zeros(len(call), dtype=bool) if keeps is None else keeps
                keeps[positions] = sample.chosen[rows.indices]
            if sample.logs and sample.chosen[rows.indices].any():
                wants |= {"given"}
    parts, bundles = list[Part](), list[Bundle]()
    for key, group in groupby(pieces, lambda piece: piece[0].key):
        bundle = _bundle([(request, rows) for request, (rows, _) in group])
        parts.append(Part(len(bundles), np.arange(bundle.n_rows), key))
        bundles.append(bundle)
    good = call.good_row
    return StageCall(
        bundles=bundles,
        parts=parts,
        policies={request.key: request.policy for request, _ in pieces},
        keeps=keeps,
        wants=wants,
        good_row=None if good is None else row_of(cast("RequestState", good.owner).columns, good.indices[0]),
        replica=replica,
        router=router,
        needed_replicas=needed_replicas,
    )


def _bundle(pieces: Sequence[tuple[RequestState, Rows]]) -> Bundle:
    """Return rows of requests as one."""
    columns = [
        request.columns if len(rows) == request.n else {name: of[rows.indices] for name, of in request.columns.items()}
        for request, rows in pieces
    ]
    states = [(len(rows), None if rows.source is None else rows.source[rows.positions]) for _, rows in pieces]
    return Bundle({name: concat_column([of[name] for of in columns]) for name in columns[0]}, joined_states(states))
