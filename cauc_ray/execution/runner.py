"""Runs of a policy's cascade over an input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from cauc_ray.data.blocks import BlockSource, InputBlock, ids_digest
from cauc_ray.data.inputs import RunInput
from cauc_ray.errors import CaucError, DataError, ExecutionError
from cauc_ray.execution.ledger import (
    Committed,
    RunRecord,
    RunTables,
    committed,
    failures_by_stage,
    next_replica,
    repair,
)
from cauc_ray.execution.live import LiveRun, follow
from cauc_ray.execution.plan import RunPlan, Shard
from cauc_ray.execution.progress import RunProgress
from cauc_ray.execution.session import require_fit
from cauc_ray.execution.user_code import import_paths
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy

# A block has so many rows at most, and fewer where they are large.
BLOCK_ROWS = 8192
BLOCK_BYTES = 16 * 1024 * 1024

# Models may fail on so many rows of any run; and on so many before the share of rows done so far counts.
MIN_FAILED = 100
MANY_FAILED = 1000


def block_rows(row_bytes: float) -> int:
    """Return the rows in a block of rows of so many bytes, 0 where nobody knows."""
    fit = BLOCK_BYTES / row_bytes if row_bytes else BLOCK_ROWS / 8
    return int(min(BLOCK_ROWS, max(32, fit)))


@dataclass(frozen=True, slots=True)
class Limit:
    """How many rows models may fail on before a run ends.   share: of all rows, and never fewer than MIN_FAILED.

    While a run goes on, it is also held against the rows that are done so far, once MANY_FAILED have failed, so
    that a long one does not compute for days what will fail in the end.
    """

    share: float
    n_rows: int | None

    def exceeded(self, n_failed: int, n_done: int) -> bool:
        """Say whether too many rows have failed, of those that are done so far."""
        by_now = max(MANY_FAILED, self.share * n_done)
        return n_failed > by_now or (self.n_rows is not None and self.exceeded_at_end(n_failed, self.n_rows))

    def exceeded_at_end(self, n_failed: int, n_rows: int) -> bool:
        """Say whether too many rows have failed, of all."""
        return n_failed > max(MIN_FAILED, self.share * n_rows)


def too_many_failed(n_failed: int, n_done: int, n_rows: int | None, by_stage: Mapping[str, int], why: str) -> CaucError:
    """Return the error of a run in which models failed on too many rows.   by_stage: how many at each."""
    where = ", ".join(f"{n:,} at stage {name!r}" for name, n in by_stage.items() if n)
    of = f"{n_done:,} rows so far" if n_rows is None or n_done < n_rows else f"{n_rows:,} rows"
    return ExecutionError(
        f"models failed on {n_failed:,} of {of} ({where}), more than max_failed allows; most often: {why}; mend the "
        "cause and go on with --resume --retry-failed, or raise max_failed in the pool file and go on with --resume"
    )


def run_cascade(
    chains: Sequence[tuple[StageSpec, ...]],
    policy: Policy,
    inputs: RunInput,
    out: Path,
    record: RunRecord,
    on_progress: Callable[[RunProgress], None],
    *,
    degrade: bool,
    max_failed: float,
    retry_failed: bool = False,
) -> float:
    """Run a policy's chain over an input on the current Ray session, leaving out what is committed in out.

    chains: the stages as each controller has them, as sharded() returns them.   degrade: answer without a stage
    that is down.   max_failed: the share of rows that models may fail on.   retry_failed: do rows again that failed.
    Returns the seconds from the first call to the last commit. Raises ExecutionError when the stages do not fit on
    the cluster, do not start or cannot go on, or models fail on too many rows; what was finished before stays in
    the output.
    """
    require_fit([stage for chain in chains for stage in chain])
    repair(out)
    limit, names = Limit(max_failed, inputs.n_rows), [stage.name for stage in chains[0]]
    starts = Counter[int]()

    def plan(number: int) -> RunPlan | None:
        starts[number] += 1
        there = committed(out, retry_failed=retry_failed)
        if there.n_done == inputs.n_rows:
            return None
        retried = frozenset(there.to_retry)
        source: BlockSource = inputs.source(record.block_rows, there.done)
        return RunPlan(
            run_id=record.run_id,
            stages=chains[number],
            policy=policy,
            source=FailedRows(source, there.to_retry, there.ids) if retried else source,
            sink=RunTables(out, record, names, degrade=degrade, shard=number, retried=retried),
            n_rows=inputs.n_rows,
            n_done=there.n_done if number == 0 else 0,
            block_rows=record.block_rows,
            import_paths=import_paths(chains[number]),
            degrade=degrade,
            shard=Shard(number, len(chains)),
            # Above those of the ledger, and those that other controllers or attempts have and that is to hear of.
            first_replica=next_replica(out) + 10_000 * (starts[number] - 1),
        )

    before = committed(out, retry_failed=retry_failed)

    def watch(progress: RunProgress) -> None:
        on_progress(progress)
        by_stage = {stage.name: stage.failed for stage in progress.stages}
        n_failed = before.n_failed + sum(by_stage.values())
        n_done = before.n_done + sum(at.accepted + at.degraded + at.failed for at in progress.stages)
        if limit.exceeded(n_failed, n_done):
            worst = max(progress.stages, key=lambda stage: stage.failed)
            raise too_many_failed(n_failed, n_done, inputs.n_rows, by_stage, worst.reason)

    def check(there: Committed, *, at_end: bool) -> None:
        if (limit.exceeded_at_end if at_end else limit.exceeded)(there.n_failed, there.n_done):
            by_stage, why = failures_by_stage(out)
            raise too_many_failed(there.n_failed, there.n_done, inputs.n_rows, by_stage, why)

    check(before, at_end=False)
    seconds = 0.0
    if before.n_done != inputs.n_rows:
        seconds = follow([LiveRun(partial(plan, number)) for number in range(len(chains))], watch)
    check(committed(out), at_end=True)
    return seconds


@dataclass(frozen=True, slots=True)
class FailedRows:
    """The blocks of a source, and of some of them only the rows that failed; plain.

    ids: of these rows, by block; None for all of its rows.   digests: of all ids of these blocks, as committed.
    """

    source: BlockSource
    ids: Mapping[int, frozenset[str] | None]
    digests: Mapping[int, str]

    @property
    def n_groups(self) -> int:
        """How many groups there are."""
        return self.source.n_groups

    def blocks(self, group: int) -> Iterator[tuple[int, InputBlock]]:
        """Yield a group's blocks. Raises DataError where a block that is done again has other rows, or one twice."""
        for number, block in self.source.blocks(group):
            ids = self.ids.get(number)
            if ids is None:
                yield number, block
                continue
            wanted = np.array([example in ids for example in block.example_ids])
            if ids_digest(block.example_ids) != self.digests[number] or wanted.sum() != len(ids):
                raise DataError(
                    f"block {number} of the input has other rows than those that are committed, or an example_id "
                    "twice: try failed rows again with the input that the run was started with"
                )
            yield number, block.where(wanted)
