import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, bootstrap

from cauc_ray.errors import DataError
from cauc_ray.numbers.paired import paired_difference

seeds = st.integers(0, 2**32 - 1)


def two_methods(seed, n):
    rng = np.random.default_rng(seed)
    return rng.random(n) < rng.uniform(0.4, 0.9), rng.random(n) < rng.uniform(0.4, 0.9)


def distribution(a, b):
    """Return the exact distribution of the difference of n rows drawn with replacement, over -n..n, by a loop."""
    d = a.astype(int) - b.astype(int)
    of_row = [np.mean(d == value) for value in (-1, 0, 1)]
    total = np.ones(1)
    for _ in range(len(d)):
        total = np.convolve(total, of_row)
    return total


@given(seeds, st.integers(1, 80), st.sampled_from([0.8, 0.9, 0.95]))
def test_the_interval_ends_at_quantiles_of_all_resamples_there_are(seed, n, level):
    a, b = two_methods(seed, n)
    got = paired_difference(a, b, level=level)
    below = np.cumsum(distribution(a, b))
    tail, noise = (1 - level) / 2, 5 * np.sqrt(0.1 * 0.9 / 10_000)
    for end, share in ((got.low, tail), (got.high, 1 - tail)):
        lowest, highest = int(np.floor(end * n + 1e-6)) + n, int(np.ceil(end * n - 1e-6)) + n
        assert below[highest] >= share - noise
        assert (below[lowest - 1] if lowest else 0.0) <= share + noise


@pytest.mark.parametrize("seed", range(3))
def test_the_interval_is_scipys_over_rows(seed):
    a, b = two_methods(seed, 70)

    def difference(x, y, axis):
        return x.mean(axis) - y.mean(axis)

    expected = bootstrap(
        (a.astype(float), b.astype(float)),
        difference,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=np.random.default_rng(seed),
    ).confidence_interval
    got = paired_difference(a, b)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=1.01 / 70)  # one row more or less
    assert (got.value, got.n) == (pytest.approx(a.mean() - b.mean()), 70)


def test_nine_of_ten_intervals_and_more_hold_the_truth():
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(300):
        draw = rng.random(400)
        interval = paired_difference(draw < 0.7, (draw < 0.6) | (draw > 0.95), resamples=1000)
        inside += interval.low <= 0.05 <= interval.high
    assert 270 <= inside < 300


@given(seeds, st.integers(1, 200))
def test_neither_the_order_of_rows_nor_rows_alike_for_both_matter(seed, n):
    a, b = two_methods(seed, n)
    other = np.random.default_rng(seed).permutation(n)
    got = paired_difference(a, b)
    assert paired_difference(a[other], b[other]) == got
    both = a == b
    assert paired_difference(np.where(both, True, a), np.where(both, True, b)) == got
    assert got.low <= got.value + 1e-12
    assert got.value - 1e-12 <= got.high


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 30))
def test_the_p_value_is_the_binomial_tests(wins, losses, ties):
    a = np.repeat([True, False, True], [wins, losses, ties])
    b = np.repeat([False, True, True], [wins, losses, ties])
    expected = binomtest(wins, wins + losses).pvalue if wins + losses else 1.0
    assert paired_difference(a, b).p_value == pytest.approx(expected, rel=1e-9)


def test_the_p_value_of_many_rows():
    wins, losses = 50_600, 50_000
    a, b = np.repeat([True, False], [wins, losses]), np.repeat([False, True], [wins, losses])
    assert paired_difference(a, b).p_value == pytest.approx(binomtest(wins, wins + losses).pvalue, rel=1e-6)


def test_equal_methods_differ_by_nothing():
    a = np.array([True, False, True])
    got = paired_difference(a, a)
    assert (got.value, got.low, got.high, got.n, got.p_value) == (0, 0, 0, 3, 1)


def test_the_seed_alone_draws_the_lots():
    a, b = two_methods(5, 5000)
    assert paired_difference(a, b, resamples=200, seed=1) == paired_difference(a, b, resamples=200, seed=1)
    assert paired_difference(a, b, resamples=200, seed=1) != paired_difference(a, b, resamples=200, seed=2)


@pytest.mark.parametrize(("n_a", "n_b"), [(0, 0), (3, 4)])
def test_rows_that_do_not_pair_are_refused(n_a, n_b):
    with pytest.raises(DataError, match=rf"same rows.*got \({n_a},\) and \({n_b},\)"):
        paired_difference(np.zeros(n_a, bool), np.zeros(n_b, bool))
