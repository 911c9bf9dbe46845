"""Every guard on planted logits: it fires where it must, says its numbers, and is the same however logits are cut."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain, seeds, splits

import cauc_ray
from cauc_ray.data.logits import LogitTable
from cauc_ray.errors import CaucWarning, GuardError
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.intervals import Mean, signs_of
from cauc_ray.policies.by_method import refit
from cauc_ray.policies.checks import FEWEST_EXAMPLES, as_expected, require_quiet
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure_replay, replay, trace_policy

fits = st.sampled_from([fit_base, fit_rf])
methods = pytest.mark.parametrize("fit", [fit_base, fit_rf], ids=["base", "rf"])


def guards_of(policy, name):
    return [guard for guard in policy.guards if guard.name == name]


def at_costs(data, *costs):
    return replace(data, costs=Costs("GFLOPs", np.array(costs)))


def alone(data, place):
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
    best = max(alone(validation, place).mean() for place in affordable)
    (below,) = guards_of(policy, "below-single-model")
    assert below.fired == (correct.mean() < best)
    assert below.figures["single_accuracy"] == best
    assert f"{100 * best:.1f} %" in below.says


@given(seeds)
@settings(max_examples=30)
def test_fusions_are_judged_by_the_rows_where_they_change_what_is_right(seed):
    calibration, validation = splits(seed)
    policy = fit_rf(calibration, validation)
    trace = trace_policy(policy, validation)
    fused, stops = trace.predictions == validation.labels[:, None], trace.stops(policy.threshold)
    noisy, hurting = ({g.stage: g for g in guards_of(policy, name)} for name in ("fusion-within-noise", "fusion-hurts"))
    for place in (1, 2):
        name, own = policy.models[place], alone(validation, place)
        found = signs_of(fused[:, place], own)
        differs = bool((fused[:, place] != own).any())
        assert noisy[name].fired == (differs and found.p_gain > 0.05)
        rows = stops >= place
        if rows.any():
            assert hurting[name].fired == (signs_of(fused[rows, place], own[rows]).p_loss <= 0.05)
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
    assert refit(policy, calibration, validation) == policy
    # A file from before gains and losses were kept: they are counted again.
    old = [stage.model_copy(update={"n_gain": None, "n_loss": None}) for stage in policy.stages]
    assert refit(policy.model_copy(update={"stages": tuple(old), "guards": ()}), calibration, validation) == policy


@given(seeds, fits)
@settings(max_examples=20)
def test_a_chain_is_compared_with_itself_without_each_stage(seed, fit):
    calibration, validation = (at_costs(data, 1.0, 1.5, 2.0) for data in splits(seed))
    policy = fit(calibration, validation, ThresholdRule(threshold=0.8))
    measures = measure_replay(policy, validation)[1]
    parts = []
    for place in range(3):
        stages = [stage for other, stage in enumerate(policy.stages) if other != place]
        if fit is fit_base:
            stages[-1] = stages[-1].model_copy(update={"fused": True})
        part = policy.model_copy(update={"stages": tuple(stages)})
        others = [other for other in range(3) if other != place]
        found = measure_replay(part, validation.of_models(others))[1]
        if found.cost <= measures.cost * (1 + 1e-9):
            parts.append(found.accuracy.value)
    (guard,) = guards_of(policy, "worse-than-part")  # without the last stage no policy costs more
    assert guard.figures["part_accuracy"] == pytest.approx(max(parts))
    assert guard.fired == (measures.accuracy.value < max(parts))


@methods
def test_few_examples_and_temperatures_that_they_leave_open_are_said(fit):
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
def test_separable_and_uninformative_logits_are_said(fit):
    data = splits(0, 500, strengths=(1.0, 2.0))

    def with_first(logits_of):
        return tuple(replace(d, logits=(logits_of(d).astype(np.float32), d.logits[1])) for d in data)

    telling = with_first(lambda d: np.eye(5)[d.labels] * np.random.default_rng(0).uniform(1, 2, (len(d), 1)))
    with pytest.warns(CaucWarning, match="separable"):
        policy = fit(*telling)
    guard = guards_of(policy, "separable")[0]
    assert guard.fired
    assert "separable" in guard.says
    blind = with_first(lambda d: np.random.default_rng(1).standard_normal((len(d), 5)))
    with pytest.warns(CaucWarning, match="uninformative"):
        policy = fit(*blind)
    assert "no information on the labels" in guards_of(policy, "separable")[0].says
    assert guards_of(policy, "uninformative-confidence")[0].fired


def test_a_cost_is_a_shift_where_sampling_does_not_explain_it():
    strengths = (1.0, 2.0)
    policy = fit_rf(*splits(1, 2000, strengths=strengths), ThresholdRule(threshold=0.8))
    others = (chain(1, 2000, strengths=strengths, shift=shift) for shift in range(2, 12))
    same = [as_expected(policy.expected, Mean.of(replay(policy, other).costs), "x", None, "u") for other in others]
    assert sum(guard.fired for guard in same) <= 1
    costs = replay(policy, chain(1, 2000, strengths=strengths, shift=1)).costs
    other = as_expected(
        policy.expected, Mean.of(np.random.default_rng(0).choice(costs, 2000) + 1.0), "test", 3.5, "GFLOPs"
    )
    assert other.fired
    for said in ("GFLOPs", "test", "validation", "3.5", f"{policy.expected.cost:.4g}"):
        assert said in other.says
    assert (
        as_expected(policy.expected.model_copy(update={"cost_deviation": None}), Mean.of(costs), "x", None, "u") is None
    )


def test_fits_without_labelled_validation_are_guarded_by_calibration():
    calibration, validation = splits(2)
    unlabelled = replace(validation, labels=np.where(np.arange(200) % 2, validation.labels, -1))
    policy = fit_base(calibration, unlabelled)
    rows = np.arange(200) % 2 == 1
    (below,) = guards_of(policy, "below-single-model")
    assert below.figures["n"] == rows.sum()
    alone_there = fit_base(calibration)
    assert "cost-shift" not in {guard.name for guard in alone_there.guards}
    assert all(" calibration " in guard.says for guard in guards_of(alone_there, "below-single-model"))


def test_strictness_names_all_that_have_fired_in_one_line():
    policy = fit_rf(*splits(2, 100))
    fired = [guard for guard in policy.guards if guard.fired]
    assert len(fired) > 1
    with pytest.raises(GuardError) as error:
        require_quiet(policy.guards)
    assert str(error.value).startswith(f"{fired[0].name}: {fired[0].says}; and ")
    assert all(guard.name in str(error.value) for guard in fired)
    assert "\n" not in str(error.value)
    assert error.value.guards == tuple(fired)
    require_quiet([guard for guard in policy.guards if not guard.fired])


@pytest.mark.parametrize(
    ("table", "models", "fit", "seen"),
    [
        *(
            (table, ["llama-2-7b-hf", "llama-2-13b-hf"], fit_rf, {"below-single-model", "fusion-within-noise"})
            for table in ("emotion10k_task_icl1", "emotion10k_base_icl1")
        ),
        ("cifar100", ["efs_densenet_bc_100", "efs_wideresnet_16_4"], fit_base, {"cost-above-largest"}),
        ("priced_mmlu", ["gpt-4o", "llama3.1-405b"], fit_base, {"cost-above-largest"}),
        ("emotion10k_task_icl1", ["falcon-7b", "qwen-14b"], fit_base, {"uninformative-confidence"}),
        ("priced_medmcqa", ["llama3.2-3b", "gpt-4o"], fit_rf, {"few-examples"}),
    ],
)
def test_what_goes_wrong_on_saved_outputs_is_seen(shared_logits, table, models, fit, seen):
    data = LogitTable(shared_logits / table)
    policy = fit(data.read_chain(models, "calibration"), data.read_chain(models, "validation"))
    assert seen <= {guard.name for guard in policy.guards if guard.fired}
    measures = measure_replay(policy, test := data.read_chain(models, "test"))[1]
    if "below-single-model" in seen:
        assert measures.accuracy.value < alone(test, 1).mean()
    if "cost-above-largest" in seen:
        assert measures.relative_cost > 1.05


@pytest.mark.parametrize("method", ["base", "rf"])
@pytest.mark.parametrize("budget", [None, 0.05, 0.1, 0.166])
def test_all_is_quiet_on_resnet_20_to_56_of_cifar10(shared_logits, method, budget):
    folder = shared_logits / "cifar10"
    policy = cauc_ray.fit(folder, models=["resnet20", "resnet56"], method=method, budget=budget, strict=True)
    assert not any(guard.fired for guard in policy.guards)
    assert {"cost-above-largest", "fusion-within-noise", "few-examples", "separable", "cost-shift"} <= {
        guard.name for guard in policy.guards
    }
    assert [guard.fired for guard in cauc_ray.evaluate(folder, policy).guards] == [False]
