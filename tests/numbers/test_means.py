"""Whether two means differ, against scipy."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import norm

from cauc_ray.numbers.means import Mean, mean_difference

means = st.builds(Mean, st.floats(-5, 5), st.floats(0.1, 3), st.integers(2, 5000))


@given(means, means)
def test_means_are_compared_by_the_z_test(one, other):
    assume(abs(one.value - other.value) > 1e-5)
    found = mean_difference(one, other)
    z = (one.value - other.value) / np.hypot(one.deviation / np.sqrt(one.n), other.deviation / np.sqrt(other.n))
    assert found.z == pytest.approx(z, rel=1e-9)
    assert found.p_value == pytest.approx(2 * norm.sf(abs(z)), rel=1e-6, abs=1e-300)


def test_rows_of_one_population_are_seldom_told_apart():
    rng = np.random.default_rng(0)
    draws = rng.exponential(size=(4000, 2, 300))
    told = [
        mean_difference(*(Mean(float(rows.mean()), float(rows.std()), 300) for rows in pair)).p_value <= 0.01
        for pair in draws
    ]
    assert 0 < np.mean(told) < 0.01 + 4 * np.sqrt(0.01 * 0.99 / 4000)


def test_means_that_do_not_vary_differ_or_are_the_same():
    assert mean_difference(Mean(2.0, 0.0, 5), Mean(2.0 + 1e-7, 0.0, 9)).p_value == 1
    assert mean_difference(Mean(3.0, 0.0, 5), Mean(2.0, 0.0, 9)).p_value == 0
