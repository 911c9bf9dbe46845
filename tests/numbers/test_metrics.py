from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, kstest, norm
from sklearn.metrics import f1_score, log_loss
from strategies import answers, seeds

from cauc_ray.numbers.metrics import (
    CalibrationSums,
    accuracy,
    aurc,
    brier,
    calibration_error,
    macro_f1,
    nll,
    reliability_bins,
)


@given(seeds, st.integers(1, 8))
def test_macro_f1_is_scikit_learns(seed, k):
    rng = np.random.default_rng(seed)
    predictions, labels = rng.integers(0, k, 40), rng.integers(0, max(1, k - 2), 40)
    expected = f1_score(labels, predictions, average="macro", zero_division=0)
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
        got = [part[b] for part in (bins.confidence, bins.accuracy, bins.low, bins.high)]
        if not inside:
            assert np.isnan(got).all()
            continue
        hits = int(correct[inside].sum())
        interval = binomtest(hits, len(inside)).proportion_ci(method="wilson")
        mean = confidences[inside].mean()
        assert got == pytest.approx([mean, hits / len(inside), interval.low, interval.high], abs=1e-12)
        total += len(inside) / n * abs(hits / len(inside) - mean)
    assert calibration_error(confidences, correct) == pytest.approx(total, abs=1e-12)


@given(seeds, st.integers(15, 100))
def test_equal_mass_bins_differ_in_size_by_one_at_most(seed, n):
    confidences, correct = answers(seed, n)
    order = np.argsort(confidences, kind="stable")
    total = sum(
        abs(correct[part].mean() - confidences[part].mean()) * len(part) / n
        for part in (order[np.arange(n) * 15 // n == b] for b in range(15))
    )
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


def test_p_values_of_calibrated_confidences_are_uniform_and_of_others_small():
    rng = np.random.default_rng(0)

    def test_of(shift, n):
        confidences = rng.uniform(0.5, 1, n)
        return CalibrationSums.of(confidences, rng.random(n) < confidences + shift).test

    assert kstest([test_of(0, 500).p_value for _ in range(300)], "uniform").pvalue > 0.001
    over, under = test_of(-0.1, 2000), test_of(0.1, 2000)
    assert over.z > 4
    assert under.z < -4
    assert max(over.p_value, under.p_value) < 1e-4
