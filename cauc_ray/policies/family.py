"""Fitted policies with their operating points on validation: what is chosen there, and what that gives elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from operator import is_
from typing import Any, Literal, TypeAlias

import numpy as np

from cauc_ray.errors import BudgetError, ConfigError, OptionError
from cauc_ray.numbers.chain import Chain, ChainLogits, ChainPart
from cauc_ray.numbers.guarantees import RiskLimit
from cauc_ray.numbers.metrics import macro_f1
from cauc_ray.numbers.sweep import STOP_NONE, Objective, OperatingPoints, reached_shares
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import MOST_CURVE_POINTS, RiskCertificate, ThresholdChoice
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.solved import SolvedPolicy
from cauc_ray.policies.threshold import (
    BY_DEFAULT,
    ThresholdRule,
    certify_some,
    choose_threshold,
    curve_points,
    measured,
    random_halves,
    without_optimism,
)
from cauc_ray.policies.trace import Answers, Examples, Trace, of_rows, places_in, trace_policy, with_embedding_paid

# From a solution's numbers to the step at which each row stops, int (N,).
Route: TypeAlias = Callable[[tuple[float, ...]], Ints]


@dataclass(frozen=True, slots=True)
class Control:
    """Answers that no policy can give, such as those of methods that read labels or texts.

    Attributes:
        trace: Answers examples, at every step.
        threshold: Threshold without a budget; STOP_NONE for the best on validation.
        solutions: Numbers that decide, by rising cost; empty where one threshold does.
        route: From examples to what decides by such numbers.
        spends_budget: Whether a budget is for the most expensive point within it, not the best.
    """

    trace: Callable[[Examples], Trace]
    threshold: float = STOP_NONE
    solutions: tuple[tuple[float, ...], ...] = ()
    route: Callable[[Examples], Route] | None = None
    spends_budget: bool = False


# A policy at a threshold that no row reaches takes the best on validation without a budget.
Member: TypeAlias = Policy | Control


@dataclass(frozen=True, slots=True)
class Curve:
    """A method's results on labelled examples at P settings; float64 (P,) each.

    Attributes:
        settings: The settings.
        cost: Mean cost of an example.
        accuracy: Share of right answers.
        macro_f1: Unweighted mean of the classes' F1.
        last_share: Share of the examples that called the last model.
    """

    settings: Floats
    cost: Floats
    accuracy: Floats
    macro_f1: Floats
    last_share: Floats


@dataclass(slots=True)
class _Latest:
    """Members' answers to the examples that came last, which a curve and several settings are read from.

    Attributes:
        arrays: What members read of the examples.
        traces: The answers by the member's id.
    """

    arrays: tuple[Any, ...] = ()
    traces: dict[int, Trace] = field(default_factory=dict)

    def are(self, arrays: tuple[Any, ...]) -> bool:
        """Return whether these are the same arrays."""
        return len(arrays) == len(self.arrays) and all(map(is_, arrays, self.arrays))


@dataclass(frozen=True)
class Family:
    """Policies of one method, and their operating points on validation.

    A setting is the threshold of a lone policy; of several, or where each stage has a threshold, the number of a point.

    Attributes:
        members: Fitted policies, or controls.
        validation: Examples that settings are chosen on.
        note: How the method differs from the published one, for tables; empty if it does not.
        sees_labels: Whether members use the labels.
        reading: Changes examples before members read them, as recalibration does.
        chooser: Family whose points are chosen among; None for its own.
        refit: Fits the method anew with other validation examples.
    """

    members: Sequence[Member]
    validation: Examples
    note: str = ""
    sees_labels: bool = False
    reading: Callable[[Examples], Examples] | None = None
    chooser: Family | None = None
    refit: Callable[[Examples], Family] | None = None

    @property
    def has_reference(self) -> bool:
        """Return whether its setting without a budget is Base's reference accuracy, on logits as they are."""
        first = (self.chooser or self).members[0]
        return (
            self.reading is None and isinstance(first, Policy) and first.threshold_choice.rule == "reference-accuracy"
        )

    @cached_property
    def traces(self) -> list[Trace]:
        """Return the members' answers on validation."""
        return [self._trace(member, self.validation) for member in self.members]

    @cached_property
    def frontiers(self) -> list[OperatingPoints]:
        """Return the members' operating points by accuracy."""
        return self._frontiers("accuracy")

    def _frontiers(self, objective: Objective) -> list[OperatingPoints]:
        chain = self.validation.chain
        frontiers: list[OperatingPoints] = []
        for index, (member, trace) in enumerate(zip(self.members, self.traces, strict=True)):
            if not solutions_of(member):
                frontiers.append(trace.frontier(chain, objective))
                continue
            curve = self._solved_curve(index, trace, self.validation, np.arange(len(solutions_of(member))))
            quality = curve.accuracy if objective == "accuracy" else curve.macro_f1
            frontiers.append(OperatingPoints(curve.settings, curve.cost, quality, chain.costs.unit))
        return frontiers

    @cached_property
    def points(self) -> OperatingPoints:
        """Return the results on validation at every setting."""
        if self.chooser is not None:
            return self.chooser.points
        if not self.is_numbered:
            return self.frontiers[0]
        cost, quality = (
            np.concatenate([getattr(frontier, name) for frontier in self.frontiers]) for name in ("cost", "quality")
        )
        return OperatingPoints(np.arange(len(cost), dtype=np.float64), cost, quality, self.frontiers[0].unit)

    @property
    def default(self) -> float:
        """Return the setting without a budget."""
        threshold = self.members[0].threshold
        if self.is_numbered or threshold == STOP_NONE:
            return float(self.points.settings[self.points.index_of_best()])
        assert not isinstance(threshold, tuple)
        return threshold

    def setting(self, budget: float, points: OperatingPoints | None = None) -> float | None:
        """Return the setting for a budget, a mean cost per example on validation; None if there is only one.

        Args:
            budget: The budget.
            points: Points to choose among, in place of its own.

        Raises:
            BudgetError: No point is within the budget.
        """
        points = points or self.points
        if self.sees_labels or len(points.settings) == 1:
            return None
        spends = self.members[0].spends_budget
        point = points.index_of_most_expensive(budget) if spends else points.index_of_best(budget)
        return float(points.settings[point])

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a setting."""
        return self._answers(examples, setting, lambda index: self._trace(self.members[index], examples))

    def _answers(self, examples: Examples, setting: float, trace_of: Callable[[int], Trace]) -> Answers:
        """Answer examples at a setting.   trace_of: a member's answers at every step, by its index."""
        if not self.is_numbered:
            return trace_of(0).answers(setting)
        index = int(self._owners[int(setting)])
        member, place = self.members[index], int(setting) - int(self._starts[index])
        trace, schedule = trace_of(index), self._schedule(index)
        if solutions_of(member):
            return trace.answers_after(self._route(member, examples)(solutions_of(member)[place]))
        if schedule is not None:
            return trace.answers(tuple(schedule[place]))
        return trace.answers(float(self.frontiers[index].settings[place]))

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure settings on labelled examples, those of a member by one sweep."""
        if not self.is_numbered:
            return curve_of(self._trace(self.members[0], examples), examples.chain, settings)
        numbers = settings.astype(np.int64)
        figures = np.empty((4, len(numbers)))
        for index in np.unique(self._owners[numbers]).tolist():
            rows = np.flatnonzero(self._owners[numbers] == index)
            places = numbers[rows] - self._starts[index]
            trace, schedule = self._trace(self.members[index], examples), self._schedule(index)
            if solutions_of(self.members[index]):
                curve = self._solved_curve(index, trace, examples, places)
            elif schedule is not None:
                trace = replace(trace, worth=places_in(schedule, trace.confidences))
                curve = curve_of(trace, examples.chain, places.astype(np.float64))
            else:
                curve = curve_of(trace, examples.chain, self.frontiers[index].settings[places])
            figures[:, rows] = curve.cost, curve.accuracy, curve.macro_f1, curve.last_share
        return Curve(settings, *figures)

    def _solved_curve(self, index: int, trace: Trace, examples: Examples, places: Ints) -> Curve:
        """Measure a member's solutions on labelled examples.   places: of the solutions, int (p,)."""
        chain, route = examples.chain, self._route(self.members[index], examples)
        solutions = solutions_of(self.members[index])
        answers = [trace.answers_after(route(solutions[place])) for place in places.tolist()]
        return Curve(
            places.astype(np.float64),
            np.array([one.costs(chain).mean() for one in answers]),
            np.array([np.mean(one.predictions == chain.labels) for one in answers]),
            np.array([macro_f1(one.predictions, chain.labels) for one in answers]),
            np.array([one.calls[:, -1].mean() for one in answers]),
        )

    def published(self, fitting: Fitting, rule: ThresholdRule) -> Policy:
        """Return the policy that a rule chooses on the validation split of a fitting. Raises as choose does.

        Where that is for a certificate alone, this family's own split chooses among chains.
        """
        family = self
        if rule.certify is not None and self._has_chains:
            cascades = replace(self, members=[member for member in self.members if len(_models_of(member)) > 1])
            family = replace(self, members=[cascades.members[cascades._best(BY_DEFAULT)]])
        return replace(family, validation=fitting.validation).choose(fitting.calibration, rule)

    def choose(self, calibration: Examples, rule: ThresholdRule) -> Policy:
        """Return the policy that a rule chooses, at its threshold, with what to expect of it.

        Args:
            calibration: What the members were fitted on.
            rule: How to choose.

        Raises:
            ConfigError: The method does not support the rule.
            BudgetError: No point is within the budget.
            RiskError: No threshold is certified.
        """
        policy = self.members[0]
        assert isinstance(policy, Policy)
        if isinstance(policy, SolvedPolicy):
            return self._choose_solution(policy.method, calibration, rule)
        policy = self._policy(self._best(rule))
        if rule.confidence is not None:
            rule = replace(rule, n_candidates=len(self.members))
        threshold = policy.threshold
        reference = threshold if isinstance(threshold, float) and threshold != STOP_NONE else None
        if rule == BY_DEFAULT and reference is not None and policy.threshold_choice.rule == "given":
            rule = ThresholdRule(threshold=reference)
        policy = policy.model_copy(update={"budget": rule.budget})
        chains = chain_of(policy, calibration), chain_of(policy, self.validation)
        policy = choose_threshold(policy, *chains, rule, reference)
        if (len(self.members) > 1 or policy.searched) and policy.on_selection is not None:
            held_out = self._held_out(policy.on_selection.cost, rule.objective)
            policy = policy.model_copy(update={"expected": without_optimism(policy.on_selection, held_out)})
        return policy

    def _held_out(self, budget: float, objective: Objective = "accuracy") -> Bools:
        """Return whether each validation row's answer is right by what the other half chooses, bool (N,).

        Members that validation has searched are fitted anew on each half.

        Args:
            budget: Mean cost per example of what all of validation chooses.
            objective: Quality that is maximised.
        """
        right = np.zeros(len(self.validation), dtype=bool)
        halves = random_halves(len(right))
        for rows, rest in zip(halves, halves[::-1], strict=True):
            half, later = (self.validation.of_rows(part) for part in (rows, rest))
            if self.refit is not None and self._policy(0).searched:
                family = self.refit(half)
                answered = family.answers
            else:
                family = replace(self, validation=half)
                vars(family)["traces"] = [self._trace_of_rows(rows, index) for index in range(len(self.members))]
                answered = partial(family._answers, trace_of=partial(self._trace_of_rows, rest))
            points = family._points_by(objective)
            cheapest = float(points.settings[points.cost.argmin()])
            try:
                setting = family.setting(budget, points)
            except BudgetError:
                setting = None
            setting = cheapest if setting is None else setting
            right[rest] = answered(later, setting).predictions == later.chain.labels
        return right

    def _trace_of_rows(self, rows: Ints, index: int) -> Trace:
        """Return a member's answers on some validation rows, all of which have been answered once."""
        return self.traces[index].of_rows(rows)

    def _points_by(self, objective: Objective) -> OperatingPoints:
        """Return the results on validation at every setting, their quality being that of an objective."""
        if objective == "accuracy":
            return self.points
        return replace(self.points, quality=np.concatenate([of.quality for of in self._frontiers(objective)]))

    def _policy(self, index: int) -> Policy:
        member = self.members[index]
        assert isinstance(member, Policy)
        return member

    def _choose_solution(self, method: str, calibration: Examples, rule: ThresholdRule) -> Policy:
        """Return the policy of a solution; others of its member are on its curve, unless its risk is certified."""
        if rule.objective != "accuracy":
            raise OptionError(f"method {method} chooses by accuracy alone; leave {{objective}} out")
        points = replace(self.points, settings=self.points.cost)
        split = self.validation_name
        if rule.certify is not None:
            point, certificate = self._certified(calibration, points.cost, rule.certify)
            on_curve = np.arange(len(points.cost)) == point
            choice = ThresholdChoice(rule="certified", objective=None, split=split, certificate=certificate)
        else:
            point = points.index_of_best(rule.budget if rule.threshold is None else rule.threshold)
            of_member = self._owners == self._owners[point]
            costs = points.some(of_member).pareto(MOST_CURVE_POINTS - 1).cost
            on_curve = of_member & np.isin(points.cost, [*costs, points.cost[point]])
            named: Literal["best", "budget"] = "best" if rule.budget is None else "budget"
            choice = ThresholdChoice(rule=named, objective="accuracy", split=split)
            if rule.threshold is not None:
                choice = ThresholdChoice(rule="given", objective=None, split=None)
        index, curve = int(self._owners[point]), curve_points(points.some(on_curve))
        places = np.flatnonzero(on_curve) - self._starts[index]
        member = self._policy(index)
        changes: dict[str, Any] = {
            "threshold": float(points.cost[point]),
            "threshold_choice": choice,
            "budget": rule.budget,
            "curve": curve,
            "solutions": tuple(solutions_of(member)[place] for place in places.tolist()),
        }
        policy = type(member)(**dict(member) | changes)
        validation = chain_of(policy, self.validation)
        trace = trace_policy(policy, validation, likeliest=True)
        # A certificate's solutions were searched on other rows.
        searched = rule.certify is None and len(validation) > 1
        held_out = self._held_out(float(points.cost[point])) if searched else None
        return measured(policy, trace, validation, split, chain_of(policy, calibration), curve, held_out)

    @property
    def validation_name(self) -> str:
        """Return the name of the validation split in policy files."""
        validation = self._policy(0).validation
        assert validation is not None
        return validation.split

    def _certified(self, calibration: Examples, settings: Floats, limit: RiskLimit) -> tuple[int, RiskCertificate]:
        """Return the certified solution of most coverage, and its certificate.

        Calibration decides what is tested, and in which order.   settings: of the points.
        """
        if len(self._policy(0).answering) < 2:
            raise ConfigError("a certified risk is that of early answers, which need two models or more")
        on_calibration, on_validation = self._early(calibration), self._early(self.validation)
        return certify_some(on_calibration, on_validation, settings, len(self.validation), limit)

    def _early(self, examples: Examples) -> tuple[Ints, Ints]:
        """Count the rows that each point answers without its member's last model, and of these the wrong ones."""
        accepted, wrong = list[int](), list[int]()
        for index in range(len(self.members)):
            member = self._policy(index)
            trace, route = cascade_of(member)(examples), self._route(member, examples)
            last = examples.chain.models.index(member.models[-1])
            for numbers in solutions_of(member):
                answers = trace.answers_after(route(numbers))
                early = ~answers.calls[:, last]
                accepted.append(int(early.sum()))
                wrong.append(int((early & (answers.predictions != examples.chain.labels)).sum()))
        return np.array(accepted, dtype=np.int64), np.array(wrong, dtype=np.int64)

    def _best(self, rule: ThresholdRule) -> int:
        """Return which member has the best point on validation by a rule; the first where that chooses none."""
        is_given = (rule.threshold, rule.certify, rule.price) != (None, None, None)
        if len(self.members) == 1 or (is_given and not self._has_chains):
            return 0
        if rule.price is not None:
            raise OptionError("this method chooses among chains, which have other prices: give {budget} or {threshold}")
        if rule.threshold is not None:
            chain = self.validation.chain
            at_threshold = [trace.frontier(chain).at(rule.threshold) for trace in self.traces]
            ranks = [(-point.quality, point.cost) for point in at_threshold]
            return ranks.index(min(ranks))
        return int(self._owners[self._points_by(rule.objective).index_of_best(rule.budget)])

    @property
    def _has_chains(self) -> bool:
        """Return whether members are policies of several chains, with one threshold each."""
        is_solved = isinstance(self.members[0], SolvedPolicy)
        return not is_solved and len({_models_of(member) for member in self.members}) > 1

    @property
    def is_numbered(self) -> bool:
        """Return whether settings are numbers of points."""
        first = self.members[0]
        return len(self.members) > 1 or isinstance(first.threshold, tuple) or bool(solutions_of(first))

    @cached_property
    def _owners(self) -> Ints:
        """Return the member of every point, int (P,)."""
        sizes = [len(frontier.cost) for frontier in self.frontiers]
        return np.repeat(np.arange(len(sizes)), sizes)

    @cached_property
    def _starts(self) -> Ints:
        """Return the number of each member's first point, int."""
        return np.searchsorted(self._owners, np.arange(len(self.members)))

    def _schedule(self, index: int) -> Floats | None:
        """Return a member's thresholds at each of its points, float64 (P, S - 1); None where one is for all stages."""
        member = self.members[index]
        gains = member.gains if isinstance(member, Policy) else None
        return None if gains is None else gains.between(self.frontiers[index].settings, self.traces[index].confidences)

    def _trace(self, member: Member, examples: Examples) -> Trace:
        """Answer examples, whose labels only members see that may; each member answers those that came last once."""
        arrays = (*examples.chain.logits, examples.embeddings, examples.chain.labels if self.sees_labels else None)
        if not self._latest.are(arrays):
            self._latest.arrays, self._latest.traces = arrays, {}
        if id(member) not in self._latest.traces:
            trace = member.trace if isinstance(member, Control) else cascade_of(member)
            self._latest.traces[id(member)] = trace(self._seen(examples))
        return self._latest.traces[id(member)]

    @cached_property
    def _latest(self) -> _Latest:
        return _Latest()

    def _route(self, member: Member, examples: Examples) -> Route:
        """Return what decides for examples by a solution's numbers."""
        seen = self._seen(examples)
        if isinstance(member, SolvedPolicy):
            (readings,) = of_rows(chain_of(member, seen), partial(_readings, member))
            return partial(member.stops, readings)
        assert isinstance(member, Control)
        assert member.route is not None
        return member.route(seen)

    def _seen(self, examples: Examples) -> Examples:
        """Return examples as members see them."""
        if self.reading is not None:
            examples = self.reading(examples)
        return examples if self.sees_labels else examples.without_labels()


def solutions_of(member: Member) -> tuple[tuple[float, ...], ...]:
    """Return what decides, by rising cost; empty where one threshold does."""
    return member.solutions if isinstance(member, Control | SolvedPolicy) else ()


def _readings(policy: SolvedPolicy, part: ChainPart, rows: slice) -> tuple[Floats]:
    return (policy.readings([logits[rows] for logits in part.logits]),)


def chain_of(policy: Policy, examples: Examples) -> ChainLogits:
    """Return the examples' chain of a policy's models, after its encoder if it has one."""
    return examples.own_chain([stage.name for stage in policy.answering], encoded=policy.encoder is not None)


def cascade_of(policy: Policy) -> Callable[[Examples], Trace]:
    """Return what answers examples by a policy, at every threshold, among all of their models."""
    names, encoded = [stage.name for stage in policy.answering], policy.encoder is not None

    def cascade(examples: Examples) -> Trace:
        trace = trace_policy(policy, chain_of(policy, examples))
        calls = np.zeros((len(trace.calls), len(examples.chain.models)), dtype=bool)
        calls[:, [examples.chain.models.index(name) for name in names]] = trace.calls[:, encoded:]
        paid = replace(trace, calls=calls)
        return with_embedding_paid(paid, examples) if encoded else paid

    return cascade


def curve_of(trace: Trace, chain: Chain, thresholds: Floats) -> Curve:
    """Measure thresholds, float64 (P,), on a chain's labelled examples, all by one sweep."""
    accuracy, f1 = trace.frontier(chain, "accuracy"), trace.frontier(chain, "macro-f1")
    at = accuracy.index(thresholds)
    return Curve(thresholds, accuracy.cost[at], accuracy.quality[at], f1.quality[at], _last_share(trace, thresholds))


def _last_share(trace: Trace, settings: Floats) -> Floats:
    reached = reached_shares(trace.compared[:, :-1], settings)
    stopped = reached - np.pad(reached[:, 1:], ((0, 0), (0, 1)))
    share: Floats = stopped[:, trace.calls[:, -1]].sum(axis=1)
    return share


def _models_of(member: Member) -> tuple[str, ...]:
    """Return the names of a policy's models; none for a control."""
    return member.models if isinstance(member, Policy) else ()
