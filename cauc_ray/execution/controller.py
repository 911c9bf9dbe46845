"""The controller's logic: queues, gathering, credits and finished blocks, without Ray.

It is fed events (a block was read, a call ended) and asked for the next call. Rows wait in a queue for each
stage; those that stages defer are gathered across calls and blocks into full batches. A partial batch goes
out when nothing upstream can add to it, or after the stage's time limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cauc_ray.execution.messages import Call, CallResult, Rows
from cauc_ray.numbers.types import Floats, Ints

# One call computes and one waits in each replica, so that none idles between two of them.
CALLS_PER_REPLICA = 2

# So many rows that fail each by itself, with no call that succeeds, show that a stage cannot work at all.
HOPELESS_ROWS = 16


@dataclass(frozen=True, slots=True)
class StageLimits:
    """How a stage takes its rows: rows in a full batch, seconds that a row waits for one, replicas."""

    batch_size: int
    batch_wait_s: float
    n_replicas: int


@dataclass(frozen=True, slots=True)
class InputLimits:
    """How much of the input may be open at once: rows, and bytes of payload."""

    rows: int
    n_bytes: int


@dataclass(slots=True)
class BlockResult:
    """What became of a block's n rows; all arrays (n,).

    predictions: int32.   confidences, costs: float64.   stages: int8, -1 for rows that failed.
    failures: the stage and the reason, by place in the block.
    """

    block: int
    predictions: Ints
    confidences: Floats
    stages: Ints
    costs: Floats
    failures: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Released:
    """What nobody needs any more after an event: blocks that are finished, states that were used up."""

    blocks: tuple[BlockResult, ...] = ()
    states: tuple[int, ...] = ()


@dataclass(slots=True)
class _OpenBlock:
    result: BlockResult
    n_bytes: int
    n_left: int


@dataclass(slots=True)
class _Stage:
    limits: StageLimits
    credits: list[int]
    queue: deque[Rows] = field(default_factory=deque)
    n_queued: int = 0
    n_in_flight: int = 0
    n_reached: int = 0
    n_answered: int = 0
    n_failed: int = 0
    n_calls_done: int = 0

    def push(self, rows: Rows) -> None:
        self.queue.append(rows)
        self.n_queued += len(rows)

    def pop(self, n: int) -> tuple[Rows, ...]:
        taken: list[Rows] = []
        while n and self.queue:
            rows = self.queue.popleft()
            if len(rows) > n:
                rows, rest = rows.cut(n)
                self.queue.appendleft(rest)
            taken.append(rows)
            n -= len(rows)
            self.n_queued -= len(rows)
        return tuple(taken)


@dataclass(frozen=True, slots=True)
class StageProgress:
    """Rows at a stage: waiting, being computed, ever arrived, answered for good, failed for good."""

    queued: int
    in_flight: int
    reached: int
    answered: int
    failed: int


class Controller:
    """All that is known of a run in progress. Times are seconds since the epoch and come from outside."""

    def __init__(self, stages: Sequence[StageLimits], limits: InputLimits) -> None:
        self._stages = [_Stage(s, [CALLS_PER_REPLICA] * s.n_replicas) for s in stages]
        self._limits = limits
        self._blocks: dict[int, _OpenBlock] = {}
        self._calls: dict[int, Call] = {}
        self._retries: deque[tuple[int, tuple[Rows, ...], int]] = deque()
        self._state_rows_left: dict[int, int] = {}
        self._n_calls = 0
        self._open_rows = 0
        self._open_bytes = 0
        self._input_ended = False

    def add_block(self, block: int, n_rows: int, n_bytes: int, now: float) -> None:
        """Queue a block's rows for the first stage."""
        result = BlockResult(
            block=block,
            predictions=np.full(n_rows, -1, dtype=np.int32),
            confidences=np.full(n_rows, np.nan),
            stages=np.full(n_rows, -1, dtype=np.int8),
            costs=np.zeros(n_rows),
        )
        self._blocks[block] = _OpenBlock(result, n_bytes, n_rows)
        self._open_rows += n_rows
        self._open_bytes += n_bytes
        self._queue(0, Rows(block, np.arange(n_rows), None, np.empty(0, dtype=np.intp), now))

    def end_input(self) -> None:
        """Note that no block will follow."""
        self._input_ended = True

    def wants_block(self) -> bool:
        """Say whether another block may be read: the open ones leave room, or there are none."""
        if self._input_ended:
            return False
        room = self._open_rows < self._limits.rows and self._open_bytes < self._limits.n_bytes
        return room or not self._blocks

    @property
    def finished(self) -> bool:
        """Say whether every row of the input has its answer or its failure."""
        return self._input_ended and not self._blocks

    def next_call(self, now: float) -> Call | None:
        """Return a batch that can go to a replica now, the deepest stage's first, or None."""
        if self._retries:
            stage, rows, attempt = self._retries[0]
            if self._free_replica(stage) is not None:
                self._retries.popleft()
                return self._send(stage, rows, attempt)
        for stage in range(len(self._stages) - 1, -1, -1):
            if self._free_replica(stage) is not None and self._batch_ready(stage, now):
                at = self._stages[stage]
                return self._send(stage, at.pop(at.limits.batch_size), attempt=1)
        return None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a partial batch will have waited long enough, None if none waits."""
        due = [
            at.queue[0].ready_at + at.limits.batch_wait_s - now
            for stage, at in enumerate(self._stages)
            if at.queue and self._free_replica(stage) is not None
        ]
        return max(0.0, min(due)) if due else None

    def call_ended(self, call_id: int, result: CallResult, now: float) -> Released:
        """Take a call's result: note the answers, queue what is deferred for the next stage.

        A failed call of several rows is cut in two and tried again, until the guilty rows are alone.
        """
        call = self._take_back(call_id)
        if result.error is not None:
            return self._call_failed(call, result.error)
        spent = self._spend_states(call)
        at, finished = self._stages[call.stage], []
        at.n_calls_done += 1
        start, n_deferred = 0, 0
        for rows in call.rows:
            end = start + len(rows)
            answers = self._blocks[rows.block].result
            answers.costs[rows.indices] += result.costs[start:end]
            failed = np.zeros(len(rows), dtype=bool)
            for place in range(start, end) if result.failures else ():
                if place in result.failures:
                    failed[place - start] = True
                    answers.failures[int(rows.indices[place - start])] = (call.stage, result.failures[place])
            accepted = result.accepted[start:end]
            done = rows.indices[accepted]
            answers.predictions[done] = result.predictions[start:end][accepted]
            answers.confidences[done] = result.confidences[start:end][accepted]
            answers.stages[done] = call.stage
            on = rows.indices[~(accepted | failed)]
            at.n_answered += len(done)
            at.n_failed += len(rows) - len(done) - len(on)
            if len(on):
                places = np.arange(n_deferred, n_deferred + len(on))
                self._queue(call.stage + 1, Rows(rows.block, on, call.id, places, now))
                n_deferred += len(on)
            finished += self._rows_done(rows.block, len(rows) - len(on))
            start = end
        if n_deferred:
            self._state_rows_left[call.id] = n_deferred
        return Released(tuple(finished), spent)

    def hopeless(self, stage: int) -> bool:
        """Say whether a stage has failed on many rows and never succeeded: its model is at fault, not they."""
        at = self._stages[stage]
        return at.n_failed >= HOPELESS_ROWS and not at.n_calls_done

    def progress(self) -> tuple[StageProgress, ...]:
        """Return where the rows are."""
        return tuple(
            StageProgress(s.n_queued, s.n_in_flight, s.n_reached, s.n_answered, s.n_failed) for s in self._stages
        )

    def _queue(self, stage: int, rows: Rows) -> None:
        self._stages[stage].push(rows)
        self._stages[stage].n_reached += len(rows)

    def _free_replica(self, stage: int) -> int | None:
        credits = self._stages[stage].credits
        replica = max(range(len(credits)), key=credits.__getitem__)
        return replica if credits[replica] else None

    def _batch_ready(self, stage: int, now: float) -> bool:
        at = self._stages[stage]
        if at.n_queued >= at.limits.batch_size:
            return True
        if not at.queue:
            return False
        return now - at.queue[0].ready_at >= at.limits.batch_wait_s or not self._more_can_come(stage)

    def _more_can_come(self, stage: int) -> bool:
        """Say whether input or an earlier stage may still add rows to a stage's queue."""
        earlier = self._stages[:stage]
        return self.wants_block() or bool(self._retries) or any(s.n_queued or s.n_in_flight for s in earlier)

    def _send(self, stage: int, rows: tuple[Rows, ...], attempt: int) -> Call:
        replica = self._free_replica(stage)
        assert replica is not None
        call = Call(self._n_calls, stage, replica, rows, attempt)
        self._n_calls += 1
        self._calls[call.id] = call
        self._stages[stage].credits[replica] -= 1
        self._stages[stage].n_in_flight += len(call)
        return call

    def _take_back(self, call_id: int) -> Call:
        call = self._calls.pop(call_id)
        self._stages[call.stage].credits[call.replica] += 1
        self._stages[call.stage].n_in_flight -= len(call)
        return call

    def _call_failed(self, call: Call, reason: str) -> Released:
        if len(call) > 1:
            for half in _halves(call.rows):
                self._retries.append((call.stage, half, call.attempt + 1))
            return Released()
        (rows,) = call.rows
        self._stages[call.stage].n_failed += 1
        self._blocks[rows.block].result.failures[int(rows.indices[0])] = (call.stage, reason)
        return Released(tuple(self._rows_done(rows.block, 1)), self._spend_states(call))

    def _spend_states(self, call: Call) -> tuple[int, ...]:
        spent = []
        for rows in call.rows:
            if rows.state is None:
                continue
            self._state_rows_left[rows.state] -= len(rows)
            if not self._state_rows_left[rows.state]:
                del self._state_rows_left[rows.state]
                spent.append(rows.state)
        return tuple(spent)

    def _rows_done(self, block: int, n: int) -> list[BlockResult]:
        open_block = self._blocks[block]
        open_block.n_left -= n
        self._open_rows -= n
        if open_block.n_left:
            return []
        del self._blocks[block]
        self._open_bytes -= open_block.n_bytes
        return [open_block.result]


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
