"""The tables that a run leaves: predictions, the ledger of model calls, the failed rows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, ConfigDict, ValidationError

from cauc_ray.data.files import count_rows, read_json, read_parquet, write_json, write_parquet
from cauc_ray.data.predictions import predictions_table
from cauc_ray.errors import ConfigError, explain
from cauc_ray.execution.blocks import BlockResult
from cauc_ray.execution.messages import Call, CallResult
from cauc_ray.models.answers import ModelFacts
from cauc_ray.numbers.types import Ints

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
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output {path} cannot be made: {error.strerror}") from error
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
    file by its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cauc-run/2"] = "cauc-run/2"
    run_id: str
    policy_id: str
    block_rows: int
    input: dict[str, int]


def new_record(policy_id: str, block_rows: int, input_rows: dict[str, int]) -> RunRecord:
    """Return the record of a run that starts now; its id is the time in UTC and a few random digits."""
    run_id = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"
    return RunRecord(run_id=run_id, policy_id=policy_id, block_rows=block_rows, input=input_rows)


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
    for what in ("policy_id", "input"):
        if getattr(record, what) != getattr(now, what):
            raise ConfigError(f"the run in {out} is of another {what.removesuffix('_id')}; start a new one elsewhere")
    return record


def committed_blocks(out: Path) -> dict[int, int]:
    """Return the blocks of input whose predictions are there, and how many rows each had."""
    return {
        int(path.stem.removeprefix("part-")): count_rows(path) + count_rows(out / "failed" / path.name)
        for path in (out / "predictions").glob("part-*.parquet")
    }


class RunTables:
    """Writes a run's tables part by part, each part whole or not at all.

    A block is committed by the renaming of its predictions: the ledger rows of the calls that led there, and its
    failures, are written before.
    """

    def __init__(self, out: Path, record: RunRecord, stages: Sequence[str], *, degrade: bool, shard: int) -> None:
        """Take the run's folder, its record and its stages' names.

        degrade: whether rows tell if they were.   shard: of the run, whose controller this is for.
        """
        self._out = out
        self._record = record
        self._stages = tuple(stages)
        self._degrade = degrade
        self._shard = shard
        self._calls: list[tuple[object, ...]] = []

    def start(self, facts: ModelFacts) -> None:
        """Need nothing of what the models say of themselves."""

    def add_call(self, call: Call, result: CallResult, extra: object) -> None:
        """Note a call for the ledger. A failed call answered and deferred nothing and cost nothing."""
        self._calls.append(
            (
                self._record.run_id,
                self._stages[call.stage],
                call.replica,
                result.node,
                int(1e6 * result.started_at),
                len(call),
                int(result.accepted.sum()),
                result.n_deferred,
                max(0.0, result.started_at - call.ready_at),
                result.compute_s,
                result.device_s,
                float(result.costs.sum()),
                call.attempt,
            )
        )

    def add_block(self, result: BlockResult, example_ids: pa.Array, labels: Ints | None) -> None:
        """Commit a finished block. One whose rows have all failed has a predictions table without rows."""
        self._write_record()
        self._write_calls(f"part-{result.block:06d}")
        answered = result.stages >= 0
        name = f"part-{result.block:06d}.parquet"
        if result.failures:
            (self._out / "failed").mkdir(exist_ok=True)
            rows = [
                {"example_id": example_ids[row].as_py(), "stage": self._name(stage), "reason": reason}
                for row, (stage, reason) in sorted(result.failures.items())
            ]
            write_parquet(self._out / "failed" / name, pa.Table.from_pylist(rows, schema=FAILED_SCHEMA))
        else:
            # A controller that died just before it committed the block may have left failures that are none now.
            (self._out / "failed" / name).unlink(missing_ok=True)
        (self._out / "predictions").mkdir(exist_ok=True)
        table = predictions_table(
            example_ids.filter(pa.array(answered)),
            result.predictions[answered],
            result.confidences[answered],
            result.stages[answered],
            result.costs[answered],
            None if labels is None else labels[answered],
        )
        if self._degrade:
            table = table.append_column("degraded", pa.array(result.degraded[answered]))
        write_parquet(self._out / "predictions" / name, table)

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
        folder.mkdir(exist_ok=True)
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
