"""The tables that a run leaves: predictions, the ledger of model calls, the failed rows."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, ValidationError

from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.rows import Call, Owner
from cauc_ray.data.blocks import ids_digest
from cauc_ray.errors import ConfigError, DataError, explain
from cauc_ray.files.atomic import make_folder
from cauc_ray.files.documents import read_json, write_json
from cauc_ray.files.parquet import open_parquet, read_parquet, write_parquet
from cauc_ray.models.answers import ModelFacts
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.predictions import predictions_table

LEDGER_SCHEMA = pa.schema(
    [
        ("run_id", pa.string()),
        ("stage", pa.string()),
        ("replica", pa.int32()),
        ("node", pa.string()),
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("batch", pa.int32()),
        ("accepted", pa.int32()),
        ("deferred", pa.int32()),
        ("queue_s", pa.float64()),
        ("compute_s", pa.float64()),
        ("device_s", pa.float64()),
        ("cost", pa.float64()),
        ("attempt", pa.int32()),
    ]
)
# In the metadata of a part of predictions: the digest of all its block's ids, of rows that failed too.
_IDS = b"cauc.ids"
FAILED_SCHEMA = pa.schema([("example_id", pa.string()), ("stage", pa.string()), ("reason", pa.string())])


def require_new(path: Path) -> None:
    """Raise ConfigError when a folder to be made exists and is not an empty folder."""
    try:
        taken = path.exists() and (not path.is_dir() or any(path.iterdir()))
    except OSError as error:
        raise ConfigError(f"output {path} cannot be made: {error.strerror}") from error
    if taken:
        raise ConfigError(f"output {path} exists and is not an empty folder; choose another or remove it")


@contextmanager
def new_folder(path: Path) -> Iterator[None]:
    """Make a folder, and the ones above it, for the length of the block; take back all that stay empty if it fails.

    Raises ConfigError when the folder exists and is not empty, or cannot be made.
    """
    require_new(path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folder(path)
    try:
        yield
    except BaseException:
        # Deepest first; one that is not empty stays, and with it all above.
        below = sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True)
        with suppress(OSError):
            for folder in (*below, *made):
                folder.rmdir()
        raise


class RunRecord(BaseModel):
    """What a run's folder says of it (run.json), so that a resumption is of the same run.

    block_rows: most rows in a block of input, the unit of commits.   input: what it is of, such as the rows of each
    file by its name.   costs: of the policy's calls, which its id leaves out; null where calls tell
    their own, and in records from before.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cauc-run/2"] = "cauc-run/2"
    run_id: str
    policy_id: str
    block_rows: int
    input: dict[str, int]
    costs: tuple[float, ...] | None = None


def new_record(
    policy_id: str, block_rows: int, input_rows: dict[str, int], costs: tuple[float, ...] | None = None
) -> RunRecord:
    """Return the record of a run that starts now; its id is the time in UTC and a few random digits."""
    run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    return RunRecord(run_id=run_id, policy_id=policy_id, block_rows=block_rows, input=input_rows, costs=costs)


def resumed_record(out: Path, now: RunRecord) -> RunRecord:
    """Return the record of the run in a folder, which must be of the policy and input of now.

    Its blocks are as they were. Raises ConfigError when there is no run, or one of something else.
    """
    path = out / "run.json"
    if not path.is_file():
        raise ConfigError(f"{out} holds no run that could be resumed; leave --resume out to start one")
    try:
        record = RunRecord.model_validate(read_json(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error)}") from error
    for what, of in (("policy_id", "policy"), ("input", "input"), ("costs", "policy with other costs")):
        if getattr(record, what) != getattr(now, what):
            raise ConfigError(f"the run in {out} is of another {of}; start a new one elsewhere")
    return record


@dataclass(frozen=True, slots=True)
class Committed:
    """What a run has committed.

    rows: of each block, failed ones too.   ids: the digest of each block's ids.   to_retry: of blocks that are to be
    done again for their failed rows, these rows' ids; None for all rows, where some could not be read and may have had
    no names.   n_failed: rows that models failed on, those to be tried again left out.
    """

    rows: Mapping[int, int]
    ids: Mapping[int, str]
    to_retry: Mapping[int, frozenset[str] | None]
    n_failed: int

    @property
    def done(self) -> dict[int, str]:
        """Return the blocks of which nothing is left to do, with the digests of their ids."""
        return {block: ids for block, ids in self.ids.items() if block not in self.to_retry}

    @property
    def n_done(self) -> int:
        """Return the rows that are done with."""
        again = (self.rows[block] if ids is None else len(ids) for block, ids in self.to_retry.items())
        return sum(self.rows.values()) - sum(again)


def committed(out: Path, *, retry_failed: bool = False) -> Committed:
    """Return what a run has committed.   retry_failed: its failed rows are to be tried again.

    Raises DataError for a part that does not name its rows, and where an id that failed is more than once in its
    block: nobody could tell which row it was.
    """
    rows, ids, n_failed = {}, {}, 0
    to_retry: dict[int, frozenset[str] | None] = {}
    for path in (out / "predictions").glob("part-*.parquet"):
        block, failed = _block_of(path), out / "failed" / path.name
        with open_parquet(path) as file:
            rows[block], ids[block] = file.metadata.num_rows, _ids_of(path, file.schema_arrow)
        if not failed.exists():
            continue
        table = read_parquet(failed)
        rows[block] += table.num_rows
        if retry_failed and table.column("stage").null_count:
            to_retry[block] = None
        elif retry_failed and table.num_rows:
            to_retry[block] = names = frozenset(table.column("example_id").to_pylist())
            if len(names) < table.num_rows:
                raise DataError(f"{failed} names an example_id twice, so that its rows cannot be tried again")
        else:
            n_failed += table.num_rows - table.column("stage").null_count
    return Committed(rows, ids, to_retry, n_failed)


def _ids_of(path: Path, schema: pa.Schema) -> str:
    ids = (schema.metadata or {}).get(_IDS)
    if ids is None:
        raise DataError(f"{path} is of an earlier version, whose runs cannot be resumed; start a new one elsewhere")
    return str(ids.decode())


def failures_by_stage(out: Path) -> tuple[dict[str, int], str]:
    """Return how many rows each stage's model failed on, and the most common reason."""
    stages, reasons = Counter[str](), Counter[str]()
    for path in (out / "failed").glob("part-*.parquet"):
        failed = read_parquet(path)
        failed = failed.filter(pc.is_valid(failed.column("stage")))
        stages.update(failed.column("stage").to_pylist())
        reasons.update(failed.column("reason").to_pylist())
    return dict(stages), reasons.most_common(1)[0][0] if reasons else ""


def repair(out: Path) -> None:
    """Take rows that have an answer out of failed/: a retry was ended between its two writes."""
    for path in (out / "failed").glob("part-*.parquet"):
        answered = out / "predictions" / path.name
        if not answered.exists():
            continue  # the block is done anew
        failed = read_parquet(path)
        kept = _without(failed, read_parquet(answered).column("example_id"))
        if kept.num_rows < failed.num_rows:
            _write_failed(path, kept)


def _write_failed(path: Path, table: pa.Table) -> None:
    """Write a block's failed rows; there is no file where there are none."""
    if table.num_rows:
        make_folder(path.parent)
        write_parquet(path, table)
    else:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder is there only if a row failed
            path.parent.rmdir()


def _without(table: pa.Table, example_ids: pa.Array | pa.ChunkedArray) -> pa.Table:
    """Return a table's rows whose ids are not among others."""
    return table.filter(pc.invert(pc.is_in(table.column("example_id"), value_set=example_ids)))


def _block_of(path: Path) -> int:
    return int(path.stem.removeprefix("part-"))


class RunTables:
    """Writes a run's tables part by part, each part whole or not at all.

    A block is committed by the renaming of its predictions: the ledger rows of the calls that led there, and its
    failures, are written before.
    """

    def __init__(
        self,
        out: Path,
        record: RunRecord,
        stages: Sequence[str],
        *,
        degrade: bool,
        shard: int,
        retried: frozenset[int] = frozenset(),
    ) -> None:
        """Take the run's folder, its record and its stages' names.

        degrade: whether rows tell if they were.   shard: of the run, whose controller this is for.
        retried: blocks that are committed, of which only some rows are done again.
        """
        self._out = out
        self._record = record
        self._stages = tuple(stages)
        self._degrade = degrade
        self._shard = shard
        self._retried = retried
        self._calls: list[tuple[object, ...]] = []

    def start(self, facts: ModelFacts) -> None:
        """Need nothing of what the models say of themselves."""

    def add_call(self, call: Call, result: CallResult, extra: object) -> None:
        """Note a call for the ledger. A failed call, or a probe, accepted and deferred nothing and cost nothing."""
        n_accepted, n_deferred, cost = int(result.accepted.sum()), result.n_deferred, float(result.costs.sum())
        if call.probe:
            n_accepted, n_deferred, cost = 0, 0, 0.0
        self._calls.append(
            (
                self._record.run_id,
                self._stages[call.stage],
                call.replica,
                result.node,
                int(1e6 * result.started_at),
                len(call),
                n_accepted,
                n_deferred,
                max(0.0, result.started_at - call.ready_at),
                result.compute_s,
                result.device_s,
                cost,
                call.attempt,
            )
        )

    def add_block(self, block: Owner, example_ids: pa.Array, labels: Ints | None) -> None:
        """Commit a finished block. One whose rows have all failed has a predictions table without rows."""
        self._write_record()
        self._write_calls(f"part-{block.block:06d}")
        answered = block.stages >= 0
        name = f"part-{block.block:06d}.parquet"
        reasons = [
            {"example_id": example_ids[row].as_py(), "stage": self._name(stage), "reason": reason}
            for row, (stage, reason) in sorted(block.failures.items())
        ]
        failed = pa.Table.from_pylist(reasons, schema=FAILED_SCHEMA)
        make_folder(self._out / "predictions")
        table = predictions_table(
            example_ids.filter(pa.array(answered)),
            block.predictions[answered],
            block.confidences[answered],
            block.stages[answered],
            block.costs[answered],
            None if labels is None else labels[answered],
        )
        if self._degrade:
            table = table.append_column("degraded", pa.array(block.degraded[answered]))
        path, failed_path = self._out / "predictions" / name, self._out / "failed" / name
        ids = ids_digest(example_ids.to_pylist())
        if block.block in self._retried:
            # The answers first: a row that is in both tables for a moment is taken out of failed by repair().
            before = read_parquet(path)
            kept = _without(before, example_ids)
            if kept.num_rows:
                ids = _ids_of(path, before.schema)
            whole = pa.concat_tables([kept, table], promote_options="default")
            write_parquet(path, whole.replace_schema_metadata({_IDS: ids}))
            _write_failed(failed_path, failed)
        else:
            # A controller that died just before it committed the block may have left failures that are none now.
            _write_failed(failed_path, failed)
            write_parquet(path, table.replace_schema_metadata({_IDS: ids}))

    def close(self) -> None:
        """Write the calls noted since the last block."""
        self._write_calls(f"part-end-{self._shard}")

    def _write_record(self) -> None:
        """Write what the run is of, before anything else of it: without that nobody could resume it."""
        if not (self._out / "run.json").exists():
            write_json(self._out / "run.json", self._record.model_dump())

    def _write_calls(self, name: str) -> None:
        """Write the calls noted since the last time, under a free name: an earlier attempt may have written some."""
        if not self._calls:
            return
        self._write_record()
        folder = self._out / "ledger"
        make_folder(folder)
        names = (name if n == 0 else f"{name}-{n}" for n in count())
        path = next(path for path in (folder / f"{name}.parquet" for name in names) if not path.exists())
        # Column by column: from dates or rows, Arrow would import pandas, which takes a second.
        columns = [
            pa.array(values, pa.int64()).cast(column.type)
            if column.name == "started_at"
            else pa.array(values, column.type)
            for values, column in zip(zip(*self._calls, strict=True), LEDGER_SCHEMA, strict=True)
        ]
        write_parquet(path, pa.Table.from_arrays(columns, schema=LEDGER_SCHEMA))
        self._calls = []

    def _name(self, stage: int) -> str | None:
        """Return a stage's name, None for rows that could not be read."""
        return self._stages[stage] if stage >= 0 else None


def next_replica(out: Path) -> int:
    """Return the number above those of all replicas in a run's ledger."""
    if not (out / "ledger").is_dir():
        return 0
    numbers = [pc.max(read_parquet(path).column("replica")).as_py() for path in (out / "ledger").glob("*.parquet")]
    return 1 + max((number for number in numbers if number is not None), default=-1)
