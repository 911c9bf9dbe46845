"""The throughput of a run's controller, and how busy it keeps replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import cauc_ray
from jobs.bench.planted import SleepingStage, planted_rows, write_cascade, write_input
from jobs.bench.processes import scratch


def controller(
    rows: int = 1_000_000,
    batch: int = 256,
    stage_replicas: int = 1,
    sleepers: tuple[int, ...] = (16, 48),
    call_seconds: float = 0.25,
    calls: int = 40,
) -> dict[str, Any]:
    """Measure a run's controller: its rows a second with stages that take no time, and how busy it keeps replicas.

    The rate is of three stages that do next to nothing. The busy share is of two sleeping stages, with batches such
    that both have the same work when half of the rows are deferred. A rate is rows over the run's time without
    starting the stages.

    Args:
        rows: Rows of the stages that take no time.
        batch: Rows of their batches.
        stage_replicas: Replicas of each of them.
        sleepers: Replicas of the first and of the second sleeping stage.
        call_seconds: Seconds of a sleeping call.
        calls: Calls of each sleeping replica.
    """
    instant = [
        SleepingStage("first", batch, replicas=stage_replicas, cost=1.0, deferral=0.5),
        SleepingStage("second", batch, replicas=stage_replicas, cost=4.0, deferral=0.4),
        SleepingStage("third", batch, replicas=stage_replicas, cost=20.0),
    ]
    n_first, n_second = sleepers
    # Both stages answer the same share of the rows in a second: the second sees half of them.
    sleeping = [
        SleepingStage("first", 4 * n_second, call_seconds, replicas=n_first, deferral=0.5),
        SleepingStage("second", 2 * n_first, call_seconds, replicas=n_second, cost=4.0),
    ]
    carried = run(instant, rows)
    slept = run(sleeping, n_first * sleeping[0].batch * calls)
    n_calls = sum(stage["calls"] for stage in carried["stages"])
    return {
        "rows": rows,
        "rows_per_s": rows / carried["run_s"],
        "calls_per_s": n_calls / carried["run_s"],
        "sleepers": {
            "replicas": n_first + n_second,
            "rows": slept["n"],
            "busy_share": {stage["name"]: stage["busy_share"] for stage in slept["stages"]},
            "batch_fill": {stage["name"]: stage["batch_fill"] for stage in slept["stages"]},
            "run_s": slept["run_s"],
            "elapsed_s": slept["elapsed_s"],
        },
    }


def run(stages: Sequence[SleepingStage], n: int) -> dict[str, Any]:
    """Run a cascade over n rows and return its summary."""
    with scratch(4) as folder:
        pool, policy = write_cascade(folder, stages, num_cpus=0.01)
        planted = planted_rows(np.random.default_rng(0), n, [stage.deferral for stage in stages[:-1]])
        inputs = write_input(folder / "input", planted.columns(), files=4)
        return cauc_ray.run(pool, policy, inputs, folder / "out")
