"""What a plan predicts of runs and services, held against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import cauc_ray
from cauc_ray.errors import ExecutionError
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.models.pool import load_pool
from cauc_ray.planning.plan import ROUTER, expected_deferral, run_stages, served_stages
from cauc_ray.planning.simulation import (
    Latency,
    Simulation,
    Window,
    settled_window,
    simulate_arrivals,
    simulate_backlog,
    simulate_trace,
)
from cauc_ray.planning.sizing import MOST_LOAD, most_rate
from cauc_ray.planning.stages import with_replicas
from cauc_ray.planning.timings import declared_timing, read_earlier_run
from cauc_ray.policies.policy import Policy
from jobs.bench.load import Load, body_of, run_load
from jobs.bench.planted import SleepingStage, planted_rows, write_cascade, write_input, write_table
from jobs.bench.processes import scratch, served

LOADS = (0.5, MOST_LOAD)
WHAT = ("mean", "p99")
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


def plan(
    seconds: float = 60.0,
    turns: int = 3,
    pools: tuple[str, ...] = tuple(POOLS),
    services: str = "local",
    slower: float = 1.0,
) -> dict[str, Any]:
    """Hold what a plan predicts of runs and services against them: rows a second, and latencies at two loads.

    Three pools of `saved` stages, which sleep, so that the machine's cores are not the bottleneck: a plan is about
    stages. Each has another bottleneck. A run is predicted from the seconds in the pool file; measured are its rows
    over the time from the start of its first call to the end of its last, by its ledger, and how busy its stages were.
    A service is predicted as by `cauc plan --ledger` of that run, with the pool's replicas, at half of the rate that
    they can carry in full batches, and at four fifths, the most that a plan ever gives them. Requests of one row are
    posted at random times (Poisson) by one process, and latencies count from when they were due. A turn has times of
    its own: the median over the turns is given, and next to the plan what its simulation says of the turn's very
    requests. Where these two differ, it is by chance; where the second differs from what was measured, the plan is
    wrong, or the machine was busy with something else.

    Args:
        seconds: Seconds of a run, as predicted, and of a service's turn.
        turns: Turns of a service at each load.
        pools: The pools to plan for.
        services: What is served after the run: "local", by one process; "serve", by Ray Serve, whose processes take
            both cores at the rates of these pools; or "none".
        slower: Stages take this many times as long.
    """
    results: dict[str, dict[str, Any]] = {}
    for name in pools:
        stages = [replace(at, per_call=at.per_call * slower, per_row=at.per_row * slower) for at in POOLS[name]]
        with scratch() as folder:
            results[name] = planned_and_run(folder, stages, seconds)
            if services != "none":
                results[name]["services"] = planned_and_served(folder, stages, services == "local", seconds, turns)
    return {"pools": results}


def planned_and_run(folder: Path, stages: Sequence[SleepingStage], seconds: float) -> dict[str, Any]:
    """Return what was predicted of a run that is to take this many seconds, and what was measured.

    folder: an empty one, which is left with pool.yaml, policy.json, and the run's out/.
    """
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
        # Pairs of what was predicted, or configured, and what was measured.
        "stages": {
            at.name: {
                "calls": [of.calls, summed["calls"]],
                "fill": [of.fill, summed["batch_fill"]],
                "computed_s": [of.busy * predicted.window_s * at.replicas, summed["compute_s"]],
                "busy_share": summed["compute_s"] / (at.replicas * span_s),
                "per_call_s": [at.per_call, fitted[at.name].seconds.per_call],
                "per_row_s": [at.per_row, fitted[at.name].seconds.per_row],
            }
            for at, of, summed in zip(stages, predicted.stages, summary["stages"], strict=True)
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


def planned_and_served(
    folder: Path, stages: Sequence[SleepingStage], local: bool, seconds: float, turns: int
) -> list[dict[str, Any]]:
    """Return for each load what was planned from the run's ledger and what was measured of a service.

    folder: as planned_and_run leaves it.
    """
    policy = Policy.load(folder / "policy.json")
    specs = load_pool(folder / "pool.yaml").chain(policy.models)
    earlier = read_earlier_run(folder / "out", policy.models)
    timings = [earlier.timings[name] for name in policy.models]
    served_once = served_stages(specs, timings, expected_deferral(policy))
    planned = with_replicas(served_once, [at.replicas for at in stages])
    rows = [read_parquet(file, columns=["example_id", "stage"]) for file in parquet_files(folder / "out/predictions")]
    answered_by = np.concatenate([part.column("stage").to_numpy() for part in rows])
    bodies = [body_of({"example_id": [example]}) for part in rows for example in part.column("example_id").to_pylist()]
    with served(folder, local=local) as url:

        def turn(rate: float, seed: int) -> tuple[Latency, Latency]:
            """Return what was measured of requests at random times, and what the simulation says of the very same."""
            warm_up_s = settled_window(planned, rate).first
            rng, ends_s = np.random.default_rng([7, seed]), warm_up_s + seconds
            due_s = np.sort(rng.random(round(rate * ends_s))) * ends_s
            order = np.resize(rng.permutation(len(bodies)), len(due_s))
            in_order = [bodies[row] for row in order.tolist()]
            load = Load(f"{url}/v2/models/bench/infer", in_order, seconds, due_s=due_s, warm_up_s=warm_up_s)
            result = run_load(load)
            if (result.statuses != 200).any():
                raise ExecutionError(f"not all requests were answered: {result.counts()}")
            window = Window(warm_up_s, ends_s)
            simulated = simulate_trace(planned, due_s, answered_by[order], window, router=ROUTER).latency
            measured = Latency.of(result.measured_s)
            assert measured is not None
            assert simulated is not None
            return measured, simulated

        services = []
        for load in LOADS:
            rate = load * most_rate(planned, 1.0)[0]
            plan = simulate_arrivals(planned, rate, router=ROUTER).latency
            assert plan is not None
            services.append({"load": load, "rate": rate, **against(plan, [turn(rate, seed) for seed in range(turns)])})
    return services


def against(plan: Latency, turns: Sequence[tuple[Latency, Latency]]) -> dict[str, Any]:
    """Return the medians over the turns, and the ratios of the plan and of the simulation to what was measured."""
    return {
        "plan": {what: getattr(plan, what) for what in WHAT},
        "measured": {what: median(getattr(measured, what) for measured, _ in turns) for what in WHAT},
        "n_measured": sum(measured.n for measured, _ in turns),
        "plan_to_measured": {
            what: getattr(plan, what) / median(getattr(measured, what) for measured, _ in turns) for what in WHAT
        },
        "simulated_to_measured": {
            what: median(getattr(same, what) / getattr(measured, what) for measured, same in turns) for what in WHAT
        },
    }
