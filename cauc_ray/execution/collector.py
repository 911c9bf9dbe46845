"""Collecting every model's own answers to a dataset, block by block, models side by side."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from cauc_ray.data.blocks import InputBlock
from cauc_ray.data.datasets import Dataset
from cauc_ray.data.inputs import DEADLINE_S
from cauc_ray.errors import ExecutionError
from cauc_ray.execution.collected import BLOCK_ROWS, CollectedTables, CollectRecord, Layout, Target
from cauc_ray.execution.live import POLL_S, LiveRun
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.progress import RunProgress
from cauc_ray.execution.session import replicas_that_fit, require_fit
from cauc_ray.execution.user_code import import_paths
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.service import Replicas

# Blocks that one task reads one after the other; all, where a file is read from its start whichever are wanted.
GROUP_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class _DatasetBlocks:
    """The blocks of a dataset's splits; that their rows are the same is checked with the dataset."""

    dataset: Dataset
    layout: Layout
    deadline_s: float | None = DEADLINE_S

    @property
    def name(self) -> str:
        return self.dataset.name

    @property
    def anywhere(self) -> bool:
        return self.dataset.is_remote

    @property
    def n_groups(self) -> int:
        return 1 if self.dataset.streamed else -(-self.layout.n_blocks // GROUP_BLOCKS)

    def blocks(self, group: int, seen: Container[int] = ()) -> Iterator[tuple[int, InputBlock]]:
        first = group * GROUP_BLOCKS
        last = self.layout.n_blocks if group == self.n_groups - 1 else first + GROUP_BLOCKS
        wanted = [number for number in range(first, last) if number not in seen]
        for split, numbers in groupby(wanted, lambda number: self.layout.place(number)[0]):
            blocks = {self.layout.place(number)[1] for number in numbers}
            n_blocks = -(-self.layout.sizes[split] // BLOCK_ROWS)
            for block, content in self.dataset.blocks(split, BLOCK_ROWS, set(range(n_blocks)) - blocks):
                yield self.layout.number(split, block), content


@dataclass(frozen=True, slots=True)
class Collection:
    """One model's work: its target, its stage, and each split's record."""

    target: Target
    stage: StageSpec
    records: Mapping[str, CollectRecord]


def plan_collection(work: Collection, dataset: Dataset) -> RunPlan | None:
    """Return the run that a collection still needs, None where all is there. Raises as Target.committed."""
    layout = Layout({split: record.n_rows for split, record in work.records.items()})
    there = {split: work.target.committed(record) for split, record in work.records.items()}
    done = {layout.number(split, block): n for split, own in there.items() for block, n in own.rows.items()}
    n_rows = sum(layout.sizes.values())
    if sum(done.values()) == n_rows:
        return None
    for split in there:
        work.target.parts(split).clean()
    answered = frozenset(split for split, own in there.items() if own.totals)
    return RunPlan(
        run_id=work.target.name,
        stages=(work.stage,),
        policy=None,
        source=_DatasetBlocks(dataset, layout),
        done=dict.fromkeys(done, ""),
        sink=CollectedTables(work.target, work.stage, layout, work.records, answered),
        n_rows=n_rows,
        n_done=sum(done.values()),
        block_rows=BLOCK_ROWS,
        import_paths=import_paths([work.stage]),
    )


def run_side_by_side(
    works: Mapping[str, Collection],
    dataset: Dataset,
    on_progress: Callable[[Mapping[str, RunProgress]], None],
    on_end: Callable[[str, float], None],
) -> None:
    """Run collections that are not done on the current Ray session, as many at a time as its resources hold.

    on_progress: called about twice a second with all that have started.   on_end: called with a model's name and
    its seconds of work. Raises ExecutionError when one does not fit, does not start or dies; the others end
    too, and what was committed stays.
    """
    for work in works.values():
        require_fit([work.stage])
    waiting, running = dict(works), dict[str, tuple[LiveRun, StageSpec]]()
    progress: dict[str, RunProgress] = {}
    try:
        while waiting or running:
            chosen = _that_fit(waiting, [stage for _, stage in running.values()])
            if not chosen and not running:  # the nodes of the first are yet to be started
                chosen = [(name, work.stage, work.stage.replicas.min) for name, work in list(waiting.items())[:1]]
            for name, stage, n in chosen:
                fixed = stage.model_copy(update={"replicas": Replicas(min=n, max=n)})
                work = replace(waiting.pop(name), stage=fixed)
                running[name] = (LiveRun(partial(plan_collection, work, dataset)), fixed)
            for name, (run, _) in list(running.items()):
                seconds = run.wait(POLL_S / len(running))
                progress[name] = run.progress()
                if seconds is not None:
                    run.close()
                    del running[name]
                    on_end(name, seconds)
            on_progress(progress)
    finally:
        for run, _ in running.values():
            run.close()


def _that_fit(waiting: Mapping[str, Collection], taken: Sequence[StageSpec]) -> list[tuple[str, StageSpec, int]]:
    """Return which collections can start next to the running stages, and with how many replicas."""
    chosen: list[tuple[str, StageSpec]] = []
    counts: list[int] = []
    for name, work in waiting.items():
        try:
            counts = replicas_that_fit([*taken, *(stage for _, stage in chosen), work.stage])
        except ExecutionError:
            continue
        chosen.append((name, work.stage))
    return [(name, stage, n) for (name, stage), n in zip(chosen, counts[len(taken) :], strict=True)]
