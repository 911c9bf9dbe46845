"""A run's summary from its tables."""

import tempfile
from datetime import timedelta
from pathlib import Path

import earlier_runs
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import two_model_policy

from cauc_ray.api.online import summarise
from cauc_ray.api.summaries import RunSummary
from cauc_ray.cascade.rows import Owner
from cauc_ray.execution.ledger import RunTables, new_record

POLICY = two_model_policy()
RECORD = new_record(POLICY.id, 8, {"input": 1})
BATCH_SIZES = {"small": 8, "large": 4}
COST = {stage.name: stage.cost for stage in POLICY.stages}


def call(stage, replica, at_s, compute_s, accepted=0, deferred=0, **more):
    """Return a ledger row of a call that began so many seconds after the start."""
    rows = accepted + deferred
    return {**earlier_runs.call(stage, replica, at_s, rows, compute_s, accepted), "cost": COST[stage] * rows, **more}


def summary_of(out, calls, stages, failed=(), degraded=()):
    """Write a run of two blocks, its ledger in two files, and return its summary.

    stages: which one answered, of each row.   failed, degraded: numbers of rows.
    """
    sink = RunTables(out, RECORD, tuple(COST), degrade=True)
    for number, rows in enumerate(np.array_split(np.arange(len(stages)), 2)):
        block = Owner(number, len(rows))
        block.stages[:] = np.where(np.isin(rows, failed), -1, np.array(stages)[rows])
        block.costs[:] = np.cumsum(list(COST.values()))[block.stages]
        block.degraded[:] = np.isin(rows, degraded)
        block.failures = {place: (stages[row], "bad") for place, row in enumerate(rows) if row in failed}
        sink.add_block(block, pa.array([str(n) for n in rows]), None)
        sink.commit()
    earlier_runs.write_ledger(out, calls)
    return summarise(out, POLICY, BATCH_SIZES)


def test_rows_that_cost_other_than_predicted_fire_a_guard(tmp_path):
    share = POLICY.expected.stages[1].reached / POLICY.expected.n
    for n_deferred, name in ((round(2000 * share), "as predicted"), (2000, "all deferred")):
        calls = [call("small", 0, 0.0, 1.0, 2000 - n_deferred, n_deferred), call("large", 0, 1.0, 1.0, n_deferred)]
        summary = summary_of(tmp_path / name, calls, [0] * (2000 - n_deferred) + [1] * n_deferred)
        (guard,) = summary["guards"]
        assert (guard["name"], guard["fired"]) == ("data-shift", name == "all deferred")
        printed = str(RunSummary({"run_id": "r", **summary, "run_s": 1.0, "elapsed_s": 2.0})).split()
        assert (guard["message"] in " ".join(printed)) == guard["fired"]
        cost = COST["small"] + n_deferred / 2000 * COST["large"]
        assert guard["figures"]["cost"] == pytest.approx(cost, rel=1e-6)
        assert summary["saving"] == pytest.approx(1 - cost / COST["large"])
        assert summary["expected_saving"] == 1 - POLICY.expected.relative_cost
        assert summary["last_stage_avoided"] == pytest.approx(1 - n_deferred / 2000)
    # Rows that the first stage failed on did not avoid the last one.
    assert summary_of(tmp_path / "failed", calls, [0] * 4 + [1] * 4, failed=range(4))["last_stage_avoided"] == 0
    unknown = summarise(tmp_path / name, POLICY.model_copy(update={"expected": None}), BATCH_SIZES)
    for name in ("expected_relative_cost", "expected_saving", "expected_last_stage_avoided"):
        assert unknown[name] is None
    assert unknown["guards"] == []
    assert "(– expected)" in str(RunSummary({"run_id": "r", **unknown, "run_s": 1.0, "elapsed_s": 2.0}))


@st.composite
def ledgers(draw):
    """Return calls of some replicas, each one's after another, and some that never came back."""
    calls = []
    for stage in ("small", "large"):
        for replica in range(draw(st.integers(0 if calls else 1, 3))):
            at_s = draw(st.integers(0, 10**5)) / 100
            for _ in range(draw(st.integers(1, 6))):
                compute_s = draw(st.none() | st.integers(0, 10**4).map(lambda ms: ms / 1000))
                accepted, deferred = (0, 0) if compute_s is None else draw(st.tuples(*[st.integers(0, 4)] * 2))
                more = {
                    "device_s": None if compute_s is None else draw(st.none() | st.floats(0, 10)),
                    "queue_s": draw(st.none() | st.floats(0, 100)),
                    "batch": draw(st.integers(max(1, accepted + deferred), 9)),
                }
                calls.append(call(stage, replica, at_s, compute_s, accepted, deferred, **more))
                at_s += (compute_s or 0) + draw(st.integers(0, 1000)) / 100
    return draw(st.permutations(calls))


@given(ledgers())
def test_totals_are_what_a_slow_loop_says_and_no_order_matters(calls):
    with tempfile.TemporaryDirectory() as out:
        summary = summary_of(Path(out), calls, [0, 1, 1])
    for place, stage in enumerate(summary["stages"]):
        of_stage = [c for c in calls if c["stage"] == stage["name"]]
        compute_s = sum(c["compute_s"] or 0 for c in of_stage)
        replica_s = 0.0
        for replica in {c["replica"] for c in of_stage}:
            spans = [
                (c["started_at"], timedelta(seconds=c["compute_s"] or 0)) for c in of_stage if c["replica"] == replica
            ]
            replica_s += (max(at + took for at, took in spans) - min(at for at, _ in spans)).total_seconds()
        waited = [c for c in of_stage if c["queue_s"] is not None]
        n_waited = sum(c["batch"] for c in waited)
        devices = [c["device_s"] for c in of_stage if c["device_s"] is not None]
        expected = {
            "reached": (3, 2)[place],
            "repeated": sum(c["accepted"] + c["deferred"] for c in of_stage) - (3, 2)[place],
            "calls": len(of_stage),
            "lost_calls": sum(c["accepted"] == c["deferred"] == 0 for c in of_stage),
            "cost": sum(c["cost"] for c in of_stage),
            "compute_s": compute_s,
            "waiting_s": pytest.approx(replica_s - compute_s, abs=1e-5),
            "busy_share": pytest.approx(compute_s / replica_s, abs=1e-3) if replica_s > 0.01 else stage["busy_share"],
            "queue_s": sum(c["queue_s"] * c["batch"] for c in waited) / n_waited if waited else None,
            "device_s": sum(devices) if devices else None,
        }
        for key, value in expected.items():
            assert stage[key] == (pytest.approx(value) if isinstance(value, float) else value), key
        assert stage["waiting_s"] >= 0
        assert stage["busy_share"] is None or 0 <= stage["busy_share"] <= 1
    shares = [stage["cost_share"] for stage in summary["stages"]]
    assert shares == [None, None] if summary["total_cost"] == 0 else sum(shares) == pytest.approx(1)
