"""Collecting every model's own answers to a dataset, models side by side, and the tables that this leaves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, groupby
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from cauc_ray.cascade.rows import Call, CallResult, Owner
from cauc_ray.cascade.worker import Collected
from cauc_ray.data.blocks import InputBlock, ids_digest
from cauc_ray.data.datasets import Dataset
from cauc_ray.data.inputs import DEADLINE_S
from cauc_ray.data.logits import FAILED
from cauc_ray.data.writing import float_lists, logit_columns
from cauc_ray.errors import ConfigError, DataError, ExecutionError
from cauc_ray.execution import commits
from cauc_ray.execution.actors import result_of
from cauc_ray.execution.cluster import replicas_that_fit, require_fit
from cauc_ray.execution.commits import Committed, Parts, PartWriter, failed_rows
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.progress import RunProgress
from cauc_ray.execution.runner import POLL_S, LiveRun
from cauc_ray.execution.user_code import import_paths
from cauc_ray.files.documents import make_folder, read_model, write_json
from cauc_ray.files.paths import AnyPath, hive_values
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.costs import model_cost
from cauc_ray.models.pool import Replicas, StageSpec
from cauc_ray.numbers.types import Floats, Ints

# Rows that are read and done together.
BLOCK_ROWS = 256
# Blocks that one task reads one after the other; all, where a file is read from its start whichever are wanted.
GROUP_BLOCKS = 16
# For a call's answers to arrive from the replica's node, which has them when the call has ended.
ANSWERS_DEADLINE_S = 300.0
FORMAT: Literal["cauc-collect/2"] = "cauc-collect/2"
# Other readers of hive-partitioned Parquet pass over names that begin so.
RECORD, MANIFEST = "_collect.json", "_manifest"


@dataclass(frozen=True, slots=True)
class Layout:
    """The blocks of a dataset's splits, numbered on from one split to the next.   sizes: rows of each, in order."""

    sizes: Mapping[str, int]

    @property
    def _starts(self) -> dict[str, int]:
        """Return the number of each split's first block, and under "" of what would come next."""
        n_blocks = [-(-rows // BLOCK_ROWS) for rows in self.sizes.values()]
        return dict(zip([*self.sizes, ""], accumulate([0, *n_blocks]), strict=True))

    @property
    def n_blocks(self) -> int:
        """Return the blocks of all splits."""
        return self._starts[""]

    def number(self, split: str, block: int) -> int:
        """Return the number of a split's block among all."""
        return self._starts[split] + block

    def place(self, number: int) -> tuple[str, int]:
        """Return a block's split and its number there."""
        starts = self._starts
        split = [split for split, rows in self.sizes.items() if rows and starts[split] <= number][-1]
        return split, number - starts[split]


class CollectRecord(BaseModel):
    """The record of a collected split (_collect.json), so that it can be continued and is not mixed with another.

    fingerprint, split, n_rows, block_rows, model: what must be the same for that; so must ids (of all rows, a digest)
    and dtype, where both records have them.   The others are facts that the model reports and measurements.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cauc-collect/2"] = FORMAT
    dataset: str
    rule: str
    fingerprint: str
    split: str
    n_rows: int
    block_rows: int
    model: str
    ids: str | None = None
    dtype: str | None = None
    source: str = ""
    logit_kind: str = ""
    gflops_published: float | None = None
    gflops_measured: float | None = None
    noise: float | None = None
    params_b: float | None = None
    cost_unit: str | None = None

    def same_work(self, other: CollectRecord) -> bool:
        """Return whether another record is of the same rows and the same model."""
        same_ids = self.ids == other.ids or None in (self.ids, other.ids)
        return same_ids and all(
            getattr(self, key) == getattr(other, key)
            for key in ("fingerprint", "split", "n_rows", "block_rows", "model")
        )

    def cost(self, stage: StageSpec, per_call: float | None) -> float | None:
        """Return the model's cost of one example as models.costs.model_cost does."""
        facts = ModelFacts(self.source, self.logit_kind, self.gflops_published, self.params_b)
        return model_cost(stage.cost, facts, self.gflops_measured, per_call)


@dataclass(frozen=True, slots=True)
class Collection:
    """One model's work, and its part of a logit table.   records: of each split, in order."""

    table: AnyPath
    kind: Literal["model", "embedding"]
    stage: StageSpec
    records: Mapping[str, CollectRecord]

    @property
    def name(self) -> str:
        """Return the model's name, or the encoder's."""
        return self.stage.name

    @property
    def calls_tell_costs(self) -> bool:
        """Return whether what a call costs is its own, not the pool's."""
        return self.stage.cost is None or self.stage.cost.is_round_trip

    @property
    def _folder(self) -> AnyPath:
        return self.table / f"{self.kind}={self.name}"

    def parts(self, split: str) -> Parts:
        """Return where the rows of a split are."""
        folder = self._folder / f"split={split}"
        return Parts(folder, self.table / FAILED / folder.parent.name / folder.name, folder / MANIFEST)

    def committed(self, wanted: CollectRecord) -> Committed:
        """Return what there is of a split.

        Raises ConfigError when it is of other rows or another model, or there is no record of what it is of.
        """
        parts = self.parts(wanted.split)
        if parts.rows.exists():
            found = self.record(wanted.split)
            if found is None or not found.same_work(wanted):
                other = "dataset, seed or layout" if found and found.model == wanted.model else "model of that name"
                whose = "no collection" if found is None else f"another {other}"
                raise ConfigError(f"{parts.rows} belongs to {whose}; remove it or choose another -o")
        return parts.committed()

    def record(self, split: str) -> CollectRecord | None:
        """Return a collected split's record, None if nothing was collected."""
        path = self.parts(split).rows / RECORD
        return read_model(path, CollectRecord, FORMAT) if path.is_file() else None

    def collected(self) -> list[CollectRecord]:
        """Return the records of all splits of which something was collected."""
        splits = hive_values(self._folder, "split") if self._folder.is_dir() else []
        return [record for record in map(self.record, splits) if record is not None]


@dataclass(slots=True)
class _OpenRows:
    """Answers to a block's rows, as far as they have come."""

    rows: dict[int, Floats] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class CollectedTables:
    """Writes a model's answers: each split's logits and failed rows in parts, once a row of the split is answered."""

    def __init__(self, work: Collection, layout: Layout, answered: frozenset[str]) -> None:
        """Take what is collected.   answered: the splits of which an earlier attempt has answers."""
        self.commit_s = commits.COMMIT_S
        self._work, self._layout = work, layout
        self._records = dict(work.records)
        self._open: defaultdict[int, _OpenRows] = defaultdict(_OpenRows)
        self._measured = False
        self._answered = set(answered)
        self._writers = {split: PartWriter(work.parts(split)) for split in work.records}
        self._reasons: dict[str, str] = {}

    @property
    def n_bytes(self) -> int:
        """Return what is not written yet."""
        return sum(writer.n_bytes for split, writer in self._writers.items() if split in self._answered)

    def start(self, facts: ModelFacts) -> None:
        """Note the model's facts. Raises ConfigError if other rows were answered in another precision.

        A model's precision may follow the device that a replica has, and a collection may be continued elsewhere.
        """
        for record in (*self._records.values(), *self._work.collected()):
            if record.dtype is not None and facts.dtype is not None and record.dtype != facts.dtype:
                raise ConfigError(
                    f"{self._work.name!r} answered split {record.split!r} in {record.dtype} and would continue in "
                    f"{facts.dtype}; continue on the kind of device that it started on, or remove its files in "
                    f"{self._work.table}, or choose another -o"
                )
        self._note(
            dtype=facts.dtype,
            source=facts.source,
            logit_kind=facts.logit_kind,
            gflops_published=facts.gflops,
            params_b=facts.params_b,
        )

    def _note(self, **known: object) -> None:
        self._records = {split: record.model_copy(update=known) for split, record in self._records.items()}

    def add_call(self, call: Call, result: CallResult, extra: Any) -> None:
        """Keep a call's answers until their blocks are finished.

        Raises ExecutionError at the first answers of a model whose cost is neither declared nor measured.
        """
        if result.error is not None or call.probe:
            return
        collected: Collected = result_of(
            extra, ANSWERS_DEADLINE_S, f"the node that has answers of {self._work.stage.name!r}"
        )
        answers = collected.answers
        if not self._measured and result.accepted.any():
            self._take_measure(collected)
        start = 0
        for rows in call.rows:
            at = self._open[rows.owner.block]
            for place, row in enumerate(rows.indices, start):
                if place in answers.failures:
                    continue
                n = answers.logits.shape[1] if answers.n_options is None else int(answers.n_options[place])
                at.rows[int(row)] = answers.logits[place, :n].copy()  # a view would keep the whole call
                if answers.costs is not None:
                    at.costs[int(row)] = float(answers.costs[place])
            start += len(rows)
        self._open[call.rows[0].owner.block].counts.update(answers.counts)

    def add_block(self, block: Owner, example_ids: pa.Array, labels: Ints | None) -> None:
        """Take a block that is done. A row whose label names none of its options is a failed row too."""
        at = self._open.pop(block.block, _OpenRows())
        names, is_model = example_ids.to_pylist(), self._work.kind == "model"
        reasons = {row: reason for row, (_, reason) in block.failures.items()}
        for row, logits in at.rows.items():
            if labels is not None and is_model and labels[row] >= len(logits):
                reasons[row] = f"its label {labels[row]} is outside its {len(logits)} options"
        failed, by_stage = failed_rows(names, [(row, self._work.name, why) for row, why in reasons.items()])
        kept = [row for row in range(len(names)) if row not in reasons]
        ids, vectors = [names[row] for row in kept], [at.rows[row] for row in kept]
        sums: dict[str, float] = {"answered": len(kept)}
        if is_model:
            known = None if labels is None else labels[kept]
            costs = np.array([at.costs[row] for row in kept]) if at.costs and self._work.calls_tell_costs else None
            table = logit_columns(ids, known, vectors, costs)
            if known is not None:
                right = sum(label == np.argmax(own) for label, own in zip(known, vectors, strict=True))
                sums |= {"labelled": int((known >= 0).sum()), "right": int(right)}
            if costs is not None:
                sums |= {"paid": len(costs), "cost": float(costs.sum())}
        else:
            table = pa.table({"example_id": pa.array(ids, pa.string()), "embedding": float_lists(vectors)})
        split, number = self._layout.place(block.block)
        if kept:
            self._answered.add(split)
        elif reasons:
            self._reasons.setdefault(split, next(iter(reasons.values())))
        totals: dict[str, Mapping[str, float]] = {"rows": sums, "failed": by_stage, "counts": at.counts}
        self._writers[split].add(number, table, failed, ids_digest(names), totals)

    def commit(self) -> None:
        """Write what has been taken of splits that have answers: others leave nothing, and are asked for again."""
        for split in self._answered:
            folder = self._work.parts(split).rows
            if self._writers[split].n_bytes and not (folder / RECORD).exists():
                make_folder(folder)
                write_json(folder / RECORD, self._records[split].model_dump())
            self._writers[split].commit()

    def close(self) -> None:
        """Write what is left. Raises DataError where a split has no answer at all."""
        self.commit()
        for split, reason in self._reasons.items():
            if split not in self._answered:
                raise DataError(f"{self._work.name!r} answered no row of split {split!r}; the first error: {reason}")

    def _take_measure(self, collected: Collected) -> None:
        self._measured = True
        unit = collected.answers.cost_unit
        self._note(gflops_measured=collected.gflops, noise=collected.noise, cost_unit=unit)
        record = next(iter(self._records.values()))
        per_call = None if collected.answers.costs is None else 0.0
        if self._work.kind == "model" and record.cost(self._work.stage, per_call) is None:
            raise ExecutionError(
                f"stage {self._work.stage.name!r}: the cost of a call is unknown, and torch counted no operations; "
                "give the stage a cost in the pool file"
            )


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


def plan_collection(work: Collection, dataset: Dataset) -> RunPlan | None:
    """Return the run that a collection still needs, None where all is there. Raises as Collection.committed."""
    layout = Layout({split: record.n_rows for split, record in work.records.items()})
    there = {split: work.committed(record) for split, record in work.records.items()}
    done = {layout.number(split, block): n for split, own in there.items() for block, n in own.rows.items()}
    n_rows = sum(layout.sizes.values())
    if sum(done.values()) == n_rows:
        return None
    for split in there:
        work.parts(split).clean()
    answered = frozenset(split for split, own in there.items() if own.totals)
    return RunPlan(
        run_id=work.name,
        stages=(work.stage,),
        policy=None,
        source=_DatasetBlocks(dataset, layout),
        done=dict.fromkeys(done, ""),
        sink=CollectedTables(work, layout, answered),
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
                first = next(iter(waiting.values())).stage
                chosen = {first.name: _with_replicas(first, first.replicas.min)}
            for name, stage in chosen.items():
                work = replace(waiting.pop(name), stage=stage)
                running[name] = (LiveRun(partial(plan_collection, work, dataset)), stage)
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


def _that_fit(waiting: Mapping[str, Collection], taken: Sequence[StageSpec]) -> dict[str, StageSpec]:
    """Return the stages of collections that can start next to the running ones, with the replicas that fit."""
    chosen: dict[str, StageSpec] = {}
    counts: list[int] = []
    for name, work in waiting.items():
        with suppress(ExecutionError):
            counts = replicas_that_fit([*taken, *chosen.values(), work.stage])
            chosen[name] = work.stage
    own = zip(chosen.items(), counts[len(taken) :], strict=True)
    return {name: _with_replicas(stage, n) for (name, stage), n in own}


def _with_replicas(stage: StageSpec, n: int) -> StageSpec:
    return stage.model_copy(update={"replicas": Replicas(min=n, max=n)})
