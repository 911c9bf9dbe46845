"""The tables that a collection leaves: each split's record, its parts, its failed rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from pydantic import BaseModel, ConfigDict

from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.rows import Call, Owner
from cauc_ray.cascade.worker import Collected
from cauc_ray.data.blocks import ids_digest
from cauc_ray.data.logits import FAILED
from cauc_ray.data.writing import float_lists, logit_columns
from cauc_ray.errors import ConfigError, DataError, ExecutionError
from cauc_ray.execution import manifest
from cauc_ray.execution.actors import result_of
from cauc_ray.execution.manifest import Committed, Parts, PartWriter, failed_rows
from cauc_ray.files.atomic import make_folder
from cauc_ray.files.documents import read_model, write_json
from cauc_ray.files.listing import hive_values
from cauc_ray.files.paths import AnyPath
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.costs import model_cost
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.types import Floats, Ints

# Rows that are read and done together.
BLOCK_ROWS = 256
# For a call's answers to arrive from the replica's node, which has them when the call has ended.
ANSWERS_DEADLINE_S = 300.0
FORMAT: Literal["cauc-collect/2"] = "cauc-collect/2"
# Other readers of hive-partitioned Parquet pass over names that begin so.
RECORD, MANIFEST = "_collect.json", "_manifest"


@dataclass(frozen=True, slots=True)
class Layout:
    """The blocks of a dataset's splits, numbered on from one split to the next.

    sizes: rows of each split, in order.
    """

    sizes: Mapping[str, int]

    @property
    def _starts(self) -> dict[str, int]:
        n_blocks = [-(-rows // BLOCK_ROWS) for rows in self.sizes.values()]
        return dict(zip(self.sizes, accumulate([0, *n_blocks]), strict=False))

    @property
    def n_blocks(self) -> int:
        """Return the blocks of all splits."""
        return sum(-(-rows // BLOCK_ROWS) for rows in self.sizes.values())

    def number(self, split: str, block: int) -> int:
        """Return the number of a split's block among all."""
        return self._starts[split] + block

    def place(self, number: int) -> tuple[str, int]:
        """Return a block's split and its number there."""
        split, start = max(
            ((split, start) for split, start in self._starts.items() if start <= number and self.sizes[split]),
            key=lambda at: at[1],
        )
        return split, number - start


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
    params_b: float | None = None

    def same_work(self, other: CollectRecord) -> bool:
        """Return whether another record is of the same rows and the same model."""
        same_ids = self.ids == other.ids or None in (self.ids, other.ids)
        return same_ids and all(
            getattr(self, key) == getattr(other, key)
            for key in ("fingerprint", "split", "n_rows", "block_rows", "model")
        )


@dataclass(frozen=True, slots=True)
class Target:
    """One model's part of a logit table.

    kind: "model" or "embedding".   name: the model's, or the encoder's.
    """

    table: AnyPath
    kind: Literal["model", "embedding"]
    name: str

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

    def records(self) -> list[CollectRecord]:
        """Return the records of all collected splits."""
        splits = hive_values(self._folder, "split") if self._folder.is_dir() else []
        return [record for record in map(self.record, splits) if record is not None]


@dataclass(slots=True)
class _OpenRows:
    """Answers to a block's rows, as far as they have come."""

    rows: dict[int, Floats] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class CollectedTables:
    """Writes a model's answers: each split's logits and failed rows in parts, once a row of the split is answered."""

    def __init__(
        self,
        target: Target,
        stage: StageSpec,
        layout: Layout,
        records: Mapping[str, CollectRecord],
        answered: frozenset[str],
    ) -> None:
        """Take each split's record.   answered: the splits of which an earlier attempt has answers."""
        self.commit_s = manifest.COMMIT_S
        self._target = target
        self._stage = stage
        self._layout = layout
        self._records = dict(records)
        self._open: dict[int, _OpenRows] = {}
        self._measured = False
        self._answered = set(answered)
        self._writers = {split: PartWriter(target.parts(split)) for split in records}
        self._reasons: dict[str, str] = {}

    @property
    def n_bytes(self) -> int:
        """Return what is not written yet."""
        return sum(writer.n_bytes for split, writer in self._writers.items() if split in self._answered)

    def start(self, facts: ModelFacts) -> None:
        """Note the model's facts. Raises ConfigError if other rows were answered in another precision.

        A model's precision may follow the device that a replica has, and a collection may be continued elsewhere.
        """
        for record in (*self._records.values(), *self._target.records()):
            if record.dtype is not None and facts.dtype is not None and record.dtype != facts.dtype:
                raise ConfigError(
                    f"{self._target.name!r} answered split {record.split!r} in {record.dtype} and would continue in "
                    f"{facts.dtype}; continue on the kind of device that it started on, or remove its files in "
                    f"{self._target.table}, or choose another -o"
                )
        known = {
            "dtype": facts.dtype,
            "source": facts.source,
            "logit_kind": facts.logit_kind,
            "gflops_published": facts.gflops,
            "params_b": facts.params_b,
        }
        self._records = {split: record.model_copy(update=known) for split, record in self._records.items()}

    def add_call(self, call: Call, result: CallResult, extra: Any) -> None:
        """Keep a call's answers until their blocks are finished.

        Raises ExecutionError at the first answers of a model whose cost is neither declared nor measured.
        """
        if result.error is not None or call.probe:
            return
        collected: Collected = result_of(
            extra, ANSWERS_DEADLINE_S, f"the node that has answers of {self._stage.name!r}"
        )
        answers = collected.answers
        if not self._measured and result.accepted.any():
            self._take_measure(collected)
        start = 0
        for rows in call.rows:
            at = self._open.setdefault(rows.owner.block, _OpenRows())
            for place, row in enumerate(rows.indices, start):
                if place in answers.failures:
                    continue
                n = answers.logits.shape[1] if answers.n_options is None else int(answers.n_options[place])
                at.rows[int(row)] = answers.logits[place, :n].copy()  # a view would keep the whole call
                if answers.costs is not None:
                    at.costs[int(row)] = float(answers.costs[place])
            start += len(rows)
        first = self._open[call.rows[0].owner.block]
        for name, n in answers.counts.items():
            first.counts[name] = first.counts.get(name, 0) + n

    def add_block(self, block: Owner, example_ids: pa.Array, labels: Ints | None) -> None:
        """Take a block that is done. A row whose label names none of its options is a failed row too."""
        at = self._open.pop(block.block, None) or _OpenRows()
        names, is_model = example_ids.to_pylist(), self._target.kind == "model"
        reasons = {row: reason for row, (_, reason) in block.failures.items()}
        for row, logits in at.rows.items():
            if labels is not None and is_model and labels[row] >= len(logits):
                reasons[row] = f"its label {labels[row]} is outside its {len(logits)} options"
        failed, by_stage = failed_rows(names, [(row, self._target.name, why) for row, why in reasons.items()])
        kept = [row for row in range(len(names)) if row not in reasons]
        ids, vectors = [names[row] for row in kept], [at.rows[row] for row in kept]
        sums: dict[str, float] = {"answered": len(kept)}
        if is_model:
            known = None if labels is None else labels[kept]
            costs = np.array([at.costs[row] for row in kept]) if at.costs and self._stage.cost is None else None
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
            folder = self._target.parts(split).rows
            if self._writers[split].n_bytes and not (folder / RECORD).exists():
                make_folder(folder)
                write_json(folder / RECORD, self._records[split].model_dump())
            self._writers[split].commit()

    def close(self) -> None:
        """Write what is left. Raises DataError where a split has no answer at all."""
        self.commit()
        for split, reason in self._reasons.items():
            if split not in self._answered:
                raise DataError(f"{self._target.name!r} answered no row of split {split!r}; the first error: {reason}")

    def _take_measure(self, collected: Collected) -> None:
        self._measured = True
        known = {"gflops_measured": collected.gflops}
        self._records = {split: record.model_copy(update=known) for split, record in self._records.items()}
        record = next(iter(self._records.values()))
        per_call = None if collected.answers.costs is None else 0.0
        if self._target.kind == "model" and record_cost(self._stage, record, per_call) is None:
            raise ExecutionError(
                f"stage {self._stage.name!r}: the cost of a call is unknown, and torch counted no operations; "
                "give the stage a cost in the pool file"
            )


def record_cost(stage: StageSpec, record: CollectRecord, per_call: float | None) -> float | None:
    """Return a model's cost of one example as models.costs.model_cost does, from its record."""
    facts = ModelFacts(record.source, record.logit_kind, record.gflops_published, record.params_b)
    return model_cost(stage.cost, facts, record.gflops_measured, per_call)
