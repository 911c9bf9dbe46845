"""Measure what a run's controller can carry: rows a second of stages that take no time, and replicas kept busy.

The rate is of three stages that do next to nothing, in batches of 256. The replicas are 64 of sleeping stages, 16 and
48, with batches such that both stages have the same work when half of the rows are deferred. A rate is rows over the
run's time without starting the stages.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.execution.session import ray_session
from jobs.bench.planted import SleepingStage, planted_rows, write_cascade, write_input


def measure(
    rows: int = 1_000_000,
    batch: int = 256,
    stage_replicas: int = 1,
    sleepers: tuple[int, ...] = (16, 48),
    call_seconds: float = 0.25,
    calls: int = 40,
) -> dict[str, Any]:
    """Measure the rate, then the sleeping replicas.

    rows, batch, stage_replicas: of the stages that take no time.   sleepers: replicas of each sleeping stage.
    call_seconds: of a sleeping call.   calls: of each sleeping replica.
    """
    instant = [
        SleepingStage("first", batch, replicas=stage_replicas, cost=1.0, deferral=0.5),
        SleepingStage("second", batch, replicas=stage_replicas, cost=4.0, deferral=0.4),
        SleepingStage("third", batch, replicas=stage_replicas, cost=20.0),
    ]
    few, many = sleepers
    # Both stages answer the same share of the rows in a second: the second sees half of them.
    sleeping = [
        SleepingStage("first", 4 * many, call_seconds, replicas=few, deferral=0.5),
        SleepingStage("second", 2 * few, call_seconds, replicas=many, cost=4.0),
    ]
    carried = run(instant, rows)
    slept = run(sleeping, few * sleeping[0].batch * calls)
    n_calls = sum(stage["calls"] for stage in carried["stages"])
    return {
        "rows": rows,
        "rows_per_s": rows / carried["run_s"],
        "calls_per_s": n_calls / carried["run_s"],
        "sleepers": {
            "replicas": few + many,
            "rows": slept["n"],
            "busy_share": {stage["name"]: stage["busy_share"] for stage in slept["stages"]},
            "batch_fill": {stage["name"]: stage["batch_fill"] for stage in slept["stages"]},
            "run_s": slept["run_s"],
            "elapsed_s": slept["elapsed_s"],
        },
    }


def run(stages: Sequence[SleepingStage], n: int) -> dict[str, Any]:
    """Run a cascade over n rows and return its summary."""
    with tempfile.TemporaryDirectory() as scratch, ray_session(None, 4):
        folder = Path(scratch)
        pool, policy = write_cascade(folder, stages, num_cpus=0.01)
        planted = planted_rows(np.random.default_rng(0), n, [stage.deferral for stage in stages[:-1]])
        inputs = write_input(folder / "input", planted.columns(), files=4)
        return cauc_ray.run(pool, policy, inputs, folder / "out")
