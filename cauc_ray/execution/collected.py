"""The tables that a collection leaves: each split's record, its parts, its failed rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import ray
from pydantic import BaseModel, ConfigDict, ValidationError

from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.rows import Call, Owner
from cauc_ray.cascade.worker import Collected
from cauc_ray.data.logits import FAILED
from cauc_ray.data.writing import logit_columns
from cauc_ray.errors import ConfigError, DataError, ExecutionError, explain
from cauc_ray.execution.ledger import FAILED_SCHEMA
from cauc_ray.files.atomic import make_folder
from cauc_ray.files.documents import read_json, write_json
from cauc_ray.files.parquet import count_rows, open_parquet, parquet_files, write_parquet
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.costs import model_cost
from cauc_ray.models.pool import StageSpec
from cauc_ray.numbers.types import Floats, Ints

# The unit of commits: so many rows are done again at most when a collection is ended.
BLOCK_ROWS = 256
# Other readers of hive-partitioned Parquet pass over names that begin so.
RECORD = "_collect.json"
_COUNTS = b"cauc.counts"


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
    """What a collected split says of itself (_collect.json), so that it is gone on with and not mixed with another.

    fingerprint, split, n_rows, block_rows, model: what must be the same for that; so must ids (of all rows, a digest)
    and dtype, where both records have them.   The others are what the model says of itself and what was measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cauc-collect/1"] = "cauc-collect/1"
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
        """Say whether another record is of the same rows and the same model."""
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

    table: Path
    kind: Literal["model", "embedding"]
    name: str

    def folder(self, split: str) -> Path:
        """Return where the rows of a split stand."""
        return self.table / f"{self.kind}={self.name}" / f"split={split}"

    def failed_folder(self, split: str) -> Path:
        """Return where the failed rows of a split stand."""
        return self.table / FAILED / f"{self.kind}={self.name}" / f"split={split}"

    def done(self, wanted: CollectRecord) -> dict[int, int]:
        """Return the blocks of a split that are there, and how many rows each had.

        Raises ConfigError when what stands there is of other rows or another model, or nobody says of which.
        """
        folder = self.folder(wanted.split)
        if not folder.exists():
            return {}
        found = self.record(wanted.split)
        if found is None or not found.same_work(wanted):
            other = "dataset, seed or layout" if found and found.model == wanted.model else "model of that name"
            whose = "no collection" if found is None else f"another {other}"
            raise ConfigError(f"{folder} is of {whose}; remove it or choose another -o")
        done: dict[int, int] = {}
        n_blocks = -(-wanted.n_rows // wanted.block_rows)
        for path in parquet_files(folder) if any(folder.glob("*.parquet")) else ():
            block = re.fullmatch(r"part-(\d{6})\.parquet", path.name)
            if block is None or int(block[1]) >= n_blocks:
                raise DataError(f"{path} is none of the parts that were collected there; remove it")
            done[int(block[1])] = count_rows(path) + count_rows(self.failed_folder(wanted.split) / path.name)
        return done

    def record(self, split: str) -> CollectRecord | None:
        """Return what a collected split says of itself, None where nothing was collected."""
        path = self.folder(split) / RECORD
        if not path.is_file():
            return None
        try:
            return CollectRecord.model_validate(read_json(path))
        except ValidationError as error:
            raise DataError(f"{path}: {explain(error)}") from error

    def records(self) -> list[CollectRecord]:
        """Return what all collected splits say of themselves."""
        folders = sorted((self.table / f"{self.kind}={self.name}").glob("split=*"))
        records = [self.record(folder.name.removeprefix("split=")) for folder in folders]
        return [record for record in records if record is not None]

    def counts(self, split: str) -> dict[str, int]:
        """Return how often what the model counts has happened, by its name."""
        totals: dict[str, int] = {}
        for path in parquet_files(self.folder(split)):
            with open_parquet(path) as file:
                own = json.loads((file.schema_arrow.metadata or {}).get(_COUNTS, b"{}"))
            for name, n in own.items():
                totals[name] = totals.get(name, 0) + n
        return totals


@dataclass(slots=True)
class _OpenRows:
    """Answers to a block's rows, as far as they have come."""

    rows: dict[int, Floats] = field(default_factory=dict)
    costs: dict[int, float] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class CollectedTables:
    """Writes a model's answers in blocks, each whole or not at all: first its failed rows, then its logits."""

    def __init__(self, target: Target, stage: StageSpec, layout: Layout, records: Mapping[str, CollectRecord]) -> None:
        self._target = target
        self._stage = stage
        self._layout = layout
        self._records = dict(records)
        self._open: dict[int, _OpenRows] = {}
        self._measured = False

    def start(self, facts: ModelFacts) -> None:
        """Note what the model says of itself. Raises ConfigError where other rows were answered in another precision.

        A model's precision may follow the device that a replica has, and a collection may be gone on with elsewhere.
        """
        for record in (*self._records.values(), *self._target.records()):
            if record.dtype is not None and facts.dtype is not None and record.dtype != facts.dtype:
                raise ConfigError(
                    f"{self._target.name!r} has answered split {record.split!r} in {record.dtype} and would go on in "
                    f"{facts.dtype}; collect it on the kind of device that it began on, or remove what "
                    f"{self._target.table} has of it, or choose another -o"
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

        Raises ExecutionError at the first answers of a model whose cost nobody declares and nothing measures.
        """
        if result.error is not None or call.probe:
            return
        collected: Collected = ray.get(extra)
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
        """Commit a finished block. A row whose label names none of its options is a failed row too."""
        at = self._open.pop(block.block, None) or _OpenRows()
        names = example_ids.to_pylist()
        reasons = {row: reason for row, (_, reason) in block.failures.items()}
        for row, logits in at.rows.items():
            if labels is not None and self._target.kind == "model" and labels[row] >= len(logits):
                reasons[row] = f"its label {labels[row]} is outside its {len(logits)} options"
        split, number = self._layout.place(block.block)
        name = f"part-{number:06d}.parquet"
        folder, failed = self._target.folder(split), self._target.failed_folder(split)
        make_folder(folder)
        if not (folder / RECORD).exists():
            write_json(folder / RECORD, self._records[split].model_dump())
        (failed / name).unlink(missing_ok=True)  # of an attempt that ended before this block was committed
        if reasons:
            make_folder(failed)
            stage = self._target.name
            told = [{"example_id": names[r], "stage": stage, "reason": why} for r, why in sorted(reasons.items())]
            write_parquet(failed / name, pa.Table.from_pylist(told, schema=FAILED_SCHEMA))
        kept = [row for row in range(len(names)) if row not in reasons]
        ids = [names[row] for row in kept]
        vectors = [at.rows[row] for row in kept]
        if self._target.kind == "embedding":
            table = pa.table({"example_id": pa.array(ids, pa.string()), "embedding": _lists(vectors)})
        else:
            costs = np.array([at.costs[row] for row in kept]) if at.costs and self._stage.cost is None else None
            table = logit_columns(ids, None if labels is None else labels[kept], vectors, costs)
        write_parquet(folder / name, table.replace_schema_metadata({_COUNTS: json.dumps(at.counts)}))

    def close(self) -> None:
        """Have nothing left to write."""

    def _take_measure(self, collected: Collected) -> None:
        self._measured = True
        known = {"gflops_measured": collected.gflops}
        self._records = {split: record.model_copy(update=known) for split, record in self._records.items()}
        record = next(iter(self._records.values()))
        per_call = None if collected.answers.costs is None else 0.0
        if self._target.kind == "model" and record_cost(self._stage, record, per_call) is None:
            raise ExecutionError(
                f"stage {self._stage.name!r}: nobody says what a call costs, and torch saw no operation to count; "
                "give the stage a cost in the pool file"
            )


def record_cost(stage: StageSpec, record: CollectRecord, per_call: float | None) -> float | None:
    """Return a model's cost of one example as models.costs.model_cost does, from what its record says."""
    facts = ModelFacts(record.source, record.logit_kind, record.gflops_published, record.params_b)
    return model_cost(stage.cost, facts, record.gflops_measured, per_call)


def _lists(vectors: Sequence[Floats]) -> pa.Array:
    return pa.array([np.asarray(vector, dtype=np.float32) for vector in vectors], pa.list_(pa.float32()))
