import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from synthetic import chain, nll, softmax

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay, trace_policy

seeds = st.integers(0, 2**32 - 1)


def algorithm_2(policy, chain):
    """Answer by the paper's pseudo-code, one example at a time."""
    answers = []
    for i in range(len(chain)):
        r = None
        for j, stage in enumerate(policy.stages):
            z = chain.logits[j][i].astype(float)
            ell = z[np.isfinite(z)] / stage.temperature
            r = ell if j == 0 else (r / stage.alpha + ell / stage.beta) / 2
            if softmax(r).max() >= policy.threshold or j == len(policy.stages) - 1:
                answers.append((j, int(np.argmax(r))))
                break
    return answers


@given(seeds, st.integers(1, 4), st.booleans())
def test_replay_is_algorithm_2(seed, m, ragged):
    strengths = np.linspace(0.8, 2.0, m)
    calibration, validation, test = (chain(seed, 150, 5, strengths, ragged=ragged, shift=s) for s in range(3))
    policy = fit_rf(calibration, validation)
    result = replay(policy, test)
    expected = algorithm_2(policy, test)
    assert [(int(s), int(y)) for s, y in zip(result.stages, result.predictions, strict=True)] == expected


@given(seeds)
@settings(max_examples=20)
def test_two_models_that_never_stop_are_the_asymmetric_duo(seed):
    """Zhou et al. 2025: softmax((z_l / T_l + z_s / T_s) / 2), both temperatures fitted jointly."""
    calibration, test = chain(seed, 300, 4, (1.0, 1.6)), chain(seed, 200, 4, (1.0, 1.6), shift=1)
    policy = fit_rf(calibration, rule=ThresholdRule(threshold=2.0))
    small, large = (np.float64(z) for z in calibration.logits)
    duo = minimize(
        lambda log_t: nll(0.5 / np.exp(log_t), [small, large], calibration.labels), [0.0, 0.0], method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-13, "maxiter": 2000},
    )  # fmt: skip
    t_small, t_large = np.exp(duo.x)
    fused = (np.float64(test.logits[0]) / t_small + np.float64(test.logits[1]) / t_large) / 2
    result = replay(policy, test)
    assert (result.stages == 1).all()
    assert (result.predictions == fused.argmax(axis=1)).all()
    assert result.confidences == pytest.approx([softmax(row).max() for row in fused], abs=1e-4)
    assert policy.stages[1].pair_diagnostics.nll_after <= duo.fun + 1e-9


def test_the_threshold_is_the_best_on_validation_by_brute_force():
    calibration, validation = chain(1, 300), chain(1, 250, shift=1)
    trace = trace_policy(fit_rf(calibration, rule=ThresholdRule(threshold=2.0)), validation)
    costs = validation.costs.cumulative
    for budget in (1.0, 3.0, 6.5, 12.0, 20.0):
        policy = fit_rf(calibration, validation, ThresholdRule(budget=budget))
        best = (-1.0, 0.0)
        for threshold in [*np.unique(trace.confidences[:, :-1]), 2.0]:
            stops = np.array([next((j for j in range(2) if row[j] >= threshold), 2) for row in trace.confidences])
            cost = costs[stops].mean()
            if cost <= budget + 1e-12:
                right = np.mean(trace.predictions[np.arange(len(stops)), stops] == validation.labels)
                best = max(best, (right, -cost))
        expected = policy.expected
        assert (expected.accuracy.value, -expected.cost) == pytest.approx(best)
        assert expected.cost <= budget


@given(seeds, st.booleans())
def test_a_batch_is_its_rows_one_by_one(seed, ragged):
    policy = fit_rf(chain(seed, 150, ragged=ragged), rule=ThresholdRule(threshold=0.8))
    test = chain(seed, 12, ragged=ragged, shift=1)
    state, states = None, [None] * 12
    for j, logits in enumerate(test.logits):
        step = policy.step(j, logits, state)
        for i in range(12):
            alone = policy.step(j, logits[i : i + 1, np.isfinite(logits[i])], states[i])
            assert (alone.predictions[0], alone.accepted[0]) == (step.predictions[i], step.accepted[i])
            assert alone.confidences[0] == step.confidences[i]
            states[i] = alone.state
        state = step.state


def test_a_stage_with_other_options_is_refused():
    policy = fit_rf(chain(2, 100), rule=ThresholdRule(threshold=2.0))
    first = policy.start(np.zeros((3, 5), np.float32))
    with pytest.raises(DataError, match="answer over the same options"):
        policy.step(1, np.zeros((3, 6), np.float32), first.state)


def test_without_validation_there_is_no_threshold_to_choose():
    with pytest.raises(ConfigError, match="needs a validation split"):
        fit_rf(chain())


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"threshold": 0.5, "budget": 1.0}, "not both"),
        ({"threshold": -0.1}, "at least 0"),
        ({"threshold": float("nan")}, "at least 0"),
        ({"budget": float("inf")}, "finite"),
        ({"objective": "f2"}, "none of"),
        ({"threshold": 0.5, "objective": "macro-f1"}, "not with a threshold"),
    ],
)
def test_rules_that_make_no_sense_are_refused(rule, says):
    with pytest.raises(ConfigError, match=says):
        ThresholdRule(**rule)
