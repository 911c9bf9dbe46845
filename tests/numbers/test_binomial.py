from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom

from cauc_ray.errors import DataError
from cauc_ray.numbers.binomial import binomial_tail, least_accepted, risk_upper_bound

sizes = st.integers(1, 50_000)
risks = st.floats(1e-6, 1 - 1e-6)
levels = st.floats(0.5, 0.999)


@given(sizes, st.floats(0, 1), risks)
def test_tails_are_scipys(n, share, risk):
    k = round(share * n)
    expected = binom.cdf(k, n, risk)
    # scipy's own loses digits where it nears the least number: 5e-4 of P(X <= 30), 7.6e-271 of 572 rows at 0.739.
    assert binomial_tail(k, n, risk) == pytest.approx(expected, rel=1e-8, abs=1e-200)


@given(st.integers(1, 1_000_000), st.floats(1e-5, 0.5), st.floats(-4, 4))
def test_tails_near_the_mean_are_scipys_for_many_rows(n, risk, deviations):
    k = int(np.clip(n * risk + deviations * (n * risk * (1 - risk)) ** 0.5, 0, n))
    assert binomial_tail(k, n, risk) == pytest.approx(binom.cdf(k, n, risk), rel=1e-7)


def test_tails_of_few_rows_by_adding_up():
    for n in range(1, 12):
        for k in range(n + 1):
            ways = sum(binom.pmf(i, n, 0.3) for i in range(k + 1))
            assert binomial_tail(k, n, 0.3) == pytest.approx(ways, rel=1e-12)


def test_tails_far_out_by_whole_numbers():
    share = Fraction(risk := 0.7389613907782574)
    ways = sum(comb(572, i) * share**i * (1 - share) ** (572 - i) for i in range(31))
    assert binomial_tail(30, 572, risk) == pytest.approx(float(ways), rel=1e-12)


def test_tails_at_the_ends():
    assert binomial_tail(0, 0, 0.05) == 1
    assert binomial_tail(7, 7, 0.9) == 1
    assert binomial_tail(0, 7, 0.0) == 1
    assert binomial_tail(6, 7, 1.0) == 0


@given(sizes, st.floats(0, 1), levels)
def test_upper_bounds_are_those_of_clopper_and_pearson(n, share, confidence):
    k = round(share * n)
    expected = 1.0 if k == n else beta.ppf(confidence, k + 1, n - k)
    assert risk_upper_bound(k, n, confidence) == pytest.approx(expected, rel=1e-7)


@given(st.integers(1, 3000), st.floats(0, 0.3), st.floats(0.01, 0.4), levels)
def test_a_bound_lies_at_the_limit_or_below_just_where_the_test_rejects(n, share, risk, confidence):
    k = int(share * n)
    tail = binomial_tail(k, n, risk)
    if abs(tail - (1 - confidence)) > 1e-9:
        assert (risk_upper_bound(k, n, confidence) <= risk) == (tail <= 1 - confidence)


def test_a_bound_of_no_rows_says_nothing():
    assert risk_upper_bound(0, 0, 0.95) == 1


@given(risks.filter(lambda risk: risk > 1e-3), levels)
def test_the_least_number_of_rows_is_the_least(risk, confidence):
    n = least_accepted(risk, confidence)
    assert (1 - risk) ** n <= (1 - confidence) * (1 + 1e-9)
    assert n == 1 or (1 - risk) ** (n - 1) > (1 - confidence) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("ask", "says"),
    [
        (lambda: binomial_tail(-1, 5, 0.5), "got -1 of 5"),
        (lambda: binomial_tail(6, 5, 0.5), "got 6 of 5"),
        (lambda: binomial_tail(1, 5, 1.5), "got 1.5"),
        (lambda: binomial_tail(1, 5, float("nan")), "got nan"),
        (lambda: risk_upper_bound(6, 5, 0.95), "got 6 of 5"),
        (lambda: risk_upper_bound(1, 5, 1.0), "got 1.0"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_one_line(ask, says):
    with pytest.raises(DataError, match=says) as refused:
        ask()
    assert "\n" not in str(refused.value)
