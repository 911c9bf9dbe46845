"""Guards are quiet on policies that are healthy in truth, and fire on broken ones, by the tests that their page has."""

from dataclasses import replace

import numpy as np
import pytest
from synthetic import chain, splits

import cauc_ray
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.intervals import Mean
from cauc_ray.policies.checks import FEWEST_EXAMPLES, as_expected
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure_replay, replay, trace_policy

FITS = [fit_base, fit_rf]
EARLY = ThresholdRule(threshold=0.3)


def fired(policy):
    return {guard.name for guard in policy.guards if guard.fired}


def guard_of(policy, name):
    return next(guard for guard in policy.guards if guard.name == name)


def is_right(data, model):
    return data.logits[model].argmax(axis=1) == data.labels


def is_healthy(policy, data):
    """Return whether a policy is as accurate as any model that costs no more, on many rows."""
    answers, measures = measure_replay(policy, data)
    costs = data.costs.means
    affordable = [is_right(data, model).mean() for model in range(len(costs)) if costs[model] <= measures.cost]
    return (answers.predictions == data.labels).mean() >= max(affordable, default=0)


def test_healthy_policies_are_quiet_in_nine_of_ten_cases():
    rng, quiet = np.random.default_rng(0), []
    for seed in range(80):
        strengths = np.sort(rng.uniform(0.5, 4, rng.integers(2, 6)))
        n = int(np.exp(rng.uniform(np.log(200), np.log(1000))))
        calibration, validation = splits(seed, n, strengths=strengths)
        rule = ThresholdRule(budget=rng.uniform(1.5, calibration.costs.means[-1])) if seed % 3 else ThresholdRule()
        policy = FITS[seed % 2](calibration, validation, rule)
        if is_healthy(policy, chain(seed, 3000, strengths=strengths, shift=2)):
            quiet.append(not fired(policy))
    assert len(quiet) > 60
    assert np.mean(quiet) >= 0.9


def with_logits(data, model, change):
    logits = [*data.logits]
    logits[model] = change(data, logits[model]).astype(np.float32)
    return replace(data, logits=tuple(logits))


def useless_first(data):
    rng = np.random.default_rng(0)
    return with_logits(data.of_models([0, 2]), 0, lambda data, logits: rng.standard_normal(logits.shape))


def labels_told(data, logits):
    return 3 * np.eye(logits.shape[1])[data.labels]


def outliers(data, logits):
    """Put some right options, which the model did not choose, far below all others."""
    logits, rows = logits.copy(), np.flatnonzero(~is_right(data, 0))[:20]
    logits[rows, data.labels[rows]] = -50.0
    return logits


def cheaper_second(data):
    return replace(data, costs=Costs("GFLOPs", np.array([1.0, 1.1, 15.0])))


# By kind: the guard that is to fire, what changes the splits, and the rule.
BROKEN = {
    "useless first model": ("cost-above-largest", lambda c, v: (useless_first(c), useless_first(v))),
    "answers too early": ("below-single-model", lambda c, v: (cheaper_second(c), cheaper_second(v))),
    "few examples": ("few-examples", lambda c, v: (c.of_rows(np.arange(FEWEST_EXAMPLES - 1)), v)),
    "few to choose on": ("few-examples", lambda c, v: (c, v.of_rows(np.arange(FEWEST_EXAMPLES - 1)))),
    "leaked labels": ("separable", lambda c, v: (with_logits(c, 1, labels_told), with_logits(v, 1, labels_told))),
    "outliers in calibration": ("calibration-worse", lambda c, v: (with_logits(c, 0, outliers), v)),
    "other labels in validation": ("data-shift", lambda c, v: (c, v.of_rows(np.flatnonzero(v.labels < 3)))),
    "harder validation": ("data-shift", lambda c, v: (c, chain(9, 500, strengths=(0.3, 1.0, 1.7), shift=1))),
}


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")  # separable or uninformative models are named, too
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_policies_are_warned_of(kind):
    name, break_splits = BROKEN[kind]
    rule = {"below-single-model": EARLY, "separable": EARLY}.get(name, ThresholdRule())
    names = [
        fired(FITS[seed % 2](*break_splits(*splits(seed, 500, strengths=(1.0, 2.5, 3.0))), rule)) for seed in range(12)
    ]
    assert sum(name in of for of in names) >= 10


def test_figures_count_the_answers_that_fusion_fixes_and_breaks(fit):
    changed = []
    for seed in range(5):
        calibration, validation = splits(seed)
        policy = fit(calibration, validation, ThresholdRule(threshold=0.8))
        trace = trace_policy(policy, validation)
        reached = trace.stops(policy.threshold)
        for stage, figures in enumerate(policy.figures):
            fused, alone = trace.predictions[:, stage] == validation.labels, is_right(validation, stage)
            counts = [((reached >= stage) & of).sum() for of in (fused & ~alone, ~fused & alone)]
            assert [figures.n_fixed, figures.n_broken] == counts
            changed.append((any(counts), policy.stages[stage].fused and stage > 0))
    assert set(changed) <= {(True, True), (False, False), (False, True)}
    assert (True, True) in changed


def test_a_cost_is_a_shift_where_sampling_does_not_explain_it():
    strengths = (1.0, 2.0)
    policy = fit_rf(*splits(1, 2000, strengths=strengths), ThresholdRule(threshold=0.8))
    costs = [replay(policy, chain(1, 2000, strengths=strengths, shift=shift)).costs for shift in range(1, 12)]
    assert sum(as_expected(policy.expected, Mean.of(drawn), "x", None, "u").fired for drawn in costs[1:]) <= 1
    resampled = np.random.default_rng(0).choice(costs[0], 2000) + 1.0
    assert as_expected(policy.expected, Mean.of(resampled), "x", 3.5, "u").fired


@pytest.mark.parametrize("n", [1, 10, 100])
def test_few_rows_of_the_same_kind_are_seldom_a_shift(n):
    fits = [fit_rf(chain(seed, 300), chain(seed, n, shift=1), EARLY) for seed in range(40)]
    assert sum("data-shift" in fired(fit) for fit in fits) <= 2


def test_without_labelled_validation_guards_read_what_is_labelled():
    calibration, validation = splits(2)
    unlabelled = replace(validation, labels=np.where(np.arange(200) % 2, validation.labels, -1))
    policy = fit_base(calibration, unlabelled)
    right = replay(policy, unlabelled).predictions[1::2] == validation.labels[1::2]
    assert guard_of(policy, "below-single-model").figures["accuracy"] == pytest.approx(right.mean())
    assert "data-shift" not in {guard.name for guard in fit_base(calibration).guards}


def test_files_with_guards_of_earlier_versions_are_read():
    policy = fit_rf(*splits(1), ThresholdRule(threshold=0.8))
    content = policy.packed()
    content["guards"] = [{**content["guards"][0], "name": "fusion-within-noise"}]
    del content["figures"]
    assert Policy.of(content).id == policy.id


@pytest.mark.parametrize(("method", "budget"), [("base", None), ("base", 0.1), ("rf", 0.05), ("rf", 0.166)])
def test_all_is_quiet_on_resnet_20_to_56_of_cifar10(shared_logits, method, budget):
    folder = shared_logits / "cifar10"
    policy = cauc_ray.fit(folder, models=["resnet20", "resnet56"], method=method, budget=budget, strict=True)
    assert len(policy.guards) == 6
    assert [guard.fired for guard in cauc_ray.evaluate(folder, policy).guards] == [False]
