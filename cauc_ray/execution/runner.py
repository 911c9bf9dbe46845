"""Runs of a policy's cascade over an input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from cauc_ray.data.inputs import RunInput
from cauc_ray.execution.ledger import RunRecord, RunTables, committed_blocks, next_replica
from cauc_ray.execution.live import LiveRun, follow
from cauc_ray.execution.plan import RunPlan, Shard, import_paths
from cauc_ray.execution.progress import RunProgress
from cauc_ray.execution.session import require_fit
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy

# A block has so many rows at most, and fewer where they are large.
BLOCK_ROWS = 8192
BLOCK_BYTES = 16 * 1024 * 1024


def block_rows(row_bytes: float) -> int:
    """Return the rows in a block of rows of so many bytes, 0 where nobody knows."""
    fit = BLOCK_BYTES / row_bytes if row_bytes else BLOCK_ROWS / 8
    return int(min(BLOCK_ROWS, max(32, fit)))


def run_cascade(
    chains: Sequence[tuple[StageSpec, ...]],
    policy: Policy,
    inputs: RunInput,
    out: Path,
    record: RunRecord,
    on_progress: Callable[[RunProgress], None],
    *,
    degrade: bool,
) -> float:
    """Run a policy's chain over an input on the current Ray session, leaving out what is committed in out.

    chains: the stages as each controller has them, as sharded() returns them.   degrade: answer without a stage
    that is down. Returns the seconds from the first call to the last commit. Raises ExecutionError when the stages
    do not fit on the cluster, do not start or cannot go on; what was finished before stays in the output.
    """
    require_fit([stage for chain in chains for stage in chain])

    starts = Counter[int]()

    def plan(number: int) -> RunPlan | None:
        starts[number] += 1
        done = committed_blocks(out)
        n_done = sum(done.values())
        if n_done == inputs.n_rows:
            return None
        return RunPlan(
            run_id=record.run_id,
            stages=chains[number],
            policy=policy,
            source=inputs.source(record.block_rows, frozenset(done)),
            sink=RunTables(out, record, [stage.name for stage in chains[number]], degrade=degrade, shard=number),
            n_rows=inputs.n_rows,
            n_done=n_done if number == 0 else 0,
            block_rows=record.block_rows,
            import_paths=import_paths(),
            degrade=degrade,
            shard=Shard(number, len(chains)),
            # Above those of the ledger, and those that other controllers or attempts have and that is to hear of.
            first_replica=next_replica(out) + 10_000 * (starts[number] - 1),
        )

    if sum(committed_blocks(out).values()) == inputs.n_rows:
        return 0.0
    return follow([LiveRun(partial(plan, number)) for number in range(len(chains))], on_progress)
