"""Runs against the plans of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import cauc_ray
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.models.pool import load_pool
from cauc_ray.planning.plan import expected_deferral, run_stages
from cauc_ray.planning.simulation import Simulation, simulate_backlog
from cauc_ray.planning.timings import declared_timing, read_earlier_run
from cauc_ray.policies.policy import Policy
from jobs.bench.planted import SleepingStage, planted_rows, write_cascade, write_input, write_table
from jobs.bench.processes import scratch

POOLS = {
    # A call's own seconds weigh most; the first stage is the bottleneck.
    "two": (
        SleepingStage("small", 48, 0.10, 0.002, cost=1.0, deferral=0.4),
        SleepingStage("large", 16, 0.15, 0.008, replicas=3, cost=8.0),
    ),
    # No seconds of a call's own, and as much work for every replica: any stage may be the bottleneck, by a hair.
    "even": (
        SleepingStage("small", 64, 0.0, 0.004, cost=1.0, deferral=0.5),
        SleepingStage("middle", 32, 0.0, 0.016, replicas=2, cost=4.0, deferral=0.4),
        SleepingStage("large", 8, 0.0, 0.080, replicas=4, cost=20.0),
    ),
    # The middle stage is the bottleneck, and few rows go beyond it.
    "narrow": (
        SleepingStage("small", 32, 0.05, 0.004, replicas=2, cost=1.0, deferral=0.6),
        SleepingStage("middle", 24, 0.20, 0.010, replicas=2, cost=6.0, deferral=0.1),
        SleepingStage("large", 8, 0.30, 0.020, cost=30.0),
    ),
}


def plan(seconds: float = 60.0, pools: tuple[str, ...] = tuple(POOLS), slower: float = 1.0) -> dict[str, Any]:
    """Compare runs with their plans: rows a second, and how busy the stages were.

    Three pools of `saved` stages, which sleep, so that the machine's cores are not the bottleneck: a plan is about
    stages. Each has another bottleneck. A run is predicted from the seconds in the pool file; measured are its rows
    over the time from the start of its first call to the end of its last, by its ledger.

    Args:
        seconds: Predicted seconds of a run.
        pools: Pools to plan for.
        slower: Factor of the stages' seconds.
    """
    results = {}
    for name in pools:
        stages = [replace(at, per_call=at.per_call * slower, per_row=at.per_row * slower) for at in POOLS[name]]
        with scratch() as folder:
            results[name] = planned_and_run(folder, stages, seconds)
    return results


def planned_and_run(folder: Path, stages: Sequence[SleepingStage], seconds: float) -> dict[str, Any]:
    """Return the prediction of a run of this many seconds, and its measurement."""
    pool, policy = write_cascade(folder, stages, saved_model, on_failure="fail")
    n_rows = int(seconds * predict_run(pool, policy, 20_000).rows_per_s)
    predicted = predict_run(pool, policy, n_rows)
    deferral, costs = [at.deferral for at in stages[:-1]], {at.name: at.cost for at in stages}
    rows = planted_rows(np.random.default_rng(2), n_rows, deferral)
    write_table(folder / "RUN", costs, deferral, run=rows)
    inputs = write_input(folder / "input", {"example_id": rows.columns()["example_id"]})
    summary = cauc_ray.run(pool, policy, inputs, folder / "out")
    fitted = read_earlier_run(folder / "out", list(costs)).timings
    span_s = ledger_span_s(folder / "out" / "ledger")
    return {
        "rows": n_rows,
        "predicted_rows_per_s": predicted.rows_per_s,
        "measured_rows_per_s": n_rows / span_s,
        "measured_to_predicted": n_rows / span_s / predicted.rows_per_s,
        "predicted_s": predicted.window_s,
        "measured_s": span_s,
        # Pairs of a prediction, or a setting, and a measurement.
        "stages": {
            at.name: {
                "calls": [simulated.calls, measured["calls"]],
                "fill": [simulated.fill, measured["batch_fill"]],
                "computed_s": [simulated.busy * predicted.window_s * at.replicas, measured["compute_s"]],
                "busy_share": measured["compute_s"] / (at.replicas * span_s),
                "per_call_s": [at.per_call, fitted[at.name].per_call],
                "per_row_s": [at.per_row, fitted[at.name].per_row],
            }
            for at, simulated, measured in zip(stages, predicted.stages, summary["stages"], strict=True)
        },
    }


def ledger_span_s(ledger: Path) -> float:
    """Return the seconds from the start of a run's first call to the end of its last."""
    calls = pa.concat_tables(map(read_parquet, parquet_files(ledger)))
    calls = calls.filter(pc.is_valid(calls.column("compute_s")))
    started_s = calls.column("started_at").cast(pa.int64()).to_numpy() / 1e6
    return float((started_s + calls.column("compute_s").to_numpy()).max() - started_s.min())


def saved_model(number: int, at: SleepingStage) -> dict[str, Any]:
    """Return a model that answers from the run's rows and takes a stage's seconds."""
    seconds = {"seconds_per_call": at.per_call, "seconds_per_row": at.per_row}
    return {"kind": "saved", "logits": "RUN", "model": at.name, "split": "run", **seconds}


def predict_run(pool: Path, policy: Policy, n_rows: int) -> Simulation:
    """Simulate a run over this many rows with the replicas of a pool of saved stages."""
    specs = load_pool(pool).chain(policy.models)
    return simulate_backlog(run_stages(specs, [*map(declared_timing, specs)], expected_deferral(policy)), n_rows)
