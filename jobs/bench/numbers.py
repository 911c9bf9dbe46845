"""Measure the fits, the sweep and the search of chains against what a user would otherwise run, as ratios of one run.

Every figure is the best of the repeats.
"""

from __future__ import annotations

import argparse
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
from jobs.bench.cascades import write_split
from jobs.bench.part import absent

SWEEP_STAGES = 7
GRID_POINTS = 1001


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the sizes."""
    parser.add_argument("--rows", type=int, default=12_500, help="rows of the matrix of logits")
    parser.add_argument("--options", type=int, default=1_000, help="options of a row")
    parser.add_argument("--search-rows", type=int, default=2_500, help="of a split of the table that is searched")
    parser.add_argument("--search-models", type=int, default=MOST_MODELS, help="of that table")
    parser.add_argument("--repeats", type=int, default=5, help="how often each is measured")


def missing(options: argparse.Namespace) -> str | None:
    """Need what the fits are compared with."""
    return absent("scipy", "sklearn")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Take all measurements."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, options.options, options.rows)
    first = planted_logits(rng, labels, options.options, strength=7.0, noise=1.5)
    second = planted_logits(rng, labels, options.options, strength=8.0, noise=2.0)
    return {
        "rows": options.rows,
        "options": options.options,
        **temperature(first, labels, options.repeats),
        **pair(first, second, labels, options.repeats),
        **exact_sweep(rng, options.rows, options.repeats),
        **setup(rng, options.repeats),
        **search(rng, options.search_rows, options.search_models),
    }


def planted_logits(rng: np.random.Generator, labels: Ints, k: int, *, strength: float, noise: float) -> Floats:
    """Return float32 logits (N, K): noise everywhere, and strength, more or less, on the label."""
    logits = rng.standard_normal((len(labels), k)) * noise
    logits[np.arange(len(labels)), labels] += rng.normal(strength, 3.0, len(labels))
    return logits.astype(np.float32)


def temperature(logits: Floats, labels: Ints, repeats: int) -> dict[str, float]:
    """Compare one temperature fit with scikit-learn's temperature calibration and with copies of the matrix."""
    from sklearn.calibration import _TemperatureScaling

    ours, fit = best_of(repeats, lambda: fit_temperature(logits, labels))
    # The calibrator by itself, without the cross-validation that CalibratedClassifierCV puts around it.
    theirs, found = best_of(2, lambda: _TemperatureScaling().fit(logits, labels))
    fresh, _ = best_of(repeats, logits.copy)
    target = np.empty_like(logits)
    warm, _ = best_of(repeats, lambda: np.copyto(target, logits))
    print(f"temperature fit {ours * 1e3:7.1f} ms, T = {fit.temperature:.6f} +- {fit.standard_error:.1g}")
    print(f"  scikit-learn  {theirs * 1e3:7.1f} ms, T = {1 / found.beta_:.6f}: ours takes 1/{theirs / ours:.1f} of it")
    print(f"  a copy of the matrix {fresh * 1e3:.1f} ms into new memory: ours takes {ours / fresh:.1f} copies")
    print(f"  a copy of the matrix {warm * 1e3:.1f} ms into used memory: ours takes {ours / warm:.1f} copies")
    return {
        "temperature_s": ours,
        "temperature_over_sklearn": ours / theirs,
        "temperature_copies_fresh": ours / fresh,
        "temperature_copies_warm": ours / warm,
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

    def theirs_once() -> Any:
        return minimize(objective, np.array([0.5, 0.5]), jac=True, method="L-BFGS-B", bounds=[(1e-6, None)] * 2)

    theirs, found = best_of(2, theirs_once)
    print(f"pair fit        {ours * 1e3:7.1f} ms, NLL {fit.nll_after:.9f}")
    print(f"  L-BFGS-B      {theirs * 1e3:7.1f} ms, NLL {found.fun:.9f}: ours takes 1/{theirs / ours:.1f} of it")
    return {"pair_s": ours, "pair_over_lbfgsb": ours / theirs, "pair_nll_above_lbfgsb": fit.nll_after - found.fun}


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
    print(f"exact sweep     {ours * 1e3:7.2f} ms, {len(frontier.cost):,} operating points of {n:,} x {SWEEP_STAGES}")
    print(f"  {GRID_POINTS}-point grid {theirs * 1e3:6.1f} ms: ours takes 1/{theirs / ours:.0f} of it")
    return {"sweep_s": ours, "sweep_over_grid": ours / theirs}


def setup(rng: np.random.Generator, repeats: int) -> dict[str, float]:
    """Time Base and RF from a logit table of two models on 1,531 questions of four options, files included."""
    with tempfile.TemporaryDirectory() as folder:
        both = planted_table(Path(folder), rng, 1531, 4, 2)
        base, _ = best_of(repeats, lambda: cauc_ray.fit(folder, models=both, method="base"))
        rf, _ = best_of(repeats, lambda: cauc_ray.fit(folder, models=both, method="rf", budget=1.5))
    print(f"set-up from a table of 2 x 1,531 x 4: Base {base * 1e3:.1f} ms, RF {rf * 1e3:.1f} ms")
    return {"setup_base_s": base, "setup_rf_s": rf}


def search(rng: np.random.Generator, n: int, n_models: int) -> dict[str, Any]:
    """Compare the search of the best sub-chain with as many fits of the whole chain as there are sub-chains."""
    found: dict[str, Any] = {"searched_models": n_models}
    with tempfile.TemporaryDirectory() as folder:
        models = planted_table(Path(folder), rng, n, 10, n_models)
        for method in ("base", "rf"):
            searched_s, policy = best_of(
                1, partial(cauc_ray.fit, folder, models=models, method=method, search=True, budget=1.3**n_models)
            )
            whole_s, _ = best_of(2, partial(cauc_ray.fit, folder, models=models, method=method))
            chains = policy.search.n_chains
            ratio = whole_s * chains / searched_s
            print(
                f"{method}: the best of {chains:,} chains in {searched_s:.1f} s; so many fits, {ratio:.1f} times that"
            )
            found[f"search_{method}"] = {"chains": chains, "seconds": searched_s, "fits_over_search": ratio}
    return found


def planted_table(table: Path, rng: np.random.Generator, n: int, k: int, n_models: int) -> list[str]:
    """Write a table of models, each a little better and more expensive than the one before; return their names."""
    models = {f"model-{place}": 1.6**place for place in range(n_models)}
    for split in ("calibration", "validation"):
        labels = rng.integers(0, k, n)
        logits = [planted_logits(rng, labels, k, strength=1.0 + 0.3 * place, noise=1.0) for place in range(n_models)]
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
