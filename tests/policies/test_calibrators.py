"""Policies whose models have offsets or isotonic maps beside their temperatures."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.isotonic import IsotonicRegression
from synthetic import chain, fit_bias_corrected

import cauc_ray
from cauc_ray.errors import ConfigError, DataError, PolicyError
from cauc_ray.numbers.calibrators import Calibrator, Isotonic
from cauc_ray.numbers.metrics import calibration_error
from cauc_ray.numbers.metrics import nll as mean_nll
from cauc_ray.numbers.softmax import log_softmax, softmax, top_option
from cauc_ray.numbers.sweep import sweep
from cauc_ray.policies.fitting import fit_base, fit_rf, refit
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.search import search_chains
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay, trace_policy

seeds = st.integers(0, 2**32 - 1)
BIAS = np.array([1.5, -1.0, 0.0, 0.5, -1.0], dtype=np.float32)


def biased(seed=0, n=400, shift=0, strengths=(1.0, 1.7, 2.4), **options):
    """Return a chain whose models all favour some options, the first one most."""
    data = chain(seed, n, 5, strengths, shift=shift, **options)
    return replace(data, logits=tuple(z + BIAS / (place + 1) for place, z in enumerate(data.logits)))


def by_hand(stage, logits):
    """Return calibrated logits, row by row."""
    offsets = stage.offsets or [0.0] * logits.shape[1]
    return np.array([[float(z) / stage.temperature + b for z, b in zip(row, offsets, strict=True)] for row in logits])


FITS = [("base", "offsets", 3), ("rf", "offsets", 3), ("base", "isotonic", 2), ("base", "isotonic", 1)]


def fitted(method, kind, n_models=3, seed=0, rule=None):
    fit = {"base": fit_base, "rf": fit_rf}[method]
    strengths = (1.0, 1.7, 2.4)[-n_models:]
    calibration, validation = (biased(seed, 400, shift, strengths) for shift in (0, 1))
    return fit(calibration, validation, rule or ThresholdRule(threshold=0.6), calibrator=kind)


@pytest.mark.parametrize(("method", "kind", "n_models"), FITS)
def test_a_policy_comes_back_from_its_file_and_says_how_it_is_calibrated(method, kind, n_models):
    policy = fitted(method, kind, n_models)
    content = json.loads(policy.to_json())
    assert all(stage["temperature"] > 0 for stage in content["stages"])
    assert all((stage["offsets"] is not None) == (kind == "offsets") for stage in content["stages"])
    assert all((stage["isotonic"] is not None) == (kind == "isotonic") for stage in content["stages"])
    loaded = Policy.of(content)
    assert loaded == policy
    assert (loaded.id, loaded.calibrator_kind) == (policy.id, kind)


@pytest.mark.parametrize(("method", "kind", "n_models"), FITS)
def test_the_id_covers_every_number_of_the_calibrators(method, kind, n_models):
    policy = fitted(method, kind, n_models)
    content = json.loads(policy.to_json())
    if kind == "offsets":
        content["stages"][-1]["offsets"][2] += 1e-9
    else:
        content["stages"][-1]["isotonic"]["accuracies"][1] -= 1e-12
    assert Policy.of(content).id != policy.id


def test_files_from_before_there_were_calibrators_are_read_and_keep_their_id():
    policy = fit_base(chain(1, 200))
    content = json.loads(policy.to_json())
    for stage in content["stages"]:
        del stage["offsets"], stage["isotonic"]
    assert Policy.of(content) == policy
    assert Policy.of(content).id == policy.id
    assert policy.calibrator_kind == "temperature"


@pytest.mark.parametrize(
    ("kind", "break_it", "says"),
    [
        ("offsets", lambda stages: stages[0].update(offsets=None), "must be of all stages or of none"),
        ("offsets", lambda stages: stages[0]["offsets"].pop(), "different numbers of offsets, 4, 5"),
        ("isotonic", lambda stages: stages[1].update(offsets=[0.0]), "has both offsets and an isotonic map"),
        ("isotonic", lambda stages: stages[1]["isotonic"]["confidences"].pop(), "breakpoints take confidences from 0"),
        ("isotonic", lambda stages: stages[1]["isotonic"]["accuracies"].sort(reverse=True), "breakpoints take"),
    ],
)
def test_a_file_whose_calibrators_do_not_agree_is_refused_in_one_line(kind, break_it, says):
    content = json.loads(fitted("base", kind, 2).to_json())
    break_it(content["stages"])
    with pytest.raises(PolicyError) as error:
        Policy.of(content)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_offsets_are_each_models_own_fit_and_diagnostics_are_of_all_of_the_calibrator():
    data = biased(2)
    for stage, logits in zip(fit_base(data, calibrator="offsets").stages, data.logits, strict=True):
        alone = fit_bias_corrected(logits, data.labels)
        assert (stage.temperature, stage.offsets) == (alone.temperature, alone.biases)
        scores = by_hand(stage, logits)
        answers, confidences = top_option(scores)
        at = stage.diagnostics
        assert at.nll_after == pytest.approx(mean_nll(log_softmax(scores), data.labels), rel=1e-9)
        assert at.accuracy == (answers == data.labels).mean()
        assert at.calibration_error_after == pytest.approx(calibration_error(confidences, answers == data.labels))
        before, raw = top_option(logits)
        assert at.calibration_error_before == pytest.approx(calibration_error(raw, before == data.labels))


@given(seeds)
@settings(max_examples=15)
def test_with_offsets_a_cascade_is_that_of_the_calibrated_scores(seed):
    """Models whose logits are the calibrated scores need neither temperature nor offsets, and give the same."""
    calibration, validation = biased(seed % 50, 300), biased(seed % 50, 200, shift=1)
    for fit in (fit_base, fit_rf):
        policy = fit(calibration, validation, ThresholdRule(threshold=0.6), calibrator="offsets")
        scores = tuple(by_hand(s, z) for s, z in zip(policy.stages, validation.logits, strict=True))
        plain = policy.model_copy(
            update={"stages": tuple(s.model_copy(update={"temperature": 1.0, "offsets": None}) for s in policy.stages)}
        )
        one, other = replay(policy, validation), replay(plain, replace(validation, logits=scores))
        assert (one.predictions == other.predictions).all()
        assert (one.stages == other.stages).all()
        np.testing.assert_allclose(one.confidences, other.confidences, rtol=1e-12)


def test_base_with_isotonic_maps_accepts_and_reports_how_often_such_answers_are_right():
    calibration, test = biased(3, strengths=(1.0, 2.4)), biased(3, strengths=(1.0, 2.4), shift=2)
    policy = fit_base(calibration, calibrator="isotonic")
    plain = fit_base(calibration)
    for stage, logits in zip(policy.stages, calibration.logits, strict=True):
        assert stage.temperature == plain.stages[policy.stages.index(stage)].temperature
        answers, own = top_option(logits.astype(float) / stage.temperature)
        right = answers == calibration.labels
        theirs = IsotonicRegression(out_of_bounds="clip").fit(own, right)
        assert stage.diagnostics.calibration_error_after <= stage.diagnostics.calibration_error_before
        assert stage.diagnostics.nll_after <= plain.stages[policy.stages.index(stage)].diagnostics.nll_after
        asked = np.linspace(0.2, 1, 50)
        tilt = (asked - theirs.predict(asked)) / len(calibration)
        np.testing.assert_allclose(stage.calibrator.isotonic.of(asked), theirs.predict(asked) + tilt, atol=1e-9)
    first = policy.stages[0]
    step = policy.start(test.logits[0])
    plain_confidences = top_option(first.scores(test.logits[0]))[1]
    np.testing.assert_array_equal(step.confidences, first.calibrator.isotonic.of(plain_confidences))
    np.testing.assert_array_equal(step.accepted, step.confidences >= policy.threshold)


def test_isotonic_maps_keep_every_operating_point_of_the_first_stage():
    calibration, test = biased(4, strengths=(1.0, 2.4)), biased(4, strengths=(1.0, 2.4), shift=2)
    rule = ThresholdRule(threshold=0.5)
    with_maps = fit_base(calibration, rule=rule, calibrator="isotonic")
    # Weights and complementarity are the maps' too; the same stages without them differ in confidences alone.
    without = with_maps.model_copy(
        update={"stages": tuple(stage.model_copy(update={"isotonic": None}) for stage in with_maps.stages)}
    )
    one, other = (trace_policy(policy, test) for policy in (with_maps, without))
    assert (one.confidences[:, 0].argsort(kind="stable") == other.confidences[:, 0].argsort(kind="stable")).all()
    same_answers = other.predictions
    curves = [sweep(trace.confidences[:, :-1], same_answers, test.labels, test.costs) for trace in (one, other)]
    np.testing.assert_array_equal(curves[0].cost, curves[1].cost)
    np.testing.assert_array_equal(curves[0].quality, curves[1].quality)


@pytest.mark.parametrize(("method", "kind", "n_models"), FITS[:3])
def test_a_sweep_over_few_distinct_confidences_is_the_replay_at_each_of_them(method, kind, n_models):
    coarse = [
        replace(data, logits=tuple(np.round(z) for z in data.logits))
        for data in (biased(9, 300, shift, (1.0, 1.7, 2.4)[-n_models:]) for shift in (0, 1))
    ]
    policy = {"base": fit_base, "rf": fit_rf}[method](*coarse, ThresholdRule(threshold=0.6), calibrator=kind)
    frontier = trace_policy(policy, coarse[1]).frontier(coarse[1])
    assert len(frontier.cost) > 10
    for threshold, cost, quality in zip(frontier.thresholds, frontier.cost, frontier.quality, strict=True):
        found = replay(policy.with_threshold(float(threshold)), coarse[1])
        assert found.costs.mean() == pytest.approx(cost, rel=1e-12)
        assert (found.predictions == coarse[1].labels).mean() == pytest.approx(quality, rel=1e-12)


@pytest.mark.parametrize(("method", "kind", "n_models"), FITS)
def test_the_served_probabilities_give_the_answer_its_confidence(method, kind, n_models):
    policy = fitted(method, kind, n_models)
    test = biased(0, 300, 2, (1.0, 1.7, 2.4)[-n_models:])
    state = None
    for stage, logits in enumerate(test.logits):
        step = policy.step(stage, logits, state)
        probabilities = softmax(step.scores)
        of_answers = probabilities[np.arange(len(test)), step.predictions]
        np.testing.assert_allclose(of_answers, step.confidences, atol=1e-12)
        np.testing.assert_allclose(probabilities.sum(axis=1), 1.0)
        if kind != "isotonic":
            np.testing.assert_allclose(probabilities.max(axis=1), step.confidences, atol=1e-12)
        state = step.state


def test_maps_that_say_never_and_always_leave_probabilities_finite():
    certain = Calibrator(1.0, isotonic=Isotonic((0.0, 0.5, 0.6, 1.0), (0.0, 1e-300, 1.0 - 2.0**-53, 1.0)))
    scores = np.array([[0.0, 0.0], [1.0, 0.0], [60.0, 0.0]])
    answers, confidences = certain.answers(scores)
    probabilities = softmax(certain.believed(scores, answers))
    np.testing.assert_allclose(probabilities[np.arange(3), answers], confidences, atol=1e-12)


@pytest.mark.parametrize(("method", "kind", "n_models"), FITS)
def test_a_batchs_other_rows_change_no_bit_of_a_row(method, kind, n_models):
    policy = fitted(method, kind, n_models)
    test = biased(0, 60, 3, (1.0, 1.7, 2.4)[-n_models:])
    whole = trace_policy(policy, test)
    for rows in (slice(0, 1), slice(7, 20), slice(59, 60)):
        state = None
        for stage, logits in enumerate(test.logits):
            step = policy.step(stage, logits[rows], state)
            np.testing.assert_array_equal(step.confidences, whole.confidences[rows, stage])
            np.testing.assert_array_equal(step.predictions, whole.predictions[rows, stage])
            state = step.state


def test_rows_with_fewer_options_have_those_offsets_and_rows_with_more_are_refused():
    policy = fitted("rf", "offsets")
    narrow = biased(0, 10, 3).logits[0][:, :4]
    padded = np.pad(narrow, ((0, 0), (0, 3)), constant_values=-np.inf)
    np.testing.assert_array_equal(policy.start(narrow).confidences, policy.start(padded).confidences)
    wide = np.pad(narrow, ((0, 0), (0, 2)), constant_values=-np.inf)
    wide[6, 5] = 0.0
    with pytest.raises(DataError, match=r"row 6 of the batch has more options than the 5 .* for 'm0'"):
        policy.start(wide)


def test_offsets_need_a_fixed_set_of_options():
    data = chain(5, 200, 5, ragged=True)
    with pytest.raises(DataError, match=r"example '0-\d+' lacks some of the 5 options of model 'm0'"):
        fit_base(data, calibrator="offsets")


@pytest.mark.parametrize(("method", "n_models"), [("base", 3), ("rf", 2)])
def test_isotonic_maps_are_refused_where_they_have_no_meaning(method, n_models):
    with pytest.raises(ConfigError, match=rf"for method base with one or two models, got {method} with {n_models}"):
        fitted(method, "isotonic", n_models)


def test_an_unknown_calibrator_is_named():
    with pytest.raises(ConfigError, match="unknown calibrator 'offset'; did you mean 'offsets'"):
        fitted("base", "offset")


@pytest.mark.parametrize(("method", "kind", "n_models"), FITS[:3])
def test_a_refit_keeps_the_kind_and_all_that_has_not_changed(method, kind, n_models):
    strengths = (1.0, 1.7, 2.4)[-n_models:]
    calibration, validation = (biased(6, 300, shift, strengths) for shift in (0, 1))
    fit = {"base": fit_base, "rf": fit_rf}[method]
    old = fit(calibration, validation, ThresholdRule(budget=12.0), calibrator=kind)
    others = [
        replace(
            data,
            models=("new", *data.models[1:]),
            logits=(data.logits[0] * 1.3 + BIAS[::-1] + np.float32(0.1) * data.logits[1], *data.logits[1:]),
        )
        for data in (calibration, validation)
    ]
    new = refit(old, *others)
    assert new.calibrator_kind == kind
    assert new == fit(*others, ThresholdRule(budget=12.0), calibrator=kind)
    if method == "base":
        assert new.stages[1:] == old.stages[1:]
    else:
        kept = ("temperature", "offsets", "diagnostics")
        assert [[getattr(s, name) for name in kept] for s in new.stages[1:]] == [
            [getattr(s, name) for name in kept] for s in old.stages[1:]
        ]


@pytest.mark.parametrize("method", ["base", "rf"])
def test_a_search_finds_the_chain_that_is_best_with_offsets(method):
    calibration, validation = biased(7, 250), biased(7, 200, shift=1)
    rule = ThresholdRule(budget=9.0)
    found = search_chains(method, calibration, validation, rule, "validation", calibrator="offsets")
    places = [calibration.models.index(name) for name in found.chosen.models]
    fit = {"base": fit_base, "rf": fit_rf}[method]
    own = fit(calibration.of_models(places), validation.of_models(places), rule, calibrator="offsets")
    assert own.expected.accuracy.value == found.chosen.quality
    assert own.expected.cost == pytest.approx(found.chosen.cost)


def test_a_search_over_longer_chains_refuses_isotonic_maps():
    data = biased(8, 100)
    with pytest.raises(ConfigError, match="isotonic is for method base with one or two models"):
        search_chains("base", data, data, ThresholdRule(budget=9.0), "validation", calibrator="isotonic")


def test_offsets_turn_the_pair_that_fusing_hurts_into_a_gain(shared_logits):
    table, models = shared_logits / "emotion10k_base_icl1", ["llama-2-7b-hf", "llama-2-13b-hf"]
    plain, shifted = (
        cauc_ray.fit(table, models=models, method="rf", calibrator=kind) for kind in ("temperature", "offsets")
    )
    large = cauc_ray.fit(table, models=models[1:])
    accuracy = [cauc_ray.evaluate(table, p).measures.accuracy.value for p in (large, plain, shifted)]
    assert accuracy[1] < accuracy[0] < accuracy[2]
