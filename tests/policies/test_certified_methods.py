"""Risks certified for policies of every kind: too high no more often than stated, on inputs that no fit has seen."""

from dataclasses import replace

import numpy as np
import planted
import pytest
from scipy.stats import binom

from cauc_ray.errors import ConfigError, RiskError
from cauc_ray.numbers.guarantees import RiskLimit
from cauc_ray.policies.by_method import fit_method
from cauc_ray.policies.methods import METHODS
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

CONFIDENCE = 0.8
EMBEDDED = ("benchmark-routing", "stacked-both", "cascade-routing")
# Cascades by confidence, by a score, by solutions; routers by value and by odds; what learns nothing; ours.
QUICK = ["margin", "frugalgpt", "benchmark-routing", "random"]
SLOW = ["cascade-routing", "routellm-sw", "routellm-mf", "graphrouter", "embedllm", "routerdc", "post-hoc-embed"]
SLOW += ["stacked", "stacked-both", "max-probability"]


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        planted.train_quickly(patch)
        yield


def risk_of(policy, test):
    """Return the share of wrong answers among those before the last model."""
    names, encoded = [stage.name for stage in policy.answering], policy.encoder is not None
    answered = replay(policy, test.own_chain(names, encoded=encoded))
    early = answered.stages < len(policy.stages) - 1 if answered.calls is None else ~answered.calls[:, -1]
    return (answered.predictions != test.chain.labels)[early].mean()


def drawn(seed, n, *, embedded):
    fitting, test = planted.problem(seed, n=n, n_test=2000, m=3, embedded=embedded)
    return fitting, test


@pytest.mark.parametrize(("method", "turns"), [(name, 25) for name in QUICK])
def test_a_certified_risk_is_exceeded_no_more_often_than_stated(method, turns):
    exceeds(method, turns)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "turns"), [*((name, 60) for name in QUICK), *((name, 20) for name in SLOW)])
def test_a_certified_risk_is_exceeded_no_more_often_than_stated_in_many_turns(method, turns):
    exceeds(method, turns)


def exceeds(method, turns):
    # About what answers of the first models are wrong: a limit that plug-in choices exceed half of the time.
    fitting, test = drawn(0, 300, embedded=method in EMBEDDED)
    limit = RiskLimit(float(1 - fitting.validation.correct()[:, :2].mean()) - 0.02, CONFIDENCE)
    n_certified, n_exceeded = 0, 0
    for seed in range(turns):
        fitting, test = drawn(seed + 1, 300, embedded=method in EMBEDDED)
        try:
            policy = fit_method(method, fitting, ThresholdRule(certify=limit))
        except RiskError:
            continue
        at = policy.threshold_choice.certificate
        assert policy.threshold_choice.rule == "certified"
        assert at.n == policy.validation.n == len(fitting.validation)
        assert policy.calibration.n == len(fitting.calibration)
        assert risk_of(policy, fitting.validation) == pytest.approx(at.n_wrong / at.n_accepted)
        assert binom.cdf(at.n_wrong, at.n_accepted, limit.risk) <= 1 - CONFIDENCE
        n_certified += 1
        n_exceeded += risk_of(policy, test) > limit.risk
    assert n_certified > 0
    assert n_exceeded <= binom.ppf(0.999, turns, 1 - CONFIDENCE)


def test_what_always_asks_the_last_model_has_no_early_answer_to_certify():
    fitting, _ = drawn(1, 100, embedded=False)
    with pytest.raises(ConfigError, match="duo answers nothing before the last model"):
        fit_method("duo", fitting, ThresholdRule(certify=RiskLimit(0.5, 0.5)))


def test_no_label_of_validation_moves_what_a_certified_policy_has_learned():
    fitting, _ = drawn(1, 300, embedded=False)
    rng = np.random.default_rng(0)
    for method in ("frugalgpt", "benchmark-routing", "cascade-routing"):
        assert METHODS[method].learns
        learned = []
        for labels in (fitting.validation.chain.labels, rng.permutation(fitting.validation.chain.labels)):
            chain = replace(fitting.validation.chain, labels=labels)
            changed = replace(fitting, validation=replace(fitting.validation, chain=chain))
            policy = fit_method(method, changed, ThresholdRule(certify=RiskLimit(0.95, 0.5)))
            learned.append(policy.arrays)
        assert learned[0] == learned[1]
