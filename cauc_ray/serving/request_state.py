"""Requests on their way through the cascade, and the calls that take rows of several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np

from cauc_ray.cascade.bundles import Part
from cauc_ray.cascade.isolation import row_of
from cauc_ray.cascade.rows import Call, CallResult, Ended, Owner, Positions, Rows, Trouble, Vector
from cauc_ray.data.values import concat_column
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.logits import widened
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy, joined_states
from cauc_ray.protocol.tensors import RequestError

if TYPE_CHECKING:
    from cauc_ray.serving.metrics import ServingMetrics


RETRY_AFTER_S = 1.0
# Repeated, as in Owner: faster than numpy.full for a few rows.
_NO_OPTION = np.array([-1], np.int16)


class StageError(Exception):
    """A call of a stage that came to nothing.

    kind: "died" (its replica ended, so another may do it), "gone" (its replica was there no more), "down" (no replica
    takes calls), "overloaded", or "failed" (the model or the code around it raised).
    """

    def __init__(self, kind: Literal["died", "gone", "down", "overloaded", "failed"], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


@dataclass(frozen=True, slots=True)
class Stopped:
    """Chosen rows that stopped at a stage: before the last they are asked on.

    Attributes:
        stage: The stage.
        rows: Positions in the request, int (m,).
        state: State that they would have carried on, float64 (m, S); None at the last stage.
    """

    stage: int
    rows: Ints
    state: Floats | None


# What is asked of rows that are logged.
_GIVEN: frozenset[Vector] = frozenset({"given"})


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
        called: The stages that have answered.
        shadow: Whether it is a shadow request, counted separately, whose rows go on to the last stage.
        accepted: Of a shadow request, the answers that its policy would have given, int32 (n,).
        accepted_costs: Of a shadow request, the costs of these answers.
        chosen: Its rows in the shadow sample, bool (n,), None for none.
        logs: Whether the models' logits of chosen rows are stored in `logged`.
        logged: Logits by row and stage, with the cost of the call as far as the model reports it.
        stopped: The stages at which chosen rows stopped.
        reason: Why rows are degraded, as of the first one.
        spans_ns: By stage, when rows were first ready for it and when they were last answered, since the epoch.
    """

    def __init__(
        self,
        policy: Policy,
        key: str,
        columns: Batch,
        n: int,
        last_stage: int,
        metrics: ServingMetrics,
        *,
        priority: int = 0,
        degrades: bool = False,
        asks_for: frozenset[Vector] = frozenset(),
        shadow: bool = False,
        chosen: Bools | None = None,
        logs: bool = False,
    ) -> None:
        super().__init__(0, n)
        self.policy, self.key, self.columns, self.last_stage = policy, key, columns, last_stage
        self.degrades, self.asks_for, self.shadow = degrades, asks_for, shadow
        self._metrics = metrics
        self.priority = priority
        # Joined arrays of two types would become one type, and of two shapes a column of objects: a model may read
        # them differently, or not at all, and a row's answer would depend on its neighbours.
        self.kind = frozenset((name, column.dtype.str, column.shape[1:]) for name, column in columns.items())
        self.likeliest = _NO_OPTION.repeat(n)
        self.called: set[int] = set()
        self.vectors: dict[Vector, Floats] = {}
        self.reason: str | None = None
        self.chosen, self.logs = chosen, logs
        self.stopped: list[Stopped] = []
        self.logged: dict[int, dict[int, tuple[Floats, float | None]]] = {}
        if shadow:
            self.accepted, self.accepted_costs = np.full(n, -1, np.int32), np.zeros(n)
        self.spans_ns: dict[int, tuple[int, int]] = {}
        self._digest: bytes | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def capped(self) -> bool:
        """Return whether some of the policy's stages are not to be called."""
        return self.last_stage < len(self.policy.stages) - 1

    def note(self, ended: Ended, rows: Rows, positions: Positions) -> Bools:
        """Take a call's answers for some rows as the best so far. Returns which of them go on, bool (m,)."""
        on = super().note(ended, rows, positions)
        stage, result, indices = ended.stage, ended.result, rows.indices
        self.called.add(stage)
        now_ns, waited_s = time.time_ns(), ended.now - rows.ready_at
        since_ns, _ = self.spans_ns.get(stage, (now_ns - int(waited_s * 1e9), 0))
        self.spans_ns[stage] = since_ns, now_ns
        if result.likeliest is not None and self.policy.reference is not None:
            self.likeliest[indices] = result.likeliest[positions]
        for name in self.asks_for:
            self._keep(name, indices, result.vectors[name][positions])
        if self.logs and self.chosen is not None and "given" in result.vectors:
            chosen = self.chosen[indices]
            logits = result.vectors["given"][positions][chosen].astype(np.float32)
            costs = [None] * len(logits) if result.own_costs is None else result.own_costs[positions][chosen].tolist()
            for row, of_row in zip(indices[chosen].tolist(), zip(logits, costs, strict=True), strict=True):
                self.logged.setdefault(row, {})[stage] = of_row
        if self.shadow:  # the last stage's word is wanted
            self._metrics.shadowed(stage, result.costs[positions])
            stop = indices[~on & (self.accepted[indices] < 0)]
            self.accepted[stop], self.accepted_costs[stop] = self.predictions[stop], self.costs[stop]
            on[:] = stage < self.last_stage
            return on
        capped = self.capped and stage == self.last_stage
        n_on = int(np.count_nonzero(on))
        self._metrics.answered(stage, result.confidences[positions], result.costs[positions], waited_s)
        self._metrics.rows(stage, "accepted", len(on) - n_on)
        self._metrics.rows(stage, "capped" if capped else "deferred", n_on)
        if self.chosen is not None and np.count_nonzero(stops := self.chosen[indices] & ~on):
            state = ended.goes_on[ended.held_at[positions][stops]] if stage < self.last_stage else None
            self.stopped.append(Stopped(stage, indices[stops], state))
        if capped:
            on[:] = False
        return on

    def left_out(self, indices: Ints, stage: int, trouble: Trouble, reason: str) -> int:
        """Let rows that a stage has not answered stop with the best so far, or refuse the request."""
        self.at[indices] = -1
        if self.shadow:
            self.fail(RequestError(reason, 503))
            return 0
        degrades = self.degrades and bool((self.stages[indices] >= 0).all())
        self._metrics.rows(stage, "degraded" if degrades else "failed", len(indices))
        if degrades:
            self.degraded[indices] = True
            self.reason = self.reason or reason
            self._metrics.degraded(stage, trouble, len(indices))
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
                digest.update(repr(column.tolist()).encode() if column.dtype == object else column.tobytes())
            self._digest = digest.digest()
        return self._digest

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
        columns: Columns of the rows, in their order, each (n, ...).
        parts: Neighbouring rows with the same policy and requested vectors.
        policies: Policies by the parts' keys.
        good_row: A row that the stage has answered before, to distinguish a bad input from a broken replica; None where
            the replica has one.
        replica: Name of the replica.
        router: Name of the router.
        needed_replicas: Replicas of this stage that the router needs.
    """

    columns: Batch
    parts: Sequence[Part]
    policies: Mapping[str, Policy]
    good_row: Batch | None = None
    replica: str = ""
    router: str = ""
    needed_replicas: float = 0.0


def _asks(request: RequestState, rows: Rows) -> tuple[str, frozenset[Vector]]:
    """Return what is asked of rows: by which policy, and for which vectors."""
    logs = request.logs and request.chosen is not None and request.chosen[rows.indices].any()
    return request.key, request.asks_for | _GIVEN if logs else request.asks_for


# A call's result, and the states of deferred rows.
Answer: TypeAlias = tuple[CallResult, Floats | None]


def requests_of(call: Call) -> list[RequestState]:
    """Return whose a call's rows are, one for each piece of rows."""
    return [cast("RequestState", rows.owner) for rows in call.rows]


def stage_call(call: Call, replica: str, keeps: Bools | None, *, router: str, needed_replicas: float) -> StageCall:
    """Return a call as a stage takes it.   keeps: bool (n,), rows whose state is wanted even if they stop, if any."""
    requests = requests_of(call)
    parts, start = [], 0
    asked = zip(requests, call.rows, strict=True)
    for (key, wants), group in groupby(asked, lambda one: _asks(*one)):
        states = [(len(rows), None if rows.source is None else rows.source[rows.positions]) for _, rows in group]
        positions = slice(start, start + sum(n for n, _ in states))
        mask = None if keeps is None else keeps[positions]
        parts.append(Part(0, positions, key, joined_states(states), mask, wants))
        start = positions.stop
    indices = [slice(None) if len(rows) == rows.owner.n else rows.indices for rows in call.rows]
    good = call.good_row
    return StageCall(
        columns={
            name: concat_column([request.columns[name][rows] for request, rows in zip(requests, indices, strict=True)])
            for name in requests[0].columns
        },
        parts=parts,
        policies={request.key: request.policy for request in requests},
        good_row=None if good is None else row_of(cast("RequestState", good.owner).columns, good.indices[0]),
        replica=replica,
        router=router,
        needed_replicas=needed_replicas,
    )
