"""Fits of temperatures, of pairs, with biases and of isotonic maps against scipy and scikit-learn."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar
from scipy.special import log_softmax
from sklearn.calibration import _TemperatureScaling
from sklearn.isotonic import IsotonicRegression
from synthetic import fit_bias_corrected, nll, planted, seeds
from threadpoolctl import threadpool_info, threadpool_limits

from cauc_ray.errors import DataError
from cauc_ray.numbers.calibration import FitStatus, fit_pair, fit_temperature
from cauc_ray.numbers.calibrators import fit_isotonic

# Rows and options of a matrix of logits.
shapes = st.tuples(st.integers(20, 300), st.integers(2, 12))


def one_model(seed, shape, strength=1.0, *, ragged=False):
    rng = np.random.default_rng(seed)
    labels, (logits,) = planted(rng, *shape, [strength], ragged=ragged, dtype=np.float64)
    return logits, labels


def best_by_scipy(logits, labels):
    def objective(log_t):
        return nll([np.exp(-log_t)], [logits], labels)

    best = minimize_scalar(objective, bounds=(-6, 6), method="bounded", options={"xatol": 1e-12})
    return float(np.exp(best.x)), best.fun


# Far below the others, a label's terms are beyond the end of float32, and of float64.
@given(seeds, shapes, st.booleans(), st.sampled_from([0.0, 100.0, 1e4, 1e6]))
def test_a_temperature_is_the_minimum_that_scipy_finds(seed, shape, ragged, depth):
    logits, labels = one_model(seed, shape, ragged=ragged)
    logits[5, labels[5]] -= depth
    fit = fit_temperature(logits, labels)
    expected, lowest = best_by_scipy(logits, labels)
    assert fit.nll_after <= lowest + 1e-9
    assert fit.nll_after == pytest.approx(nll(fit.weights, [logits], labels), rel=1e-6)
    assert fit.nll_before == pytest.approx(nll([1.0], [logits], labels), rel=1e-9)
    if fit.status is FitStatus.CONVERGED and 0.01 < expected < 100:  # inside scipy's bounds
        assert fit.temperature == pytest.approx(expected, rel=1e-4)


@given(seeds, shapes, st.floats(1e-3, 1e3))
def test_temperature_scales_with_the_logits_and_ignores_row_order_constants_and_padding(seed, shape, factor):
    logits, labels = one_model(seed, shape)
    fit, scaled = fit_temperature(logits, labels), fit_temperature(factor * logits, labels)
    expected = fit.temperature
    assert scaled.status is fit.status
    assert scaled.temperature == pytest.approx(factor * expected, rel=1e-8)
    if fit.status is FitStatus.CONVERGED:
        assert scaled.standard_error == pytest.approx(factor * fit.standard_error, rel=1e-3)
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    assert fit_temperature(logits[order], labels[order]).temperature == pytest.approx(expected, rel=1e-8)
    shifted = logits + rng.normal(0, 100, (len(labels), 1))
    assert fit_temperature(shifted, labels).temperature == pytest.approx(expected, rel=1e-6)
    padded = np.pad(logits, ((0, 0), (0, 3)), constant_values=-np.inf)
    assert fit_temperature(padded, labels).temperature == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize("shape", [(6_000, 30), (6_000, 700)])
def test_float32_logits_give_the_temperature_of_their_float64_copy_and_of_scikit_learn(shape):
    logits, labels = one_model(2, shape, strength=3.0)
    narrow = logits.astype(np.float32)
    fit, wide = fit_temperature(narrow, labels), fit_temperature(narrow.astype(np.float64), labels)
    assert fit.temperature == pytest.approx(wide.temperature, rel=1e-6)
    assert fit.nll_after == pytest.approx(wide.nll_after, rel=1e-6)
    assert wide.temperature == pytest.approx(1 / _TemperatureScaling().fit(logits, labels).beta_, rel=1e-3)


def test_the_number_of_threads_changes_no_bit():
    logits, labels = one_model(3, (20_000, 100), strength=2.0)
    fits = []
    for n_threads in (1, 2, 3):
        with threadpool_limits(n_threads):
            assert {pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"} == {n_threads}
            fits.append(fit_temperature(logits, labels))
    assert fits[0] == fits[1] == fits[2]


@pytest.mark.parametrize("fit", [fit_temperature, fit_bias_corrected])
def test_standard_error_is_the_spread_over_samples(fit):
    rng = np.random.default_rng(4)
    logits, labels = one_model(4, (40_000, 4), strength=1.5)
    rows = rng.integers(0, len(labels), (150, 500))
    fits = [fit(logits[sample], labels[sample]) for sample in rows]
    # The spread over 150 samples is itself known to 6 %.
    spread = np.std([sample.temperature for sample in fits])
    assert np.median([sample.standard_error for sample in fits]) == pytest.approx(spread, rel=0.25)


@pytest.mark.parametrize(("n", "k"), [(10, 2), (300, 10), (6000, 4)])
def test_separable_data_are_fitted_as_if_labels_were_uncertain(n, k):
    """No model is infallible; with equal margins, its confidence is what is then left of the labels."""
    labels = np.random.default_rng(0).integers(0, k, n)
    fit = fit_temperature(np.eye(k)[labels] * 3.0, labels)
    assert fit.status is FitStatus.SEPARABLE
    confidence = 1 / (1 + (k - 1) * np.exp(-3.0 / fit.temperature))
    assert confidence == pytest.approx((n + 1) / (n + 2), abs=1e-6)
    logits, _ = one_model(1, (n, k))
    labels = logits.argmax(axis=1)
    margins = logits.max(axis=1) - (logits.sum(axis=1) - logits.max(axis=1)) / (k - 1)

    def loss(log_weight):
        weight = np.exp(log_weight)
        return -log_softmax(weight * logits, axis=1).max(axis=1).mean() + weight * margins.mean() / (n + 2)

    best = minimize_scalar(loss, bounds=(-10, 10), method="bounded", options={"xatol": 1e-10})
    fit = fit_temperature(logits, labels)
    assert fit.status is FitStatus.SEPARABLE
    assert np.isnan(fit.standard_error)
    assert np.log(1 / fit.temperature) == pytest.approx(best.x, abs=1e-5)


@pytest.mark.parametrize("n", [100, 6000])
def test_an_uninformative_fit_is_clamped_and_reported(n):
    logits, _ = one_model(5, (n, 4))
    fit = fit_temperature(logits, logits.argmin(axis=1))
    constant = fit_temperature(np.full((n, 4), 7.0), np.zeros(n, int))
    assert fit.status is constant.status is FitStatus.UNINFORMATIVE
    assert np.isnan(fit.standard_error)
    assert 0 < fit.temperature < np.inf
    assert [fit.nll_after, constant.nll_after] == pytest.approx([np.log(4)] * 2, abs=2e-3)


@pytest.mark.parametrize("n", [30, 6000])
@pytest.mark.parametrize(
    ("value", "words"),
    [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "option that the row does not have"), (None, "label 3 is outside")],
)
def test_a_row_that_cannot_be_fitted_is_named(n, value, words):
    logits, labels = one_model(7, (n, 3))
    if value is None:
        labels[17] = 3
    else:
        logits[17, labels[17]] = value
    with pytest.raises(DataError, match=f"row 17: .*{words}"):
        fit_temperature(logits, labels)


def assert_a_pair_is_the_minimum(sources, labels):
    fit, box = fit_pair(*sources, labels), {"bounds": [(1e-9, 50)] * 2, "options": {"ftol": 1e-15, "gtol": 1e-10}}
    best = min(
        minimize(lambda w: nll(w, sources, labels), start, method="L-BFGS-B", **box).fun
        for start in ([0.5, 0.5], [0.1, 1.0], [0.01, 1.0])
    )
    assert fit.nll_after <= best + 1e-7
    assert fit.nll_before == pytest.approx(nll([0.5, 0.5], sources, labels), rel=1e-12)
    assert fit.nll_after == pytest.approx(nll(fit.weights, sources, labels), rel=1e-6, abs=1e-9)


@given(seeds, shapes, st.booleans())
def test_a_pair_is_the_minimum_that_scipy_finds(seed, shape, ragged):
    labels, logits = planted(np.random.default_rng(seed), *shape, [1.0, 1.5], ragged=ragged, dtype=np.float64)
    assert_a_pair_is_the_minimum(logits, labels)


@given(seeds)
def test_a_useless_partner_gets_next_to_no_weight(seed):
    rng = np.random.default_rng(seed)
    labels, (logits,) = planted(rng, 500, 4, [2.0], dtype=np.float64)
    against = -4.0 * np.eye(4)[labels] + 0.1 * rng.standard_normal((500, 4))
    fit = fit_pair(against, logits, labels)
    assert fit.statuses[0] is FitStatus.UNINFORMATIVE
    assert fit.nll_after == pytest.approx(fit_temperature(logits, labels).nll_after, abs=1e-6)


def many_rows(odd):
    """6,144 rows of two models; every twelfth, of which a sample takes none or all, is odd in some way."""
    labels, (small, large) = planted(np.random.default_rng(11), 6144, 5, [1.0, 2.0], dtype=np.float64)
    every = slice(None, None, 12)
    if odd == "wrong":
        labels[every] = small[every].argmin(axis=1)
    if odd in ("right", "quiet"):
        labels[every] = small[every].argmax(axis=1)
    if odd in ("loud", "quiet"):  # no weight that is too much for the quiet is too little for the others
        small[every] *= {"loud": 50, "quiet": 1e-4}[odd]
    if odd == "copies":
        large = small + 1e-6 * large
    return small, large, labels


@pytest.mark.parametrize("odd", ["nothing", "wrong", "right", "loud", "quiet", "copies"])
def test_fits_of_many_rows_end_at_the_minimum_however_odd_the_sample(odd):
    small, large, labels = many_rows(odd)
    fit = fit_temperature(small, labels)
    expected, lowest = best_by_scipy(small, labels)
    assert fit.temperature == pytest.approx(expected, rel=1e-5)
    assert fit.nll_after == pytest.approx(lowest, abs=1e-10)
    assert_a_pair_is_the_minimum([small, large], labels)


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


@given(seeds, shapes, variances)
def test_offsets_are_the_minimum_that_scipy_finds_no_worse_than_the_temperature_alone(seed, shape, variance):
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
    at = np.array([1 / fit.temperature, *fit.biases])
    # Where the minimum lies at an infinite temperature both are clamped, each at a bound of its own.
    assert objective(at, logits, labels, variance)[0] <= best.fun + 1e-8
    alone = fit_temperature(logits, labels)
    assert fit.nll_before == alone.nll_before
    assert fit.nll_after <= alone.nll_after + 1e-9
    assert sum(fit.biases) == pytest.approx(0, abs=1e-9)
    if fit.status is FitStatus.CONVERGED:
        assert np.abs(objective(at, logits, labels, variance)[1]).max() < 1e-7  # nothing is left to gain
        in_parts = fit_bias_corrected(logits, labels, variance, cuts=(7, 15))
        for name in ("temperature", "standard_error", "biases"):
            assert getattr(in_parts, name) == pytest.approx(getattr(fit, name), rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("k", [150, 400])
def test_many_options_converge_too(k):
    logits, labels = biased(6, (900, k), strength=4.0)
    fit = fit_bias_corrected(logits.astype(np.float32), labels)
    assert fit.status is FitStatus.CONVERGED
    at = np.array([1 / fit.temperature, *fit.biases])
    assert np.abs(objective(at, logits.astype(np.float32).astype(np.float64), labels, 1.0)[1]).max() < 1e-8


def test_offsets_of_separable_data_are_clamped_and_of_data_that_offsets_would_separate_stay_finite():
    labels = np.random.default_rng(8).integers(0, 3, 300)
    biased_logits = np.eye(3)[labels] + np.array([1.5, 0.0, 0.0])
    fit = fit_bias_corrected(biased_logits, labels)
    assert fit.status is FitStatus.CONVERGED
    assert np.isfinite(fit.biases).all()
    assert ((biased_logits / fit.temperature + fit.biases).argmax(axis=1) == labels).all()
    logits, _ = biased(7, (100, 4))
    labels = logits.argmax(axis=1)
    fit, alone = fit_bias_corrected(logits, labels), fit_temperature(logits, labels)
    assert fit.status is FitStatus.SEPARABLE
    assert fit.temperature == alone.temperature
    assert set(fit.biases) == {0.0}
    assert np.isnan(fit.standard_error)


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


@st.composite
def answers(draw):
    """Draw confidences, some of them equal or 0 or 1, and whether they were right."""
    n = draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(seeds))
    confidences = rng.beta(3, 1, n)
    if draw(st.booleans()):
        confidences = np.round(confidences, draw(st.integers(0, 2)))
    right = confidences ** draw(st.sampled_from([0.3, 1.0, 4.0]))
    return confidences, rng.random(n) < right


@given(answers())
def test_an_isotonic_map_is_scikit_learns_regression_with_a_tilt_and_keeps_the_order(drawn):
    confidences, correct = drawn
    oracle = IsotonicRegression(out_of_bounds="clip").fit(confidences, correct)
    fitted = fit_isotonic(confidences, correct)
    for at in (confidences, np.linspace(0, 1, 101)):
        expected = oracle.predict(at)
        np.testing.assert_allclose(fitted.of(at), expected + (at - expected) / len(confidences), atol=1e-9)
    assert fitted.confidences[0] == 0
    assert fitted.confidences[-1] == 1
    assert (np.diff(fitted.confidences) > 0).all()
    assert (np.diff(fitted.accuracies) > 0).all()
    assert 0 <= fitted.accuracies[0] < fitted.accuracies[-1] <= 1
    distinct = np.unique(np.round(confidences, 6))
    assert (np.diff(fitted.of(distinct)) > 0).all()


def test_confidences_closer_than_the_tilt_can_tell_are_one():
    confidences = np.array([0.5, np.nextafter(0.5, 1), np.nextafter(np.nextafter(0.5, 1), 1), 0.9])
    fitted = fit_isotonic(confidences, np.array([True, False, True, True]))
    assert (np.diff([fitted.confidences, fitted.accuracies], axis=1) > 0).all()
