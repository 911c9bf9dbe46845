import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from strategies import seeds, shapes
from synthetic import fit_bias_corrected, planted

from cauc_ray.numbers.calibration import FitStatus, fit_temperature

variances = st.sampled_from([0.05, 1.0, 20.0])


def biased(seed, shape, strength=1.0, bias=1.0):
    """Return logits that favour some options, whatever the row, and labels."""
    rng = np.random.default_rng(seed)
    labels, (logits,) = planted(rng, *shape, [strength], dtype=np.float64)
    return logits + rng.normal(0, bias, shape[1]), labels


def objective(values, logits, labels, variance):
    """Return the mean NLL with the prior's part, and its gradient, by scipy's log-softmax."""
    n, rows = len(labels), np.arange(len(labels))
    weight, offsets = values[0], values[1:]
    logs = log_softmax(weight * logits + offsets, axis=1)
    residuals = np.exp(logs)
    residuals[rows, labels] -= 1
    slope = np.concatenate([[(residuals * logits).sum()], residuals.sum(axis=0) + offsets / variance]) / n
    return float(-logs[rows, labels].mean() + offsets @ offsets / (2 * variance * n)), slope


def value_of(fit, logits, labels, variance):
    return objective(np.array([1 / fit.temperature, *fit.biases]), logits, labels, variance)[0]


@given(seeds, shapes, variances)
def test_finds_the_minimum_that_scipy_finds_no_worse_than_the_temperature_alone(seed, shape, variance):
    logits, labels = biased(seed, shape)
    fit = fit_bias_corrected(logits, labels, variance)
    best = minimize(
        objective,
        np.concatenate([[0.5], np.zeros(shape[1])]),
        (logits, labels, variance),
        jac=True,
        method="L-BFGS-B",
        bounds=[(1e-9, 1e3)] + [(None, None)] * shape[1],
        options={"ftol": 1e-15, "gtol": 1e-9, "maxiter": 5000},
    )
    # Where the minimum lies at an infinite temperature both are clamped, each at a bound of its own.
    assert value_of(fit, logits, labels, variance) <= best.fun + 1e-8
    alone = fit_temperature(logits, labels)
    assert fit.nll_before == alone.nll_before
    assert fit.nll_after <= alone.nll_after + 1e-9
    assert sum(fit.biases) == pytest.approx(0, abs=1e-9)
    if fit.status is FitStatus.CONVERGED:
        at = np.array([1 / fit.temperature, *fit.biases])
        assert np.abs(objective(at, logits, labels, variance)[1]).max() < 1e-7  # nothing is left to gain


def test_of_two_options_it_is_the_logistic_regression_whose_penalty_is_the_prior():
    logits, labels = biased(1, (600, 2), strength=1.5)
    fit = fit_bias_corrected(logits, labels)
    # The weight of a large feature costs next to nothing. Offsets -d/2 and d/2 are charged d^2 / 4, half of what a
    # weight d is at C = 1.
    features = np.stack([1e3 * (logits[:, 1] - logits[:, 0]), np.ones(len(labels))], axis=1)
    theirs = LogisticRegression(C=2.0, fit_intercept=False, tol=1e-12, max_iter=10_000).fit(features, labels)
    assert fit.biases[1] - fit.biases[0] == pytest.approx(theirs.coef_[0, 1], rel=1e-4)
    assert 1 / fit.temperature == pytest.approx(1e3 * theirs.coef_[0, 0], rel=1e-4)


@given(seeds, shapes, st.integers(0, 5))
def test_nothing_depends_on_the_order_of_rows_or_of_options_or_on_a_constant_per_row(seed, shape, moved):
    logits, labels = biased(seed, shape)
    fit = fit_bias_corrected(logits, labels)
    rng = np.random.default_rng(seed)
    order, options = rng.permutation(shape[0]), np.roll(np.arange(shape[1]), moved)
    other = (logits + rng.normal(0, 10, (shape[0], 1)))[order][:, options]
    again = fit_bias_corrected(other, np.argsort(options)[labels[order]])
    assert again.status is fit.status
    np.testing.assert_allclose(again.biases, np.array(fit.biases)[options], atol=1e-6)
    if fit.status is FitStatus.CONVERGED:
        assert again.temperature == pytest.approx(fit.temperature, rel=1e-6)


@given(seeds, shapes)
@settings(max_examples=20)
def test_a_strong_prior_leaves_the_temperature(seed, shape):
    logits, labels = biased(seed, shape)
    fit, alone = fit_bias_corrected(logits, labels, 1e-9), fit_temperature(logits, labels)
    assert np.abs(fit.biases).max() < 1e-5
    if alone.status is FitStatus.CONVERGED:
        assert fit.temperature == pytest.approx(alone.temperature, rel=1e-4)
        assert fit.standard_error == pytest.approx(alone.standard_error, rel=1e-2)


def test_parts_give_what_the_whole_gives():
    logits, labels = biased(5, (700, 5))
    found, expected = fit_bias_corrected(logits, labels, cuts=(90, 400)), fit_bias_corrected(logits, labels)
    assert found.temperature == pytest.approx(expected.temperature, rel=1e-9)
    assert found.standard_error == pytest.approx(expected.standard_error, rel=1e-9)
    np.testing.assert_allclose(found.biases, expected.biases, atol=1e-9)


@pytest.mark.parametrize("k", [150, 400])
def test_many_options_converge_too(k):
    logits, labels = biased(6, (900, k), strength=4.0)
    fit = fit_bias_corrected(logits.astype(np.float32), labels)
    assert fit.status is FitStatus.CONVERGED
    at = np.array([1 / fit.temperature, *fit.biases])
    assert np.abs(objective(at, logits.astype(np.float32).astype(np.float64), labels, 1.0)[1]).max() < 1e-8


def test_separable_data_are_clamped_as_the_temperature_is():
    logits, _ = biased(7, (100, 4))
    labels = logits.argmax(axis=1)
    fit, alone = fit_bias_corrected(logits, labels), fit_temperature(logits, labels)
    assert fit.status is FitStatus.SEPARABLE
    assert fit.temperature == alone.temperature
    assert set(fit.biases) == {0.0}
    assert np.isnan(fit.standard_error)


def test_data_that_offsets_alone_would_separate_stay_finite():
    """A model that always prefers one option slightly: offsets make every row right, and would grow without bound."""
    rng = np.random.default_rng(8)
    labels = rng.integers(0, 3, 300)
    logits = np.eye(3)[labels] + np.array([1.5, 0.0, 0.0])
    fit = fit_bias_corrected(logits, labels)
    assert fit.status is FitStatus.CONVERGED
    assert np.isfinite(fit.biases).all()
    assert ((logits / fit.temperature + fit.biases).argmax(axis=1) == labels).all()
    assert (logits.argmax(axis=1) != labels).any()


def test_uninformative_and_constant_logits_leave_the_shares_of_the_options():
    rng = np.random.default_rng(9)
    labels = np.repeat([0, 1, 2], [200, 100, 100])
    against = -4.0 * np.eye(3)[labels] + 0.1 * rng.standard_normal((400, 3))
    for logits in (against, np.full((400, 3), 7.0)):
        fit = fit_bias_corrected(logits, labels, 1e6)
        assert fit.status is FitStatus.UNINFORMATIVE
        assert np.isnan(fit.standard_error)
        shares = np.exp(fit.biases) / np.exp(fit.biases).sum()
        np.testing.assert_allclose(shares, [0.5, 0.25, 0.25], atol=1e-3)
