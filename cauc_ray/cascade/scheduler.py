"""From rows that were read to rows that are done, without Ray: which call goes out when, and what its end means.

A shell feeds it events (rows were read, a call ended, a replica died) and asks it for the next call. Rows wait in a
queue for each stage; those that a stage defers are gathered across calls and owners into full batches. A partial batch
goes out when nothing upstream can add to it, or after the stage's time limit. A queue that is full holds the stages
ahead of it back, and at last the reading.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from cauc_ray.cascade.rows import Call, CallResult, Ended, Owner, Positions, Rows, Trouble
from cauc_ray.cascade.stage_queue import PAUSE_S, TRIES, StageLimits, StageQueue
from cauc_ray.numbers.types import Bools, Ints

# The most restarts of an owner whose objects are lost with their nodes.
RESTARTS = 5


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some neighbouring rows of a block that was read.   source: what holds them, which only the shell can read."""

    source: Any
    n_rows: int
    n_bytes: float


class Scheduler:
    """All that is known of a run in progress. Times are seconds and come from outside.

    done: owners whose last row is done, and lost: those that must be read again, for the shell to take.   n_reads: the
    blocks that are being read, which the shell sets.
    """

    def __init__(self, stages: Sequence[StageLimits], open_rows: int) -> None:
        """Take the stages' limits, and how many rows of the input may have no answer yet before reading pauses."""
        self.stages = [StageQueue(stage, limits) for stage, limits in enumerate(stages)]
        self.done: list[Owner] = []
        self.lost: list[Owner] = []
        self._most_open_rows = open_rows
        self._open: set[Owner] = set()
        self._open_rows = 0
        self.n_reads = 0
        self._row_bytes = 0.0
        self._block_rows = 0
        self._input_ended = False
        self._drops = False

    # Input

    def wants_block(self) -> bool:
        """Return whether another block may be read: the first queue and the open rows have room, or all is done."""
        if self._input_ended:
            return False
        if not self._open and not self.n_reads:
            return True
        first, coming = self.stages[0], self.n_reads * self._block_rows
        return (
            self._open_rows + coming < self._most_open_rows
            and first.queued_rows + coming < first.limits.queue_rows
            and first.queued_bytes + coming * self._row_bytes < first.limits.queue_bytes
        )

    def end_input(self) -> None:
        """Note that no block will follow those that are being read."""
        self._input_ended = True

    def submit(
        self,
        owner: Owner,
        chunks: Sequence[Chunk],
        now: float,
        first: Ints | None = None,
        unreadable: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        """Queue an owner's rows, which lie in chunks one after the other.

        Args:
            owner: The owner.
            chunks: What holds the rows that could be read, in their order.
            now: The time.
            first: The stage that each row goes to, int8 (n,); None for stage 0.
            unreadable: Why rows could not be read, by position; they fail at once.
        """
        self._open.add(owner)
        self._open_rows += owner.n
        self._block_rows = max(self._block_rows, owner.n)
        readable = np.ones(owner.n, dtype=bool)
        for position, reason in unreadable.items():
            readable[position] = False
            owner.left_out(np.array([position]), -1, "error", reason)
        indices = np.flatnonzero(readable)
        if unreadable:
            self._end_rows(owner, len(unreadable))
        start = 0
        for chunk in chunks:
            row_bytes = chunk.n_bytes / chunk.n_rows
            self._row_bytes = max(self._row_bytes, row_bytes)
            positions = np.arange(chunk.n_rows)
            rows = Rows(owner, indices[start : start + chunk.n_rows], chunk.source, positions, now, row_bytes)
            self._spread(rows, 0 if first is None else first[rows.indices], now)
            start += chunk.n_rows

    # Calls

    @property
    def finished(self) -> bool:
        """Return whether every row of the input is answered or failed."""
        return self._input_ended and not (self._open or self.n_reads or self.lost)

    def next_call(self, now: float) -> Call | None:
        """Return a call that can go to its replica now, the deepest stage's first, or None."""
        if self._drops:  # once for all owners that have left since
            self._drops = False
            for at in self.stages:
                at.drop_ended()
        for stage in reversed(range(len(self.stages))):
            if not self.stages[stage].may_send or self.held_back(stage):
                continue
            call = self.stages[stage].next_call(now, more_can_come=self._more_can_come(stage))
            if call is not None:
                return call
        return None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a partial batch or a retry will have waited long enough, None if none waits."""
        waits = [at.wait_s(now) for stage, at in enumerate(self.stages) if not self.held_back(stage)]
        return min((wait for wait in waits if wait is not None), default=None)

    def ended(self, call: Call, result: CallResult, goes_on: Any, now: float) -> None:
        """Take a call's result: note the answers, queue what is deferred for the next stage, try again what failed.

        goes_on: what holds the rows that go on, in their order.
        """
        at = self.stages[call.stage]
        at.take_back(call, now)
        if result.error is not None:
            self._unanswered(call, result, now)
            return
        answered = np.full(len(call), True)
        answered[list(result.failures)] = False
        if not answered.any():
            reason = next(iter(result.failures.values()))
            if at.known_good is None:
                self._unproven(call, reason, now)
                return
            if call.probe:
                at.broken(call, reason, now)
                return
        first = answered.any() and at.known_good is None
        at.works(call, call.where(np.arange(len(call)) == answered.argmax())[0] if first else None)
        if call.probe:
            return
        at.count(result)
        self._note(call, result, answered, goes_on, now)
        for position, reason in sorted(result.failures.items()):
            (row,) = call.where(np.arange(len(call)) == position)
            if not row.owner.live:
                continue
            single = Call(call.stage, [row], now, call.attempt, failed_on=call.failed_on)
            if position in result.raised:
                self._failed(single, call.replica, reason, now)
            else:
                self._give_up(single, reason)  # the model answers others, and named this one itself

    def _note(self, call: Call, result: CallResult, answered: Bools, goes_on: Any, now: float) -> None:
        """Note the answers of a call, and have rows that go on wait for the next stage."""
        carried = answered & ~result.accepted if result.carried is None else result.carried
        held_at = np.cumsum(carried) - 1  # where goes_on has each row that it holds
        ended, whole = Ended(call.stage, result, goes_on, held_at, now), bool(answered.all())
        positions: Positions
        for rows, positions in call.pieces():
            if not rows.owner.wants(call.stage):
                continue
            if not whole:
                own = answered[positions]
                rows, positions = rows.part(own), np.flatnonzero(own) + positions.start
            on = rows.owner.note(ended, rows, positions)
            n_on = int(np.count_nonzero(on))
            rows.owner.at[rows.indices[~on]] = -1
            self._end_rows(rows.owner, len(rows) - n_on)
            if n_on:
                row_bytes = rows.row_bytes - rows.state_bytes + result.state_bytes
                at = held_at[positions][on]
                onward = Rows(rows.owner, rows.indices[on], goes_on, at, now, row_bytes, result.state_bytes)
                to = call.stage + 1 if result.next is None else result.next[positions][on]
                self._spread(onward, to, now, sent=self.stages[call.stage].sent)

    def _spread(self, rows: Rows, stages: int | Ints, now: float, sent: Counter[int] | None = None) -> None:
        """Have rows wait, each for its stage, or all for one.   sent: counts where they go."""
        rows.owner.at[rows.indices] = stages
        for stage, own in [(stages, rows)] if isinstance(stages, int) else _by_stage(rows, stages):
            if sent is not None:
                sent[stage] += len(own)
            self._wait(stage, own, now)

    def _wait(self, stage: int, rows: Rows, now: float) -> None:
        """Have rows wait for a stage that takes them."""
        why_not = self.stages[stage].refuses(rows, now)
        if why_not is None:
            self.stages[stage].push(rows)
        else:
            self._leave_out(stage, rows, *why_not)

    def _leave_out(self, stage: int, rows: Rows, trouble: Trouble, reason: str) -> None:
        """Note rows that a stage will not answer."""
        owner = rows.owner
        live, still = owner.live, owner.at[rows.indices] == stage
        if not (live and still.any()):  # they have been left out before, while they were at a replica
            return
        rows = rows.part(still)
        n_degraded = owner.left_out(rows.indices, stage, trouble, reason)
        self.stages[stage].degraded += n_degraded
        self.stages[stage].note_failed([reason] * (len(rows) - n_degraded))
        if owner.live:
            self._end_rows(owner, len(rows))
        else:  # all of it is refused
            self.cancel(owner)

    def _unanswered(self, call: Call, result: CallResult, now: float) -> None:
        """Take the result of a call that answered no row."""
        at, reason = self.stages[call.stage], result.error or ""
        at.busy_s += result.compute_s or 0.0
        if result.fault == "replica" or call.probe:
            at.broken(call, reason, now)
        if call.probe:
            return
        if at.down or result.fault == "replica":
            at.try_again(call.again(now))
            self._degrade(call.stage)
        elif at.known_good is None:
            self._unproven(call, reason, now)
        elif len(call) > 1:
            at.try_again(*(call.again(now, rows=half) for half in call.halves()))
        else:
            self._failed(call, call.replica, reason, now)

    def _unproven(self, call: Call, reason: str, now: float) -> None:
        """Take the end of a call that failed while the stage has never answered any row."""
        if call.probe:
            return
        more = self._more_can_come(call.stage)
        if self.stages[call.stage].try_unproven(call, reason, now, more_can_come=more):
            self._degrade(call.stage)
        else:
            self._give_up(call, reason)

    def postponed(self, call: Call, pause_s: float, now: float) -> None:
        """Note that a call could not be computed for no fault of its own; it is tried again after a pause."""
        at = self.stages[call.stage]
        at.take_back(call, now)
        if call.probe:
            at.postpone_probe(call.replica, now + pause_s)
        else:
            at.try_again(call.again(now + pause_s))

    def rows_lost(self, call: Call, reason: str, now: float) -> None:
        """Note that objects of a call are lost: its owners start again from the input."""
        at = self.stages[call.stage]
        at.take_back(call, now)
        if call.good_row is not None or call.probe:
            at.forget_good_row()  # what was lost may have been that
        if call.probe:
            return
        for owner in dict.fromkeys(rows.owner for rows in call.rows if rows.owner.live):
            self.cancel(owner)
            if owner.restarts < RESTARTS:
                self.lost.append(owner)
                continue
            # Whatever waits of it may be lost too, and what was answered stays.
            left = np.flatnonzero(owner.at >= 0)
            owner.left_out(left, call.stage, "error", reason)
            at.note_failed([reason] * len(left))
            self.done.append(owner)

    def cancel(self, owner: Owner) -> None:
        """Forget an owner whose answers are no longer wanted."""
        owner.live = False
        if owner in self._open:
            self._drops = True
            self._close(owner)

    def held_back(self, stage: int) -> bool:
        """Return whether a later stage to which this stage sends rows has a full queue."""
        return any(to > stage and not self.stages[to].has_room for to in self.stages[stage].sent)

    def _more_can_come(self, stage: int) -> bool:
        """Return whether input or another stage may still add rows to a stage's queue."""
        return bool(self.n_reads or self.lost or self.wants_block()) or self._others_at_work(stage)

    def _others_at_work(self, stage: int) -> bool:
        return any(at.in_work for at in self.stages if at.stage < stage or stage in at.sent)

    # What goes wrong

    def replica_lost(self, stage: int, replica: int, reason: str, now: float, *, own_fault: bool = True) -> None:
        """Forget a replica that died or was given up, for a reason, and send its calls elsewhere.

        The call that it was computing may be what it died of, and so may one that it was preparing: their rows are
        tried again in isolated calls, halved and at last failed if that happens again and again.   own_fault: False
        where it certainly was not, as when its whole node died.
        """
        at = self.stages[stage]
        calls = at.calls_at(replica)
        if own_fault and calls:
            at.lost_by_own_fault(now)
        for position, call in enumerate(calls):
            at.take_back(call, now)
            blamed = own_fault and position < at.calls_at_work
            if call.probe:
                continue
            if blamed:
                self._ended_replica(call, reason, now)
            else:
                at.try_again(call.again(now))
        at.drop_replica(replica)
        self._degrade(stage)

    def _ended_replica(self, call: Call, reason: str, now: float) -> None:
        """Take a call that a replica computed when it ended or was given up: that may be its rows' doing."""
        at = self.stages[call.stage]
        if not call.isolated:
            at.try_again(call.again(now, isolated=True))
            return
        at.deaths += 1  # many may be killed at once for no fault of a call
        if len(call) > 1:
            at.try_again(*(call.again(now, rows=half) for half in call.halves()))
        else:
            self._failed(call, call.replica, reason, now)

    def stage_down(self, stage: int) -> None:
        """Answer what waits for a stage, and what is yet to come, as the stages before would have.

        Until a replica is added. The first stage has none before it.
        """
        assert stage > 0
        self.stages[stage].down = True
        self._degrade(stage)

    def _failed(self, call: Call, replica: int, reason: str, now: float) -> None:
        """Try one row again that failed by itself, on other replicas and after a pause, or give it up."""
        failed_on = (*call.failed_on, replica)
        if len(failed_on) >= TRIES:
            self._give_up(call, reason)
            return
        due = now + PAUSE_S * 2 ** len(call.failed_on)
        self.stages[call.stage].try_again(call.again(due, failed_on=failed_on))
        self._degrade(call.stage)

    def _give_up(self, call: Call, reason: str) -> None:
        """Count rows as failed."""
        for rows in call.rows:
            self._leave_out(call.stage, rows, "refused", reason)

    def _degrade(self, stage: int) -> None:
        """Give all rows that wait for a stage the answer of the one before it, if it is down."""
        at = self.stages[stage]
        if not at.down:
            return
        for rows in at.take_all():
            self._leave_out(stage, rows, "down", "it is down")

    def _end_rows(self, owner: Owner, n: int) -> None:
        """Count rows of an owner that need nothing more."""
        owner.n_left -= n
        self._open_rows -= n
        if not owner.n_left and owner in self._open:
            self._close(owner)
            self.done.append(owner)

    def _close(self, owner: Owner) -> None:
        self._open.discard(owner)
        self._open_rows -= owner.n_left
        owner.n_left = 0


def _by_stage(rows: Rows, stages: Ints) -> list[tuple[int, Rows]]:
    return [(stage, rows.part(stages == stage)) for stage in np.unique(stages).tolist()]
