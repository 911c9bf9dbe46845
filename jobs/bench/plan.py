"""Hold what a plan predicts of runs and services against them: rows a second, and latencies at two loads.

Three pools of `saved` stages, which sleep, so that the machine's cores are not the bottleneck: a plan is about stages.
Each has another bottleneck. A run is predicted from the seconds that the stages are told to take; measured are its
rows over the time from the start of its first call to the end of its last, by its ledger, and how busy its stages were.
A service is predicted as by `cauc plan --ledger` of that run, with the pool's replicas and the router's seconds as
they are measured here, at half of the rate that the replicas can carry in full batches, and at four fifths, the most
that a plan ever gives them. Requests of one row are posted at random times (Poisson) by one process, and latencies
count from when they were due. A turn has times of its own: the median over the turns is given, and next to the plan
what its simulation says of the turn's very requests. Where these two differ, it is by chance; where the second differs
from what was measured, the plan is wrong, or the machine was busy with something else.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.errors import ExecutionError
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.models.pool import load_pool
from cauc_ray.planning.measures import Latency, Simulation, Window
from cauc_ray.planning.plan import expected_deferral, run_stages, served_stages
from cauc_ray.planning.routing import time_router
from cauc_ray.planning.simulation import (
    settled_window,
    simulate_arrivals,
    simulate_backlog,
    simulate_trace,
)
from cauc_ray.planning.sizing import MOST_LOAD, most_rate
from cauc_ray.planning.stages import PlannedStage, RouterSeconds
from cauc_ray.planning.timings import read_earlier_run, saved_timing
from cauc_ray.policies.policy import Policy
from jobs.bench.cascades import planted_rows, stage, write_input, write_pool, write_table
from jobs.bench.children import served
from jobs.bench.ledgers import StageCalls, read_calls
from jobs.bench.part import absent
from jobs.bench.serving_load import Load, run_load

RUN, LOCAL, SERVE = "run", "local", "serve"
LOADS = (0.5, MOST_LOAD)
VALIDATION_ROWS = 4000


@dataclass(frozen=True, slots=True)
class SleepingStage:
    """Seconds of a call and of a row, rows of a batch, replicas, the cost of a row, the share that goes on."""

    name: str
    per_call: float
    per_row: float
    batch: int
    replicas: int
    cost: float
    deferral: float = 0.0


POOLS = {
    # A call's own seconds weigh most; the first stage is the bottleneck.
    "two": (
        SleepingStage("small", 0.10, 0.002, 48, 1, 1.0, 0.4),
        SleepingStage("large", 0.15, 0.008, 16, 3, 8.0),
    ),
    # No seconds of a call's own, and as much work for every replica: any stage may be the bottleneck, by a hair.
    "even": (
        SleepingStage("small", 0.0, 0.004, 64, 1, 1.0, 0.5),
        SleepingStage("middle", 0.0, 0.016, 32, 2, 4.0, 0.4),
        SleepingStage("large", 0.0, 0.080, 8, 4, 20.0),
    ),
    # The middle stage is the bottleneck, and few rows go beyond it.
    "narrow": (
        SleepingStage("small", 0.05, 0.004, 32, 2, 1.0, 0.6),
        SleepingStage("middle", 0.20, 0.010, 24, 2, 6.0, 0.1),
        SleepingStage("large", 0.30, 0.020, 8, 1, 30.0),
    ),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--seconds", type=float, default=60.0, help="of a run, as predicted, and of a service's turn")
    parser.add_argument("--turns", type=int, default=3, help="turns of a service at each load")
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS), help="which pools to plan for")
    parser.add_argument(
        "--services",
        nargs="*",
        choices=(LOCAL, SERVE),
        default=[LOCAL],
        help="what is served, next to the run: by one process, by Ray Serve, whose processes take both cores at "
        "the rates of these pools (--slower)",
    )
    parser.add_argument("--slower", type=float, default=1.0, help="stages take so many times as long")


def missing(options: argparse.Namespace) -> str | None:
    """Need what serves HTTP, and the client that makes the load."""
    return absent("starlette", "uvicorn", "prometheus_client", "aiohttp") if options.services else None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Predict and measure each pool's run, then its services."""
    found: dict[str, dict[str, Any]] = {}
    for name in options.pools:
        slow = options.slower
        stages = [replace(at, per_call=at.per_call * slow, per_row=at.per_row * slow) for at in POOLS[name]]
        with tempfile.TemporaryDirectory(prefix="plan") as folder:
            found[name] = planned_and_run(Path(folder), stages, options.seconds)
            tell_run(name, found[name])
            for where in options.services:
                found[name][where] = planned_and_served(Path(folder), stages, where, options)
    ratios = [of["measured_to_predicted"] for of in found.values()]
    print(f"runs, measured over predicted rows a second: {min(ratios):.3f} to {max(ratios):.3f}")
    for where in options.services:
        ratios = [turn["plan_to_measured"][what] for of in found.values() for turn in of[where] for what in WHAT]
        print(f"services ({where}), planned over measured latencies: {min(ratios):.3f} to {max(ratios):.3f}")
    return {"pools": found}


def planned_and_run(folder: Path, stages: Sequence[SleepingStage], seconds: float) -> dict[str, Any]:
    """Return what was predicted of a run that is to take so many seconds, and what was measured.

    folder: an empty one, which is left with pool.yaml, policy.json, and the run's out/.
    """
    pool, policy = write_cascade(folder, stages)
    n_rows = int(seconds * predict_run(pool, policy, 20_000).rows_per_s)
    predicted = predict_run(pool, policy, n_rows)
    deferral, costs = [at.deferral for at in stages[:-1]], {at.name: at.cost for at in stages}
    rows = planted_rows(np.random.default_rng(2), n_rows, deferral)
    write_table(folder / "RUN", costs, deferral, run=rows)
    inputs = write_input(folder / "input", {"example_id": rows.columns()["example_id"]})
    summary = cauc_ray.run(pool, policy, inputs, folder / "out")
    calls = read_calls(folder / "out", list(costs))
    span_s = float(max(of.ended_s.max() for of in calls) - min(of.started_s.min() for of in calls))
    fitted = read_earlier_run(folder / "out", list(costs)).timings
    return {
        "rows": n_rows,
        "predicted_rows_per_s": predicted.rows_per_s,
        "measured_rows_per_s": n_rows / span_s,
        "measured_to_predicted": n_rows / span_s / predicted.rows_per_s,
        "predicted_s": predicted.window_s,
        "measured_s": span_s,
        "elapsed_s": summary["elapsed_s"],
        "stages": [
            {
                **compared(at, of, own, predicted.window_s),
                "per_call_s": [at.per_call, fitted[at.name].seconds.per_call],
                "per_row_s": [at.per_row, fitted[at.name].seconds.per_row],
            }
            for at, of, own in zip(stages, predicted.stages, calls, strict=True)
        ],
    }


def compared(at: SleepingStage, of: Any, own: StageCalls, predicted_s: float) -> dict[str, Any]:
    """Return a stage's figures as pairs of what was predicted and what was measured; its busy share as measured."""
    return {
        "name": at.name,
        "calls": [of.calls, len(own)],
        "fill": [of.fill, float(own.batch.mean()) / at.batch],
        "computed_s": [of.busy * predicted_s * at.replicas, float(own.compute_s.sum())],
        "busy_share": own.busy_share(at.replicas),
        "full_share": own.full_share(at.batch),
    }


def write_cascade(folder: Path, stages: Sequence[SleepingStage]) -> tuple[Path, Policy]:
    """Write a pool of saved stages over folder/RUN, which the run's rows are to fill; return it and its policy."""
    deferral = [at.deferral for at in stages[:-1]]
    validation = planted_rows(np.random.default_rng(1), VALIDATION_ROWS, deferral)
    policy = write_table(folder / "LOGITS", {at.name: at.cost for at in stages}, deferral, validation=validation)
    policy.save(folder / "policy.json")
    told = [{"seconds_per_call": at.per_call, "seconds_per_row": at.per_row} for at in stages]
    content = [
        stage(
            at.name,
            {"kind": "saved", "logits": "RUN", "model": at.name, "split": "run", **seconds},
            at.batch,
            replicas=at.replicas,
        )
        for at, seconds in zip(stages, told, strict=True)
    ]
    return write_pool(folder / "pool.yaml", content, on_failure="fail"), policy


def predict_run(pool: Path, policy: Policy, n_rows: int) -> Simulation:
    """Simulate a run over so many rows with the replicas of a pool of saved stages."""
    specs = load_pool(pool).chain(policy.models)
    timings = [timing for spec in specs if (timing := saved_timing(spec)) is not None]
    return simulate_backlog(run_stages(specs, timings, expected_deferral(policy)), n_rows)


WHAT = ("mean", "p99")


def planned_and_served(
    folder: Path, stages: Sequence[SleepingStage], where: str, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return for each load what was planned from the run's ledger and what was measured of a service.

    folder: as planned_and_run leaves it.
    """
    policy = Policy.load(folder / "policy.json")
    specs = load_pool(folder / "pool.yaml").chain(policy.models)
    earlier = read_earlier_run(folder / "out", policy.models)
    timings = [earlier.timings[name] for name in policy.models]
    planned = [
        of.with_replicas(at.replicas)
        for of, at in zip(served_stages(specs, timings, expected_deferral(policy)), stages, strict=True)
    ]
    rows = [read_parquet(file, columns=["example_id", "stage"]) for file in parquet_files(folder / "out/predictions")]
    answered_by = np.concatenate([part.column("stage").to_numpy() for part in rows])
    bodies = [body_of(example) for part in rows for example in part.column("example_id").to_pylist()]
    found, router = [], time_router()
    with served(folder, local=where == LOCAL) as url:
        for load in LOADS:
            rate = load * most_rate(planned, 1.0)[0]
            plan = simulate_arrivals(planned, rate, router=router).latency
            assert plan is not None
            asked = Asked(f"{url}/v2/models/bench/infer", planned, router, bodies, answered_by, rate, options.seconds)
            turns = [turn(asked, seed) for seed in range(options.turns)]
            found.append({"load": load, "rate": rate, **against(plan, turns)})
            tell_service(where, found[-1])
    return found


@dataclass(frozen=True, slots=True)
class Asked:
    """What a service is asked.   answered_by: at which stage each of the bodies stops.   rate: of requests a second."""

    url: str
    planned: Sequence[PlannedStage]
    router: RouterSeconds
    bodies: Sequence[bytes]
    answered_by: Any
    rate: float
    seconds: float


def turn(asked: Asked, seed: int) -> tuple[Latency, Latency]:
    """Return what was measured of requests at random times, and what the simulation says of the very same ones."""
    warm_up_s = settled_window(asked.planned, asked.rate).first
    rng, ends_s = np.random.default_rng([7, seed]), warm_up_s + asked.seconds
    due_s = np.sort(rng.random(round(asked.rate * ends_s))) * ends_s
    order = np.resize(rng.permutation(len(asked.bodies)), len(due_s))
    result = run_load(
        Load(asked.url, [asked.bodies[row] for row in order.tolist()], asked.seconds, due_s=due_s, warm_up_s=warm_up_s)
    )
    if (result.statuses != 200).any():
        raise ExecutionError(f"not all requests were answered: {result.counts()}")
    window = Window(warm_up_s, ends_s)
    simulated = simulate_trace(asked.planned, due_s, asked.answered_by[order], window, router=asked.router).latency
    measured = Latency.of(result.measured_s)
    assert measured is not None
    assert simulated is not None
    return measured, simulated


def against(plan: Latency, turns: Sequence[tuple[Latency, Latency]]) -> dict[str, Any]:
    """Return the medians over the turns, and the ratios of the plan and of the simulation to what was measured."""
    return {
        "plan": {what: getattr(plan, what) for what in WHAT},
        "measured": {what: median(getattr(own, what) for own, _ in turns) for what in WHAT},
        "n_measured": sum(own.n for own, _ in turns),
        "plan_to_measured": {
            what: getattr(plan, what) / median(getattr(own, what) for own, _ in turns) for what in WHAT
        },
        "simulated_to_measured": {
            what: median(getattr(same, what) / getattr(own, what) for own, same in turns) for what in WHAT
        },
    }


def body_of(example: str) -> bytes:
    """Return an example's id as the body of an inference request."""
    inputs = [{"name": "example_id", "shape": [1], "datatype": "BYTES", "data": [example]}]
    return json.dumps({"inputs": inputs, "outputs": [{"name": "prediction"}]}).encode()


def tell_run(name: str, of: dict[str, Any]) -> None:
    """Print a run's figures."""
    print(
        f"{name}: {of['rows']:,} rows, predicted {of['predicted_rows_per_s']:.1f} rows a second, measured "
        f"{of['measured_rows_per_s']:.1f}, {of['measured_to_predicted']:.3f} of it; first to last call "
        f"{of['measured_s']:.2f} s of {of['predicted_s']:.2f} s predicted"
    )
    for at in of["stages"]:
        pairs = {what: "{:.4g} → {:.4g}".format(*at[what]) for what in ("calls", "fill", "computed_s")}
        fit = ", ".join("{:.4g} → {:.4g}".format(*at[what]) for what in ("per_call_s", "per_row_s"))
        print(
            f"{at['name']:>9}: busy {at['busy_share']:.1%}; calls {pairs['calls']}, fill {pairs['fill']}, computed "
            f"{pairs['computed_s']} s; seconds by its ledger {fit}",
            flush=True,
        )


def tell_service(where: str, of: dict[str, Any]) -> None:
    """Print a service's figures at one load."""
    print(f"{where:>9}, load {of['load']:.0%}, {of['rate']:.1f} requests a second, {of['n_measured']:,} of them:")
    for what in WHAT:
        plan, measured, ratio, same = (
            of[key][what] for key in ("plan", "measured", "plan_to_measured", "simulated_to_measured")
        )
        print(
            f"{what:>14}: planned {plan:.3f} s, measured {measured:.3f} s, ratio {ratio:.3f}; of the very requests "
            f"{same:.3f}",
            flush=True,
        )
