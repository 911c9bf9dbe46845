"""Fits, sweeps and searches against what a user would otherwise run, and by shards against one process."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import cauc_ray
from cauc_ray.api.offline import evaluate_shards, fit_shards
from cauc_ray.api.options import EvaluateOptions, FitOptions
from cauc_ray.data.writing import PoolModel, TableInfo, write_info
from cauc_ray.errors import CaucWarning
from cauc_ray.execution.outcomes import Outcome
from cauc_ray.numbers.calibration import fit_pair, fit_temperature
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.sweep import sweep
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.search import MOST_MODELS
from jobs.bench.part import by_turns
from jobs.bench.planted import planted_logits
from jobs.bench.processes import own_session, printed, scratch

SWEEP_STAGES = 7
GRID_POINTS = 1001
MODELS = {"small": (4.0, 1.0), "large": (6.0, 4.0)}
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


def numbers(
    rows: int = 12_500,
    options: int = 1_000,
    search_rows: int = 2_500,
    search_models: int = MOST_MODELS,
    repeats: int = 5,
) -> dict[str, Any]:
    """Measure fits, the sweep and the search of chains against what a user would otherwise run, as ratios of one run.

    Every figure is the best of the repeats.

    rows, options: of the matrix of logits.   search_rows, search_models: of a split of the table that is searched.
    repeats: how often each is measured.
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
        "search": search(search_rows, search_models),
    }


def temperature(logits: Floats, labels: Ints, repeats: int) -> dict[str, float]:
    """Compare one temperature fit with scikit-learn's temperature calibration and with copies of the matrix."""
    from sklearn.calibration import _TemperatureScaling

    ours, fit = best_of(repeats, lambda: fit_temperature(logits, labels))
    # The calibrator by itself, without the cross-validation that CalibratedClassifierCV puts around it.
    theirs, found = best_of(2, lambda: _TemperatureScaling().fit(logits, labels))
    fresh, _ = best_of(repeats, logits.copy)
    target = np.empty_like(logits)
    warm, _ = best_of(repeats, lambda: np.copyto(target, logits))
    return {
        "seconds": ours,
        "to_sklearn": ours / theirs,
        "apart_from_sklearn": abs(float(fit.temperature * found.beta_) - 1),
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
    theirs, found = best_of(2, lambda: minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds))
    return {"seconds": ours, "to_lbfgsb": ours / theirs, "nll_above_lbfgsb": fit.nll_after - found.fun}


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
        both = planted_table(folder, 1531, 4, 2)
        base, _ = best_of(repeats, lambda: cauc_ray.fit(folder, models=both, method="base"))
        rf, _ = best_of(repeats, lambda: cauc_ray.fit(folder, models=both, method="rf", budget=1.5))
    return {"base_s": base, "rf_s": rf}


def search(n: int, n_models: int) -> dict[str, Any]:
    """Compare the search of the best sub-chain with as many fits of the whole chain as there are sub-chains."""
    found: dict[str, Any] = {"models": n_models}
    with scratch() as folder:
        models = planted_table(folder, n, 10, n_models)
        for method in ("base", "rf"):
            searched_s, policy = best_of(
                1, partial(cauc_ray.fit, folder, models=models, method=method, search=True, budget=1.3**n_models)
            )
            whole_s, _ = best_of(2, partial(cauc_ray.fit, folder, models=models, method=method))
            chains = policy.search.n_chains
            found[method] = {"chains": chains, "seconds": searched_s, "fits_to_search": whole_s * chains / searched_s}
    return found


def planted_table(table: Path, n: int, k: int, n_models: int) -> list[str]:
    """Write a table of models, each a little better and more expensive than the one before; return their names."""
    models = {f"model-{number}": (1.0 + 0.3 * number, 1.6**number) for number in range(n_models)}
    write_table(table, k, models, files=1, calibration=n, validation=n)
    return list(models)


def doors(
    rows: tuple[int, ...] = (50_000, 2_000_000), options: tuple[int, ...] = (1_000, 4), repeats: int = 3
) -> dict[str, Any]:
    """Measure fit, predict and evaluate on arrays of three models, in passes of np.exp(z).sum() over the same arrays.

    Half of the rows choose the threshold. Every figure is the best of the repeats, its pass among them.

    rows, options: of each set of arrays.   repeats: how often each is measured.
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
    sample: int = 0,
    methods: tuple[str, ...] = ("base", "rf"),
    sweep_rows: int = 4_000,
    seeds: int = 6,
    turns: int = 3,
) -> dict[str, Any]:
    """Measure fits, evaluations and sweeps on several cores: fits against one process, the others against one core.

    A fit by shards, out of core, is compared with the fit of the same table in a process of its own: time, memory and
    numbers. An evaluation runs with one shard and with several, a sweep with one task at a time and with several; each
    by turns, and the median of the turns counts. An evaluation's time is all but the start of its shards, a sweep's
    from the start of its first task to the end of its last. The share of linear is t1 / (n tn). A worker's first task
    imports what all of them use, a second or two: the sizes are such that this matters little.

    rows: of the calibration split; validation has a tenth, test half.   options: of a row.   shards: how many hold the
    rows, and tasks at a time, a CPU each.   sample: compare with one process on a table of this many rows, where the
    whole is too large for one.   methods: what is fitted.   sweep_rows: of a swept split.   seeds: of a sweep; four
    tasks each.   turns: of evaluations and sweeps.
    """
    with scratch() as folder:
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


def write_table(
    table: Path, k: int, models: Mapping[str, tuple[float, float]] = MODELS, *, files: int = FILES, **splits: int
) -> Path:
    """Write models' logits as files of some parts: noise that they share in part, and the label.

    models: how much logits favour the label, and the cost of a call.   splits: rows of each.
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

    def on(n_cpus: int, turn: int) -> float:
        with own_session(n_cpus):
            return seconds(n_cpus, turn)

    taken = by_turns({str(own): partial(on, own) for own in {1, n}}, turns, lambda seconds: f"{seconds:.2f} s")
    one, several = median(taken["1"]), median(taken[str(n)])
    return {"one_s": one, "several_s": several, "share_of_linear": one / (n * several)}


def evaluate_seconds(table: Path, policy: Policy, n_shards: int) -> float:
    """Return the seconds of an evaluation by shards, without their start."""
    started = time.perf_counter()
    _, shards = evaluate_shards(table, policy, EvaluateOptions(shards=n_shards))
    return time.perf_counter() - started - shards.start_s


def sweep_seconds(table: Path, n_seeds: int, out: Path) -> float:
    """Return the seconds of a comparison over budgets from the start of its first task to the end of its last."""
    budgets = (0.4, 0.6, 0.8, 1.0)
    spans: list[tuple[float, float]] = []

    def note(outcome: Outcome, number: int, of: int) -> None:
        now = time.perf_counter()
        spans.append((now - outcome.seconds, now))

    comparison = cauc_ray.compare(
        table,
        models=list(MODELS),
        methods=SWEPT,
        seeds=range(n_seeds),
        relative_budgets=budgets,
        address="local",
        output=out,
        on_cell=note,
    )
    if comparison.not_run:
        raise AssertionError(comparison.not_run[0])
    return max(end for _, end in spans) - min(start for start, _ in spans)
