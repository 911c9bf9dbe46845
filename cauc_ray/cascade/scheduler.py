"""From rows that come to rows that are done, without Ray: which call goes out when, and what its end means.

A shell gives it rows (blocks of a run's input, or requests) and events (a call ended, a replica died), and asks it for
the next calls. Rows wait in a queue for each stage; those that a stage defers are gathered across calls and owners into
full batches. A partial batch goes out when nothing upstream can add to it, or after the stage's time limit.

Two objects hold the rules in which runs and services differ: Patience (how long rows wait, and how often they are
tried) and Blame (who is at fault where a replica ends or hangs). A run's queues hold the stages ahead back when they
are full, and at last the reading; a service refuses rows. Its requests have deadlines: they are cut short where a stage
has too much to do, is down, or does not answer in time. A stage of a service that fails again and again is paused (a
circuit breaker): rows are refused as they come, so that none waits for a timeout, while probes, whose answers nobody
waits for, find out when it works again.

A worker finds out by itself which rows of a call fail and whether it is their fault, by a row that the stage has
answered before. A replica that fails on such a row gets no others, but that row, until it answers; if it fails again,
it is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MappingProxyType
from typing import Any

import numpy as np

from cauc_ray.cascade.allowance import Allowance
from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.dispatch import Dispatch
from cauc_ray.cascade.fates import Again, CountFailure, Failure, Fate, GiveUp
from cauc_ray.cascade.flow import RowFlow, late
from cauc_ray.cascade.patience import Patience
from cauc_ray.cascade.rows import Call, CallResult, Owner, Rows
from cauc_ray.cascade.stage import PROBE_PAUSE_S, Stage, StageLimits
from cauc_ray.cascade.suspects import VerdictReached
from cauc_ray.numbers.types import Ints


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some neighbouring rows of an owner.

    Attributes:
        source: What holds them, which only the shell can read.
        n_rows: Their number.
        n_bytes: Their size.
    """

    source: Any
    n_rows: int
    n_bytes: float


class Scheduler:
    """All that is known of rows in progress. Times are seconds and come from outside.

    Attributes:
        stages: The stages.
        done: Owners whose last row is done, for the shell to take.
        lost: Owners that must be read again, for the shell to take.
        withdrawn: Calls whose answers are no longer waited for, for the shell to cancel.
        n_reads: Blocks that are being read, which the shell sets.
    """

    def __init__(
        self,
        stages: Sequence[StageLimits],
        patience: Patience,
        blame: Blame,
        open_rows: float = inf,
        allowance: Allowance | None = None,
    ) -> None:
        """Take the rules.

        Args:
            stages: The stages' limits.
            patience: How long rows wait.
            blame: Who is at fault.
            open_rows: How many rows may have no answer yet before reading pauses.
            allowance: The limits of deferral and of money, None without any.
        """
        self.stages = [Stage(number, limits) for number, limits in enumerate(stages)]
        self.withdrawn: list[Call] = []
        self.n_reads = 0
        self._patience, self._blame = patience, blame
        self._dispatch = Dispatch(patience, blame, self._more_can_come)
        self._flow = RowFlow(self.stages, patience, allowance)
        self.done, self.lost = self._flow.done, self._flow.lost
        self._most_open_rows = open_rows
        self._row_bytes = 0.0
        self._block_rows = 0
        self._input_ended = False

    # Input

    def wants_block(self) -> bool:
        """Return whether another block may be read: the first queue and the open rows have room, or all is done."""
        if self._input_ended:
            return False
        if not (self._flow.open or self.n_reads):
            return True
        limits, queue, coming = self.stages[0].limits, self.stages[0].waiting, self.n_reads * self._block_rows
        return (
            self._flow.n_open + coming < self._most_open_rows
            and queue.n_rows + coming < limits.queue_rows
            and queue.n_bytes + coming * self._row_bytes < limits.queue_bytes
        )

    def end_input(self) -> None:
        """Note that no block will follow those that are being read."""
        self._input_ended = True

    @property
    def finished(self) -> bool:
        """Return whether every row of the input is answered or failed."""
        return self._input_ended and not (self._flow.open or self.n_reads or self.lost)

    @property
    def starved(self) -> bool:
        """Return whether the first stage has a replica free and no rows wait for it."""
        return not self.stages[0].waiting.n_rows and self._dispatch.free_replica(self.stages[0]) is not None

    def submit(
        self,
        owner: Owner,
        chunks: Sequence[Chunk],
        now: float,
        first: int | Ints | None = None,
        unreadable: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Queue an owner's rows, which lie in chunks one after the other.

        Args:
            owner: The owner.
            chunks: What holds the rows that could be read, in their order.
            now: The time.
            first: The stage that rows go to, all of them or each, int8 (n,); None for the first one.
            unreadable: Why rows could not be read, by position; they fail at once.
        """
        self._flow.add(owner)
        self._block_rows = max(self._block_rows, owner.n)
        indices = np.arange(owner.n)
        for position, reason in unreadable.items():
            owner.left_out(np.array([position]), -1, "error", reason)
        if unreadable:
            indices = np.delete(indices, list(unreadable))
            self._flow.end(owner, len(unreadable))
        start = 0
        for chunk in chunks:
            row_bytes = chunk.n_bytes / chunk.n_rows
            self._row_bytes = max(self._row_bytes, row_bytes)
            positions = np.arange(chunk.n_rows)
            rows = Rows(owner, indices[start : start + chunk.n_rows], chunk.source, positions, now, row_bytes)
            self._flow.spread(rows, first[rows.indices] if isinstance(first, np.ndarray) else first or 0, now)
            start += chunk.n_rows

    def cancel(self, owner: Owner) -> None:
        """Forget an owner whose answers are no longer wanted."""
        self._flow.cancel(owner)

    # Calls

    def schedule(self, now: float) -> Iterator[Call]:
        """Yield the calls that can go to their replicas now, those of the deepest stages first."""
        self._flow.drop_leavers()
        for at in reversed(self.stages):
            while not self.held_back(at.number) and (call := self._dispatch.next_call(at, now)) is not None:
                yield call

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until something is due, None if nothing waits for time."""
        waits = [self._dispatch.wait_s(at, now) for at in self.stages if not self.held_back(at.number)]
        if (deadline := self._flow.deadlines.next_at()) is not None:
            waits.append(max(0.0, deadline - now))
        return min((wait for wait in waits if wait is not None), default=None)

    def held_back(self, stage: int) -> bool:
        """Return whether a later stage to which this stage sends rows has a full queue."""
        if not self._patience.holds_back:
            return False
        return any(to > stage and not self.stages[to].has_room for to in self.stages[stage].sent)

    def _more_can_come(self, stage: int) -> bool:
        """Return whether input or another stage may still add rows to a stage's queue."""
        return (
            bool(self.n_reads or self.lost or self.wants_block())
            or any(at.in_work for at in self.stages if at.number < stage or stage in at.sent)
            or (stage == 0 and self._patience.expects_more())
        )

    # What happens to calls

    def take_news(self) -> list[VerdictReached]:
        """Take the verdicts that are new here, for the routers that share the stages."""
        news = [VerdictReached(at.number, *verdict) for at in self.stages for verdict in at.suspects.news]
        for at in self.stages if news else ():
            at.suspects.news.clear()
        return news

    def _taken_back(self, call: Call, now: float) -> Stage:
        at = self.stages[call.stage]
        at.take_back(call, now)
        return at

    def call_ended(self, call: Call, result: CallResult, goes_on: Any, now: float) -> None:
        """Note the answers of a call, queue what is deferred for the next stage, try again what failed.

        goes_on: what holds the deferred rows, in their order.
        """
        at = self._taken_back(call, now)
        if result.error is not None:
            self._unanswered(at, call, result, now)
            return
        at.answered(call, result, now)
        answered = np.full(len(call), True)
        answered[list(result.failures)] = False
        if not (answered.any() or result.waiting) and (at.known_good is None or call.probe):
            reason = next(iter(result.failures.values()))
            if not call.probe:
                self._failed(at, call, "raised" if result.raised else "named", reason, now)
            elif at.known_good is not None:
                self._blame.broken(at, call, reason, now)
            return
        first = answered.any() and at.known_good is None
        at.works(call, call.where(np.arange(len(call)) == answered.argmax())[0] if first else None)
        if call.probe:
            return
        at.count(result)
        self._flow.advance(call, result, answered, goes_on, now)
        for position, reason in sorted(result.failures.items()):
            (row,) = call.where(np.arange(len(call)) == position)
            if position in result.waiting:
                self._flow.leave_out(at, [row], "error", reason)
            elif row.owner.live:
                single = Call(at.number, [row], now, call.attempt, failed_on=call.failed_on, replica=call.replica)
                self._failed(at, single, "raised" if position in result.raised else "named", reason, now)

    def _unanswered(self, at: Stage, call: Call, result: CallResult, now: float) -> None:
        """Take the result of a call that answered no row."""
        fault, reason = result.fault or "unknown", result.error or ""
        at.busy_s += result.compute_s or 0.0
        if fault == "replica" or (call.probe and at.known_good is not None and fault != "stage"):
            self._blame.broken(at, call, reason, now)
            # It may be the stage, and no row need wait for another replica.
            if at.limits.degrades and not at.replicas.n_working:
                self._settle(at, [CountFailure(reason, call.rows, for_good=True)], now)
        if not call.probe:
            self._failed(at, call, fault, reason, now)
        elif at.health.paused or fault == "stage":
            at.postpone_probe(call.replica, now + PROBE_PAUSE_S)

    def call_failed(self, call: Call, reason: str, now: float) -> None:
        """Take a call that came to nothing, for no fault of its replica."""
        at = self._taken_back(call, now)
        if call.probe:
            at.postpone_probe(call.replica, now + PROBE_PAUSE_S)
        else:
            self._failed(at, call, "error", reason, now)

    def call_postponed(self, call: Call, pause_s: float, now: float) -> None:
        """Try a call again after a pause that could not be computed for no fault of its own."""
        at = self._taken_back(call, now)
        if call.probe:
            at.postpone_probe(call.replica, now + pause_s)
        else:
            at.try_again(call.again(now + pause_s))

    def rows_lost(self, call: Call, reason: str, now: float) -> None:
        """Have the owners of rows start again from the input where objects of their call are lost."""
        at = self._taken_back(call, now)
        if call.good_row is not None or call.probe:
            at.forget_good_row()  # what was lost may have been that
        if call.probe:
            return
        for owner in dict.fromkeys(rows.owner for rows in call.rows if rows.owner.live):
            self._flow.restart(at, owner, reason)

    # What happens to stages

    def replica_ready(self, stage: int, replica: int, now: float) -> None:
        """Take a replica that is ready."""
        self.stages[stage].add_replica(replica, now)

    def replica_lost(self, stage: int, replica: int, reason: str, now: float, *, own_fault: bool = True) -> None:
        """Forget a replica that died or was given up, and send its calls elsewhere.

        The call that it was computing may be what it died of, and so may one that it was preparing.

        Args:
            stage: The stage.
            replica: The replica.
            reason: What it died of.
            now: The time.
            own_fault: False where it certainly was not, as when its whole node died.
        """
        at = self.stages[stage]
        calls = at.replicas.calls_at(replica)
        if own_fault and calls:
            at.lost_by_own_fault(now)
            if not (calls[0].isolated or calls[0].probe):
                self._settle(at, [CountFailure("replicas end")], now)
        for position, call in enumerate(calls):
            at.take_back(call, now)
            if call.probe:
                continue
            if own_fault and position < at.calls_at_work:
                self._settle(at, self._blame.ended(at, call, reason, now), now)
            else:
                self._settle(at, [Again(call.again(now))], now)
        at.replicas.drop(replica)
        at.bad.pop(replica, None)
        self.count_replicas(stage, now)

    def count_replicas(self, stage: int, now: float, why: str | None = None) -> None:
        """Note how many replicas a stage has, and give back what waits where there are none.

        why: they may be gone for long, None where that is not known.
        """
        at = self.stages[stage]
        at.health.replicas(at.replicas.n_open, now, why if at.limits.degrades else None)
        self._settle(at, (), now)

    def stage_down(self, stage: int, now: float) -> None:
        """Leave out a stage that has others before it, until a replica is ready."""
        assert stage > 0
        self.stages[stage].health.is_down = True
        self._settle(self.stages[stage], (), now)

    def learn(self, verdict: VerdictReached, now: float) -> None:
        """Take a verdict of another router."""
        at = self.stages[verdict.stage]
        self._settle(at, self._blame.learn(at, verdict, now), now)

    def time_passed(self, now: float) -> None:
        """Give up rows that have waited for too long, and calls that hang or have lost all who wait for them."""
        self._expire(now)
        self._withdraw(now)

    # What becomes of rows

    def _failed(self, at: Stage, call: Call, failure: Failure, reason: str, now: float) -> None:
        """Decide what becomes of rows whose call failed."""
        if at.health.is_down and failure != "named":
            self._settle(at, [Again(call)], now)
            return
        more = self._more_can_come(at.number)
        self._settle(at, self._patience.failed(at, call, failure, reason, now, more_can_come=more), now)

    def _settle(self, at: Stage, fates: Iterable[Fate], now: float) -> None:
        """Do with rows what the rules have decided, one after the other."""
        for fate in fates:
            match fate:
                case Again(call):
                    at.try_again(call)
                case GiveUp(rows, trouble, reason):
                    self._flow.leave_out(at, rows, trouble, reason)
                case CountFailure():
                    self._count_failure(at, fate, now)
        if at.health.is_down or (at.limits.degrades and at.health.missing(now)):
            self._flow.leave_out(at, at.take_all(), "down", at.because(at.health.why_not(now) or "", " is down"))

    def _count_failure(self, at: Stage, failure: CountFailure, now: float) -> None:
        """Note a call that came to nothing; if that pauses the stage, give back all that waits."""
        at.health.failed(failure.reason, for_good=failure.for_good)
        if not at.health.paused:
            return
        if failure.rows:
            at.note_refused(failure.rows[0], now)
        why = at.because(at.health.why_paused, " is down")
        self._flow.leave_out(at, at.take_all(), "down", why)
        if failure.for_good:
            calls = [call for call in at.replicas.calls() if not call.probe]
            for owner in dict.fromkeys(rows.owner for call in calls for rows in call.rows):
                self._flow.leave_stage(at, owner, "down", why)

    # What takes too long

    def _expire(self, now: float) -> None:
        """Give up the rows whose time is over."""
        expired = [(owner, self.stages[stage]) for owner, stage in self._flow.deadlines.late(now)]
        for owner, at in expired:
            self._settle(at, self._blame.late(at, owner, now), now)
        for owner, at in expired:
            self._flow.leave_stage(at, owner, "timeout", late(at, owner))
        for at in self.stages:
            if not any(stage is at and not owner.hurries for owner, stage in expired):
                continue
            idle = [call for call in at.replicas.calls() if not (call.wanted or call.probe)]
            # While others are answered, a replica hangs or the stage is busy: no reason to pause its calls.
            silent = now - at.health.succeeded_at > max(at.limits.timeout_s, 2 * at.seconds.long_call_s)
            if silent and (idle or (at.replicas.n_open and not at.replicas.n_working)):
                why = f"it has not answered within {at.limits.timeout_s:g} s"
                self._settle(at, [CountFailure(why, idle[0].rows if idle else (), for_good=True)], now)

    def _withdraw(self, now: float) -> None:
        """Take back the calls of replicas that hang, and those whose answers are no longer waited for."""
        for at in self.stages:
            hanging = []
            for replica in self._blame.hanging(at, now):
                hanging.append(at.replicas.calls_at(replica))
                for call in hanging[-1]:
                    at.take_back(call, now)
                # It gets probes until it answers one, which is also when the call that hangs has ended.
                at.replicas.failed(replica)
            for calls in hanging:
                self._settle(at, self._blame.suspected(at, calls[0], now, deadly=False), now)
                self._settle(at, (Again(call.again(now)) for call in calls[1:]), now)
                self.withdrawn += calls
            for call in at.replicas.calls():
                late = self._dispatch.is_late_probe(at, call, now)
                if late or not (call.wanted or call.probe):
                    at.take_back(call, now)
                    if late:
                        at.postpone_probe(call.replica, now + PROBE_PAUSE_S)
                    self.withdrawn.append(call)
