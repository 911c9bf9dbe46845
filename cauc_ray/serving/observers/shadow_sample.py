"""The shadow sample: of a share of answers, what the rest of the cascade would have made of them.

Rows go on from where they stopped, after their request has been answered, and only to stages that are idle: at most one
call's worth at a time, so that a request never waits for more than one of them. With a log, those that all stages have
answered wait for idle stages, too: otherwise rows that stop early would be missing from the hours in which much is
asked, and these would not. While there is a candidate, some rows are answered again by it
and the incumbent, so that their answers to the same rows can be compared.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import numpy as np

from cauc_ray.cascade.bundles import n_bytes
from cauc_ray.cascade.rows import Ended, Positions, Rows
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.answer_ids import sampled_rows
from cauc_ray.serving.cascade import Cascade
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.observers.drift_watch import DriftWatch
from cauc_ray.serving.observers.logged import RowLogits
from cauc_ray.serving.observers.service_metrics import ServingMetrics
from cauc_ray.serving.observers.table_log import TableLog
from cauc_ray.serving.request_state import RequestState

# How often the stages are looked at, how long rows wait for them to be idle, and how many rows and bytes may wait.
PERIOD_S = 0.02
PATIENCE_S = 10.0
MOST_WAITING, MOST_BYTES = 1000, 64_000_000
# Below all that requests have.
PRIORITY = 1 << 31

# Called with which answers of a candidate and the incumbent the whole cascade gave too, and what they cost, (n, 2).
PairReport: TypeAlias = Callable[[Bools, Floats], None]


@dataclass(slots=True)
class SampledRows:
    """Chosen rows of a request of n, and what becomes of them.

    Attributes:
        chosen: The rows, bool (n,).
        logs: Whether the models' own logits are kept.
        asks_on: Whether all rows go on to the last stage.
        stopped: The stages at which rows stopped, the rows, int (m,), and the state that they would have carried on,
            float64 (m, S), None at the last stage.
        logged: Logits by row and stage, with the cost of the call as far as the model reports it.
        accepted: Where all rows go on, the answers that the policy would have given, int32 (n,), -1 before that.
        accepted_costs: The costs of these answers.
    """

    chosen: Bools
    logs: bool
    asks_on: bool = False
    stopped: list[tuple[int, Ints, Floats | None]] = field(default_factory=list)
    logged: dict[int, dict[int, tuple[Floats, float | None]]] = field(default_factory=dict)
    accepted: Ints = field(init=False)
    accepted_costs: Floats = field(init=False)

    def __post_init__(self) -> None:
        self.accepted, self.accepted_costs = np.full(len(self.chosen), -1, np.int32), np.zeros(len(self.chosen))

    def note(self, request: RequestState, ended: Ended, rows: Rows, positions: Positions, on: Bools) -> Bools:
        """Take a call's answers for some rows. Returns which of them go on."""
        stage, result, indices = ended.stage, ended.result, rows.indices
        chosen, stops = self.chosen[indices], indices[~on]
        if self.logs and "given" in result.vectors:
            logits = result.vectors["given"][positions][chosen].astype(np.float32)
            costs = [None] * len(logits) if result.own_costs is None else result.own_costs[positions][chosen].tolist()
            for row, of_row in zip(indices[chosen].tolist(), zip(logits, costs, strict=True), strict=True):
                self.logged.setdefault(row, {})[stage] = of_row
        if self.asks_on:  # the last stage's answer is the one to compare with
            stops = stops[self.accepted[stops] < 0]
            self.accepted[stops], self.accepted_costs[stops] = request.predictions[stops], request.costs[stops]
            return np.full(len(on), stage < request.last_stage)
        if np.count_nonzero(ends := chosen & ~on):
            state = ended.goes_on[ended.held_at[positions][ends]] if stage < request.last_stage else None
            self.stopped.append((stage, indices[ends], state))
        return on


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Shadow requests for the same rows, which wait until stages are idle.

    Attributes:
        requests: The requests.
        stage: The first stage that they need; past the last where all have answered.
        state: State of the rows, float64 (n, S), None without any.
        until: Time at which they are dropped, on the loop's clock.
        report: Called with their samples once they are answered.
        logged: Whether rows that are dropped are missing from the log.
    """

    requests: Sequence[RequestState]
    stage: int
    state: Floats | None
    until: float
    report: Callable[..., None]
    logged: bool = False

    @property
    def n(self) -> int:
        """Return the number of rows that stages are asked."""
        return sum(request.n for request in self.requests)

    @property
    def n_bytes(self) -> int:
        """Return what their inputs take."""
        return sum(n_bytes(request.columns) for request in self.requests)

    @property
    def asks(self) -> bool:
        """Return whether a stage is needed."""
        return self.stage <= self.requests[0].last_stage


class ShadowSample(Observer):
    """Has rows of the sample asked on when their stages are idle.

    Args:
        share: Share of rows in the sample.
        metrics: Metrics of the service.
        drift: Takes whether early answers were the whole cascade's.
        log: Takes the models' logits of the sample.

    Attributes:
        cascade: The cascade that answers them, once there is one.
    """

    cascade: Cascade

    def __init__(self, share: float, metrics: ServingMetrics, drift: DriftWatch, log: TableLog | None = None) -> None:
        self._share, self._metrics, self._drift, self._log = share, metrics, drift, log
        self._rng = np.random.default_rng()
        self._waiting: deque[_Waiting] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking: asyncio.Task[None] | None = None

    def on_request(self, request: RequestState) -> None:
        """Choose rows of a request."""
        if request.question is not None:
            chosen = sampled_rows(request.question.answer_id, request.n, self._share)
            request.sample = None if chosen is None else SampledRows(chosen, self._log is not None)

    def on_answer(self, request: RequestState) -> None:
        """Have the chosen rows of an answered request compared with the whole cascade's answers, some time."""
        sample, question = request.sample, request.question
        if not isinstance(sample, SampledRows) or question is None or not request.is_answered:
            return
        last, waiting = len(request.policy.stages) - 1, []
        # Those of the last stage are of use to a log alone.
        for stage, rows, state in [one for one in sample.stopped if one[0] < last or self._log is not None]:
            shadow = self._shadow(request.policy, request.key, request.columns, rows)
            names = [f"{question.answer_id}-{row}" for row in rows.tolist()]
            logged = [sample.logged.get(row, {}) for row in rows.tolist()]
            report = partial(
                self._compared, shadow, question.member.id, stage, request.predictions[rows], names, logged
            )
            waiting.append(_Waiting([shadow], stage + 1, state, self._patience(), report, self._log is not None))
        if self._log is not None:
            n_chosen = int(np.count_nonzero(sample.chosen))
            self._metrics.count("log_rows", "incomplete", n=n_chosen - sum(one.n for one in waiting))
        self._wait(*waiting)

    def pair(self, policies: Mapping[str, Policy], request: RequestState, report: PairReport) -> None:
        """Have some rows answered by a candidate and the incumbent, by the keys of their policies in this order."""
        rows = np.flatnonzero(self._rng.random(request.n) < self._share)
        if len(rows):
            pair = [self._shadow(policy, key, request.columns, rows) for key, policy in policies.items()]
            self._wait(_Waiting(pair, 0, None, self._patience(), partial(_report_pair, report, *pair)))

    def _patience(self) -> float:
        return asyncio.get_running_loop().time() + PATIENCE_S

    def _shadow(self, policy: Policy, key: str, columns: Batch, rows: Ints) -> RequestState:
        inputs, last = {name: column[rows] for name, column in columns.items()}, len(policy.stages) - 1
        sample = SampledRows(np.ones(len(rows), dtype=bool), self._log is not None, asks_on=True)
        return RequestState(policy, key, inputs, len(rows), last, priority=PRIORITY, sample=sample)

    def _wait(self, *waiting: _Waiting) -> None:
        # All of a request's rows or none: what is dropped must not depend on where they stopped.
        all_waiting = (*self._waiting, *waiting)
        if sum(one.n for one in all_waiting) > MOST_WAITING or sum(one.n_bytes for one in all_waiting) > MOST_BYTES:
            self._drop(*waiting)
            return
        self._waiting += waiting
        if self._waiting and (self._looking is None or self._looking.done()):
            # A task, not a timer: with the service it ends, and nothing begins after that.
            self._looking = asyncio.get_running_loop().create_task(self._look_while_any_waits())

    async def _look_while_any_waits(self) -> None:
        while self._waiting:
            await asyncio.sleep(PERIOD_S)
            self._look()

    def _look(self) -> None:
        """Send on what may go."""
        # Looked at once: the first rows that are sent make a stage busy.
        loop, stages = asyncio.get_running_loop(), self.cascade.scheduler.stages
        idle = [not any(at.in_work for at in stages[stage:]) for stage in range(len(stages) + 1)]
        n_left = min(at.limits.batch_size for at in stages)
        for waiting in list(self._waiting):
            if waiting.until <= loop.time():
                self._waiting.remove(waiting)
                self._drop(waiting)
            elif n_left > 0 and idle[waiting.stage if self._log is None else min(waiting.stage, 1)]:
                n_left -= waiting.n
                self._waiting.remove(waiting)
                task = loop.create_task(self._ask(waiting))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _ask(self, waiting: _Waiting) -> None:
        if waiting.asks:
            follow = self.cascade.follow
            try:
                await asyncio.gather(*(follow(one, waiting.stage, waiting.state) for one in waiting.requests))
            except RequestError:
                self._drop(waiting)
                return
            finally:
                for request in waiting.requests:
                    for visit in request.visits:
                        stage, unit = request.policy.models[visit.stage], request.policy.cost_unit
                        self._metrics.count("shadow_cost", stage, unit, n=float(visit.costs.sum()))
            self._metrics.count("shadow_rows", "compared", n=waiting.n)
        waiting.report()

    def _drop(self, *dropped: _Waiting) -> None:
        for waiting in dropped:
            if waiting.asks:
                self._metrics.count("shadow_rows", "dropped", n=waiting.n)
            if waiting.logged and self._log is not None:
                self._metrics.count("log_rows", "incomplete", n=waiting.n)

    def _compared(
        self,
        shadow: RequestState,
        policy_id: str,
        stage: int,
        predictions: Ints,
        names: Sequence[str],
        logged: Sequence[RowLogits],
    ) -> None:
        """Report rows that stopped at a stage with these answers, and log them with their earlier logits."""
        if stage < shadow.last_stage:
            self._drift.agreements(policy_id, np.full(shadow.n, stage), shadow.predictions == predictions)
        if self._log is not None:
            whole = [{**of_row, **_sample(shadow).logged.get(row, {})} for row, of_row in enumerate(logged)]
            pairs = zip(names, whole, strict=True)
            self._log.add([(name, of_row) for name, of_row in pairs if len(of_row) > shadow.last_stage])


def _sample(shadow: RequestState) -> SampledRows:
    assert isinstance(shadow.sample, SampledRows)
    return shadow.sample


def _report_pair(report: PairReport, candidate: RequestState, incumbent: RequestState) -> None:
    """Report a pair; both are held to the incumbent's last stage."""
    samples = [_sample(shadow) for shadow in (candidate, incumbent)]
    agreed = np.stack([sample.accepted == incumbent.predictions for sample in samples], axis=1)
    report(agreed, np.stack([sample.accepted_costs for sample in samples], axis=1))
