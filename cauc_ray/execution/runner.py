"""Runs of a policy's cascade over an input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cauc_ray.data.inputs import InputBlock, RunInput
from cauc_ray.execution.ledger import RunRecord, RunTables, committed_blocks
from cauc_ray.execution.loop import LiveRun, RunPlan, RunProgress, follow, import_paths
from cauc_ray.execution.session import replicas_that_fit
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy

BLOCK_ROWS = 2048


@dataclass(frozen=True, slots=True)
class _ParquetBlocks:
    """The blocks of a Parquet input that are not done."""

    path: Path
    done: frozenset[int]

    def blocks(self) -> Iterator[tuple[int, InputBlock]]:
        for number, block in enumerate(RunInput(self.path).blocks(BLOCK_ROWS)):
            if number not in self.done:
                yield number, block


def run_cascade(
    stages: tuple[StageSpec, ...],
    policy: Policy,
    inputs: RunInput,
    out: Path,
    record: RunRecord,
    on_progress: Callable[[RunProgress], None],
) -> float:
    """Run a policy's chain over an input on the current Ray session, leaving out what is committed in out.

    Returns the seconds from the first read to the last commit, without starting the stages.
    Raises ExecutionError when the stages do not fit on the cluster, do not start or die; what was finished
    before stays in the output.
    """
    done = committed_blocks(out)
    plan = RunPlan(
        stages=stages,
        policy=policy,
        source=_ParquetBlocks(inputs.path.absolute(), frozenset(done)),
        sink=RunTables(out, record, [stage.name for stage in stages]),
        n_rows=inputs.n_rows,
        n_done=sum(done.values()),
        block_rows=BLOCK_ROWS,
        import_paths=import_paths(),
    )
    return follow(LiveRun(plan, replicas_that_fit(stages)), on_progress)
