"""The propositions and certificates against slow loops, and their promise in populations whose risk is known."""

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta, binom
from synthetic import seeds

from cauc_ray.errors import ConfigError, RiskError
from cauc_ray.numbers.guarantees import RiskLimit, certify, early_answers, order_of_tests, stage_guarantees

thresholds = st.one_of(st.floats(0, 1.2), st.sampled_from([0.0, 0.2, 0.4, 0.8, 1.0, 2.0]))


def stage_rows(seed, n):
    """Confidences of which some are equal and some lie on edges of bins, and a fallback that varies with them."""
    rng = np.random.default_rng(seed)
    confidences = rng.choice(np.r_[np.linspace(0, 1, 16), rng.random(n)], n)
    correct = rng.random(n) < confidences ** rng.uniform(0.3, 3)
    fallback_correct = rng.random(n) < rng.uniform(0.2, 1) + 0.3 * confidences
    return confidences, correct, fallback_correct, rng.uniform(0, 20, n)


@given(seeds, st.integers(1, 60), thresholds)
def test_the_propositions_by_a_slow_loop_and_within_their_bounds(seed, n, threshold):
    confidences, correct, fallback_correct, costs = stage_rows(seed, n)
    edges = sorted({*(b / 15 for b in range(1, 15)), threshold})
    of_bin = {}
    for row, confidence in enumerate(confidences):
        of_bin.setdefault(sum(edge <= confidence for edge in edges), []).append(row)
    error, cost = 1 - fallback_correct.mean(), costs.mean()
    weight = max(0.0, (1 - threshold - error) / cost) if cost > 0 else 0.0
    epsilon = variation = regret = 0.0
    for rows in of_bin.values():
        share = len(rows) / n
        loss, of_fallback = 1 - correct[rows].mean(), (1 - fallback_correct[rows] + weight * costs[rows]).mean()
        taken = loss if confidences[rows[0]] >= threshold else of_fallback
        epsilon += share * abs(correct[rows].mean() - confidences[rows].mean())
        variation += share * abs(of_fallback - (1 - threshold))
        regret += share * (taken - min(loss, of_fallback))
    stage, accepted = (
        stage_guarantees(confidences, correct, fallback_correct, costs, threshold),
        confidences >= threshold,
    )
    assert (stage.epsilon, stage.fallback_variation) == pytest.approx((epsilon, variation), abs=1e-12)
    assert stage.cost_weight == pytest.approx(weight)
    assert stage.threshold_regret == pytest.approx(regret, abs=1e-12)
    assert stage.threshold_regret_bound == pytest.approx(epsilon + variation, abs=1e-12)
    assert -1e-12 <= stage.threshold_regret <= stage.threshold_regret_bound + 1e-12
    assert stage.coverage == accepted.mean()
    if not accepted.any():
        assert np.isnan([stage.accepted_accuracy, stage.accepted_accuracy_bound]).all()
        return
    assert stage.accepted_accuracy == correct[accepted].mean()
    assert stage.accepted_accuracy_bound == pytest.approx(threshold - epsilon / accepted.mean(), abs=1e-12)
    assert stage.accepted_accuracy >= stage.accepted_accuracy_bound - 1e-12


def test_chance_is_what_calibrated_samples_show_on_average():
    rng = np.random.default_rng(2)
    samples = []
    for _ in range(400):
        confidences = rng.uniform(0.3, 1, 700)
        right = rng.random(700) < confidences
        # The fallback is never wrong and free.
        stage = stage_guarantees(confidences, right, np.ones(700, bool), np.zeros(700), 0.8)
        samples.append((stage.epsilon, stage.epsilon_by_chance))
    measured, predicted = np.mean(samples, axis=0)
    assert measured == pytest.approx(predicted, rel=0.05)


FIVE = RiskLimit(0.05, 0.95)


def drawn(seed, n, m):
    """Confidences of which many are equal, right a little less often than they say."""
    rng = np.random.default_rng(seed)
    confidences = rng.choice(np.r_[np.linspace(0.3, 1, 12), rng.random(20)], (n, m))
    return confidences, rng.random((n, m)) < confidences**0.3


def counted(confidences, correct, threshold):
    """Return how many rows are answered early and how many of these wrongly, row by row."""
    accepted = wrong = 0
    for row_confidences, right in zip(confidences, correct, strict=True):
        for confidence, hit in zip(row_confidences, right, strict=True):
            if confidence >= threshold:
                accepted, wrong = accepted + 1, wrong + (not hit)
                break
    return accepted, wrong


@given(seeds, st.integers(1, 400), st.integers(1, 3), st.floats(0.01, 0.6), st.floats(0.5, 0.99))
def test_certificates_and_plug_in_thresholds_by_a_slow_loop(seed, n, m, risk, confidence):
    limit = RiskLimit(risk, confidence)
    calibration, (confidences, correct) = early_answers(*drawn(seed + 1, n, m)), drawn(seed, n, m)
    early, expected = early_answers(confidences, correct), None
    thresholds = np.array([*np.random.default_rng(seed).uniform(0, 1.1, 8), *np.unique(confidences), 0.0, 2.0])
    counts = [counted(confidences, correct, threshold) for threshold in thresholds]
    assert np.array_equal(np.transpose(early.at(thresholds)), counts)
    plug_in, within = (
        early.plug_in(risk),
        [accepted for accepted, wrong in counts if accepted and wrong <= risk * accepted],
    )
    assert (plug_in and plug_in[1]) == max(within, default=None)
    assert plug_in is None or counted(confidences, correct, plug_in[0])[0] == plug_in[1]
    for threshold in order_of_tests(calibration, limit):
        accepted, wrong = counted(confidences, correct, threshold)
        if accepted == 0 or binom.cdf(wrong, accepted, risk) > 1 - confidence:
            break
        expected = (threshold, accepted, wrong)
    if expected is None:
        with pytest.raises(RiskError, match="no threshold is certified") as refused:
            certify(calibration, early, limit)
        assert "\n" not in str(refused.value)
        return
    at = certify(calibration, early, limit)
    assert (at.threshold, at.n_accepted, at.n_wrong) == expected
    assert at.upper_bound == pytest.approx(beta.ppf(confidence, at.n_wrong + 1, at.n_accepted - at.n_wrong))
    assert at.upper_bound <= risk + 1e-9


@given(seeds, st.integers(1, 400), st.integers(1, 3))
def test_the_order_falls_and_begins_where_calibration_is_surest(seed, n, m):
    confidences, correct = drawn(seed, n, m)
    order = order_of_tests(early_answers(confidences, correct), FIVE)
    assert (np.diff(order) < 0).all()
    assert counted(confidences, correct, order[-1])[0] == n
    wrong_of = [counted(confidences, correct, threshold)[::-1] for threshold in order]
    tails = [binom.cdf(wrong, accepted, 0.05) for wrong, accepted in wrong_of]
    assert tails[0] <= min(tails) * (1 + 1e-7)


@pytest.mark.parametrize(
    "text",
    ["", "risk<=0.05", "risk<=5%@95%", "risk<=\N{ARABIC-INDIC DIGIT ONE}@0.95", "risk<=0.05@0.95\n", "risk<=1.5@0.95",
     "risk<=0@0.95", "risk<=0.05@1", "risk<=0.05@0.99999999999999999999"],
)  # fmt: skip
def test_a_limit_is_read_from_its_spelling_and_any_other_text_is_refused_in_one_line(text):
    assert RiskLimit.parse("risk<=0.05@0.95") == FIVE
    assert RiskLimit.parse("risk<=.1@.9") == RiskLimit(0.1, 0.9)
    with pytest.raises(ConfigError, match=r"of the form|between 0 and 1") as refused:
        RiskLimit.parse(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("n", [700, 3000, pytest.param(12_500, marks=pytest.mark.soak("full"))])
def test_where_every_threshold_is_slightly_too_risky_hardly_any_is_certified(n):
    rng, n_draws, n_broken, n_plug_in = np.random.default_rng(n), 200, 0, 0
    for _ in range(n_draws):
        calibration, validation = (
            early_answers(rng.uniform(0.5, 1, (n, 1)), rng.random((n, 1)) >= 0.05001) for _ in range(2)
        )
        with suppress(RiskError):
            certify(calibration, validation, FIVE)
            n_broken += 1
        n_plug_in += validation.plug_in(0.05) is not None
    # A true share of 5 % would show more than this in one of a thousand such tests.
    assert n_broken <= binom.ppf(0.999, n_draws, 0.05)
    assert n_plug_in > 0.9 * n_draws
