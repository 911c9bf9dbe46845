"""Fits and sweeps against what a user would otherwise run, and fits by shards against one process."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import cauc_ray
from cauc_ray.api.offline import fit_shards
from cauc_ray.api.options import options_of
from cauc_ray.data.writing import PoolModel, TableInfo, write_info
from cauc_ray.errors import CaucWarning
from cauc_ray.numbers.calibration import fit_pair, fit_temperature
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.sweep import sweep
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy
from jobs.bench.planted import planted_logits
from jobs.bench.processes import PEAK, printed, scratch

SWEEP_STAGES = 7
GRID_POINTS = 1001
MODELS = {"small": (4.0, 1.0), "large": (6.0, 4.0)}
FILES = 12
GROUP_ROWS = 4096
BUDGET = 3.0
# A fit in a new process, whose memory is that of the fit.
ALONE = """
import json, sys, time
import cauc_ray
import cauc_ray.api.offline
started = time.perf_counter()
policy = cauc_ray.fit(sys.argv[1], models=json.loads(sys.argv[2]), method=sys.argv[3], budget=float(sys.argv[4]))
seconds = time.perf_counter() - started
print(json.dumps({"seconds": seconds, "peak_bytes": peak(), "policy": policy.to_json()}))
"""


def numbers(rows: int = 12_500, options: int = 1_000, repeats: int = 5) -> dict[str, Any]:
    """Measure fits and the sweep against what a user would otherwise run: ratios of one run, the best of the repeats.

    Args:
        rows: Rows of the matrix of logits.
        options: Columns of the matrix of logits.
        repeats: Measurements of each.
    """
    rng = np.random.default_rng(0)
    labels = rng.integers(0, options, rows)
    first = planted_logits(rng, labels, options, 7.0, noise=1.5, spread=3.0)
    second = planted_logits(rng, labels, options, 8.0, noise=2.0, spread=3.0)
    return {
        "temperature": temperature(first, labels, repeats),
        "pair": pair(first, second, labels, repeats),
        "sweep": exact_sweep(rng, rows, repeats),
        "setup": setup(repeats),
    }


def temperature(logits: Floats, labels: Ints, repeats: int) -> dict[str, float]:
    """Compare one temperature fit with scikit-learn's temperature calibration and with copies of the matrix."""
    from sklearn.calibration import _TemperatureScaling

    ours, fit = best_of(repeats, lambda: fit_temperature(logits, labels))
    # The calibrator by itself, without the cross-validation that CalibratedClassifierCV puts around it.
    theirs, scaling = best_of(2, lambda: _TemperatureScaling().fit(logits, labels))
    fresh, _ = best_of(repeats, logits.copy)
    target = np.empty_like(logits)
    warm, _ = best_of(repeats, lambda: np.copyto(target, logits))
    return {
        "seconds": ours,
        "to_sklearn": ours / theirs,
        "apart_from_sklearn": abs(float(fit.temperature * scaling.beta_) - 1),
        "copies_into_new_memory": ours / fresh,
        "copies_into_used_memory": ours / warm,
    }


def pair(state: Floats, logits: Floats, labels: Ints, repeats: int) -> dict[str, float]:
    """Compare RF's pair fit with scipy's L-BFGS-B on the same objective, with exact gradients, in float64."""
    from scipy.optimize import minimize

    ours, fit = best_of(repeats, lambda: fit_pair(state, logits, labels))
    wide = [state.astype(np.float64), logits.astype(np.float64)]
    rows = np.arange(len(labels))

    def objective(weights: Floats) -> tuple[float, Floats]:
        scores = weights[0] * wide[0] + weights[1] * wide[1]
        scores -= scores.max(axis=1, keepdims=True)
        terms = np.exp(scores)
        sums = terms.sum(axis=1)
        terms /= sums[:, None]
        nll = float((np.log(sums) - scores[rows, labels]).mean())
        slopes = [(np.einsum("ij,ij->i", terms, w) - w[rows, labels]).mean() for w in wide]
        return nll, np.array(slopes)

    start, bounds = np.array([0.5, 0.5]), [(1e-6, None)] * 2
    theirs, optimum = best_of(2, lambda: minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds))
    return {"seconds": ours, "to_lbfgsb": ours / theirs, "nll_above_lbfgsb": fit.nll_after - optimum.fun}


def exact_sweep(rng: np.random.Generator, n: int, repeats: int) -> dict[str, float]:
    """Compare the exact sweep of seven stages with replaying a grid of thresholds, vectorised over the rows."""
    labels = rng.integers(0, 1000, n)
    right = rng.random((n, SWEEP_STAGES)) < np.linspace(0.6, 0.9, SWEEP_STAGES)
    predictions = np.where(right, labels[:, None], (labels[:, None] + 1) % 1000)
    confidences = rng.beta(4, 1, (n, SWEEP_STAGES - 1))
    costs = Costs("GFLOPs", np.arange(1.0, SWEEP_STAGES + 1))
    ours, frontier = best_of(repeats * 4, lambda: sweep(confidences, predictions, labels, costs))
    correct, paid = predictions == labels[:, None], costs.cumulative
    always = np.concatenate([confidences, np.full((n, 1), np.inf)], axis=1)

    def grid() -> list[tuple[float, float]]:
        points = []
        for threshold in np.linspace(0, 1, GRID_POINTS):
            stops = (always >= threshold).argmax(axis=1)
            points.append((float(paid[stops].mean()), float(correct[np.arange(n), stops].mean())))
        return points

    theirs, _ = best_of(2, grid)
    return {"seconds": ours, "points": len(frontier.cost), "to_grid": ours / theirs}


def setup(repeats: int) -> dict[str, float]:
    """Time Base and RF from a logit table of two models on 1,531 questions of four options, files included."""
    with scratch() as folder:
        write_table(folder, 4, files=1, calibration=1531, validation=1531)
        base, _ = best_of(repeats, lambda: cauc_ray.fit(folder, models=list(MODELS), method="base"))
        rf, _ = best_of(repeats, lambda: cauc_ray.fit(folder, models=list(MODELS), method="rf", budget=BUDGET))
    return {"base_s": base, "rf_s": rf}


def doors(
    rows: tuple[int, ...] = (50_000, 2_000_000), options: tuple[int, ...] = (1_000, 4), repeats: int = 3
) -> dict[str, Any]:
    """Measure fit, predict and evaluate on arrays of three models, in passes of np.exp(z).sum() over the same arrays.

    Half of the rows choose the threshold. Every figure is the best of the repeats, its pass among them.

    Args:
        rows: Rows of each set of arrays.
        options: Columns of each set of arrays.
        repeats: Measurements of each.
    """
    return {f"{n:,} x {k:,} x 3": _doors_of(n, k, repeats) for n, k in zip(rows, options, strict=True)}


def _doors_of(n: int, k: int, repeats: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, k, n).astype(np.int32)
    strengths = dict(zip(("small", "medium", "large"), np.array([1.2, 1.8, 2.4]) * max(1, np.log10(k)), strict=True))
    arrays = {name: planted_logits(rng, labels, k, strength) for name, strength in strengths.items()}
    costs = {"small": 1.0, "medium": 4.0, "large": 16.0}
    one_row = {name: logits[:1] for name, logits in arrays.items()}
    figures: dict[str, Any] = {}
    warnings.simplefilter("ignore", CaucWarning)  # of planted rows
    for method in ("base", "rf"):
        fit = partial(cauc_ray.fit, arrays, labels, method=method, costs=costs, validation=0.5, budget=6.0)
        policy = fit()
        works: dict[str, Callable[[], Any]] = {
            "fit": fit,
            "predict": partial(policy.predict, arrays),
            "evaluate": partial(cauc_ray.evaluate, arrays, policy, labels=labels),
        }
        figures[method] = {}
        for door, work in works.items():
            pass_s, _ = best_of(repeats, lambda: [np.exp(logits).sum() for logits in arrays.values()])
            figures[method][f"{door}_passes"] = best_of(repeats, work)[0] / pass_s
        figures[method]["one_row_us"] = 1e6 * best_of(100 * repeats, partial(policy.predict, one_row))[0]
    return figures


def best_of(repeats: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the shortest time in seconds that the work took, and its last result."""
    best, result = float("inf"), None
    for _ in range(repeats):
        started = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - started)
    return best, result


def shards(
    rows: int = 200_000,
    options: int = 1_000,
    shards: int = os.cpu_count() or 1,
    methods: tuple[str, ...] = ("base", "rf"),
) -> dict[str, Any]:
    """Compare a fit by shards, out of core, with the fit of the same table in one process: time, memory and numbers.

    Args:
        rows: Rows of the calibration split; validation has a tenth of them.
        options: Options of a row.
        shards: Processes that hold the rows, a CPU each.
        methods: Methods to fit.
    """
    with scratch(shards) as folder:
        table = write_table(folder, options, calibration=rows, validation=max(2, rows // 10))
        size = {"gigabytes": 4e-9 * rows * options * len(MODELS), "shards": shards}
        return size | {method: sharded_fit(table, method, shards) for method in methods}


def write_table(
    table: Path, k: int, models: Mapping[str, tuple[float, float]] = MODELS, *, files: int = FILES, **splits: int
) -> Path:
    """Write models' logits, each split in several files: noise that they share in part, and the label.

    Args:
        table: The folder of the table.
        k: Options of a row.
        models: By name how much logits favour the label, and the cost of a call.
        files: Files of a split.
        splits: Rows of each split.
    """
    for split, n in splits.items():
        for part, ids in enumerate(np.array_split(np.arange(n), files)):
            rng = np.random.default_rng([part, *split.encode()])
            labels = rng.integers(0, k, len(ids)).astype(np.int32)
            shared = 0.7 * rng.standard_normal((len(labels), k), dtype=np.float32)
            for model, (strength, _) in models.items():
                logits = planted_logits(rng, labels, k, strength) + shared
                lists = pa.ListArray.from_arrays(np.arange(len(labels) + 1, dtype=np.int32) * k, logits.ravel())
                columns = {"example_id": [f"{row:08d}" for row in ids], "label": labels, "logits": lists}
                into = table / f"model={model}" / f"split={split}"
                into.mkdir(parents=True, exist_ok=True)
                pq.write_table(pa.table(columns), into / f"part-{part:02d}.parquet", row_group_size=GROUP_ROWS)
    listed = [PoolModel(name=name, cost=cost) for name, (_, cost) in models.items()]
    write_info(table, TableInfo(cost_unit="GFLOPs", logit_kind="raw", models=listed))
    return table


def sharded_fit(table: Path, method: str, n_shards: int) -> dict[str, Any]:
    """Fit once by shards and once in one process."""
    [alone] = printed(sys.executable, "-c", PEAK + ALONE, table, json.dumps(list(MODELS)), method, BUDGET)
    asked = {"models": list(MODELS), "method": method, "budget": BUDGET, "shards": n_shards}
    options = options_of(cauc_ray.fit).of(asked)
    started = time.perf_counter()
    policy, shards = fit_shards(table, options)
    sharded_s = time.perf_counter() - started - shards.start_s
    return {
        "alone_s": alone["seconds"],
        "alone_peak_mb": alone["peak_bytes"] / 1e6,
        "sharded_s": sharded_s,
        "reading_s": shards.open_s,
        "start_s": shards.start_s,
        "passes": shards.n_passes,
        "shard_peak_mb": max(shards.peak_bytes) / 1e6,
        "time_x_shards_to_alone": sharded_s * n_shards / alone["seconds"],
        "largest_difference": largest_difference(policy, Policy.of(json.loads(alone["policy"]))),
    }


def largest_difference(first: Policy, second: Policy) -> float:
    """Return the largest relative difference between numbers of two policies."""
    pairs = zip(_numbers(first.model_dump()), _numbers(second.model_dump()), strict=True)
    return max(abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0 for a, b in pairs)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in _numbers(inner)]
    if isinstance(value, list | tuple):
        return [number for inner in value for number in _numbers(inner)]
    return [float(value)] if isinstance(value, int | float) else []
