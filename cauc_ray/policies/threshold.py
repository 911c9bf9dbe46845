"""The threshold of a fitted policy: given, or chosen on validation; and what to expect of it, and of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.sweep import Frontier, Objective
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.policies.policy import (
    MOST_CURVE_POINTS,
    CurvePoint,
    Expectation,
    MeasuredShare,
    StageExpectation,
    ThresholdChoice,
    check_budget,
    check_threshold,
)
from cauc_ray.policies.replay import Measures, measure, measure_replay
from cauc_ray.policies.trace import Examples, PolicyCascade, Trace

AnyPolicy = TypeVar("AnyPolicy", BasePolicy, RFPolicy)


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """What decides the threshold: a given one, a budget (mean cost per example), or neither.

    With neither, Base stops at the last model's calibration accuracy and RF at its best on validation.
    """

    threshold: float | None = None
    budget: float | None = None
    objective: Objective = "accuracy"

    def __post_init__(self) -> None:
        if self.threshold is not None and self.budget is not None:
            raise ConfigError("give a budget or a threshold, not both: a budget chooses the threshold")
        if self.threshold is not None:
            check_threshold(self.threshold)
        if self.budget is not None:
            check_budget(self.budget)
        if self.objective not in ("accuracy", "macro-f1"):
            raise ConfigError(f"objective {self.objective!r} is none of accuracy, macro-f1")
        if self.threshold is not None and self.objective != "accuracy":
            raise ConfigError("an objective chooses a threshold: give it with a budget, not with a threshold")


# What the paper has where nobody gives anything.
BY_DEFAULT = ThresholdRule()


def choose_threshold(
    policy: AnyPolicy, calibration: ChainLogits, validation: ChainLogits | None, rule: ThresholdRule
) -> AnyPolicy:
    """Set the threshold that the rule gives or that is best on validation (paper, eq. 11), and finish the policy.

    policy: all but its threshold and what that entails. Raises ConfigError without a validation split to choose on,
    DataError where its labels are missing, BudgetError where no operating point is as cheap as the budget.
    """
    if rule.threshold is not None:
        choice = ThresholdChoice(rule="given", objective=None, split=None)
        return set_threshold(policy, calibration, validation, rule.threshold, choice)
    if validation is None or policy.validation is None:
        raise ConfigError("choosing a threshold needs a validation split; give one, or give the threshold")
    validation.require_labels("choosing a threshold")
    swept = _sweep(policy, validation, rule.objective)
    choice = ThresholdChoice(
        rule="best" if rule.budget is None else "budget",
        objective=rule.objective,
        split=policy.validation.split,
    )
    best = swept.frontier.best(rule.budget)
    return _finish(policy, calibration, validation, best.threshold, choice, swept)


def set_threshold(
    policy: AnyPolicy,
    calibration: ChainLogits,
    validation: ChainLogits | None,
    threshold: float,
    choice: ThresholdChoice,
) -> AnyPolicy:
    """Set a threshold that needs no choosing, and finish the policy as choose_threshold does."""
    swept = None
    if validation is not None and validation.labelled.all():
        swept = _sweep(policy, validation, "accuracy")
    return _finish(policy, calibration, validation, threshold, choice, swept)


@dataclass(frozen=True, slots=True)
class _Swept:
    """What a policy does on the validation split, whatever its threshold."""

    trace: Trace
    frontier: Frontier


def _sweep(policy: AnyPolicy, validation: ChainLogits, objective: Objective) -> _Swept:
    policy.check_chain(validation)
    trace = PolicyCascade(policy).trace(Examples(validation))
    return _Swept(trace, trace.frontier(validation, objective))


def _finish(
    policy: AnyPolicy,
    calibration: ChainLogits,
    validation: ChainLogits | None,
    threshold: float,
    choice: ThresholdChoice,
    swept: _Swept | None,
) -> AnyPolicy:
    """Set the threshold, measure what to expect of it and of others, and check the whole as a file would be."""
    measured_on = validation if validation is not None and validation.labelled.any() else calibration
    split = (
        policy.calibration.split if measured_on is calibration or policy.validation is None else policy.validation.split
    )
    decided = policy.model_copy(update={"threshold": threshold, "threshold_choice": choice})
    measures = _measure(decided, measured_on, swept)
    assert measures.accuracy is not None
    accuracy = MeasuredShare.of(measures.accuracy)
    assert accuracy is not None
    expected = Expectation(
        split=split,
        n=measures.n,
        accuracy=accuracy,
        cost=measures.cost,
        relative_cost=measures.relative_cost,
        stages=tuple(
            StageExpectation(
                name=stage.name,
                reached=stage.reached,
                answered=stage.answered,
                coverage=MeasuredShare.of(stage.coverage),
                accepted_accuracy=MeasuredShare.of(stage.accepted_accuracy),
            )
            for stage in measures.stages
        ),
    )
    complete = decided.model_copy(update={"expected": expected, "curve": _curve(swept)})
    return type(policy).model_validate(complete.model_dump())


def _measure(policy: AnyPolicy, chain: ChainLogits, swept: _Swept | None) -> Measures:
    """Measure a policy on a chain, from what is known of it there if it was swept."""
    if swept is None:
        return measure_replay(policy, chain)[1]
    predictions, stops = swept.trace.answers(policy.threshold).predictions, swept.trace.stops(policy.threshold)
    return measure(policy.models, predictions, stops, chain.labels, chain.labelled, chain.costs)


def _curve(swept: _Swept | None) -> tuple[CurvePoint, ...]:
    """Return the operating points that a policy's file keeps."""
    if swept is None:
        return ()
    best = swept.frontier.points().pareto(MOST_CURVE_POINTS)
    points = zip(best.settings.tolist(), best.cost.tolist(), best.quality.tolist(), strict=True)
    return tuple(CurvePoint(threshold=t, cost=cost, quality=quality) for t, cost, quality in points)
