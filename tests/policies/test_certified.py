"""Policies whose threshold is certified."""

import json
from dataclasses import replace

import pytest
from scipy.stats import beta, binom
from synthetic import chain

import cauc_ray
from cauc_ray.errors import ConfigError, DataError, PolicyError, RiskError
from cauc_ray.numbers.certificates import RiskLimit
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.policies.fitting import fit_base, fit_rf, refit
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

TENTH = ThresholdRule(certify=RiskLimit(0.1, 0.9))
METHODS = pytest.mark.parametrize("fit", [fit_base, fit_rf], ids=["base", "rf"])


@pytest.fixture(scope="module")
def splits():
    return chain(31, 2000), chain(31, 2000, shift=1)


def early_on(policy, data):
    """Return how many rows a replay answers before the last stage, and how many of these wrongly."""
    answers = replay(policy, data)
    early = answers.stages < len(policy.stages) - 1
    return int(early.sum()), int((early & (answers.predictions != data.labels)).sum())


@METHODS
def test_the_certificate_is_of_the_replay_of_validation(fit, splits):
    policy = fit(*splits, TENTH)
    choice = policy.threshold_choice
    at = choice.certificate
    assert (choice.rule, choice.split, at.risk, at.confidence, at.n) == ("certified", "validation", 0.1, 0.9, 2000)
    assert (at.n_accepted, at.n_wrong) == early_on(policy, splits[1])
    assert at.upper_bound == pytest.approx(beta.ppf(0.9, at.n_wrong + 1, at.n_accepted - at.n_wrong))
    assert binom.cdf(at.n_wrong, at.n_accepted, 0.1) <= 0.1
    assert policy.expected.n == 2000
    plug_in = policy.with_threshold(at.plug_in_threshold)
    accepted, wrong = early_on(plug_in, splits[1])
    assert accepted == at.plug_in_accepted >= at.n_accepted
    assert wrong <= 0.1 * accepted


@METHODS
def test_more_confidence_or_less_risk_costs_coverage(fit, splits):
    accepted = [
        fit(*splits, ThresholdRule(certify=RiskLimit(risk, confidence))).threshold_choice.certificate.n_accepted
        for risk, confidence in ((0.15, 0.9), (0.1, 0.9), (0.1, 0.99))
    ]
    assert accepted == sorted(accepted, reverse=True)
    assert accepted[0] > accepted[-1]


@METHODS
def test_which_thresholds_are_tried_does_not_depend_on_validation(fit):
    """Where early answers are all right, the sequence runs to its end, whatever validation's confidences."""
    calibration, *others = (chain(9, n, strengths=(1.7, 2.4), shift=n) for n in (800, 500, 900))
    lowest = []
    for validation in others:
        answered = replay(fit(calibration, rule=ThresholdRule(threshold=0.0)), validation).predictions
        lowest.append(fit(calibration, replace(validation, labels=answered), TENTH))
    assert lowest[0].threshold == lowest[1].threshold
    assert early_on(lowest[0], calibration)[0] == len(calibration)
    assert fit(calibration, others[0], TENTH).threshold > lowest[0].threshold


@METHODS
def test_where_none_is_certified_it_says_so(fit, splits):
    with pytest.raises(RiskError, match="no threshold is certified: at ") as refused:
        fit(*splits, ThresholdRule(certify=RiskLimit(0.0001, 0.95)))
    assert "\n" not in str(refused.value)


@METHODS
def test_a_file_keeps_the_certificate_and_old_files_are_read(fit, splits, tmp_path):
    policy = fit(*splits, TENTH)
    path = tmp_path / "policy.json"
    path.write_text(policy.to_json())
    assert cauc_ray.Policy.load(path) == policy
    old = fit(*splits)
    content = json.loads(old.to_json())
    del content["threshold_choice"]["certificate"]
    path.write_text(json.dumps(content))
    assert cauc_ray.Policy.load(path) == old
    content["threshold_choice"]["rule"] = "certified"
    path.write_text(json.dumps(content))
    with pytest.raises(PolicyError, match="a certificate belongs to a certified threshold"):
        cauc_ray.Policy.load(path)


def test_the_certificate_says_nothing_of_what_is_answered(splits):
    policy = fit_rf(*splits, TENTH)
    other = policy.threshold_choice.certificate.model_copy(update={"n_wrong": 0})
    choice = policy.threshold_choice.model_copy(update={"certificate": other})
    assert policy.model_copy(update={"threshold_choice": choice}).id == policy.id


@METHODS
def test_another_threshold_is_not_certified(fit, splits):
    policy = fit(*splits, TENTH)
    assert policy.with_threshold(0.5).threshold_choice.certificate is None
    assert policy.with_budget(16.0).threshold_choice.certificate is None


@METHODS
def test_a_refit_certifies_anew(fit, splits):
    policy = fit(*splits, TENTH)
    new = [replace(data, models=("m0", "new", "m2"), logits=(data.logits[0], data.logits[1] * 2, data.logits[2]))
           for data in splits]  # fmt: skip
    assert refit(policy, *new) == fit(*new, TENTH)


@METHODS
def test_what_it_needs(fit, splits):
    calibration, validation = splits
    with pytest.raises(ConfigError, match="needs a validation split"):
        fit(calibration, None, TENTH)
    labels = validation.labels.copy()
    labels[5] = UNKNOWN_LABEL
    with pytest.raises(DataError, match="has no label; choosing a threshold needs labels"):
        fit(calibration, replace(validation, labels=labels), TENTH)
    with pytest.raises(ConfigError, match="with one model nothing is answered early"):
        fit(chain(n=100, strengths=(2.0,)), chain(n=100, strengths=(2.0,), shift=1), TENTH)


@pytest.mark.parametrize(
    ("other", "says"),
    [({"budget": 3.0}, "each decides it alone"), ({"threshold": 0.5}, "each decides it alone"),
     ({"objective": "macro-f1"}, "or a risk to certify")],
)  # fmt: skip
def test_it_stands_alone(other, says):
    with pytest.raises(ConfigError, match=says):
        ThresholdRule(**other, certify=RiskLimit(0.1, 0.9))
