"""Queries whose embedding predicts which model is right on them, as plainly as one wants; and a router's gain there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from synthetic import chain_of as synthetic_chain
from synthetic import write_chains

from cauc_ray.policies.family import cascade_of, chain_of
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.solved import SolvedPolicy
from cauc_ray.policies.trace import Examples


def examples(seed, split, *, n, m=2, strength=6.0, d=16, k=4, ragged=False, per_call=False, embedded=True, texts=None):
    """Return n examples of m models.

    strength: how well the embedding (or, where there is none, the first model's confidence) predicts who is right;
    0 for not at all.
    """
    rng = np.random.default_rng([seed, split])
    directions = np.linalg.qr(np.random.default_rng(seed).standard_normal((d, d)))[0][:, :m]
    embeddings = rng.standard_normal((n, d))
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    odds = strength * embeddings @ directions + np.linspace(0.0, 0.6, m)
    right = rng.random((n, m)) < 1 / (1 + np.exp(-odds))
    n_options = rng.integers(2, k + 1, n) if ragged else np.full(n, k)
    labels = rng.integers(0, n_options)
    logits = []
    for model in range(m):
        z = rng.standard_normal((n, k))
        z[np.arange(k) >= n_options[:, None]] = -np.inf
        answer = (labels + np.where(right[:, model], 0, rng.integers(1, n_options))) % n_options
        sure = strength * right[:, 0] / 2 if model == 0 and not embedded else 0.0
        z[np.arange(n), answer] = z.max(axis=1) + 0.5 + sure
        logits.append(z.astype(np.float32))
    per_model = np.array([1.0, 10.0, 30.0, 90.0])[:m]
    costs = per_model * rng.uniform(0.5, 2.0, (n, m)) if per_call else per_model
    chain = synthetic_chain(labels, logits, [f"{split}-{row}" for row in range(n)], costs)
    return Examples(chain, embeddings.astype(np.float32) if embedded else None, texts)


def problem(seed=0, *, n=600, n_test=4000, **options):
    """Return a Fitting of n examples in each split, and test examples of the same kind."""
    fitting = Fitting(examples(seed, 0, n=n, **options), examples(seed, 1, n=n, **options), seed=seed)
    return fitting, examples(seed, 2, n=n_test, **options)


def changed(fitting, change):
    """Return a Fitting whose splits are changed."""
    return replace(fitting, calibration=change(fitting.calibration), validation=change(fitting.validation))


def gain_over_mixture(fitted, test):
    """Return by how much accuracy exceeds that of the first and last model mixed at random at equal cost.

    The mean over budgets between the two, for each of which the setting was chosen on validation.
    """
    costs, accuracies = test.chain.costs.means, test.correct().mean(axis=0)
    points = fitted.points
    budgets = np.linspace(max(points.cost.min(), costs[0]), costs[-1], 9)[1:-1]
    settings = np.array([points.settings[points.index_of_best(budget)] for budget in budgets])
    curve = fitted.curve(test, settings)
    share = (curve.cost - costs[0]) / (costs[-1] - costs[0])
    return float(np.mean(curve.accuracy - (1 - share) * accuracies[0] - share * accuracies[-1]))


def vectors_of(fitted, test):
    """Return what a router reads of queries."""
    return fitted.members[0].vectors(test.chain.logits[0] if test.embeddings is None else test.embeddings)


def values_of(fitted, test):
    """Return what a router expects of each model on queries, or the probability that the last one wins."""
    return fitted.members[0].values(vectors_of(fitted, test))


def scores(fitted, test):
    """Return all numbers that a fitted method has of examples whose labels it does not see."""
    unlabelled, columns = test.without_labels(), []
    for member in fitted.members:
        trace = cascade_of(member)(unlabelled) if isinstance(member, Policy) else member.trace(unlabelled)
        compared = trace.confidences if isinstance(member.threshold, tuple) else trace.compared
        if isinstance(member, SolvedPolicy):
            compared = member.readings(chain_of(member, unlabelled).logits).reshape(len(test), -1)
        columns.append(compared)
    return np.column_stack(columns)


def train_quickly(patch):
    """Train the networks of baselines at a higher rate for fewer steps."""
    from cauc_ray.baselines.networks import graph, model_vectors  # torch, which not all who plant need

    patch.setattr(model_vectors, "EMBED_RATE", 1e-3)
    patch.setattr(model_vectors, "EMBED_STEPS", 300)
    patch.setattr(graph, "LEARNING_RATE", 3e-3)
    patch.setattr(graph, "EPOCHS", 150)
    patch.setattr(model_vectors, "DC_SCHEDULE", replace(model_vectors.DC_SCHEDULE, n_steps=100))


def write_table(folder, splits):
    """Write examples by split as a logit table, with their embeddings, if they have any, by an encoder `enc`."""
    for split, part in splits.items():
        if part.embeddings is not None:
            into = folder / "embedding=enc" / f"split={split}"
            into.mkdir(parents=True)
            ids = [f"{split}-{example}" for example in part.chain.example_ids]
            vectors = pa.array(part.embeddings.tolist(), pa.list_(pa.float32()))
            pq.write_table(pa.table({"example_id": ids, "embedding": vectors}), into / "part-0.parquet")
    return write_chains(folder, {split: part.chain for split, part in splits.items()}, logit_kind="raw")
