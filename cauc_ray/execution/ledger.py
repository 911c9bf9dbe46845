"""The tables that a run leaves: predictions, the ledger of model calls, the failed rows."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, ValidationError

from cauc_ray.data.files import count_rows, read_json, write_json, write_parquet
from cauc_ray.data.predictions import predictions_table
from cauc_ray.errors import ConfigError, explain
from cauc_ray.execution.controller import BlockResult
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

    block_rows: rows in a block of input, the unit of commits.   input: rows of each file, by its name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    format: Literal["cauc-run/1"] = "cauc-run/1"
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

    Raises ConfigError when there is no run, or one of something else.
    """
    path = out / "run.json"
    if not path.is_file():
        raise ConfigError(f"{out} holds no run that could be resumed; leave --resume out to start one")
    try:
        record = RunRecord.model_validate(read_json(path))
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error)}") from error
    for what in ("policy_id", "block_rows", "input"):
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

    def __init__(self, out: Path, record: RunRecord, stages: Sequence[str]) -> None:
        self._out = out
        self._record = record
        self._stages = tuple(stages)
        self._calls: list[dict[str, object]] = []
        self._n_ledgers = len(list((out / "ledger").glob("part-*.parquet")))

    def start(self, facts: Sequence[ModelFacts]) -> None:
        """Need nothing of what the models say of themselves."""

    def add_call(self, call: Call, result: CallResult, extra: object) -> None:
        """Note a call for the ledger. A failed call answered and deferred nothing and cost nothing."""
        self._calls.append(
            {
                "run_id": self._record.run_id,
                "stage": self._stages[call.stage],
                "replica": call.replica,
                "node": result.node,
                "started_at": datetime.fromtimestamp(result.started_at, UTC),
                "batch": len(call),
                "accepted": int(result.accepted.sum()),
                "deferred": result.n_deferred,
                "queue_s": max(0.0, result.started_at - call.ready_at),
                "compute_s": result.compute_s,
                "device_s": result.device_s,
                "cost": float(result.costs.sum()),
                "attempt": call.attempt,
            }
        )

    def add_block(self, result: BlockResult, example_ids: Sequence[str], labels: Ints | None) -> None:
        """Commit a finished block. One whose rows have all failed has a predictions table without rows."""
        if not (self._out / "run.json").exists():
            write_json(self._out / "run.json", self._record.model_dump())
        self.close()
        answered = result.stages >= 0
        name = f"part-{result.block:06d}.parquet"
        ids = pa.array(example_ids, pa.string())
        if result.failures:
            (self._out / "failed").mkdir(exist_ok=True)
            rows = [
                {"example_id": example_ids[row], "stage": self._stages[stage], "reason": reason}
                for row, (stage, reason) in sorted(result.failures.items())
            ]
            write_parquet(self._out / "failed" / name, pa.Table.from_pylist(rows, schema=FAILED_SCHEMA))
        (self._out / "predictions").mkdir(exist_ok=True)
        table = predictions_table(
            ids.filter(pa.array(answered)),
            result.predictions[answered],
            result.confidences[answered],
            result.stages[answered],
            result.costs[answered],
            None if labels is None else labels[answered],
        )
        write_parquet(self._out / "predictions" / name, table)

    def close(self) -> None:
        """Write the calls noted since the last time."""
        if self._calls:
            (self._out / "ledger").mkdir(exist_ok=True)
            table = pa.Table.from_pylist(self._calls, schema=LEDGER_SCHEMA)
            write_parquet(self._out / "ledger" / f"part-{self._n_ledgers:06d}.parquet", table)
            self._calls = []
            self._n_ledgers += 1
