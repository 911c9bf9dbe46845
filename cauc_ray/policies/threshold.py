"""The threshold of a fitted policy: given, or chosen on validation; and what to expect of it, and of others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.certificates import EarlyAnswers, RiskLimit, certify, early_answers
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.sweep import Frontier, Objective
from cauc_ray.policies.checks import Measured, look
from cauc_ray.policies.evidence import (
    MOST_CURVE_POINTS,
    CurvePoint,
    RiskCertificate,
    ThresholdChoice,
)
from cauc_ray.policies.monitor import reference_of
from cauc_ray.policies.policy import Policy, check_budget, check_threshold
from cauc_ray.policies.trace import Trace, measure, trace_policy

AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """What decides the threshold: a given one, a budget (mean cost per example), a limit of risk, or none of these.

    With none, Base stops at the last model's calibration accuracy and RF at its best on validation.
    """

    threshold: float | None = None
    budget: float | None = None
    objective: Objective = "accuracy"
    certify: RiskLimit | None = None

    def __post_init__(self) -> None:
        if self.threshold is not None and self.budget is not None:
            raise ConfigError("give a budget or a threshold, not both: a budget chooses the threshold")
        if self.certify is not None and not self.threshold is self.budget is None:
            raise ConfigError("give a risk to certify, a budget or a threshold, not two of them: each decides it alone")
        if self.threshold is not None:
            check_threshold(self.threshold)
        if self.budget is not None:
            check_budget(self.budget)
        if self.objective not in ("accuracy", "macro-f1"):
            raise ConfigError(f"objective {self.objective!r} is none of accuracy, macro-f1")
        if self.objective != "accuracy" and (self.threshold is not None or self.certify is not None):
            raise ConfigError(
                "an objective chooses a threshold: give it with a budget, not with a threshold or a risk to certify"
            )


# What the paper has where nothing is given.
BY_DEFAULT = ThresholdRule()


def choose_threshold(policy: AnyPolicy, calibration: Chain, validation: Chain | None, rule: ThresholdRule) -> AnyPolicy:
    """Set the threshold that the rule gives, certifies or finds best on validation (paper, eq. 11); finish the policy.

    policy: at any threshold. Raises ConfigError without a validation split to choose on, DataError where its labels are
    missing, BudgetError where no operating point is as cheap as the budget, RiskError where no threshold's risk is
    certified.
    """
    if rule.threshold is not None:
        choice = ThresholdChoice(rule="given", objective=None, split=None)
        return set_threshold(policy, calibration, validation, rule.threshold, choice)
    if validation is None or policy.validation is None:
        raise ConfigError("choosing a threshold needs a validation split; give one, or give the threshold")
    validation.require_labels("choosing a threshold")
    swept = _sweep(policy, validation, rule.objective)
    if rule.certify is not None:
        threshold, choice = _certify(policy, calibration, validation, rule.certify, swept)
        return _finish(policy, calibration, validation, threshold, choice, swept)
    choice = ThresholdChoice(
        rule="best" if rule.budget is None else "budget",
        objective=rule.objective,
        split=policy.validation.split,
    )
    best = swept.frontier.best(rule.budget)
    return _finish(policy, calibration, validation, best.threshold, choice, swept)


def _certify(
    policy: AnyPolicy, calibration: Chain, validation: Chain, limit: RiskLimit, swept: _Swept
) -> tuple[float, ThresholdChoice]:
    """Return the certified threshold of most coverage. Calibration only decides what to test, and in which order."""
    if len(policy.stages) < 2:
        raise ConfigError("with one model nothing is answered early, whose risk could be certified; give two or more")
    on_validation = _early(swept.trace, validation)
    found = certify(_early(trace_policy(policy, calibration), calibration), on_validation, limit)
    plug_in = on_validation.plug_in(limit.risk)
    assert plug_in is not None  # what is certified at most so wrong is no more so on these rows
    assert policy.validation is not None
    certificate = RiskCertificate(
        risk=limit.risk,
        confidence=limit.confidence,
        n=found.n,
        n_accepted=found.n_accepted,
        n_wrong=found.n_wrong,
        upper_bound=found.upper_bound,
        plug_in_threshold=plug_in[0],
        plug_in_accepted=plug_in[1],
    )
    choice = ThresholdChoice(rule="certified", objective=None, split=policy.validation.split, certificate=certificate)
    return found.threshold, choice


def _early(trace: Trace, chain: Chain) -> EarlyAnswers:
    return early_answers(trace.confidences[:, :-1], trace.predictions[:, :-1] == chain.labels[:, None])


def set_threshold(
    policy: AnyPolicy,
    calibration: Chain,
    validation: Chain | None,
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


def _sweep(policy: AnyPolicy, validation: Chain, objective: Objective) -> _Swept:
    policy.check_chain(validation)
    trace = trace_policy(policy, validation, likeliest=True)
    return _Swept(trace, trace.frontier(validation, objective))


def _finish(
    policy: AnyPolicy,
    calibration: Chain,
    validation: Chain | None,
    threshold: float,
    choice: ThresholdChoice,
    swept: _Swept | None,
) -> AnyPolicy:
    """Return the policy at a threshold, with what to expect there and at others."""
    measured_on = validation if validation is not None and validation.labelled.any() else calibration
    split = (
        policy.calibration.split if measured_on is calibration or policy.validation is None else policy.validation.split
    )
    decided = type(policy)(**dict(policy) | {"threshold": threshold, "threshold_choice": choice})
    trace = trace_policy(decided, measured_on) if swept is None else swept.trace
    answered = trace.at(threshold, measured_on)
    expected = measure(answered, measured_on, split, with_f1=False)
    guards = look(decided, expected, Measured(measured_on, trace, answered), calibration)
    reference = None if swept is None else reference_of(answered, trace, measured_on, split)
    found = {"expected": expected, "guards": guards, "reference": reference, "curve": _curve(swept)}
    return type(policy)(**dict(decided) | found)


def _curve(swept: _Swept | None) -> tuple[CurvePoint, ...]:
    """Return the operating points that a policy's file keeps."""
    if swept is None:
        return ()
    best = swept.frontier.points().pareto(MOST_CURVE_POINTS)
    points = zip(best.settings.tolist(), best.cost.tolist(), best.quality.tolist(), strict=True)
    return tuple(CurvePoint(threshold=t, cost=cost, quality=quality) for t, cost, quality in points)
