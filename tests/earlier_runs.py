"""Folders of earlier runs, with ledgers of given calls."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa

from cauc_ray.execution.ledger import LEDGER_SCHEMA, new_record
from cauc_ray.files.documents import make_folder, write_json
from cauc_ray.files.parquet import write_parquet

START = datetime(2026, 1, 1, tzinfo=UTC)


def call(stage, replica, at_s, rows, compute_s, accepted=None):
    """Return a row of a ledger."""
    accepted = rows if accepted is None else accepted
    measured = {"stage": stage, "replica": replica, "started_at": START + timedelta(seconds=at_s), "batch": rows}
    measured |= {"accepted": accepted, "deferred": rows - accepted, "compute_s": compute_s}
    return {"run_id": "r", "node": "n", "queue_s": 0.0, "device_s": None, "cost": 1.0, "attempt": 1, **measured}


def write_ledger(folder, calls):
    make_folder(folder / "ledger")
    half = len(calls) // 2
    for part, rows in enumerate((calls[:half], calls[half:])):
        write_parquet(folder / "ledger" / f"part-{part}.parquet", pa.Table.from_pylist(rows, schema=LEDGER_SCHEMA))


def write_run(folder, calls, policy_id="p"):
    write_ledger(folder, calls)
    write_json(folder / "run.json", new_record(policy_id, 8, {"a": 1}).model_dump())
    return folder
