"""The threshold of a policy: given, chosen, certified or moved later; the accuracy-cost curve that it carries."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import beta, binom
from synthetic import chain, rows_of, seeds, splits

from cauc_ray.errors import BudgetError, PolicyError
from cauc_ray.numbers.guarantees import RiskLimit
from cauc_ray.policies.by_method import refit
from cauc_ray.policies.evidence import MOST_CURVE_POINTS
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule, random_halves
from cauc_ray.policies.trace import replay, trace_policy

fits = st.sampled_from([fit_base, fit_rf])
methods = pytest.mark.parametrize("fit", [fit_base, fit_rf], ids=["base", "rf"])
objectives = st.sampled_from(["accuracy", "macro-f1"])
# Costs of planted chains lie between 1, the first model's, and 20, that of all three.
budgets = st.floats(1, 25)
TENTH = ThresholdRule(certify=RiskLimit(0.1, 0.9))


def two_splits(seed, n=45, **options):
    return chain(seed, 80, **options), chain(seed, n, shift=1, **options)


def without_expectation(policy):
    return policy.model_copy(
        update=dict.fromkeys(("expected", "on_selection", "offline", "reference")) | {"guards": (), "figures": ()}
    )


@given(seeds, fits, objectives, budgets, budgets, st.booleans())
def test_another_budget_later_is_as_if_it_had_been_given_at_once(seed, fit, objective, first, then, per_call):
    calibration, validation = two_splits(seed, per_call=per_call)

    def fitted(budget):
        return fit(calibration, validation, ThresholdRule(budget=budget, objective=objective))

    frontier = trace_policy(fit(calibration, rule=ThresholdRule(threshold=2.0)), validation).frontier(
        validation, objective
    )
    assert len(frontier.cost) <= MOST_CURVE_POINTS
    cheapest = frontier.cost[0]
    assume(first >= cheapest)
    policy = fitted(first)
    if objective == "accuracy":
        for rule in (ThresholdRule(), ThresholdRule(threshold=0.7)):
            moved = fit(calibration, validation, rule).with_budget(first)
            assert without_expectation(moved) == without_expectation(policy)
    for budget in (then, float(frontier.cost[int(then * 1e6) % len(frontier.cost)])):
        if budget < cheapest:
            for choose in (fitted, policy.with_budget):
                with pytest.raises(BudgetError, match="below the cheapest"):
                    choose(budget)
            continue
        moved = policy.with_budget(budget)
        assert without_expectation(moved) == without_expectation(fitted(budget))
        assert moved.id == fitted(budget).id
        for name in ("expected", "on_selection", "offline", "reference"):
            assert getattr(moved, name) == (getattr(policy, name) if moved.threshold == policy.threshold else None)


@given(seeds, fits, st.floats(0, 0.1), st.booleans(), st.booleans())
@settings(max_examples=30)
def test_a_price_accepts_what_is_worth_more_than_the_calls_to_come(seed, fit, price, per_call, pair):
    calibration, validation = two_splits(seed, per_call=per_call)
    if pair:
        calibration, validation = calibration.of_models([0, 2]), validation.of_models([0, 2])
    policy = fit(calibration, validation, ThresholdRule(price=price))
    last = calibration.logits[-1].argmax(axis=1)
    if not pair:
        last = replay(fit(calibration, rule=ThresholdRule(threshold=2.0)), calibration).predictions
    accuracy = np.mean(last == calibration.labels)
    assert policy.threshold == pytest.approx(max(0.0, accuracy - price * calibration.costs.means[1:].sum()))
    assert (policy.threshold_choice.rule, policy.threshold_choice.price) == ("price", price)
    assert type(policy).model_validate_json(policy.model_dump_json()) == policy
    assert refit(policy, calibration, validation) == policy
    free = fit(calibration, validation, ThresholdRule(price=0.0))
    if pair:  # the paper's lambda of 0
        assert free.threshold == fit_base(calibration, validation).threshold
    assert policy.threshold <= free.threshold


@given(seeds, fits, objectives, st.floats(0, 2))
@settings(max_examples=30)
def test_another_threshold_later_is_as_if_it_had_been_given_at_once(seed, fit, objective, threshold):
    calibration, validation = two_splits(seed)
    policy = fit(calibration, validation, ThresholdRule(budget=9.0, objective=objective))
    moved = policy.with_threshold(threshold)
    fitted = fit(calibration, validation, ThresholdRule(threshold=threshold))
    if objective == "accuracy":
        assert without_expectation(moved) == without_expectation(fitted)
        assert moved.id == fitted.id
    assert (moved.threshold, moved.budget, moved.threshold_choice.rule) == (threshold, None, "given")
    assert without_expectation(moved.with_budget(9.0)) == without_expectation(policy)  # of the same objective
    assert refit(moved, calibration, validation).threshold == threshold


@methods
def test_a_policy_without_a_labelled_validation_split_has_neither_curve_nor_budget(fit):
    calibration, validation = two_splits(1)
    partly = replace(validation, labels=np.where(np.arange(45) == 7, -1, validation.labels))
    for without in (None, partly):
        policy = fit(calibration, without, ThresholdRule(threshold=0.7))
        assert policy.curve == ()
        with pytest.raises(PolicyError, match="no accuracy-cost curve"):
            policy.with_budget(9.0)
        assert policy.with_threshold(0.8).threshold == 0.8


@pytest.fixture(scope="module")
def large_splits():
    return splits(31, 2000)


def early_on(policy, data):
    """Return how many rows a replay answers before the last stage, and how many of these wrongly."""
    answers = replay(policy, data)
    early = answers.stages < len(policy.stages) - 1
    return int(early.sum()), int((early & (answers.predictions != data.labels)).sum())


@methods
@pytest.mark.parametrize("objective", ["accuracy", "macro-f1"])
def test_what_to_expect_is_measured_on_rows_that_chose_nothing(fit, objective):
    calibration, validation = two_splits(5, 101)
    policy = fit(calibration, validation, ThresholdRule(budget=6.0, objective=objective))
    rule = ThresholdRule(budget=policy.on_selection.cost, objective=objective)
    halves = random_halves(len(validation))
    n_right = 0
    for half, rest in zip(halves, halves[::-1], strict=True):
        answers = replay(fit(calibration, rows_of(validation, half), rule), rows_of(validation, rest))
        n_right += int((answers.predictions == validation.labels[rest]).sum())
    assert policy.expected.accuracy.value == n_right / 101
    answers = replay(policy, validation)
    assert policy.expected.stages == policy.on_selection.stages
    assert policy.expected.cost == policy.on_selection.cost
    assert policy.on_selection.accuracy.value == np.mean(answers.predictions == validation.labels)
    assert policy.on_selection.cost == pytest.approx(answers.costs.mean())
    assert policy.on_selection.cost <= 6.0 + 1e-9
    assert fit(calibration, validation, ThresholdRule(threshold=policy.threshold)).on_selection is None


@methods
def test_what_to_expect_is_not_better_than_other_rows_have_it(fit):
    """On the rows that chose the threshold it is."""
    gaps = []
    for seed in range(30):
        calibration, validation = two_splits(seed, 80)
        policy, test = fit(calibration, validation, ThresholdRule(budget=8.0)), chain(seed, 4000, shift=2)
        achieved = (replay(policy, test).predictions == test.labels).mean()
        gaps.append([policy.expected.accuracy.value - achieved, policy.on_selection.accuracy.value - achieved])
    expected, on_selection = np.mean(gaps, axis=0)
    assert expected < 0.01 < on_selection


@methods
def test_the_certificate_is_of_the_replay_of_validation_and_of_no_other_threshold(fit, large_splits):
    policy = fit(*large_splits, TENTH)
    choice = policy.threshold_choice
    at = choice.certificate
    assert (choice.rule, choice.split, at.risk, at.confidence, at.n) == ("certified", "validation", 0.1, 0.9, 2000)
    assert (at.n_accepted, at.n_wrong) == early_on(policy, large_splits[1])
    assert at.upper_bound == pytest.approx(beta.ppf(0.9, at.n_wrong + 1, at.n_accepted - at.n_wrong))
    assert binom.cdf(at.n_wrong, at.n_accepted, 0.1) <= 0.1
    assert policy.expected.n == 2000
    accepted, wrong = early_on(policy.with_threshold(at.plug_in_threshold), large_splits[1])
    assert accepted == at.plug_in_accepted >= at.n_accepted
    assert wrong <= 0.1 * accepted
    for moved in (policy.with_threshold(0.5), policy.with_budget(16.0)):
        assert moved.threshold_choice.certificate is None
    # It decides no answer, and a refit certifies anew.
    changed = choice.model_copy(update={"certificate": at.model_copy(update={"n_wrong": 0})})
    assert policy.model_copy(update={"threshold_choice": changed}).id == policy.id
    new = [replace(data, models=("m0", "new", "m2"), logits=(data.logits[0], data.logits[1] * 2, data.logits[2]))
           for data in large_splits]  # fmt: skip
    assert refit(policy, *new) == fit(*new, TENTH)
