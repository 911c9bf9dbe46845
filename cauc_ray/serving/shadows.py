"""The shadow sample: of a share of early answers, what the rest of the cascade would have made of them.

Rows go on from where they stopped, after their request has been answered, and only to stages that are idle: at most one
call's worth at a time, so that a request never waits for more than one of them. While there are candidates, some rows
are answered again by each of them and the incumbent, so that their answers to the same rows can be compared.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cauc_ray.cascade.rows import Call
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.metrics import ServingMetrics
from cauc_ray.serving.request_state import RequestState, requests_of

if TYPE_CHECKING:
    from cauc_ray.serving.cascade import Cascade

# How often the stages are looked at, how long rows wait for them to be idle, and how many may wait.
PERIOD_S = 0.02
PATIENCE_S = 10.0
MOST_WAITING = 1000

# Called with the stages that gave the answers, int (n,), and which of them the whole cascade gave too, bool (n,).
Report: TypeAlias = Callable[[Ints, Bools], None]
# Called with which answers of a candidate and the incumbent the whole cascade gave too, and what they cost, (n, 2).
PairReport: TypeAlias = Callable[[Bools, Floats], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Shadow requests for the same rows, which wait until stages are idle.

    stage: the first that they need.   state: float64 (n, S), what the rows bring along, None without any.   report:
    called once all are answered.   until: on the loop's clock.
    """

    requests: Sequence[RequestState]
    stage: int
    state: Floats | None
    report: Callable[[], None]
    until: float

    @property
    def n(self) -> int:
        """Return the number of rows that stages are asked."""
        return sum(request.n for request in self.requests)


class Shadows:
    """Chooses early answers at random, and has them asked on when their stages are idle.

    share: of early answers.   cascade: that answers them.
    """

    def __init__(self, share: float, cascade: Cascade, metrics: ServingMetrics) -> None:
        self._share, self._cascade, self._metrics = share, cascade, metrics
        self._loop = asyncio.get_running_loop()
        self._rng = np.random.default_rng(0)
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    def keeps(self, call: Call) -> Bools | None:
        """Return which of a call's rows are chosen if they stop early, bool (n,); all of those that were once."""
        chosen = None
        if not self._share:
            return chosen
        for request, (_, positions) in zip(requests_of(call), call.pieces(), strict=True):
            early = call.stage < request.last_stage and not request.capped and request.policy.in_turn
            if request.shadow or early:
                chosen = np.zeros(len(call), dtype=bool) if chosen is None else chosen
                n = positions.stop - positions.start
                chosen[positions] = True if request.shadow else self._rng.random(n) < self._share
        return chosen

    def offer(self, request: RequestState, report: Report) -> None:
        """Have the chosen rows of an answered request compared with the whole cascade's answers, some time.

        report: called with the result; not called for rows that are dropped.
        """
        for early in request.early:
            shadow = self._shadow(request.policy, request.key, request.columns, early.rows)
            own = partial(_report, report, early.stage, request.predictions[early.rows], shadow)
            self._wait([shadow], early.stage + 1, early.state, own)

    def pair(self, policies: Mapping[str, Policy], columns: Batch, n: int, report: PairReport) -> None:
        """Have some of n rows answered by a candidate and the incumbent, by the keys of their policies in this order.

        report: as offer()'s.
        """
        rows = np.flatnonzero(self._rng.random(n) < self._share)
        if len(rows):
            pair = [self._shadow(policy, key, columns, rows) for key, policy in policies.items()]
            self._wait(pair, 0, None, partial(_report_pair, report, *pair))

    def _shadow(self, policy: Policy, key: str, columns: Batch, rows: Ints) -> RequestState:
        own, last = {name: column[rows] for name, column in columns.items()}, len(policy.stages) - 1
        return RequestState(policy, key, own, len(rows), last, self._metrics, shadow=True)

    def _wait(
        self, requests: Sequence[RequestState], stage: int, state: Floats | None, report: Callable[[], None]
    ) -> None:
        waiting = _Waiting(requests, stage, state, report, self._loop.time() + PATIENCE_S)
        if sum(one.n for one in self._waiting) + waiting.n > MOST_WAITING:
            self._metrics.shadow_rows("dropped", waiting.n)
            return
        self._waiting.append(waiting)
        if self._looking is None or self._looking.done():
            # A task, not a timer: with the service it ends, and nothing begins after that.
            self._looking = self._loop.create_task(self._look_while_any_waits())

    async def _look_while_any_waits(self) -> None:
        while self._waiting:
            await asyncio.sleep(PERIOD_S)
            self._look()

    def _look(self) -> None:
        """Send on what may go."""
        # Looked at once: the first rows that are sent make a stage busy.
        stages, now = self._cascade.scheduler.stages, self._loop.time()
        idle = [not any(at.in_work for at in stages[stage:]) for stage in range(len(stages))]
        n_left = min(at.limits.batch_size for at in stages)
        for waiting in list(self._waiting):
            if waiting.until <= now:
                self._waiting.remove(waiting)
                self._metrics.shadow_rows("dropped", waiting.n)
            elif n_left > 0 and idle[waiting.stage]:
                n_left -= waiting.n
                self._waiting.remove(waiting)
                task = self._loop.create_task(self._ask(waiting))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _ask(self, waiting: _Waiting) -> None:
        follow = self._cascade.follow
        asked = (follow(request, waiting.stage, waiting.state) for request in waiting.requests)
        try:
            await asyncio.gather(*asked)
        except RequestError:
            self._metrics.shadow_rows("dropped", waiting.n)
        else:
            self._metrics.shadow_rows("compared", waiting.n)
            waiting.report()


def _report(report: Report, stage: int, predictions: Ints, shadow: RequestState) -> None:
    report(np.full(shadow.n, stage), shadow.predictions == predictions)


def _report_pair(report: PairReport, candidate: RequestState, incumbent: RequestState) -> None:
    """Report a pair; both are held to the incumbent's last stage."""
    agreed = np.stack([one.stopped == incumbent.predictions for one in (candidate, incumbent)], axis=1)
    report(agreed, np.stack([candidate.stopped_costs, incumbent.stopped_costs], axis=1))
