"""Stacked cascades: CAUC-RF where no more terms are chosen, better where models can be recalibrated."""

import json

import numpy as np
import pytest
from synthetic import chain, chain_of

from cauc_ray.policies.by_method import fit_policy, refit
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.stacking import variants_of
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay, trace_policy

NAMES = ("calibration", "validation")


def confused(seed, n=500, k=5, m=2, *, ragged=False, shift=0):
    """Return a chain whose models like some options too much, and take some for others."""
    rng = np.random.default_rng([seed, shift])
    kinds = np.random.default_rng(seed)
    n_options = rng.integers(2, k + 1, n) if ragged else np.full(n, k)
    labels = (rng.random(n) * n_options).astype(np.int32)
    logits = []
    for model in range(m):
        z = rng.standard_normal((n, k)) + kinds.normal(0, 1.2, k)
        swapped = np.where(rng.random(n) < 0.4, kinds.permutation(k)[labels], labels) if model == 0 else labels
        favoured = np.where(swapped < n_options, swapped, labels)
        z[np.arange(n), favoured] += 1.5 + model
        z[np.arange(k) >= n_options[:, None]] = -np.inf
        logits.append(z.astype(np.float32))
    return chain_of(labels, logits, [f"{shift}-{row}" for row in range(n)], np.array([1.0, 10.0, 30.0])[:m])


def test_without_other_terms_it_answers_as_rf_does_at_every_threshold():
    calibration, validation = chain(3), chain(3, shift=1)
    first = variants_of(calibration, validation)[0]
    rf = fit_rf(calibration, validation, ThresholdRule(threshold=0.7))
    of_first, of_rf = trace_policy(first, validation), trace_policy(rf, validation)
    assert first.variant == "rf"
    assert np.array_equal(of_first.predictions, of_rf.predictions)
    assert of_first.confidences == pytest.approx(of_rf.confidences, rel=1e-6)


def test_where_labels_are_confused_it_is_better_and_its_biases_are_part_of_the_id():
    calibration, validation, test = (confused(1, 1500, shift=shift) for shift in range(3))
    policies = {
        method: fit_policy(method, calibration, validation, ThresholdRule(budget=8.0), NAMES)
        for method in ("rf", "stacked")
    }
    right = {name: np.mean(replay(policy, test).predictions == test.labels) for name, policy in policies.items()}
    assert right["stacked"] > right["rf"] + 0.005
    stacked = policies["stacked"]
    assert stacked.variant in ("stacked", "stacked-gain")
    assert stacked.on_selection.cost <= 8.0
    assert stacked.with_budget(5.0).expected is None
    assert refit(stacked, calibration, validation) == stacked
    moved = json.loads(stacked.to_json())
    moved["stages"][1]["biases"] = [0.0] * 5
    assert Policy.of(moved).id != stacked.id


def test_expected_gains_decide_by_what_later_stages_cost():
    calibration, validation = confused(5, 500, m=3), confused(5, 500, m=3, shift=1)
    policy = variants_of(calibration, validation)[-1]
    assert policy.variant == "stacked-gain"
    confidences = np.linspace(0.01, 0.999, 200)
    worth = policy.worth(0, confidences)
    assert ((worth > 0) & (worth < 1)).all()
    assert worth[-1] > worth[20]  # the sure are worth more where they are
    assert policy.stages[-1].gain is None
