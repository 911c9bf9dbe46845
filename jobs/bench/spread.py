"""Measure what a second core is worth to sweeps and to evaluations by shards: half the time, were it linear.

The same sweep runs with one task at a time and with as many as there are cores, the same evaluation with one shard and
with as many; each by turns, and the median of the turns counts. A sweep's time is from the start of its first task to
the end of its last; an evaluation's is all but the start of its shards. The share of linear is t1 / (n tn). A worker's
first task imports what all of them use, a second or two: the sizes are such that this weighs little.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import cauc_ray
from cauc_ray.api.options import EvaluateOptions, SweepJobOptions
from cauc_ray.api.sharding import evaluate_shards
from cauc_ray.comparison.sweep_tasks import run_sweep
from cauc_ray.execution.tasks import Outcome
from cauc_ray.policies.policy import Policy
from jobs.bench.calibrate import BUDGET, MODELS, write_table
from jobs.bench.processes import own_session, session_is_up

METHODS = ("base", "rf", "duo", "margin")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--tasks", type=int, default=os.cpu_count() or 1, help="at a time: as many as there are cores")
    parser.add_argument("--sweep-rows", type=int, default=4_000, help="rows of a swept split")
    parser.add_argument("--seeds", type=int, default=6, help="of a sweep; four tasks each")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the evaluated split")
    parser.add_argument("--options", type=int, default=1_000, help="options of a row")
    parser.add_argument("--turns", type=int, default=3, help="turns of each")


def missing(options: argparse.Namespace) -> str | None:
    """Need sessions of its own."""
    return session_is_up()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both."""
    with tempfile.TemporaryDirectory(prefix="spread") as scratch:
        folder, n, k = Path(scratch), options.sweep_rows, options.options
        small = write_table(folder / "small", k, calibration=n, validation=n, test=n)
        large = write_table(folder / "large", k, test=options.rows)
        policy = cauc_ray.fit(small, models=list(MODELS), method="rf", budget=BUDGET)
        return {
            "sweep": compared("sweep", options, lambda n, turn: swept(small, options.seeds, folder / f"{n}-{turn}")),
            "evaluation": compared("evaluation", options, lambda n, _: evaluated(large, policy, n)),
        }


def compared(what: str, options: argparse.Namespace, seconds: Callable[[int, int], float]) -> dict[str, Any]:
    """Time something with one CPU and with several, by turns."""
    taken: dict[int, list[float]] = {1: [], options.tasks: []}
    for turn in range(options.turns):
        for n in taken:
            with own_session(n):
                taken[n].append(seconds(n, turn))
            print(f"{what}: {n} at a time, {taken[n][-1]:.2f} s", flush=True)
    one, several = median(taken[1]), median(taken[options.tasks])
    share = one / (options.tasks * several)
    print(f"{what}: {options.tasks} at a time take {several / one:.3f} of the time of one: {share:.3f} of linear")
    return {"one_s": one, "several_s": several, "n": options.tasks, "share_of_linear": share}


def swept(table: Path, n_seeds: int, out: Path) -> float:
    """Return the seconds of a sweep from the start of its first task to the end of its last."""
    options = SweepJobOptions(
        models=tuple(MODELS),
        methods=METHODS,
        seeds=tuple(range(n_seeds)),
        relative_budgets=(0.4, 0.6, 0.8, 1.0),
    )
    spans: list[tuple[float, float]] = []

    def note(outcome: Outcome, place: int, of: int) -> None:
        now = time.perf_counter()
        spans.append((now - outcome.seconds, now))

    sweep = run_sweep(options, out, table, on_outcome=note)
    if sweep.missing:
        raise AssertionError(sweep.missing[0])
    return max(end for _, end in spans) - min(start for start, _ in spans)


def evaluated(table: Path, policy: Policy, n_shards: int) -> float:
    """Return the seconds of an evaluation by shards, without their start."""
    started = time.perf_counter()
    _, shards = evaluate_shards(table, policy, EvaluateOptions(shards=n_shards))
    return time.perf_counter() - started - shards.start_s
