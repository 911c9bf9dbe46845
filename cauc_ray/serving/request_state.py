"""A request on its way through the cascade: its rows, and what is known of their answers so far."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.rows import Owner, Positions, Trouble
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.faults import RequestError

if TYPE_CHECKING:
    from cauc_ray.serving.metrics import ServingMetrics

RETRY_AFTER_S = 1.0
# Repeated, as in Owner: faster than numpy.full for a few rows.
_NO_OPTION = np.array([-1], np.int16)


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
    called: the stages that have answered.   shadow: whether it is a shadow request, counted separately.
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
        self.spans_ns: dict[int, tuple[int, int]] = {}
        self._digest: bytes | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def capped(self) -> bool:
        """Return whether some of the policy's stages are not to be called."""
        return self.last_stage < len(self.policy.stages) - 1

    def note(
        self, stage: int, indices: Ints, result: CallResult, positions: Positions, carried: Any, held_at: Ints
    ) -> Bools:
        """Take a call's answers for some rows as the best so far. Returns which of them go on, bool (m,)."""
        on = super().note(stage, indices, result, positions, carried, held_at)
        self.called.add(stage)
        now = time.time_ns()
        self.spans_ns[stage] = self.spans_ns.get(stage, (now, 0))[0], now
        if result.likeliest is not None and self.policy.reference is not None:
            self.likeliest[indices] = result.likeliest[positions]
        if self.wants_scores and result.scores is not None:
            self._keep_scores(indices, result.scores[positions])
        if self.shadow:  # the last stage's word is wanted
            on[:] = stage < self.last_stage
            return on
        capped = self.capped and stage == self.last_stage
        n_on = int(np.count_nonzero(on))
        self._metrics.rows(stage, "accepted", len(on) - n_on)
        self._metrics.rows(stage, "capped" if capped else "deferred", n_on)
        if result.carried is not None and np.count_nonzero(early := result.carried[positions] & ~on):
            self.early.append(Early(stage, indices[early], carried[held_at[positions][early]]))
        if capped:
            on[:] = False
        return on

    def left_out(self, indices: Ints, stage: int, trouble: Trouble, reason: str) -> int:
        """Let rows that a stage has not answered stop with the best so far, or refuse the request."""
        self.at[indices] = -1
        if self.shadow:
            self.fail(RequestError(reason, 503))
        elif self.degrades and (self.stages[indices] >= 0).all():
            self.degraded[indices] = True
            self.reason = self.reason or reason
            self._metrics.rows(stage, "degraded", len(indices))
            self._metrics.degraded(stage, trouble, len(indices))
            return len(indices)
        else:
            self._metrics.rows(stage, "failed", len(indices))
            if trouble == "refused":
                self.fail(RequestError(reason, 422))
            elif trouble == "overloaded" and stage == 0:
                self.fail(RequestError(f"{reason}; try again later", 429, RETRY_AFTER_S))
            else:
                self.fail(RequestError(reason, 503, RETRY_AFTER_S))
        return 0

    def ready(self, stage: int, waited_s: float) -> None:
        """Note that rows were ready for a stage so long ago."""
        if stage not in self.spans_ns:
            self.spans_ns[stage] = time.time_ns() - int(waited_s * 1e9), 0

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
        elif self.scores.shape[1] < k:
            self.scores = np.pad(self.scores, ((0, 0), (0, k - self.scores.shape[1])), constant_values=-np.inf)
        self.scores[rows] = -np.inf
        self.scores[rows, :k] = scores
