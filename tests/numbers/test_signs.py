"""Gains against losses: exact one-sided sign tests, and intervals that say the same."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest

from cauc_ray.errors import DataError
from cauc_ray.numbers.signs import CONFIDENCE, signs, signs_of

counts = st.integers(0, 400)


@given(counts, counts, counts)
def test_p_values_and_interval_are_those_of_the_binomial(n_gain, n_loss, n_same):
    n = max(1, n_gain + n_loss + n_same)
    found = signs(n_gain, n_loss, n)
    assert found.rate == (n_gain - n_loss) / n
    differ = n_gain + n_loss
    if differ == 0:
        assert (found.low, found.high, found.p_gain, found.p_loss) == (0, 0, 1, 1)
        return
    for p_value, hits in ((found.p_gain, n_gain), (found.p_loss, n_loss)):
        assert p_value == pytest.approx(binomtest(hits, differ, 0.5, "greater").pvalue, rel=1e-9)
    exact = binomtest(n_gain, differ).proportion_ci(confidence_level=2 * CONFIDENCE - 1, method="exact")
    for bound, share in ((found.low, exact.low), (found.high, exact.high)):
        assert bound == pytest.approx((2 * share - 1) * differ / n, rel=1e-6, abs=1e-9)


@given(counts, counts)
def test_a_sign_is_established_where_the_interval_leaves_nothing_else(n_gain, n_loss):
    found = signs(n_gain, n_loss, 1000)
    assert found.gains == (found.low > 0)
    assert found.loses == (found.high < 0)
    assert found.open == (n_gain + n_loss > 0 and not found.gains and not found.loses)
    mirrored = signs(n_loss, n_gain, 1000)
    assert (mirrored.gains, mirrored.loses, mirrored.open) == (found.loses, found.gains, found.open)


def test_two_ways_that_are_as_good_are_seldom_told_apart():
    rng = np.random.default_rng(0)
    draws = rng.random((4000, 2, 300)) < 0.7
    told = [signs_of(one, other) for one, other in draws]
    # Each side errs at most 1 time in 20; 0.05 + 4 standard errors of 4,000 draws.
    assert 0 < np.mean([each.gains for each in told]) < 0.05 + 4 * np.sqrt(0.05 * 0.95 / 4000)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1))
def test_rows_are_counted_where_one_alone_is_right(rows):
    one, other = np.array(rows).T
    found = signs_of(one, other)
    assert (found.n, found.n_gain - found.n_loss) == (len(rows), one.sum() - other.sum())
    assert found.n_gain + found.n_loss == (one != other).sum()


@pytest.mark.parametrize(("n_gain", "n_loss", "n"), [(0, 0, 0), (3, 4, 6), (-1, 2, 6)])
def test_counts_that_cannot_be_are_refused(n_gain, n_loss, n):
    with pytest.raises(DataError, match="gains and losses are counted among the rows"):
        signs(n_gain, n_loss, n)
