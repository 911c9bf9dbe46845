"""Stacked cascades: CAUC-RF where nothing more is chosen, better where models can be recalibrated, live as replayed."""

import json

import numpy as np
import pytest
from synthetic import chain, chain_of

import cauc_ray
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.policies.by_method import fit_policy, refit
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.methods import METHODS, Fitting
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.stacking import variants_of
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, replay, steps_of, trace_policy

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
        seen = np.where(swapped < n_options, swapped, labels)
        z[np.arange(n), seen] += 1.5 + model
        z[np.arange(k) >= n_options[:, None]] = -np.inf
        logits.append(z.astype(np.float32))
    return chain_of(labels, logits, [f"{shift}-{row}" for row in range(n)], np.array([1.0, 10.0, 30.0])[:m])


def rule(**options):
    return ThresholdRule(**options)


def test_without_other_terms_it_answers_as_rf_does_at_every_threshold():
    calibration, validation = chain(3), chain(3, shift=1)
    first = variants_of(calibration, validation)[0]
    rf = fit_rf(calibration, validation, rule(threshold=0.7))
    mine, its = trace_policy(first, validation), trace_policy(rf, validation)
    assert first.variant == "rf"
    assert np.array_equal(mine.predictions, its.predictions)
    assert mine.confidences == pytest.approx(its.confidences, rel=1e-6)


def test_where_labels_are_confused_it_is_better_and_the_file_says_by_what(tmp_path):
    calibration, validation, test = (confused(1, 1500, shift=shift) for shift in range(3))
    policies = {
        method: fit_policy(method, calibration, validation, rule(budget=8.0), NAMES) for method in ("rf", "stacked")
    }
    right = {name: np.mean(replay(own, test).predictions == test.labels) for name, own in policies.items()}
    assert right["stacked"] > right["rf"] + 0.005
    stacked = policies["stacked"]
    assert stacked.variant in ("stacked", "stacked-gain")
    assert stacked.expected.cost <= 8.0
    stacked.save(tmp_path / "policy.json")
    loaded = Policy.load(tmp_path / "policy.json")
    assert (loaded, loaded.id) == (stacked, stacked.id)
    assert loaded.with_budget(5.0).expected is None
    moved = json.loads(stacked.to_json())
    moved["stages"][1]["biases"] = [0.0] * 5
    assert Policy.of(moved).id != stacked.id


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("m", [1, 2, 3])
def test_batches_of_any_size_and_order_are_the_replay_of_all(m, ragged):
    calibration, validation = confused(2, 400, m=m, ragged=ragged), confused(2, 400, m=m, ragged=ragged, shift=1)
    for policy in variants_of(calibration, validation):
        policy = policy.with_threshold(0.6)
        whole = replay(policy, validation)
        order = np.random.default_rng(0).permutation(len(validation))
        for batch in np.array_split(order, 60):
            for stage, at, step in steps_of(policy, batch, lambda s, rows: validation.logits[s][rows]):
                done = at[step.accepted]
                assert np.array_equal(step.predictions[step.accepted], whole.predictions[done])
                assert np.array_equal(whole.stages[done], np.full(len(done), stage))


def test_expected_gains_decide_by_what_later_stages_cost():
    calibration, validation = confused(5, 500, m=3), confused(5, 500, m=3, shift=1)
    policy = variants_of(calibration, validation)[-1]
    assert policy.variant == "stacked-gain"
    confidences = np.linspace(0.01, 0.999, 200)
    worth = policy.worth(0, confidences)
    assert ((worth > 0) & (worth < 1)).all()
    assert worth[-1] > worth[20]  # the sure are worth more where they are
    assert policy.stages[-1].gain is None
    frontier = trace_policy(policy, validation).frontier(validation)
    for point in range(0, len(frontier.settings), 97):
        answered = replay(policy.with_threshold(float(frontier.settings[point])), validation)
        assert answered.costs.mean() == pytest.approx(frontier.cost[point])
        assert np.mean(answered.predictions == validation.labels) == pytest.approx(frontier.quality[point])


def test_an_option_that_was_not_fitted_is_refused():
    calibration = confused(1)
    policy = variants_of(calibration, calibration)[1]
    wider = np.pad(calibration.logits[0][:2], ((0, 0), (0, 1)))
    with pytest.raises(DataError, match="more options"):
        policy.step(0, wider, None)


def test_it_is_one_of_the_methods_and_takes_the_best_point_of_its_variants():
    splits = [Examples(confused(4, 500, m=3, shift=shift)) for shift in range(3)]
    fitted = METHODS["stacked"].load()(Fitting(splits[0], splits[1]))
    budget = float(np.quantile(fitted.points.cost, 0.5))
    setting = METHODS["stacked"].setting(fitted, budget)
    answers = fitted.answers(splits[1], setting)
    assert answers.costs(splits[1].chain).mean() <= budget + 1e-9
    assert np.mean(answers.predictions == splits[1].chain.labels) == pytest.approx(fitted.points.quality[int(setting)])
    curve = fitted.curve(splits[1], fitted.points.settings)
    assert np.array_equal(curve.accuracy, fitted.points.quality)
    assert curve.cost == pytest.approx(fitted.points.cost)


def test_a_replaced_model_is_fitted_by_the_same_rule():
    calibration, validation = confused(1), confused(1, shift=1)
    policy = fit_policy("stacked", calibration, validation, rule(budget=8.0), NAMES)
    assert refit(policy, calibration, validation) == policy


def test_what_has_no_choice_is_refused():
    calibration, validation = confused(1), confused(1, shift=1)
    for options in ({"safe": True}, {"calibrator": "offsets"}):
        with pytest.raises(ConfigError, match="stacked"):
            fit_policy("stacked", calibration, validation, rule(budget=8.0), NAMES, **options)


def test_it_is_fitted_from_python_with_arrays():
    calibration, test = confused(1, 900), confused(1, shift=2)
    arrays = dict(zip(("small", "large"), calibration.logits, strict=True))
    policy = cauc_ray.fit(arrays, calibration.labels, method="stacked", costs=[1, 10], validation=0.4, budget=6.0)
    answers = policy.predict(dict(zip(("small", "large"), test.logits, strict=True)))
    assert np.mean(answers.prediction == test.labels) > 0.5
    assert policy.method == "stacked"
