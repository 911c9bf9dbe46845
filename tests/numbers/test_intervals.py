"""Shares, signs, differences, means and rankings against scipy, whole numbers and slow loops."""

from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import beta, binom, binomtest, chi2_contingency, mannwhitneyu
from synthetic import seeds

from cauc_ray.numbers.intervals import (
    Mean,
    binomial_tail,
    label_shift,
    least_accepted,
    mean_difference,
    paired_difference,
    ranking,
    risk_upper_bound,
    share,
    share_to_come,
    signs,
)

sizes = st.integers(1, 50_000)
risks = st.floats(1e-6, 1 - 1e-6)
levels = st.floats(0.5, 0.999)
counts = st.integers(0, 400)


@given(st.integers(1, 500), st.data())
def test_share_is_the_wilson_interval(n, data):
    hits = data.draw(st.integers(0, n))
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    interval = share(hits, n)
    assert (interval.value, interval.n) == (hits / n, n)
    assert (interval.low, interval.high) == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert np.isnan([share(0, 0).value, share(0, 0).low]).all()


@pytest.mark.parametrize("n", [150, 1000])
def test_a_share_to_come_is_in_its_interval_in_19_of_20_samples(n):
    """As many rows come as there are, so that their own noise counts as much."""
    hits, later = np.random.default_rng(n).binomial(n, 0.8, (2, 2000))
    intervals = [share_to_come(k, n) for k in hits]
    inside = [interval.low <= k / n <= interval.high for interval, k in zip(intervals, later, strict=True)]
    assert 0.93 < np.mean(inside) < 0.98


@given(sizes, st.floats(0, 1), risks)
def test_tails_are_scipys(n, share, risk):
    k = round(share * n)
    # scipy's own loses digits where it nears the least number: 5e-4 of P(X <= 30), 7.6e-271 of 572 rows at 0.739.
    assert binomial_tail(k, n, risk) == pytest.approx(binom.cdf(k, n, risk), rel=1e-8, abs=1e-200)


def test_tails_far_out_by_whole_numbers_and_at_the_ends():
    share = Fraction(risk := 0.7389613907782574)
    ways = sum(comb(572, i) * share**i * (1 - share) ** (572 - i) for i in range(31))
    assert binomial_tail(30, 572, risk) == pytest.approx(float(ways), rel=1e-12)
    ends = [(0, 0, 0.05), (7, 7, 0.9), (0, 7, 0.0), (6, 7, 1.0)]
    assert [binomial_tail(*end) for end in ends] == [1, 1, 1, 0]


@given(sizes, st.floats(0, 1), levels)
def test_upper_bounds_are_those_of_clopper_and_pearson(n, share, confidence):
    k = round(share * n)
    expected = 1.0 if k == n else beta.ppf(confidence, k + 1, n - k)
    assert risk_upper_bound(k, n, confidence) == pytest.approx(expected, rel=1e-7)
    assert risk_upper_bound(0, 0, confidence) == 1


@given(risks.filter(lambda risk: risk > 1e-3), levels)
def test_the_least_number_of_rows_is_the_least(risk, confidence):
    n = least_accepted(risk, confidence)
    assert (1 - risk) ** n <= (1 - confidence) * (1 + 1e-9)
    assert n == 1 or (1 - risk) ** (n - 1) > (1 - confidence) * (1 - 1e-9)


@given(counts, counts, counts)
def test_p_values_of_signs_are_those_of_the_binomial(n_gain, n_loss, n_same):
    n = max(1, n_gain + n_loss + n_same)
    test, differ = signs(n_gain, n_loss, n), n_gain + n_loss
    assert (test.rate, test.gains) == ((n_gain - n_loss) / n, test.p_gain <= 0.05)
    for p_value, hits in ((test.p_gain, n_gain), (test.p_loss, n_loss)):
        expected = binomtest(hits, differ, 0.5, "greater").pvalue if differ else 1.0
        assert p_value == pytest.approx(expected, rel=1e-9)


def two_methods(seed, n):
    rng = np.random.default_rng(seed)
    return rng.random(n) < rng.uniform(0.4, 0.9), rng.random(n) < rng.uniform(0.4, 0.9)


@given(seeds, st.integers(1, 80))
def test_the_interval_ends_at_quantiles_of_all_resamples_there_are(seed, n):
    a, b = two_methods(seed, n)
    interval = paired_difference(a, b)
    of_row = [np.mean(a.astype(int) - b == value) for value in (-1, 0, 1)]
    total = np.ones(1)  # the exact distribution of the difference over -n..n
    for _ in range(n):
        total = np.convolve(total, of_row)
    below, noise = np.cumsum(total), 5 * np.sqrt(0.1 * 0.9 / 10_000)
    for end, mass in ((interval.low, 0.025), (interval.high, 0.975)):
        lowest, highest = int(np.floor(end * n + 1e-6)) + n, int(np.ceil(end * n - 1e-6)) + n
        assert below[highest] >= mass - noise
        assert (below[lowest - 1] if lowest else 0.0) <= mass + noise


@given(st.integers(0, 400), st.integers(1, 400), st.integers(0, 400), st.integers(1, 400))
def test_means_of_shares_are_compared_as_the_chi_square_test_does_however_few_rows_there_are(hits_a, n_a, hits_b, n_b):
    hits_a, hits_b = min(hits_a, n_a), min(hits_b, n_b)
    assume(0 < hits_a + hits_b < n_a + n_b)
    samples = [Mean(hits / n, np.sqrt(hits / n * (1 - hits / n)), n) for hits, n in ((hits_a, n_a), (hits_b, n_b))]
    expected = chi2_contingency([[hits_a, n_a - hits_a], [hits_b, n_b - hits_b]], correction=False)
    test = mean_difference(*samples)
    assert test.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-9)
    assert np.sign(test.z) == (np.sign(samples[0].value - samples[1].value) if test.z else 0)
    assert mean_difference(Mean(2.0, 0.0, 5), Mean(2.0 + 1e-7, 0.0, 9)).p_value == 1  # neither varies
    # A single row that differs from all of another sample shows little.
    assert mean_difference(Mean(3.0, 0.0, 1), Mean(2.0, 0.0, 1)).p_value > 0.1


@given(seeds, st.integers(2, 200), st.integers(1, 40))
def test_areas_are_those_of_the_rank_sum_test_with_ties(seed, n, levels):
    rng = np.random.default_rng(seed)
    confidences, correct = rng.integers(0, levels, n) / levels, rng.random(n) < 0.6
    n_pairs = correct.sum() * (~correct).sum()
    expected = mannwhitneyu(confidences[correct], confidences[~correct]).statistic / n_pairs if n_pairs else None
    assert ranking(confidences, correct) == (expected if expected is None else pytest.approx(expected, abs=1e-12))


@given(seeds, st.integers(20, 400), st.integers(2, 6))
def test_labels_of_two_samples_are_compared_by_the_chi_square_test(seed, n, k):
    rng = np.random.default_rng(seed)
    one, two = rng.integers(k, size=n), rng.integers(k, size=n + 100)
    counts = np.array([np.bincount(one, minlength=k), np.bincount(two, minlength=k)])
    table = chi2_contingency(counts, correction=False)
    assume(table.expected_freq.min() >= 5)
    assert label_shift(one, two) == pytest.approx(table.pvalue)
    rare = np.concatenate([two, np.arange(k, 3 * k)])  # classes of one row each
    assert label_shift(one, rare) > 0.01 or table.pvalue < 0.1
    assert label_shift(one, np.full(n, k + 1)) < 0.01
