"""Collecting every model's own answers to a dataset, models side by side, and the tables that this leaves."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import ray
from pydantic import BaseModel, ConfigDict

from cauc_ray.cascade.rows import Call, CallResult, Owner
from cauc_ray.cascade.worker import Collected
from cauc_ray.data.answer_table import vectors_of, words_columns
from cauc_ray.data.blocks import ids_digest
from cauc_ray.data.datasets import Dataset
from cauc_ray.data.logits import FAILED
from cauc_ray.data.writing import float_lists, logit_columns
from cauc_ray.errors import ConfigError, DataError, ExecutionError
from cauc_ray.execution import commits
from cauc_ray.execution.cluster import replicas_that_fit, require_fit
from cauc_ray.execution.commits import Claim, Committed, FinishedBlock, Parts, PartWriter, Sink, failed_rows
from cauc_ray.execution.plan import RunPlan
from cauc_ray.execution.progress import RunProgress
from cauc_ray.execution.reading import BlockHeader
from cauc_ray.execution.runner import POLL_S, LiveRun
from cauc_ray.files.documents import make_folder, read_model, write_json
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath, hive_values
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.costs import model_cost
from cauc_ray.models.pool import Replicas, StageSpec
from cauc_ray.numbers.answer_arrays import ANSWER
from cauc_ray.numbers.answer_keys import own_answer
from cauc_ray.numbers.types import Bools, Floats, Ints

# Rows that are read and done together.
BLOCK_ROWS = 256
FORMAT: Literal["cauc-collect/3"] = "cauc-collect/3"
# Other readers of hive-partitioned Parquet pass over names that begin so.
RECORD, MANIFEST, INPUTS, CARRIED = "_collect.json", "_manifest", "_inputs", "_carried.parquet"


class CollectRecord(BaseModel):
    """The record of a collected split (_collect.json), so that it can be continued and is not mixed with another.

    Attributes:
        dataset: The dataset's name.
        rule: How it was split.
        fingerprint: Of the dataset's files; where it is another, answers to rows with the same id and inputs stay.
        split: The split.
        n_rows: Its rows.
        model: The model's identity, which must be the same to continue.
        dtype: The precision that answered, which must be the same to continue.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cauc-collect/3"] = FORMAT
    dataset: str
    rule: str
    fingerprint: str
    split: str
    n_rows: int
    model: str
    dtype: str | None = None
    source: str = ""
    logit_kind: str = ""
    gflops_published: float | None = None
    gflops_measured: float | None = None
    noise: float | None = None
    params_b: float | None = None
    cost_unit: str | None = None

    def cost(self, stage: StageSpec, per_call: float | None) -> float | None:
        """Return the model's cost of one example as models.costs.model_cost does."""
        facts = ModelFacts(self.source, self.logit_kind, self.gflops_published, self.params_b)
        return model_cost(stage.cost, facts, self.gflops_measured, per_call)


@dataclass(frozen=True, slots=True)
class Collection:
    """One model's work, and its part of a logit table.

    Attributes:
        table: The logit table.
        kind: What is collected.
        stage: The model.
        records: Of each split, in order.
        columns: What the model reads, None for all.
    """

    table: AnyPath
    kind: Literal["model", "embedding"]
    stage: StageSpec
    records: Mapping[str, CollectRecord]
    columns: frozenset[str] | None = None

    @property
    def name(self) -> str:
        """Return the model's name, or the encoder's."""
        return self.stage.name

    @property
    def calls_report_costs(self) -> bool:
        """Return whether the cost of a call is the call's own, not the pool's."""
        return self.stage.cost is None or self.stage.cost.is_round_trip

    @property
    def folder(self) -> AnyPath:
        """The model's folder in the table."""
        return self.table / f"{self.kind}={self.name}"

    def parts(self, split: str) -> Parts:
        """Return where the rows of a split are."""
        folder = self.folder / f"split={split}"
        return Parts(folder, self.table / FAILED / folder.parent.name / folder.name, folder / MANIFEST, folder / INPUTS)

    def committed(self, split: str) -> Committed:
        """Return what there is of a split.

        Raises:
            ConfigError: It is of another model, or has no record.
        """
        parts = self.parts(split)
        if parts.rows.exists():
            record = self.record(split)
            if record is None or record.model != self.records[split].model:
                owner = "no collection" if record is None else "another model of that name"
                raise ConfigError(f"{parts.rows} belongs to {owner}; remove it or choose another -o")
        return parts.committed()

    def require_whole(self) -> None:
        """Raise ExecutionError if a split has fewer rows, failed ones included, than the dataset."""
        for split, record in self.records.items():
            totals = self.parts(split).committed().totals
            n = int(totals.get("rows", Counter())["answered"] + totals.get("failed", Counter()).total())
            if n != record.n_rows:
                raise ExecutionError(
                    f"the collection ended, but {self.parts(split).rows} has {n:,} of {record.n_rows:,} rows; continue "
                    "it by the same command"
                )

    def record(self, split: str) -> CollectRecord | None:
        """Return a collected split's record, None if nothing was collected."""
        path = self.parts(split).rows / RECORD
        return read_model(path, CollectRecord, FORMAT) if path.is_file() else None

    @property
    def present_records(self) -> dict[str, CollectRecord]:
        """Return the record of each split as it was collected, else as it is to be."""
        return {split: self.record(split) or record for split, record in self.records.items()}

    @property
    def stale_splits(self) -> list[str]:
        """Return the splits whose answers are to rows of another dataset, or of an earlier state of this one."""
        present = self.present_records
        return [split for split, record in self.records.items() if record.fingerprint != present[split].fingerprint]

    @property
    def must_carry_over(self) -> bool:
        """Return whether answers are to be taken over from an earlier state of the dataset."""
        return bool(self.stale_splits) or (self.folder / CARRIED).is_file()

    def collected(self) -> list[CollectRecord]:
        """Return the records of all splits of which something was collected."""
        splits = hive_values(self.folder, "split") if self.folder.is_dir() else []
        return [record for record in map(self.record, splits) if record is not None]


@dataclass(slots=True)
class OpenRows:
    """Answers to a block's rows, as far as they have come."""

    rows: dict[int, Floats] = field(default_factory=dict)
    texts: dict[int, str | None] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class CollectedTables(Sink):
    """Writes a model's answers: each split's logits and failed rows in parts, once a row of the split is answered."""

    def __init__(self, work: Collection) -> None:
        """Take what is collected. Where an earlier attempt has answers, only the rest is collected."""
        self.commit_s = commits.COMMIT_S
        self._work = work
        self._records = dict(work.records)
        self._open: defaultdict[int, OpenRows] = defaultdict(OpenRows)
        self._measured = False
        claims = {split: Claim(work.parts(split).rows) for split in work.records}
        for split, claim in claims.items():
            if work.parts(split).rows.exists():  # before anything is removed: an earlier attempt may be at work
                claim.make()
                work.parts(split).clean()
        before = {split: work.parts(split).committed().totals for split in work.records}
        self._answered = {split for split, totals in before.items() if totals.get("rows", Counter())["answered"]}
        self._writers = {split: PartWriter(work.parts(split), claim) for split, claim in claims.items()}
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

    def _note(self, **facts: object) -> None:
        self._records = {split: record.model_copy(update=facts) for split, record in self._records.items()}

    def add_call(self, call: Call, result: CallResult, collected: Collected | None) -> None:
        """Keep a call's answers until their blocks are finished.

        Raises ExecutionError at the first answers of a model whose cost is neither declared nor measured.
        """
        if collected is None or call.probe:
            return
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
                if answers.texts is not None:
                    at.texts[int(row)] = answers.texts[place]
                if answers.costs is not None:
                    at.costs[int(row)] = float(answers.costs[place])
            start += len(rows)
        self._open[call.rows[0].owner.block].counts.update(answers.counts)

    def add_block(self, block: Owner, example_ids: pa.Array, labels: Ints | None) -> None:
        """Take a block that is done."""
        header: BlockHeader = block.names
        answers = self._open.pop(block.block, OpenRows())
        reasons = {row: reason for row, (_, reason) in block.failures.items()}
        self.add_rows(header.split, block.block, example_ids, labels, header.inputs, answers, reasons)

    def add_rows(
        self,
        split: str,
        number: int,
        example_ids: pa.Array,
        labels: Ints | None,
        inputs: pa.Array,
        answers: OpenRows,
        reasons: dict[int, str],
    ) -> None:
        """Take rows that are done. A row whose label names none of its options is a failed row, too.

        Args:
            split: Their split.
            number: The number of their block.
            example_ids: Their ids, string (n,).
            labels: Their labels, int32 (n,), None where there are none.
            inputs: A digest of what the model reads of each, binary (n,).
            answers: The answers by position.
            reasons: Why rows have failed, by position.
        """
        names, is_model, answer_format = (
            example_ids.to_pylist(),
            self._work.kind == "model",
            self._work.stage.model.answer_format,
        )
        for row, logits in answers.rows.items():
            if labels is not None and is_model and answer_format is None and labels[row] >= len(logits):
                reasons[row] = f"its label {labels[row]} is outside its {len(logits)} options"
        failed, by_stage = failed_rows(names, [(row, self._work.name, why) for row, why in reasons.items()])
        rows = [row for row in range(len(names)) if row not in reasons]
        ids, vectors = [names[row] for row in rows], [answers.rows[row] for row in rows]
        sums: dict[str, float] = {"answered": len(rows)}
        if is_model:
            labelled = None if labels is None else labels[rows]
            reported = answers.costs and self._work.calls_report_costs
            costs = np.array([answers.costs[row] for row in rows]) if reported else None
            if answer_format is None:
                table = logit_columns(ids, labelled, vectors, costs)
            else:
                table = words_columns(
                    ids, labelled, vectors, [answers.texts[row] for row in rows], answer_format, costs
                )
            if labelled is not None:
                kind = self._work.stage.model.answers_kind
                chosen = [own_answer(vector[None], kind)[0] for vector in vectors]
                right = sum(label == answer for label, answer in zip(labelled, chosen, strict=True))
                sums |= {"labelled": int((labelled >= 0).sum()), "right": int(right)}
            if costs is not None:
                sums |= {"paid": len(costs), "cost": float(costs.sum())}
        else:
            table = pa.table({"example_id": pa.array(ids, pa.string()), "embedding": float_lists(vectors)})
        if rows:
            self._answered.add(split)
        elif reasons:
            self._reasons.setdefault(split, next(iter(reasons.values())))
        totals: dict[str, Mapping[str, float]] = {"rows": sums, "failed": by_stage, "counts": answers.counts}
        digests = inputs.take(pa.array(rows, pa.int64()))
        block = FinishedBlock(number, table, failed, sorted(reasons), ids_digest(names), totals, digests)
        self._writers[split].add(block)

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
            raise ConfigError(
                f"stage {self._work.stage.name!r}: the cost of a call is unknown, and torch counted no operations; "
                "give the stage a cost in the pool file"
            )


def plan_collection(work: Collection, dataset: Dataset) -> RunPlan | None:
    """Return the run that a collection still needs, None where all is there. Raises as Collection.committed."""
    for split in work.records:
        work.committed(split)
    if not work.must_carry_over and not any(map(np.any, _left(work, dataset).values())):
        return None
    carry_over(work, dataset)
    sink = CollectedTables(work)
    left = _left(work, dataset)
    if not any(map(np.any, left.values())):
        return None
    n_rows, n_left = (sum(map(count, left.values())) for count in (len, np.count_nonzero))
    return RunPlan(
        run_id=work.name,
        stages=(work.stage,),
        policy=None,
        source=dataset.blocks(BLOCK_ROWS, work.columns, left, with_inputs=True),
        done={},
        sink=sink,
        n_rows=n_rows,
        n_done=n_rows - int(n_left),
        block_rows=BLOCK_ROWS,
    )


def _left(work: Collection, dataset: Dataset) -> dict[str, Bools]:
    """Return which rows of each split are not collected yet, bool (n,)."""
    return {split: _absent(dataset.ids_of(split), work.parts(split).example_ids()) for split in work.records}


def _absent(ids: pa.Array, among: pa.ChunkedArray) -> Bools:
    absent: Bools = pc.invert(pc.is_in(ids, value_set=among)).to_numpy(zero_copy_only=False)
    return absent


def carry_over(work: Collection, dataset: Dataset) -> None:
    """Where the dataset has changed, keep the answers to rows with the same id and inputs, whatever their labels.

    Answers to rows that are gone stay next to the splits, in case these rows come back. Ended at any moment, it starts
    again from there.

    Raises:
        ConfigError: Not one row is the same: it is another dataset.
    """
    if not work.must_carry_over:
        return
    records, stale, carried = work.present_records, work.stale_splits, work.folder / CARRIED
    answers = _answers(work, stale, carried)
    matches = list(_matches(work, dataset, stale, answers))
    if stale and not matches:
        raise ConfigError(
            f"{work.parts(stale[0]).rows} belongs to another dataset: no row has the id and the inputs of one that was "
            "answered; remove it or choose another -o"
        )
    write_parquet(carried, answers)
    for split in stale:
        Claim(work.parts(split).rows).make()
        work.parts(split).remove()
        facts = records[split].model_dump(include=MEASURED)
        records[split] = work.records[split].model_copy(update=facts)
        write_json(work.parts(split).rows / RECORD, records[split].model_dump())
    tables = CollectedTables(replace(work, records=records))
    values, costs = answers.column("values").to_numpy(), answers.column("cost").to_numpy()
    texts = answers.column("text").to_numpy() if "text" in answers.column_names else None
    for number, match in enumerate(matches):
        rows = OpenRows(dict(enumerate(values[match.answers])))
        if texts is not None:
            rows.texts = dict(enumerate(texts[match.answers]))
        rows.costs = {row: float(cost) for row, cost in enumerate(costs[match.answers]) if not np.isnan(cost)}
        tables.add_rows(match.split, number, match.example_ids, match.labels, match.inputs, rows, {})
        if tables.n_bytes > commits.COMMIT_BYTES:
            tables.commit()
    tables.commit()
    taken = [number for match in matches for number in match.answers.tolist()]
    rest = np.setdiff1d(np.arange(len(answers)), taken)
    if len(rest):
        write_parquet(carried, answers.take(pa.array(rest, pa.int64())))
    else:
        carried.unlink()


@dataclass(frozen=True, slots=True)
class _Match:
    """Rows of a block that were answered before.   answers: the numbers of their answers."""

    split: str
    example_ids: pa.Array
    labels: Ints | None
    inputs: pa.Array
    answers: Ints


def _matches(work: Collection, dataset: Dataset, stale: Sequence[str], answers: pa.Table) -> Iterator[_Match]:
    """Yield the dataset's rows whose id and inputs are those of an answer, reading only rows with such ids."""
    candidates = {}
    for split in work.records:
        ids = dataset.ids_of(split)
        candidates[split] = ~_absent(ids, answers.column("example_id"))
        if split not in stale:
            candidates[split] &= _absent(ids, work.parts(split).example_ids())
    keys = _keys(answers.column("example_id"), answers.column("input"))
    blocks = dataset.blocks(BLOCK_ROWS, work.columns, candidates, with_inputs=True)
    for _, block in (item for group in range(blocks.n_groups) for item in blocks.blocks(group)):
        assert block.inputs is not None
        ids = pa.array(block.example_ids, pa.string())
        rows = pc.index_in(_keys(ids, block.inputs), value_set=keys)
        mask = rows.is_valid()
        if pc.any(mask).as_py():
            labels = None if block.labels is None else block.labels[mask.to_numpy(zero_copy_only=False)]
            numbers = rows.filter(mask).to_numpy()
            yield _Match(block.split, ids.filter(mask), labels, block.inputs.filter(mask), numbers)


# What a model reports and what was measured, of a record.
MEASURED = {"dtype", "source", "logit_kind", "gflops_published", "gflops_measured", "noise", "params_b", "cost_unit"}


def _keys(ids: pa.Array, digests: pa.Array) -> pa.Array:
    """Return what tells rows apart: ids with digests of their inputs; null where there is none."""
    pairs = zip(ids.to_pylist(), digests.to_pylist(), strict=True)
    return pa.array([None if digest is None else f"{digest.hex()} {example}" for example, digest in pairs], pa.string())


def _answers(work: Collection, splits: Iterable[str], carried: AnyPath) -> pa.Table:
    """Return the answers of some splits and those that were carried over: example_id, input, values, cost."""
    tables = [read_parquet(carried)] if carried.is_file() else []
    column = "logits" if work.kind == "model" else "embedding"
    answer_format = work.stage.model.answer_format
    for rows, inputs in (part for split in splits for part in work.parts(split).read()):
        costs = rows.column("cost") if "cost" in rows.column_names else pa.nulls(len(rows), pa.float32())
        columns = {
            "example_id": rows.column("example_id"),
            "input": inputs,
            "values": rows.column(column)
            if answer_format is None
            else float_lists(list(vectors_of(rows, answer_format))),
            "cost": costs,
        }
        columns |= {} if answer_format is None else {"text": rows.column(ANSWER)}
        tables.append(pa.table(columns))
    return pa.concat_tables(tables).combine_chunks()


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
    dataset = _shared(dataset)
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
                running[name] = (LiveRun((stage,), None, partial(plan_collection, work, dataset)), stage)
            for name, (run, _) in list(running.items()):
                seconds = run.wait(POLL_S / len(running))
                progress[name] = run.progress()
                if seconds is not None:
                    LiveRun.close([run])
                    del running[name]
                    works[name].require_whole()
                    on_end(name, seconds)
            on_progress(progress)
    finally:
        if running:
            LiveRun.close([run for run, _ in running.values()])


def _shared(dataset: Dataset) -> Dataset:
    """Return a dataset whose rows in memory are in the object store, once for all models."""
    sources = [part.source for part in dataset.parts]
    rows = [None if source.rows is None else partial(ray.get, ray.put(source.rows)) for source in sources]
    pairs = zip(dataset.parts, rows, strict=True)
    return replace(dataset, parts=tuple(replace(part, source=replace(part.source, rows=r)) for part, r in pairs))


def _that_fit(waiting: Mapping[str, Collection], taken: Sequence[StageSpec]) -> dict[str, StageSpec]:
    """Return the stages of collections that can start next to the running ones, with the replicas that fit."""
    chosen: dict[str, StageSpec] = {}
    counts: list[int] = []
    for name, work in waiting.items():
        with suppress(ExecutionError):
            counts = replicas_that_fit([*taken, *chosen.values(), work.stage])
            chosen[name] = work.stage
    of_chosen = zip(chosen.items(), counts[len(taken) :], strict=True)
    return {name: _with_replicas(stage, n) for (name, stage), n in of_chosen}


def _with_replicas(stage: StageSpec, n: int) -> StageSpec:
    return stage.model_copy(update={"replicas": Replicas(min=n, max=n)})
