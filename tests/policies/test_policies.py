"""Policies of Base and RF with each of their calibrators, and the paper's algorithms as oracles."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax as softmax_of_rows
from sklearn.isotonic import IsotonicRegression
from synthetic import chain, fit_bias_corrected, seeds, softmax, splits, steps

from cauc_ray.errors import CaucWarning, DataError, PolicyError
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.logits import log_softmax, top_option
from cauc_ray.numbers.metrics import calibration_error
from cauc_ray.numbers.metrics import nll as mean_nll
from cauc_ray.policies.by_method import refit
from cauc_ray.policies.methods.base import fit_base
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import measure, measure_replay, replay, trace_policy

FITS = {"base": fit_base, "rf": fit_rf}
STRENGTHS = (0.8, 1.3, 1.8, 2.4)
BIAS = np.array([1.5, -1.0, 0.0, 0.5, -1.0], dtype=np.float32)
# Method, calibrator, and of how many models.
KINDS = [
    ("base", "temperature", 4),
    ("rf", "temperature", 4),
    ("base", "offsets", 3),
    ("rf", "offsets", 3),
    ("base", "isotonic", 2),
    ("base", "isotonic", 1),
]
kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind)))
methods = pytest.mark.parametrize("fit_method", FITS.values(), ids=FITS)


def of_kind(kind, seed=0, n=300, shift=0, **options):
    """Return a chain of as many models as a kind has; where they are to be corrected, all favour some options."""
    _, calibrator, n_models = kind
    data = chain(seed, n, strengths=STRENGTHS[-n_models:], shift=shift, **options)
    bias = np.float32(0) if calibrator == "temperature" else BIAS
    return replace(data, logits=tuple(z + bias / np.float32(place + 1) for place, z in enumerate(data.logits)))


def fit(kind, *data):
    return FITS[kind[0]](*data, rule=ThresholdRule(threshold=0.6), calibrator=kind[1])


# Which of the stages before the last are fused with it, in Base.
joins = st.lists(st.booleans(), min_size=3, max_size=3)


def fit_joined(kind, seed, joins):
    policy = fit(kind, of_kind(kind, seed))
    if kind[0] != "base":
        return policy
    fused = [*joins[: len(policy.stages) - 1], True]
    stages = (
        stage.model_copy(update={"fused": is_fused}) for stage, is_fused in zip(policy.stages, fused, strict=True)
    )
    return policy.model_copy(update={"stages": tuple(stages)})


@kinds
@given(seed=seeds, ragged=st.booleans(), wider=st.integers(0, 3), joins=joins)
@settings(max_examples=8)
def test_no_bit_of_an_answer_depends_on_other_rows_or_on_padding(kind, seed, ragged, wider, joins):
    policy, test = fit_joined(kind, seed, joins), of_kind(kind, seed, 12, 1, ragged=ragged)
    states = [None] * 12
    for stage, (logits, whole) in enumerate(zip(test.logits, steps(policy, test.logits), strict=True)):
        for row in range(12):
            by_itself = policy.step(stage, logits[row : row + 1, np.isfinite(logits[row])], states[row])
            for name in ("predictions", "confidences", "accepted"):
                assert getattr(by_itself, name)[0] == getattr(whole, name)[row]
            states[row] = by_itself.state
    logits = list(test.logits)
    wider %= len(logits)
    logits[wider] = np.pad(logits[wider], ((0, 0), (0, 2)), constant_values=-np.inf)  # all stages are padded as one is
    for whole, padded in zip(steps(policy, test.logits), steps(policy, logits), strict=True):
        assert np.array_equal(padded.predictions, whole.predictions)
        assert np.array_equal(padded.confidences, whole.confidences)
    assert np.array_equal(padded.scores, np.pad(whole.scores, ((0, 0), (0, 2)), constant_values=-np.inf))


@kinds
@given(seed=seeds, ragged=st.booleans(), joins=joins)
@settings(max_examples=8)
def test_the_softmax_of_a_steps_scores_gives_its_answer_its_confidence(kind, seed, ragged, joins):
    policy, test = fit_joined(kind, seed, joins), of_kind(kind, seed, 60, 1, ragged=ragged)
    for logits, step in zip(test.logits, steps(policy, test.logits), strict=True):
        assert step.scores.dtype == np.float64
        assert (np.isneginf(step.scores) == np.isneginf(logits)).all()
        assert (np.isfinite(step.scores) == np.isfinite(logits)).all()
        probabilities = softmax_of_rows(step.scores, axis=1)
        np.testing.assert_allclose(probabilities[np.arange(60), step.predictions], step.confidences, atol=1e-12)
        if kind[1] != "isotonic":
            np.testing.assert_allclose(probabilities.max(axis=1), step.confidences, atol=1e-12)
            best_two = np.sort(step.scores, axis=1)[:, -2:]
            untied = best_two[:, 1] - best_two[:, 0] > 1e-9
            assert untied.any()
            assert (step.scores.argmax(axis=1) == step.predictions)[untied].all()


@kinds
@given(seed=seeds, ragged=st.booleans(), per_call=st.booleans(), coarse=st.booleans())
@settings(max_examples=8)
def test_the_sweep_is_the_replay_at_every_operating_point(kind, seed, ragged, per_call, coarse):
    policy = fit(kind, of_kind(kind, seed))
    test = of_kind(kind, seed, 40, 1, per_call=per_call, ragged=ragged)
    if coarse:  # few distinct confidences
        test = replace(test, logits=tuple(np.round(z) for z in test.logits))
    trace = trace_policy(policy, test)
    frontier = trace.frontier(test)
    assert len(frontier.cost) > (5 if kind[2] > 1 else 0)
    # Some of the thresholds are confidences.
    for threshold in (*frontier.settings.tolist(), *trace.confidences[:9].ravel().tolist()):
        measures, point = measure_replay(policy.with_threshold(threshold), test)[1], frontier.at(threshold)
        assert measures == measure(trace.at(threshold, test), test, test.source)
        assert (measures.cost, measures.accuracy.value) == pytest.approx((point.cost, point.quality))


def by_the_paper(policy, data):
    """Answer by the paper's pseudo-code (algorithms 1 and 2), one example at a time: the stage and the option."""
    for row in range(len(data)):
        p, ell, r = [], [], None
        for stage, numbers in enumerate(policy.stages):
            z = data.logits[stage][row].astype(float)
            ell.append(z[np.isfinite(z)] / numbers.temperature)
            r = ell[0] if stage == 0 else r
            if policy.method == "rf" and stage:
                r = (r / numbers.alpha + ell[stage] / numbers.beta) / 2
            scores = r if policy.method == "rf" else ell[stage]
            p.append(softmax(scores).max())
            if p[stage] >= policy.threshold and stage < len(policy.stages) - 1:
                break
        else:
            if policy.method == "base":
                fused = [(p[j], ell[j], numbers) for j, numbers in enumerate(policy.stages) if numbers.fused]
                scores = sum(p * (ell - numbers.mean) / (numbers.std + 1e-12) for p, ell, numbers in fused)
        yield stage, int(np.argmax(scores))


@methods
@given(seed=seeds, m=st.integers(1, 4), ragged=st.booleans())
def test_a_replay_is_the_papers_algorithm(fit_method, seed, m, ragged):
    calibration, validation, test = splits(seed, 150, 3, strengths=np.linspace(0.8, 2.0, m), ragged=ragged)
    policy = fit_method(calibration, validation)
    result = replay(policy, test)
    equal = list(by_the_paper(policy, test)) == np.array([result.stages, result.predictions]).T
    assert equal.all(axis=1).sum() >= 150 - (policy.method == "base")  # a confidence on the threshold to the last bit


@given(seeds, st.booleans())
def test_numbers_of_base_are_those_of_the_paper(seed, ragged):
    calibration = chain(seed, 200, 5, ragged=ragged)
    policy, labels = fit_base(calibration), calibration.labels
    right = [z.argmax(axis=1) == labels for z in calibration.logits]
    assert policy.threshold == np.mean(right[-1])
    scaled = [z.astype(float) / s.temperature for s, z in zip(policy.stages, calibration.logits, strict=True)]
    confidence = [softmax_of_rows(scores, axis=1).max(axis=1) for scores in scaled]
    for j, stage in enumerate(policy.stages):
        real = scaled[j][np.isfinite(scaled[j])]
        assert (stage.mean, stage.std) == pytest.approx((real.mean(), real.std()), rel=1e-9)
        bolder = confidence[j] > confidence[-1]
        rate = (np.sum(bolder & right[j] & ~right[-1]) - np.sum(bolder & ~right[j] & right[-1])) / len(labels)
        last = j == len(policy.stages) - 1
        assert stage.complementarity_rate == (None if last else pytest.approx(rate, abs=1e-12))
        assert stage.fused == (last or rate > 0)


OF_ONE_MODEL = {"name", "temperature", "mean", "std", "offsets", "isotonic", "diagnostics"}


def replaced(data, place):
    """Return the chain with another model, of another name, in one place."""
    new = np.random.default_rng(place).permutation(chain(99, len(data), strengths=(1.6,)).logits[0])
    new[np.arange(len(data)), data.labels] += 2.0
    return replace(
        data,
        models=tuple("new" if j == place else m for j, m in enumerate(data.models)),
        logits=tuple(new if j == place else z for j, z in enumerate(data.logits)),
    )


@kinds
@pytest.mark.parametrize("rule", [{}, {"budget": 9.0}, {"threshold": 0.7}], ids=str)
def test_a_refit_is_the_fit_of_the_new_chain_and_keeps_to_the_bit_what_is_of_other_models(kind, rule):
    method, calibrator, n_models = kind
    before = [of_kind(kind, 11, shift=shift) for shift in (0, 1)]
    old = FITS[method](*before, ThresholdRule(**rule), calibrator=calibrator)
    for place in range(n_models):
        after = [replaced(data, place) for data in before]
        new = refit(old, *after)
        assert new == FITS[method](*after, ThresholdRule(**rule), calibrator=calibrator)
        for j, (was, now) in enumerate(zip(old.stages, new.stages, strict=True)):
            assert j == place or now.model_dump(include=OF_ONE_MODEL) == was.model_dump(include=OF_ONE_MODEL)


def test_rows_without_a_label_are_answered_but_not_scored():
    policy, test = fit_rf(*splits(5, 300)), chain(5, 300, shift=2)
    result = replay(policy, test)
    partly, of_half = measure_replay(policy, replace(test, labels=np.where(np.arange(300) % 2, test.labels, -1)))
    assert (partly.predictions == result.predictions).all()
    assert (of_half.n, of_half.n_labelled) == (300, 150)
    assert of_half.accuracy.value == np.mean(result.predictions[1::2] == test.labels[1::2])
    assert measure_replay(policy, replace(test, labels=np.full(300, -1)))[1].accuracy is None


def test_costs_that_do_not_rise_flat_logits_and_logits_of_another_kind_are_warned_of():
    calibration = chain(16, 100)
    with pytest.warns(CaucWarning, match="no more than 'm0'"):
        fit_base(replace(calibration, costs=Costs("s", np.array([1.0, 1.0, 2.0]))))
    with pytest.warns(CaucWarning, match="'m0' is uninformative"):
        policy = fit_base(replace(calibration, logits=(np.zeros_like(calibration.logits[0]), *calibration.logits[1:])))
    assert np.isfinite(replay(policy, chain(16, 50, shift=1)).confidences).all()  # flat logits have no deviation
    with pytest.warns(CaucWarning, match="'log-probabilities' for model 'm1'.*fitted on 'raw'"):
        replay(fit_base(calibration), replace(calibration, logit_kind=("raw", "log-probabilities", "raw")))


ROWS = np.zeros((3, 7), np.float32)
UNLABELLED = replace(chain(15, 50), labels=np.where(np.arange(50) == 7, -1, chain(15, 50).labels))


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda: fit(KINDS[1], of_kind(KINDS[1])).step(1, ROWS[:, :6], ROWS[:, :5]), DataError, "the same options"),
        (lambda: fit(KINDS[3], of_kind(KINDS[3])).start(ROWS), DataError, "row 0 .*more options than the 5 .* 'm0'"),
        (lambda: fit_base(UNLABELLED), DataError, "'0-00007' has no label"),
        (lambda: refit(fit_base(chain(13, 100)), chain(14, 100, shift=3), None), PolicyError, "calibration examples"),
        (lambda: replay(fit_base(chain()), chain(strengths=(1.0, 2.0))), PolicyError, "m0, m1, m2"),
    ],
)
def test_data_that_do_not_fit_a_policy_are_refused(wrong, error, words):
    with pytest.raises(error, match=words):
        wrong()


def test_offsets_are_each_models_own_fit_and_diagnostics_are_of_all_of_the_calibrator():
    data = of_kind(KINDS[2], 2)
    for stage, logits in zip(fit_base(data, calibrator="offsets").stages, data.logits, strict=True):
        alone = fit_bias_corrected(logits, data.labels)
        assert (stage.temperature, stage.offsets) == (alone.temperature, alone.biases)
        scores, at = logits.astype(np.float64) / stage.temperature + np.array(stage.offsets), stage.diagnostics
        answers, confidences = top_option(scores)
        assert at.nll_after == pytest.approx(mean_nll(log_softmax(scores), data.labels), rel=1e-9)
        assert at.accuracy == (answers == data.labels).mean()
        assert at.calibration_error_after == pytest.approx(calibration_error(confidences, answers == data.labels))
        before, raw = top_option(logits)
        assert at.calibration_error_before == pytest.approx(calibration_error(raw, before == data.labels))


def test_base_with_isotonic_maps_accepts_and_reports_how_often_such_answers_are_right():
    calibration, test = (of_kind(KINDS[4], 3, 400, shift) for shift in (0, 2))
    policy, asked = fit_base(calibration, calibrator="isotonic"), np.linspace(0.2, 1, 50)
    for stage, logits in zip(policy.stages, calibration.logits, strict=True):
        answers, confidences = top_option(logits.astype(float) / stage.temperature)
        oracle = IsotonicRegression(out_of_bounds="clip").fit(confidences, answers == calibration.labels)
        steps_alone = oracle.predict(asked)
        assert stage.diagnostics.calibration_error_after <= stage.diagnostics.calibration_error_before
        tilt = (asked - steps_alone) / len(calibration)
        np.testing.assert_allclose(stage.calibrator.isotonic.of(asked), steps_alone + tilt, atol=1e-9)
    first, step = policy.stages[0], policy.start(test.logits[0])
    plain_confidences = top_option(first.scores(test.logits[0]))[1]
    np.testing.assert_array_equal(step.confidences, first.calibrator.isotonic.of(plain_confidences))
    np.testing.assert_array_equal(step.accepted, step.confidences >= policy.threshold)
