"""The shadow sample: of a share of answers, what the rest of the cascade would have made of them.

Rows go on from where they stopped, after their request has been answered, and only to stages that are idle: at most one
call's worth at a time, so that a request never waits for more than one of them. With a log, those that all stages have
answered wait for idle stages, too: otherwise rows that stop early would be missing from the hours in which much is
asked, and these would not.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import shake_128
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from cauc_ray.cascade.rows import Call
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.metrics import ServingMetrics
from cauc_ray.serving.request_state import RequestState, requests_of

if TYPE_CHECKING:
    from cauc_ray.serving.cascade import Cascade
    from cauc_ray.serving.table_log import RowLogits, TableLog

# How often the stages are looked at, how long rows wait for them to be idle, and how many may wait.
PERIOD_S = 0.02
PATIENCE_S = 10.0
MOST_WAITING = 1000
# Below all that requests have.
PRIORITY = 1 << 31

# Called with the stages that gave the answers, int (n,), and which of them the whole cascade gave too, bool (n,).
Report: TypeAlias = Callable[[Ints, Bools], None]


def new_answer_id(*, sampled: bool) -> str:
    """Return an id for an answer.   sampled: whether its rows may be in the shadow sample."""
    return f"{int(sampled)}{secrets.token_hex(16)[1:]}"


def sampled_rows(answer_id: str, n: int, share: float) -> Bools | None:
    """Return which of an answer's n rows are in the shadow sample, bool (n,); None for none.

    Its id alone decides, so that every router knows it of the rows that feedback names.
    """
    if not share or answer_id[0] == "0":
        return None
    # Faster than to seed a generator, and the first rows' are the same for any n.
    chosen: Bools = np.frombuffer(shake_128(answer_id.encode()).digest(4 * n), "<u4") < share * 2.0**32
    return chosen if chosen.any() else None


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Rows that wait for idle stages.

    request: the shadow request for them.   until: on the loop's clock.   known: their example ids and the logits that
    there are, for the log.
    """

    request: RequestState
    stage: int
    state: Floats | None
    predictions: Ints
    report: Report
    until: float
    known: Sequence[tuple[str, RowLogits]]


class Shadows:
    """Has rows of the sample asked on when their stages are idle.

    share: of rows.   cascade: that answers them.   log: that takes what the models gave for them.
    """

    def __init__(self, share: float, cascade: Cascade, metrics: ServingMetrics, log: TableLog | None = None) -> None:
        self.share, self.log, self._cascade, self._metrics = share, log, cascade, metrics
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looks = False

    def keeps(self, call: Call) -> Bools | None:
        """Return which of a call's rows are in the sample and may be asked on, bool (n,); None for none."""
        kept = None
        for request, (rows, positions) in zip(requests_of(call), call.pieces(), strict=True):
            if request.chosen is not None and call.stage < request.last_stage:
                kept = np.zeros(len(call), dtype=bool) if kept is None else kept
                kept[positions] = request.chosen[rows.indices]
        return kept

    def offer(self, request: RequestState, answer_id: str, report: Report) -> None:
        """Have the chosen rows of an answered request compared with the whole cascade's answers, some time.

        report: called with the result; not called for rows that are dropped, or were answered by the last stage.
        """
        until, last = self._loop.time() + PATIENCE_S, len(request.policy.stages) - 1
        waiting = []
        # Those of the last stage are of use to a log alone.
        for stopped in [one for one in request.stopped if one.stage < last or self.log is not None]:
            rows = stopped.rows.tolist()
            columns = {name: column[stopped.rows] for name, column in request.columns.items()}
            shadow = RequestState(
                request.policy,
                request.key,
                columns,
                len(rows),
                last,
                self._metrics,
                priority=PRIORITY,
                shadow=True,
                chosen=np.ones(len(rows), dtype=bool),
                logs=self.log is not None,
            )
            known = [(f"{answer_id}-{row}", request.logged.get(row, {})) for row in rows if self.log is not None]
            predictions = request.predictions[stopped.rows]
            waiting.append(_Waiting(shadow, stopped.stage, stopped.state, predictions, report, until, known))
        if self.log is not None and request.chosen is not None:
            n_chosen = int(np.count_nonzero(request.chosen))
            self.log.count("incomplete", n_chosen - sum(one.request.n for one in waiting))
        # All of a request's rows or none: what is dropped must not depend on where they stopped.
        if sum(one.request.n for one in (*self._waiting, *waiting)) > MOST_WAITING:
            self._drop(*waiting)
        else:
            self._waiting += waiting
        if self._waiting and not self._looks:
            self._looks = True
            self._loop.call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        """Send on what may go, and come back while anything waits."""
        # Looked at once: the first rows that are sent make a stage busy.
        stages, now = self._cascade.scheduler.stages, self._loop.time()
        idle = [not any(at.in_work for at in stages[stage:]) for stage in range(len(stages) + 1)]
        n_left = min(at.limits.batch_size for at in stages)
        for waiting in list(self._waiting):
            if waiting.until <= now:
                self._waiting.remove(waiting)
                self._drop(waiting)
            elif n_left > 0 and idle[waiting.stage + 1 if self.log is None else 1]:
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
        if waiting.stage < request.last_stage:
            try:
                await self._cascade.follow(request, waiting.stage + 1, waiting.state)
            except RequestError:
                self._drop(waiting)
                return
            self._metrics.shadow_rows("compared", request.n)
            waiting.report(np.full(request.n, waiting.stage), request.predictions == waiting.predictions)
        if self.log is not None:
            whole = [(name, {**of, **request.logged.get(row, {})}) for row, (name, of) in enumerate(waiting.known)]
            self.log.add([(name, of) for name, of in whole if len(of) > request.last_stage])

    def _drop(self, *dropped: _Waiting) -> None:
        for waiting in dropped:
            if waiting.stage < waiting.request.last_stage:
                self._metrics.shadow_rows("dropped", waiting.request.n)
            if self.log is not None:
                self.log.count("incomplete", waiting.request.n)
