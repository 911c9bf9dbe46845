"""What a run's own totals and ledger say of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.execution.ledger import parts_of
from cauc_ray.execution.manifest import Totals
from cauc_ray.files.parquet import parquet_below, read_parquet
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.intervals import Mean, share
from cauc_ray.policies.checks import as_expected
from cauc_ray.policies.policy import Policy


def summarise(out: AnyPath, policy: Policy, batch_sizes: Mapping[str, int]) -> dict[str, Any]:
    """Return the totals of a finished run, by stage and over all.

    batch_sizes: rows in a full batch, by stage. Costs are the ledger's: what was spent, in a resumed run also on
    rows that had to be computed again, which each stage counts as repeated. Times are over a stage's replicas, each
    from the start of its first call to the end of its last: compute_s in model and policy (busy_share of it all),
    waiting_s otherwise; device_s is None without a GPU. queue_s: seconds that a row waited for its call, on average.
    lost_calls: those that brought neither an answer nor a row to go on with. Of the whole run, cost is what was spent
    for each row that was answered, None if none was, saving what that is less than the last model's, and expected_...
    what the policy predicts, None where it predicts nothing; guards say whether rows cost what it predicts.
    """
    totals, called = parts_of(out).committed().totals, _by_stage(out / "ledger")
    answered_by, failed_at = totals.get("answered", Counter()), totals.get("failed", Counter())
    n_answered, n_failed = answered_by.total(), failed_at.total()
    n = n_answered + n_failed
    reached = n - failed_at[""]
    total, of_last = sum(stage["cost"] for stage in called.values()), policy.stages[-1].cost
    stages = []
    for name in policy.models:
        of = called.get(name, _NO_CALLS)
        answered, n_failed_here = answered_by[name], failed_at[name]
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
        "degraded": totals.get("rows", Counter())["degraded"],
        "accuracy": _accuracy(totals),
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
        "guards": _guards(totals, n_answered, policy),
    }


def _guards(totals: Totals, n: int, policy: Policy) -> list[dict[str, Any]]:
    if not n:
        return []
    own = Mean.of_sums(n, totals["cost"]["sum"], totals["cost"]["squares"])
    guard = as_expected(policy.expected, own, "this input", policy.budget, policy.cost_unit)
    return [] if guard is None else [guard.model_dump()]


_NO_CALLS: dict[str, Any] = {
    **dict.fromkeys(("rows", "calls", "lost_calls", "batch"), 0),
    **dict.fromkeys(("cost", "compute_s", "replica_s"), 0.0),
    **dict.fromkeys(("device_s", "queue_s")),
}


_SUMMED = ("rows", "lost_calls", "batch", "cost", "compute_s", "device_s", "row_queue_s", "rows_waited", "calls")


def _by_stage(ledger: AnyPath) -> dict[str, dict[str, Any]]:
    """Return what the calls of each stage add up to, from one file after the other."""
    # A replica has a number of its own in every attempt at a run, so that no time between two attempts counts.
    by_replica = [_by_replica(read_parquet(file)) for file in (parquet_below(ledger) if ledger.is_dir() else ())]
    if not by_replica:  # no row may have been readable
        return {}
    replicas = _grouped(pa.concat_tables(by_replica))
    at_work = pc.subtract(replicas.column("ended_s"), replicas.column("started_s"))
    stages = (
        replicas.append_column("replica_s", at_work)
        .group_by("stage")
        .aggregate([(key, "sum") for key in (*_SUMMED, "replica_s")])
    )
    return {row["stage"]: _of_stage(row) for row in stages.to_pylist()}


def _by_replica(ledger: pa.Table) -> pa.Table:
    """Return what the calls of each replica add up to, and from when to when they were.

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
        "calls": pa.repeat(1, len(ledger)),
        **{key: ledger.column(key) for key in ("stage", "replica", "batch", "cost", "device_s")},
    }
    columns["ended_s"] = pc.add(columns["started_s"], compute_s)
    return _grouped(pa.table(columns))


def _grouped(calls: pa.Table) -> pa.Table:
    """Return sums and ends of each replica's calls under the columns' own names."""
    keys = ["stage", "replica"]
    how = [*((key, "sum") for key in _SUMMED), ("started_s", "min"), ("ended_s", "max")]
    found = calls.group_by(keys).aggregate(how).select([*keys, *map("_".join, how)])
    return found.rename_columns([*keys, *(key for key, _ in how)])


def _of_stage(sums: Mapping[str, Any]) -> dict[str, Any]:
    rows_waited = sums["rows_waited_sum"]
    return {
        **{key: sums[f"{key}_sum"] for key in _SUMMED},
        # The clocks that say when and how long differ by microseconds.
        "replica_s": max(sums["replica_s_sum"], sums["compute_s_sum"]),
        "queue_s": sums["row_queue_s_sum"] / rows_waited if rows_waited else None,
    }


def _rest(share: float | None) -> float | None:
    return None if share is None else 1 - share


def _accuracy(totals: Totals) -> dict[str, float] | None:
    """Return the accuracy over the answered rows that have a label, with its interval; None without any."""
    rows = totals.get("rows", Counter())
    return asdict(share(rows["right"], rows["labelled"])) if rows["labelled"] else None
