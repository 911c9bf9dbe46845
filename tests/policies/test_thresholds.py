"""The threshold of a policy, given, chosen or moved later, with its curve and what to expect, also of first stages."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from synthetic import chain, rows_of, seeds, splits, steps

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.errors import BudgetError, PolicyError
from cauc_ray.numbers.intervals import share_to_come
from cauc_ray.policies.by_method import refit
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule, random_halves
from cauc_ray.policies.trace import replay

fits = st.sampled_from([fit_base, fit_rf])
objectives = st.sampled_from(["accuracy", "macro-f1"])
# Costs of planted chains lie between 1, the first model's, and 20, that of all three.
budgets = st.floats(1, 25)


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

    costs = [point.cost for point in fitted(100.0).curve]
    cheapest = costs[0]
    assume(first >= cheapest)
    policy = fitted(first)
    if objective == "accuracy":
        for rule in (ThresholdRule(), ThresholdRule(threshold=0.7)):
            moved = fit(calibration, validation, rule).with_budget(first)
            assert without_expectation(moved) == without_expectation(policy)
    for budget in (then, costs[int(then * 1e6) % len(costs)]):
        if budget < cheapest:
            for choose in (fitted, policy.with_budget):
                with pytest.raises(BudgetError, match="below the cheapest"):
                    choose(budget)
            continue
        moved = policy.with_budget(budget)
        assert without_expectation(moved) == without_expectation(fitted(budget))
        for name in ("expected", "on_selection", "offline", "reference"):
            assert getattr(moved, name) == (getattr(policy, name) if moved.threshold == policy.threshold else None)


@given(seeds, fits, st.floats(0, 0.1), st.booleans(), st.booleans())
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
    assert refit(policy, calibration, validation) == policy
    free = fit(calibration, validation, ThresholdRule(price=0.0))
    if pair:  # the paper's lambda of 0
        assert free.threshold == fit_base(calibration, validation).threshold
    assert policy.threshold <= free.threshold


@given(seeds, fits, objectives, st.floats(0, 2))
def test_another_threshold_later_is_as_if_it_had_been_given_at_once(seed, fit, objective, threshold):
    calibration, validation = two_splits(seed)
    policy = fit(calibration, validation, ThresholdRule(budget=9.0, objective=objective))
    moved = policy.with_threshold(threshold)
    fitted = fit(calibration, validation, ThresholdRule(threshold=threshold))
    if objective == "accuracy":
        assert without_expectation(moved) == without_expectation(fitted)
    assert (moved.threshold, moved.budget, moved.threshold_choice.rule) == (threshold, None, "given")
    assert without_expectation(moved.with_budget(9.0)) == without_expectation(policy)  # of the same objective
    assert refit(moved, calibration, validation).threshold == threshold


def test_a_policy_without_a_labelled_validation_split_has_neither_curve_nor_budget(fit):
    calibration, validation = two_splits(1)
    partly = replace(validation, labels=np.where(np.arange(45) == 7, -1, validation.labels))
    for without in (None, partly):
        policy = fit(calibration, without, ThresholdRule(threshold=0.7))
        assert policy.curve == ()
        with pytest.raises(PolicyError, match="no accuracy-cost curve"):
            policy.with_budget(9.0)
        assert policy.with_threshold(0.8).threshold == 0.8


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


def cut_short(policy, chain, n_stages):
    """Return answers of the first stages alone and which of them are degraded, as a slow loop."""
    predictions, waits = np.full(len(chain), -1), np.ones(len(chain), dtype=bool)
    for step in list(steps(policy, chain.logits))[:n_stages]:
        predictions[waits] = step.predictions[waits]
        waits &= ~step.accepted
    return predictions, waits


def test_each_prefix_answers_as_its_last_reached_stage_does(fit):
    calibration, validation, test = splits(5, 300, 3, ragged=True)
    policy = fit(calibration, validation, ThresholdRule(threshold=0.7))
    assert [prefix.stages for prefix in policy.offline] == [1, 2]
    evaluated = Evaluation.of(policy, test).as_json()["offline"]
    for prefix, on_test in zip(policy.offline, evaluated, strict=True):
        predictions, waits = cut_short(policy, validation, prefix.stages)
        assert prefix.accuracy == share_to_come((predictions == validation.labels).sum(), len(validation))
        assert prefix.degraded == waits.mean()
        assert on_test["accuracy"] == (cut_short(policy, test, prefix.stages)[0] == test.labels).mean()
        assert on_test["expected_accuracy"] == prefix.accuracy.value
        assert on_test["expected_interval"] == [prefix.accuracy.low, prefix.accuracy.high]
