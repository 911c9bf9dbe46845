"""Risks certified for policies of every kind: too high no more often than stated, on inputs that no fit has seen."""

from dataclasses import replace

import numpy as np
import planted
import pytest
from scipy.stats import binom

import cauc_ray
from cauc_ray.errors import ConfigError, RiskError
from cauc_ray.numbers.guarantees import RiskLimit
from cauc_ray.policies.by_method import fit_method
from cauc_ray.policies.methods import METHODS
from cauc_ray.policies.threshold import ThresholdRule

CONFIDENCE = 0.8
# Near what the first models' answers are wrong, without embeddings and with: where a wrong certificate would show.
RISK = {False: 0.485, True: 0.455}
EMBEDDED = ("benchmark-routing", "stacked-both", "cascade-routing")
# Cascades by confidence, by a score, by solutions; routers by value; what learns nothing.
QUICK = {"rf": 60, "margin": 60, "random": 60, "frugalgpt": 15, "benchmark-routing": 15}
SLOW = {"rf": 200, "margin": 200, "random": 200, "frugalgpt": 100, "benchmark-routing": 100}
SLOW |= {"cascade-routing": 40, "stacked-both": 40, "base": 100, "max-probability": 100}
SLOW |= dict.fromkeys(["routellm-sw", "routellm-mf", "graphrouter", "embedllm", "routerdc", "post-hoc-embed"], 20)
# Base and RF are not fitted by what also has a validation split.
CHOOSING = [name for name, own in METHODS.items() if not own.unpublished and name not in ("base", "rf", "auto", "duo")]


@pytest.fixture(scope="module", autouse=True)
def _quick():
    with pytest.MonkeyPatch.context() as patch:
        planted.train_quickly(patch)
        yield


def drawn(seed, n=300, *, embedded=False):
    return planted.problem(seed, n=n, n_test=1000, m=3, embedded=embedded)


def given(folder, splits):
    """Return what is asked with each split: arrays, or a table where there are embeddings."""
    if splits["test"].embeddings is not None:
        table = planted.write_table(folder, splits)
        return {split: {"logits": table, "split": split} for split in splits}
    chains = {split: own.chain for split, own in splits.items()}
    return {
        split: {"logits": dict(zip(chain.models, chain.logits, strict=True)), "labels": chain.labels}
        for split, chain in chains.items()
    }


def fitted(asked, **options):
    """Fit a method on what given() returns."""
    if "split" in asked["test"]:
        return cauc_ray.fit(asked["test"]["logits"], embedding="enc", **options)
    first, second = asked["calibration"], asked["validation"]
    return cauc_ray.fit(**first, validation=tuple(second.values()), costs=[1.0, 10.0, 30.0], **options)


def risk_of(policy, asked):
    """Return how many are answered before the last model, and the share of these that are wrong."""
    found = cauc_ray.evaluate(policy=policy, **asked)
    early = found.replay.stages < len(policy.stages) - 1
    return int(early.sum()), (found.replay.predictions != found.chain.labels)[early].mean()


@pytest.mark.parametrize(("method", "turns"), QUICK.items())
def test_a_certified_risk_is_exceeded_no_more_often_than_stated(tmp_path, method, turns):
    exceeds(tmp_path, method, turns)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "turns"), SLOW.items())
def test_a_certified_risk_is_exceeded_no_more_often_than_stated_in_many_turns(tmp_path, method, turns):
    exceeds(tmp_path, method, turns)


def exceeds(folder, method, turns):
    embedded = method in EMBEDDED
    limit = RiskLimit(RISK[embedded], CONFIDENCE)
    certified, exceeded, plug_in = 0, 0, 0
    for seed in range(turns):
        fitting, test = drawn(seed + 1, embedded=embedded)
        splits = {"calibration": fitting.calibration, "validation": fitting.validation, "test": test}
        asked = given(folder / str(seed), splits)
        try:
            policy = fitted(asked, method=method, seed=seed, certify=f"risk<={limit.risk}@{limit.confidence}")
        except RiskError:
            continue
        at = policy.threshold_choice.certificate
        assert policy.threshold_choice.rule == "certified"
        assert (policy.calibration.n, at.n, policy.validation.n) == (300, 300, 300)
        assert risk_of(policy, asked["validation"]) == (at.n_accepted, pytest.approx(at.n_wrong / at.n_accepted))
        assert binom.cdf(at.n_wrong, at.n_accepted, limit.risk) <= 1 - CONFIDENCE
        certified += 1
        exceeded += risk_of(policy, asked["test"])[1] > limit.risk
        if method in ("rf", "margin"):
            plug_in += risk_of(policy.with_threshold(at.plug_in_threshold), asked["test"])[1] > limit.risk
    most = binom.ppf(0.999, turns, 1 - CONFIDENCE)
    assert certified > 0
    assert exceeded <= most
    if method in ("rf", "margin"):
        assert plug_in > most  # which a threshold that is not certified does not keep to


@pytest.mark.parametrize("method", CHOOSING)
def test_validation_chooses_nothing_but_what_is_certified(method):
    embedded = METHODS[method].needs_embedding
    fitting, _ = drawn(1, embedded=embedded)
    drawn_anew = drawn(2, embedded=embedded)[0].validation
    labels = np.random.default_rng(0).permutation(drawn_anew.chain.labels)
    others = replace(fitting, validation=replace(drawn_anew, chain=replace(drawn_anew.chain, labels=labels)))
    first, second = (fit_method(method, own, ThresholdRule(certify=RiskLimit(0.95, 0.5))) for own in (fitting, others))
    one, other = (policy.decides() | {"threshold": None} for policy in (first, second))
    for decides in (one, other):
        decides["stages"].sort(key=lambda stage: stage["name"])  # their order is part of a solution, which is certified
    assert one == other
    assert first.arrays == second.arrays


def test_what_always_asks_the_last_model_has_no_early_answer_to_certify():
    with pytest.raises(ConfigError, match="duo answers nothing before the last model"):
        fit_method("duo", drawn(1, 100)[0], ThresholdRule(certify=RiskLimit(0.5, 0.5)))


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
