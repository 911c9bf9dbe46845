"""What a run's own tables say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.files import parquet_files, read_parquet
from cauc_ray.numbers.metrics import share
from cauc_ray.policies.policy import Policy


def summarise(out: Path, policy: Policy, batch_sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the totals of a finished run, by stage and over all.

    batch_sizes: rows in a full batch, by stage. Costs are the ledger's: what was spent, in a resumed run also on
    rows that had to be computed again, which each stage counts as repeated.
    """
    predictions, failed, ledger = (_read(out / name) for name in ("predictions", "failed", "ledger"))
    assert ledger is not None  # a run of at least one row has made a call
    answered_by, failed_at = _counts(predictions, "stage"), _counts(failed, "stage")
    n_answered, n_failed = len(predictions or ()), len(failed or ())
    n = reached = n_answered + n_failed
    stages = []
    for place, name in enumerate(policy.models):
        calls = ledger.filter(pc.field("stage") == name).to_pylist()
        answered, n_failed_here = answered_by.get(place, 0), failed_at.get(name, 0)
        computed = sum(call["accepted"] + call["deferred"] for call in calls)
        stages.append(
            {
                "name": name,
                "reached": reached,
                "answered": answered,
                "failed": n_failed_here,
                "repeated": computed - (reached - n_failed_here),
                "calls": len(calls),
                "batch_fill": sum(call["batch"] for call in calls) / max(1, len(calls) * batch_sizes[name]),
                "cost": sum(call["cost"] for call in calls),
                "compute_s": sum(call["compute_s"] for call in calls),
            }
        )
        reached -= answered + n_failed_here
    total, of_last = sum(stage["cost"] for stage in stages), policy.stages[-1].cost
    return {
        "policy_id": policy.id,
        "method": policy.method,
        "n": n,
        "n_failed": n_failed,
        "accuracy": _accuracy(predictions),
        "cost_unit": policy.cost_unit,
        "total_cost": total,
        "cost": total / n,
        "relative_cost": total / n / of_last if of_last > 0 else None,
        "expected_relative_cost": policy.expected.relative_cost,
        "last_stage_avoided": 1 - stages[-1]["reached"] / n,
        "stages": stages,
    }


def _read(folder: Path) -> pa.Table | None:
    """Return a table of a run's, or None where it has none."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    return pa.concat_tables([read_parquet(file) for file in parquet_files(folder)])


def _counts(table: pa.Table | None, column: str) -> dict[Any, int]:
    if table is None:
        return {}
    return {row["values"]: row["counts"] for row in pc.value_counts(table.column(column)).to_pylist()}


def _accuracy(predictions: pa.Table | None) -> dict[str, float] | None:
    """Return the accuracy over the answered rows that have a label, with its interval; None without any."""
    if predictions is None or "label" not in predictions.column_names:
        return None
    labels = predictions.column("label")
    n_hits = pc.sum(pc.equal(predictions.column("prediction"), labels)).as_py() or 0
    n = len(labels) - labels.null_count
    return asdict(share(n_hits, n)) if n else None
