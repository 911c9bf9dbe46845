"""Risks certified for policies of every kind: too high no more often than stated, on inputs that no fit has seen."""

from dataclasses import replace

import numpy as np
import planted
import pytest
from scipy.stats import binom

from cauc_ray.errors import ConfigError, RiskError
from cauc_ray.numbers.guarantees import RiskLimit
from cauc_ray.policies.by_method import fit_method, fit_policy
from cauc_ray.policies.method import METHODS, OURS
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay

CONFIDENCE = 0.8
# Near what the first models' answers are wrong, without embeddings and with: where a wrong certificate would show.
RISK = {False: 0.485, True: 0.455}
EMBEDDED = ("benchmark-routing", "cascade-routing")
# Cascades by confidence, by a score, by solutions; routers by value; what learns nothing.
QUICK = {"rf": 60, "margin": 60, "random": 60, "frugalgpt": 15, "benchmark-routing": 15}
MANY = {"rf": 200, "margin": 200, "random": 200, "frugalgpt": 100, "benchmark-routing": 100}
MANY |= {"cascade-routing": 40, "stacked": 40, "base": 100, "max-probability": 100}
MANY |= dict.fromkeys(["routellm-sw", "routellm-mf", "graphrouter", "embedllm", "routerdc", "post-hoc-embed"], 20)
# Base and RF are not fitted by what also has a validation split.
ELSEWHERE = ("base", "rf", "auto", "duo", "answers")
CHOOSING = [name for name, of in METHODS.items() if not of.unpublished and name not in ELSEWHERE]


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        planted.train_quickly(patch)
        yield


def drawn(seed, n=300, *, embedded=False):
    return planted.problem(seed, n=n, n_test=1000, m=3, embedded=embedded)


def risk_of(policy, split):
    """Return how many rows are answered before the last model, and the share of these that are wrong."""
    chain = split.own_chain([stage.name for stage in policy.answering], encoded=policy.encoder is not None)
    answers = replay(policy, chain)
    early = answers.stages < len(policy.stages) - 1
    return int(early.sum()), (answers.predictions != chain.labels)[early].mean()


@pytest.mark.parametrize(
    ("method", "turns"),
    [*QUICK.items(), *(pytest.param(*case, marks=pytest.mark.soak("full")) for case in MANY.items())],
)
def test_a_certified_risk_is_exceeded_no_more_often_than_stated(method, turns):
    embedded = method in EMBEDDED
    limit = RiskLimit(RISK[embedded], CONFIDENCE)
    rule = ThresholdRule(certify=limit)
    certified, exceeded, plug_in = 0, 0, 0
    for seed in range(turns):
        fitting, test = drawn(seed + 1, embedded=embedded)
        try:
            if method in OURS:
                policy = fit_policy(method, fitting.calibration.chain, fitting.validation.chain, rule, fitting.names)
            else:
                policy = fit_method(method, fitting, rule)
        except RiskError:
            continue
        at = policy.threshold_choice.certificate
        assert policy.threshold_choice.rule == "certified"
        assert (policy.calibration.n, at.n, policy.validation.n) == (300, 300, 300)
        assert risk_of(policy, fitting.validation) == (at.n_accepted, pytest.approx(at.n_wrong / at.n_accepted))
        assert binom.cdf(at.n_wrong, at.n_accepted, limit.risk) <= 1 - CONFIDENCE
        certified += 1
        exceeded += risk_of(policy, test)[1] > limit.risk
        if method in ("rf", "margin"):
            plug_in += risk_of(policy.with_threshold(at.plug_in_threshold), test)[1] > limit.risk
    most = binom.ppf(0.999, turns, 1 - CONFIDENCE)
    assert certified > 0
    assert exceeded <= most
    if method in ("rf", "margin"):
        assert plug_in > most  # which a threshold that is not certified does not keep to


@pytest.mark.parametrize("method", CHOOSING)
def test_validation_chooses_nothing_but_what_is_certified(method):
    embedded = METHODS[method].needs == "embedding"
    fitting, _ = drawn(1, embedded=embedded)
    drawn_anew = drawn(2, embedded=embedded)[0].validation
    labels = np.random.default_rng(0).permutation(drawn_anew.chain.labels)
    redrawn = replace(fitting, validation=replace(drawn_anew, chain=replace(drawn_anew.chain, labels=labels)))
    rule = ThresholdRule(certify=RiskLimit(0.95, 0.5))
    policies = [fit_method(method, splits, rule) for splits in (fitting, redrawn)]
    numbers = [policy.decides() | {"threshold": None} for policy in policies]
    for decides in numbers:
        decides["stages"].sort(key=lambda stage: stage["name"])  # their order is part of a solution, which is certified
    assert numbers[0] == numbers[1]
    assert len({getattr(policy, "arrays", None) for policy in policies}) == 1


def test_answers_of_a_router_are_early_if_they_are_of_all_but_the_most_expensive_model():
    fitting = planted.changed(drawn(1)[0], lambda split: split.of_models([2, 0, 1]))
    with pytest.raises(ConfigError, match="give the models by rising cost"):
        fit_method("embedllm", fitting, ThresholdRule(certify=RiskLimit(0.95, 0.5)))


@pytest.mark.parametrize("method", ["frugalgpt", "cascade-routing"])
def test_the_curve_of_a_certified_solution_is_of_validation(method):
    fitting, _ = drawn(1)
    policy = fit_method(method, fitting, ThresholdRule(certify=RiskLimit(0.5, 0.5)))
    (point,) = policy.curve
    assert (point.cost, point.quality) == pytest.approx((policy.expected.cost, policy.expected.accuracy.value))
    assert policy.threshold == point.threshold == pytest.approx(point.cost)
