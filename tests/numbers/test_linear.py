"""Weights and linear biases: the minimum that scipy finds, with priors, bounds, free weights and missing options."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from synthetic import planted, seeds

from cauc_ray.numbers.calibration import fit_linear
from cauc_ray.numbers.logits import log_softmax, softmax


def objective(at, sources, labels, features, precisions):
    p, k = len(sources), sources[0].shape[1]
    scores = sum(weight * source for weight, source in zip(at[:p], sources, strict=True))
    biases = at[p:].reshape(-1, k)
    if len(biases):
        scores = scores + features @ biases
    return (
        -log_softmax(scores)[np.arange(len(labels)), labels].sum()
        + (np.array(precisions)[:, None] * biases**2).sum() / 2
    )


@settings(max_examples=12)
@given(seed=seeds, terms=st.sampled_from(["none", "bias", "matrix", "both"]), ragged=st.booleans())
def test_weights_and_biases_are_the_minimum_that_scipy_finds(seed, terms, ragged):
    rng = np.random.default_rng(seed)
    labels, logits = planted(rng, 300, 4, (1.0, 2.0), ragged=ragged)
    sources = [log_softmax(z) for z in logits]
    sources.append(np.eye(4)[sources[1].argmax(axis=1)])
    probabilities, constant = softmax(logits[1]), np.ones((300, 1))
    features = {
        "none": np.empty((300, 0)),
        "bias": constant,
        "matrix": probabilities,
        "both": np.column_stack([constant, probabilities]),
    }[terms]
    precisions = {"none": [], "bias": [2.0], "matrix": [1.0] * 4, "both": [3.0] + [0.5] * 4}[terms]
    free = [False, False, True]
    fit = fit_linear(sources, labels, features if terms in ("matrix", "both") else None, precisions, free=free)
    at = np.concatenate([fit.weights, fit.biases.ravel()])
    finite = [np.where(np.isfinite(z), z, -1e9) for z in sources]
    data = (finite, labels, features, precisions)
    start = np.concatenate([np.full(3, 1 / 3), np.zeros(len(precisions) * 4)])
    bounds = [(0, None), (0, None), (None, None)] + [(None, None)] * (len(start) - 3)
    options = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 10_000, "maxfun": 10**6}
    best = minimize(objective, start, data, "L-BFGS-B", bounds=bounds, options=options)
    assert objective(at, *data) <= best.fun + 1e-6
    assert fit.nll * 300 == pytest.approx(objective(at, sources, labels, features, [0.0] * len(precisions)), abs=1e-6)


def test_a_start_near_the_minimum_ends_at_the_same_one():
    rng = np.random.default_rng(0)
    labels, logits = planted(rng, 500, 5, (1.0, 2.0))
    sources = [log_softmax(z) for z in logits]
    cold = fit_linear(sources, labels, None, [1.0])
    warm = fit_linear(sources, labels, None, [1.0], start=cold)
    assert warm.weights == pytest.approx(cold.weights, rel=1e-6)
    assert warm.biases == pytest.approx(cold.biases, abs=1e-6)
