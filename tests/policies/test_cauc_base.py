from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import chain, softmax

from cauc_ray.errors import CaucWarning, ConfigError
from cauc_ray.policies.fitting import fit_base
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay, trace_policy

seeds = st.integers(0, 2**32 - 1)


def algorithm_1(policy, chain):
    """Answer by the paper's pseudo-code, one example and one option at a time."""
    answers = []
    for i in range(len(chain)):
        p, ell = [], []
        for j, stage in enumerate(policy.stages):
            z = [float(x) for x in chain.logits[j][i] if np.isfinite(x)]
            ell.append(np.array(z) / stage.temperature)
            p.append(softmax(ell[j]).max())
            if j < len(policy.stages) - 1 and p[j] >= policy.threshold:
                answers.append((j, int(np.argmax(ell[j]))))
                break
        else:
            kept = [j for j, stage in enumerate(policy.stages) if stage.fused]
            q = {j: (ell[j] - policy.stages[j].mean) / (policy.stages[j].std + 1e-12) for j in kept}
            fused = sum(p[j] * q[j] for j in kept) / sum(p[j] for j in kept)
            answers.append((len(policy.stages) - 1, int(np.argmax(fused))))
    return answers


@given(seeds, st.integers(1, 4), st.booleans())
def test_replay_is_algorithm_1(seed, m, ragged):
    calibration = chain(seed, 150, 5, np.linspace(0.8, 2.0, m), ragged=ragged)
    test = chain(seed, 80, 5, np.linspace(0.8, 2.0, m), ragged=ragged, shift=1)
    policy = fit_base(calibration)
    result = replay(policy, test)
    expected = algorithm_1(policy, test)
    agree = [(int(s), int(y)) == e for s, y, e in zip(result.stages, result.predictions, expected, strict=True)]
    assert np.mean(agree) >= 79 / 80  # a confidence on the threshold to the last bit


@given(seeds, st.booleans())
def test_fitted_numbers_are_those_of_the_paper(seed, ragged):
    calibration = chain(seed, 200, 5, ragged=ragged)
    policy = fit_base(calibration)
    labels = calibration.labels
    last = calibration.logits[-1]
    assert policy.threshold == np.mean(last.argmax(axis=1) == labels)
    confidence = [
        np.array([softmax(row[np.isfinite(row)] / s.temperature).max() for row in z.astype(float)])
        for s, z in zip(policy.stages, calibration.logits, strict=True)
    ]
    right = [z.argmax(axis=1) == labels for z in calibration.logits]
    for j, stage in enumerate(policy.stages):
        real = calibration.logits[j].astype(float) / stage.temperature
        real = real[np.isfinite(real)]
        assert (stage.mean, stage.std) == pytest.approx((real.mean(), real.std()), rel=1e-9)
        if j == len(policy.stages) - 1:
            assert stage.complementarity_rate is None
            assert stage.fused
            continue
        bolder = confidence[j] > confidence[-1]
        rate = (np.sum(bolder & right[j] & ~right[-1]) - np.sum(bolder & ~right[j] & right[-1])) / len(labels)
        assert stage.complementarity_rate == pytest.approx(rate, abs=1e-12)
        assert stage.fused == (rate > 0)


@given(seeds)
def test_mean_and_temperature_cancel_in_the_fused_answer(seed):
    calibration, test = chain(seed, 200), chain(seed, 100, shift=1)
    policy = fit_base(calibration, rule=ThresholdRule(threshold=2.0))

    def fused(policy):
        state = None
        for j, logits in enumerate(test.logits):
            # The confidences, which weigh the stages, do depend on T: keep them from the fitted policy.
            step = policy.step(j, logits, state)
            state = step.state
        return step.predictions

    expected = fused(policy)
    shifted = [s.model_copy(update={"mean": s.mean + 3.0}) for s in policy.stages]
    assert (fused(policy.model_copy(update={"stages": tuple(shifted)})) == expected).all()
    # z / T standardised by the deviation of z / T is z standardised by that of z: T cancels.
    logits = [np.float64(z) for z in test.logits]
    for stage, z in zip(policy.stages, logits, strict=True):
        standard = (z / stage.temperature - stage.mean) / stage.std
        raw = (z - stage.mean * stage.temperature) / (stage.std * stage.temperature)
        np.testing.assert_allclose(standard, raw, rtol=1e-9)


@given(seeds, st.booleans())
def test_a_batch_is_its_rows_one_by_one(seed, ragged):
    policy = fit_base(chain(seed, 150, ragged=ragged))
    test = chain(seed, 12, ragged=ragged, shift=1)
    state, states = None, [None] * 12
    for j, logits in enumerate(test.logits):
        step = policy.step(j, logits, state)
        for i in range(12):
            real = np.isfinite(logits[i])
            alone = policy.step(j, logits[i : i + 1, real], states[i])  # not even padded
            assert alone.predictions[0] == step.predictions[i]
            assert alone.confidences[0] == step.confidences[i]
            states[i] = alone.state
        state = step.state


def test_a_last_stage_that_nothing_joins_answers_as_it_is():
    test = chain(3, 200, shift=1)
    policy = fit_base(chain(3, 300), rule=ThresholdRule(threshold=2.0))
    alone = tuple(s.model_copy(update={"fused": j == 2}) for j, s in enumerate(policy.stages))
    trace = trace_policy(policy.model_copy(update={"stages": alone}), test)
    assert (trace.predictions[:, -1] == test.logits[-1].argmax(axis=1)).all()
    own = [softmax(row / policy.stages[-1].temperature).max() for row in np.float64(test.logits[-1])]
    assert trace.confidences[:, -1] == pytest.approx(own)


def test_constant_logits_are_told_and_do_not_divide_by_zero():
    calibration = chain(4, 100)
    flat = (np.zeros_like(calibration.logits[0]), *calibration.logits[1:])
    with pytest.warns(CaucWarning, match="'m0' is uninformative"):
        policy = fit_base(replace(calibration, logits=flat))
    assert policy.stages[0].std == 0
    assert np.isfinite(replay(policy, chain(4, 50, shift=1)).confidences).all()


def test_an_objective_without_a_budget_would_do_nothing_and_is_refused():
    with pytest.raises(ConfigError, match="only for a budget"):
        fit_base(chain(), rule=ThresholdRule(objective="macro-f1"))
