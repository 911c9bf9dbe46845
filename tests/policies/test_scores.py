"""The scores of a step: what probabilities of all options are made of."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax as scipy_softmax
from synthetic import chain

from cauc_ray.numbers.softmax import softmax
from cauc_ray.policies.fitting import fit_base, fit_rf
from cauc_ray.policies.threshold import ThresholdRule

seeds = st.integers(0, 2**32 - 1)


def fitted(fit, seed, ragged, fused=(True, True, True)):
    """Return a policy whose early stages join Base's fusion as told, and examples to ask it."""
    policy = fit(chain(seed, 150, ragged=ragged), rule=ThresholdRule(threshold=0.8))
    if fit is fit_base:
        stages = (stage.model_copy(update={"fused": own}) for stage, own in zip(policy.stages, fused, strict=True))
        policy = policy.model_copy(update={"stages": tuple(stages)})
    return policy, chain(seed, 40, ragged=ragged, shift=1)


def steps(policy, logits):
    state = None
    for stage, of_stage in enumerate(logits):
        step = policy.step(stage, of_stage, state)
        yield step
        state = step.state


@given(seeds, st.sampled_from([fit_base, fit_rf]), st.booleans(), st.tuples(st.booleans(), st.booleans()))
def test_their_softmax_is_the_confidence_and_the_prediction(seed, fit, ragged, early):
    policy, test = fitted(fit, seed, ragged, (*early, True))
    for logits, step in zip(test.logits, steps(policy, test.logits), strict=True):
        assert step.scores.dtype == np.float64
        assert step.scores.shape == logits.shape
        assert (np.isfinite(step.scores) == np.isfinite(logits)).all()
        assert (np.isneginf(step.scores) == np.isneginf(logits)).all()
        probabilities = scipy_softmax(step.scores, axis=1)
        np.testing.assert_allclose(probabilities.max(axis=1), step.confidences, rtol=0, atol=1e-12)
        np.testing.assert_allclose(softmax(step.scores), probabilities, rtol=0, atol=1e-12)
        best_two = np.sort(step.scores, axis=1)[:, -2:]
        untied = best_two[:, 1] - best_two[:, 0] > 1e-9
        assert untied.any()
        assert (step.scores.argmax(axis=1) == step.predictions)[untied].all()


@given(seeds, st.booleans())
def test_where_nothing_is_fused_they_are_the_stages_own_calibrated_logits(seed, ragged):
    policy, test = fitted(fit_base, seed, ragged, (False, False, True))
    for stage, logits, step in zip(policy.stages, test.logits, steps(policy, test.logits), strict=True):
        assert (step.scores == logits.astype(np.float64) / stage.temperature).all()


@given(seeds)
def test_a_fused_answer_is_on_the_last_stages_scale(seed):
    policy, test = fitted(fit_base, seed, ragged=False)
    weight, total = 0.0, 0.0
    for stage, logits in zip(policy.stages, test.logits, strict=True):
        own = logits.astype(np.float64) / stage.temperature
        p = scipy_softmax(own, axis=1).max(axis=1, keepdims=True)
        weight, total = weight + p, total + p * (own - stage.mean) / stage.std
    *_, step = steps(policy, test.logits)
    np.testing.assert_allclose(step.scores, total / weight * stage.std + stage.mean, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("fit", [fit_base, fit_rf])
@pytest.mark.parametrize("wider", [0, 1, 2])
def test_what_one_stage_pads_more_than_another_is_padded_in_both(fit, wider):
    policy, test = fitted(fit, 3, ragged=False)
    logits = list(test.logits)
    logits[wider] = np.pad(logits[wider], ((0, 0), (0, 2)), constant_values=-np.inf)
    *_, plain = steps(policy, test.logits)
    *_, padded = steps(policy, logits)
    assert (padded.scores[:, :5] == plain.scores).all()
    assert padded.scores.shape == (40, 7)
    assert np.isneginf(padded.scores[:, 5:]).all()
