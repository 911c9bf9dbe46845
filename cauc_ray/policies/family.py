"""Fitted policies with their operating points on validation: what is chosen there, and what that gives elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.sweep import STOP_NONE, Frontier, OperatingPoints, reached_shares
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.threshold import BY_DEFAULT, ThresholdRule, choose_threshold
from cauc_ray.policies.trace import Answers, Examples, Trace, places_in, trace_policy, with_embedding_paid


@dataclass(frozen=True, slots=True)
class Control:
    """Answers that no policy can give, such as those of methods that read labels or texts.

    Attributes:
        trace: Answers examples, at every threshold.
        threshold: Threshold without a budget; STOP_NONE for the best on validation.
    """

    trace: Callable[[Examples], Trace]
    threshold: float = STOP_NONE


# A policy at a threshold that no row reaches takes the best on validation where there is no budget.
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


@dataclass(frozen=True)
class Family:
    """Policies of one method, and their operating points on validation.

    A setting is the threshold of a lone policy; of several, or where each stage has a threshold, the number of a point.

    Attributes:
        members: Fitted policies, or controls.
        validation: Examples that settings are chosen on.
        note: How the method differs from the published one, for tables; empty if it does not.
        sees_labels: Whether members read labels.
        spends_budget: Whether a budget chooses the most expensive point within it, not the best.
        reading: Changes examples before members read them, as recalibration does.
        chooser: Family whose points are chosen among; None for its own.
    """

    members: Sequence[Member]
    validation: Examples
    note: str = ""
    sees_labels: bool = False
    spends_budget: bool = False
    reading: Callable[[Examples], Examples] | None = None
    chooser: Family | None = None

    @cached_property
    def traces(self) -> list[Trace]:
        """Return the members' answers on validation."""
        return [self._trace(member, self.validation) for member in self.members]

    @cached_property
    def frontiers(self) -> list[Frontier]:
        """Return the members' operating points by accuracy."""
        return [trace.frontier(self.validation.chain) for trace in self.traces]

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
        point = points.index_of_most_expensive(budget) if self.spends_budget else points.index_of_best(budget)
        return float(points.settings[point])

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a setting."""
        if not self.is_numbered:
            return self._trace(self.members[0], examples).answers(setting)
        index = int(self._owners[int(setting)])
        schedule = self._schedule(index)
        place = int(setting) - int(self._starts[index])
        threshold = float(self.frontiers[index].settings[place]) if schedule is None else tuple(schedule[place])
        return self._trace(self.members[index], examples).answers(threshold)

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
            thresholds = self.frontiers[index].settings[places]
            if schedule is not None:
                trace = replace(trace, worth=places_in(schedule, trace.confidences))
                thresholds = places.astype(np.float64)
            curve = curve_of(trace, examples.chain, thresholds)
            figures[:, rows] = curve.cost, curve.accuracy, curve.macro_f1, curve.last_share
        return Curve(settings, *figures)

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
        policy = self.members[self._best(rule)]
        assert isinstance(policy, Policy)
        if rule == BY_DEFAULT and isinstance(policy.threshold, float) and policy.threshold != STOP_NONE:
            rule = ThresholdRule(threshold=policy.threshold)
        calibration_chain, validation_chain = (chain_of(policy, split) for split in (calibration, self.validation))
        return choose_threshold(
            policy.model_copy(update={"budget": rule.budget}), calibration_chain, validation_chain, rule
        )

    def published(self, fitting: Fitting, rule: ThresholdRule) -> Policy:
        """Return the policy that a rule chooses on the validation split of a fitting. Raises as choose does."""
        return replace(self, validation=fitting.validation).choose(fitting.calibration, rule)

    def _best(self, rule: ThresholdRule) -> int:
        """Return which member has the best point on validation by a rule; the first where that chooses none."""
        if len(self.members) == 1 or (rule.threshold, rule.certify, rule.price) != (None, None, None):
            return 0
        points = self.points
        if rule.objective != "accuracy":
            frontiers = [trace.frontier(self.validation.chain, rule.objective) for trace in self.traces]
            points = replace(points, quality=np.concatenate([frontier.quality for frontier in frontiers]))
        return int(self._owners[points.index_of_best(rule.budget)])

    @property
    def is_numbered(self) -> bool:
        """Return whether settings are numbers of points."""
        return len(self.members) > 1 or isinstance(self.members[0].threshold, tuple)

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
        """Answer examples, whose labels only members see that may."""
        if self.reading is not None:
            examples = self.reading(examples)
        trace = member.trace if isinstance(member, Control) else cascade_of(member)
        return trace(examples if self.sees_labels else examples.without_labels())


def chain_of(policy: Policy, examples: Examples) -> Chain:
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
