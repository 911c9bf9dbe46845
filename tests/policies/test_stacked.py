"""Stacked cascades: CAUC-RF where no penalty is chosen, better where models can be recalibrated; one price decides."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import chain_of, rows_of, seeds, splits

import cauc_ray
from cauc_ray.errors import ConfigError, DataError, PolicyError
from cauc_ray.numbers.logits import top_option
from cauc_ray.numbers.multinomial import nll_of
from cauc_ray.policies.by_method import fit_method, fit_policy, refit
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.recalibrated import fit_recalibrated
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, replay, steps_of, trace_policy

NAMES = ("calibration", "validation")
methods = pytest.mark.parametrize("method", ["rf", "stacked"])


def fitted(method, calibration, validation=None, **rule):
    compare = "gain" if method == "rf" else "confidence"
    return fit_policy(method, calibration, validation, ThresholdRule(**rule, compare=compare), NAMES)


def confused(seed, n=500, k=5, m=2, *, shift=0):
    """Return a chain whose models like some options too much, and take some for others."""
    rng = np.random.default_rng([seed, shift])
    kinds = np.random.default_rng(seed)
    labels = (rng.random(n) * k).astype(np.int32)
    logits = []
    for model in range(m):
        z = rng.standard_normal((n, k)) + kinds.normal(0, 1.2, k)
        favoured = np.where(rng.random(n) < 0.4, kinds.permutation(k)[labels], labels) if model == 0 else labels
        z[np.arange(n), favoured] += 1.5 + model
        logits.append(z.astype(np.float32))
    return chain_of(labels, logits, [f"{shift}-{row}" for row in range(n)], np.array([1.0, 10.0, 30.0][:m]))


def confidences(policy, data):
    return trace_policy(policy, data).confidences


@settings(max_examples=10)
@given(seeds, st.integers(1, 3), st.booleans())
def test_without_penalties_it_answers_as_rf_does_at_every_threshold(seed, m, ragged):
    calibration, validation = splits(seed, 60, strengths=(1.0, 1.7, 2.4)[:m], ragged=ragged)
    plain = METHODS["stacked"].fit(Fitting(Examples(calibration), Examples(validation)))[-1]
    assert [stage.penalty for stage in plain.stages] == [None] * m
    rf = fit_rf(calibration, rule=ThresholdRule(threshold=0.7))
    assert np.array_equal(trace_policy(plain, validation).predictions, trace_policy(rf, validation).predictions)
    assert confidences(plain, validation) == pytest.approx(confidences(rf, validation), abs=1e-8)


@methods
def test_two_models_have_the_operating_points_of_one_threshold_of_confidences(method):
    calibration, validation = splits(4, 300, strengths=(1.0, 2.0))
    policy = fitted(method, calibration, validation)
    of_confidences = trace_policy(policy.with_threshold(0.5), validation)
    frontier = replace(of_confidences, worth=None).frontier(validation)
    best = frontier.pareto(100)
    assert [(at.cost, at.quality) for at in policy.curve] == list(zip(best.cost, best.quality, strict=True))
    assert [at.threshold[0] for at in policy.curve] == pytest.approx(best.settings.tolist())
    assert policy.with_threshold(0.6).threshold == (0.6,)
    assert fitted(method, calibration, validation, threshold=0.6).id == policy.with_threshold(0.6).id


@methods
def test_with_three_models_a_threshold_is_refused_and_a_price_moves_every_stage(method):
    calibration, validation = (confused(5, 400, m=3, shift=shift) for shift in range(2))
    policy = fitted(method, calibration, validation, budget=15.0)
    for refused in (lambda: policy.with_threshold(0.7), lambda: fitted(method, calibration, validation, threshold=0.7)):
        with pytest.raises(ConfigError, match="price"):
            refused()
    prices = [point.price for point in policy.curve]
    assert prices == sorted(prices, reverse=True)
    assert policy.decision.at in prices
    thresholds = np.array([point.threshold for point in policy.curve])
    assert (np.diff(thresholds, axis=0) >= 0).all()  # what stops at a price stops at all higher ones
    again = fitted(method, calibration, validation, price=policy.decision.at)
    assert (again.id, again.threshold_choice.price) == (policy.id, policy.decision.at)
    without = fitted(method, calibration, price=policy.decision.at)  # no validation: not midway between its rows
    assert without.threshold == pytest.approx(policy.threshold, abs=0.05)
    for point in policy.curve[::10]:
        moved = policy.with_budget(point.cost)
        assert (moved.threshold, moved.decision.at) == (point.threshold, point.price)
        assert replay(moved, validation).costs.mean() == pytest.approx(point.cost)
        assert np.mean(replay(moved, validation).predictions == validation.labels) == pytest.approx(point.quality)


@methods
def test_a_file_has_thresholds_and_price_and_one_of_an_earlier_edition_is_refused(method):
    calibration, validation = splits(6, 200)
    policy = fitted(method, calibration, validation, budget=9.0)
    content = json.loads(policy.to_json())
    assert Policy.of(content) == policy == refit(policy, calibration, validation)
    assert Policy.of(content | {"threshold": [0.1, 0.2]}).id != policy.id
    with pytest.raises(PolicyError, match="threshold"):
        Policy.of(content | {"threshold": [0.1]})
    if method == "stacked":
        with pytest.raises(PolicyError, match="fit it again"):
            Policy.of(content | {"variant": "stacked-gain"})


def test_where_labels_are_confused_it_is_better_and_its_biases_are_part_of_the_id():
    calibration, validation, test = (confused(1, 1500, shift=shift) for shift in range(3))
    rf = fit_policy("rf", calibration, validation, ThresholdRule(budget=8.0), NAMES)
    policy = fitted("stacked", calibration, validation, budget=8.0)
    right = [np.mean(replay(of, test).predictions == test.labels) for of in (rf, policy)]
    assert right[1] > right[0] + 0.005
    for name, numbers in (("biases", [0.0] * 5), ("matrix", np.zeros((5, 5)).tolist())):
        moved = json.loads(policy.to_json())
        moved["stages"][1][name] = numbers
        assert Policy.of(moved).id != policy.id


def test_the_order_of_rows_changes_numbers_by_other_folds_only():
    calibration = confused(2, 400)
    policy = fitted("stacked", calibration, price=0.01)
    permuted = fitted("stacked", rows_of(calibration, np.random.default_rng(0).permutation(400)), price=0.01)
    assert [stage.penalty for stage in policy.stages] == [stage.penalty for stage in permuted.stages]
    test = confused(2, 300, shift=2)
    assert confidences(policy, test) == pytest.approx(confidences(permuted, test), abs=1e-3)


@pytest.mark.parametrize(("k", "square"), [(20, True), (21, False)])
def test_a_matrix_is_for_twenty_options_at_most_and_options_that_a_fit_has_not_seen_are_refused(k, square):
    policy = fitted("stacked", confused(3, 600, k), price=0.01)
    assert [stage.biases is not None for stage in policy.stages] == [True, True]
    assert [stage.matrix is not None for stage in policy.stages] == [square, square]
    with pytest.raises(DataError, match=f"{k} that the policy was fitted on"):
        replay(policy, confused(3, 5, k + 1))


def embedded(seed, n, *, informative, shift=0):
    data = confused(seed, n, m=3, shift=shift)
    rng = np.random.default_rng([seed, shift, 9])
    vectors = 3 + rng.standard_normal((n, 12)) + informative * 2 * np.eye(5, 12)[data.labels]
    return Examples(data, vectors.astype(np.float32), encoder="enc")


def test_an_embedding_that_tells_labels_is_stage_0_and_no_other_is():
    rule = ThresholdRule(budget=4.0)
    for informative in (False, True):
        calibration, validation = (embedded(8, 400, informative=informative, shift=shift) for shift in range(2))
        policy = fit_method("stacked", Fitting(calibration, validation), rule)
        assert policy.encoder == ("enc" if informative else None)
    test = embedded(8, 400, informative=True, shift=2)
    data = test.own_chain(["m0", "m1", "m2"], encoded=True)
    answers = replay(policy, data)
    alone = replay(fitted("stacked", calibration.chain, validation.chain, budget=4.0), test.chain)
    assert np.mean(answers.predictions == data.labels) > np.mean(alone.predictions == data.labels) + 0.05
    few = [z[5:9, :3] if stage else z[5:9] for stage, z in enumerate(data.logits)]  # of three options alone
    for _, _, step in steps_of(policy, np.arange(4), lambda stage, at: few[stage][at]):
        assert step.scores.shape[1] in (0, 3)
    with pytest.raises(PolicyError, match="fitted anew"):
        refit(policy, calibration.own_chain(["m0", "m1", "m2"], encoded=True), None)


def test_the_options_of_rule_and_price_reach_both_methods():
    calibration, validation = splits(9, 200)
    arrays = [dict(zip(data.models, data.logits, strict=True)) for data in (calibration, validation)]
    options = {"costs": [1, 4, 15], "validation": (arrays[1], validation.labels), "price": 0.02}
    by_gain = cauc_ray.fit(arrays[0], calibration.labels, method="rf", rule="gain", **options)
    plain = cauc_ray.fit(arrays[0], calibration.labels, method="rf", **options)
    assert (len(by_gain.threshold), by_gain.decision.at) == (2, 0.02)
    assert (type(plain.threshold), plain.decision) == (float, None)
    assert cauc_ray.fit(arrays[0], calibration.labels, method="stacked", **options).decision.at == 0.02


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")  # a few rows cannot be calibrated
@pytest.mark.parametrize("n", [1, 2, 300])
def test_rows_that_other_methods_are_fitted_to_are_recalibrated_by_fits_that_did_not_see_them(n):
    fittings = []

    def fit(fitting):
        fittings.append(fitting)
        return Family([], fitting.validation)

    family = fit_recalibrated(fit, Fitting(Examples(confused(0, n, 16)), Examples(confused(0, 60, 16, shift=1))))
    parts = fittings[0].calibration.chain, family.reading(Examples(confused(0, 3000, 16, shift=2))).chain
    calibration, new = (np.array([nll_of(z, chain.labels) / len(chain) for z in chain.logits]) for chain in parts)
    confidence = [np.mean([top_option(z)[1].mean() for z in chain.logits]) for chain in parts]
    assert np.isfinite(new).all()
    if n > 2:
        assert (new < np.log(16) - 0.3).all()  # they are recalibrated
        assert calibration == pytest.approx(new, abs=0.15)
        assert confidence[0] == pytest.approx(confidence[1], abs=0.05)
