"""Metrics and areas of curves against scikit-learn and slow loops."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm
from sklearn.metrics import auc, f1_score, log_loss
from synthetic import seeds

from cauc_ray.numbers.metrics import (
    CalibrationSums,
    accuracy,
    aiq,
    apgr,
    aurc,
    brier,
    calibration_error,
    cpt,
    deferral_area,
    macro_f1,
    nll,
    oracle_deferral_area,
    reliability_bins,
    upper_hull,
)


def answers(seed, n=200):
    """Return confidences, some equal and some on the edges of bins, and which are right, more or less as they say."""
    rng = np.random.default_rng(seed)
    confidences = rng.choice(np.r_[np.linspace(0, 1, 31), rng.random(50)], n)
    return confidences, rng.random(n) < confidences ** rng.uniform(0.5, 2)


@given(seeds, st.integers(1, 8))
def test_macro_f1_is_scikit_learns_over_the_classes_of_labels(seed, k):
    rng = np.random.default_rng(seed)
    predictions, labels = rng.integers(0, k, 40), rng.integers(0, max(1, k - 2), 40)
    expected = f1_score(labels, predictions, labels=np.unique(labels), average="macro", zero_division=0)
    assert macro_f1(predictions, labels) == pytest.approx(expected, abs=1e-12)
    assert accuracy(predictions, labels) == pytest.approx(float(np.mean(predictions == labels)))


@given(seeds, st.integers(1, 200))
def test_bins_and_calibration_error_by_a_slow_loop(seed, n):
    confidences, correct = answers(seed, n)
    bins, total = reliability_bins(confidences, correct), 0.0
    for b in range(15):
        # A confidence on an edge belongs to the bin above, and 1 to the last.
        inside = [i for i, c in enumerate(confidences) if b / 15 <= c and (c < (b + 1) / 15 or b == 14)]
        assert bins.counts[b] == len(inside)
        assert bins.centres[b] == pytest.approx((b + 0.5) / 15)
        figures = [part[b] for part in (bins.confidence, bins.accuracy, bins.low, bins.high)]
        if not inside:
            assert np.isnan(figures).all()
            continue
        hits = int(correct[inside].sum())
        interval = binomtest(hits, len(inside)).proportion_ci(method="wilson")
        mean = confidences[inside].mean()
        assert figures == pytest.approx([mean, hits / len(inside), interval.low, interval.high], abs=1e-12)
        total += len(inside) / n * abs(hits / len(inside) - mean)
    assert calibration_error(confidences, correct) == pytest.approx(total, abs=1e-12)
    gaps, order = correct - confidences, np.argsort(confidences, kind="stable")
    total = sum(abs(gaps[order[np.arange(n) * 15 // n == b]].sum()) / n for b in range(15))
    assert calibration_error(confidences, correct, "equal-mass") == pytest.approx(total, abs=1e-12)


@given(seeds)
def test_nll_and_brier_against_scikit_learn_and_a_loop(seed):
    rng = np.random.default_rng(seed)
    probabilities, labels = rng.dirichlet(np.ones(4), 50), rng.integers(0, 4, 50)
    assert nll(np.log(probabilities), labels) == pytest.approx(log_loss(labels, probabilities, labels=range(4)))
    slow = np.mean([sum((p[k] - (k == y)) ** 2 for k in range(4)) for p, y in zip(probabilities, labels, strict=True)])
    assert brier(probabilities, labels) == pytest.approx(slow)


@given(seeds, st.integers(1, 5))
def test_aurc_is_the_mean_over_all_orders_of_equal_confidences(seed, n):
    rng = np.random.default_rng(seed)
    confidences, correct = rng.integers(0, 3, n) / 3, rng.random(n) < 0.6
    risks = [
        np.mean(np.cumsum(~correct[list(order)]) / np.arange(1, n + 1))
        for order in permutations(range(n))
        if (np.diff(confidences[list(order)]) <= 0).all()
    ]
    assert aurc(confidences, correct) == pytest.approx(np.mean(risks), abs=1e-12)


@given(seeds)
def test_spiegelhalters_z_is_the_standardised_excess_of_the_brier_score(seed):
    confidences, correct = answers(seed)
    test = CalibrationSums.of(confidences, correct).test
    of_chance = confidences * (1 - confidences)
    excess = len(correct) * brier(np.c_[1 - confidences, confidences], correct.astype(int)) / 2 - of_chance.sum()
    variance = (of_chance * (1 - 2 * confidences) ** 2).sum()
    assert test.z == pytest.approx(excess / variance**0.5, abs=1e-9)
    assert test.p_value == pytest.approx(2 * norm.sf(abs(test.z)), rel=1e-9)
    nothing_to_chance = CalibrationSums.of(np.array([1.0, 0.5, 0.0]), np.array([False, True, True]))
    assert nothing_to_chance.test is None


FIRST, LAST = 0.4, 0.7


def pair(seed, n=60):
    rng = np.random.default_rng(seed)
    return rng.random(n) < rng.uniform(0.2, 0.8), rng.random(n) < rng.uniform(0.2, 0.9)


def deferring(order, first, last):
    """Return shares and quality where rows are deferred one after the other, by a loop."""
    points = [(count / len(order), np.where(np.isin(np.arange(len(order)), order[:count]), last, first).mean())
              for count in range(len(order) + 1)]  # fmt: skip
    return np.array(points).T


def some_points(seed):
    """Few distinct shares, so that equal ones are common, in any order."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 30))
    return rng.integers(0, 11, n) / 10, rng.integers(30, 90, n) / 100


def extended(shares, quality):
    means = {s: np.mean([q for t, q in zip(shares, quality, strict=True) if t == s]) for s in shares}
    return sorted({0.0: FIRST, 1.0: LAST, **means}.items())


@given(seeds)
def test_the_areas_are_integrals_of_the_extended_curve(seed):
    shares, quality = some_points(seed)
    expected = auc(*np.transpose(extended(shares, quality)))
    assert deferral_area(shares, quality, FIRST, LAST) == pytest.approx(expected, abs=1e-9)
    # RouteLLM's ratio: over the areas of both models alone.
    assert apgr(shares, quality, FIRST, LAST) == pytest.approx((expected - FIRST) / (LAST - FIRST), abs=1e-9)


@given(seeds)
def test_the_oracle_normalises_to_one_the_worst_order_to_minus_one_and_any_lies_between(seed):
    first, last = pair(seed)
    models, oracle = (first.mean(), last.mean()), oracle_deferral_area(first, last)
    order = np.argsort(first.astype(int) - last.astype(int), kind="stable")
    assert deferral_area(*deferring(order, first, last), *models) == pytest.approx(oracle, abs=1e-12)
    assert deferral_area(*deferring(order, first, last), *models, oracle) == pytest.approx(1.0, abs=1e-9)
    assert deferral_area(*deferring(order[::-1], first, last), *models, oracle) == pytest.approx(-1.0, abs=1e-9)
    drawn = deferring(np.random.default_rng(seed).permutation(len(first)), first, last)
    assert abs(deferral_area(*drawn, *models, oracle)) <= 1 + 1e-9


@given(seeds, st.floats(0.01, 1.0))
def test_cpt_is_where_the_running_maximum_gets_there_first(seed, q):
    shares, quality = some_points(seed)
    points = extended(shares, quality)
    highest = np.array([(x, max(y for earlier, y in points if earlier <= x)) for x, _ in points]).T
    reached, required = cpt(shares, quality, FIRST, LAST, q), FIRST + q * (LAST - FIRST)
    if reached is None:
        assert highest[1, -1] < required + 1e-12
        return
    assert np.interp(reached, *highest) >= required - 1e-9
    earlier = np.linspace(0, reached, 50)
    assert (np.interp(earlier[earlier < reached - 1e-6], *highest) < required).all()


@pytest.mark.parametrize("last", [FIRST, 0.1 + 0.2 + 0.1, 0.3])
def test_without_a_gap_nothing_can_be_recovered(last):
    point = np.array([0.5]), np.array([0.6])
    assert apgr(*point, FIRST, last) is None
    assert cpt(*point, FIRST, last, 0.5) is None


@given(seeds, st.integers(1, 30), st.booleans())
def test_hulls_are_concave_and_above_every_point(seed, n, falling):
    rng = np.random.default_rng(seed)
    costs, quality = rng.integers(1, 6, n) / 2, rng.integers(0, 9, n) / 8  # many equal and on one line
    hull = upper_hull(costs, quality, falling=falling)
    x, y = costs[hull], quality[hull]
    assert (np.diff(x) > 0).all()
    assert (np.diff(np.diff(y) / np.diff(x)) < 0).all()
    assert (np.interp(costs, x, y) >= quality - 1e-12).all()
    assert x[0] == costs.min()
    if falling:
        assert x[-1] == costs.max()
    else:
        assert (np.diff(y) > 0).all()
        assert (x[-1], y[-1]) == (costs[quality == quality.max()].min(), quality.max())


@given(seeds)
def test_aiq_is_the_integral_of_the_line_that_is_level_at_its_end(seed):
    rng = np.random.default_rng(seed)
    costs, quality = rng.permutation(np.arange(1.0, 9.0))[:5], rng.random(5)
    line = sorted(zip(costs, quality, strict=True))
    area = auc(*np.transpose([*line, (10.0, line[-1][1])]))
    assert aiq(costs, quality, 10.0) == pytest.approx(area / 10, abs=1e-9)
