"""Collecting every model's own answers to a dataset, block by block, models side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cauc_ray.data.datasets import DatasetSource, open_dataset
from cauc_ray.data.inputs import InputBlock
from cauc_ray.errors import ExecutionError
from cauc_ray.execution.collected import BLOCK_ROWS, CollectedTables, CollectRecord, Layout, Target
from cauc_ray.execution.loop import POLL_S, LiveRun, RunPlan, RunProgress, import_paths
from cauc_ray.execution.session import replicas_that_fit
from cauc_ray.models.pool import Replicas, StageSpec


@dataclass(frozen=True, slots=True)
class _DatasetBlocks:
    """The blocks of a dataset's splits that are not done."""

    dataset: DatasetSource
    layout: Layout
    done: frozenset[int]

    def blocks(self) -> Iterator[tuple[int, InputBlock]]:
        dataset = open_dataset(self.dataset)
        for split in self.layout.sizes:
            done = {block for owner, block in map(self.layout.place, self.done) if owner == split}
            for block, content in dataset.blocks(split, BLOCK_ROWS, done):
                yield self.layout.number(split, block), content


@dataclass(frozen=True, slots=True)
class Collection:
    """One model's work: where its answers go, who gives them, and what each split's record says."""

    target: Target
    stage: StageSpec
    records: Mapping[str, CollectRecord]


def plan_collection(work: Collection, dataset: DatasetSource) -> RunPlan | None:
    """Return the run that a collection still needs, None where all is there. Raises ConfigError as Target.done."""
    layout = Layout({split: record.n_rows for split, record in work.records.items()})
    done: dict[int, int] = {}
    for split, record in work.records.items():
        done |= {layout.number(split, block): n for block, n in work.target.done(record).items()}
    n_rows = sum(layout.sizes.values())
    if sum(done.values()) == n_rows:
        return None
    return RunPlan(
        stages=(work.stage,),
        policy=None,
        source=_DatasetBlocks(dataset, layout, frozenset(done)),
        sink=CollectedTables(work.target, work.stage, layout, work.records),
        n_rows=n_rows,
        n_done=sum(done.values()),
        block_rows=BLOCK_ROWS,
        import_paths=import_paths(),
    )


def run_side_by_side(
    plans: Mapping[str, RunPlan],
    on_progress: Callable[[Mapping[str, RunProgress]], None],
    on_end: Callable[[str, float], None],
) -> None:
    """Run plans of one stage each on the current Ray session, as many at a time as its resources hold.

    on_progress: called about twice a second with all that have started.   on_end: called with a plan's name and
    its seconds of work. Raises ExecutionError when one does not fit, does not start or dies; the others end
    too, and what was committed stays.
    """
    for plan in plans.values():
        replicas_that_fit(plan.stages)
    waiting, running = dict(plans), dict[str, tuple[LiveRun, StageSpec]]()
    progress: dict[str, RunProgress] = {}
    try:
        while waiting or running:
            for name, stage, n in _that_fit(waiting, [stage for _, stage in running.values()]):
                fixed = stage.model_copy(update={"replicas": Replicas(min=n, max=n)})
                running[name] = (LiveRun(waiting.pop(name), [n]), fixed)
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


def _that_fit(waiting: Mapping[str, RunPlan], taken: Sequence[StageSpec]) -> list[tuple[str, StageSpec, int]]:
    """Return which plans can start beside the stages that run, and with how many replicas."""
    chosen: list[tuple[str, StageSpec]] = []
    counts: list[int] = []
    for name, plan in waiting.items():
        try:
            counts = replicas_that_fit([*taken, *(stage for _, stage in chosen), *plan.stages])
        except ExecutionError:
            continue
        chosen.append((name, plan.stages[0]))
    return [(name, stage, n) for (name, stage), n in zip(chosen, counts[len(taken) :], strict=True)]
