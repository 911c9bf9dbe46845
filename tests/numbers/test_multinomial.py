"""Ridge weights and biases: the minimum that scipy finds; classifiers: what they say of rows not seen before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from synthetic import planted, seeds

from cauc_ray.numbers.calibration import fit_temperatures
from cauc_ray.numbers.logits import log_softmax
from cauc_ray.numbers.multinomial import RidgeFit, fit_classifier, fit_multinomial


def objective(at, sources, labels, features, penalty):
    p, k = len(sources), sources[0].shape[1]
    scores = sum(weight * source for weight, source in zip(at[:p], sources, strict=True))
    nll = -log_softmax(scores + features @ at[p:].reshape(-1, k))[np.arange(len(labels)), labels].sum()
    return nll + penalty * (at[p:] ** 2).sum() / 2


def start_of(n_sources, n_features, k):
    return RidgeFit(np.full(n_sources, 1.0 / n_sources), np.zeros((n_features, k)))


@settings(max_examples=12)
@given(seed=seeds, penalty=st.sampled_from([300.0, 3.0, 0.03]), matrix=st.booleans(), ragged=st.booleans())
def test_weights_and_biases_are_the_minimum_that_scipy_finds(seed, penalty, matrix, ragged):
    rng = np.random.default_rng(seed)
    labels, logits = planted(rng, 300, 4, (1.0, 2.0), ragged=ragged)
    sources = [log_softmax(z) for z in logits]
    sources.append(np.where(np.isfinite(sources[0]), -sources[0], -np.inf))  # whose weight is 0
    finite = [np.where(np.isfinite(z), z, -1e9) for z in sources]
    constant = np.ones((300, 1))
    features = np.column_stack([constant, np.maximum(finite[1], -5)]) if matrix else constant
    start = start_of(3, features.shape[1], 4)
    fit = fit_multinomial(sources, labels, features if matrix else None, penalty, start)
    data = (finite, labels, features, penalty)
    bounds = [(0, None)] * 3 + [(None, None)] * features.shape[1] * 4
    options = {"ftol": 1e-14, "gtol": 1e-9, "maxiter": 10_000, "maxfun": 10**6}
    first = np.concatenate([start.weights, start.biases.ravel()])
    best = minimize(objective, first, data, "L-BFGS-B", bounds=bounds, options=options)
    assert objective(np.concatenate([fit.weights, fit.biases.ravel()]), *data) <= best.fun + 1e-6
    warm = fit_multinomial(sources, labels, features if matrix else None, penalty, fit)
    assert warm.biases == pytest.approx(fit.biases, abs=1e-4)


@pytest.mark.parametrize("says_something", [True, False])
def test_a_classifier_is_of_use_where_features_tell_labels_of_rows_that_it_has_not_seen(says_something):
    rng = np.random.default_rng(3)
    labels = rng.integers(0, 3, 400)
    vectors = 5 + rng.standard_normal((400, 60)) + says_something * np.eye(3, 60)[labels] * 2
    fit = fit_classifier(vectors[:300], labels[:300], 3)
    assert fit.explains == says_something
    if says_something:
        of_new = vectors[300:] @ fit.weights + fit.offsets
        accuracies = [np.mean(s.argmax(axis=1) == y) for s, y in ((of_new, labels[300:]), (fit.held_out, labels[:300]))]
        assert min(accuracies) > 0.6
        assert accuracies[0] == pytest.approx(accuracies[1], abs=0.1)  # held-out rows are as new ones


@settings(max_examples=8)
@given(seed=seeds, kind=st.sampled_from(["weights", "biases", "matrix"]), fold=st.integers(0, 4))
def test_rows_that_are_held_out_have_no_part_in_a_fit(seed, kind, fold):
    labels, logits = planted(np.random.default_rng(seed), 200, 4, (1.0, 2.0))
    sources, rows = [log_softmax(z) for z in logits], slice(40 * fold, 40 * fold + 40)
    features = np.column_stack([np.ones(200), sources[1]]) if kind == "matrix" else None
    start = start_of(2, {"weights": 0, "biases": 1, "matrix": 5}[kind], 4)
    fit = fit_multinomial(sources, labels, features, 3.0, start, held_out=rows)
    *remaining, rest = (np.delete(of, rows, axis=0) for of in (*sources, labels))
    features = None if features is None else np.delete(features, rows, axis=0)
    alone = fit_multinomial(remaining, rest, features, 3.0, start)
    assert fit.weights == pytest.approx(alone.weights, abs=1e-7)
    assert fit.biases == pytest.approx(alone.biases, abs=1e-7)
    if kind == "weights":  # those of CAUC-RF
        assert fit.weights == pytest.approx(fit_temperatures(remaining, rest).weights, rel=1e-3)


def test_rows_of_many_options_may_be_held_out_wherever_they_lie():
    k = 1 << 14
    labels, logits = planted(np.random.default_rng(0), 150, k, (1.0,))
    source, start = log_softmax(logits[0]), start_of(1, 0, k)
    for rows in (slice(0, 4), slice(20, 24), slice(131, 150)):
        fit = fit_multinomial([source], labels, None, np.inf, start, held_out=rows)
        alone = fit_multinomial([np.delete(source, rows, axis=0)], np.delete(labels, rows), None, np.inf, start)
        assert fit.weights == pytest.approx(alone.weights, abs=1e-7)
