import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import f1_score, log_loss

from cauc_ray.numbers.metrics import accuracy, aurc, brier, calibration_error, macro_f1, nll, share

seeds = st.integers(0, 2**32 - 1)


def answers(seed, n=200):
    rng = np.random.default_rng(seed)
    confidences = rng.choice(np.r_[np.linspace(0.1, 1.0, 31), rng.random(50)], n)
    return confidences, rng.random(n) < confidences


@given(st.integers(1, 500), st.data())
def test_share_is_the_wilson_interval(n, data):
    hits = data.draw(st.integers(0, n))
    expected = binomtest(hits, n).proportion_ci(method="wilson")
    got = share(hits, n)
    assert (got.value, got.n) == (hits / n, n)
    assert (got.low, got.high) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_share_of_nothing_is_no_number():
    assert np.isnan([share(0, 0).value, share(0, 0).low]).all()


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


@given(seeds)
def test_aurc_is_the_mean_over_orders_of_equal_confidences(seed):
    rng = np.random.default_rng(seed)
    confidences = rng.integers(0, 3, 30) / 3
    correct = rng.random(30) < 0.6
    order = rng.permutation(30)
    assert aurc(confidences[order], correct[order]) == pytest.approx(aurc(confidences, correct), abs=1e-12)

    def in_one_order():
        ranked = np.lexsort((rng.random(30), -confidences))
        return np.mean(np.cumsum(~correct[ranked]) / np.arange(1, 31))

    drawn = [in_one_order() for _ in range(400)]
    assert aurc(confidences, correct) == pytest.approx(np.mean(drawn), abs=4 * np.std(drawn) / 20 + 1e-12)
