"""What one stage has to do: rows gathered into batches, sent while replicas are free, given up when time is over.

A batch goes when it is full, when it has waited long enough, or when nothing is on its way that could join it. A
replica computes one batch and has at most one more waiting; one that is not full is sent just in time, so that it
arrives when the replica is free and rows can join it until then. Requests take turns: a batch's worth each.

What a replica could not answer is asked of another. The rows of a call during which a replica ended or hung are
suspected: each request's go alone from then on, and one that ends a replica once more is refused.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from cauc_ray.cascade.isolation import row_of
from cauc_ray.cascade.results import CallResult
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.serving.faults import StageError, Trouble
from cauc_ray.serving.flight import Group
from cauc_ray.serving.health import DOWN_AFTER_S, StageHealth
from cauc_ray.serving.pace import Pace
from cauc_ray.serving.packing import StageCall, packed
from cauc_ray.serving.suspects import Suspects

# So many replicas are asked for rows that replicas could not answer.
MOST_ATTEMPTS = 3
# Rows that are likely to take more than this share of their time are refused: by then many would come too late.
MOST_WAIT = 0.8
# A call that takes more than this share of its rows' time, and so many times as long as others, may hang: its rows are
# asked for elsewhere, too.
OVERDUE, OVERDUE_CALLS = 0.5, 4.0
# Where there are several replicas, suspected rows wait until two of them run, so that one is left for the others, or
# for this share of their time. How many run is known so long after one has ended.
HOLD, SETTLE_S = 0.35, 2.0
# What has computed alone for less than this does not hang.
HANGS_S = 1.0
# Calls that end within this, since their replicas did, are taken for those of one replica.
ONE_DEATH_S = 0.5
# A replica that failed so many calls in a row that others answered, or that had a good row, is replaced; so long after
# the last one where no other replica answers: then it may be the stage.
FAILURES_TO_REPLACE, REPLACE_PAUSE_S = 3, 30.0

logger = logging.getLogger(__name__)


class StageClient(Protocol):
    """How a stage is called."""

    async def answer(
        self, call: StageCall, *, avoid: Collection[str] = ..., on_begin: Callable[[], None] | None = ...
    ) -> tuple[CallResult, Floats | None]:
        """Have a call answered and decided on; return its result, and the states of the rows that go on.

        avoid: replicas that shall not answer, if there are others.   on_begin: called once the model begins. Raises
        StageError.
        """

    def replace(self, replica: str) -> None:
        """Have a replica ended, and another started."""

    def share(self, columns: Batch) -> Any:
        """Put columns where every stage can read them and return the reference; None for what is too small."""


class LaneEvents(Protocol):
    """Who is told what became of rows."""

    def keeps(self, group: Group) -> Bools | None:
        """Return which of a group's rows shall bring back their state even if they stop, bool (m,), None for none."""

    def answered(
        self, stage: int, groups: Sequence[tuple[Group, Ints]], result: CallResult, states: Floats | None
    ) -> None:
        """Take a call's answers for live groups, each with its rows' positions in the call, int (m,)."""

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


@dataclass(slots=True, eq=False)
class _Call:
    """A call under way.

    started_at: on the loop's clock.   alone: with suspected rows.   overdue: whether it may hang.   began_at: when the
    model is known to have begun, None if it is not.
    """

    batch: list[Group]
    started_at: float
    alone: bool = False
    overdue: bool = False
    began_at: float | None = None


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
        *,
        degrades: bool = False,
    ) -> None:
        self.stage, self.name, self.limits = stage, name, limits
        self.n_queued = 0
        self._client, self._events, self._expects_more = client, events, expects_more
        self._loop = asyncio.get_running_loop()
        # Rows that have no answer yet have nothing to lose by waiting for a replica to come back.
        down_after_s = DOWN_AFTER_S if degrades else max(DOWN_AFTER_S, MOST_WAIT * limits.timeout_s)
        self.health = StageHealth(n_replicas, self._loop.time, down_after_s)
        self._suspects = Suspects(self._loop.time)
        self._good_row: Batch | None = None
        self._failures: Counter[str] = Counter()  # by replica, in a row
        self._replaced_at = self._died_at = self._recovered_at = -float("inf")
        self._queue: deque[Group] = deque()
        self._again: deque[list[Group]] = deque()  # batches that are tried again as they are
        self._alone: deque[Group] = deque()  # suspected rows
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
        elif (
            self.n_queued + len(group) > self.limits.max_queued
            or self._wait_s(len(group)) > MOST_WAIT * self.limits.timeout_s
        ):
            self._give_back(group, "overloaded", f"stage {self.name!r} has too much to do")
        else:
            self._expect(group)
            if self._suspects.verdict(group.flight) == "clear":
                self._queue.append(group)
                self.n_queued += len(group)
            else:
                self._suspect(group)
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
            call = _Call(batch, self._loop.time(), alone=batch[0].suspected_at is not None)
            self._calls[self._loop.create_task(self._call(call))] = call
        self._set_timer()

    def _wait_s(self, n: int) -> float:
        """Return in how many seconds n rows that come now are likely to be answered; 0 if at once, or not known yet."""
        n_replicas, n_calls = max(1, self.health.n_replicas), len(self._calls)
        n_free = max(0, n_replicas - n_calls)
        # Of a longer request only so much goes before these.
        n_before = min(self.n_queued, (len(self._queue) + len(self._again)) * max(n, self.limits.batch_size))
        n_waiting = n_before / self.limits.batch_size - n_free
        if n_free and n_waiting <= 0:
            return 0.0
        # Where more calls than replicas are under way at once, one of them ends so often.
        return self._pace.call_s * (1 + n_waiting / max(n_replicas, n_calls))

    def _leave(self, group: Group) -> None:
        group.end()
        for queue in (self._queue, self._alone):
            if group in queue:
                queue.remove(group)
                self.n_queued -= len(group)

    def _next(self) -> list[Group] | None:
        """Return the batch to send now, None if it is too early for one."""
        suspect = self._next_suspect()
        if suspect is not None:
            return [suspect]
        # A call that hangs keeps its replica, but not the place of one that another could answer.
        n_calls, n_replicas = len(self._in_time()), max(1, self.health.n_replicas)
        while self._again and n_calls < 2 * n_replicas:
            batch = self._again.popleft()
            self.n_queued -= sum(map(len, batch))
            live = [group for group in batch if group.live and not self._set_apart(group)]
            if live:
                return live
        size = self.limits.batch_size
        if self.n_queued - sum(map(len, self._alone)) >= size and n_calls < 2 * n_replicas:
            return self._take(size)
        now = self._loop.time()
        if self._queue and now >= self._wanted_at() and (now >= self._due_at() or not self._expects_more()):
            return self._take(size)
        return None

    def _next_suspect(self) -> Group | None:
        """Return suspected rows to send now; so many at once that they leave a replica for the others."""
        while self._alone:
            group = self._alone[0]
            if group.live:
                n_alone = sum(call.alone for call in self._calls.values())
                others_first = self.health.most_replicas < 2 and self._recovered_at == float("inf")
                if (
                    n_alone >= max(1, self.health.n_replicas - 1)
                    or self._loop.time() < self._risked_at(group)
                    or (others_first and (self._queue or len(self._calls) > n_alone))
                ):
                    return None
            self._alone.popleft()
            self.n_queued -= len(group)
            if group.live:
                return group
        return None

    def _risked_at(self, group: Group) -> float:
        """Return when suspected rows may be sent, as far as is known."""
        assert group.suspected_at is not None
        if self.health.most_replicas < 2:
            return 0.0
        n_hung = sum(call.overdue for call in self._calls.values())
        at_last = group.suspected_at + HOLD * self.limits.timeout_s
        return min(at_last, self._died_at + SETTLE_S) if self.health.n_replicas - n_hung >= 2 else at_last

    def _set_apart(self, group: Group) -> bool:
        """Suspect rows whose input has become suspected while they waited; return whether it has."""
        if self._suspects.verdict(group.flight) == "clear":
            return False
        self._suspect(group)
        self.pump_soon()
        return True

    def _in_time(self) -> list[_Call]:
        """Return the calls that do not seem to hang."""
        return [call for call in self._calls.values() if not call.overdue]

    def _due_at(self) -> float:
        """Return when the row that waits longest has waited for others long enough."""
        return self._queue[0].ready_at + self.limits.batch_wait_s

    def _wanted_at(self) -> float:
        """Return when a replica will have use for a batch that is not full."""
        calls, n_replicas = self._in_time(), max(1, self.health.n_replicas)
        if len(calls) < n_replicas:
            return 0.0
        if len(calls) >= 2 * n_replicas:
            return float("inf")
        # Calls come back in about the order in which they were sent.
        following = calls[len(calls) - n_replicas]
        return following.started_at + self._pace.compute_s

    def _take(self, n: int) -> list[Group] | None:
        batch: list[Group] = []
        others: list[Group] = []
        while self._queue and n > 0:
            group = self._queue.popleft()
            if self._suspects.verdict(group.flight) != "clear":  # it was not when it came
                self.n_queued -= len(group)
                self._set_apart(group)
                continue
            if batch and group.flight.kind_of_columns != batch[0].flight.kind_of_columns:
                others.append(group)
                continue
            if len(group) > n:
                group, rest = group.split(n)
                self._queue.append(rest)  # others' turn
                self._expect(group)
                self._expect(rest)
            batch.append(group)
            n -= len(group)
            self.n_queued -= len(group)
        self._queue.extendleft(reversed(others))
        return batch or None

    async def _call(self, call: _Call) -> None:
        fault: StageError | None = None
        try:
            good_row, how = self._how(call)
            asked = packed(call.batch, self._client.share, self._events.keeps, good_row)
            result, states = await self._client.answer(asked, **how)
        except StageError as error:
            fault = error
        except Exception as error:  # whatever it is, nobody shall wait for ever
            logger.exception("a call could not be made")
            fault = StageError("failed", f"{type(error).__name__}: {error}")
        finally:
            self._calls.pop(asyncio.current_task(), None)  # type: ignore[arg-type]
            self.pump_soon()
        if fault is not None:
            self._recover(call, fault)
        elif result.error is not None:
            self._unanswered(call, result)
        else:
            self._answered(call, result, states)
        self._end_idle_calls()  # another call may have had the same rows

    def _how(self, call: _Call) -> tuple[Batch | None, dict[str, Any]]:
        """Return the good row that a call brings along, and how else it differs from others."""
        if call.alone:
            return self._good_row, {"on_begin": partial(self._begin, call)}
        failed_at = frozenset[str]().union(*(group.failed_at for group in call.batch))
        if not failed_at:
            return None, {}
        return self._good_row, {"avoid": failed_at if self.health.n_replicas > 1 else ()}

    def _begin(self, call: _Call) -> None:
        call.began_at = self._loop.time()

    def _answered(self, call: _Call, result: CallResult, states: Floats | None) -> None:
        """Pass on the answers of a call, but for rows on which another replica shall be heard first."""
        batch = call.batch
        call_s = self._loop.time() - call.started_at
        self.health.succeeded()
        self._recovered_at = min(self._recovered_at, self._loop.time())
        if call.started_at >= self._recovered_at and not call.alone:  # others may have waited for a replica to start
            self._pace.note(call_s, result.compute_s or 0.0)
        self._events.called(self.stage, sum(map(len, batch)), call_s)
        self._keep_good_row(batch, result)
        starts = np.cumsum([0, *map(len, batch)]).tolist()
        again: list[Group] = []
        answered: list[tuple[Group, Ints]] = []
        failed_at: set[str] = set()
        for group, start in zip(batch, starts[:-1], strict=True):
            if not group.live:
                continue
            own = range(start, start + len(group))
            if not result.raised.isdisjoint(own):
                if not group.failed_at and self._has_another(group, result.replica):
                    again.append(group)
                    continue
            else:
                failed_at |= group.failed_at
                if call.alone:
                    self._suspects.note(group.flight, "clear")
            answered.append((group, np.arange(own.start, own.stop)))
        for replica in failed_at:
            self._failed_alone(replica)
        if not result.raised:
            del self._failures[result.replica]
        self._ask_another(again, result.replica)
        for group, _ in answered:
            group.end()
        if answered:
            self._events.answered(self.stage, answered, result, states)

    def _keep_good_row(self, batch: Sequence[Group], result: CallResult) -> None:
        """Keep the first row that was ever answered: what fails on it is the stage, or a replica."""
        if self._good_row is not None:
            return
        rows = ((group, row) for group in batch for row in group.rows)
        good = next((one for place, one in enumerate(rows) if place not in result.failures), None)
        if good is not None:
            self._good_row = row_of(good[0].flight.columns, int(good[1]))

    def _unanswered(self, call: _Call, result: CallResult) -> None:
        """Have another replica asked for the rows of a call of which none was answered, or give them back."""
        if result.fault == "replica":
            self._failed_alone(result.replica)
        live = [group for group in call.batch if group.live]
        again = [group for group in live if result.fault != "stage" and self._may_ask_again(group, result)]
        self._ask_another(again, result.replica)
        given_up = [group for group in live if group not in again]
        # What nobody has ever answered may be the inputs' own fault.
        if given_up and result.fault != "unknown":
            self._failed(result.error or "")
        for group in given_up:
            if group.live:
                self._give_back(group, "error", f"stage {self.name!r}: {result.error}")

    def _may_ask_again(self, group: Group, result: CallResult) -> bool:
        # With a good row, the only replica finds out whether it is broken.
        finds_out = result.fault == "unknown" and not group.failed_at and self._good_row is not None
        return self._has_another(group, result.replica) or finds_out

    def _has_another(self, group: Group, replica: str) -> bool:
        """Return whether a replica is left to ask for rows after one could not answer them."""
        failed_at = group.failed_at | {replica}
        return len(failed_at) < min(MOST_ATTEMPTS, self.health.n_replicas)

    def _ask_another(self, groups: list[Group], replica: str) -> None:
        for group in groups:
            group.failed_at |= {replica}
        if groups:
            self._try_again([groups])

    def _failed_alone(self, replica: str) -> None:
        """Note that a replica failed on what is known to be answered by others, or was before."""
        self._failures[replica] += 1
        if not replica or self._failures[replica] < FAILURES_TO_REPLACE:
            return
        now = self._loop.time()
        if self.health.silent_s < 1.0 or now - self._replaced_at > REPLACE_PAUSE_S:
            del self._failures[replica]
            self._replaced_at = now
            self._client.replace(replica)

    def _recover(self, call: _Call, fault: StageError) -> None:
        """Try again what may go better, and give back the rest."""
        live = [group for group in call.batch if group.live]
        reason = f"stage {self.name!r}: {fault.message}"
        if fault.kind == "died":
            self._died(call, live, reason)
            return
        self._failed(fault.message, for_good=fault.kind == "down")
        trouble: Trouble = fault.kind if fault.kind in ("down", "overloaded") else "error"
        for group in live:
            if fault.kind == "failed" and group.attempt < MOST_ATTEMPTS and not self.health.paused:
                group.attempt += 1
                self._try_again([[group]])
            elif group.live:
                self._give_back(group, trouble, reason)

    def _died(self, call: _Call, live: Sequence[Group], reason: str) -> None:
        """Suspect the rows of a call during which a replica ended, and refuse those that were alone in it."""
        now = self._loop.time()
        if not call.alone and now - self._died_at > ONE_DEATH_S:
            self._failed("replicas end")
        self._died_at, self._recovered_at = now, float("inf")
        for group in live:
            if not group.live:  # another of its request's was given back
                continue
            group.attempt += 1
            began = call.began_at is not None
            if began and group.suspected_at is not None and self.health.succeeded_at > group.suspected_at:
                self._give_back(group, "refused", f"{reason} twice while it had this input")
                self._convict(group)
            elif group.attempt > MOST_ATTEMPTS + (0 if began or not call.alone else 2):
                self._failed("replicas end")  # others have not been answered either: it may be the stage
                self._give_back(group, "error", reason)
            else:
                self._suspect(group)

    def _suspect(self, group: Group) -> None:
        """Have rows answered alone, as soon as that may be risked."""
        if self._suspects.verdict(group.flight) == "guilty":
            self._refuse(group)
            return
        if group in self._alone or any(call.alone and group in call.batch for call in self._calls.values()):
            return
        if group.suspected_at is None:
            group.suspected_at = self._loop.time()
            if self._suspects.verdict(group.flight) == "clear":
                self._suspects.note(group.flight, "suspected")
        self._alone.append(group)
        self.n_queued += len(group)

    def _convict(self, group: Group) -> None:
        """Refuse the input of rows that have ended or hung a replica alone, wherever it waits."""
        self._suspects.note(group.flight, "guilty")
        for other in list(self._alone):
            if other.live and self._suspects.verdict(other.flight) == "guilty":
                self._leave(other)
                self._refuse(other)

    def _refuse(self, group: Group) -> None:
        self._give_back(group, "refused", f"this input has ended or hung replicas of stage {self.name!r}")

    def _try_again(self, batches: list[list[Group]]) -> None:
        self._again.extend(batches)
        self.n_queued += sum(len(group) for batch in batches for group in batch)

    def _failed(self, reason: str, *, for_good: bool = False) -> None:
        """Note a call that came to nothing; if that is one too many, give back all that waits."""
        self.health.failed(reason, for_good=for_good)
        if not self.health.paused:
            return
        waiting = [*self._queue, *self._alone, *(group for batch in self._again for group in batch)]
        self._queue.clear()
        self._again.clear()
        self._alone.clear()
        self.n_queued = 0
        for group in waiting:
            if group.live:
                self._give_back(group, "down", f"stage {self.name!r} is down: {self.health.why_paused}")

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
        times += [self._overdue_at(call) for call in self._in_time() if self._pace.call_s]
        if self._alone and (risked_at := self._risked_at(self._alone[0])) > self._loop.time():
            times.append(risked_at)
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
        self._suspect_overdue(now, expired)
        for group in expired:
            self._events.unanswered(self.stage, group, "timeout", reason)
        # While others are answered, a replica hangs or there is much to do: no reason to leave the stage alone.
        if expired and self._end_idle_calls() and self.health.silent_s > self.limits.timeout_s:
            self._failed(f"it has not answered within {self.limits.timeout_s:g} s", for_good=True)
        self.pump()

    def _overdue_at(self, call: _Call) -> float:
        return call.started_at + max(OVERDUE * self.limits.timeout_s, OVERDUE_CALLS * self._pace.call_s)

    def _suspect_overdue(self, now: float, expired: Sequence[Group]) -> None:
        """Suspect the rows of calls that may hang, and find those guilty that hang alone."""
        for call in list(self._calls.values()):
            if not call.overdue and self._pace.call_s and now >= self._overdue_at(call):
                call.overdue = True
                for group in call.batch:
                    if group.live and not call.alone and self.health.most_replicas > 1:
                        self._suspect(group)
            for group in call.batch:
                if group not in expired:
                    continue
                if call.began_at is not None and now - call.began_at > max(HANGS_S, 10 * self._pace.compute_s):
                    self._convict(group)
                elif call.overdue and not call.alone and self._suspects.verdict(group.flight) == "clear":
                    self._suspects.note(group.flight, "suspected")

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
