"""Hold what a plan foretells of a run against the executor: rows a second of three pools of sleeping stages.

The pools differ in stages, replicas, batch sizes, seconds of a call and of a row, and deferral; each has another
bottleneck. The prediction is made before the run: the plan's simulation of a run over as many rows, with the seconds
that the stages are told to take and the deferral rates that the policy expects. Measured are the run's rows over the
time from the start of its first call to the end of its last, by its ledger: Ray and the models have started by then,
but for replicas that come later than the first, whose time counts.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.execution.session import ray_session
from cauc_ray.front.planning.measures import Simulation
from cauc_ray.front.planning.plan import expected_deferral, run_stages
from cauc_ray.front.planning.simulation import simulate_backlog
from cauc_ray.front.planning.timings import read_earlier_run, saved_timing
from cauc_ray.models.pool import load_pool
from cauc_ray.policies.policy import Policy
from jobs.bench.cascades import planted_rows, write_input, write_pool, write_table
from jobs.bench.ledgers import StageCalls, read_calls

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
    # No seconds of a call's own; the last stage is the bottleneck, its batches gathered from many.
    "three": (
        SleepingStage("small", 0.0, 0.003, 64, 1, 1.0, 0.5),
        SleepingStage("middle", 0.0, 0.010, 32, 2, 4.0, 0.4),
        SleepingStage("large", 0.0, 0.060, 8, 3, 20.0),
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
    parser.add_argument("--seconds", type=float, default=60.0, help="what each run is to take, by the prediction")
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS), help="which pools to run")


def missing(options: argparse.Namespace) -> str | None:
    """Need nothing."""
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Foretell and run each pool."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder, ray_session(None, 2):
        for name in options.pools:
            home = Path(folder) / name
            home.mkdir()
            figures[name] = foretold_and_run(home, POOLS[name], options.seconds)
            tell(name, figures[name])
    ratios = [of["measured_to_predicted"] for of in figures.values()]
    print(f"measured over predicted rows a second: {min(ratios):.3f} to {max(ratios):.3f}")
    return {"pools": figures, "least_ratio": min(ratios), "most_ratio": max(ratios)}


def foretold_and_run(folder: Path, stages: tuple[SleepingStage, ...], seconds: float) -> dict[str, Any]:
    """Return what was foretold of a run that is to take so many seconds, and what was measured.

    folder: an empty one, whose out/ is the run's.
    """
    pool, policy = write_cascade(folder, stages)
    n_rows = int(seconds * foretell(pool, policy, 20_000).rows_per_s)
    predicted = foretell(pool, policy, n_rows)
    rows = planted_rows(np.random.default_rng(2), n_rows, [at.deferral for at in stages[:-1]])
    write_table(folder / "RUN", {at.name: at.cost for at in stages}, [at.deferral for at in stages[:-1]], run=rows)
    inputs = write_input(folder / "input", {"example_id": rows.columns()["example_id"]})
    summary = cauc_ray.run(pool, policy, inputs, folder / "out")
    calls = read_calls(folder / "out", [at.name for at in stages])
    span_s = max(of.ended_s.max() for of in calls) - min(of.started_s.min() for of in calls)
    fitted = read_earlier_run(folder / "out", [at.name for at in stages])
    return {
        "rows": n_rows,
        "predicted_rows_per_s": predicted.rows_per_s,
        "measured_rows_per_s": n_rows / span_s,
        "measured_to_predicted": n_rows / span_s / predicted.rows_per_s,
        "predicted_s": predicted.window_s,
        "measured_s": float(span_s),
        "elapsed_s": summary["elapsed_s"],
        "stages": [
            {
                **compared(at, of, own, predicted.window_s),
                "per_call_s": [at.per_call, fitted.timings[at.name].seconds.per_call],
                "per_row_s": [at.per_row, fitted.timings[at.name].seconds.per_row],
            }
            for at, of, own in zip(stages, predicted.stages, calls, strict=True)
        ],
    }


def compared(at: SleepingStage, of: Any, own: StageCalls, predicted_s: float) -> dict[str, Any]:
    """Return a stage's figures as pairs of what was predicted and what was measured."""
    return {
        "name": at.name,
        "calls": [of.calls, len(own)],
        "fill": [of.fill, float(own.batch.mean()) / at.batch],
        "computed_s": [of.busy * predicted_s * at.replicas, float(own.compute_s.sum())],
    }


def write_cascade(folder: Path, stages: tuple[SleepingStage, ...]) -> tuple[Path, Policy]:
    """Write a pool of saved stages over folder/RUN, which the run's rows are to fill; return it and its policy."""
    deferral = [at.deferral for at in stages[:-1]]
    validation = planted_rows(np.random.default_rng(1), VALIDATION_ROWS, deferral)
    policy = write_table(folder / "LOGITS", {at.name: at.cost for at in stages}, deferral, validation=validation)
    content = [
        {
            "name": at.name,
            "model": {
                "kind": "saved", "logits": "RUN", "model": at.name, "split": "run",
                "seconds_per_call": at.per_call, "seconds_per_row": at.per_row,
            },
            "batch_size": at.batch,
            "replicas": {"min": at.replicas, "max": at.replicas},
            "resources": {"num_cpus": 0.1},
        }
        for at in stages
    ]  # fmt: skip
    return write_pool(folder / "pool.yaml", content), policy


def foretell(pool: Path, policy: Policy, n_rows: int) -> Simulation:
    """Simulate a run over so many rows with the replicas of a pool of saved stages."""
    specs = load_pool(pool).chain(policy.models)
    timings = [timing for spec in specs if (timing := saved_timing(spec)) is not None]
    return simulate_backlog(run_stages(specs, timings, expected_deferral(policy)), n_rows)


def tell(name: str, of: dict[str, Any]) -> None:
    """Print a pool's figures."""
    print(
        f"{name}: {of['rows']:,} rows, predicted {of['predicted_rows_per_s']:.1f} rows a second, measured "
        f"{of['measured_rows_per_s']:.1f}, {of['measured_to_predicted']:.3f} of it; first to last call "
        f"{of['measured_s']:.2f} s of {of['predicted_s']:.2f} s predicted"
    )
    for stage in of["stages"]:
        pairs = {what: "{:.4g} → {:.4g}".format(*stage[what]) for what in ("calls", "fill", "computed_s")}
        fit = ", ".join("{:.4g} → {:.4g}".format(*stage[what]) for what in ("per_call_s", "per_row_s"))
        print(
            f"{stage['name']:>9}: calls {pairs['calls']}, fill {pairs['fill']}, computed {pairs['computed_s']} s; "
            f"seconds by its ledger {fit}",
            flush=True,
        )
