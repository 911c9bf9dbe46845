"""What a policy's file says of its first stages alone: what a service without the others answers, on new data too."""

import numpy as np
import pytest
from planted import problem
from synthetic import splits, steps

import cauc_ray
from cauc_ray.api.evaluated import Evaluation, evaluation_summary
from cauc_ray.errors import PolicyError
from cauc_ray.numbers.intervals import share, share_to_come
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import ThresholdRule

FITS = {"base": fit_base, "rf": fit_rf}
# The share of seeds in which an interval of 95 % holds is at least this, but for a chance of 2e-3 in 100 seeds.
LEAST = 0.88


def cut_short(policy, chain, n_stages):
    """Answer a chain's examples by the first stages, one by one, as a slow loop."""
    predictions = np.full(len(chain), -1)
    waits = np.ones(len(chain), dtype=bool)
    for step in list(steps(policy, chain.logits))[:n_stages]:
        predictions[waits] = step.predictions[waits]
        waits &= ~step.accepted
    return predictions, waits


@pytest.mark.parametrize("method", FITS)
def test_each_prefix_answers_as_its_last_reached_stage_does(method):
    calibration, validation = splits(5, 300, ragged=True)
    policy = FITS[method](calibration, validation, ThresholdRule(threshold=0.7))
    assert [one.stages for one in policy.offline] == [1, 2]
    for one in policy.offline:
        predictions, waits = cut_short(policy, validation, one.stages)
        assert one.accuracy.value == (predictions == validation.labels).mean()
        assert one.degraded == waits.mean()
        assert one.accuracy.low < one.accuracy.value < one.accuracy.high


@pytest.mark.parametrize("method", FITS)
def test_the_interval_has_the_accuracy_of_new_examples_in_19_of_20_seeds(method):
    """New examples are as many as validation had, so that their own noise counts as much as validation's."""
    seeds, within, truths = 100, np.zeros(2), np.zeros(2)
    for seed in range(seeds):
        calibration, validation, new = splits(seed, 150, 3)
        policy = FITS[method](calibration, validation, ThresholdRule(budget=6.0))
        for at, one in enumerate(policy.offline):
            accuracy = (cut_short(policy, new, one.stages)[0] == new.labels).mean()
            within[at] += one.accuracy.low <= accuracy <= one.accuracy.high
            truths[at] += accuracy
    assert (within / seeds >= LEAST).all()
    assert (within / seeds < 1.0).any()  # else it would say little
    assert truths[0] < truths[1]


def test_two_models_of_many_new_examples():
    held = 0
    for seed in range(20):
        fitting, test = problem(seed, n=300, n_test=3000)
        policy = fit_rf(fitting.calibration.chain, fitting.validation.chain)
        (alone,) = policy.offline
        held += alone.accuracy.low <= test.correct()[:, 0].mean() <= alone.accuracy.high
    assert held >= 19


def test_an_interval_of_rows_to_come_is_wider_than_of_all_rows_and_narrows_with_both():
    assert share_to_come(90, 100).low < share(90, 100).low < share_to_come(900, 1000).low
    assert share_to_come(0, 10).low == 0.0 < share_to_come(0, 10).high


def test_the_file_keeps_it_and_an_earlier_file_has_none(tmp_path):
    calibration, validation = splits(6, 200)
    policy = fit_rf(calibration, validation)
    policy.save(tmp_path / "policy.json")
    assert Policy.load(tmp_path / "policy.json").offline == policy.offline
    content = policy.model_dump(mode="json")
    earlier = Policy.of({key: value for key, value in content.items() if key != "offline"})
    assert (earlier.offline, earlier.id) == (None, policy.id)
    assert policy.with_threshold(policy.threshold / 2).offline is None
    with pytest.raises(PolicyError, match="offline"):
        Policy.of(content | {"offline": content["offline"][1:]})


def test_an_evaluation_has_what_is_true_next_to_what_was_expected():
    calibration, validation, test = splits(7, 300, 3)
    policy = fit_rf(calibration, validation)
    found = evaluation_summary(Evaluation.of(policy, test))["offline"]
    for one, expected in zip(found, policy.offline, strict=True):
        assert one["accuracy"] == (cut_short(policy, test, one["stages"])[0] == test.labels).mean()
        assert one["expected_accuracy"] == expected.accuracy.value
        assert one["expected_interval"] == [expected.accuracy.low, expected.accuracy.high]


def test_it_is_shown(command):
    assert command("fit", cauc_ray.sample_logits(), "--method", "rf")[0] == 0
    for arguments in (("show", "policy.json"), ("evaluate", cauc_ray.sample_logits(), "--policy", "policy.json")):
        code, out, _ = command(*arguments)
        assert code == 0
        assert "offline" in out
