"""Fits of CAUC Base and CAUC-RF (paper, algorithms 1 and 2), and what replacing a model leaves untouched.

A fit takes calibration logits, and validation logits where a threshold is chosen on them; they may lie in several
parts, of which it only asks sums and, on validation, each row's answers. Given a policy that was fitted before, it
takes over every number whose data have not changed: a calibrator while its own model's logits are the same, a
complementarity rate while those of the last model are too, RF's pairs up to the first stage that changed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from cauc_ray.errors import CaucWarning, ConfigError, PolicyError
from cauc_ray.numbers.calibrators import Calibrator, CalibratorKind
from cauc_ray.numbers.certificates import RiskLimit
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.sweep import STOP_NONE
from cauc_ray.numbers.temperature import FitStatus, PairFit
from cauc_ray.policies.admitting import admit_in_base, signs_of_fusion
from cauc_ray.policies.answers_sums import AnswerSums, sum_answers
from cauc_ray.policies.calibrated import CalibratorFit, calibrator_of, require_calibrator
from cauc_ray.policies.cauc_base import BasePolicy, BaseStage
from cauc_ray.policies.cauc_rf import PairDiagnostics, RFPolicy, RFStage
from cauc_ray.policies.evidence import FittedOn, IsotonicMap, TemperatureDiagnostics, ThresholdChoice
from cauc_ray.policies.policy import Policy, Stage
from cauc_ray.policies.threshold import BY_DEFAULT, AnyPolicy, ThresholdRule, choose_threshold, set_threshold
from cauc_ray.policies.weighed import Folded, pair_of


def fit_base(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    calibrator: CalibratorKind = "temperature",
    previous: BasePolicy | None = None,
    safe: bool = False,
) -> BasePolicy:
    """Fit CAUC Base on a chain of any length (paper, algorithm 1).

    validation is needed where the rule has a budget or a risk to certify; else it only tells what to expect, and what
    another budget would give, if all of its examples have labels. names: of the splits. calibrator: of every model.
    previous: a policy whose still valid numbers are taken over, fitted with the same safe.   safe: whether models are
    fused only where that is supported (policies.admitting), by validation with all of its labels.
    Raises DataError where labels are missing, BudgetError where no operating point is as cheap as the budget,
    RiskError where no threshold is certified, ConfigError on a rule that cannot be met.
    """
    require_base_rule(rule)
    require_calibrator(calibrator, "base", len(calibration.models))
    _require_labels(calibration)
    known = _unchanged(calibration, calibrator, previous)
    kept = _kept_of_base(known, previous)
    calibrated = {place: _calibrate(calibration, place, calibrator, known[place]) for place in range(len(known))}
    last = len(known) - 1
    # The others' complementarity is with the last stage.
    asked = [] if len(kept) == len(known) else [place for place in calibrated if place == last or place not in kept]
    sums = sum_answers(calibration, {place: calibrated[place].calibrator for place in asked})
    stages = []
    for place, one in calibrated.items():
        if place in kept:
            stages.append(kept[place].model_copy(update={"cost": float(calibration.costs.means[place])}))
            continue
        found, rate = sums[place], None if place == last else sums[place].complementarity_rate
        stages.append(
            BaseStage(
                **dict(_stage(calibration, place, one, sums)),
                mean=found.mean,
                std=found.std,
                complementarity_rate=rate,
                fused=rate is None or rate > 0,
                n_gain=None if rate is None else found.n_gain,
                n_loss=None if rate is None else found.n_loss,
            )
        )
    policy = _draft(BasePolicy, calibration, validation, names, rule, tuple(stages))
    if safe:
        policy = admit_in_base(policy, validation)
    if rule == BY_DEFAULT:
        choice = ThresholdChoice(rule="reference-accuracy", objective=None, split=names[0])
        return set_threshold(policy, calibration, validation, stages[last].diagnostics.accuracy, choice)
    return choose_threshold(policy, calibration, validation, rule)


def require_base_rule(rule: ThresholdRule) -> None:
    """Raise ConfigError unless Base can choose a threshold by the rule."""
    if rule.objective != "accuracy" and rule.budget is None:
        raise ConfigError("Base chooses by an objective only for a budget; its default is the reference accuracy")


def _kept_of_base(known: list[Stage | None], previous: BasePolicy | None) -> dict[int, BaseStage]:
    """Return the stages of Base that stay as they are: their rates are with the last stage, which must be the same.

    Those of a file from before gains and losses were kept are counted again.
    """
    last = len(known) - 1
    same_last = bool(previous and known[last] is previous.stages[-1])
    return {
        place: old
        for place, old in enumerate(known)
        if isinstance(old, BaseStage)
        and (place == last or (same_last and old.n_gain is not None))
        and (old.complementarity_rate is None) == (place == last)
    }


def fit_rf(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    calibrator: CalibratorKind = "temperature",
    previous: RFPolicy | None = None,
    safe: bool = False,
) -> RFPolicy:
    """Fit CAUC-RF on a chain of any length (paper, algorithm 2).

    Arguments and errors are those of fit_base; validation is needed unless the rule gives a threshold. A safe one
    folds a stage in only where validation establishes the gain over its own answers.
    """
    require_calibrator(calibrator, "rf", len(calibration.models))
    _require_labels(calibration)
    known = _unchanged(calibration, calibrator, previous)
    n_unchanged = 0
    if previous is not None:
        same = [old is stage for old, stage in zip(known, previous.stages, strict=False)]
        n_unchanged = same.index(False) if False in same else len(same)
    calibrated = {place: _calibrate(calibration, place, calibrator, known[place]) for place in range(len(known))}
    pairs: dict[int, PairFit] = {}
    folds: list[Folded] = []
    for place, one in calibrated.items():
        old, alone = known[place], Folded(one.calibrator)
        if place < n_unchanged and isinstance(old, RFStage):
            folds.append(Folded(one.calibrator, old.alpha, old.beta) if old.fused else alone)
        elif place == 0:
            folds.append(alone)
        else:
            pairs[place] = pair_of(calibration, place, tuple(folds), one.calibrator)
            folded = Folded(one.calibrator, pairs[place].alpha, pairs[place].beta)
            admitted = not safe or validation is None or signs_of_fusion(validation, (*folds, folded)).gains
            folds.append(folded if admitted else alone)
    fresh = {place: one.calibrator for place, one in calibrated.items() if one.old is None}
    sums = sum_answers(calibration, fresh)
    stages = []
    for place, one in calibrated.items():
        old = known[place]
        if place < n_unchanged and isinstance(old, RFStage):
            stages.append(old.model_copy(update={"cost": float(calibration.costs.means[place])}))
            continue
        pair = pairs.get(place)
        stages.append(
            RFStage(
                **dict(_stage(calibration, place, one, sums)),
                alpha=pair.alpha if pair else None,
                beta=pair.beta if pair else None,
                pair_diagnostics=_pair_diagnostics(pair) if pair else None,
                fused=place == 0 or folds[place].alpha is not None,
            )
        )
    policy = _draft(RFPolicy, calibration, validation, names, rule, tuple(stages))
    return choose_threshold(policy, calibration, validation, rule)


def _pair_diagnostics(pair: PairFit) -> PairDiagnostics:
    return PairDiagnostics(
        alpha_status=pair.alpha_status,
        beta_status=pair.beta_status,
        alpha_standard_error=_or_none(pair.alpha_standard_error),
        beta_standard_error=_or_none(pair.beta_standard_error),
        nll_before=pair.nll_before,
        nll_after=pair.nll_after,
    )


def _require_labels(calibration: Chain) -> None:
    calibration.require_labels("calibration")
    calibration.costs.warn_unless_rising(calibration.models)


def _unchanged(calibration: Chain, calibrator: CalibratorKind, previous: Policy | None) -> list[Stage | None]:
    """Return for each model the previous policy's stage of that name, if it was so fitted on these very logits."""
    if previous is None or previous.calibrator_kind != calibrator:
        return [None] * len(calibration.models)
    if previous.calibration.examples_fingerprint != calibration.examples_fingerprint():
        return [None] * len(calibration.models)
    stages = {stage.name: stage for stage in previous.stages}
    return [
        stage
        if (stage := stages.get(model))
        and stage.diagnostics.logits_fingerprint == calibration.logits_fingerprint(place)
        else None
        for place, model in enumerate(calibration.models)
    ]


@dataclass(frozen=True, slots=True)
class _Calibrated:
    """A stage's calibrator, from a fit or, where its data have not changed, from the stage as it was."""

    calibrator: Calibrator
    fit: CalibratorFit | None
    old: Stage | None


def _calibrate(calibration: Chain, place: int, kind: CalibratorKind, old: Stage | None) -> _Calibrated:
    if old is not None:
        return _Calibrated(old.calibrator, None, old)
    fit = calibrator_of(calibration, place, kind)
    if fit.status is not FitStatus.CONVERGED:
        warnings.warn(
            f"{calibration.source}: model {calibration.models[place]!r} is {fit.status} on its {len(calibration)} "
            f"examples; its temperature is clamped to {fit.calibrator.temperature:.3g}",
            CaucWarning,
            stacklevel=2,
        )
    return _Calibrated(fit.calibrator, fit, None)


def _stage(calibration: Chain, place: int, calibrated: _Calibrated, sums: Mapping[int, AnswerSums]) -> Stage:
    """Return what every policy knows of a model."""
    name, cost = calibration.models[place], float(calibration.costs.means[place])
    if calibrated.old is not None:
        old = calibrated.old
        kept = {field: getattr(old, field) for field in ("temperature", "offsets", "isotonic", "diagnostics")}
        return Stage(name=name, cost=cost, **kept)
    assert calibrated.fit is not None
    fit, before_after = calibrated.fit, sums[place].calibration_errors
    isotonic = fit.calibrator.isotonic
    return Stage(
        name=name,
        cost=cost,
        temperature=fit.calibrator.temperature,
        offsets=fit.calibrator.offsets,
        isotonic=None if isotonic is None else IsotonicMap.of(isotonic),
        diagnostics=TemperatureDiagnostics(
            status=fit.status,
            standard_error=_or_none(fit.standard_error),
            nll_before=fit.nll_before,
            nll_after=fit.nll_after,
            calibration_error_before=before_after[0],
            calibration_error_after=before_after[1],
            accuracy=sums[place].accuracy,
            logits_fingerprint=calibration.logits_fingerprint(place),
        ),
    )


def _draft(
    kind: type[AnyPolicy],
    calibration: Chain,
    validation: Chain | None,
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


def _fitted_on(chain: Chain, split: str) -> FittedOn:
    return FittedOn(split=split, n=len(chain), examples_fingerprint=chain.examples_fingerprint())


def _or_none(value: float) -> float | None:
    """Return None for NaN, which a policy file does not hold."""
    return None if math.isnan(value) else value


def refit(policy: Policy, calibration: Chain, validation: Chain | None) -> Policy:
    """Refit a policy on a chain in which models were replaced, keeping its rule and all that is still valid.

    A threshold that was given stays; one that was chosen is chosen again, by the same rule. Raises PolicyError
    where the calibration examples are not those of the policy: nothing could be kept then.
    """
    rule = rule_of(policy, calibration)
    names = (policy.calibration.split, policy.validation.split if policy.validation else "validation")
    if isinstance(policy, BasePolicy):
        return fit_base(calibration, validation, rule, names=names, calibrator=policy.calibrator_kind, previous=policy)
    assert isinstance(policy, RFPolicy)
    return fit_rf(calibration, validation, rule, names=names, calibrator=policy.calibrator_kind, previous=policy)


def rule_of(policy: Policy, calibration: Chain) -> ThresholdRule:
    """Return the rule by which a policy's threshold came about. Raises PolicyError as refit does."""
    if policy.calibration.examples_fingerprint != calibration.examples_fingerprint():
        raise PolicyError(
            f"{calibration.source} holds other calibration examples than the policy was fitted on; fit a new policy"
        )
    choice = policy.threshold_choice
    if choice.rule == "given":
        return ThresholdRule(threshold=policy.threshold)
    if choice.certificate is not None:
        return ThresholdRule(certify=RiskLimit(choice.certificate.risk, choice.certificate.confidence))
    return ThresholdRule(budget=policy.budget, objective=choice.objective or "accuracy")
