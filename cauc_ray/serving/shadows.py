"""The shadow sample: of a share of early answers, what the rest of the cascade would have made of them.

Rows go on from where they stopped, after their request has been answered, and only to stages that are idle: at most one
call's worth at a time, so that a request never waits for more than one of them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cauc_ray.cascade.rows import Call
from cauc_ray.numbers.types import Bools, Floats, Ints
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


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Early answers that wait to be compared.   request: the shadow request for them.   until: on the loop's clock."""

    request: RequestState
    stage: int
    state: Floats
    predictions: Ints
    report: Report
    until: float


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
        self._looks = False

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
        until, last = self._loop.time() + PATIENCE_S, len(request.policy.stages) - 1
        for early in request.early:
            n = len(early.rows)
            if sum(waiting.request.n for waiting in self._waiting) + n > MOST_WAITING:
                self._metrics.shadow_rows("dropped", n)
                continue
            columns = {name: column[early.rows] for name, column in request.columns.items()}
            shadow = RequestState(request.policy, request.key, columns, n, last, self._metrics, shadow=True)
            predictions = request.predictions[early.rows]
            self._waiting.append(_Waiting(shadow, early.stage, early.state, predictions, report, until))
        if self._waiting and not self._looks:
            self._looks = True
            self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        """Send on what may go, and come back while anything waits."""
        # Looked at once: the first rows that are sent make a stage busy.
        stages, now = self._cascade.scheduler.stages, self._loop.time()
        idle = [not any(at.in_work for at in stages[stage:]) for stage in range(len(stages))]
        n_left = min(at.limits.batch_size for at in stages)
        for waiting in list(self._waiting):
            if waiting.until <= now:
                self._waiting.remove(waiting)
                self._metrics.shadow_rows("dropped", waiting.request.n)
            elif n_left > 0 and idle[waiting.stage + 1]:
                n_left -= waiting.request.n
                self._waiting.remove(waiting)
                task = self._loop.create_task(self._ask(waiting))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._looks = bool(self._waiting)
        if self._looks:
            self._loop.call_later(PERIOD_S, self._look)

    async def _ask(self, waiting: _Waiting) -> None:
        request = waiting.request
        try:
            await self._cascade.follow(request, waiting.stage + 1, waiting.state)
        except RequestError:
            self._metrics.shadow_rows("dropped", request.n)
        else:
            self._metrics.shadow_rows("compared", request.n)
            waiting.report(np.full(request.n, waiting.stage), request.predictions == waiting.predictions)
