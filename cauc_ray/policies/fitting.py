"""Fits of CAUC Base and CAUC-RF (paper, algorithms 1 and 2), and safe fits, which fall back on single models.

A fit takes calibration logits, and validation logits where a threshold is chosen on them. Both may be split
into parts, which a fit asks for sums and, on validation, for each row's answers. A fit is deterministic: the same data
give the same numbers to the bit, whatever the other models of the chain are.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import numpy as np

from cauc_ray.errors import BudgetError, CaucWarning, ConfigError
from cauc_ray.numbers.calibration import FitStatus
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.intervals import signs, signs_of
from cauc_ray.numbers.logits import joint_kind
from cauc_ray.numbers.metrics import accuracy, macro_f1
from cauc_ray.numbers.sweep import STOP_NONE, Objective, most_within
from cauc_ray.policies.calibrated import (
    AnswerSums,
    CalibratorFit,
    calibrator_of,
    pair_of,
    require_calibrator,
    sum_answers,
)
from cauc_ray.policies.cauc import BasePolicy, BaseStage, PairDiagnostics, RFPolicy, RFStage
from cauc_ray.policies.evidence import FittedOn, SafeChoice, TemperatureDiagnostics, ThresholdChoice
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.stacking import PLAIN, Stacking
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold
from cauc_ray.policies.trace import Examples, answers_alone, replay, trace_policy

AnyMethodPolicy = TypeVar("AnyMethodPolicy", bound=Policy)

# Fits a method on two splits by a rule; with safe=True it keeps only supported fusions.
Fit: TypeAlias = Callable[..., Policy]


def fit_base(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
    fits: Sequence[CalibratorFit] | None = None,
) -> BasePolicy:
    """Fit CAUC Base on a chain of any length (paper, algorithm 1).

    Args:
        calibration: Labelled examples.
        validation: Required if the rule has a budget or a risk to certify. Otherwise it only gives the expected
            results, and those at other budgets, if all of its examples have labels.
        rule: How to choose the threshold.
        names: Names of the two splits.
        calibrator: Kind of calibrator of every model.
        safe: Fuse models only if validation, with all of its labels, supports it.
        fits: Calibrators of the models, fitted on calibration; None to fit them.

    Raises:
        DataError: Labels are missing.
        BudgetError: No operating point is within the budget.
        RiskError: No threshold is certified.
        ConfigError: The method does not support the rule.
    """
    require_base_rule(rule)
    policy = base_of(calibration, validation, names, calibrator=calibrator, safe=safe, fits=fits)
    policy = policy.model_copy(update={"budget": rule.budget})
    return choose_threshold(policy, calibration, validation, rule, reference=policy.threshold)


def base_of(
    calibration: Chain,
    validation: Chain | None,
    names: tuple[str, str],
    *,
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
    fits: Sequence[CalibratorFit] | None = None,
) -> BasePolicy:
    """Return CAUC Base at the last model's calibration accuracy, not measured. Arguments are those of fit_base."""
    require_calibrator(calibrator, "base", len(calibration.models))
    _require_labels(calibration)
    if fits is None:
        fits = [_calibrate(calibration, index, calibrator) for index in range(len(calibration.models))]
    sums = sum_answers(calibration, {index: fit.calibrator for index, fit in enumerate(fits)})
    stages = []
    for index, fit in enumerate(fits):
        stage_sums, last = sums[index], index == len(fits) - 1
        rate = None if last else stage_sums.complementarity_rate
        stages.append(
            BaseStage(
                **model_entries(calibration, index, fit, stage_sums),
                mean=stage_sums.logits.mean,
                std=stage_sums.logits.std,
                complementarity_rate=rate,
                fused=rate is None or rate > 0,
                n_gain=None if last else stage_sums.n_gain,
                n_loss=None if last else stage_sums.n_loss,
            )
        )
    common = split_entries(calibration, validation, names, BY_DEFAULT)
    common["threshold"] = sums[len(fits) - 1].accuracy
    common["threshold_choice"] = ThresholdChoice(rule="reference-accuracy", objective=None, split=names[0])
    policy = BasePolicy(**common, stages=tuple(stages))
    return _admitted(policy, validation) if safe else policy


def _admitted(policy: BasePolicy, validation: Chain | None) -> BasePolicy:
    """Return a policy without unsupported fusions.

    A model stays fused if its gain on calibration is significant. With a validation split, which must have all labels,
    the models stay only if fusion is a significant gain over the last stage's unfused answers on it.
    """
    n, early_stages = policy.calibration.n, policy.stages[:-1]
    admitted = [stage for stage in early_stages if signs(stage.n_gain or 0, stage.n_loss or 0, n).gains]
    candidate = _fusing(policy, admitted)
    if validation is None or not admitted:
        return candidate
    return candidate if _fusion_gains(candidate, validation) else _fusing(policy, [])


def _fusion_gains(policy: Policy, validation: Chain) -> bool:
    """Return whether the last stage's fused answers are significantly better on validation than its unfused ones.

    Args:
        policy: A policy that fuses.
        validation: Logits of the policy's models, all rows labelled.
    """
    fused = trace_policy(policy, validation).predictions[:, -1]
    last = policy.model_copy(update={"stages": policy.stages[-1:]})
    unfused = answers_alone(last, validation.of_models([len(policy.stages) - 1]))[:, 0]
    return signs_of(fused == validation.labels, unfused == validation.labels).gains


def _fusing(policy: BasePolicy, fused: Sequence[BaseStage]) -> BasePolicy:
    *early_stages, last = policy.stages
    stages = (stage.model_copy(update={"fused": stage in fused}) for stage in early_stages)
    return policy.model_copy(update={"stages": (*stages, last)})


def require_base_rule(rule: ThresholdRule) -> None:
    """Raise ConfigError unless Base can choose a threshold by the rule."""
    if rule.objective != "accuracy" and rule.budget is None:
        raise ConfigError("method base uses an objective only with a budget; its default is the reference accuracy")


def fit_rf(
    calibration: Chain,
    validation: Chain | None = None,
    rule: ThresholdRule = BY_DEFAULT,
    *,
    names: tuple[str, str] = ("calibration", "validation"),
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
) -> RFPolicy:
    """Fit CAUC-RF on a chain of any length (paper, algorithm 2).

    Arguments and errors are those of fit_base; validation is needed unless the rule gives a threshold. A safe
    policy fuses a stage only if that is a significant gain over its own answers on validation. Where the rule compares
    gains, each stage but the last has a threshold of its own.
    """
    by_gain = rule.compare == "gain"
    if by_gain and (safe or not isinstance(calibration, ChainLogits)):
        raise ConfigError("gains are fitted on all logits in one process, of fused stages: leave safe and shards out")
    policy = rf_of(calibration, validation, names, calibrator=calibrator, safe=safe)
    changes: dict[str, Any] = {"budget": rule.budget}
    if by_gain:
        assert isinstance(calibration, ChainLogits)
        scores = [stage.scores(logits) for stage, logits in zip(policy.stages, calibration.logits, strict=True)]
        stacking = Stacking(scores, calibration.labels)
        changes["gains"] = stacking.gains(stacking.chain(range(len(scores)), PLAIN), calibration.costs.means)
        changes["threshold"] = (STOP_NONE,) * (len(scores) - 1)
    return choose_threshold(policy.model_copy(update=changes), calibration, validation, rule)


def rf_of(
    calibration: Chain,
    validation: Chain | None,
    names: tuple[str, str],
    *,
    calibrator: CalibratorKind = "temperature",
    safe: bool = False,
) -> RFPolicy:
    """Return CAUC-RF at a threshold that no row reaches, not measured. Arguments are those of fit_rf."""
    require_calibrator(calibrator, "rf", len(calibration.models))
    _require_labels(calibration)
    of_splits = split_entries(calibration, validation, names, BY_DEFAULT)
    stages: list[RFStage] = []
    for index in range(len(calibration.models)):
        fit = _calibrate(calibration, index, calibrator)
        sums = sum_answers(calibration, {index: fit.calibrator})[index]
        pair = pair_of(calibration, tuple(stages), fit.calibrator) if stages else None
        alpha, beta = pair.temperatures if pair else (None, None)
        stage = RFStage(
            **model_entries(calibration, index, fit, sums),
            alpha=alpha,
            beta=beta,
            pair_diagnostics=PairDiagnostics(**pair.diagnostics("alpha_", "beta_")) if pair else None,
        )
        stages.append(stage)
        if safe and index and validation is not None:
            so_far = RFPolicy(**of_splits, stages=tuple(stages))
            if not _fusion_gains(so_far, validation.of_models(range(index + 1))):
                stages[index] = stage.model_copy(update={"fused": False})
    return RFPolicy(**of_splits, stages=tuple(stages))


def _require_labels(calibration: Chain) -> None:
    calibration.require_labels("calibration")
    calibration.costs.warn_unless_rising(calibration.models)


def _calibrate(calibration: Chain, index: int, kind: CalibratorKind) -> CalibratorFit:
    fit, name = calibrator_of(calibration, index, kind), calibration.models[index]
    if fit.floor is not None:
        warnings.warn(f"{calibration.source}: model {name!r}: {fit.floor}", CaucWarning, stacklevel=2)
    if fit.temperature.status is not FitStatus.CONVERGED:
        warnings.warn(
            f"{calibration.source}: model {name!r} is {fit.temperature.status} on its {len(calibration)} examples; its "
            f"temperature is set to {fit.calibrator.temperature:.3g}",
            CaucWarning,
            stacklevel=2,
        )
    return fit


def model_entries(calibration: Chain, index: int, fit: CalibratorFit, sums: AnswerSums) -> dict[str, Any]:
    """Return the entries of a model that all policies have."""
    calibrator = fit.calibrator
    return {
        "name": calibration.models[index],
        "cost": float(calibration.costs.means[index]),
        "logit_kind": calibration.logit_kinds[index],
        "floor": calibrator.floor,
        "temperature": calibrator.temperature,
        "offsets": calibrator.offsets,
        "isotonic": calibrator.isotonic,
        "diagnostics": TemperatureDiagnostics(
            **fit.temperature.diagnostics(),
            calibration_error_before=sums.before.error,
            calibration_error_after=sums.after.error,
            accuracy=sums.accuracy,
            logits_fingerprint=calibration.logits_fingerprint(index),
        ),
    }


def calibrated_models(calibration: ChainLogits) -> list[dict[str, Any]]:
    """Return the entries of all models of a chain, with a warning of each that is clamped or has a floor."""
    entries = []
    for index in range(len(calibration.models)):
        fit = _calibrate(calibration, index, "temperature")
        entries.append(model_entries(calibration, index, fit, sum_answers(calibration, {index: fit.calibrator})[index]))
    return entries


def split_entries(
    calibration: Chain, validation: Chain | None, names: tuple[str, str], rule: ThresholdRule
) -> dict[str, Any]:
    """Return a policy's entries on its splits, with a threshold that no example reaches and no measurements yet."""
    return {
        "cost_unit": calibration.costs.unit,
        "costs": "per-call" if calibration.per_call_costs else "per-model",
        "threshold": STOP_NONE,
        "threshold_choice": ThresholdChoice(rule="given", objective=None, split=None),
        "budget": rule.budget,
        "logit_kind": joint_kind([kind for kind in calibration.logit_kinds if kind != "embedding"]),
        "calibration": _fitted_on(calibration, names[0]),
        "validation": _fitted_on(validation, names[1]) if validation is not None else None,
        "expected": None,
    }


def entries_of_models(calibration: ChainLogits) -> list[dict[str, Any]]:
    """Return the entries of all models of a chain; an encoder has nothing to calibrate."""
    entries, costs = list[dict[str, Any]](), calibration.costs.means.tolist()
    for index, (name, kind) in enumerate(zip(calibration.models, calibration.logit_kinds, strict=True)):
        if kind == "embedding":
            encoder = {"name": name, "cost": costs[index], "logit_kind": kind}
            entries.append({**encoder, "temperature": 1.0, "diagnostics": None})
            continue
        fit = calibrator_of(calibration, index, "temperature")
        (sums,) = sum_answers(calibration, {index: fit.calibrator}).values()
        entries.append(model_entries(calibration, index, fit, sums))
    return entries


def _fitted_on(chain: Chain, split: str) -> FittedOn:
    return FittedOn(split=split, n=len(chain), examples_fingerprint=chain.examples_fingerprint())


@dataclass(frozen=True, slots=True)
class Fitting:
    """The input of a method's fit.

    Attributes:
        calibration: Split to fit numbers on.
        validation: Split to choose thresholds, epochs and sizes on.
        seed: Random seed.
        checkpoint: Model that some methods train on texts, a hub id or a folder.
        shared: Cache of intermediate results, reused by later fits, by name.
        names: Names of the two splits.
        training: Split that methods that learn are fitted on in place of calibration; None without one.
        objective: What auto chooses chains by.
        recorded: The splits that policies name, if not these.
    """

    calibration: Examples
    validation: Examples
    seed: int = 0
    checkpoint: str | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    names: tuple[str, str] = ("calibration", "validation")
    training: Examples | None = None
    objective: Objective = "accuracy"
    recorded: Fitting | None = None

    def without_validation(self) -> Fitting:
        """Return the input of fits that leave validation for tests: random halves of calibration."""
        order = np.random.default_rng(self.seed).permutation(len(self.calibration))
        first, second = (self.calibration.of_rows(np.sort(half)) for half in np.array_split(order, 2))
        return replace(self, calibration=first, validation=second, recorded=self)

    def for_learning(self) -> Fitting:
        """Return the input of a method that learns: its calibration split is the training split, if there is one."""
        return self if self.training is None else replace(self, calibration=self.training, training=None)

    def diagnose(self) -> None:
        """Measure the models' entries in policies once, for the fits of all methods."""
        self._entries(self.calibration, self.calibration.chain)

    def _entries(self, examples: Examples, chain: ChainLogits) -> list[dict[str, Any]]:
        """Return the entries of a chain's models in policies; `examples` is the key of their cache."""
        recorded = self.shared.setdefault(f"entries {id(examples)}", {})
        for model, name in enumerate(chain.models):
            if name not in recorded:
                (recorded[name],) = entries_of_models(chain.of_models([model]))
        costs = zip(chain.models, chain.costs.means.tolist(), strict=True)
        return [{**recorded[name], "cost": cost} for name, cost in costs]

    def policy(
        self,
        kind: type[AnyMethodPolicy],
        models: Sequence[int] | None = None,
        *,
        encoded: bool = False,
        of_stages: Sequence[Mapping[str, Any]] | None = None,
        **fields: Any,
    ) -> AnyMethodPolicy:
        """Return a policy of some of the models, at a threshold that no row reaches.

        Args:
            kind: Class of the policy.
            models: Indices of the models; None for all.
            encoded: Whether the encoder is its first stage.
            of_stages: Fields of each model's stage that only this method has.
            **fields: Fields of the policy that only this method has.
        """
        splits, every = self.recorded or self, self.calibration.chain.models
        names = every if models is None else [every[model] for model in models]
        calibration = splits.calibration.own_chain(names, encoded=encoded)
        validation = splits.validation.own_chain(names, encoded=encoded)
        stage_fields: list[Mapping[str, Any]] = [*[{}] * encoded, *(of_stages or [{}] * len(names))]
        entries = self._entries(splits.calibration, calibration)
        fields["stages"] = [{**entry, **more} for entry, more in zip(entries, stage_fields, strict=True)]
        return kind(**split_entries(calibration, validation, self.names, BY_DEFAULT), **fields)


def fit_safe(fit: Fit, calibration: Chain, validation: Chain | None, rule: ThresholdRule) -> Policy:
    """Fit a policy that tests its fusions and falls back to a single model, and record the changes.

    A fusion stays if its gain over the stage's unfused answers is significant on validation (numbers.intervals). For
    Base, which fuses all models at once, each model's gain on calibration must be significant too. Stages whose fusion
    is rejected answer by themselves.

    Without a budget or a threshold, the policy may cost no more on validation than always calling the largest model.
    If a single model within that limit, or within the budget, is better, the best threshold within it is chosen
    instead. If the single model is still better, the result is the chain of that model alone. A threshold that the rule
    sets stays; the policy is then compared with the models that cost no more than it does.

    Raises:
        ConfigError: The validation split is missing, safe fits do not support the rule, or as the fit does.
        DataError: Labels are missing; or as the fit does.
        BudgetError: As the fit does.
    """
    require_safe_rule(rule)
    if validation is None:
        raise ConfigError("a safe policy is compared with single models on a validation split; give one")
    validation.require_labels("comparing with single models")
    labels, costs = validation.labels, validation.costs.means
    quality = accuracy if rule.objective == "accuracy" else macro_f1

    def results_of(policy: Policy) -> _Results:
        answers = replay(policy, validation)
        return _Results("the chain", quality(answers.predictions, labels), float(answers.costs.mean()))

    policy = fit(calibration, validation, rule, safe=True)
    assert policy.validation is not None
    cascade, split, unit = results_of(policy), policy.validation.split, policy.cost_unit
    unfused, changes = _unfused(policy), []
    if unfused:
        changes.append(f"{', '.join(unfused)} not fused: no significant gain")
    # A threshold of the rule has no cost limit.
    limit = rule.budget
    if limit is None:
        limit = float(costs[-1]) if rule.threshold is None else cascade.cost
    alone = zip(validation.models, answers_alone(policy, validation).T, costs.tolist(), strict=True)
    singles = [_Results(name, quality(of, labels), cost) for name, of, cost in alone if cost <= most_within(limit)]
    # Among equals, the cheapest.
    single = min(singles, key=lambda one: (-one.quality, one.cost), default=None)
    if rule.threshold is None and cascade.behind(single, limit):
        anew = _best_within(policy, calibration, validation, limit, rule)
        if anew is not None and anew.threshold != policy.threshold:
            changes.append(f"another threshold chosen, the best on {split} within {limit:.4g} {unit}")
            policy, cascade = anew, results_of(anew)
    if single is not None and cascade.behind(single, limit):
        changes = [
            f"{single.name} alone, which has {100 * single.quality:.2f} % on {split} at {single.cost:.4g} "
            f"{unit}; the chain has {100 * cascade.quality:.2f} % at {cascade.cost:.4g}"
        ]
        single_index = [calibration.models.index(single.name)]
        policy = fit(calibration.of_models(single_index), validation.of_models(single_index), rule, safe=True)
    choice = SafeChoice(
        models=calibration.models, unfused=unfused, limit=limit, says="; ".join(changes) or "no change was needed"
    )
    return policy.model_copy(update={"safe": choice})


def require_safe_rule(rule: ThresholdRule) -> None:
    """Raise ConfigError unless a safe policy can choose its threshold by the rule."""
    if rule.price is not None:
        raise ConfigError("a price decides a threshold that a safe policy may have to move; leave safe or price out")
    if rule.certify is not None:
        raise ConfigError("--safe and --certify cannot be combined: both need validation; leave one of them out")


@dataclass(frozen=True, slots=True)
class _Results:
    """Results on validation.

    Attributes:
        name: Name in messages.
        quality: Value of the objective.
        cost: Mean cost per example.
    """

    name: str
    quality: float
    cost: float

    def behind(self, single: _Results | None, limit: float) -> bool:
        """Return whether it exceeds the limit, or a single model is better, or as good and cheaper."""
        if self.cost > most_within(limit):
            return True
        if single is None or self.quality > single.quality:
            return False
        return self.quality < single.quality or most_within(single.cost) < self.cost


def _best_within(
    policy: Policy, calibration: Chain, validation: Chain, limit: float, rule: ThresholdRule
) -> Policy | None:
    """Choose the best threshold within the limit, None if there is none."""
    within = ThresholdRule(budget=limit, objective=rule.objective)
    try:
        anew = choose_threshold(policy, calibration, validation, within)
    except BudgetError:
        return None
    if rule.budget is not None:
        return anew
    # The limit is not a requested budget; the policy's file has it under safe.
    choice = ThresholdChoice(rule="best", objective=rule.objective, split=anew.threshold_choice.split)
    return anew.model_copy(update={"threshold_choice": choice})


def _unfused(policy: Policy) -> tuple[str, ...]:
    """Return the stages that an ordinary fit would have fused."""
    if isinstance(policy, BasePolicy):
        return tuple(stage.name for stage in policy.stages if not stage.fused and (stage.complementarity_rate or 0) > 0)
    assert isinstance(policy, RFPolicy)
    return tuple(stage.name for stage in policy.stages if not stage.fused)
