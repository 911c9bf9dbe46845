"""Measure fits, evaluations and sweeps on several cores: fits against one process, the others against one core.

A fit by shards, out of core, is compared with the fit of the same table in a process of its own: time, memory and
numbers. An evaluation runs with one shard and with several, a sweep with one task at a time and with several; each by
turns, and the median of the turns counts. An evaluation's time is all but the start of its shards, a sweep's from the
start of its first task to the end of its last. The share of linear is t1 / (n tn). A worker's first task imports what
all of them use, a second or two: the sizes are such that this matters little.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import cauc_ray
from cauc_ray.api.options import EvaluateOptions, FitOptions, SweepJobOptions
from cauc_ray.api.sharding import evaluate_shards, fit_shards
from cauc_ray.comparison.sweep_tasks import run_sweep
from cauc_ray.data.table_info import PoolModel, TableInfo, write_info
from cauc_ray.execution.tasks import Outcome
from cauc_ray.policies.policy import Policy
from jobs.bench.planted import planted_logits
from jobs.bench.processes import own_session, printed

MODELS = {"small": (4.0, 1.0), "large": (6.0, 4.0)}  # how much logits favour the label; the cost of a call
FILES = 12
GROUP_ROWS = 4096
BUDGET = 3.0
SWEPT = ("base", "rf", "duo", "margin")

# The fit in one process, in a process of its own, whose memory is then its own too.
ALONE = """
import json, resource, sys, time
import cauc_ray
import cauc_ray.api.offline
started = time.perf_counter()
policy = cauc_ray.fit(sys.argv[1], models=json.loads(sys.argv[2]), method=sys.argv[3], budget=float(sys.argv[4]))
seconds = time.perf_counter() - started
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": seconds, "peak_bytes": peak, "policy": policy.to_json()}))
"""


def measure(
    rows: int = 200_000,
    options: int = 1_000,
    shards: int = os.cpu_count() or 1,
    sample: int = 0,
    methods: tuple[str, ...] = ("base", "rf"),
    sweep_rows: int = 4_000,
    seeds: int = 6,
    turns: int = 3,
) -> dict[str, Any]:
    """Measure fits, evaluations and sweeps.

    rows: of the calibration split; validation has a tenth, test half.   options: of a row.   shards: how many hold the
    rows, and tasks at a time, a CPU each.   sample: compare with one process on a table of this many rows, where the
    whole is too large for one.   methods: what is fitted.   sweep_rows: of a swept split.   seeds: of a sweep; four
    tasks each.   turns: of evaluations and sweeps.
    """
    with tempfile.TemporaryDirectory(prefix="cauc-bench-") as scratch:
        folder = Path(scratch)
        whole = write_table(folder / "whole", options, calibration=rows, validation=max(2, rows // 10), test=rows // 2)
        found: dict[str, Any] = {"gigabytes": 4e-9 * rows * options * len(MODELS), "shards": shards}
        if sample:
            few = write_table(folder / "sample", options, calibration=sample, validation=max(2, sample // 10))
        for method in methods:
            found[method] = compared(few if sample else whole, method, shards)
            if sample:
                found[method] = {"whole": by_shards(whole, method, shards)[1], "sample": found[method]}
        n = sweep_rows
        swept = write_table(folder / "swept", options, calibration=n, validation=n, test=n)
        policy = cauc_ray.fit(swept, models=list(MODELS), method="rf", budget=BUDGET)
        evaluation = scaling(shards, turns, lambda n, _: evaluate_seconds(whole, policy, n))
        sweep = scaling(shards, turns, lambda n, turn: sweep_seconds(swept, seeds, folder / f"{n}-{turn}"))
        return found | {"evaluation": evaluation, "sweep": sweep}


def write_table(table: Path, k: int, **splits: int) -> Path:
    """Write both models' logits as files of a dozen parts: noise that they share in part, and the label.

    splits: rows of each.
    """
    for split, n in splits.items():
        for part, ids in enumerate(np.array_split(np.arange(n), FILES)):
            rng = np.random.default_rng([part, *split.encode()])
            labels = rng.integers(0, k, len(ids)).astype(np.int32)
            shared = 0.7 * rng.standard_normal((len(labels), k), dtype=np.float32)
            for model, (strength, _) in MODELS.items():
                logits = planted_logits(rng, labels, k, strength) + shared
                lists = pa.ListArray.from_arrays(np.arange(len(labels) + 1, dtype=np.int32) * k, logits.ravel())
                columns = {"example_id": [f"{row:08d}" for row in ids], "label": labels, "logits": lists}
                into = table / f"model={model}" / f"split={split}"
                into.mkdir(parents=True, exist_ok=True)
                pq.write_table(pa.table(columns), into / f"part-{part:02d}.parquet", row_group_size=GROUP_ROWS)
    models = [PoolModel(name=name, cost=cost) for name, (_, cost) in MODELS.items()]
    write_info(table, TableInfo(cost_unit="GFLOPs", logit_kind="raw", models=models))
    return table


def by_shards(table: Path, method: str, n_shards: int) -> tuple[Policy, dict[str, Any]]:
    """Fit by shards; return the policy, and what that took."""
    asked = {"models": list(MODELS), "method": method, "budget": BUDGET, "shards": n_shards}
    with own_session(n_shards):
        started = time.perf_counter()
        found = fit_shards(table, FitOptions.of(asked))
        took_s = time.perf_counter() - started - found.shards.start_s
    return found.policy, {
        "sharded_s": took_s,
        "of_reading_s": found.shards.open_s,
        "start_s": found.shards.start_s,
        "passes": found.shards.n_passes,
        "shard_peak_mb": max(found.shards.peak_bytes) / 1e6,
    }


def compared(table: Path, method: str, n_shards: int) -> dict[str, Any]:
    """Fit once by shards and once in one process."""
    [alone] = printed(sys.executable, "-c", ALONE, table, json.dumps(list(MODELS)), method, BUDGET)
    policy, took = by_shards(table, method, n_shards)
    return {
        "alone_s": alone["seconds"],
        "alone_peak_mb": alone["peak_bytes"] / 1e6,
        **took,
        "time_x_shards_to_alone": took["sharded_s"] * n_shards / alone["seconds"],
        "furthest": furthest(policy, Policy.of(json.loads(alone["policy"]))),
    }


def furthest(one: Policy, other: Policy) -> float:
    """Return by how much numbers of two policies differ at most, relative to themselves."""
    pairs = zip(_numbers(one.model_dump()), _numbers(other.model_dump()), strict=True)
    return max(abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in _numbers(inner)]
    if isinstance(value, list | tuple):
        return [number for inner in value for number in _numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []


def scaling(n: int, turns: int, seconds: Callable[[int, int], float]) -> dict[str, Any]:
    """Time something on one CPU and on n, by turns.   seconds: of a number of CPUs and a turn."""
    taken: dict[int, list[float]] = {1: [], n: []}
    for turn in range(turns):
        for n_cpus, own in taken.items():
            with own_session(n_cpus):
                own.append(seconds(n_cpus, turn))
    one, several = median(taken[1]), median(taken[n])
    return {"one_s": one, "several_s": several, "share_of_linear": one / (n * several)}


def evaluate_seconds(table: Path, policy: Policy, n_shards: int) -> float:
    """Return the seconds of an evaluation by shards, without their start."""
    started = time.perf_counter()
    _, shards = evaluate_shards(table, policy, EvaluateOptions(shards=n_shards))
    return time.perf_counter() - started - shards.start_s


def sweep_seconds(table: Path, n_seeds: int, out: Path) -> float:
    """Return the seconds of a sweep from the start of its first task to the end of its last."""
    budgets = (0.4, 0.6, 0.8, 1.0)
    options = SweepJobOptions(
        models=tuple(MODELS), methods=SWEPT, seeds=tuple(range(n_seeds)), relative_budgets=budgets
    )
    spans: list[tuple[float, float]] = []

    def note(outcome: Outcome, number: int, of: int) -> None:
        now = time.perf_counter()
        spans.append((now - outcome.seconds, now))

    sweep = run_sweep(options, out, table, on_outcome=note)
    if sweep.missing:
        raise AssertionError(sweep.missing[0])
    return max(end for _, end in spans) - min(start for start, _ in spans)
