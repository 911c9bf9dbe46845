"""The shadow sample: of a share of answers, what the rest of the cascade would have made of them.

Rows go on from where they stopped, after their request has been answered, and only to stages that are idle: at most one
call's worth at a time, so that a request never waits for more than one of them. With a log, those that all stages have
answered wait for idle stages, too: otherwise rows that stop early would be missing from the hours in which much is
asked, and these would not. While there is a candidate, some rows are answered again by it
and the incumbent, so that their answers to the same rows can be compared.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import shake_128
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
    from cauc_ray.serving.table_log import RowLogits, TableLog

# How often the stages are looked at, how long rows wait for them to be idle, and how many may wait.
PERIOD_S = 0.02
PATIENCE_S = 10.0
MOST_WAITING = 1000
# Below all that requests have.
PRIORITY = 1 << 31

# Called with the stages that gave the answers, int (n,), and which of them the whole cascade gave too, bool (n,).
Report: TypeAlias = Callable[[Ints, Bools], None]
# Called with which answers of a candidate and the incumbent the whole cascade gave too, and what they cost, (n, 2).
PairReport: TypeAlias = Callable[[Bools, Floats], None]


def new_answer_id(*, sampled: bool, drawn: bool = False) -> str:
    """Return an id for an answer.

    sampled: whether its rows may be in the shadow sample.   drawn: whether its policy was drawn among several.
    """
    return f"{int(sampled)}{secrets.randbits(123) << 1 | drawn:031x}"


def was_drawn(answer_id: str) -> bool:
    """Return whether the policy of an answer was drawn among several."""
    return bool(int(answer_id[-1], 16) & 1)


def sampled_rows(answer_id: str, n: int, share: float) -> Bools | None:
    """Return which of an answer's n rows are in the shadow sample, bool (n,); None for none.

    Its id alone decides, so that every router knows it of the rows that feedback names.
    """
    if not share or answer_id[0] == "0":
        return None
    # Faster than to seed a generator, and the first rows' are the same for any n.
    chosen: Bools = np.frombuffer(shake_128(answer_id.encode()).digest(4 * n), "<u4") < share * 2.0**32
    return chosen if chosen.any() else None


def _nothing() -> None:
    return


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Shadow requests for the same rows, which wait until stages are idle.

    Attributes:
        requests: The requests.
        stage: The first stage that they need; past the last where all have answered.
        state: State of the rows, float64 (n, S), None without any.
        until: Time at which they are dropped, on the loop's clock.
        answered: Called once they are answered.
        dropped: Called once they are dropped.
    """

    requests: Sequence[RequestState]
    stage: int
    state: Floats | None
    until: float
    answered: Callable[[], None]
    dropped: Callable[[], None] = _nothing

    @property
    def n(self) -> int:
        """Return the number of rows that stages are asked."""
        return sum(request.n for request in self.requests)

    @property
    def asks(self) -> bool:
        """Return whether a stage is needed."""
        return self.stage <= self.requests[0].last_stage


class Shadows:
    """Has rows of the sample asked on when their stages are idle.

    Args:
        share: Share of rows in the sample.
        cascade: The cascade that answers them.
        metrics: Metrics of the service.
        log: Takes the models' logits of the sample.
    """

    def __init__(self, share: float, cascade: Cascade, metrics: ServingMetrics, log: TableLog | None = None) -> None:
        self.share, self.log, self._cascade, self._metrics = share, log, cascade, metrics
        self._loop = asyncio.get_running_loop()
        self._rng = np.random.default_rng()
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    def keeps(self, call: Call) -> Bools | None:
        """Return which of a call's rows are in the sample and may be asked on, bool (n,); None for none."""
        mask = None
        for request, (rows, positions) in zip(requests_of(call), call.pieces(), strict=True):
            if request.chosen is not None and call.stage < request.last_stage:
                mask = np.zeros(len(call), dtype=bool) if mask is None else mask
                mask[positions] = request.chosen[rows.indices]
        return mask

    def offer(self, request: RequestState, answer_id: str, report: Report) -> None:
        """Have the chosen rows of an answered request compared with the whole cascade's answers, some time.

        report: called with the result; not called for rows that are dropped, or were answered by the last stage.
        """
        last, waiting = len(request.policy.stages) - 1, []
        # Those of the last stage are of use to a log alone.
        for stopped in [one for one in request.stopped if one.stage < last or self.log is not None]:
            shadow = self._shadow(request.policy, request.key, request.columns, stopped.rows)
            names = [f"{answer_id}-{row}" for row in stopped.rows.tolist()]
            logged = [request.logged.get(row, {}) for row in stopped.rows.tolist()]
            answers = stopped.stage, request.predictions[stopped.rows]
            answered = partial(self._compared, shadow, *answers, report, names, logged)
            lost = partial(self._lost, shadow)
            waiting.append(self._waits([shadow], stopped.stage + 1, stopped.state, answered, lost))
        if self.log is not None and request.chosen is not None:
            n_chosen = int(np.count_nonzero(request.chosen))
            self.log.count("incomplete", n_chosen - sum(one.n for one in waiting))
        self._wait(*waiting)

    def pair(self, policies: Mapping[str, Policy], columns: Batch, n: int, report: PairReport) -> None:
        """Have some of n rows answered by a candidate and the incumbent, by the keys of their policies in this order.

        report: as offer()'s.
        """
        rows = np.flatnonzero(self._rng.random(n) < self.share)
        if len(rows):
            pair = [self._shadow(policy, key, columns, rows) for key, policy in policies.items()]
            self._wait(self._waits(pair, 0, None, partial(_report_pair, report, *pair)))

    def _shadow(self, policy: Policy, key: str, columns: Batch, rows: Ints) -> RequestState:
        sample, last = {name: column[rows] for name, column in columns.items()}, len(policy.stages) - 1
        return RequestState(
            policy,
            key,
            sample,
            len(rows),
            last,
            self._metrics,
            priority=PRIORITY,
            shadow=True,
            chosen=np.ones(len(rows), dtype=bool),
            logs=self.log is not None,
        )

    def _waits(
        self,
        requests: Sequence[RequestState],
        stage: int,
        state: Floats | None,
        answered: Callable[[], None],
        dropped: Callable[[], None] = _nothing,
    ) -> _Waiting:
        return _Waiting(requests, stage, state, self._loop.time() + PATIENCE_S, answered, dropped)

    def _wait(self, *waiting: _Waiting) -> None:
        # All of a request's rows or none: what is dropped must not depend on where they stopped.
        if sum(one.n for one in (*self._waiting, *waiting)) > MOST_WAITING:
            self._drop(*waiting)
            return
        self._waiting += waiting
        if self._waiting and (self._looking is None or self._looking.done()):
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
        idle = [not any(at.in_work for at in stages[stage:]) for stage in range(len(stages) + 1)]
        n_left = min(at.limits.batch_size for at in stages)
        for waiting in list(self._waiting):
            if waiting.until <= now:
                self._waiting.remove(waiting)
                self._drop(waiting)
            elif n_left > 0 and idle[waiting.stage if self.log is None else min(waiting.stage, 1)]:
                n_left -= waiting.n
                self._waiting.remove(waiting)
                task = self._loop.create_task(self._ask(waiting))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _ask(self, waiting: _Waiting) -> None:
        if waiting.asks:
            follow = self._cascade.follow
            try:
                await asyncio.gather(*(follow(one, waiting.stage, waiting.state) for one in waiting.requests))
            except RequestError:
                self._drop(waiting)
                return
            self._metrics.shadow_rows("compared", waiting.n)
        waiting.answered()

    def _drop(self, *dropped: _Waiting) -> None:
        for waiting in dropped:
            if waiting.asks:
                self._metrics.shadow_rows("dropped", waiting.n)
            waiting.dropped()

    def _lost(self, shadow: RequestState) -> None:
        if self.log is not None:
            self.log.count("incomplete", shadow.n)

    def _compared(
        self,
        shadow: RequestState,
        stage: int,
        predictions: Ints,
        report: Report,
        names: Sequence[str],
        logged: Sequence[RowLogits],
    ) -> None:
        """Report rows that stopped at a stage with these answers, and log them with their earlier logits."""
        if stage < shadow.last_stage:
            report(np.full(shadow.n, stage), shadow.predictions == predictions)
        if self.log is not None:
            whole = [{**of, **shadow.logged.get(row, {})} for row, of in enumerate(logged)]
            pairs = zip(names, whole, strict=True)
            self.log.add([(name, of) for name, of in pairs if len(of) > shadow.last_stage])


def _report_pair(report: PairReport, candidate: RequestState, incumbent: RequestState) -> None:
    """Report a pair; both are held to the incumbent's last stage."""
    agreed = np.stack([one.accepted == incumbent.predictions for one in (candidate, incumbent)], axis=1)
    report(agreed, np.stack([candidate.accepted_costs, incumbent.accepted_costs], axis=1))
