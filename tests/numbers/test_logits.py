"""Masks and probabilities, options far below the others, and softmax quantities to the bit."""

import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import log_softmax as scipy_log_softmax
from scipy.special import softmax as scipy_softmax
from synthetic import planted

from cauc_ray.errors import DataError
from cauc_ray.numbers.calibration import FitStatus, fit_pair, fit_temperature
from cauc_ray.numbers.logits import (
    SumsToOne,
    as_logits,
    likeliest,
    log_softmax,
    real_options,
    row_sums,
    softmax,
    top_option,
)


def test_of_log_probabilities_only_values_that_stand_for_nothing_are_masks():
    for masks in (real_options, lambda rows, kind="raw": as_logits(rows, kind)):
        for mask in (-1e4, -9999.0, -65504.0, np.finfo(np.float32).min):
            rows = np.array([[-3.0, -7123.4, -20_000.0, mask]], dtype=np.float32)
            assert np.isneginf(masks(rows, "log-probabilities")).tolist() == [[False, False, False, True]]
            assert np.isfinite(rows).all()  # those of the caller stay
            assert np.isneginf(masks(rows)).tolist() == [[False, True, True, True]]


def test_the_depth_is_counted_from_the_rows_largest_logit():
    rows = np.array([[0.0, -5000.0, -5000.5], [-1e9, -1e9 - 4000, -1e9 - 6000], [9e3, 0.0, 5e3]])
    expected = [[True, True, False], [True, True, False], [True, False, True]]
    assert np.isfinite(real_options(rows)).tolist() == expected
    assert np.isfinite(real_options(rows[[0, 2]].astype(np.float32))).tolist() == [expected[0], expected[2]]
    assert real_options(np.array([[3, -10_000]])).tolist() == [[3.0, -np.inf]]
    assert real_options(np.zeros((0, 4))).shape == (0, 4)


@pytest.mark.parametrize(("depth", "n_more", "scale"), [(100.0, 60, 1.0), (1e3, 1, 0.01), (4e3, 60, 0.01)])
def test_options_that_no_weight_brings_near_change_no_fit(depth, n_more, scale):
    labels, logits_of_both = planted(np.random.default_rng(3), 2000, 4, [1.0, 2.0], dtype=np.float64)
    plain = [scale * z for z in logits_of_both]
    deep = [np.pad(z, ((0, 0), (0, n_more)), constant_values=-depth) for z in plain]
    for logits, with_more in zip(plain, deep, strict=True):
        expected, fit = fit_temperature(logits, labels), fit_temperature(with_more, labels)
        assert fit.status == expected.status == FitStatus.CONVERGED
        assert fit.temperature == pytest.approx(expected.temperature, rel=1e-8)
        assert fit.standard_error == pytest.approx(expected.standard_error, rel=1e-4)
    expected, fit = fit_pair(*plain, labels), fit_pair(*deep, labels)
    assert fit.statuses == (FitStatus.CONVERGED, FitStatus.CONVERGED)
    assert fit.temperatures == pytest.approx(expected.temperatures, rel=1e-8)


@given(st.integers(0, 999), st.booleans())
def test_probabilities_become_their_logarithms_and_zeros_stay_options(seed, ragged):
    rng = np.random.default_rng(seed)
    _, (logits,) = planted(rng, 30, 5, [2.0], ragged=ragged, dtype=np.float64)
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    p[:10, 0] = 0.0
    missing = np.isneginf(logits)
    converted = as_logits(np.where(missing, -1e9, p), "probabilities")
    with np.errstate(divide="ignore"):
        expected = np.where(missing, -np.inf, np.maximum(np.log(p), -50.0))
    np.testing.assert_allclose(converted, expected, rtol=1e-12)


@pytest.mark.parametrize("row", [[0.5, -0.5, 1.0], [0.2, 1.5, 0.1], [0.0, 0.0, 0.0]])
def test_numbers_that_are_not_probabilities_are_refused_by_row(row):
    with pytest.raises(DataError, match=r"row 1 .*outside 0 to 1"):
        as_logits(np.array([[0.2, 0.3, 0.5], row]), "probabilities")


@given(st.integers(0, 9999), st.sampled_from([np.float16, np.float32, np.float64]), st.integers(2, 200))
def test_softmax_rows_are_known_as_probabilities_and_logits_are_not(seed, dtype, k):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0.0, 3.0, (40, k))
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    p = (p / p.sum(axis=1, keepdims=True)).astype(dtype).astype(np.float32)
    assert SumsToOne.of(p).certain
    parts = [SumsToOne.of(p[a : a + 4]) for a in range(0, 40, 4)]
    assert sum(parts, SumsToOne()).certain
    assert SumsToOne.of(p.round(3) if k <= 5 else p).certain
    p[7, 0] = 0.0  # cut off, so that it sums to less
    assert SumsToOne.of(p).certain
    p[7] = logits[7] - logits[7].max() - 0.1
    assert not SumsToOne.of(p).certain


def test_a_few_raw_rows_that_sum_to_one_by_accident_are_not_probabilities():
    assert not SumsToOne.of(np.array([[1.0, 0.0], [0.0, 1.0]])).certain  # logits of zeros and ones
    assert not SumsToOne.of(np.array([[0.301, 0.7]])).certain
    assert not SumsToOne.of(np.ones((20, 1))).certain  # one option says nothing
    assert SumsToOne.of(np.eye(4)[np.arange(40) % 4]).certain


matrices = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 40), st.integers(1, 70)), elements=st.floats(-50, 50, width=32)
)


@given(matrices, st.integers(0, 9), st.randoms(use_true_random=False))
def test_a_rows_result_depends_on_neither_padding_nor_memory_nor_the_order_of_options(scores, padding, random):
    options, confidences = top_option(scores)
    columns = random.sample(range(scores.shape[1]), scores.shape[1])
    assert (top_option(scores[:, columns])[1] == confidences).all()  # to the bit
    padded = np.pad(scores, ((0, 0), (0, padding)), constant_values=-np.inf)
    for layout in (padded, np.asfortranarray(padded)):
        assert (top_option(layout)[0] == options).all()
        assert (top_option(layout)[1] == confidences).all()  # to the bit


@given(matrices, st.integers(0, 9))
def test_softmax_is_that_of_scipy_and_ties_go_to_the_lowest_index(scores, padding):
    padded = np.pad(np.round(scores), ((0, 0), (0, padding)), constant_values=-np.inf)  # with ties
    before = padded.copy()
    options, confidences = top_option(padded)
    probabilities = softmax(padded)
    assert (options == padded.argmax(axis=1)).all()
    np.testing.assert_allclose(probabilities, scipy_softmax(padded, axis=1), rtol=1e-12)
    assert (probabilities.max(axis=1) == confidences).all()  # to the bit
    np.testing.assert_allclose(log_softmax(padded), scipy_log_softmax(padded, axis=1), rtol=1e-9, atol=1e-9)
    assert (padded == before).all()


# Sums a few roundings from a power of two.
near_powers_of_two = st.builds(
    lambda power, gap, tiny: [1.0] * (2**power - 1) + [1 - gap, *tiny],
    st.integers(1, 4),
    st.floats(0, 2e-15),
    st.lists(st.floats(0, 1e-15), min_size=2, max_size=12),
)


@given(near_powers_of_two, st.randoms(use_true_random=False), st.integers(0, 5))
@example([1.0, 0.999999999999999, 3.704435030739697e-16, 1.9375370466922698e-16, 2.9927717495842355e-16], None, 0)
def test_sums_near_powers_of_two_do_not_depend_on_the_order_of_their_terms(terms, random, padding):
    orders = [random.sample(terms, len(terms)) for _ in range(6)] if random else permutations(terms)
    rows = np.array([terms, *orders])
    sums = row_sums(np.pad(rows, ((0, 0), (0, padding))))
    assert (sums == sums[0]).all()  # to the bit
    assert sums[0] == pytest.approx(math.fsum(terms), rel=1e-14)


@given(matrices, st.integers(1, 5), st.integers(0, 3))
def test_the_likeliest_options_are_those_of_a_stable_sort_and_the_last_one_repeats(scores, n, padding):
    n_options = scores.shape[1]
    padded = np.pad(np.round(scores), ((0, 0), (0, padding)), constant_values=-np.inf)
    before = padded.copy()
    expected = np.argsort(-np.round(scores), axis=1, kind="stable")[:, np.minimum(np.arange(n), n_options - 1)]
    for layout in (padded, np.asfortranarray(padded)):
        assert (likeliest(layout, n) == expected).all()
    assert (padded == before).all()


@pytest.mark.parametrize("row", [[-np.inf, -np.inf], [np.nan, 1.0], [np.inf, 1.0]])
def test_a_row_without_an_option_to_choose_is_refused(row):
    for function in (top_option, softmax):
        with pytest.raises(DataError, match=r"row 1: .*not finite"):
            function(np.array([[0.0, 1.0], row]))
