"""Measure the fits, the sweep and the search of chains against what a user would otherwise run, as ratios of one run.

Every figure is the best of the repeats.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cauc_ray
from cauc_ray.numbers.calibration import fit_pair, fit_temperature
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.sweep import sweep
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.search import MOST_MODELS
from jobs.bench.part import require
from jobs.bench.planted import planted_logits, write_split

SWEEP_STAGES = 7
GRID_POINTS = 1001


def measure(
    rows: int = 12_500,
    options: int = 1_000,
    search_rows: int = 2_500,
    search_models: int = MOST_MODELS,
    repeats: int = 5,
) -> dict[str, Any]:
    """Take all measurements.

    rows, options: of the matrix of logits.   search_rows, search_models: of a split of the table that is searched.
    repeats: how often each is measured.
    """
    require("sklearn")
    rng = np.random.default_rng(0)
    labels = rng.integers(0, options, rows)
    first = planted_logits(rng, labels, options, 7.0, noise=1.5, spread=3.0)
    second = planted_logits(rng, labels, options, 8.0, noise=2.0, spread=3.0)
    return {
        "temperature": temperature(first, labels, repeats),
        "pair": pair(first, second, labels, repeats),
        "sweep": exact_sweep(rng, rows, repeats),
        "setup": setup(rng, repeats),
        "search": search(rng, search_rows, search_models),
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


def setup(rng: np.random.Generator, repeats: int) -> dict[str, float]:
    """Time Base and RF from a logit table of two models on 1,531 questions of four options, files included."""
    with tempfile.TemporaryDirectory() as folder:
        both = planted_table(Path(folder), rng, 1531, 4, 2)
        base, _ = best_of(repeats, lambda: cauc_ray.fit(folder, models=both, method="base"))
        rf, _ = best_of(repeats, lambda: cauc_ray.fit(folder, models=both, method="rf", budget=1.5))
    return {"base_s": base, "rf_s": rf}


def search(rng: np.random.Generator, n: int, n_models: int) -> dict[str, Any]:
    """Compare the search of the best sub-chain with as many fits of the whole chain as there are sub-chains."""
    found: dict[str, Any] = {"models": n_models}
    with tempfile.TemporaryDirectory() as folder:
        models = planted_table(Path(folder), rng, n, 10, n_models)
        for method in ("base", "rf"):
            searched_s, policy = best_of(
                1, partial(cauc_ray.fit, folder, models=models, method=method, search=True, budget=1.3**n_models)
            )
            whole_s, _ = best_of(2, partial(cauc_ray.fit, folder, models=models, method=method))
            chains = policy.search.n_chains
            found[method] = {"chains": chains, "seconds": searched_s, "fits_to_search": whole_s * chains / searched_s}
    return found


def planted_table(table: Path, rng: np.random.Generator, n: int, k: int, n_models: int) -> list[str]:
    """Write a table of models, each a little better and more expensive than the one before; return their names."""
    models = {f"model-{number}": 1.6**number for number in range(n_models)}
    for split in ("calibration", "validation"):
        labels = rng.integers(0, k, n)
        logits = [planted_logits(rng, labels, k, 1.0 + 0.3 * number, spread=3.0) for number in range(n_models)]
        write_split(table, models, split, [f"{split}-{row}" for row in range(n)], labels, logits)
    return list(models)


def best_of(repeats: int, work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the shortest time in seconds that the work took, and its last result."""
    best, result = float("inf"), None
    for _ in range(repeats):
        started = time.perf_counter()
        result = work()
        best = min(best, time.perf_counter() - started)
    return best, result
