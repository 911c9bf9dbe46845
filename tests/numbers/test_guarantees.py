import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import seeds

from cauc_ray.numbers.guarantees import stage_guarantees

thresholds = st.one_of(st.floats(0, 1.2), st.sampled_from([0.0, 0.2, 0.4, 0.8, 1.0, 2.0]))


def of_accepted(confidences, correct, threshold):
    """Return what holds of a stage whose fallback is never wrong and free."""
    return stage_guarantees(confidences, correct, np.ones(len(correct), bool), np.zeros(len(correct)), threshold)


def drawn(seed, n):
    """Confidences of which some are equal and some lie on edges of bins, and a fallback that varies with them."""
    rng = np.random.default_rng(seed)
    confidences = rng.choice(np.r_[np.linspace(0, 1, 16), rng.random(n)], n)
    correct = rng.random(n) < confidences ** rng.uniform(0.3, 3)
    fallback_correct = rng.random(n) < rng.uniform(0.2, 1) + 0.3 * confidences
    return confidences, correct, fallback_correct, rng.uniform(0, 20, n)


@given(seeds, st.integers(1, 60), thresholds)
def test_both_by_a_slow_loop_and_within_their_bounds(seed, n, threshold):
    confidences, correct, fallback_correct, costs = drawn(seed, n)
    edges = sorted({*(b / 15 for b in range(1, 15)), threshold})
    of_bin = {}
    for row, confidence in enumerate(confidences):
        of_bin.setdefault(sum(edge <= confidence for edge in edges), []).append(row)
    error, cost = 1 - fallback_correct.mean(), costs.mean()
    weight = max(0.0, (1 - threshold - error) / cost) if cost > 0 else 0.0
    epsilon = variation = regret = 0.0
    for rows in of_bin.values():
        share = len(rows) / n
        loss, other = 1 - correct[rows].mean(), (1 - fallback_correct[rows] + weight * costs[rows]).mean()
        taken = loss if confidences[rows[0]] >= threshold else other
        epsilon += share * abs(correct[rows].mean() - confidences[rows].mean())
        variation += share * abs(other - (1 - threshold))
        regret += share * (taken - min(loss, other))
    found = stage_guarantees(confidences, correct, fallback_correct, costs, threshold)
    assert found.epsilon == pytest.approx(epsilon, abs=1e-12)
    assert found.cost_weight == pytest.approx(weight)
    assert found.fallback_variation == pytest.approx(variation, abs=1e-12)
    assert found.threshold_regret == pytest.approx(regret, abs=1e-12)
    assert found.threshold_regret_bound == pytest.approx(epsilon + variation, abs=1e-12)
    assert -1e-12 <= found.threshold_regret <= found.threshold_regret_bound + 1e-12
    accepted = confidences >= threshold
    assert found.coverage == accepted.mean()
    if not accepted.any():
        assert np.isnan([found.accepted_accuracy, found.accepted_accuracy_bound]).all()
        return
    assert found.accepted_accuracy == correct[accepted].mean()
    assert found.accepted_accuracy_bound == pytest.approx(threshold - epsilon / accepted.mean(), abs=1e-12)
    assert found.accepted_accuracy >= found.accepted_accuracy_bound - 1e-12


@settings(max_examples=20)
@given(st.floats(0.5, 2), st.floats(0.1, 0.9), st.floats(-0.3, 0.3))
def test_estimates_approach_the_population_where_proposition_2_holds(power, threshold, slope):
    rng = np.random.default_rng(1)
    n, level = 200_000, 0.6

    def fallback_accuracy(p):
        return level + slope * (p - 0.5)

    confidences = rng.random(n)
    correct, right = rng.random(n) < confidences**power, rng.random(n) < fallback_accuracy(confidences)
    found = stage_guarantees(confidences, correct, right, np.ones(n), threshold)
    weight = max(0.0, 1 - threshold - (1 - level))

    def loss(p):
        return 1 - fallback_accuracy(p) + weight

    def excess(p):
        accept, defer = 1 - p**power, loss(p)
        return np.where(p >= threshold, accept, defer) - np.minimum(accept, defer)

    def mean(of):
        return of((np.arange(n) + 0.5) / n).mean()

    epsilon, variation = mean(lambda p: abs(p**power - p)), mean(lambda p: abs(loss(p) - (1 - threshold)))
    regret = mean(excess)
    assert -1e-7 <= regret <= epsilon + variation + 1e-7
    # A bin is 1/15 wide: within it losses differ by less than that; at random, bins' means stray by less than 0.01.
    assert found.epsilon == pytest.approx(epsilon, abs=0.015)
    assert found.threshold_regret == pytest.approx(regret, abs=0.02)
    assert found.threshold_regret_bound == pytest.approx(epsilon + variation, abs=0.03)


def test_chance_is_what_calibrated_samples_show_on_average():
    rng = np.random.default_rng(2)
    shown, predicted = [], []
    for _ in range(400):
        confidences = rng.uniform(0.3, 1, 700)
        found = of_accepted(confidences, rng.random(700) < confidences, 0.8)
        shown.append(found.epsilon)
        predicted.append(found.epsilon_by_chance)
    assert np.mean(shown) == pytest.approx(np.mean(predicted), rel=0.05)


def test_the_weight_of_cost_is_the_one_at_which_the_threshold_is_right_on_average():
    confidences, correct, right, costs = drawn(3, 200)
    at_half = stage_guarantees(confidences, correct, right, costs, 0.2)
    assert at_half.cost_weight > 0
    assert at_half.fallback_loss == pytest.approx(at_half.reference_loss)
    above = stage_guarantees(confidences, correct, right, costs, 0.999)
    assert above.cost_weight == 0
    assert above.fallback_loss == pytest.approx(1 - right.mean())
    free = stage_guarantees(confidences, correct, right, np.zeros(200), 0.2)
    assert free.cost_weight == 0
