"""The tasks on Ray that read a run's input: what each reads, and what is done when one dies or hangs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import ray
from ray.exceptions import RayError

from cauc_ray.cascade.bundles import Bundle, packed
from cauc_ray.data.blocks import BlockSource, InputBlock, Seen, ids_digest, other_rows
from cauc_ray.errors import CaucError, ExecutionError
from cauc_ray.execution.actors import explained, kind_of
from cauc_ray.execution.cluster import live_nodes
from cauc_ray.execution.commits import FailedBlock
from cauc_ray.execution.plan import RunPlan
from cauc_ray.numbers.types import Ints

# The pauses before each further try at a block that cannot be read: damage does not heal, but a file that cannot be
# opened may be there again when its storage is. Of those, every block that stays away halves the patience.
PAUSES_S = (0.2, 0.4)
LONG_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
# The most tasks that read on a node; their number is doubled once the first stage has waited for rows for STARVED_S.
MOST_TASKS = 8
STARVED_S = 0.3
# So often in a row may tasks die or hang at the same block before the run ends.
DEATHS = 4


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What is needed of a block in addition to the columns that models read.

    Attributes:
        group: The group that it is of.
        number: Its number in the input.
        example_ids: Of all rows, string (n,).
        labels: As InputBlock's.
        chunks: Rows and bytes of each chunk; together they hold the rows that could be read.
        digest: Of the ids, "" where some row could not be read.
        unreadable: As InputBlock's.
        may_return: As InputBlock's.
        split: As InputBlock's.
        inputs: As InputBlock's.
    """

    group: int
    number: int
    example_ids: pa.Array
    labels: Ints | None
    chunks: tuple[tuple[int, float], ...]
    digest: str
    unreadable: Mapping[int, str]
    may_return: bool
    split: str
    inputs: pa.Array | None


@dataclass(frozen=True, slots=True)
class Work:
    """What is read of an input: its blocks but those that are done, and rows that failed of some that are."""

    source: BlockSource
    done: Seen
    again: Mapping[int, FailedBlock]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a task reads of a group.

    Attributes:
        group: The group.
        seen: Blocks that have come already.
        only: The blocks that are read again, None for all that have not come.
        n_deaths: Tasks in a row that died or hung over it before any block came.
    """

    group: int
    seen: Seen
    only: frozenset[int] | None = None
    n_deaths: int = 0


def read_blocks(work: Work, piece: Piece, n_away: int, chunk_rows: int) -> Iterator[Any]:
    """Yield, for each block: its header, its rows in chunks, and None for its end.

    Args:
        work: What is read of the input.
        piece: What of that this task reads.
        n_away: Blocks that could not be opened so far.
        chunk_rows: The most rows of a chunk.
    """
    for number, block, digest in _settled(work, piece, n_away):
        n = len(block.example_ids) - len(block.unreadable)
        starts = range(0, n, chunk_rows)
        rows = [min(chunk_rows, n - start) for start in starts]
        yield BlockHeader(
            group=piece.group,
            number=number,
            example_ids=pa.array(block.example_ids, pa.string()),
            labels=block.labels,
            chunks=tuple((n_rows, block.n_bytes * n_rows / n) for n_rows in rows),
            digest=digest,
            unreadable=block.unreadable,
            may_return=block.may_return,
            split=block.split,
            inputs=block.inputs,
        )
        for start in starts:  # Ray cannot take "yield from"
            yield Bundle(packed({name: c[start : start + chunk_rows] for name, c in block.columns.items()}))
        yield None


def _settled(work: Work, piece: Piece, n_away: int) -> Iterator[tuple[int, InputBlock, str]]:
    """Yield a piece's blocks and the digests of all their ids, once they could be read or are given up.

    Raises DataError where a block that was read before holds other rows than then.
    """
    source, again = work.source, work.again
    seen = {number: digest for number, digest in work.done.items() if number not in again} | dict(piece.seen)
    first = {**work.done, **seen}
    n_tries = 0
    blocks = source.blocks(piece.group, seen)
    while (numbered := next(blocks, None)) is not None:
        number, block = numbered
        digest = "" if block.unreadable else ids_digest(block.example_ids)
        if digest and first.get(number) and digest != first[number]:
            raise other_rows(source.name, f"its block {number} has other rows")
        if number in seen or (piece.only is not None and number not in piece.only):
            continue
        pauses = LONG_PAUSES_S[: max(2, len(LONG_PAUSES_S) - n_away)] if block.may_return else PAUSES_S
        if block.unreadable and n_tries < len(pauses):
            time.sleep(pauses[n_tries])
            n_tries += 1
            blocks = source.blocks(piece.group, seen)
            continue
        n_away, n_tries = n_away + block.may_return, 0
        seen[number] = digest
        failed = again.get(number)
        if failed is None:
            yield number, block, digest
        else:
            yield number, block.select(np.isin(np.arange(len(block.example_ids)), failed.rows)), digest
        if piece.only is not None and piece.only <= seen.keys():
            return


@dataclass(frozen=True, slots=True)
class ReadBlock:
    """A block as it came.   chunks: references.   again: whether it was read for rows that were lost."""

    header: BlockHeader
    chunks: list[Any]
    again: bool


@dataclass(slots=True)
class _Task:
    """A task that reads.

    Attributes:
        piece: What it reads.
        asked_at: When a block was asked for that has not come, or when something of it came last; None where none was.
        header: Of a block that is coming.
        chunks: Of a block that is coming.
        came: The numbers of the blocks that have come.
    """

    piece: Piece
    asked_at: float | None
    header: BlockHeader | None = None
    chunks: list[Any] = field(default_factory=list)
    came: set[int] = field(default_factory=set)


class Reading:
    """The tasks that read a run's input, what is left to read, and what is read again.

    A task goes on by itself until a block of its own waits to be taken, and is waited for once that is asked for.
    """

    def __init__(self, plan: RunPlan, node_label: dict[str, str]) -> None:
        """Take what is to be read, and the label of the node whose files are read where others may not have them."""
        self._plan, self._work = plan, ray.put(Work(plan.source, plan.done, plan.again))
        anywhere = plan.source.anywhere
        place = {"scheduling_strategy": "SPREAD"} if anywhere else {"label_selector": node_label}
        # Deaths are counted here: Ray would restart a group without knowing which blocks have been taken.
        self._remote = ray.remote(
            num_cpus=0,
            max_retries=0,
            num_returns="streaming",
            _generator_backpressure_num_objects=plan.n_chunks + 2,  # those of one block
            **place,
        )(read_blocks)
        self._n_begun, self._most = 0, 1
        self._n_came = 0  # blocks, since there may be as many tasks
        self._limit = MOST_TASKS * (len(live_nodes()) if anywhere else 1)
        self._tasks: dict[Any, _Task] = {}  # by their streams
        self._again: list[Piece] = []
        # By group, while it is read or blocks of it are open: the blocks that have come, with their digests.
        self._read: dict[int, dict[int, str]] = {}
        self._n_open: Counter[int] = Counter()
        self._ended: set[int] = set()
        self._n_away = 0
        self._starved_since: float | None = None

    @property
    def n_asked(self) -> int:
        """Return how many blocks were asked for that have not come."""
        return sum(task.asked_at is not None for task in self._tasks.values())

    @property
    def streams(self) -> list[Any]:
        """Return what to wait for: where a block that was asked for has yet to begin to come."""
        return [s for s, task in self._tasks.items() if task.asked_at is not None and task.header is None]

    @property
    def coming(self) -> list[Any]:
        """Return what to look at soon: where the rest of a block is about to come. To wait for it would fetch it."""
        return [stream for stream, task in self._tasks.items() if task.header is not None]

    @property
    def exhausted(self) -> bool:
        """Return whether no new block will come."""
        pieces = [*self._again, *(task.piece for task in self._tasks.values())]
        return self._n_begun == self._plan.source.n_groups and all(piece.only is not None for piece in pieces)

    @property
    def owes(self) -> bool:
        """Return whether something must be read again and is not being read."""
        return bool(self._again)

    @property
    def owes_now(self) -> bool:
        """Return whether some of that can be read now."""
        return self._next_again() is not None

    def _next_again(self) -> Piece | None:
        """Return what is read again next; nothing of a group that is being read again: the rest is read at once."""
        in_work = {task.piece.group for task in self._tasks.values() if task.piece.only is not None}
        return next((piece for piece in self._again if piece.only is None or piece.group not in in_work), None)

    def reads(self, stream: Any) -> bool:
        """Return whether an awaited reference is one of its streams."""
        return stream in self._tasks

    def ask_again(self, block: BlockHeader) -> None:
        """Note that a block must be read once more, with others of its group that wait to be."""
        waiting = next((piece for piece in self._again if piece.group == block.group and piece.only is not None), None)
        only, n_deaths = frozenset({block.number}), 0
        if waiting is not None and waiting.only is not None:
            self._again.remove(waiting)
            only, n_deaths = only | waiting.only, waiting.n_deaths
        seen = {number: digest for number, digest in self._read[block.group].items() if number not in only}
        self._again.append(Piece(block.group, seen, only, n_deaths))

    def forget(self, block: BlockHeader) -> None:
        """Note that a block is done."""
        self._n_open[block.group] -= 1
        self._drop(block.group)

    def _drop(self, group: int) -> None:
        """Forget a group that is done, to keep memory bounded."""
        if group in self._ended and not self._n_open[group]:
            self._ended.remove(group)
            self._read.pop(group, None)
            del self._n_open[group]

    def ask(self, now: float) -> bool:
        """Ask for a block more. Returns whether there may be one."""
        waiting = next((task for task in self._tasks.values() if task.asked_at is None), None)
        if (again := self._next_again()) is not None:
            self._again.remove(again)
            self._start(again, now)
        elif waiting is not None:
            waiting.asked_at = now
        elif len(self._tasks) < self._most and self._n_begun < self._plan.source.n_groups:
            self._start(Piece(self._n_begun, {}), now)
            self._n_begun += 1
        else:
            return False
        return True

    def take(self, stream: Any, now: float) -> ReadBlock | None:
        """Take what has come; None where that is not a whole block yet, or where the task has no other.

        Raises RayError as failed() takes it; DataError where what is read again holds other rows than at first.
        """
        task = self._tasks[stream]
        # What is ready may be the end of the stream, which is found only when it is taken.
        while stream.next_ready() and (ref := next(stream, None)) is not None:
            task.asked_at = now
            if task.header is None:
                task.header = ray.get(ref)
            elif len(task.chunks) < len(task.header.chunks):
                task.chunks.append(ref)
            else:
                ray.get(ref)  # so that what came last is not an error
                block = self._whole(task, task.header)
                if task.piece.only is not None and task.piece.only <= task.came:
                    del self._tasks[stream]
                return block
        if stream.is_finished():
            if task.chunks:
                ray.get(task.chunks[-1])  # in place of which came what the task died of
            ray.get(stream.completed())  # where its node is gone, a stream may end without its task's error
            del self._tasks[stream]
            if task.piece.only is not None:
                missing = min(task.piece.only - task.came)
                raise other_rows(self._plan.source.name, f"its block {missing} is no longer there")
            self._ended.add(task.piece.group)
            self._drop(task.piece.group)
        return None

    def failed(self, stream: Any, error: RayError) -> None:
        """Have read again what was not.

        Raises:
            CaucError: What the source raised.
            ExecutionError: Task after task dies over a block.
        """
        fault, kind = explained(error, "a task that reads the input"), kind_of(error)
        if kind == "raised":
            raise fault from error
        self._lost(stream, fault, died=kind != "full")

    def watch(self, now: float, *, starved: bool) -> None:
        """Give up tasks that hang, and have another read where the first stage is starved for rows."""
        limit_s = self._plan.source.deadline_s
        for stream, task in list(self._tasks.items()):
            if limit_s is not None and task.asked_at is not None and now - task.asked_at > limit_s:
                ray.cancel(stream, force=True)
                self._lost(stream, ExecutionError(f"a task that reads it has not answered for {limit_s:.0f} s"))
        # Those that are still being started cannot help yet: each has to give a block before others are added.
        self._starved_since = (self._starved_since or now) if starved and self._n_came >= self._most else None
        if self._starved_since is not None and now - self._starved_since > STARVED_S:
            self._most, self._n_came, self._starved_since = min(2 * self._most, self._limit), 0, None

    def _start(self, piece: Piece, now: float) -> None:
        stream = self._remote.remote(self._work, piece, self._n_away, self._plan.chunk_rows)
        self._tasks[stream] = _Task(piece, now)

    def _whole(self, task: _Task, header: BlockHeader) -> ReadBlock:
        digests = self._read.setdefault(header.group, {})
        if header.digest and digests.get(header.number, header.digest) != header.digest:
            raise other_rows(self._plan.source.name, f"its block {header.number} has other rows")
        digests[header.number] = header.digest
        self._n_open[header.group] += task.piece.only is None
        chunks, task.chunks = task.chunks, []
        task.header = None
        task.came.add(header.number)
        self._n_came += 1
        if task.piece.only is None:  # what is read again is owed until all of it has come
            task.asked_at = None
        self._n_away += header.may_return
        return ReadBlock(header, chunks, task.piece.only is not None)

    def _lost(self, stream: Any, fault: CaucError, *, died: bool = True) -> None:
        # A node takes all its tasks with it: that is one death for each piece, however many pieces there were.
        task = self._tasks.pop(stream)
        piece = task.piece
        n_deaths = died + (0 if task.came else piece.n_deaths)
        if n_deaths >= DEATHS:
            raise ExecutionError(f"the input cannot be read: {fault}")
        only = None if piece.only is None else piece.only - task.came
        seen = dict(self._read.get(piece.group, {})) if only is None else piece.seen
        self._again.append(Piece(piece.group, seen, only, n_deaths))
