"""Fits of CAUC Base and CAUC-RF (paper, algorithms 1 and 2), and what replacing a model leaves untouched.

A fit takes calibration logits, and validation logits where a threshold is chosen on them. Given a policy
that was fitted before, it takes over every number whose data have not changed: a temperature while its own
model's logits are the same, a complementarity rate while those of the last model are too, RF's pairs up to
the first stage that changed.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import CaucWarning, ConfigError, PolicyError
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.metrics import calibration_error
from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.sweep import STOP_NONE
from cauc_ray.numbers.temperature import FitStatus, fit_pair, fit_temperature
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.cauc_base import BasePolicy, BaseStage
from cauc_ray.policies.cauc_rf import PairDiagnostics, RFPolicy, RFStage, fold
from cauc_ray.policies.policy import (
    FittedOn,
    Policy,
    Stage,
    TemperatureDiagnostics,
    ThresholdChoice,
    scaled,
)
from cauc_ray.policies.threshold import BY_DEFAULT, AnyPolicy, ThresholdRule, choose_threshold, set_threshold


def fit_base(
    calibration: ChainLogits,
    validation: ChainLogits | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    previous: BasePolicy | None = None,
) -> BasePolicy:
    """Fit CAUC Base on a chain of any length (paper, algorithm 1).

    validation is needed where the rule has a budget; else it only tells what to expect, and what another
    budget would give, if all of its examples have labels. names: of the splits.
    previous: a policy whose still valid numbers are taken over. Raises DataError where labels are missing,
    BudgetError where no operating point is as cheap as the budget, ConfigError on a rule that cannot be met.
    """
    if rule.objective != "accuracy" and rule.budget is None:
        raise ConfigError("Base chooses by an objective only for a budget; its default is the reference accuracy")
    labels = _calibration_labels(calibration)
    last = len(calibration.models) - 1
    known = _unchanged(calibration, previous)
    same_last = bool(previous and known[-1] is previous.stages[-1])

    answers: dict[int, _Answers] = {}

    def answers_of(stage: int, temperature: float) -> _Answers:
        if stage not in answers:
            scores = scaled(calibration.logits[stage], temperature)
            predictions, confidences = top_option(scores)
            answers[stage] = _Answers(predictions == labels, confidences, scores)
        return answers[stage]

    # The last stage first: the others' complementarity is with it.
    stages: dict[int, BaseStage] = {}
    for place in (last, *range(last)):
        old = known[place]
        if (
            isinstance(old, BaseStage)
            and (place == last or same_last)
            and (old.complementarity_rate is None) == (place == last)
        ):
            stages[place] = old.model_copy(update={"cost": float(calibration.costs.means[place])})
            continue
        common = _fit_stage(calibration, place, old)
        own = answers_of(place, common.temperature)
        real = own.scores[np.isfinite(own.scores)]
        rate = None
        if place != last:
            rate = _complementarity_rate(own, answers_of(last, stages[last].temperature))
        stages[place] = BaseStage(
            **dict(common),
            mean=float(real.mean()),
            std=float(real.std()),
            complementarity_rate=rate,
            fused=rate is None or rate > 0,
        )
    policy = _draft(BasePolicy, calibration, validation, names, rule, tuple(stages[j] for j in range(last + 1)))
    if rule.threshold is None and rule.budget is None:
        choice = ThresholdChoice(rule="reference-accuracy", objective=None, split=names[0])
        return set_threshold(policy, calibration, validation, stages[last].diagnostics.accuracy, choice)
    return choose_threshold(policy, calibration, validation, rule)


def fit_rf(
    calibration: ChainLogits,
    validation: ChainLogits | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    previous: RFPolicy | None = None,
) -> RFPolicy:
    """Fit CAUC-RF on a chain of any length (paper, algorithm 2).

    Arguments and errors are those of fit_base; validation is needed unless the rule gives a threshold.
    """
    labels = _calibration_labels(calibration)
    known = _unchanged(calibration, previous)
    stages: list[RFStage] = []
    state: Floats | None = None
    n_unchanged = 0
    if previous is not None:
        same = [old is stage for old, stage in zip(known, previous.stages, strict=False)]
        n_unchanged = same.index(False) if False in same else len(same)
    for place in range(len(calibration.models)):
        old = known[place]
        if place < n_unchanged and isinstance(old, RFStage):
            stage = old.model_copy(update={"cost": float(calibration.costs.means[place])})
            scores = scaled(calibration.logits[place], stage.temperature)
        else:
            common = _fit_stage(calibration, place, old)
            scores = scaled(calibration.logits[place], common.temperature)
            if state is None:
                stage = RFStage(**dict(common), alpha=None, beta=None, pair_diagnostics=None)
            else:
                pair = fit_pair(state, scores, labels)
                diagnostics = PairDiagnostics(
                    alpha_status=pair.alpha_status,
                    beta_status=pair.beta_status,
                    alpha_standard_error=_or_none(pair.alpha_standard_error),
                    beta_standard_error=_or_none(pair.beta_standard_error),
                    nll_before=pair.nll_before,
                    nll_after=pair.nll_after,
                )
                stage = RFStage(**dict(common), alpha=pair.alpha, beta=pair.beta, pair_diagnostics=diagnostics)
        stages.append(stage)
        state = fold(scores, stage.alpha, stage.beta, state)
    policy = _draft(RFPolicy, calibration, validation, names, rule, tuple(stages))
    return choose_threshold(policy, calibration, validation, rule)


@dataclass(frozen=True, slots=True)
class _Answers:
    """One model's calibration answers: which are right (N,), their confidences (N,), its scores (N, K)."""

    correct: Bools
    confidences: Floats
    scores: Floats


def _complementarity_rate(small: _Answers, large: _Answers) -> float:
    """Return (N_gain - N_loss) / N where the small model is the more confident (paper, eq. 6)."""
    bolder = small.confidences > large.confidences
    gains = int((bolder & small.correct & ~large.correct).sum())
    losses = int((bolder & ~small.correct & large.correct).sum())
    return (gains - losses) / len(bolder)


def _calibration_labels(calibration: ChainLogits) -> Ints:
    calibration.require_labels("calibration")
    calibration.costs.warn_unless_rising(calibration.models)
    return calibration.labels


def _unchanged(calibration: ChainLogits, previous: Policy | None) -> list[Stage | None]:
    """Return for each model the previous policy's stage of that name, if it was fitted on these very logits."""
    if previous is None or previous.calibration.examples_fingerprint != calibration.examples_fingerprint():
        return [None] * len(calibration.models)
    stages = {stage.name: stage for stage in previous.stages}
    return [
        stage
        if (stage := stages.get(model))
        and stage.diagnostics.logits_fingerprint == calibration.logits_fingerprint(place)
        else None
        for place, model in enumerate(calibration.models)
    ]


def _fit_stage(calibration: ChainLogits, place: int, old: Stage | None) -> Stage:
    """Fit one model's temperature, or take it over where its data have not changed."""
    name, cost = calibration.models[place], float(calibration.costs.means[place])
    if old is not None:
        return Stage(name=name, cost=cost, temperature=old.temperature, diagnostics=old.diagnostics)
    logits, labels = calibration.logits[place], calibration.labels
    fit = fit_temperature(logits, labels)
    if fit.status is not FitStatus.CONVERGED:
        warnings.warn(
            f"{calibration.source}: model {name!r} is {fit.status} on its {len(labels)} examples; its temperature is "
            f"clamped to {fit.temperature:.3g}",
            CaucWarning,
            stacklevel=2,
        )
    predictions, raw = top_option(logits)
    correct = predictions == labels
    _, calibrated = top_option(scaled(logits, fit.temperature))
    return Stage(
        name=name,
        cost=cost,
        temperature=fit.temperature,
        diagnostics=TemperatureDiagnostics(
            status=fit.status,
            standard_error=_or_none(fit.standard_error),
            nll_before=fit.nll_before,
            nll_after=fit.nll_after,
            calibration_error_before=calibration_error(raw, correct),
            calibration_error_after=calibration_error(calibrated, correct),
            accuracy=float(correct.mean()),
            logits_fingerprint=calibration.logits_fingerprint(place),
        ),
    )


def _draft(
    kind: type[AnyPolicy],
    calibration: ChainLogits,
    validation: ChainLogits | None,
    names: tuple[str, str],
    rule: ThresholdRule,
    stages: tuple[Stage, ...],
) -> AnyPolicy:
    """Return a policy that lacks only its threshold and what it entails."""
    return kind.model_construct(
        cost_unit=calibration.costs.unit,
        costs="per-call" if calibration.per_call_costs else "per-model",
        threshold=STOP_NONE,
        budget=rule.budget,
        logit_kind=calibration.logit_kind,
        calibration=_fitted_on(calibration, names[0]),
        validation=_fitted_on(validation, names[1]) if validation is not None else None,
        stages=stages,
    )


def _fitted_on(chain: ChainLogits, split: str) -> FittedOn:
    return FittedOn(split=split, n=len(chain), examples_fingerprint=chain.examples_fingerprint())


def _or_none(value: float) -> float | None:
    """Return None for NaN, which a policy file does not hold."""
    return None if math.isnan(value) else value


def refit(policy: Policy, calibration: ChainLogits, validation: ChainLogits | None) -> Policy:
    """Refit a policy on a chain in which models were replaced, keeping its rule and all that is still valid.

    A threshold that was given stays; one that was chosen is chosen again, by the same rule. Raises PolicyError
    where the calibration examples are not those of the policy: nothing could be kept then.
    """
    if policy.calibration.examples_fingerprint != calibration.examples_fingerprint():
        raise PolicyError(
            f"{calibration.source} holds other calibration examples than the policy was fitted on; fit a new policy"
        )
    choice = policy.threshold_choice
    if choice.rule == "given":
        rule = ThresholdRule(threshold=policy.threshold)
    else:
        rule = ThresholdRule(budget=policy.budget, objective=choice.objective or "accuracy")
    names = (policy.calibration.split, policy.validation.split if policy.validation else "validation")
    if isinstance(policy, BasePolicy):
        return fit_base(calibration, validation, rule, names=names, previous=policy)
    assert isinstance(policy, RFPolicy)
    return fit_rf(calibration, validation, rule, names=names, previous=policy)
