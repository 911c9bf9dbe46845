"""The best guarded policy: fused only where that is supported, and no worse on validation than a single model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from cauc_ray.errors import BudgetError, ConfigError
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.metrics import accuracy, macro_f1
from cauc_ray.numbers.sweep import Objective, most_within
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.policies.evidence import Guard, SafeChoice, ThresholdChoice
from cauc_ray.policies.methods import fit_policy
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import ThresholdRule, choose_threshold
from cauc_ray.policies.trace import answers_alone, replay


def fit_safe(
    method: str,
    calibration: Chain,
    validation: Chain | None,
    rule: ThresholdRule,
    names: tuple[str, str],
    *,
    calibrator: CalibratorKind = "temperature",
) -> Policy:
    """Fit a policy that guards its fusions and falls back on a single model, and record what that has changed.

    A fusion is admitted where its gain over the stage's own answers is established on validation (numbers.intervals);
    for Base, whose models are fused at once, that of each one on calibration too, where complementarity is counted.
    Stages whose fusion is not admitted answer by themselves.
    Without a budget or a threshold the policy may cost no more on validation than always calling the largest model.
    A threshold that leaves it behind a single model within that limit, or within the budget, is chosen anew as the best
    within it, and where that is behind too, the chain of that model alone is published. A threshold that is given
    stays; the policy is then compared with the models that cost no more than it does.
    Arguments and errors are those of fit_policy; validation is needed, with all of its labels.
    """
    require_safe_rule(rule)
    if validation is None:
        raise ConfigError("a safe policy is compared with single models on a validation split; give one")
    validation.require_labels("comparing with single models")
    fit = partial(fit_policy, method, calibrator=calibrator, safe=True)
    policy = fit(calibration, validation, rule, names)
    unfused, changes = _unfused(policy), []
    if unfused:
        changes.append(f"{', '.join(unfused)} not fused, for want of support")
    own, limit = _found(policy, validation, rule.objective), _limit(policy, validation, rule)
    single = _best_single(policy, validation, limit, rule.objective)
    if rule.threshold is None and own.behind(single, limit):
        anew = _best_within(policy, calibration, validation, limit, rule)
        if anew is not None and anew.threshold != policy.threshold:
            changes.append(f"threshold chosen anew, the best on {names[1]} within {limit:.4g} {policy.cost_unit}")
            policy, own = anew, _found(anew, validation, rule.objective)
    if single is not None and own.behind(single, limit):
        changes = [
            f"{single.name} alone, which has {100 * single.quality:.2f} % on {names[1]} at {single.cost:.4g} "
            f"{policy.cost_unit}; the chain has {100 * own.quality:.2f} % at {own.cost:.4g}"
        ]
        place = [calibration.models.index(single.name)]
        alone = calibration.of_models(place), validation.of_models(place)
        policy = fit(*alone, rule, names)
    choice = SafeChoice(
        models=calibration.models, unfused=unfused, limit=limit, says="; ".join(changes) or "nothing had to be changed"
    )
    guards = tuple(_stands(policy, guard) for guard in policy.guards)
    return policy.model_copy(update={"safe": choice, "guards": guards})


def require_safe_rule(rule: ThresholdRule) -> None:
    """Raise ConfigError unless a safe policy can choose its threshold by the rule."""
    if rule.certify is not None:
        raise ConfigError(
            "validation that has admitted fusions cannot certify a risk as well; leave --safe or --certify out"
        )


@dataclass(frozen=True, slots=True)
class _Found:
    """What somebody's answers have on validation.   quality: of the objective.   cost: mean per example."""

    name: str
    quality: float
    cost: float

    def behind(self, single: _Found | None, limit: float) -> bool:
        """Return whether it costs too much, or a single model is better, or as good and cheaper."""
        if self.cost > most_within(limit):
            return True
        if single is None or self.quality > single.quality:
            return False
        return self.quality < single.quality or most_within(single.cost) < self.cost


def _found(policy: Policy, validation: Chain, objective: Objective) -> _Found:
    answers = replay(policy, validation)
    quality = _quality(answers.predictions, validation, objective)
    return _Found("the chain", quality, float(answers.costs.mean()))


def _quality(predictions: Ints, validation: Chain, objective: Objective) -> float:
    return (accuracy if objective == "accuracy" else macro_f1)(predictions, validation.labels)


def _limit(policy: Policy, validation: Chain, rule: ThresholdRule) -> float:
    """Return what a policy may cost; with a threshold that is given, what it does cost."""
    if rule.budget is not None:
        return rule.budget
    if rule.threshold is not None:
        return float(replay(policy, validation).costs.mean())
    return float(validation.costs.means[-1])


def _best_single(policy: Policy, validation: Chain, limit: float, objective: Objective) -> _Found | None:
    """Return the best model within the limit, among equals the cheaper."""
    alone = answers_alone(policy, validation)
    found = [
        _Found(name, _quality(alone[:, place], validation, objective), float(validation.costs.means[place]))
        for place, name in enumerate(validation.models)
        if validation.costs.means[place] <= most_within(limit)
    ]
    return min(found, key=lambda one: (-one.quality, one.cost), default=None)


def _best_within(
    policy: Policy, calibration: Chain, validation: Chain, limit: float, rule: ThresholdRule
) -> Policy | None:
    """Choose the threshold anew, None where none is within the limit."""
    within = ThresholdRule(budget=limit, objective=rule.objective)
    try:
        anew = choose_threshold(policy, calibration, validation, within)
    except BudgetError:
        return None
    if rule.budget is not None:
        return anew
    # The limit was not asked for as a budget; the policy's file has it under safe.
    choice = ThresholdChoice(rule="best", objective=rule.objective, split=anew.threshold_choice.split)
    return anew.model_copy(update={"threshold_choice": choice})


def _unfused(policy: Policy) -> tuple[str, ...]:
    """Return the stages that a fit without guards would have fused."""
    if isinstance(policy, BasePolicy):
        return tuple(stage.name for stage in policy.stages if not stage.fused and (stage.complementarity_rate or 0) > 0)
    assert isinstance(policy, RFPolicy)
    return tuple(stage.name for stage in policy.stages if not stage.fused)


def _stands(policy: Policy, guard: Guard) -> Guard:
    """Return a guard, quiet where it speaks of a refusal: that is what want of support leads to here."""
    refused = isinstance(policy, BasePolicy) and any(
        stage.name == guard.stage and not stage.fused for stage in policy.stages
    )
    if guard.name == "fusion-within-noise" and refused:
        return guard.model_copy(update={"fired": False})
    return guard
