"""The cascade that answers requests, on one event loop: it carries messages between stages and the scheduler."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Sequence
from contextvars import Context
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from itertools import count
from math import inf
from typing import Protocol, cast

from cachetools import LRUCache

from cauc_ray.cascade.allowance import Allowance
from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.bundles import n_bytes
from cauc_ray.cascade.patience import RequestPatience
from cauc_ray.cascade.rows import Call, CallResult, Vector
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage import StageLimits
from cauc_ray.cascade.suspects import VerdictReached
from cauc_ray.cascade.worker import MOST_POLICIES
from cauc_ray.models.answers import Batch, ModelFacts
from cauc_ray.models.pool import Pool, StageSpec
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.protocol.tensors import INTERNAL_ERROR, RequestError
from cauc_ray.serving.demand import Demand, OpenRequests
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.request_state import (
    Answer,
    Question,
    RequestState,
    StageCall,
    StageError,
    requests_of,
    stage_call,
)

# What may wait before a stage: inputs are held in this process, next to what is being read and answered.
QUEUE_BYTES = 1 << 30
# While requests wait, the clock is read at least every BEAT_S seconds. Of a longer stall of the event loop, only
# STALL_S seconds count.
BEAT_S, STALL_S = 0.25, 0.25

logger = logging.getLogger(__name__)


class StageClient(Protocol):
    """How a stage is called, and which replicas it has.

    Attributes:
        why: Why it has none, if that may last; else None.
        load_s: How long its model takes to load, 0 if unknown.
    """

    why: str | None
    load_s: float

    async def replicas(self) -> dict[str, ModelFacts]:
        """Return the model facts of the replicas that take calls, by name."""

    async def answer(self, call: StageCall, on_begin: Callable[[], None] | None = None) -> Answer:
        """Have the call's replica answer and decide.

        Args:
            call: The call.
            on_begin: Called once the model begins; only where that must be known.

        Returns:
            The result, and the states of deferred rows.

        Raises:
            StageError: The replica gives no answer.
        """

    def replace(self, replica: str) -> None:
        """Have a replica ended, and another started."""


class Cascade:
    """Answers requests by calling a chain's stages, on one event loop; made where that loop runs.

    A pool whose on_failure is "degrade" answers with the best so far where a later stage cannot; "fail" refuses
    the request. `replicas` updates the stages' replicas. Observers see each request before its first call and at its
    end.
    """

    def __init__(
        self,
        stages: Sequence[StageSpec],
        pool: Pool,
        clients: Sequence[StageClient],
        observers: Sequence[Observer] = (),
        allowance: Allowance | None = None,
    ) -> None:
        self.names = [spec.name for spec in stages]
        self._degrades = pool.on_failure == "degrade"
        self._clients, self._observers = clients, observers
        self._id = uuid.uuid4().hex
        self._loop = asyncio.get_running_loop()
        self._open_requests = OpenRequests(self._loop.time)
        self.scheduler = Scheduler(
            [
                StageLimits(
                    batch_size=spec.serving.batch_size or spec.batch_size,
                    batch_wait_s=spec.serving.batch_wait_s,
                    queue_rows=pool.serving.max_queued_rows,
                    queue_bytes=QUEUE_BYTES,
                    name=spec.name,
                    timeout_s=spec.serving.timeout_s,
                    degrades=self._degrades and stage > 0,
                )
                for stage, spec in enumerate(stages)
            ],
            RequestPatience(self._open_requests.expects_more),
            Blame("input"),
            allowance=allowance,
        )
        self.scheduler.end_input()
        self._demand = Demand(self.scheduler.stages)
        # A request has as long as its slowest stage.
        self._timeout_s = max(spec.serving.timeout_s for spec in stages)
        self._keys: LRUCache[int, tuple[Policy, str]] = LRUCache(MOST_POLICIES)
        self._numbers: list[dict[str, int]] = [{} for _ in stages]
        self._replica_names: dict[int, str] = {}
        self._leaving: set[str] = set()
        self._next_number, self._next_request = count(), count()
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = inf
        self._stalled_s = 0.0
        self._pumps = False
        # Called with verdicts on inputs, for other routers.
        self.on_news: Callable[[list[VerdictReached]], None] = lambda news: None

    # Requests

    async def answer(
        self,
        policy: Policy,
        columns: Batch,
        n: int,
        *,
        last_stage: int | None = None,
        asks_for: frozenset[Vector] = frozenset(),
        timeout_s: float | None = None,
        priority: int = 0,
        question: Question | None = None,
    ) -> RequestState:
        """Answer a request of n rows; if the caller is cancelled, so is what has not begun.

        Args:
            policy: The policy that decides.
            columns: The input, each (n, ...).
            n: Number of rows.
            last_stage: Number of the deepest stage to call.
            asks_for: Requested vectors of each row.
            timeout_s: Seconds that the caller waits, where these are less than the service gives a request.
            priority: Priority, as Owner has it.
            question: What else the client has asked, for observers.

        Raises:
            RequestError: 429 or 503 where a stage that is needed cannot answer, 422 for a row that a model refuses.
        """
        last_stage = len(self.names) - 1 if last_stage is None else last_stage
        if last_stage < len(self.names) - 1 and not policy.in_turn:
            raise RequestError("the active policy does not call stages in order: leave out max_stage and max_cost", 422)
        request = RequestState(
            policy,
            self.key(policy),
            columns,
            n,
            last_stage,
            priority=priority,
            degrades=self._degrades,
            asks_for=asks_for,
            question=question,
            number=next(self._next_request),
        )
        for observer in self._observers:
            observer.on_request(request)
        first = policy.first(n, _ids(columns, n) if policy.by_id else None)
        self._open_requests.came(1)
        try:
            await self.follow(request, 0 if first is None else first, None, timeout_s)
        finally:
            self._open_requests.left(1)
            for observer in self._observers:
                observer.on_answer(request)
        probed = [rows for at in self.scheduler.stages if (rows := at.probe_row) is not None and rows.owner is request]
        request.release(int(probed[-1].indices[0]) if probed else 0)
        return request

    async def follow(
        self, request: RequestState, stages: int | Ints, state: Floats | None, timeout_s: float | None = None
    ) -> None:
        """Submit a request's rows to the scheduler; return at the request's end.

        Args:
            request: The request.
            stages: The stage of all rows, or of each, int8 (n,).
            state: The rows' state from stages before, (n, S).
            timeout_s: Seconds until the deadline; at most, and by default, the service's.

        Raises:
            RequestError: The request is refused or fails.
        """
        now = self._now()
        request.hurries = timeout_s is not None and timeout_s < self._timeout_s
        request.deadline = now + (self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s))
        try:
            if not request.shadow:
                self._demand.came(request.n, stages, now)
            self.scheduler.submit(request, [Chunk(state, request.n, n_bytes(request.columns))], now, stages)
            self._take_done()
            self.pump_soon()
            await request.done
        finally:
            self.scheduler.cancel(request)
            self.pump_soon()

    def key(self, policy: Policy) -> str:
        """Return what stages know a policy by: a digest of its file, which takes too long for every request."""
        entry = self._keys.get(id(policy))
        if entry is None or entry[0] is not policy:
            entry = self._keys[id(policy)] = policy, blake2b(policy.to_json().encode(), digest_size=12).hexdigest()
        return entry[1]

    def learn(self, news: Sequence[VerdictReached]) -> None:
        """Take verdicts on inputs of another router."""
        for verdict in news:
            self.scheduler.learn(verdict, self._now())
        self._take_done()
        self.pump_soon()

    # Stages

    def replicas(self, stage: int, names: Collection[str], why: str | None = None, load_s: float = 0.0) -> None:
        """Take the replicas of a stage that take calls.

        Args:
            stage: The stage.
            names: Their names.
            why: Why there are none, if that may last: rows that have an answer do not wait for one then.
            load_s: How long its model takes to load: the stage is not down as long as one may be starting.
        """
        self.scheduler.stages[stage].health.load_s = load_s
        at, numbers, now = self.scheduler.stages[stage], self._numbers[stage], self._now()
        for name in [name for name in numbers if name not in names]:
            if not at.replicas.calls_at(numbers[name]):  # else its calls will show it
                self._lost(stage, numbers[name], "it is gone", own_fault=False)
        self._leaving &= set(names) | {name for of_stage in self._numbers for name in of_stage}
        for name in names:
            if name not in numbers and name not in self._leaving:
                numbers[name] = number = next(self._next_number)
                self._replica_names[number] = name
                self.scheduler.replica_ready(stage, number, now)
        self.scheduler.count_replicas(stage, now, why)
        self._take_done()
        self.pump_soon()

    def has_replica(self, stage: int) -> bool:
        """Return whether a stage has a replica that takes calls."""
        return bool(self._numbers[stage])

    def missing(self, stage: int) -> bool:
        """Return whether a stage has had no replica for longer than rows wait for one."""
        return self.scheduler.stages[stage].health.missing(self._now())

    def _lost(self, stage: int, number: int, why: str, *, own_fault: bool) -> None:
        """Forget a replica. What it was asked is asked elsewhere."""
        at = self.scheduler.stages[stage]
        for call in at.replicas.calls_at(number):
            self._forget(call)
        self.scheduler.replica_lost(stage, number, why, self._now(), own_fault=own_fault)
        del self._numbers[stage][self._replica_names.pop(number)]

    def _forget(self, call: Call) -> None:
        # Forgotten here: a task that is cancelled before it has begun comes to no line of its own.
        task = self._tasks.pop(call, None)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    # Calls

    def pump_soon(self) -> None:
        """Pump after all current events, so that rows that come together go together."""
        if not self._pumps:
            self._pumps = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what can go now, and come back when something else can."""
        self._pumps = False
        now = self._now()
        self.scheduler.time_passed(now)
        while self.scheduler.withdrawn:
            self._forget(self.scheduler.withdrawn.pop())
        for call in self.scheduler.schedule(now):
            # In its own context: it does not belong to the request that is being handled.
            coroutine = self._call(call, self._replica_names[call.replica])
            self._tasks[call] = self._loop.create_task(coroutine, context=Context())
        self._take_done()
        if news := self.scheduler.take_news():
            self.on_news(news)
        wait_s = self.scheduler.wait_s(now)
        # One that comes too early does no harm, and to start another for each request takes longer.
        if wait_s is not None and (at_s := now + min(wait_s, BEAT_S)) < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at = at_s
            self._timer = self._loop.call_at(at_s + self._stalled_s, self._on_time)

    def _now(self) -> float:
        """Return the event loop's time, less its stalls: those of this process, or of the whole machine.

        Answers that arrived during a stall are taken after it: it makes no request late, and no replica hung.
        """
        now, latest = self._loop.time() - self._stalled_s, self._timer_at + STALL_S
        self._stalled_s += max(0.0, now - latest)
        return min(now, latest)

    def _on_time(self) -> None:
        self._now()  # whether it comes late
        self._timer, self._timer_at = None, inf
        self._pump()

    def _take_done(self) -> None:
        for owner in self.scheduler.done:
            cast("RequestState", owner).finish()
        self.scheduler.done.clear()

    async def _call(self, call: Call, replica: str) -> None:
        client, began, fault = self._clients[call.stage], None, None
        if call.isolated:
            began = partial(self._begin, call)
        else:
            call.began_at = call.sent_at
        try:
            needed = self._demand.replicas(call.stage, self._now())
            asked = stage_call(call, replica, router=self._id, needed_replicas=needed)
            # Policies travel only where they are asked for: a replica has those of the calls before.
            answer = await client.answer(replace(asked, policies={}), began)
            if answer[0].fault == "policy":
                answer = await client.answer(asked, began)
        except StageError as error:
            fault = error
        except Exception as error:  # of any type: no request may wait indefinitely
            logger.exception("a call could not be made")
            fault = StageError("failed", f"{type(error).__name__}: {error}")
        if self._tasks.get(call) is not asyncio.current_task():
            return  # it has been taken back
        try:
            if fault is not None:
                self._recover(call, fault)
            else:
                self._ended(call, *answer)
        except Exception:  # of any type: no request may wait indefinitely
            logger.exception("answers could not be taken")
            for request in requests_of(call):
                request.fail(RequestError(INTERNAL_ERROR, 500))
        finally:
            self._tasks.pop(call, None)
            self._take_done()
            self.pump_soon()

    def _begin(self, call: Call) -> None:
        call.began_at = self._now()

    def _ended(self, call: Call, result: CallResult, states: Floats | None) -> None:
        """Hand a call's result on; replace the replicas that it shows to be bad."""
        now, at = self._now(), self.scheduler.stages[call.stage]
        if result.error is None:
            for observer in self._observers:
                observer.on_call(call.stage, len(call), now - call.sent_at, result.wire)
        self.scheduler.call_ended(call, result, states, now)
        for number, why in at.take_bad().items():
            name = self._replica_names[number]
            logger.error(f"stage {self.names[call.stage]!r}: replica {name} is replaced: {why}")
            self._leaving.add(name)
            self._lost(call.stage, number, why, own_fault=False)
            self._clients[call.stage].replace(name)

    def _recover(self, call: Call, fault: StageError) -> None:
        """Take the end of a call that came to nothing."""
        if fault.kind in ("died", "gone"):
            self._lost(call.stage, call.replica, fault.message, own_fault=fault.kind == "died")
        else:
            self.scheduler.call_failed(call, fault.message, self._now())


def _ids(columns: Batch, n: int) -> list[str]:
    """Return what a request's rows are called: as its input says, else by names of their own."""
    ids = columns.get("example_id")
    return [f"{uuid.uuid4().hex}-{row}" for row in range(n)] if ids is None else [str(example) for example in ids]
