"""Expected gains per cost: a falling function of the confidence, and the thresholds at which a price stops rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import seeds

from cauc_ray.numbers.gains import fit_gains
from cauc_ray.numbers.sweep import STOP_NONE


def confidences_of(seed, m, n, *, equal=False):
    rng = np.random.default_rng(seed)
    confidences = np.sort(rng.uniform(0.2, 1.0, (m, n)), axis=0)
    if equal:  # at the first stage
        confidences[0] = np.round(confidences[0], 1)
    return confidences


def centred_isotonic(confidences, values):
    """Pool adjacent violators one by one: knots and values of a falling function."""
    blocks = []
    for level in np.unique(confidences):
        rows = confidences == level
        blocks.append([level, values[rows].mean(), rows.sum()])
        while len(blocks) > 1 and blocks[-2][1] < blocks[-1][1]:
            (x, u, n), (y, v, k) = blocks.pop(-2), blocks.pop()
            blocks.append([(n * x + k * y) / (n + k), (n * u + k * v) / (n + k), n + k])
    return np.array(blocks).T[:2]


@given(seeds, st.integers(2, 4), st.integers(1, 60), st.booleans())
def test_gains_are_the_highest_of_centred_isotonic_regressions_and_fall_strictly(seed, m, n, equal):
    confidences, costs = confidences_of(seed, m, n, equal=equal), np.arange(1.0, m + 1)
    gains, total, grid = fit_gains(confidences, costs), np.cumsum(costs), np.linspace(0, 1, 101)
    for stage in range(m - 1):
        expected = [
            np.interp(grid, *centred_isotonic(confidences[stage], confidences[later] - confidences[stage]))
            / (total[later] - total[stage])
            for later in range(stage + 1, m)
        ]
        envelope = gains.at(stage, grid)
        assert envelope == pytest.approx(np.max(expected, axis=0), abs=1e-8)
        assert (np.diff(envelope) < 0).all()


@given(seeds, st.integers(2, 4), st.integers(1, 60))
def test_a_price_stops_rows_from_the_least_confidence_whose_gain_it_reaches(seed, m, n):
    rng = np.random.default_rng(seed)
    gains, grid, before = fit_gains(confidences_of(seed, m, n), rng.uniform(0.5, 5, m)), np.linspace(0, 1, 501), None
    for price in np.sort(rng.normal(0, 0.2, 8)):
        thresholds = gains.thresholds(price)
        for stage, threshold in enumerate(thresholds):
            stops = gains.at(stage, grid) <= price
            least = grid[stops].min() if stops.any() else STOP_NONE
            assert threshold == STOP_NONE if least == STOP_NONE else least - 0.003 <= threshold <= least + 1e-9
        assert before is None or (np.array(thresholds) <= before).all()  # the higher the price, the more rows stop
        before = np.array(thresholds)


@given(seeds, st.integers(2, 4), st.integers(1, 40), st.booleans())
def test_published_thresholds_stop_the_rows_of_a_setting(seed, m, n, equal):
    confidences = confidences_of(seed, m, n, equal=equal)
    gains, rows = fit_gains(confidences, np.arange(1.0, m + 1)), confidences.T
    worth = gains.worth(rows)
    settings = np.unique(worth[:, :-1])
    for setting, of_stages in zip(settings, gains.between(settings, rows), strict=True):
        assert ((rows[:, :-1] >= of_stages) == (worth[:, :-1] >= setting)).all()
