"""The accuracy of a policy's first stages alone: the answers of a service that cannot reach the others."""

import numpy as np
from synthetic import splits, steps

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.numbers.intervals import share, share_to_come
from cauc_ray.policies.threshold import ThresholdRule

# The share of seeds in which a 95 % interval holds is at least this, but for a chance of 2e-3 in 100 seeds.
LEAST = 0.88


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
        assert prefix.accuracy.value == (predictions == validation.labels).mean()
        assert prefix.degraded == waits.mean()
        assert on_test["accuracy"] == (cut_short(policy, test, prefix.stages)[0] == test.labels).mean()
        assert on_test["expected_accuracy"] == prefix.accuracy.value
        assert on_test["expected_interval"] == [prefix.accuracy.low, prefix.accuracy.high]


def test_the_interval_holds_the_accuracy_of_new_examples_in_19_of_20_seeds(fit):
    """New examples are as many as validation had, so that their own noise counts as much as validation's."""
    seeds, inside, accuracies = 100, np.zeros(2), np.zeros(2)
    for seed in range(seeds):
        calibration, validation, new = splits(seed, 150, 3)
        policy = fit(calibration, validation, ThresholdRule(budget=6.0))
        for at, prefix in enumerate(policy.offline):
            accuracy = (cut_short(policy, new, prefix.stages)[0] == new.labels).mean()
            inside[at] += prefix.accuracy.low <= accuracy <= prefix.accuracy.high
            accuracies[at] += accuracy
    assert (inside / seeds >= LEAST).all()
    assert (inside / seeds < 1.0).any()  # intervals that always hold are too wide
    assert accuracies[0] < accuracies[1]
    assert share_to_come(90, 100).low < share(90, 100).low < share_to_come(900, 1000).low
