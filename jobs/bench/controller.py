"""Measure what a run's controller can carry: rows a second of stages that take no time, and replicas kept busy.

The rate is of three stages that do next to nothing, in batches of 256. The replicas are 64 of sleeping stages, 16 and
48, with batches such that both stages have the same work when half of the rows are deferred. A rate is rows over the
run's time without starting the stages.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.execution.session import ray_session
from jobs.bench.cascades import column_model, planted_rows, stage, write_input, write_pool, write_table
from jobs.bench.ledgers import read_calls
from jobs.bench.processes import Sampler

STAGES = {"first": 1.0, "second": 4.0, "third": 20.0}
DEFERRAL = (0.5, 0.4)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows through stages that take no time")
    parser.add_argument("--batch", type=int, default=256, help="rows in a batch of those stages")
    parser.add_argument("--stage-replicas", type=int, default=1, help="replicas of each of those stages")
    parser.add_argument("--sleepers", type=int, nargs=2, default=[16, 48], help="sleeping replicas of each stage")
    parser.add_argument("--call-seconds", type=float, default=0.25, help="what a sleeping call takes")
    parser.add_argument("--calls", type=int, default=40, help="calls of each sleeping replica")


def missing(options: argparse.Namespace) -> str | None:
    """Need nothing."""
    return None


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the rate, then the sleeping replicas."""
    with tempfile.TemporaryDirectory() as folder:
        rate = rows_per_second(Path(folder), options)
    with tempfile.TemporaryDirectory() as folder:
        return {**rate, "sleepers": sleepers(Path(folder), options)}


def rows_per_second(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a million rows."""
    policy = write_table(folder / "LOGITS", STAGES, DEFERRAL)
    columns = planted_rows(np.random.default_rng(0), options.rows, DEFERRAL).columns()
    inputs = write_input(folder / "input", columns, files=4)
    stages = [
        stage(name, column_model(place), options.batch, replicas=options.stage_replicas, num_cpus=0.01)
        for place, name in enumerate(STAGES)
    ]
    pool = write_pool(folder / "pool.yaml", stages)
    with ray_session(None, 4):
        summary = cauc_ray.run(pool, policy, inputs, folder / "out")
    n_calls = sum(stage["calls"] for stage in summary["stages"])
    rate = options.rows / summary["run_s"]
    print(
        f"{rate:,.0f} rows/s, {n_calls / summary['run_s']:,.0f} calls/s; {summary['n']:,} rows in "
        f"{summary['run_s']:.1f} s",
        flush=True,
    )
    return {"rows": options.rows, "rows_per_s": rate}


def sleepers(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run two stages of sleeping replicas and return how busy these were."""
    few, many = options.sleepers
    # Both stages answer the same share of the rows in a second: the second sees half of them.
    batch = {"first": 4 * many, "second": 2 * few}
    models = dict(zip(batch, STAGES.values(), strict=False))
    replicas = dict(zip(batch, options.sleepers, strict=True))
    rows = planted_rows(np.random.default_rng(0), few * batch["first"] * options.calls, DEFERRAL[:1])
    policy = write_table(folder / "LOGITS", models, DEFERRAL[:1])
    inputs = write_input(folder / "input", rows.columns())
    stages = [
        stage(
            name,
            column_model(place, per_call=options.call_seconds),
            batch[name],
            replicas=replicas[name],
            num_cpus=0.01,
        )
        for place, name in enumerate(batch)
    ]
    pool = write_pool(folder / "pool.yaml", stages)
    sampler = Sampler(every_s=0.5)
    with ray_session(None, 4), sampler.sampling():
        summary = cauc_ray.run(pool, policy, inputs, folder / "out")
    shares = {calls.name: calls.replica_busy_shares() for calls in read_calls(folder / "out", list(batch))}
    every = np.concatenate(list(shares.values()))
    memory = {role: sampler.peak_together(role) / 1e6 for role in ("controller", "worker")}
    print(
        f"{len(every)} of {few + many} sleeping replicas were called, busy {every.mean():.1%} on average, the least "
        f"busy {every.min():.1%}; calls of {options.call_seconds} s, {summary['run_s']:.1f} s in all"
    )
    print(f"memory: {memory['worker']:,.0f} MB in all workers (what they share counted in each)")
    return {
        "replicas": few + many,
        "replicas_called": len(every),
        "rows": summary["n"],
        "calls": sum(stage["calls"] for stage in summary["stages"]),
        "busy_share": float(every.mean()),
        "least_busy_share": float(every.min()),
        "busy_share_by_stage": {name: float(own.mean()) for name, own in shares.items()},
        "run_s": summary["run_s"],
        "elapsed_s": summary["elapsed_s"],
        "workers_rss_mb": memory["worker"],
        "worker_peak_rss_mb": sampler.peak("worker") / 1e6,
        "controller_peak_rss_mb": memory["controller"],
    }
