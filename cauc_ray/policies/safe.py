"""The best guarded policy: fused only where that is supported, and no worse on validation than a single model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from cauc_ray.errors import BudgetError, ConfigError
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.metrics import accuracy, macro_f1
from cauc_ray.numbers.sweep import most_within
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.policies.evidence import Guard, SafeChoice, ThresholdChoice
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import ThresholdRule, choose_threshold
from cauc_ray.policies.trace import answers_alone, replay

# Fits a method on two splits by a rule; with safe=True it admits only fusions that are supported.
Fit: TypeAlias = Callable[..., Policy]


def fit_safe(fit: Fit, calibration: Chain, validation: Chain | None, rule: ThresholdRule) -> Policy:
    """Fit a policy that guards its fusions and falls back on a single model, and record what that has changed.

    A fusion is admitted where its gain over the stage's own answers is established on validation (numbers.intervals);
    for Base, whose models are fused at once, that of each one on calibration too, where complementarity is counted.
    Stages whose fusion is not admitted answer by themselves.
    Without a budget or a threshold the policy may cost no more on validation than always calling the largest model.
    A threshold that leaves it behind a single model within that limit, or within the budget, is chosen anew as the best
    within it, and where that is behind too, the chain of that model alone is published. A threshold that is given
    stays; the policy is then compared with the models that cost no more than it does.
    Errors are those of the fit; validation is needed, with all of its labels.
    """
    require_safe_rule(rule)
    if validation is None:
        raise ConfigError("a safe policy is compared with single models on a validation split; give one")
    validation.require_labels("comparing with single models")
    labels, costs = validation.labels, validation.costs.means
    quality = accuracy if rule.objective == "accuracy" else macro_f1

    def found(policy: Policy) -> _Found:
        answers = replay(policy, validation)
        return _Found("the chain", quality(answers.predictions, labels), float(answers.costs.mean()))

    policy = fit(calibration, validation, rule, safe=True)
    assert policy.validation is not None
    own, split, unit = found(policy), policy.validation.split, policy.cost_unit
    unfused, changes = _unfused(policy), []
    if unfused:
        changes.append(f"{', '.join(unfused)} not fused: no gain is established")
    # A threshold that is given may cost what it does.
    limit = rule.budget
    if limit is None:
        limit = float(costs[-1]) if rule.threshold is None else own.cost
    alone = zip(validation.models, answers_alone(policy, validation).T, costs.tolist(), strict=True)
    singles = [_Found(name, quality(of, labels), cost) for name, of, cost in alone if cost <= most_within(limit)]
    # Among equals the cheaper.
    single = min(singles, key=lambda one: (-one.quality, one.cost), default=None)
    if rule.threshold is None and own.behind(single, limit):
        anew = _best_within(policy, calibration, validation, limit, rule)
        if anew is not None and anew.threshold != policy.threshold:
            changes.append(f"threshold chosen anew, the best on {split} within {limit:.4g} {unit}")
            policy, own = anew, found(anew)
    if single is not None and own.behind(single, limit):
        changes = [
            f"{single.name} alone, which has {100 * single.quality:.2f} % on {split} at {single.cost:.4g} "
            f"{unit}; the chain has {100 * own.quality:.2f} % at {own.cost:.4g}"
        ]
        own_index = [calibration.models.index(single.name)]
        policy = fit(calibration.of_models(own_index), validation.of_models(own_index), rule, safe=True)
    choice = SafeChoice(
        models=calibration.models, unfused=unfused, limit=limit, says="; ".join(changes) or "nothing had to be changed"
    )
    guards = tuple(_without_refusals(policy, guard) for guard in policy.guards)
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


def _without_refusals(policy: Policy, guard: Guard) -> Guard:
    """Return a guard, without its warning where the fusion in question was refused for it."""
    refused = isinstance(policy, BasePolicy) and any(
        stage.name == guard.stage and not stage.fused for stage in policy.stages
    )
    if guard.name == "fusion-within-noise" and refused:
        return guard.model_copy(update={"fired": False})
    return guard
