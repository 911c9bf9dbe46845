"""What one stage has to do: rows gathered into batches, sent while replicas are free, given up when time is over.

A batch goes when it is full, when it has waited long enough, or when nothing is on its way that could join it. A
replica computes one batch and has at most one more waiting; one that is not full is sent just in time, so that it
arrives when the replica is free and rows can join it until then.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from cauc_ray.execution.stage import Part
from cauc_ray.models.answers import Answers, Batch
from cauc_ray.serving.faults import StageError, Trouble
from cauc_ray.serving.flight import Group
from cauc_ray.serving.health import StageHealth
from cauc_ray.serving.pace import Pace
from cauc_ray.serving.packing import of_live, packed

# Replicas that die under a batch: so often it is tried, each request's rows by themselves from the second time on.
MOST_ATTEMPTS = 3
# Rows that are likely to take more than this share of their time are refused: by then many would come too late.
MOST_WAIT = 0.8

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """What a stage says of a call: the model's answers, or why there are none; compute_s: in the model."""

    answers: Answers | None
    compute_s: float
    error: str | None = None


class StageClient(Protocol):
    """How a stage is called."""

    async def answer(self, parts: Sequence[Part], parcels: Sequence[Any]) -> StageAnswer:
        """Have the model answer rows of parcels, each columns or a reference to some. Raises StageError."""

    def share(self, columns: Batch) -> Any:
        """Put columns where every stage can read them and return the reference; None for what is too small."""


class LaneEvents(Protocol):
    """Who is told what became of rows."""

    def answered(self, stage: int, groups: Sequence[Group], answers: Answers) -> None:
        """Take the model's answers for live groups, in their order."""

    def unanswered(self, stage: int, group: Group, trouble: Trouble, reason: str) -> None:
        """Take back a group that the stage has not answered."""

    def called(self, stage: int, n_rows: int, call_s: float) -> None:
        """Note a call that was answered."""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """batch_size, max_queued: rows.   batch_wait_s: how long a row waits for its batch.   timeout_s: for an answer."""

    batch_size: int
    batch_wait_s: float
    timeout_s: float
    max_queued: int


@dataclass(frozen=True, slots=True)
class _Call:
    """started_at: on the loop's clock."""

    batch: list[Group]
    started_at: float


class Lane:
    """A stage's queue and its calls, on one event loop.

    expects_more: whether anything is on its way that could join a batch.
    """

    def __init__(
        self,
        stage: int,
        name: str,
        limits: LaneLimits,
        client: StageClient,
        events: LaneEvents,
        expects_more: Callable[[], bool],
        n_replicas: int = 1,
    ) -> None:
        self.stage, self.name, self.limits = stage, name, limits
        self.n_queued = 0
        self._client, self._events, self._expects_more = client, events, expects_more
        self._loop = asyncio.get_running_loop()
        self.health = StageHealth(n_replicas, self._loop.time)
        self._queue: deque[Group] = deque()
        self._again: deque[list[Group]] = deque()  # batches that are tried again as they are
        self._calls: dict[asyncio.Task[None], _Call] = {}
        self._expiries: list[tuple[float, int, Group]] = []
        self._n_expiries = 0
        self._timer: asyncio.TimerHandle | None = None
        self._pumps = False
        self._pace = Pace()

    @property
    def busy(self) -> bool:
        """Return whether rows are queued or at a replica."""
        return self.n_queued > 0 or bool(self._calls)

    def put(self, group: Group) -> None:
        """Queue a group, or give it back at once where the stage takes no more."""
        reason = self.health.why_not(calling=bool(self._calls))
        if reason is not None:
            self._give_back(group, "down", f"stage {self.name!r} is down: {reason}")
        elif self.n_queued + len(group) > self.limits.max_queued or self._wait_s() > MOST_WAIT * self.limits.timeout_s:
            self._give_back(group, "overloaded", f"stage {self.name!r} has too much to do")
        else:
            self._queue.append(group)
            self.n_queued += len(group)
            self._expect(group)
            self.pump_soon()

    def withdraw(self, group: Group) -> None:
        """Forget a live group of this lane: nobody waits for it any more."""
        self._leave(group)
        self._end_idle_calls()

    def pump_soon(self) -> None:
        """Pump after all that is happening right now: rows that come together shall go together."""
        if not self._pumps:
            self._pumps = True
            self._loop.call_soon(self.pump)

    def pump(self) -> None:
        """Send what can go now, and come back when something else can."""
        self._pumps = False
        while (batch := self._next()) is not None:
            task = self._loop.create_task(self._call(batch))
            self._calls[task] = _Call(batch, self._loop.time())
        self._set_timer()

    def _wait_s(self) -> float:
        """Return in how many seconds a row that comes now is likely to be answered; 0 if at once, or not known yet."""
        n_replicas, n_calls = max(1, self.health.n_replicas), len(self._calls)
        n_free = max(0, n_replicas - n_calls)
        n_waiting = self.n_queued / self.limits.batch_size - n_free
        if n_free and n_waiting <= 0:
            return 0.0
        # Where more calls than replicas are under way at once, one of them ends so often.
        return self._pace.call_s * (1 + n_waiting / max(n_replicas, n_calls))

    def _leave(self, group: Group) -> None:
        group.end()
        if group in self._queue:
            self._queue.remove(group)
            self.n_queued -= len(group)

    def _next(self) -> list[Group] | None:
        """Return the batch to send now, None if it is too early for one."""
        n_calls, n_replicas = len(self._calls), max(1, self.health.n_replicas)
        while self._again and n_calls < 2 * n_replicas:
            batch = self._again.popleft()
            self.n_queued -= sum(map(len, batch))
            live = [group for group in batch if group.live]
            if live:
                return live
        size = self.limits.batch_size
        if self.n_queued >= size and n_calls < 2 * n_replicas:
            return self._take(size)
        now = self._loop.time()
        if self._queue and now >= self._wanted_at() and (now >= self._due_at() or not self._expects_more()):
            return self._take(size)
        return None

    def _due_at(self) -> float:
        """Return when the row that waits longest has waited for others long enough."""
        return self._queue[0].ready_at + self.limits.batch_wait_s

    def _wanted_at(self) -> float:
        """Return when a replica will have use for a batch that is not full."""
        n_calls, n_replicas = len(self._calls), max(1, self.health.n_replicas)
        if n_calls < n_replicas:
            return 0.0
        if n_calls >= 2 * n_replicas:
            return float("inf")
        # Calls come back in about the order in which they were sent.
        following = list(self._calls.values())[n_calls - n_replicas]
        return following.started_at + self._pace.compute_s

    def _take(self, n: int) -> list[Group] | None:
        batch: list[Group] = []
        others: list[Group] = []
        while self._queue and n > 0:
            group = self._queue.popleft()
            if batch and group.flight.kind_of_columns != batch[0].flight.kind_of_columns:
                others.append(group)
                continue
            if len(group) > n:
                group, rest = group.split(n)
                self._queue.appendleft(rest)
                self._expect(group)
                self._expect(rest)
            batch.append(group)
            n -= len(group)
            self.n_queued -= len(group)
        self._queue.extendleft(reversed(others))
        return batch or None

    async def _call(self, batch: list[Group]) -> None:
        started = self._loop.time()
        fault: StageError | None = None
        try:
            parts, parcels = packed(batch, self._client.share)
            answer = await self._client.answer(parts, parcels)
            if answer.answers is None:
                fault = StageError("failed", answer.error or "it gave no reason")
        except StageError as error:
            fault = error
        except Exception as error:  # whatever it is, nobody shall wait for ever
            logger.exception("a call could not be made")
            fault = StageError("failed", f"{type(error).__name__}: {error}")
        finally:
            self._calls.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            self.pump_soon()
        if fault is None and answer.answers is not None:
            self.health.succeeded()
            call_s = self._loop.time() - started
            self._pace.note(call_s, answer.compute_s)
            self._events.called(self.stage, sum(map(len, batch)), call_s)
            live, answers = of_live(batch, answer.answers)
            for group in live:
                group.end()
            self._events.answered(self.stage, live, answers)
        elif fault is not None:
            self._recover(batch, fault)

    def _recover(self, batch: list[Group], fault: StageError) -> None:
        """Try again what may go better, and give back the rest."""
        live = [group for group in batch if group.live]
        self._failed(for_good=fault.kind == "down")
        reason = f"stage {self.name!r}: {fault.message}"
        if fault.kind == "died" and live and live[0].attempt < MOST_ATTEMPTS:
            for group in live:
                group.attempt += 1
            self._try_again([[group] for group in live] if live[0].attempt > 2 else [live])
        elif fault.kind == "failed" and sum(map(len, live)) > 1 and not self.health.paused:
            self._try_again(self._halves(live))  # until the guilty rows are alone
        else:
            trouble: Trouble = fault.kind if fault.kind in ("down", "overloaded") else "error"
            for group in live:
                self._give_back(group, trouble, reason)

    def _try_again(self, batches: list[list[Group]]) -> None:
        self._again.extend(batches)
        self.n_queued += sum(len(group) for batch in batches for group in batch)

    def _halves(self, batch: list[Group]) -> list[list[Group]]:
        if len(batch) > 1:
            middle = len(batch) // 2
            return [batch[:middle], batch[middle:]]
        halves = batch[0].split(len(batch[0]) // 2)
        for half in halves:
            self._expect(half)
        return [[half] for half in halves]

    def _failed(self, *, for_good: bool) -> None:
        """Note a call that came to nothing; if that is one too many, give back all that waits."""
        self.health.failed(for_good=for_good)
        if not self.health.paused:
            return
        waiting = [*self._queue, *(group for batch in self._again for group in batch)]
        self._queue.clear()
        self._again.clear()
        self.n_queued = 0
        for group in waiting:
            if group.live:
                self._give_back(group, "down", f"stage {self.name!r} is down: its last calls have failed")

    def _give_back(self, group: Group, trouble: Trouble, reason: str) -> None:
        group.end()
        self._events.unanswered(self.stage, group, trouble, reason)

    def _expect(self, group: Group) -> None:
        self._n_expiries += 1
        heapq.heappush(self._expiries, (group.expires_at, self._n_expiries, group))

    def _set_timer(self) -> None:
        """Come back when the oldest batch is due or the oldest group expires."""
        while self._expiries and not self._expiries[0][2].live:
            heapq.heappop(self._expiries)
        times = [self._expiries[0][0]] if self._expiries else []
        if self._queue and (wanted_at := self._wanted_at()) < float("inf"):
            times.append(max(self._due_at(), wanted_at))
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(times), self._on_time) if times else None

    def _on_time(self) -> None:
        now = self._loop.time()
        reason = f"stage {self.name!r} has not answered within {self.limits.timeout_s:g} s"
        expired = []
        while self._expiries and self._expiries[0][0] <= now:
            group = heapq.heappop(self._expiries)[2]
            if group.live:
                self._leave(group)
                expired.append(group)
        for group in expired:
            self._events.unanswered(self.stage, group, "timeout", reason)
        # While others are answered, a replica hangs or there is much to do: no reason to leave the stage alone.
        if expired and self._end_idle_calls() and self.health.silent_s > self.limits.timeout_s:
            self._failed(for_good=True)
        self.pump()

    def _end_idle_calls(self) -> bool:
        """Cancel calls that nobody waits for any more; return whether there were any."""
        idle = [task for task, call in self._calls.items() if not any(group.live for group in call.batch)]
        for task in idle:
            # Forgotten here: a task that is cancelled before it has begun comes to no line of its own.
            del self._calls[task]
            task.cancel()
        if idle:
            self.pump_soon()
        return bool(idle)
