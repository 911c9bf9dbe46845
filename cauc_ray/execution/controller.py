"""The controller's logic: queues, gathering, credits, retries and finished blocks, without Ray.

It is fed events (a block was read, a call ended, a replica died) and asked for the next call. Rows wait in a queue
for each stage; those that stages defer are gathered across calls and blocks into full batches. A partial batch
goes out when nothing upstream can add to it, or after the stage's time limit. A queue that is full holds the
stages ahead of it back, and at last the reader.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cauc_ray.execution.messages import Call, CallResult, Rows
from cauc_ray.execution.progress import StageProgress
from cauc_ray.numbers.types import Bools, Floats, Ints

# One call computes and one waits in each replica, so that none idles between two of them.
CALLS_PER_REPLICA = 2

# A row that fails by itself is tried so often, with a growing pause before each further time.
TRIES = 3
PAUSE_S = 0.1

# So many calls that fail, or replicas that die of their calls, show that a stage cannot work if it never has.
HOPELESS_CALLS = 48
HOPELESS_DEATHS = 8

# A row whose objects are lost with their nodes is started over so often.
RESTARTS = 5


@dataclass(frozen=True, slots=True)
class StageLimits:
    """How a stage takes its rows.

    batch_size: rows in a full batch.   batch_wait_s: seconds that a row waits for one.   queue_rows, queue_bytes:
    what may wait before the stage ahead is held back.
    """

    batch_size: int
    batch_wait_s: float
    queue_rows: int
    queue_bytes: float


@dataclass(slots=True)
class BlockResult:
    """What became of a block's n rows; all arrays (n,).

    predictions: int32, of the last stage that answered.   confidences, costs: float64.   stages: int8, -1 for rows
    that failed.   degraded: bool, rows answered without a stage that was down.   failures: the stage and the
    reason, by place in the block; stage -1 where the row could not be read.
    """

    block: int
    predictions: Ints
    confidences: Floats
    stages: Ints
    costs: Floats
    degraded: Bools
    failures: dict[int, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def empty(cls, block: int, n: int) -> BlockResult:
        """Return the result of n rows that nobody has looked at."""
        return cls(
            block=block,
            predictions=np.full(n, -1, dtype=np.int32),
            confidences=np.full(n, np.nan),
            stages=np.full(n, -1, dtype=np.int8),
            costs=np.zeros(n),
            degraded=np.zeros(n, dtype=bool),
        )


@dataclass(frozen=True, slots=True)
class Released:
    """What nobody needs any more after an event: blocks that are finished, objects whose rows have all gone on."""

    blocks: tuple[BlockResult, ...] = ()
    parcels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a block that was read: its rows and bytes."""

    n_rows: int
    n_bytes: int


@dataclass(slots=True)
class _OpenBlock:
    """A block with rows that are not done.   restarts: how often each row began anew, None before the first time."""

    result: BlockResult
    n_left: int
    restarts: Ints | None = None
    to_restart: list[Ints] = field(default_factory=list)


@dataclass(slots=True)
class _Parcel:
    """An object that holds rows: how many are still to be computed, and what each takes."""

    n_left: int
    column_bytes: float
    state_bytes: float = 0.0

    @property
    def row_bytes(self) -> float:
        return self.column_bytes + self.state_bytes


@dataclass(slots=True)
class _Replica:
    """A replica's calls, the one that computes first.   busy_since: when that one could begin."""

    stage: int
    calls: deque[int] = field(default_factory=deque)
    busy_since: float = 0.0
    open: bool = True
    alone: bool = False


@dataclass(frozen=True, slots=True)
class _Retry:
    due: float
    rows: tuple[Rows, ...]
    attempt: int
    alone: bool = False
    strikes: int = 0

    @property
    def n_rows(self) -> int:
        return sum(len(rows) for rows in self.rows)


@dataclass(slots=True)
class _Stage:
    limits: StageLimits
    replicas: dict[int, _Replica] = field(default_factory=dict)
    queue: deque[Rows] = field(default_factory=deque)
    retries: list[_Retry] = field(default_factory=list)
    queued_rows: int = 0
    queued_bytes: float = 0.0
    in_flight: int = 0
    accepted: int = 0
    deferred: int = 0
    failed: int = 0
    degraded: int = 0
    calls_done: int = 0
    calls_failed: int = 0
    deaths: int = 0
    busy_s: float = 0.0
    cost: float = 0.0
    down: bool = False
    # The replica that takes no further calls until one that must be alone has gone there.
    reserved: int | None = None

    @property
    def has_room(self) -> bool:
        return self.down or (self.queued_rows < self.limits.queue_rows and self.queued_bytes < self.limits.queue_bytes)

    @property
    def n_waiting(self) -> int:
        return self.queued_rows + sum(retry.n_rows for retry in self.retries)


class Controller:
    """All that is known of a run in progress. Times are seconds since the epoch and come from outside."""

    def __init__(self, stages: Sequence[StageLimits], open_rows: int) -> None:
        """Take the stages' limits, and how many rows of the input may have no answer yet before reading pauses."""
        self._stages = [_Stage(limits) for limits in stages]
        self._most_open_rows = open_rows
        self._open_rows = 0
        self._blocks: dict[int, _OpenBlock] = {}
        self._parcels: dict[int, _Parcel] = {}
        self._replicas: dict[int, _Replica] = {}
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
        first, coming = self._stages[0], self._n_reads * self._block_rows
        limits = first.limits
        return (
            self._open_rows + coming < self._most_open_rows
            and first.queued_rows + coming < limits.queue_rows
            and first.queued_bytes + coming * self._row_bytes < limits.queue_bytes
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
        self._blocks[block] = _OpenBlock(BlockResult.empty(block, n_rows), n_rows)
        self._open_rows += n_rows
        self._block_rows = max(self._block_rows, n_rows)
        self._row_bytes = max(self._row_bytes, sum(chunk.n_bytes for chunk in chunks) / max(1, n_rows))
        return self._queue_chunks(block, chunks, np.full(n_rows, True), now)

    def add_unreadable(self, block: int, n_rows: int, reason: str) -> BlockResult:
        """Return the result of a block that could not be read."""
        result = BlockResult.empty(block, n_rows)
        result.failures.update(dict.fromkeys(range(n_rows), (-1, reason)))
        return result

    def next_restart(self) -> int | None:
        """Return a block that must be read again because rows of it were lost, None if there is none.

        Its rows wait until add_again or give_up.
        """
        return next((block for block, open_block in self._blocks.items() if open_block.to_restart), None)

    def add_again(self, block: int, chunks: Sequence[Chunk], now: float) -> list[int | None]:
        """Queue a block's lost rows anew. Returns each chunk's number, None for those that nobody needs."""
        open_block = self._blocks[block]
        wanted = np.zeros(len(open_block.result.stages), dtype=bool)
        wanted[np.concatenate(open_block.to_restart)] = True
        open_block.to_restart = []
        numbers = self._queue_chunks(block, chunks, wanted, now)
        return [number if number in self._parcels else None for number in numbers]

    def give_up(self, block: int, reason: str) -> Released:
        """Fail a block's lost rows: it cannot be read again."""
        open_block = self._blocks[block]
        rows = np.concatenate(open_block.to_restart)
        open_block.to_restart = []
        open_block.result.failures.update(dict.fromkeys(rows.tolist(), (-1, reason)))
        return Released(tuple(self._rows_done(block, len(rows))))

    def _queue_chunks(self, block: int, chunks: Sequence[Chunk], wanted: Bools, now: float) -> list[int]:
        numbers, start = [], 0
        for chunk in chunks:
            places = np.flatnonzero(wanted[start : start + chunk.n_rows])
            number = self._new_parcel()
            if len(places):
                self._parcels[number] = _Parcel(len(places), chunk.n_bytes / chunk.n_rows)
                self._push(0, Rows(block, start + places, number, places, now))
            numbers.append(number)
            start += chunk.n_rows
        return numbers

    # Replicas

    def add_replica(self, stage: int, replica: int) -> None:
        """Note that a replica is ready; a stage that was down is so no more."""
        self._replicas[replica] = self._stages[stage].replicas[replica] = _Replica(stage)
        self._stages[stage].down = False

    def close_replica(self, replica: int) -> None:
        """Send a replica no further calls."""
        at = self._replicas[replica]
        at.open = False
        if self._stages[at.stage].reserved == replica:
            self._stages[at.stage].reserved = None

    def drop_replica(self, replica: int) -> None:
        """Forget a replica without calls."""
        self.close_replica(replica)
        del self._stages[self._replicas.pop(replica).stage].replicas[replica]

    def replica_lost(self, replica: int, reason: str, now: float) -> Released:
        """Forget a replica that died or was given up, for a reason, and send its calls elsewhere.

        The call that it was computing may be what it died of: its rows are tried again with nothing else at the
        replica, and split and at last failed if that happens again and again.
        """
        calls = list(self._replicas[replica].calls)
        finished: list[BlockResult] = []
        spent: list[int] = []
        for place, call_id in enumerate(calls):
            released = self._call_lost(self._take_back(call_id, now), reason, now, to_blame=place == 0)
            finished += released.blocks
            spent += released.parcels
        self.drop_replica(replica)
        return Released(tuple(finished), tuple(spent))

    def calls_at(self, replica: int) -> tuple[int, ...]:
        """Return the calls that a replica has, the one that it must be computing first."""
        return tuple(self._replicas[replica].calls)

    def overdue(self, stage: int, timeout_s: float, now: float) -> list[int]:
        """Return a stage's replicas that have computed one call for longer than that."""
        own = self._stages[stage].replicas.items()
        return [number for number, replica in own if replica.calls and now - replica.busy_since > timeout_s]

    # Calls

    @property
    def finished(self) -> bool:
        """Say whether every row of the input has its answer or its failure."""
        return self._input_ended and not self._blocks and not self._n_reads

    def next_call(self, now: float) -> Call | None:
        """Return a batch that can go to a replica now, the deepest stage's first, or None."""
        for stage in range(len(self._stages) - 1, -1, -1):
            if self._held_back(stage):
                continue
            call = self._next_retry(stage, now) or self._next_batch(stage, now)
            if call is not None:
                return call
        return None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a partial batch or a retry will have waited long enough, None if none waits."""
        due = []
        for stage, at in enumerate(self._stages):
            if self._held_back(stage):
                continue
            due += [retry.due - now for retry in at.retries if retry.due > now]
            if at.queue and self._free_replica(stage) is not None:
                due.append(at.queue[0].ready_at + at.limits.batch_wait_s - now)
        return max(0.0, min(due)) if due else None

    def call_ended(self, call_id: int, result: CallResult, now: float) -> Released:
        """Take a call's result: note the answers, queue what is deferred for the next stage.

        A failed call of several rows is cut in two and tried again, until the guilty rows are alone.
        """
        call = self._take_back(call_id, now)
        at = self._stages[call.stage]
        at.busy_s += result.compute_s or 0.0
        if result.error is not None:
            at.calls_failed += 1
            return self._failed(call, result.error, now)
        at.calls_done += 1
        at.cost += float(result.costs.sum())
        column_bytes = sum(self._parcels[rows.parcel].column_bytes * len(rows) for rows in call.rows) / len(call)
        finished: list[BlockResult] = []
        goes_on: list[Rows] = []
        start, n_deferred = 0, 0
        for rows in call.rows:
            end = start + len(rows)
            answers = self._blocks[rows.block].result
            answers.costs[rows.indices] += result.costs[start:end]
            answered = np.full(len(rows), True)
            for place in range(start, end) if result.failures else ():
                if place in result.failures:
                    answered[place - start] = False
                    answers.failures[int(rows.indices[place - start])] = (call.stage, result.failures[place])
            accepted = result.accepted[start:end]
            done, on = rows.indices[accepted], rows.indices[answered & ~accepted]
            # What deferred rows have so far is kept too: it is their answer if the next stage is down.
            answers.predictions[rows.indices[answered]] = result.predictions[start:end][answered]
            answers.confidences[rows.indices[answered]] = result.confidences[start:end][answered]
            answers.stages[done] = call.stage
            at.accepted += len(done)
            at.deferred += len(on)
            at.failed += len(rows) - len(done) - len(on)
            if len(on):
                goes_on.append(Rows(rows.block, on, call.output, np.arange(n_deferred, n_deferred + len(on)), now))
                n_deferred += len(on)
            finished += self._rows_done(rows.block, len(rows) - len(on))
            start = end
        spent = self._spend(call.rows)
        if not n_deferred:
            return Released(tuple(finished), spent)
        self._parcels[call.output] = _Parcel(n_deferred, column_bytes, result.state_bytes)
        released = self._send_on(call.stage + 1, goes_on)
        return Released((*finished, *released.blocks), (*spent, *released.parcels))

    def call_postponed(self, call_id: int, pause_s: float, now: float) -> None:
        """Note that a call could not be computed for no fault of its own; it is tried again after a pause."""
        call = self._take_back(call_id, now)
        again = _Retry(now + pause_s, call.rows, call.attempt + 1, call.alone, call.strikes)
        self._stages[call.stage].retries.append(again)

    def rows_lost(self, call_id: int, reason: str, now: float) -> Released:
        """Note that objects which a call needs are gone: its rows begin anew, from the input, as if never seen."""
        call = self._take_back(call_id, now)
        finished: list[BlockResult] = []
        for rows in call.rows:
            open_block = self._blocks[rows.block]
            if open_block.restarts is None:
                open_block.restarts = np.zeros(len(open_block.result.stages), dtype=np.int8)
            hopeless = open_block.restarts[rows.indices] >= RESTARTS
            again, given_up = rows.indices[~hopeless], rows.indices[hopeless]
            open_block.restarts[again] += 1
            open_block.result.costs[again] = 0.0
            if len(again):
                open_block.to_restart.append(again)
            self._stages[call.stage].failed += len(given_up)
            open_block.result.failures.update(dict.fromkeys(given_up.tolist(), (call.stage, reason)))
            finished += self._rows_done(rows.block, len(given_up))
        return Released(tuple(finished), self._spend(call.rows))

    def stage_down(self, stage: int) -> Released:
        """Answer what waits for a stage, and what is yet to come, as the stages before would have.

        Until a replica is added. The first stage has none before it.
        """
        assert stage > 0
        self._stages[stage].down = True
        return self._degraded(stage)

    def hopeless(self, stage: int) -> bool:
        """Say whether a stage has failed in many calls and never succeeded: its model is at fault, not the rows."""
        at = self._stages[stage]
        return not at.calls_done and (at.calls_failed >= HOPELESS_CALLS or at.deaths >= HOPELESS_DEATHS)

    def backlog_s(self, stage: int) -> float | None:
        """Return the seconds of one replica's work that wait for a stage, None before it has answered a row.

        Rows at replicas count as half done.
        """
        at = self._stages[stage]
        n_done = at.accepted + at.deferred
        return (at.n_waiting + at.in_flight / 2) * at.busy_s / n_done if n_done else None

    def waiting(self, stage: int) -> bool:
        """Say whether any row waits for a stage or is at one of its replicas."""
        at = self._stages[stage]
        return bool(at.queue or at.retries or at.in_flight)

    @property
    def starved(self) -> bool:
        """Say whether a replica of the first stage could take a batch and there is no row for it."""
        return not self._stages[0].queue and self._free_replica(0) is not None

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
                busy_s=at.busy_s,
                cost=at.cost,
            )
            for name, at, (live, starting) in zip(names, self._stages, replicas, strict=True)
        )

    # Sending

    def _held_back(self, stage: int) -> bool:
        """Say whether the queue after a stage is full."""
        return stage + 1 < len(self._stages) and not self._stages[stage + 1].has_room

    def _next_retry(self, stage: int, now: float) -> Call | None:
        at = self._stages[stage]
        for place, retry in enumerate(at.retries):
            if retry.due > now:
                continue
            replica = self._empty_replica(stage) if retry.alone else self._free_replica(stage)
            if replica is not None:
                del at.retries[place]
                return self._send(stage, replica, retry, now)
        return None

    def _next_batch(self, stage: int, now: float) -> Call | None:
        replica = self._free_replica(stage)
        if replica is None:
            return None
        n = self._batch_rows(stage, now)
        return self._send(stage, replica, _Retry(now, self._pop(stage, n), attempt=1), now) if n else None

    def _batch_rows(self, stage: int, now: float) -> int:
        """Return how many rows a batch takes now, 0 if it is better to wait."""
        at = self._stages[stage]
        full = at.limits.batch_size
        if not at.queue:
            return 0
        if not self._more_can_come(stage):
            # The last rows are shared out, so that no replica has a full batch while others idle.
            n_open = sum(replica.open for replica in at.replicas.values())
            share = -(-at.queued_rows // max(1, n_open))
            return min(full, max(share, full // 4, 1))
        if at.queued_rows >= full:
            return full
        waited = now - at.queue[0].ready_at >= at.limits.batch_wait_s
        return full if waited or not at.has_room else 0

    def _more_can_come(self, stage: int) -> bool:
        """Say whether input or an earlier stage may still add rows to a stage's queue."""
        if self._n_reads or self.wants_block() or any(block.to_restart for block in self._blocks.values()):
            return True
        return any(at.queue or at.retries or at.in_flight for at in self._stages[:stage])

    def _free_replica(self, stage: int) -> int | None:
        """Return the replica with the fewest calls that may take another."""
        at = self._stages[stage]
        free, fewest = None, CALLS_PER_REPLICA
        for number, replica in at.replicas.items():
            if len(replica.calls) < fewest and replica.open and not replica.alone and number != at.reserved:
                free, fewest = number, len(replica.calls)
        return free

    def _empty_replica(self, stage: int) -> int | None:
        """Return a replica without calls; while there is none, keep one from taking more."""
        at = self._stages[stage]
        if at.reserved is None:
            own = [(len(r.calls), number) for number, r in at.replicas.items() if r.open and not r.alone]
            if not own:
                return None
            at.reserved = min(own)[1]
        return at.reserved if not at.replicas[at.reserved].calls else None

    def _send(self, stage: int, replica: int, batch: _Retry, now: float) -> Call:
        at, where = self._stages[stage], self._replicas[replica]
        call = Call(
            id=self._n_calls,
            stage=stage,
            replica=replica,
            rows=batch.rows,
            output=self._new_parcel(),
            attempt=batch.attempt,
            alone=batch.alone,
            strikes=batch.strikes,
        )
        self._n_calls += 1
        self._calls[call.id] = call
        at.in_flight += len(call)
        if not where.calls:
            where.busy_since = now
        where.calls.append(call.id)
        where.alone = batch.alone
        if at.reserved == replica:
            at.reserved = None
        return call

    def _take_back(self, call_id: int, now: float) -> Call:
        call = self._calls.pop(call_id)
        self._stages[call.stage].in_flight -= len(call)
        replica = self._replicas.get(call.replica)
        if replica is not None:
            replica.calls.remove(call_id)
            replica.busy_since = now
            replica.alone = False
        return call

    # What becomes of rows

    def _call_lost(self, call: Call, reason: str, now: float, *, to_blame: bool) -> Released:
        at = self._stages[call.stage]
        at.deaths += to_blame
        if call.alone:
            return self._failed(call, reason, now)
        at.retries.append(_Retry(now, call.rows, call.attempt + 1, alone=to_blame))
        return self._degraded(call.stage) if at.down else Released()

    def _failed(self, call: Call, reason: str, now: float) -> Released:
        at = self._stages[call.stage]
        if len(call) > 1:
            at.retries += [_Retry(now, half, call.attempt + 1, call.alone) for half in _halves(call.rows)]
        elif call.strikes + 1 < TRIES:
            pause_s = PAUSE_S * 2**call.strikes
            at.retries.append(_Retry(now + pause_s, call.rows, call.attempt + 1, call.alone, call.strikes + 1))
        else:
            (rows,) = call.rows
            at.failed += 1
            self._blocks[rows.block].result.failures[int(rows.indices[0])] = (call.stage, reason)
            return Released(tuple(self._rows_done(rows.block, 1)), self._spend(call.rows))
        return self._degraded(call.stage) if at.down else Released()

    def _send_on(self, stage: int, rows: Iterable[Rows]) -> Released:
        for part in rows:
            self._push(stage, part)
        return self._degraded(stage) if self._stages[stage].down else Released()

    def _degraded(self, stage: int) -> Released:
        """Give all rows that wait for a stage the answer of the one before it."""
        at = self._stages[stage]
        waiting = [*self._pop(stage, at.queued_rows), *(rows for retry in at.retries for rows in retry.rows)]
        at.retries = []
        finished: list[BlockResult] = []
        for rows in waiting:
            result = self._blocks[rows.block].result
            result.stages[rows.indices] = stage - 1
            result.degraded[rows.indices] = True
            at.degraded += len(rows)
            finished += self._rows_done(rows.block, len(rows))
        return Released(tuple(finished), self._spend(waiting))

    def _push(self, stage: int, rows: Rows) -> None:
        at = self._stages[stage]
        at.queue.append(rows)
        at.queued_rows += len(rows)
        at.queued_bytes += len(rows) * self._parcels[rows.parcel].row_bytes

    def _pop(self, stage: int, n: int) -> tuple[Rows, ...]:
        at, taken = self._stages[stage], []
        while n and at.queue:
            rows = at.queue.popleft()
            if len(rows) > n:
                rows, rest = rows.cut(n)
                at.queue.appendleft(rest)
            taken.append(rows)
            n -= len(rows)
            at.queued_rows -= len(rows)
            at.queued_bytes -= len(rows) * self._parcels[rows.parcel].row_bytes
        return tuple(taken)

    def _spend(self, used: Iterable[Rows]) -> tuple[int, ...]:
        """Count rows off the objects that hold them. Returns those that hold no row any more."""
        spent = []
        for rows in used:
            parcel = self._parcels[rows.parcel]
            parcel.n_left -= len(rows)
            if not parcel.n_left:
                del self._parcels[rows.parcel]
                spent.append(rows.parcel)
        return tuple(spent)

    def _rows_done(self, block: int, n: int) -> list[BlockResult]:
        open_block = self._blocks[block]
        open_block.n_left -= n
        self._open_rows -= n
        if open_block.n_left:
            return []
        del self._blocks[block]
        return [open_block.result]

    def _new_parcel(self) -> int:
        self._n_parcels += 1
        return self._n_parcels


def _halves(rows: tuple[Rows, ...]) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """Cut a batch's rows into two batches of equal size, or one row more in the second."""
    n_first = sum(len(r) for r in rows) // 2
    first: list[Rows] = []
    for place, part in enumerate(rows):
        if len(part) > n_first:
            head, tail = part.cut(n_first)
            return (*first, *([head] if n_first else [])), (tail, *rows[place + 1 :])
        first.append(part)
        n_first -= len(part)
        if not n_first:
            return tuple(first), rows[place + 1 :]
    raise AssertionError("a batch of one row has no halves")
