"""The accuracy of a policy's first stages alone: the answers of a service that cannot reach the others."""

import numpy as np
from synthetic import splits, steps

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.numbers.intervals import share_to_come
from cauc_ray.policies.threshold import ThresholdRule


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
