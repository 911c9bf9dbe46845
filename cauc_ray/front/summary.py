"""What a run's own tables say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.numbers.intervals import share
from cauc_ray.policies.checks import as_expected
from cauc_ray.policies.policy import Policy


def summarise(out: Path, policy: Policy, batch_sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the totals of a finished run, by stage and over all.

    batch_sizes: rows in a full batch, by stage. Costs are the ledger's: what was spent, in a resumed run also on
    rows that had to be computed again, which each stage counts as repeated. Times are over a stage's replicas, each
    from the start of its first call to the end of its last: compute_s in model and policy (busy_share of it all),
    waiting_s otherwise; device_s is None without a GPU. queue_s: seconds that a row waited for its call, on average.
    lost_calls: those that brought neither an answer nor a row to go on with. Of the whole run, cost is what was spent
    for each row that was answered, None if none was, saving what that is less than the last model's, and expected_...
    what the policy foretold, None where it foretold nothing; guards say whether rows cost what it foretold.
    """
    predictions, failed, ledger = (_read(out / name) for name in ("predictions", "failed", "ledger"))
    called = {} if ledger is None else _by_stage(ledger)  # no row may have been readable
    answered_by, failed_at = _counts(predictions, "stage"), _counts(failed, "stage")
    n_answered, n_failed = len(predictions or ()), len(failed or ())
    n = n_answered + n_failed
    reached = n - failed_at.get(None, 0)
    total, of_last = sum(stage["cost"] for stage in called.values()), policy.stages[-1].cost
    stages = []
    for place, name in enumerate(policy.models):
        of = called.get(name, _NO_CALLS)
        answered, n_failed_here = answered_by.get(place, 0), failed_at.get(name, 0)
        stages.append(
            {
                "name": name,
                "reached": reached,
                "answered": answered,
                "failed": n_failed_here,
                "repeated": of["rows"] - (reached - n_failed_here),
                "calls": of["calls"],
                "lost_calls": of["lost_calls"],
                "batch_fill": of["batch"] / max(1, of["calls"] * batch_sizes[name]),
                "cost": of["cost"],
                "cost_share": of["cost"] / total if total > 0 else None,
                "compute_s": of["compute_s"],
                "device_s": of["device_s"],
                "waiting_s": of["replica_s"] - of["compute_s"],
                "busy_share": of["compute_s"] / of["replica_s"] if of["replica_s"] > 0 else None,
                "queue_s": of["queue_s"],
            }
        )
        reached -= answered + n_failed_here
    # For each answer: rows that failed saved nothing.
    cost = total / n_answered if n_answered else None
    relative = cost / of_last if cost is not None and of_last > 0 else None
    expected_relative = expected_reach = None
    if (expected := policy.expected) is not None:
        expected_relative, expected_reach = expected.relative_cost, expected.stages[-1].reached / expected.n
    return {
        "policy_id": policy.id,
        "method": policy.method,
        "n": n,
        "n_failed": n_failed,
        "degraded": _n_true(predictions, "degraded"),
        "accuracy": _accuracy(predictions),
        "cost_unit": policy.cost_unit,
        "total_cost": total,
        "cost": cost,
        "relative_cost": relative,
        "expected_relative_cost": expected_relative,
        "saving": _rest(relative),
        "expected_saving": _rest(expected_relative),
        "last_stage_avoided": 1 - stages[-1]["reached"] / n,
        "expected_last_stage_avoided": _rest(expected_reach),
        "stages": stages,
        "guards": _guards(predictions, policy),
    }


def _guards(predictions: pa.Table | None, policy: Policy) -> list[dict[str, Any]]:
    costs = np.empty(0) if predictions is None else predictions.column("cost").drop_null().to_numpy()
    if not len(costs):
        return []
    guard = as_expected(policy.expected, costs.astype(np.float64), "this input", policy.budget, policy.cost_unit)
    return [] if guard is None else [guard.model_dump()]


_NO_CALLS: dict[str, Any] = {
    **dict.fromkeys(("rows", "calls", "lost_calls", "batch"), 0),
    **dict.fromkeys(("cost", "compute_s", "replica_s"), 0.0),
    **dict.fromkeys(("device_s", "queue_s")),
}


def _by_stage(ledger: pa.Table) -> dict[str, dict[str, Any]]:
    """Return what the calls of each stage add up to.

    A call that never came back has no compute_s: of its replica's time it counts no more than its start.
    """
    started_us = pc.cast(ledger.column("started_at"), pa.int64())
    compute_s = pc.fill_null(ledger.column("compute_s"), 0.0)
    rows = pc.add(ledger.column("accepted"), ledger.column("deferred"))
    waited = pc.is_valid(ledger.column("queue_s"))
    columns = {
        "rows": rows,
        "lost_calls": pc.cast(pc.equal(rows, 0), pa.int64()),
        "compute_s": compute_s,
        "started_s": pc.divide(pc.cast(started_us, pa.float64(), safe=False), 1e6),
        "row_queue_s": pc.multiply(ledger.column("queue_s"), ledger.column("batch")),
        "rows_waited": pc.if_else(waited, ledger.column("batch"), 0),
        **{key: ledger.column(key) for key in ("stage", "replica", "batch", "cost", "device_s")},
    }
    columns["ended_s"] = pc.add(columns["started_s"], compute_s)
    calls = pa.table(columns)
    # A replica has an id of its own in every attempt at a run, so that no time between two attempts counts.
    replicas = calls.group_by(["stage", "replica"]).aggregate([("started_s", "min"), ("ended_s", "max")])
    at_work = pc.subtract(replicas.column("ended_s_max"), replicas.column("started_s_min"))
    replica_s = replicas.append_column("replica_s", at_work).group_by("stage").aggregate([("replica_s", "sum")])
    summed = ("rows", "lost_calls", "batch", "cost", "compute_s", "device_s", "row_queue_s", "rows_waited")
    totals = calls.group_by("stage").aggregate([*((key, "sum") for key in summed), ([], "count_all")])
    by_stage = {row["stage"]: row["replica_s_sum"] or 0.0 for row in replica_s.to_pylist()}
    return {row["stage"]: _of_stage(row, by_stage[row["stage"]]) for row in totals.to_pylist()}


def _of_stage(sums: Mapping[str, Any], replica_s: float) -> dict[str, Any]:
    rows_waited = sums["rows_waited_sum"]
    return {
        **{key: sums[f"{key}_sum"] for key in ("rows", "lost_calls", "batch", "cost", "compute_s", "device_s")},
        "calls": sums["count_all"],
        # The clocks that say when and how long differ by microseconds.
        "replica_s": max(replica_s, sums["compute_s_sum"]),
        "queue_s": sums["row_queue_s_sum"] / rows_waited if rows_waited else None,
    }


def _rest(share: float | None) -> float | None:
    return None if share is None else 1 - share


def _read(folder: Path) -> pa.Table | None:
    """Return a table of a run's, or None where it has none."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return None
    # Where only some parts have a column, the rows of the others have nothing there.
    return pa.concat_tables([read_parquet(file) for file in parquet_files(folder)], promote_options="default")


def _counts(table: pa.Table | None, column: str) -> dict[Any, int]:
    if table is None:
        return {}
    return {row["values"]: row["counts"] for row in pc.value_counts(table.column(column)).to_pylist()}


def _n_true(table: pa.Table | None, column: str) -> int:
    """Return how many rows are true in a column, 0 where there is none."""
    if table is None or column not in table.column_names:
        return 0
    return pc.sum(table.column(column)).as_py() or 0


def _accuracy(predictions: pa.Table | None) -> dict[str, float] | None:
    """Return the accuracy over the answered rows that have a label, with its interval; None without any."""
    if predictions is None or "label" not in predictions.column_names:
        return None
    labels = predictions.column("label")
    n_hits = pc.sum(pc.equal(predictions.column("prediction"), labels)).as_py() or 0
    n = len(labels) - labels.null_count
    return asdict(share(n_hits, n)) if n else None
