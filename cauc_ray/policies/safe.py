"""Safe fits, which test fusions and fall back on single models."""

from __future__ import annotations

from dataclasses import dataclass

from cauc_ray.errors import BudgetError, ConfigError, OptionError
from cauc_ray.numbers.chain import Chain, cost_text
from cauc_ray.numbers.metrics import accuracy, macro_f1
from cauc_ray.numbers.sweep import most_within
from cauc_ray.policies.evidence import SafeChoice, ThresholdChoice
from cauc_ray.policies.method import Fit
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import ThresholdRule, choose_threshold
from cauc_ray.policies.trace import answers_alone, replay


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
    unfused, changes = policy.unfused, []
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
            changes.append(f"another threshold chosen, the best on {split} within {cost_text(limit, unit)}")
            policy, cascade = anew, results_of(anew)
    if single is not None and cascade.behind(single, limit):
        changes = [
            f"{single.name} alone, which has {100 * single.quality:.2f} % on {split} at "
            f"{cost_text(single.cost, unit)}; the chain has {100 * cascade.quality:.2f} % at {cascade.cost:.4g}"
        ]
        single_index = [calibration.models.index(single.name)]
        policy = fit(calibration.of_models(single_index), validation.of_models(single_index), rule, safe=True)
    choice = SafeChoice(
        models=calibration.models, unfused=unfused, limit=limit, message="; ".join(changes) or "no change was needed"
    )
    return policy.model_copy(update={"safe": choice})


def require_safe_rule(rule: ThresholdRule) -> None:
    """Raise ConfigError unless a safe policy can choose its threshold by the rule."""
    if rule.price is not None:
        raise OptionError(
            "a price decides a threshold that a safe policy may have to move; leave {safe} or {price} out"
        )
    if rule.certify is not None:
        raise OptionError("{safe} and {certify} cannot be combined: both need validation; leave one of them out")


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
