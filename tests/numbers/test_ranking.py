"""Whether confidences rank, against scipy."""

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu

from cauc_ray.numbers.ranking import ranking

seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.integers(2, 200), st.integers(1, 40))
def test_area_and_p_value_are_those_of_the_rank_sum_test_with_ties(seed, n, levels):
    rng = np.random.default_rng(seed)
    confidences, correct = rng.integers(0, levels, n) / levels, rng.random(n) < 0.6
    assume(0 < correct.sum() < n)
    found = ranking(confidences, correct)
    expected = mannwhitneyu(
        confidences[correct],
        confidences[~correct],
        alternative="greater",
        use_continuity=False,
        method="asymptotic",
    )
    assert found.area == pytest.approx(expected.statistic / (correct.sum() * (~correct).sum()), abs=1e-12)
    if len(set(confidences)) > 1:
        assert found.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-12)
    else:
        assert (found.area, found.p_value) == (0.5, 1.0)


def test_nothing_is_ranked_where_all_are_right_or_all_are_wrong():
    confidences = np.array([0.5, 0.7, 0.9])
    assert ranking(confidences, np.array([True] * 3)) is None
    assert ranking(confidences, np.array([False] * 3)) is None
