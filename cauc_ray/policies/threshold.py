"""The threshold of a fitted policy, given or chosen on validation, and the expected results at it and at others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from cauc_ray.errors import BudgetError, ConfigError, DataError, OptionError
from cauc_ray.numbers.betting import is_mean_below
from cauc_ray.numbers.chain import Chain, ChainExamples, cost_text
from cauc_ray.numbers.gains import Gains
from cauc_ray.numbers.guarantees import (
    N_STEPS,
    CertifiedThreshold,
    EarlyAnswers,
    RiskLimit,
    certify,
    early_answers,
    strongest,
    tested,
)
from cauc_ray.numbers.rows import ascending
from cauc_ray.numbers.segments import Segments
from cauc_ray.numbers.sweep import Frontier, Objective, OperatingPoints
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.checks import check_policy
from cauc_ray.policies.evidence import (
    MOST_CURVE_POINTS,
    CurvePoint,
    Decision,
    Measures,
    RiskCertificate,
    ThresholdChoice,
)
from cauc_ray.policies.monitor import reference_of
from cauc_ray.policies.policy import Policy, check_number
from cauc_ray.policies.trace import Trace, answers_alone, measure, measure_offline, trace_policy

AnyPolicy = TypeVar("AnyPolicy", bound=Policy)

# What a stage compares: its confidence with one threshold, or the gain of going on per cost with a price.
Compared: TypeAlias = Literal["confidence", "gain"]


@dataclass(frozen=True, slots=True)
class ThresholdRule:
    """How to choose the threshold: at most one of a threshold, a budget, a price and a risk limit.

    Without any of them, Base stops at the last model's calibration accuracy and RF at its best on validation.

    Attributes:
        threshold: The threshold itself.
        budget: Largest allowed mean cost per example.
        objective: Quality that the choice maximises.
        certify: Limit of the risk of early answers.
        price: Price of a unit of cost, in errors: the threshold is 1 minus the last model's error on calibration minus
            the price of its call (paper, tau* = 1 - r - lambda c). With more than two models, the error is that of the
            last stage's answers, which may be fused, and the price that of all calls after the first. Gains, if they
            decide, are compared with it.
        compare: What each stage of RF compares; Base and stacked cascades leave no choice.
        confidence: Confidence that new inputs keep the budget; None where it is kept on validation alone.
        n_candidates: Number of policies that validation chooses from, all of which must keep it together.
        segments: Those of calibration and of validation in each of which the risk is certified; none for all rows.
    """

    threshold: float | None = None
    budget: float | None = None
    objective: Objective = "accuracy"
    certify: RiskLimit | None = None
    price: float | None = None
    compare: Compared = "confidence"
    confidence: float | None = None
    n_candidates: int = 1
    segments: tuple[Segments, ...] = ()

    def __post_init__(self) -> None:
        if self.threshold is not None and self.budget is not None:
            raise OptionError("give {budget} or {threshold}, not both: a budget chooses the threshold")
        if sum(rule is not None for rule in (self.certify, self.budget, self.threshold, self.price)) > 1:
            raise OptionError("give one of {certify}, {budget}, {threshold} and {price}: each decides it alone")
        if self.threshold is not None:
            check_number("threshold", self.threshold)
        if self.budget is not None:
            check_number("budget", self.budget)
        if self.objective not in ("accuracy", "macro-f1"):
            raise ConfigError(f"unknown objective {self.objective!r}; expected accuracy or macro-f1")
        if self.objective != "accuracy" and (self.threshold, self.certify, self.price) != (None, None, None):
            raise ConfigError(
                "an objective chooses a threshold: give it with a budget, not with a threshold, a price or a risk to "
                "certify"
            )


# The paper's default.
BY_DEFAULT = ThresholdRule()


def choose_threshold(
    policy: AnyPolicy,
    calibration: Chain,
    validation: Chain | None,
    rule: ThresholdRule,
    reference: float | None = None,
) -> AnyPolicy:
    """Set the threshold that the rule gives, certifies, or that is best on validation (paper, eq. 11).

    A threshold that validation has chosen looks better on it than on new examples: the expected accuracy is then that
    of each half at the threshold of the other.

    Args:
        policy: Policy fitted on these splits, at any threshold; its gains, if any, choose the thresholds of the stages.
        calibration: Split that the policy was fitted on.
        validation: Split to choose the threshold on; None if the rule needs none.
        rule: How to choose the threshold.
        reference: Threshold if the rule leaves it open; None for the best on validation.

    Returns:
        The policy with the expected results at its threshold, and at others.

    Raises:
        ConfigError: The validation split is missing, and the rule needs it.
        DataError: Labels are missing.
        BudgetError: No operating point is within the budget.
        RiskError: No threshold is certified.
    """
    fixed, gains = reference if rule == BY_DEFAULT else rule.threshold, policy.gains
    if rule.price is not None and gains is None:
        fixed = _of_price(policy, calibration, rule.price)
    by_price = rule.price is not None and gains is not None
    if fixed is not None:
        policy.require_threshold(fixed)
    elif not by_price:
        _require_labelled(validation)
    measured_on, split = calibration, policy.calibration.split
    if validation is not None and validation.labelled.any():
        assert policy.validation is not None
        measured_on, split = validation, policy.validation.split
    policy.check_chain(measured_on)
    # Used to choose a threshold, to measure others, and as the reference for later answers.
    chosen_on = measured_on is validation and bool(measured_on.labelled.all())
    trace = trace_policy(policy, measured_on, likeliest=chosen_on)
    frontier = trace.frontier(measured_on, rule.objective) if chosen_on else None

    held_out: Bools | None = None
    if fixed is not None or by_price:
        threshold = -(rule.price or 0.0) if fixed is None else fixed
        choice = _without_validation(rule, policy.calibration.split)
    elif rule.certify is not None:
        threshold, certificate = _certify(policy, calibration, trace, measured_on, rule)
        choice = ThresholdChoice(rule="certified", objective=None, split=split, certificate=certificate)
    else:
        assert frontier is not None

        if rule.confidence is not None and not policy.in_turn:
            raise ConfigError(
                f"method {policy.method} does not call models one after another, so its cost need not rise with the "
                "threshold: give the budget without a confidence"
            )
        choices = sure_points(trace, measured_on, frontier, rule)
        point = _point(policy, choices, rule.budget)
        threshold = float(frontier.settings[point])
        halves = Halves.of(policy, trace, measured_on, rule.objective)
        if halves is not None:
            held_out = halves.right(trace, measured_on, float(frontier.cost[point]), threshold)
        choice = ThresholdChoice(
            rule="best" if rule.budget is None else "budget",
            objective=rule.objective,
            split=split,
            confidence=rule.confidence,
        )

    decided = _decided(policy, threshold, choice, trace if chosen_on else None, gains if fixed is None else None)
    curve = () if frontier is None else curve_points(frontier.pareto(MOST_CURVE_POINTS), trace, gains)
    return measured(decided, trace, measured_on, split, calibration, curve, held_out)


def _decided(
    policy: AnyPolicy, setting: float, choice: ThresholdChoice, trace: Trace | None, gains: Gains | None
) -> AnyPolicy:
    """Return a policy at a setting.

    Args:
        policy: Policy at any threshold.
        setting: Threshold, or minus a price.
        choice: How it was chosen.
        trace: As for thresholds_at.
        gains: Gains of a policy whose setting is minus a price; None for a threshold.
    """
    changes: dict[str, Any] = {"threshold_choice": choice, "gains": None}
    if gains is None:
        changes["threshold"] = policy.each_stage(setting)
    else:
        (changes["threshold"],) = thresholds_at([setting], trace, gains)
        changes["decision"] = Decision(at=-setting)
    return type(policy)(**dict(policy) | changes)


def _require_labelled(validation: Chain | None) -> None:
    if validation is None:
        raise ConfigError(
            "choosing a threshold needs a validation split; give one, or a share of the calibration split "
            "(--validation 0.5), or give the threshold"
        )
    validation.require_labels("choosing a threshold")


def _without_validation(rule: ThresholdRule, calibration: str) -> ThresholdChoice:
    """Return the record of a threshold that validation has not chosen.   calibration: name of the split."""
    if rule.price is not None:
        return ThresholdChoice(rule="price", objective=None, split=calibration, price=rule.price)
    if rule.threshold is None:
        return ThresholdChoice(rule="reference-accuracy", objective=None, split=calibration)
    return ThresholdChoice(rule="given", objective=None, split=None)


def _of_price(policy: Policy, calibration: Chain, price: float) -> float:
    """Return the confidence below which going on is worth its price (paper, tau* = 1 - r - lambda c)."""
    of_paper = len(policy.stages) <= 2
    last = answers_alone(policy, calibration) if of_paper else trace_policy(policy, calibration).predictions
    accuracy = float(np.mean(last[:, -1] == calibration.labels))
    return max(0.0, accuracy - price * sum(stage.cost for stage in policy.stages[-1 if of_paper else 1 :]))


def sure_points(trace: Trace, chain: ChainExamples, frontier: Frontier, rule: ThresholdRule) -> OperatingPoints:
    """Return the operating points, by rising cost, at which new inputs keep a budget with the rule's confidence.

    Each row's cost rises with the threshold, so the evidence for a mean cost within the budget falls: up to the first
    point without enough of it, all are within the budget unless that evidence is false at the one threshold where the
    mean cost of all inputs reaches the budget (Bates et al., Journal of the ACM 2021). No correction is needed for
    the number of points.

    Args:
        trace: Trace of a policy that calls its models one after another, on validation.
        chain: Validation.
        frontier: Its operating points.
        rule: Any rule; without a confidence all points are returned.

    Raises:
        BudgetError: There is no such point.
    """
    if rule.confidence is None or rule.budget is None:
        return frontier
    highest = float(np.max(chain.costs.of_calls(trace.calls)[..., -1]))
    confidence = 1 - (1 - rule.confidence) / rule.n_candidates
    low, high = 0, len(frontier.settings)
    while low < high:
        middle = (low + high) // 2
        costs = trace.answers(float(frontier.settings[middle])).costs(chain)
        if rule.budget >= highest or is_mean_below(costs, rule.budget, highest, confidence):
            low = middle + 1
        else:
            high = middle
    if not low:
        raise BudgetError(
            f"no operating point is shown to cost at most {cost_text(rule.budget, frontier.unit, 6)} at "
            f"{100 * rule.confidence:g} % confidence; the cheapest costs {frontier.cost[0]:g} on {len(chain):,} "
            "examples: raise the budget, allow less confidence, or label more validation examples"
        )
    return frontier.some(np.arange(low))


def _point(policy: Policy, frontier: OperatingPoints, budget: float | None) -> int:
    """Return which operating point a budget chooses, or its absence. Raises BudgetError if none is within it."""
    if policy.spends_budget and budget is not None:
        return frontier.index_of_most_expensive(budget)
    return frontier.index_of_best(budget)


@dataclass(frozen=True, slots=True)
class Halves:
    """Two random halves of validation, each with what the other one would choose.

    Attributes:
        policy: Policy that answers them.
        rows: Rows of each half.
        frontiers: Operating points of each half.
    """

    policy: Policy
    rows: tuple[Ints, Ints]
    frontiers: tuple[Frontier, Frontier]

    @classmethod
    def of(cls, policy: Policy, trace: Trace, validation: Chain, objective: Objective) -> Halves | None:
        """Cut validation into halves; None for a single row.   trace: of the policy on validation."""
        if len(validation) < 2:
            return None
        first, second = random_halves(len(validation))
        frontiers = (trace.frontier(validation, objective, first), trace.frontier(validation, objective, second))
        return cls(policy, (first, second), frontiers)

    def right(self, trace: Trace, validation: Chain, budget: float, threshold: float) -> Bools:
        """Return whether each row's answer is right at the threshold that the other half chooses, bool (N,).

        Args:
            trace: Trace of the policy on validation.
            validation: All rows, labelled.
            budget: Mean cost per example of the operating point that all of validation chooses.
            threshold: Threshold of that point, for a half without any within the budget.
        """
        thresholds = np.full(sum(map(len, self.rows)), threshold)
        for frontier, rest in zip(self.frontiers, self.rows[::-1], strict=True):
            with suppress(BudgetError):
                thresholds[rest] = frontier.settings[_point(self.policy, frontier, budget)]
        right: Bools = trace.answers(thresholds).predictions == validation.labels
        return right


def random_halves(n: int) -> tuple[Ints, Ints]:
    """Return the ascending rows of two random halves of n examples, n at least 2."""
    order = np.random.default_rng(0).permutation(n)
    return ascending(order[: n // 2], n), ascending(order[n // 2 :], n)


def thresholds_at(settings: Sequence[float], trace: Trace | None, gains: Gains) -> list[tuple[float, ...]]:
    """Return the thresholds of the stages at settings, which are minus prices.

    trace: on validation, between whose confidences they lie; None for the least confidences that stop at the prices.
    """
    if trace is None:
        return [gains.thresholds(-setting) for setting in settings]
    return [tuple(row) for row in gains.between(np.array(settings), trace.confidences).tolist()]


def curve_points(
    points: OperatingPoints, trace: Trace | None = None, gains: Gains | None = None
) -> tuple[CurvePoint, ...]:
    """Return operating points as a policy's file has them.

    Args:
        points: The operating points; with gains, their settings are minus prices.
        trace: As for thresholds_at.
        gains: Gains of a policy whose thresholds prices choose; None for any other.
    """
    settings = points.settings.tolist()
    prices: list[float | None] = [None] * len(settings)
    thresholds: list[Any] = settings
    if gains is not None:
        prices, thresholds = [-setting for setting in settings], thresholds_at(settings, trace, gains)
    rows = zip(thresholds, prices, points.cost.tolist(), points.quality.tolist(), strict=True)
    return tuple(
        CurvePoint(threshold=threshold, price=price, cost=cost, quality=quality)
        for threshold, price, cost, quality in rows
    )


def measured(
    policy: AnyPolicy,
    trace: Trace,
    chain: Chain,
    split: str,
    calibration: Chain,
    curve: tuple[CurvePoint, ...],
    held_out: Bools | None = None,
) -> AnyPolicy:
    """Return a policy with its expected results at its threshold, and with its curve.

    Args:
        policy: Policy at its threshold.
        trace: Trace of the chain.
        chain: Examples of the split.
        split: Name of the split.
        calibration: Split that the policy was fitted on.
        curve: Points on the split, if all of its examples have labels, and the trace its likeliest options; these are
            then the reference for later answers.
        held_out: Whether each row's answer is right by what was chosen without it, bool (N,); None if the policy's
            threshold was not chosen on the split.
    """
    answered = trace.at(policy.threshold, chain)
    measures = measure(answered, chain, split, with_f1=False)
    entries: dict[str, Any] = {
        "expected": expected_of(measures) if held_out is None else without_optimism(measures, held_out),
        "on_selection": None if held_out is None else measures,
        **check_policy(policy, measures, trace, answered, chain, calibration),
        "offline": measure_offline(trace, policy.threshold, chain) if policy.in_turn else None,
        "curve": curve,
    }
    if curve:
        entries["reference"] = reference_of(answered, trace, chain, split)
    return type(policy)(**dict(policy) | entries)


def without_optimism(measures: Measures, held_out: Bools) -> Measures:
    """Return the expected results of a policy on new examples, with the accuracy of what was chosen without them.

    Its costs, and which stages answer, do not depend on labels: they stay.

    Args:
        measures: Results of the policy on rows that chose it.
        held_out: As for measured.
    """
    return measures.model_copy(update={"accuracy": measures.to_come(held_out=float(held_out.mean()))})


def expected_of(measures: Measures) -> Measures:
    """Return results on rows that chose nothing as what to expect of as many new examples."""
    return measures.model_copy(update={"accuracy": measures.to_come()})


def _certify(
    policy: Policy,
    calibration: Chain,
    trace: Trace,
    validation: Chain,
    rule: ThresholdRule,
) -> tuple[float, RiskCertificate]:
    """Return the certified threshold of most coverage. Calibration determines what is tested, and in which order."""
    if len(policy.stages) < 2:
        raise ConfigError("a certified risk is that of early answers, which need two models or more")
    if policy.ends[-1] != len(policy.stages) - 1:
        raise ConfigError(
            f"a certified risk is that of answers before the last model, which is the most expensive of method "
            f"{policy.method}: give the models by rising cost"
        )
    on_validation = _early(trace, validation)
    if not on_validation.n_accepted.any():
        raise OptionError(f"method {policy.method} answers nothing before the last model; leave {{certify}} out")
    on_calibration = trace_policy(policy, calibration)
    segments: dict[str, tuple[EarlyAnswers, EarlyAnswers]] = {}
    if rule.segments:
        pairs = zip(rule.segments, (calibration, validation), strict=True)
        by_calibration, by_validation = (of.rows(chain.example_ids) for of, chain in pairs)
        for name, rows in by_validation.items():
            if name not in by_calibration:
                raise DataError(f"segment {name!r} of column {rule.segments[0].column!r} has no calibration example")
            segments[name] = _early(on_calibration, calibration, by_calibration[name]), _early(trace, validation, rows)
    assert rule.certify is not None
    limit = rule.certify
    certified = certify(_early(on_calibration, calibration), on_validation, limit, segments)
    certificate = certificate_of(limit, certified, on_validation.plug_in(limit.risk))
    by = rule.segments[0].column if rule.segments else None
    least = on_validation.least_deferred(limit.risk)
    return certified.threshold, certificate.model_copy(update={"by": by, "least_deferred": least})


def certificate_of(
    limit: RiskLimit, certified: CertifiedThreshold, plug_in: tuple[float, int] | None
) -> RiskCertificate:
    """Return a certificate as a policy's file has it.   plug_in: a threshold and its coverage in rows."""
    assert plug_in is not None  # the observed risk of a certified threshold is within the limit
    figures = asdict(limit) | asdict(certified)
    del figures["threshold"]
    return RiskCertificate(**figures, plug_in_threshold=plug_in[0], plug_in_accepted=plug_in[1])


def certify_some(
    calibration: tuple[Ints, Ints], validation: tuple[Ints, Ints], settings: Floats, n: int, limit: RiskLimit
) -> tuple[int, RiskCertificate]:
    """Return the certified one of P points of most coverage, and its certificate.

    Args:
        calibration: Numbers of rows that each point accepts and of wrong ones among them; they decide which points are
            tested, and in which order.
        validation: The same numbers of validation.
        settings: Settings of the points, float64 (P,).
        n: Rows of validation.
        limit: Risk limit to certify.

    Raises:
        RiskError: No point is certified.
    """
    (accepted, wrong), (n_accepted, n_wrong) = calibration, validation
    ranks = np.argsort(accepted, kind="stable")
    ranks = ranks[np.unique(np.linspace(0, len(ranks) - 1, N_STEPS).round().astype(np.int64))]
    sequence = ranks[strongest(accepted[ranks], wrong[ranks], limit) :]
    certified = tested(settings[sequence], n_accepted[sequence], n_wrong[sequence], n, limit, {})
    within = np.flatnonzero((n_accepted > 0) & (n_wrong <= limit.risk * n_accepted))
    most = within[n_accepted[within].argmax()]
    plug_in = float(settings[most]), int(n_accepted[most])
    # The first in order with these figures: all up to the last are certified.
    same = settings == certified.threshold
    same &= (n_accepted == certified.n_accepted) & (n_wrong == certified.n_wrong)
    return int(sequence[same[sequence]][0]), certificate_of(limit, certified, plug_in)


def _early(trace: Trace, chain: Chain, rows: Ints | slice = slice(None)) -> EarlyAnswers:
    return early_answers(trace.compared[rows, :-1], trace.predictions[rows, :-1] == chain.labels[rows, None])
