"""The blocks of input that are not done, and what has become of their rows so far."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from cauc_ray.cascade.results import CallResult
from cauc_ray.execution.messages import Call, Rows
from cauc_ray.numbers.types import Bools, Floats, Ints

# A row whose objects are lost with their nodes is started over so often.
RESTARTS = 5


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

    def fail(self, rows: Ints, stage: int, reason: str) -> None:
        """Note why rows have no answer."""
        self.failures.update(dict.fromkeys(rows.tolist(), (stage, reason)))


@dataclass(slots=True)
class _OpenBlock:
    """A block with rows that are not done.   restarts: how often each row began anew, None before the first time."""

    result: BlockResult
    n_left: int
    restarts: Ints | None = None
    to_restart: list[Ints] = field(default_factory=list)


class OpenBlocks:
    """The open blocks by number; each is given away once its last row is done."""

    def __init__(self) -> None:
        self._blocks: dict[int, _OpenBlock] = {}
        self.n_rows = 0

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, block: int, n_rows: int) -> None:
        """Open a block."""
        self._blocks[block] = _OpenBlock(BlockResult.empty(block, n_rows), n_rows)
        self.n_rows += n_rows

    def note_answers(self, call: Call, result: CallResult) -> list[Ints]:
        """Note what a stage answered to a call. Returns, for each of the call's parts, the rows that go on.

        What deferred rows have so far is kept too: it is their answer if the next stage is down. Nothing is noted of
        rows without an answer, which may be tried again.
        """
        goes_on, start = [], 0
        for rows in call.rows:
            part = slice(start, start + len(rows))
            start += len(rows)
            known = self._blocks[rows.block].result
            answered = np.full(len(rows), True)
            if result.failures:
                answered[:] = [place not in result.failures for place in range(part.start, part.stop)]
            known.costs[rows.indices[answered]] += result.costs[part][answered]
            accepted = result.accepted[part]
            known.predictions[rows.indices[answered]] = result.predictions[part][answered]
            known.confidences[rows.indices[answered]] = result.confidences[part][answered]
            known.stages[rows.indices[accepted]] = call.stage
            goes_on.append(rows.indices[answered & ~accepted])
        return goes_on

    def fail(self, rows: Rows, stage: int, reason: str) -> list[BlockResult]:
        """Note why rows have no answer. Returns their block if it is done."""
        self._blocks[rows.block].result.fail(rows.indices, stage, reason)
        return self.done(rows.block, len(rows))

    def degrade(self, rows: Rows, stage: int) -> list[BlockResult]:
        """Let rows that wait for a stage have the answer of the one before. Returns their block if it is done."""
        result = self._blocks[rows.block].result
        result.stages[rows.indices] = stage - 1
        result.degraded[rows.indices] = True
        return self.done(rows.block, len(rows))

    def done(self, block: int, n: int) -> list[BlockResult]:
        """Count rows off a block. Returns it if those were its last ones."""
        open_block = self._blocks[block]
        open_block.n_left -= n
        self.n_rows -= n
        if open_block.n_left:
            return []
        del self._blocks[block]
        return [open_block.result]

    def lose(self, rows: Rows) -> Ints:
        """Have rows begin anew, as if never seen. Returns those that have done so too often already."""
        open_block = self._blocks[rows.block]
        if open_block.restarts is None:
            open_block.restarts = np.zeros(len(open_block.result.stages), dtype=np.int8)
        too_often = open_block.restarts[rows.indices] >= RESTARTS
        again = rows.indices[~too_often]
        if len(again):
            open_block.restarts[again] += 1
            open_block.result.costs[again] = 0.0
            open_block.to_restart.append(again)
        return rows.indices[too_often]

    def to_restart(self) -> int | None:
        """Return a block with rows that begin anew, None if there is none."""
        return next((block for block, open_block in self._blocks.items() if open_block.to_restart), None)

    def take_restarts(self, block: int) -> Ints:
        """Return a block's rows that begin anew, and forget that they are to."""
        open_block = self._blocks[block]
        rows = np.concatenate(open_block.to_restart)
        open_block.to_restart = []
        return rows

    def n_rows_of(self, block: int) -> int:
        """Return a block's rows, done or not."""
        return len(self._blocks[block].result.stages)


def chosen_of_chunks(sizes: Sequence[int], wanted: Bools) -> list[Ints]:
    """Return the places in each chunk of a block that are wanted.   wanted: bool (n,), over the whole block."""
    ends = np.cumsum([0, *sizes])
    return [np.flatnonzero(wanted[start:end]) for start, end in pairwise(ends)]
