"""Logits with known properties, and slow implementations that tests hold the fast ones against."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from cauc_ray.data.writing import write_logits
from cauc_ray.files.documents import write_json
from cauc_ray.numbers.calibration import PRIOR_VARIANCE, Parts, solve_bias_corrected, solve_temperatures
from cauc_ray.numbers.chain import ChainLogits, ChainPart, Costs

SPLITS = ("calibration", "validation", "test")

seeds = st.integers(0, 2**32 - 1)


def planted(rng, n, k, strengths, *, ragged=False, dtype=np.float32):
    """Return labels (n,) and for each strength logits (n, k) that favour the label by about that much."""
    n_options = rng.integers(max(2, k - 2), k + 1, n) if ragged else np.full(n, k)
    labels = (rng.random(n) * n_options).astype(np.int32)
    shared = rng.standard_normal((n, k))
    logits = []
    for strength in strengths:
        z = rng.standard_normal((n, k)) + 0.7 * shared
        z[np.arange(n), labels] += rng.normal(strength, 1.5, n)
        z[np.arange(k) >= n_options[:, None]] = -np.inf
        logits.append(z.astype(dtype))
    return labels, logits


def chain(seed=0, n=400, k=5, strengths=(1.0, 1.7, 2.4), *, ragged=False, per_call=False, shift=0):
    """Return a ChainLogits of planted logits, cheapest first."""
    rng = np.random.default_rng([seed, shift])
    labels, logits = planted(rng, n, k, strengths, ragged=ragged)
    per_model = np.array([1.0, 4.0, 15.0, 40.0, 90.0])[: len(strengths)]
    costs = per_model * rng.uniform(0.5, 2.0, (n, len(strengths))) if per_call else per_model
    return chain_of(labels, logits, [f"{shift}-{row:05d}" for row in range(n)], costs)


def chain_of(labels, logits, example_ids, costs):
    """Return a ChainLogits of models m0, m1, ...   costs: of their calls, (M,) or (N, M)."""
    return ChainLogits(
        models=tuple(f"m{j}" for j in range(len(logits))),
        logits=tuple(logits),
        example_ids=tuple(example_ids),
        labels=labels.astype(np.int32),
        costs=Costs("GFLOPs", costs),
        per_call_costs=costs.ndim == 2,
        source="planted",
        logit_kind="raw",
    )


def splits(seed=0, n=200, n_splits=2, **options):
    """Return that many chains of the same models on different rows."""
    return tuple(chain(seed, n, shift=shift, **options) for shift in range(n_splits))


def rows_of(data, rows):
    """Return some rows of a chain, in any order and maybe more than once."""
    return replace(
        data.of_rows(rows), example_ids=tuple(f"{at}-{data.example_ids[row]}" for at, row in enumerate(rows))
    )


def steps(policy, logits):
    """Yield a policy's steps, each with the state of the one before."""
    state = None
    for stage, of_stage in enumerate(logits):
        step = policy.step(stage, of_stage, state)
        yield step
        state = step.state


def possible(logits):
    """Return the logits of each row's options as a table lists them: without those that the row lacks."""
    return [row[np.isfinite(row)] for row in logits]


def write_chains(folder: Path, chains, written=possible, **info):
    """Write chains by split as a logit table, and return its folder.

    Args:
        folder: The table's folder.
        chains: ChainLogits by split.
        written: Returns what is written of a model's logits, (N, K).
        info: More of pool.json.
    """
    for split, data in chains.items():
        ids = [f"{split}-{example}" for example in data.example_ids]
        for stage, (model, logits) in enumerate(zip(data.models, data.logits, strict=True)):
            costs = data.costs.per_call[:, stage] if data.per_call_costs else None
            write_logits(folder, model, split, example_ids=ids, labels=data.labels, logits=written(logits), costs=costs)
    models = [{"name": m, "cost": float(c)} for m, c in zip(data.models, data.costs.means, strict=True)]
    write_json(folder / "pool.json", {"cost_unit": "GFLOPs", "note": "planted", "models": models, **info})
    return folder


def write_table(folder: Path, *, seed=7, n=300, **options):
    """Write a logit table of planted logits with three splits, and return its chains by split."""
    chains = {split: chain(seed, n, shift=place, **options) for place, split in enumerate(SPLITS)}
    write_chains(folder, chains, logit_kind="raw")
    return chains


def softmax(z):
    """Return the softmax of one vector, in plain float64."""
    e = np.exp(np.asarray(z, np.float64) - np.max(z))
    return e / e.sum()


def nll(weights, sources, labels):
    """Return the mean NLL of softmax(sum of weighted sources), by scipy's logsumexp."""
    from scipy.special import logsumexp

    scores = sum(w * np.asarray(s, np.float64) for w, s in zip(weights, sources, strict=True))
    return float((logsumexp(scores, axis=1) - scores[np.arange(len(labels)), labels]).mean())


def fit_bias_corrected(logits, labels, variance=PRIOR_VARIANCE, cuts=()):
    """Return the fit of a temperature and a bias for each option, of rows in parts that end at cuts."""
    parts = [ChainPart((logits[rows],), labels[rows], rows) for rows in np.split(np.arange(len(labels)), cuts)]
    whole = Parts(lambda ask: [ask(part) for part in parts], len(labels))
    return solve_bias_corrected(whole, solve_temperatures(whole), variance)
