"""The controller's logic: from blocks that were read to blocks that are done, without Ray.

It is fed events (a block was read, a call ended, a replica died) and asked for the next call. Rows wait in a queue
for each stage; those that stages defer are gathered across calls and blocks into full batches. A partial batch
goes out when nothing upstream can add to it, or after the stage's time limit. A queue that is full holds the
stages ahead of it back, and at last the reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cauc_ray.cascade.results import CallResult
from cauc_ray.execution.blocks import BlockResult, OpenBlocks, chosen_of_chunks
from cauc_ray.execution.messages import Call, Rows
from cauc_ray.execution.progress import StageProgress
from cauc_ray.execution.stage_queue import Batch, Failure, StageLimits, StageQueue, failed_batches
from cauc_ray.numbers.types import Bools


@dataclass(frozen=True, slots=True)
class Released:
    """What nobody needs any more after an event: blocks that are finished, objects whose rows have all gone on."""

    blocks: tuple[BlockResult, ...] = ()
    parcels: tuple[int, ...] = ()

    def __add__(self, other: Released) -> Released:
        return Released((*self.blocks, *other.blocks), (*self.parcels, *other.parcels))


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a block that was read: its rows and bytes."""

    n_rows: int
    n_bytes: int


class Controller:
    """All that is known of a run in progress. Times are seconds since the epoch and come from outside."""

    def __init__(self, stages: Sequence[StageLimits], open_rows: int) -> None:
        """Take the stages' limits, and how many rows of the input may have no answer yet before reading pauses."""
        self.stages = [StageQueue(limits) for limits in stages]
        self._most_open_rows = open_rows
        self._blocks = OpenBlocks()
        self._rows_left: dict[int, int] = {}  # in each object
        self._calls: dict[int, Call] = {}
        self._n_calls = 0
        self._n_parcels = 0
        self._n_reads = 0
        self._row_bytes = 0.0
        self._block_rows = 0
        self._input_ended = False

    # Input

    def wants_block(self) -> bool:
        """Say whether another block may be read: the first queue and the open rows leave room, or all is done."""
        if self._input_ended:
            return False
        if not self._blocks and not self._n_reads:
            return True
        first, coming = self.stages[0], self._n_reads * self._block_rows
        return (
            self._blocks.n_rows + coming < self._most_open_rows
            and first.queued_rows + coming < first.limits.queue_rows
            and first.queued_bytes + coming * self._row_bytes < first.limits.queue_bytes
        )

    def read_started(self) -> None:
        """Note that a block is being read."""
        self._n_reads += 1

    def read_ended(self) -> None:
        """Note that a read has ended, with a block or without one."""
        self._n_reads -= 1

    def end_input(self) -> None:
        """Note that no block will follow those that are being read."""
        self._input_ended = True

    def add_block(self, block: int, chunks: Sequence[Chunk], now: float) -> list[int]:
        """Queue a block's rows for the first stage. Returns the numbers by which its chunks will be asked for."""
        n_rows = sum(chunk.n_rows for chunk in chunks)
        self._blocks.add(block, n_rows)
        self._block_rows = max(self._block_rows, n_rows)
        self._row_bytes = max(self._row_bytes, sum(chunk.n_bytes for chunk in chunks) / n_rows)
        return self._queue_chunks(block, chunks, np.full(n_rows, True), now)

    def next_restart(self) -> int | None:
        """Return a block that must be read again because rows of it were lost, None if there is none.

        Its rows wait until add_again or give_up.
        """
        return self._blocks.to_restart()

    def add_again(self, block: int, chunks: Sequence[Chunk], now: float) -> list[int | None]:
        """Queue a block's lost rows anew. Returns each chunk's number, None for those that nobody needs."""
        wanted = np.zeros(self._blocks.n_rows_of(block), dtype=bool)
        wanted[self._blocks.take_restarts(block)] = True
        numbers = self._queue_chunks(block, chunks, wanted, now)
        return [number if number in self._rows_left else None for number in numbers]

    def give_up(self, block: int, reason: str) -> Released:
        """Fail a block's lost rows: it cannot be read again."""
        rows = self._blocks.take_restarts(block)
        lost = Rows(block, rows, parcel=0, places=rows, ready_at=0.0, column_bytes=0.0)
        return Released(tuple(self._blocks.fail(lost, -1, reason)))

    def _queue_chunks(self, block: int, chunks: Sequence[Chunk], wanted: Bools, now: float) -> list[int]:
        numbers, start = [], 0
        for chunk, places in zip(chunks, chosen_of_chunks([c.n_rows for c in chunks], wanted), strict=True):
            number = self._new_parcel()
            if len(places):
                self._rows_left[number] = len(places)
                row_bytes = chunk.n_bytes / chunk.n_rows
                self.stages[0].push(Rows(block, start + places, number, places, now, row_bytes))
            numbers.append(number)
            start += chunk.n_rows
        return numbers

    # Calls

    @property
    def finished(self) -> bool:
        """Say whether every row of the input has its answer or its failure."""
        return self._input_ended and not self._blocks and not self._n_reads

    def next_call(self, now: float) -> Call | None:
        """Return a batch that can go to a replica now, the deepest stage's first, or None."""
        for stage in range(len(self.stages) - 1, -1, -1):
            if self.held_back(stage):
                continue
            found = self.stages[stage].next_batch(now, more_can_come=self._more_can_come(stage))
            if found is not None:
                return self._send(stage, *found, now)
        return None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a partial batch or a retry will have waited long enough, None if none waits."""
        waits = [at.wait_s(now) for stage, at in enumerate(self.stages) if not self.held_back(stage)]
        return min((wait for wait in waits if wait is not None), default=None)

    def call_ended(self, call_id: int, result: CallResult, now: float) -> Released:
        """Take a call's result: note the answers, queue what is deferred for the next stage, try again what failed.

        Whether a failure is the fault of the rows or of the replica shows when that answers again, or does not.
        """
        call = self._take_back(call_id, now)
        at = self.stages[call.stage]
        if not result.n_answered:
            at.busy_s += result.compute_s or 0.0
            return self._unanswered(call, result, now)
        if call.probe:
            return self._judged(at.answered(call), now)
        at.ended_well(result)
        answered = np.full(len(call), True)
        answered[list(result.failures)] = False
        kept = call.where(answered) if result.failures else call.rows
        column_bytes = sum(rows.column_bytes * len(rows) for rows in call.rows) / len(call)
        finished, n_deferred, start = [], 0, 0
        for rows, on in zip(call.rows, self._blocks.note_answers(call, result), strict=True):
            if len(on):
                places = np.arange(n_deferred, n_deferred + len(on))
                n_deferred += len(on)
                going = Rows(rows.block, on, call.output, places, now, column_bytes, result.state_bytes)
                self.stages[call.stage + 1].push(going)
            n_answered = int(answered[start : start + len(rows)].sum())
            start += len(rows)
            finished += self._blocks.done(rows.block, n_answered - len(on))
        if at.known_good is None:
            self._learn(at, kept[0])
        released = Released(tuple(finished), self._spend(kept)) + self._judged(at.answered(call), now)
        if n_deferred:
            self._rows_left[call.output] = n_deferred
            released += self._degraded(call.stage + 1)
        if result.failures:
            reasons = tuple(result.failures[place] for place in sorted(result.failures))
            named = replace(call, rows=call.where(~answered))
            released += self._give_up(Failure(named, reasons, stated=True))  # the model answers, and named them itself
        return released

    def _unanswered(self, call: Call, result: CallResult, now: float) -> Released:
        """Take the result of a call that answered no row."""
        at = self.stages[call.stage]
        reasons = (result.error,) * len(call) if result.error is not None else tuple(result.failures.values())
        failure = Failure(call, reasons, stated=result.error is None)
        if call.probe:
            at.probe_failed(call, reasons[0], now)
        elif at.down:
            at.try_again(Batch.again(call, now))
            return self._degraded(call.stage)
        elif at.known_good is None:
            return self._failed(failure, now)
        else:
            at.hold(failure)
        return Released()

    def _judged(self, failures: Iterable[Failure], now: float) -> Released:
        """Take failures as the fault of their rows."""
        released = Released()
        for failure in failures:
            released += self._failed(failure, now)
        return released

    def _learn(self, at: StageQueue, answered: Rows) -> None:
        """Keep the first of some answered rows to probe the stage's replicas with, and the object that holds it."""
        row, _ = answered.cut(1)
        self._rows_left[row.parcel] += 1
        at.start_knowing(row)

    def call_postponed(self, call_id: int, pause_s: float, now: float) -> None:
        """Note that a call could not be computed for no fault of its own; it is tried again after a pause."""
        call = self._take_back(call_id, now)
        if call.probe:
            self.stages[call.stage].postpone_probe(call.replica, now + pause_s)
        else:
            self.stages[call.stage].try_again(Batch.again(call, now + pause_s))

    def rows_lost(self, call_id: int, reason: str, now: float) -> Released:
        """Note that objects which a call needs are gone: its rows begin anew, from the input, as if never seen."""
        call = self._take_back(call_id, now)
        at = self.stages[call.stage]
        if call.probe:
            return self._unlearn(at, call.rows[0], now)
        finished: list[BlockResult] = []
        for rows in call.rows:
            given_up = self._blocks.lose(rows)
            if len(given_up):
                at.note_failed([reason] * len(given_up))
                lost = Rows(rows.block, given_up, rows.parcel, given_up, now, column_bytes=0.0)
                finished += self._blocks.fail(lost, call.stage, reason)
        return Released(tuple(finished), self._spend(call.rows))

    def _unlearn(self, at: StageQueue, probe: Rows, now: float) -> Released:
        """Note that the data of a probe is lost; the next row that is answered takes its place."""
        if at.known_good is None or at.known_good.parcel != probe.parcel:
            return Released()
        released = Released(parcels=self._spend((at.known_good,)))
        return released + self._judged(at.stop_knowing(), now)

    def _send(self, stage: int, batch: Batch, replica: int, now: float) -> Call:
        call = Call(
            id=self._n_calls,
            stage=stage,
            replica=replica,
            rows=batch.rows,
            output=self._new_parcel(),
            attempt=batch.attempt,
            alone=batch.alone,
            failed_on=batch.failed_on,
            n_unproven=batch.n_unproven,
            probe=batch.probe,
        )
        self._n_calls += 1
        self._calls[call.id] = call
        self.stages[stage].sent(call, now)
        return call

    def held_back(self, stage: int) -> bool:
        """Say whether the queue after a stage is full."""
        return stage + 1 < len(self.stages) and not self.stages[stage + 1].has_room

    def _more_can_come(self, stage: int) -> bool:
        """Say whether input or an earlier stage may still add rows to a stage's queue."""
        if self._n_reads or self.wants_block() or self._blocks.to_restart() is not None:
            return True
        return any(at.in_work for at in self.stages[:stage])

    def _take_back(self, call_id: int, now: float) -> Call:
        call = self._calls.pop(call_id)
        self.stages[call.stage].back(call, now)
        return call

    # What goes wrong

    def replica_lost(self, stage: int, replica: int, reason: str, now: float, *, own_fault: bool = True) -> Released:
        """Forget a replica that died or was given up, for a reason, and send its calls elsewhere.

        The call that it was computing may be what it died of: its rows are tried again with nothing else at the
        replica, and split and at last failed if that happens again and again.   own_fault: False where it
        certainly was not, as when its whole node died.
        """
        released, at = Released(), self.stages[stage]
        calls = at.calls_at(replica)
        if own_fault and calls:
            at.lost_by_own_fault(now)
        for place, call_id in enumerate(calls):
            call = self._take_back(call_id, now)
            to_blame = own_fault and place == 0
            if call.probe:
                continue
            at.deaths += to_blame and call.alone  # many may be killed at once for no fault of a call
            if to_blame and call.alone:
                released += self._failed(Failure(call, (reason,) * len(call)), now, is_proven=True)
            else:
                at.try_again(replace(Batch.again(call, now), alone=call.alone or to_blame))
        at.drop_replica(replica)
        return released + self._degraded(stage)

    def stage_down(self, stage: int) -> Released:
        """Answer what waits for a stage, and what is yet to come, as the stages before would have.

        Until a replica is added. The first stage has none before it.
        """
        assert stage > 0
        self.stages[stage].down = True
        return self._degraded(stage)

    def _failed(self, failure: Failure, now: float, *, is_proven: bool = False) -> Released:
        """Try rows that failed again, or give them up.   is_proven: the replica was one that answers others."""
        call, at = failure.call, self.stages[failure.call.stage]
        if is_proven or at.known_good is not None:
            again = failed_batches(failure, now)
            at.try_again(*again)
            goes_on = bool(again)
        else:
            goes_on = at.try_unproven(failure, now, more_can_come=self._more_can_come(call.stage))
        return self._degraded(call.stage) if goes_on else self._give_up(failure)

    def _give_up(self, failure: Failure) -> Released:
        """Count rows as failed for their own sake."""
        call = failure.call
        self.stages[call.stage].note_failed(failure.reasons)
        finished, reasons = [], iter(failure.reasons)
        for rows in call.rows:
            for row in range(len(rows)):
                one = rows.where(np.arange(len(rows)) == row)
                finished += self._blocks.fail(one, call.stage, next(reasons))
        return Released(tuple(finished), self._spend(call.rows))

    def _degraded(self, stage: int) -> Released:
        """Give all rows that wait for a stage the answer of the one before it, if it is down."""
        at = self.stages[stage]
        if not at.down:
            return Released()
        finished: list[BlockResult] = []
        waiting = at.take_all()
        for rows in waiting:
            at.degraded += len(rows)
            finished += self._blocks.degrade(rows, stage)
        return Released(tuple(finished), self._spend(waiting))

    # Beside

    def progress(self, names: Sequence[str], replicas: Sequence[tuple[int, int]]) -> tuple[StageProgress, ...]:
        """Return where the rows are.   names: of the stages.   replicas: live and starting, of each."""
        return tuple(
            StageProgress(
                name=name,
                queued=at.n_waiting,
                in_flight=at.in_flight,
                accepted=at.accepted,
                deferred=at.deferred,
                failed=at.failed,
                degraded=at.degraded,
                replicas=live,
                starting=starting,
                quarantined=at.quarantined,
                busy_s=at.busy_s,
                cost=at.cost,
                reason=at.reasons.most_common(1)[0][0] if at.reasons else "",
            )
            for name, at, (live, starting) in zip(names, self.stages, replicas, strict=True)
        )

    def _spend(self, used: Iterable[Rows]) -> tuple[int, ...]:
        """Count rows off the objects that hold them. Returns those that hold no row any more."""
        spent = []
        for rows in used:
            self._rows_left[rows.parcel] -= len(rows)
            if not self._rows_left[rows.parcel]:
                del self._rows_left[rows.parcel]
                spent.append(rows.parcel)
        return tuple(spent)

    def _new_parcel(self) -> int:
        self._n_parcels += 1
        return self._n_parcels
