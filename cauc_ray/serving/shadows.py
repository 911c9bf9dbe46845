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

from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.faults import RequestError
from cauc_ray.serving.request_state import RequestState

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
    """Rows that a stage has answered.   columns: of these, each (n, ...).   until: on the loop's clock."""

    policy: Policy
    stage: int
    columns: Batch
    predictions: Ints
    state: Floats
    report: Report
    until: float


class Shadows:
    """Chooses early answers at random, and has them asked on when their stages are idle.

    share: of early answers.   cascade: that answers them.
    """

    def __init__(self, share: float, cascade: Cascade) -> None:
        self.share, self._cascade = share, cascade
        self._loop = asyncio.get_running_loop()
        self._lot = np.random.default_rng(0)
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks = False

    def keeps(self, request: RequestState, stage: int, n: int) -> Bools | None:
        """Return which of n rows at a stage are chosen if they stop early, bool (n,); all of those that were once."""
        if request.shadow:
            return np.ones(n, dtype=bool)
        if self.share == 0 or stage == request.last_stage or request.capped or not request.policy.in_turn:
            return None
        chosen: Bools = self._lot.random(n) < self.share
        return chosen

    def offer(self, request: RequestState, report: Report) -> None:
        """Take the chosen rows of an answered request.   report: called with the result, if there is one."""
        until = self._loop.time() + PATIENCE_S
        for early in request.early:
            if sum(len(waiting.predictions) for waiting in self._waiting) + len(early.rows) > MOST_WAITING:
                self._cascade.dropped(len(early.rows))
                continue
            columns = {name: column[early.rows] for name, column in request.columns.items()}
            predictions = request.predictions[early.rows]
            self._waiting.append(
                _Waiting(request.policy, early.stage, columns, predictions, early.state, report, until)
            )
        if self._waiting and not self._looks:
            self._looks = True
            self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        """Send on what may go, and come back while anything waits."""
        now = self._loop.time()
        for waiting in [one for one in self._waiting if one.until <= now]:
            self._waiting.remove(waiting)
            self._cascade.dropped(len(waiting.predictions))
        # Looked at once: the first rows that are sent make a stage busy.
        stages = self._cascade.scheduler.stages
        idle = [not any(at.in_work for at in stages[stage:]) for stage in range(len(stages))]
        n_left = min(at.limits.batch_size for at in stages)
        for waiting in list(self._waiting):
            if n_left > 0 and idle[waiting.stage + 1]:
                n_left -= len(waiting.predictions)
                self._waiting.remove(waiting)
                task = self._loop.create_task(self._ask(waiting))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
        self._looks = bool(self._waiting)
        if self._looks:
            self._loop.call_later(PERIOD_S, self._look)

    async def _ask(self, waiting: _Waiting) -> None:
        n = len(waiting.predictions)
        request = self._cascade.shadow_of(waiting.policy, waiting.columns, n)
        try:
            await self._cascade.follow(request, waiting.stage + 1, waiting.state)
        except RequestError:
            self._cascade.dropped(n)
        else:
            waiting.report(np.full(n, waiting.stage), request.predictions == waiting.predictions)
