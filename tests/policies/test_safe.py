"""Safe policies: fused where that is supported, never behind a single model on validation, else as plain ones."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from synthetic import seeds, splits

from cauc_ray.errors import BudgetError
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.intervals import signs_of
from cauc_ray.numbers.metrics import macro_f1
from cauc_ray.policies.by_method import fit_policy, refit
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure_replay, trace_policy

# Some of the models that are drawn know nothing.
pytestmark = pytest.mark.filterwarnings("ignore:.* is uninformative on its:cauc_ray.errors.CaucWarning")

NAMES = ("calibration", "validation")
methods = st.sampled_from(["base", "rf"])
strengths = st.lists(st.floats(0.2, 2.6), min_size=2, max_size=4).map(tuple)


def more_expensive(data, steepness):
    """Return a chain each of whose models costs so many times as much as the one before it."""
    return replace(data, costs=Costs("GFLOPs", float(steepness) ** np.arange(len(data.models))))


def of_model(data, place, objective):
    answers = data.logits[place].argmax(axis=1)
    return macro_f1(answers, data.labels) if objective == "macro-f1" else float(np.mean(answers == data.labels))


def quality_of(policy, data, objective="accuracy"):
    measures = measure_replay(policy, data.of_models([data.models.index(name) for name in policy.models]))[1]
    return (measures.macro_f1 if objective == "macro-f1" else measures.accuracy.value), measures.cost


rules = st.one_of(
    st.just(ThresholdRule()),
    st.builds(ThresholdRule, budget=st.floats(0.5, 30), objective=st.sampled_from(["accuracy", "macro-f1"])),
    st.builds(ThresholdRule, threshold=st.floats(0.2, 1.1)),
)


@given(seeds, methods, strengths, st.floats(1.05, 5), rules)
def test_no_model_that_costs_no_more_is_better_on_validation(seed, method, strengths, steepness, rule):
    calibration, validation = (more_expensive(data, steepness) for data in splits(seed, 150, strengths=strengths))
    try:
        policy = fit_policy(method, calibration, validation, rule, NAMES, safe=True)
    except BudgetError:
        return
    assert rule.threshold in (None, policy.threshold)
    quality, cost = quality_of(policy, validation, rule.objective)
    costs = validation.costs.means
    limit = rule.budget or (costs[-1] if rule.threshold is None else cost)
    assert policy.safe.limit == limit or rule.threshold is not None
    assert cost <= limit * (1 + 1e-9)
    for place, cost_alone in enumerate(costs):
        alone = of_model(validation, place, rule.objective)
        if cost_alone <= limit:
            assert alone <= quality
            assert alone < quality or cost_alone >= cost * (1 - 1e-9) or rule.threshold is not None


@given(seeds, methods)
def test_safe_is_plain_where_all_is_supported(seed, method):
    calibration, validation = (more_expensive(data, 6) for data in splits(seed, 900, strengths=(1.4, 1.6)))
    plain = fit_policy(method, calibration, validation, ThresholdRule(), NAMES)
    quality, cost = quality_of(plain, validation)
    large = of_model(validation, 1, "accuracy")
    safe = fit_policy(method, calibration, validation, ThresholdRule(), NAMES, safe=True)
    assume(not safe.safe.unfused and cost <= 6 and quality > max(large, of_model(validation, 0, "accuracy")))
    assert safe.model_copy(update={"safe": None}) == plain
    assert safe.id == plain.id


@given(seeds)
def test_a_stage_is_fused_where_validation_establishes_the_gain_and_answers_by_itself_elsewhere(seed):
    calibration, validation = (more_expensive(data, 4) for data in splits(seed, 300, strengths=(0.8, 1.3, 1.8)))
    policy = fit_rf(calibration, validation, ThresholdRule(threshold=0.9), safe=True)
    for place in (1, 2):
        stages = tuple(
            stage.model_copy(update={"fused": stage.fused or index == place})
            for index, stage in enumerate(policy.stages)
        )
        fused = trace_policy(policy.model_copy(update={"stages": stages}), validation).predictions[:, place]
        alone = validation.logits[place].argmax(axis=1)
        assert policy.stages[place].fused == signs_of(fused == validation.labels, alone == validation.labels).gains
        if not policy.stages[place].fused:
            assert (trace_policy(policy, validation).predictions[:, place] == alone).all()
    # What a stage after an unfused one is fitted to is that one's own answers.
    if not policy.stages[1].fused:
        later = fit_policy("rf", calibration.of_models([1, 2]), None, ThresholdRule(threshold=0.9), NAMES)
        assert (policy.stages[2].alpha, policy.stages[2].beta) == (later.stages[1].alpha, later.stages[1].beta)


@given(seeds, methods)
def test_a_safe_policy_stays_safe_when_it_is_refitted_and_its_file_is_read(seed, method):
    calibration, validation = splits(seed, 150, strengths=(1.0, 1.2))
    policy = fit_policy(method, calibration, validation, ThresholdRule(), NAMES, safe=True)
    places = [calibration.models.index(name) for name in policy.models]
    again = refit(policy, calibration.of_models(places), validation.of_models(places))
    assert again.stages == policy.stages
    assert again.safe is not None
    if len(places) == 2:
        assert again == policy
    assert type(policy).of(policy.packed()) == policy
    assert policy.with_threshold(policy.threshold + 0.5).safe is None
