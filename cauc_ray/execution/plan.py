"""All that one controller's run needs to know, as it is sent to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cauc_ray.cascade.allowance import Allowance
from cauc_ray.cascade.stage import StageLimits, fed_rows, queue_rows
from cauc_ray.data.blocks import BlockSource, Seen
from cauc_ray.execution.commits import FailedBlock, Sink
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy

# What may wait before the first stage, and be read at the same time: so many blocks, at least, where bytes allow.
QUEUE_BLOCKS = 8
# Rows that have no answer yet, in blocks: what a run that is ended has to do again, at most.
OPEN_BLOCKS = 32
# Of the object store, the share that waiting rows may fill; and bytes, where the store is large.
STORE_SHARE = 0.2
QUEUE_BYTES = 512 * 1024 * 1024
# Batches that a call may have where they take next to no time. A collection has one: its answers are kept call by call.
BATCHES_PER_CALL = 8
# A block comes in so many objects at most.
MOST_CHUNKS = 64


@dataclass(frozen=True, slots=True)
class RunPlan:
    """The chain's stages, what decides, where rows come from and go to.

    Attributes:
        run_id: The run.
        stages: The chain's stages.
        policy: None lets every row stop at the only stage and keeps the model's own answers.
        source: Where rows come from.
        sink: Where results go.
        n_rows: Rows of the whole input, None if unknown.
        n_done: Of those, rows that earlier attempts have committed.
        block_rows: The most rows of a block of input.
        done: Blocks that are committed.
        again: Those of which failed rows are done again.
        degrade: Answer without a stage that is down.
        allowance: The limits of deferral and of money, None without any.
    """

    run_id: str
    stages: tuple[StageSpec, ...]
    policy: Policy | None
    source: BlockSource
    sink: Sink
    n_rows: int | None
    n_done: int
    block_rows: int
    done: Seen
    again: Mapping[int, FailedBlock] = field(default_factory=dict)
    degrade: bool = False
    allowance: Allowance | None = None

    @property
    def chunk_rows(self) -> int:
        """Return the rows of a chunk: whole batches of the first stage, as few as the most chunks allow."""
        batch = min(self.stages[0].batch_size, self.block_rows)
        return batch * -(-self.block_rows // (MOST_CHUNKS * batch))

    @property
    def n_chunks(self) -> int:
        """Return the chunks of a full block."""
        return -(-self.block_rows // self.chunk_rows)

    def limits(self, store_bytes: float) -> tuple[tuple[StageLimits, ...], int]:
        """Return the stages' limits, and the open rows, for an object store of so many bytes."""
        n_bytes = min(QUEUE_BYTES, STORE_SHARE * store_bytes) / len(self.stages)
        limits = []
        for index, stage in enumerate(self.stages):
            # A stage's batches come from those of the stage before, the first one's from blocks.
            fed_by = fed_rows(self.stages[index - 1].batch_size) if index else QUEUE_BLOCKS * self.block_rows
            rows = queue_rows(stage.batch_size, stage.replicas.max, fed_by)
            per_call = 1 if self.policy is None else BATCHES_PER_CALL
            limits.append(StageLimits(stage.batch_size, stage.batch_wait_s, rows, n_bytes, per_call))
        return tuple(limits), max(OPEN_BLOCKS * self.block_rows, 2 * sum(at.queue_rows for at in limits))
