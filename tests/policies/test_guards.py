"""Every guard on planted and real logits: it fires where it must, with its numbers, and is quiet elsewhere."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain, seeds, splits

import cauc_ray
from cauc_ray.errors import CaucWarning
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.intervals import Mean, signs_of
from cauc_ray.policies.by_method import refit
from cauc_ray.policies.checks import FEWEST_EXAMPLES, as_expected
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure_replay, replay, trace_policy

fits = st.sampled_from([fit_base, fit_rf])
methods = pytest.mark.parametrize("fit", [fit_base, fit_rf], ids=["base", "rf"])


def guards_of(policy, name):
    return [guard for guard in policy.guards if guard.name == name]


def at_costs(data, *costs):
    return replace(data, costs=Costs("GFLOPs", np.array(costs)))


def is_right(data, place):
    """Return which rows a model alone gets right."""
    return data.logits[place].argmax(axis=1) == data.labels


@given(seeds, fits, st.floats(0.3, 1.1), st.floats(1, 30), st.booleans())
def test_costs_and_accuracies_are_compared_with_the_models_own(seed, fit, threshold, of_last, per_call):
    options = {"strengths": (1.0, 2.0), "per_call": per_call}
    calibration, validation = splits(seed, **options)
    if not per_call:
        calibration, validation = (at_costs(data, 1.0, max(1.01, of_last)) for data in (calibration, validation))
    policy = fit(calibration, validation, ThresholdRule(threshold=threshold))
    answers, measures = measure_replay(policy, validation)
    correct, means = answers.predictions == validation.labels, validation.costs.means
    (costs_more,) = guards_of(policy, "cost-above-largest")
    assert costs_more.fired == (measures.cost > means[1] * (1 + 1e-9))
    affordable = [place for place in (0, 1) if means[place] <= measures.cost * (1 + 1e-9)]
    best = max(is_right(validation, place).mean() for place in affordable)
    (below,) = guards_of(policy, "below-single-model")
    assert below.fired == (correct.mean() < best)
    assert below.figures["single_accuracy"] == best


@given(seeds)
@settings(max_examples=30)
def test_fusions_are_judged_by_the_rows_where_they_change_what_is_right(seed):
    calibration, validation = splits(seed)
    policy = fit_rf(calibration, validation)
    trace = trace_policy(policy, validation)
    fused, stops = trace.predictions == validation.labels[:, None], trace.stops(policy.threshold)
    noisy, hurting = ({g.stage: g for g in guards_of(policy, name)} for name in ("fusion-within-noise", "fusion-hurts"))
    for place in (1, 2):
        name, unfused = policy.models[place], is_right(validation, place)
        differs = bool((fused[:, place] != unfused).any())
        assert noisy[name].fired == (differs and signs_of(fused[:, place], unfused).p_gain > 0.05)
        rows = stops >= place
        if rows.any():
            assert hurting[name].fired == (signs_of(fused[rows, place], unfused[rows]).p_loss <= 0.05)
        else:
            assert name not in hurting


@given(seeds)
@settings(max_examples=30)
def test_base_is_judged_by_its_gains_and_losses_and_refits_judge_anew(seed):
    calibration, validation = splits(seed)
    policy = fit_base(calibration, validation)
    for guard, stage in zip(guards_of(policy, "fusion-within-noise"), policy.stages, strict=False):
        assert guard.stage == stage.name
        assert (stage.n_gain - stage.n_loss) / 200 == stage.complementarity_rate
        assert guard.fired == (
            guard.figures["p_gain"] > 0.05 < guard.figures["p_loss"] and stage.n_gain + stage.n_loss > 0
        )
        assert ("not fused" in guard.says) != stage.fused
    assert refit(policy.model_copy(update={"guards": ()}), calibration, validation) == policy


@given(seeds, fits)
@settings(max_examples=20)
def test_a_chain_is_compared_with_itself_without_each_stage(seed, fit):
    calibration, validation = (at_costs(data, 1.0, 1.5, 2.0) for data in splits(seed))
    policy = fit(calibration, validation, ThresholdRule(threshold=0.8))
    measures = measure_replay(policy, validation)[1]
    parts = []
    for place in range(3):
        places = [index for index in range(3) if index != place]
        stages = [policy.stages[index] for index in places]
        if fit is fit_base:
            stages[-1] = stages[-1].model_copy(update={"fused": True})
        part = policy.model_copy(update={"stages": tuple(stages)})
        of_part = measure_replay(part, validation.of_models(places))[1]
        if of_part.cost <= measures.cost * (1 + 1e-9):
            parts.append(of_part.accuracy.value)
    (guard,) = guards_of(policy, "worse-than-part")  # without the last stage no policy costs more
    assert guard.figures["part_accuracy"] == pytest.approx(max(parts))
    assert guard.fired == (measures.accuracy.value < max(parts))


@methods
def test_few_examples_and_uncertain_temperatures_are_reported(fit):
    few, enough = (fit(*splits(3, n, strengths=(1.0, 2.0))) for n in (FEWEST_EXAMPLES - 1, FEWEST_EXAMPLES))
    assert [guards_of(policy, "few-examples")[0].fired for policy in (few, enough)] == [True, False]
    # A model that hardly knows anything has no temperature to speak of.
    vague = fit(*splits(5, 400, strengths=(0.25, 2.0)))
    first = vague.stages[0]
    guard = guards_of(vague, "temperature-uncertain")[0]
    assert guard.stage == "m0"
    assert guard.fired
    assert guard.figures["relative_error"] == first.diagnostics.standard_error / first.temperature


@methods
def test_separable_and_uninformative_logits_are_reported(fit):
    data = splits(0, 500, strengths=(1.0, 2.0))

    def with_first(logits_of):
        return tuple(replace(d, logits=(logits_of(d).astype(np.float32), d.logits[1])) for d in data)

    telling = with_first(lambda d: np.eye(5)[d.labels] * np.random.default_rng(0).uniform(1, 2, (len(d), 1)))
    with pytest.warns(CaucWarning, match="separable"):
        policy = fit(*telling)
    assert guards_of(policy, "separable")[0].fired
    blind = with_first(lambda d: np.random.default_rng(1).standard_normal((len(d), 5)))
    with pytest.warns(CaucWarning, match="uninformative"):
        policy = fit(*blind)
    assert not guards_of(policy, "separable")[0].fired
    assert guards_of(policy, "no-information")[0].fired
    assert guards_of(policy, "uninformative-confidence")[0].fired


@methods
def test_calibration_that_makes_confidences_worse_is_reported(fit):
    """Zeros that are declared as logits dominate the temperature."""
    calibration, validation = splits(0, 1000, strengths=(1.0, 2.0))
    logits = calibration.logits[0].copy()
    wrong = np.flatnonzero(~is_right(calibration, 0))[:20]
    logits[wrong, calibration.labels[wrong]] = -50.0
    policy = fit(replace(calibration, logits=(logits, calibration.logits[1])), validation)
    first, second = guards_of(policy, "calibration-worse")
    assert first.fired
    assert first.figures["error_after"] > first.figures["error_before"] + 0.05
    assert not second.fired


def test_a_cost_is_a_shift_where_sampling_does_not_explain_it():
    strengths = (1.0, 2.0)
    policy = fit_rf(*splits(1, 2000, strengths=strengths), ThresholdRule(threshold=0.8))
    costs = [replay(policy, chain(1, 2000, strengths=strengths, shift=shift)).costs for shift in range(1, 12)]
    like_validation = [as_expected(policy.expected, Mean.of(drawn), "x", None, "u") for drawn in costs[1:]]
    assert sum(guard.fired for guard in like_validation) <= 1
    resampled = np.random.default_rng(0).choice(costs[0], 2000) + 1.0
    shifted = as_expected(policy.expected, Mean.of(resampled), "test", 3.5, "GFLOPs")
    assert shifted.fired
    for word in ("GFLOPs", "test", "validation", "3.5", f"{policy.expected.cost:.4g}"):
        assert word in shifted.says


def test_fits_without_labelled_validation_are_guarded_by_calibration():
    calibration, validation = splits(2)
    unlabelled = replace(validation, labels=np.where(np.arange(200) % 2, validation.labels, -1))
    policy = fit_base(calibration, unlabelled)
    rows = np.arange(200) % 2 == 1
    (below,) = guards_of(policy, "below-single-model")
    assert below.figures["n"] == rows.sum()
    assert "cost-shift" not in {guard.name for guard in fit_base(calibration).guards}


@pytest.mark.parametrize(("method", "budget"), [("base", None), ("base", 0.1), ("rf", 0.05), ("rf", 0.166)])
def test_all_is_quiet_on_resnet_20_to_56_of_cifar10(shared_logits, method, budget):
    folder = shared_logits / "cifar10"
    policy = cauc_ray.fit(folder, models=["resnet20", "resnet56"], method=method, budget=budget, strict=True)
    assert not any(guard.fired for guard in policy.guards)
    assert {"cost-above-largest", "fusion-within-noise", "few-examples", "separable", "cost-shift"} <= {
        guard.name for guard in policy.guards
    }
    assert [guard.fired for guard in cauc_ray.evaluate(folder, policy).guards] == [False]
