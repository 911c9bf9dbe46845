"""The tables that a run leaves: predictions, the ledger of model calls, the failed rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from cauc_ray.data.files import write_parquet
from cauc_ray.data.predictions import predictions_table
from cauc_ray.errors import ConfigError
from cauc_ray.execution.controller import BlockResult
from cauc_ray.execution.messages import Call, CallResult
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


class RunTables:
    """Writes a run's tables part by part, each part whole or not at all.

    A call's ledger row is written before the predictions that rest on it.
    """

    def __init__(self, out: Path, run_id: str, stages: Sequence[str]) -> None:
        self._out = out
        self._run_id = run_id
        self._stages = tuple(stages)
        self._calls: list[dict[str, object]] = []
        self._n_ledgers = 0

    def add_call(self, call: Call, result: CallResult) -> None:
        """Note a call for the ledger. A failed call answered and deferred nothing and cost nothing."""
        accepted = int(result.accepted.sum())
        self._calls.append(
            {
                "run_id": self._run_id,
                "stage": self._stages[call.stage],
                "replica": call.replica,
                "node": result.node,
                "started_at": datetime.fromtimestamp(result.started_at, UTC),
                "batch": len(call),
                "accepted": accepted,
                "deferred": len(result.accepted) - accepted,
                "queue_s": max(0.0, result.started_at - call.ready_at),
                "compute_s": result.compute_s,
                "device_s": result.device_s,
                "cost": float(result.costs.sum()),
                "attempt": call.attempt,
            }
        )

    def add_block(self, result: BlockResult, example_ids: Sequence[str], labels: Ints | None) -> None:
        """Write a finished block's predictions, and its failures if there are any, after the calls that led there."""
        self.write_ledger()
        answered = result.stages >= 0
        name = f"part-{result.block:06d}.parquet"
        ids = pa.array(example_ids, pa.string())
        if answered.any():
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
        if result.failures:
            (self._out / "failed").mkdir(exist_ok=True)
            rows = [
                {"example_id": example_ids[row], "stage": self._stages[stage], "reason": reason}
                for row, (stage, reason) in sorted(result.failures.items())
            ]
            write_parquet(self._out / "failed" / name, pa.Table.from_pylist(rows, schema=FAILED_SCHEMA))

    def write_ledger(self) -> None:
        """Write the calls noted since the last time."""
        if self._calls:
            (self._out / "ledger").mkdir(exist_ok=True)
            table = pa.Table.from_pylist(self._calls, schema=LEDGER_SCHEMA)
            write_parquet(self._out / "ledger" / f"part-{self._n_ledgers:06d}.parquet", table)
            self._calls = []
            self._n_ledgers += 1
