from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, kstest, norm
from sklearn.metrics import f1_score, log_loss

from cauc_ray.errors import DataError
from cauc_ray.numbers.metrics import (
    accuracy,
    aurc,
    brier,
    calibration_error,
    macro_f1,
    nll,
    reliability_bins,
    spiegelhalter_z,
)

seeds = st.integers(0, 2**32 - 1)


def answers(seed, n=200):
    rng = np.random.default_rng(seed)
    confidences = rng.choice(np.r_[np.linspace(0.1, 1.0, 31), rng.random(50)], n)
    return confidences, rng.random(n) < confidences


@given(seeds, st.integers(1, 8))
def test_macro_f1_is_scikit_learns(seed, k):
    rng = np.random.default_rng(seed)
    predictions, labels = rng.integers(0, k, 40), rng.integers(0, max(1, k - 2), 40)
    assert macro_f1(predictions, labels) == pytest.approx(
        f1_score(labels, predictions, average="macro", zero_division=0), abs=1e-12
    )
    assert accuracy(predictions, labels) == pytest.approx(float(np.mean(predictions == labels)))


@given(seeds)
def test_equal_width_calibration_error_by_a_slow_loop(seed):
    confidences, correct = answers(seed)
    total = 0.0
    for b in range(15):
        last = b == 14
        inside = [i for i, c in enumerate(confidences) if b / 15 <= c and (c < (b + 1) / 15 or (last and c <= 1))]
        if inside:
            total += len(inside) / len(confidences) * abs(correct[inside].mean() - confidences[inside].mean())
    assert calibration_error(confidences, correct) == pytest.approx(total, abs=1e-12)


@pytest.mark.parametrize("b", range(1, 15))
def test_a_confidence_on_an_edge_belongs_to_the_bin_above(b):
    confidences = np.array([b / 15, (b + 0.5) / 15])
    # In one bin the two errors cancel, in two they do not.
    correct = np.array([True, False])
    expected = abs((1 - b / 15) - (b + 0.5) / 15) / 2
    assert calibration_error(confidences, correct) == pytest.approx(expected, abs=1e-12)


def test_confidence_one_is_in_the_last_bin():
    assert calibration_error(np.array([1.0, 0.95]), np.array([True, True])) == pytest.approx(0.025)


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
    probabilities = rng.dirichlet(np.ones(4), 50)
    labels = rng.integers(0, 4, 50)
    assert nll(np.log(probabilities), labels) == pytest.approx(log_loss(labels, probabilities, labels=range(4)))
    slow = np.mean([sum((p[k] - (k == y)) ** 2 for k in range(4)) for p, y in zip(probabilities, labels, strict=True)])
    assert brier(probabilities, labels) == pytest.approx(slow)


@given(seeds, st.integers(1, 5))
def test_aurc_is_the_mean_over_all_orders_of_equal_confidences(seed, n):
    rng = np.random.default_rng(seed)
    confidences = rng.integers(0, 3, n) / 3
    correct = rng.random(n) < 0.6
    risks = [
        np.mean(np.cumsum(~correct[list(order)]) / np.arange(1, n + 1))
        for order in permutations(range(n))
        if (np.diff(confidences[list(order)]) <= 0).all()
    ]
    assert aurc(confidences, correct) == pytest.approx(np.mean(risks), abs=1e-12)


@given(seeds)
def test_aurc_does_not_depend_on_the_order_of_rows(seed):
    confidences, correct = answers(seed)
    order = np.random.default_rng(seed).permutation(len(correct))
    assert aurc(confidences[order], correct[order]) == pytest.approx(aurc(confidences, correct), abs=1e-12)


def rows_of(seed, n=200):
    """Confidences of which some are equal and some lie on edges of bins, calibrated more or less."""
    rng = np.random.default_rng(seed)
    confidences = rng.choice(np.r_[np.linspace(0, 1, 31), rng.random(50)], n)
    return confidences, rng.random(n) < confidences ** rng.uniform(0.5, 2)


@given(seeds, st.integers(1, 20))
def test_the_gaps_add_up_to_the_calibration_error(seed, n_bins):
    confidences, correct = rows_of(seed)
    bins = reliability_bins(confidences, correct, n_bins)
    gaps = np.abs(bins.accuracy - bins.confidence)[bins.counts > 0]
    expected = calibration_error(confidences, correct, n_bins=n_bins)
    assert (bins.counts[bins.counts > 0] * gaps).sum() / len(correct) == pytest.approx(expected, abs=1e-12)
    assert bins.counts.sum() == len(correct)


@given(seeds)
def test_bins_by_a_slow_loop(seed):
    confidences, correct = rows_of(seed, 40)
    bins = reliability_bins(confidences, correct, 5)
    assert bins.centres.tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    for b in range(5):
        inside = [i for i, c in enumerate(confidences) if b / 5 <= c and (c < (b + 1) / 5 or b == 4)]
        assert bins.counts[b] == len(inside)
        got = [part[b] for part in (bins.confidence, bins.accuracy, bins.low, bins.high)]
        if not inside:
            assert np.isnan(got).all()
            continue
        hits = int(correct[inside].sum())
        interval = binomtest(hits, len(inside)).proportion_ci(method="wilson")
        expected = [confidences[inside].mean(), hits / len(inside), interval.low, interval.high]
        assert got == pytest.approx(expected, abs=1e-12)


@given(seeds)
def test_spiegelhalters_z_is_the_standardised_excess_of_the_brier_score(seed):
    confidences, correct = rows_of(seed)
    test = spiegelhalter_z(confidences, correct)
    excess = variance = 0.0
    for p, c in zip(confidences, correct, strict=True):
        excess += (c - p) ** 2 - p * (1 - p)
        variance += p * (1 - p) * (1 - 2 * p) ** 2
    assert test.z == pytest.approx(excess / variance**0.5, abs=1e-9)
    assert test.p_value == pytest.approx(2 * norm.sf(abs(test.z)), rel=1e-9)
    two_ways = np.c_[1 - confidences, confidences]
    assert excess == pytest.approx(
        len(correct) * brier(two_ways, correct.astype(int)) / 2 - (confidences * (1 - confidences)).sum(), abs=1e-9
    )


def test_p_values_of_calibrated_confidences_are_uniform_and_of_others_small():
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(300):
        confidences = rng.uniform(0.5, 1, 500)
        drawn.append(spiegelhalter_z(confidences, rng.random(500) < confidences).p_value)
    assert kstest(drawn, "uniform").pvalue > 0.001
    confidences = rng.uniform(0.5, 1, 2000)
    over = spiegelhalter_z(confidences, rng.random(2000) < confidences - 0.1)
    under = spiegelhalter_z(confidences, rng.random(2000) < np.minimum(confidences + 0.1, 1))
    assert over.z > 4
    assert under.z < -4
    assert max(over.p_value, under.p_value) < 1e-4


def test_confidences_that_leave_nothing_to_chance_are_not_tested():
    assert spiegelhalter_z(np.array([1.0, 0.5, 0.0]), np.array([False, True, True])) is None


@pytest.mark.parametrize("measure", [reliability_bins, spiegelhalter_z])
@pytest.mark.parametrize(
    ("confidences", "n", "words"),
    [
        (np.array([]), 0, "at least one; got"),
        (np.array([0.5, 0.6]), 3, r"got \(2,\) and \(3,\)"),
        (np.array([0.5, 1.5]), 2, "row 1: confidence 1.5 is not in"),
        (np.array([np.nan, 0.5]), 2, "row 0: confidence nan"),
    ],
)
def test_rows_without_probabilities_are_refused_in_one_line(measure, confidences, n, words):
    with pytest.raises(DataError, match=words) as refused:
        measure(confidences, np.zeros(n, bool))
    assert "\n" not in str(refused.value)
