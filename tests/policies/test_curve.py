"""The accuracy-cost curve that a policy carries, and the thresholds and budgets that it is moved to."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic import chain

import cauc_ray
from cauc_ray.errors import BudgetError, ConfigError, PolicyError
from cauc_ray.front.show_policy import show_policy
from cauc_ray.policies.evidence import MOST_CURVE_POINTS
from cauc_ray.policies.fitting import fit_base, fit_rf, refit
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure_replay, trace_policy

seeds = st.integers(0, 2**32 - 1)
fits = st.sampled_from([fit_base, fit_rf])
objectives = st.sampled_from(["accuracy", "macro-f1"])
# Costs of planted chains lie between 1, the first model's, and 20, that of all three.
budgets = st.floats(1, 25)


def splits(seed, n=45, **options):
    return chain(seed, 80, **options), chain(seed, n, shift=1, **options)


def without_expectation(policy):
    return policy.model_copy(update={"expected": None, "guards": (), "reference": None})


def quality(measures, objective):
    return measures.macro_f1 if objective == "macro-f1" else measures.accuracy.value


@given(seeds, fits, objectives, budgets, budgets, st.booleans())
def test_another_budget_later_is_as_if_it_had_been_given_at_once(seed, fit, objective, first, then, per_call):
    calibration, validation = splits(seed, per_call=per_call)

    def fitted(budget):
        return fit(calibration, validation, ThresholdRule(budget=budget, objective=objective))

    frontier = trace_policy(fit(calibration, rule=ThresholdRule(threshold=2.0)), validation).frontier(
        validation, objective
    )
    assert len(frontier.cost) <= MOST_CURVE_POINTS
    cheapest = frontier.cost[0]
    assume(first >= cheapest)
    policy = fitted(first)
    for budget in (then, float(frontier.cost[int(then * 1e6) % len(frontier.cost)])):
        if budget < cheapest:
            with pytest.raises(BudgetError) as at_once:
                fitted(budget)
            with pytest.raises(BudgetError) as later:
                policy.with_budget(budget)
            assert str(later.value) == str(at_once.value)
            continue
        moved = policy.with_budget(budget)
        assert without_expectation(moved) == without_expectation(fitted(budget))
        assert moved.id == fitted(budget).id
        assert moved.expected == (policy.expected if moved.threshold == policy.threshold else None)
        assert moved.reference == (policy.reference if moved.threshold == policy.threshold else None)


@given(seeds, fits, budgets)
@settings(max_examples=30)
def test_a_policy_without_a_budget_and_one_with_a_threshold_can_be_given_a_budget(seed, fit, budget):
    calibration, validation = splits(seed)
    chosen = fit(calibration, validation, ThresholdRule(budget=budget))
    for rule in (ThresholdRule(), ThresholdRule(threshold=0.7)):
        moved = fit(calibration, validation, rule).with_budget(budget)
        assert without_expectation(moved) == without_expectation(chosen)


@given(seeds, fits, objectives, st.floats(0, 2))
@settings(max_examples=30)
def test_another_threshold_later_is_as_if_it_had_been_given_at_once(seed, fit, objective, threshold):
    calibration, validation = splits(seed)
    policy = fit(calibration, validation, ThresholdRule(budget=9.0, objective=objective))
    moved = policy.with_threshold(threshold)
    given_ = fit(calibration, validation, ThresholdRule(threshold=threshold))
    if objective == "accuracy":
        assert without_expectation(moved) == without_expectation(given_)
        assert moved.id == given_.id
    assert (moved.threshold, moved.budget, moved.threshold_choice.rule) == (threshold, None, "given")
    assert without_expectation(moved.with_budget(9.0)) == without_expectation(policy)  # of the same objective
    assert refit(moved, calibration, validation).threshold == threshold


@given(seeds, fits, objectives, st.booleans())
def test_the_points_are_what_a_replay_gives_and_none_is_left_out(seed, fit, objective, ragged):
    calibration, validation = splits(seed, ragged=ragged)
    policy = fit(calibration, validation, ThresholdRule(budget=12.0, objective=objective))
    for one, other in pairwise(policy.curve):
        assert one.cost < other.cost
        assert one.quality < other.quality
        assert one.threshold < other.threshold
    for point in policy.curve:
        _, measures = measure_replay(policy.with_threshold(point.threshold), validation)
        assert point.cost == pytest.approx(measures.cost, rel=1e-12)
        assert point.quality == pytest.approx(quality(measures, objective), abs=1e-9)
    confidences = trace_policy(policy, validation).confidences[:, :-1]
    for threshold in (0.0, *np.unique(confidences), 2.0):
        _, measures = measure_replay(policy.with_threshold(threshold), validation)
        within = [point for point in policy.curve if point.cost <= measures.cost * (1 + 1e-9)]
        assert within[-1].quality >= quality(measures, objective) - 1e-9


@given(seeds, fits)
@settings(max_examples=10)
def test_a_thinned_curve_keeps_its_ends_never_exceeds_a_budget_and_loses_little(seed, fit):
    calibration = chain(seed, 1000, strengths=(0.5, 3.0))
    validation = chain(seed, 3000, strengths=(0.5, 3.0), shift=1)
    policy = fit(calibration, validation, ThresholdRule(threshold=0.5))
    frontier = trace_policy(policy, validation).frontier(validation)
    points = frontier.points()
    assert len(points.pareto(10**6).cost) > MOST_CURVE_POINTS
    assert MOST_CURVE_POINTS / 2 < len(policy.curve) <= MOST_CURVE_POINTS
    cheapest, best = policy.curve[0], policy.curve[-1]
    assert cheapest.cost == frontier.cost[0]
    assert (best.threshold, best.quality) == (frontier.best().threshold, frontier.quality.max())
    of_threshold = dict(zip(points.settings, zip(points.cost, points.quality, strict=True), strict=True))
    step = (best.cost - cheapest.cost) / (MOST_CURVE_POINTS - 1)
    for budget in np.linspace(cheapest.cost, best.cost * 1.1, 500):
        cost, found = of_threshold[policy.with_budget(budget).threshold]
        assert cost <= budget * (1 + 1e-9)
        lower = max(budget - step, cheapest.cost)
        assert frontier.best(lower).quality <= found <= frontier.best(budget).quality


@pytest.mark.parametrize("fit", [fit_base, fit_rf])
def test_without_labels_to_validate_on_there_is_no_curve_and_no_budget(fit):
    calibration, validation = splits(1)
    partly = replace(validation, labels=np.where(np.arange(45) == 7, -1, validation.labels))
    for without in (None, partly):
        policy = fit(calibration, without, ThresholdRule(threshold=0.7))
        assert policy.curve == ()
        with pytest.raises(PolicyError, match="no accuracy-cost curve"):
            policy.with_budget(9.0)
        assert policy.with_threshold(0.8).threshold == 0.8


def test_what_was_expected_at_one_threshold_is_not_expected_at_another():
    policy = fit_rf(*splits(2), ThresholdRule(budget=9.0))
    assert policy.expected is not None
    assert policy.with_threshold(policy.threshold).expected == policy.expected
    assert policy.with_budget(9.0) == policy
    assert policy.with_threshold(policy.threshold + 0.01).expected is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_moves_nothing(number):
    policy = fit_rf(*splits(2))
    with pytest.raises(ConfigError, match="a threshold must be a number of at least 0"):
        policy.with_threshold(number)
    with pytest.raises(ConfigError, match="a budget must be a finite number"):
        policy.with_budget(number)
    with pytest.raises(ConfigError, match=r"at least 0, got -0\.5"):
        policy.with_threshold(-0.5)


@pytest.mark.parametrize("fit", [fit_base, fit_rf])
def test_a_moved_policy_comes_back_from_its_file(fit, tmp_path):
    policy = fit(*splits(3))
    dearest = policy.curve[-1].cost
    for moved in (policy.with_budget(dearest), policy.with_threshold(np.float64(0.25)), policy.with_budget(20)):
        (tmp_path / "policy.json").write_text(moved.to_json())
        assert cauc_ray.Policy.load(tmp_path / "policy.json") == moved


@pytest.mark.parametrize("fit", [fit_base, fit_rf])
def test_a_file_from_before_there_were_curves_is_the_same_policy(fit, tmp_path):
    policy = fit(*splits(4))
    content = json.loads(policy.to_json())
    assert list(content)[-1] == "curve"
    assert content.pop("curve")
    (tmp_path / "policy.json").write_text(json.dumps(content))
    older = cauc_ray.Policy.load(tmp_path / "policy.json")
    assert older.curve == ()
    assert older.id == policy.id


@pytest.mark.parametrize(
    ("curve", "says"),
    [
        ([(0.5, 2.0, 0.7), (0.6, 2.0, 0.8)], "curve: each point must cost more and be better"),
        ([(0.5, 2.0, 0.7), (0.6, 3.0, 0.7)], "curve: each point must cost more and be better"),
        ([(-0.5, 2.0, 0.7)], "curve.0.threshold: "),
        ([(0.5, 2.0, 1.7)], "curve.0.quality: "),
        ([(0.5, "2", 0.7)], "curve.0.cost: "),
        ([(0.5, 1.0 + n, n / 200) for n in range(MOST_CURVE_POINTS + 1)], "curve: "),
    ],
)
def test_what_is_no_curve_is_refused_in_one_line(tmp_path, curve, says):
    content = json.loads(fit_rf(*splits(5)).to_json())
    content["curve"] = [dict(zip(("threshold", "cost", "quality"), point, strict=True)) for point in curve]
    (tmp_path / "policy.json").write_text(json.dumps(content))
    with pytest.raises(PolicyError) as error:
        cauc_ray.Policy.load(tmp_path / "policy.json")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("fit", [fit_base, fit_rf])
def test_people_see_the_curve_and_what_is_not_known(fit, capsys):
    policy = fit(*splits(6))
    show_policy(policy)
    said = capsys.readouterr().out
    assert f"curve of {len(policy.curve)} points: accuracy " in said
    assert "not measured" not in said
    show_policy(policy.with_threshold(0.123))
    said = capsys.readouterr().out
    assert "threshold 0.123: given" in said
    assert "what to expect at this threshold was not measured" in said
    assert "curve of" in said
    show_policy(fit(splits(6)[0], rule=ThresholdRule(threshold=0.7)))
    assert "curve" not in capsys.readouterr().out


def test_a_stage_that_answers_by_itself_is_shown_as_such(capsys):
    policy = fit_rf(*splits(6))
    show_policy(policy)
    assert "not fused" not in capsys.readouterr().out
    *before, last = policy.stages
    show_policy(policy.model_copy(update={"stages": (*before, last.model_copy(update={"fused": False}))}))
    assert "not fused" in capsys.readouterr().out
