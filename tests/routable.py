"""Queries whose embeddings tell, or do not tell, which of the models will be right."""

from __future__ import annotations

import numpy as np
from synthetic import chain

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.costs import Costs
from cauc_ray.policies.method import Fitting
from cauc_ray.policies.trace import Examples


def examples(seed, n, *, told, n_models=2, k=4, d=8, place=0):
    """Return queries of two kinds, told apart by the first component of their embedding, if that is told.

    Model 0 is right on 95 % of the first kind and on 30 % of the second; all others on 85 % of either. Its logits
    say nothing but its answer.
    """
    rng = np.random.default_rng([seed, place])
    hard = rng.random(n) < 0.5
    labels = rng.integers(0, k, n).astype(np.int32)
    logits = []
    for model in range(n_models):
        right = rng.random(n) < (np.where(hard, 0.3, 0.95) if model == 0 else 0.85)
        answers = np.where(right, labels, (labels + rng.integers(1, k, n)) % k)
        logits.append((2.0 * (answers[:, None] == np.arange(k))).astype(np.float32))
    embeddings = rng.standard_normal((n, d))
    if told:
        embeddings[:, 0] = np.where(hard, 4.0, -4.0) + rng.standard_normal(n)
    costs = Costs("GFLOPs", np.array([1.0, 10.0, 30.0, 90.0])[:n_models])
    names = tuple(f"m{j}" for j in range(n_models))
    ids = tuple(f"{place}-{row:05d}" for row in range(n))
    return Examples(
        ChainLogits(
            models=names,
            logits=tuple(logits),
            example_ids=ids,
            labels=labels,
            costs=costs,
            per_call_costs=False,
            source="planted",
            logit_kind="raw",
        ),
        np.float32(embeddings),
    )


def splits(seed, *, told, n=600, n_test=4000, n_models=2):
    """Return a fitting and a test split of such queries."""
    sizes = (n, n, n_test)
    parts = [examples(seed, size, told=told, n_models=n_models, place=p) for p, size in enumerate(sizes)]
    return Fitting(*parts[:2]), parts[2]


def confident(seed, *, n=600, n_test=4000, n_models=2, ragged=False, per_call=False, embedded=False):
    """Return a fitting and a test split of planted logits, whose confidence tells who is right."""
    parts = []
    for place, size in enumerate((n, n, n_test)):
        data = chain(seed, size, 4, (1.0, 1.7, 2.4, 3.1)[:n_models], ragged=ragged, per_call=per_call, shift=place)
        embeddings = np.random.default_rng([seed, place]).standard_normal((size, 3)) if embedded else None
        parts.append(Examples(data, None if embeddings is None else np.float32(embeddings)))
    return Fitting(*parts[:2]), parts[2]


def mixture(test, cost):
    """Return the accuracy that the first and the last model have when mixed by lot at a mean cost."""
    costs, accuracies = test.chain.costs.means, test.correct().mean(axis=0)
    share = (cost - costs[0]) / (costs[-1] - costs[0])
    return accuracies[0] + share * (accuracies[-1] - accuracies[0])


def gains(fitted, test):
    """Return how much better than the mixture a fitted method is on test, at points that cost less than the last."""
    curve = fitted.curve(test, fitted.points.settings)
    inside = (curve.cost > test.chain.costs.means[0]) & (curve.cost < test.chain.costs.means[-1])
    return curve.accuracy[inside] - mixture(test, curve.cost[inside])
