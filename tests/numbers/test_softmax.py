import math
from itertools import permutations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import log_softmax as scipy_log_softmax
from scipy.special import softmax as scipy_softmax

from cauc_ray.errors import DataError
from cauc_ray.numbers.softmax import likeliest, log_softmax, row_sums, softmax, top_option

matrices = hnp.arrays(
    np.float64, st.tuples(st.integers(1, 40), st.integers(1, 70)), elements=st.floats(-50, 50, width=32)
)


@given(matrices, st.integers(0, 9))
def test_a_rows_result_depends_on_neither_its_neighbours_nor_its_padding_nor_its_place_in_memory(scores, padding):
    options, confidences = top_option(scores)
    padded = np.pad(scores, ((0, 0), (0, padding)), constant_values=-np.inf)
    for rows in (np.arange(len(scores))[::-1], *np.arange(len(scores))[:, None]):
        for layout in (padded[rows], np.asfortranarray(padded[rows])):
            some_options, some_confidences = top_option(layout)
            assert (some_options == options[rows]).all()
            assert (some_confidences == confidences[rows]).all()  # to the bit


@given(matrices, st.integers(0, 9))
def test_agrees_with_scipy(scores, padding):
    padded = np.pad(np.round(scores), ((0, 0), (0, padding)), constant_values=-np.inf)  # with ties
    before = padded.copy()
    options, confidences = top_option(padded)
    expected, found = scipy_softmax(padded, axis=1), softmax(padded)
    assert (options == padded.argmax(axis=1)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert (found.max(axis=1) == confidences).all()  # to the bit
    np.testing.assert_allclose(log_softmax(padded), scipy_log_softmax(padded, axis=1), rtol=1e-9, atol=1e-9)
    assert (padded == before).all()


@given(matrices, st.randoms(use_true_random=False))
def test_permuting_a_rows_options_changes_no_bit_of_its_confidence(scores, random):
    columns = list(range(scores.shape[1]))
    random.shuffle(columns)
    assert (top_option(scores[:, columns])[1] == top_option(scores)[1]).all()


@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 300)), elements=st.floats(0, 1)))
def test_row_sums_are_sums(terms):
    np.testing.assert_allclose(row_sums(terms.copy()), terms.sum(axis=1), rtol=1e-12)


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
    given_scores = padded.copy()
    expected = np.argsort(-np.round(scores), axis=1, kind="stable")[:, np.minimum(np.arange(n), n_options - 1)]
    for layout in (padded, np.asfortranarray(padded)):
        assert (likeliest(layout, n) == expected).all()
    assert (padded == given_scores).all()


@pytest.mark.parametrize("row", [[-np.inf, -np.inf], [np.nan, 1.0], [np.inf, 1.0]])
def test_a_row_without_an_option_to_choose_is_refused(row):
    for ask in (top_option, softmax):
        with pytest.raises(DataError, match="row 1: the largest score is not finite"):
            ask(np.array([[0.0, 1.0], row]))
