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
from cauc_ray.cascade.rows import Call, CallResult, Ended, Owner, Positions, Rows, Trouble
from cauc_ray.data.blocks import concat_column
from cauc_ray.models.answers import Batch
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
class Early:
    """Answers of a stage before the last that were chosen to be asked on.

    rows: int (m,), positions in the request.   state: float64 (m, S), what they would have brought along.
    """

    stage: int
    rows: Ints
    state: Floats


class RequestState(Owner):
    """A request of n rows. Its policy is the one that was active when it arrived.

    key: what stages know the policy by.   columns: the input, each (n, ...).   last_stage: none of its rows goes
    beyond.   degrades: whether rows that a later stage does not answer keep the answer of the one before.
    likeliest: int16 (n,), the likeliest options of the best answers so far, as Step.likeliest has them, kept only where
    the policy has a reference.   scores: float64 (n, K), of the best answers, kept only where they are wanted.
    called: the stages that have answered.   shadow: whether it is a shadow request, counted separately, whose rows go
    on to the last stage; stopped: int32 (n,), what they would have answered, and stopped_costs: at which cost.
    early: its rows that get a shadow request.   reason: why rows are degraded, as of the first one.   spans_ns: by
    stage, when rows were first ready for it and when they were last answered, since the epoch.
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
        degrades: bool = False,
        wants_scores: bool = False,
        shadow: bool = False,
    ) -> None:
        super().__init__(0, n)
        self.policy, self.key, self.columns, self.last_stage = policy, key, columns, last_stage
        self.degrades, self.wants_scores, self.shadow = degrades, wants_scores, shadow
        self._metrics = metrics
        # Joined arrays of two types would become one type, and of two shapes a column of objects: a model may read
        # them differently, or not at all, and a row's answer would depend on its neighbours.
        self.kind = frozenset((name, column.dtype.str, column.shape[1:]) for name, column in columns.items())
        self.likeliest = _NO_OPTION.repeat(n)
        self.called: set[int] = set()
        self.scores: Floats | None = None
        self.reason: str | None = None
        self.early: list[Early] = []
        if shadow:
            self.stopped, self.stopped_costs = np.full(n, -1, np.int32), np.zeros(n)
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
        if self.wants_scores and result.scores is not None:
            self._keep_scores(indices, result.scores[positions])
        if self.shadow:  # the last stage's word is wanted
            self._metrics.shadowed(stage, result.costs[positions])
            stop = indices[~on & (self.stopped[indices] < 0)]
            self.stopped[stop], self.stopped_costs[stop] = self.predictions[stop], self.costs[stop]
            on[:] = stage < self.last_stage
            return on
        capped = self.capped and stage == self.last_stage
        n_on = int(np.count_nonzero(on))
        self._metrics.answered(stage, result.confidences[positions], result.costs[positions], waited_s)
        self._metrics.rows(stage, "accepted", len(on) - n_on)
        self._metrics.rows(stage, "capped" if capped else "deferred", n_on)
        if result.carried is not None and np.count_nonzero(early := result.carried[positions] & ~on):
            self.early.append(Early(stage, indices[early], ended.goes_on[ended.held_at[positions][early]]))
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

    def _keep_scores(self, rows: Ints, scores: Floats) -> None:
        k = scores.shape[1]
        if self.scores is None:
            self.scores = np.full((self.n, k), -np.inf)
        elif (more := k - self.scores.shape[1]) > 0:
            self.scores = np.pad(self.scores, ((0, 0), (0, more)), constant_values=-np.inf)
        self.scores[rows] = -np.inf
        self.scores[rows, :k] = scores


@dataclass(frozen=True, slots=True)
class StageCall:
    """What a stage is asked.

    columns: of the rows, in their order, each (n, ...).   parts: neighbouring rows of which the same is asked.
    policies: that decide, by the parts' keys.   good_row: one that the stage has answered before, to distinguish a
    bad input from a broken replica; None where the replica has one.   replica: which one is asked.   router: who asks.
    needed_replicas: of this stage, by it.
    """

    columns: Batch
    parts: Sequence[Part]
    policies: Mapping[str, Policy]
    good_row: Batch | None = None
    replica: str = ""
    router: str = ""
    needed_replicas: float = 0.0


# A call's result, and the states of the rows that go on.
Answer: TypeAlias = tuple[CallResult, Floats | None]


def requests_of(call: Call) -> list[RequestState]:
    """Return whose a call's rows are, one for each piece of rows."""
    return [cast("RequestState", rows.owner) for rows in call.rows]


def stage_call(call: Call, replica: str, keeps: Bools | None, *, router: str, needed_replicas: float) -> StageCall:
    """Return a call as a stage takes it.   keeps: bool (n,), rows whose state is wanted even if they stop, if any."""
    requests = requests_of(call)
    parts, start = [], 0
    asked = zip(requests, call.rows, strict=True)
    for (key, wants_scores), alike in groupby(asked, lambda one: (one[0].key, one[0].wants_scores)):
        states = [(len(rows), None if rows.source is None else rows.source[rows.positions]) for _, rows in alike]
        positions = slice(start, start + sum(n for n, _ in states))
        kept = None if keeps is None else keeps[positions]
        parts.append(Part(0, positions, key, joined_states(states), kept, wants_scores))
        start = positions.stop
    own = [slice(None) if len(rows) == rows.owner.n else rows.indices for rows in call.rows]
    good = call.good_row
    return StageCall(
        columns={
            name: concat_column([request.columns[name][rows] for request, rows in zip(requests, own, strict=True)])
            for name in requests[0].columns
        },
        parts=parts,
        policies={request.key: request.policy for request in requests},
        good_row=None if good is None else row_of(cast("RequestState", good.owner).columns, good.indices[0]),
        replica=replica,
        router=router,
        needed_replicas=needed_replicas,
    )
