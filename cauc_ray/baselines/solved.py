"""Methods whose setting is a budget, for which they have solutions: which numbers decide at which cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.guarantees import N_STEPS, RiskLimit, strongest, tested
from cauc_ray.numbers.logits import joint_kind
from cauc_ray.numbers.metrics import macro_f1
from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import MOST_CURVE_POINTS, RiskCertificate, ThresholdChoice
from cauc_ray.policies.family import Curve
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.scored import SolvedPolicy
from cauc_ray.policies.threshold import ThresholdRule, certificate_of, curve_points, measured
from cauc_ray.policies.trace import Answers, Examples, own_answers, trace_policy, with_embedding_paid

# Solutions whose costs differ by less are one to a budget, which is kept but for rounding.
_COST_TOLERANCE = 1e-8


class Solution(Protocol):
    """Models in an order, and the numbers that decide which of them are called."""

    @property
    def order(self) -> tuple[int, ...]:
        """Return the models by index."""
        ...

    @property
    def numbers(self) -> tuple[float, ...]:
        """Return what a policy of these models in that order has."""
        ...

    def replay(self, read: Any) -> tuple[Ints, Bools]:
        """Return whose answer each row takes, int (N,), and which models it calls, bool (N, M).

        read: what the method reads of the rows.
        """
        ...


@dataclass(frozen=True, slots=True)
class Solved:
    """A fitted method with its best solutions by their cost on validation. Its setting is a budget, in that cost.

    unsolved: a policy of all M models without a solution, or what else it reads by.   read: what it reads of examples.
    solutions: P, by rising cost.   points: of the solutions; settings are their costs.
    """

    unsolved: Any
    read: Callable[[Any, Examples], Any]
    solutions: tuple[Solution, ...]
    points: OperatingPoints
    note: str
    validation: Examples
    reading: Callable[[Examples], Examples] = lambda examples: examples
    chooser: None = None
    is_numbered: bool = False

    @classmethod
    def of(
        cls,
        unsolved: Any,
        read: Callable[[Any, Examples], Any],
        solutions: Sequence[Solution],
        validation: Examples,
        note: str,
    ) -> Solved:
        """Measure solutions, by rising cost, on validation; of those that cost the same, the last is kept."""
        curve = measure_solutions(solutions, validation, read(unsolved, validation))
        distinct = np.append(np.diff(curve.cost) > _COST_TOLERANCE * curve.cost[1:], True)
        cost, quality = curve.cost[distinct], curve.accuracy[distinct]
        kept = tuple(solution for solution, keep in zip(solutions, distinct, strict=True) if keep)
        return cls(
            unsolved, read, kept, OperatingPoints(cost, cost, quality, validation.chain.costs.unit), note, validation
        )

    @property
    def default(self) -> float:
        """Return the cost of the solution that is best without a budget."""
        return float(self.points.settings[self.points.index_of_best()])

    def setting(self, budget: float, points: OperatingPoints | None = None) -> float | None:
        """Return the setting for a budget, None if there is only one. Raises BudgetError."""
        points = points or self.points
        return None if len(points.settings) == 1 else float(points.settings[points.index_of_best(budget)])

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Replay the best solution within a budget. Raises BudgetError where none costs so little."""
        examples = self.reading(examples)
        solution = self.solutions[self.points.index_of_best(setting)]
        return _replayed(solution, examples, own_answers(examples.chain), self.read(self.unsolved, examples))

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure budgets on labelled examples: one replay for each solution that any of them chooses.

        Raises BudgetError where no solution costs so little.
        """
        examples = self.reading(examples)
        chosen, which = np.unique([self.points.index_of_best(setting) for setting in settings], return_inverse=True)
        solutions = [self.solutions[point] for point in chosen]
        curve = measure_solutions(solutions, examples, self.read(self.unsolved, examples))
        of_settings = (values[which] for values in (curve.cost, curve.accuracy, curve.macro_f1, curve.last_share))
        return Curve(np.asarray(settings, dtype=np.float64), *of_settings)

    def published(self, fitting: Fitting, rule: ThresholdRule) -> SolvedPolicy:
        """Return the policy of the best solution within a budget; other solutions of its order are on its curve.

        One whose risk is certified is alone there. Its stages are the models in that order. Raises ConfigError for
        another objective, and RiskError.
        """
        if rule.objective != "accuracy":
            raise ConfigError(f"method {self.unsolved.method} chooses by accuracy alone; leave objective out")
        split, points = fitting.names[1], self.points
        if rule.certify is not None:
            # Those so far are of the rows that solutions were found on.
            measured_anew = measure_solutions(
                self.solutions, fitting.validation, self.read(self.unsolved, fitting.validation)
            )
            points = OperatingPoints(measured_anew.cost, measured_anew.cost, measured_anew.accuracy, points.unit)
            point, certificate = self._certified(fitting, points.settings, rule.certify)
            on_curve = np.arange(len(self.solutions)) == point
            choice = ThresholdChoice(rule="certified", objective=None, split=split, certificate=certificate)
        else:
            point = points.index_of_best(rule.budget if rule.threshold is None else rule.threshold)
            of_order = np.array([own.order == self.solutions[point].order for own in self.solutions])
            kept = points.some(of_order).pareto(MOST_CURVE_POINTS - 1).settings
            on_curve = of_order & np.isin(points.settings, [*kept, points.settings[point]])
            rule_name: Literal["best", "budget"] = "best" if rule.budget is None else "budget"
            choice = ThresholdChoice(rule=rule_name, objective="accuracy", split=split)
            if rule.threshold is not None:
                choice = ThresholdChoice(rule="given", objective=None, split=None)
        order = self.solutions[point].order
        encoder, models = self.unsolved.stages[: -len(self.unsolved.answering)], self.unsolved.answering
        stages, curve = (*encoder, *(models[model] for model in order)), curve_points(points.some(on_curve))
        chosen: dict[str, Any] = {
            "stages": stages,
            "logit_kind": joint_kind([stage.logit_kind for stage in stages[len(encoder) :]]),
            "threshold": float(points.settings[point]),
            "threshold_choice": choice,
            "budget": rule.budget,
            "curve": curve,
            "solutions": tuple(self.solutions[at].numbers for at in np.flatnonzero(on_curve)),
        }
        policy: SolvedPolicy = type(self.unsolved)(**dict(self.unsolved) | chosen)
        names, encoded = [stage.name for stage in policy.answering], bool(encoder)
        validation = fitting.validation.own_chain(names, encoded=encoded)
        trace = trace_policy(policy, validation, likeliest=True)
        return measured(policy, trace, validation, split, fitting.calibration.own_chain(names, encoded=encoded), curve)

    def _certified(self, fitting: Fitting, settings: Floats, limit: RiskLimit) -> tuple[int, RiskCertificate]:
        """Return the certified solution of most coverage, and its certificate.

        Calibration decides what is tested, and in which order.   settings: of the solutions.
        """
        if len(self.unsolved.answering) < 2:
            raise ConfigError("a certified risk is that of early answers, which need two models or more")
        (accepted, wrong), (n_accepted, n_wrong) = (
            _early(self.solutions, split, self.read(self.unsolved, split))
            for split in (fitting.calibration, fitting.validation)
        )
        ranks = np.argsort(accepted, kind="stable")
        ranks = ranks[np.unique(np.linspace(0, len(ranks) - 1, N_STEPS).round().astype(np.int64))]
        sequence = ranks[strongest(accepted[ranks], wrong[ranks], limit) :]
        found = tested(settings[sequence], n_accepted[sequence], n_wrong[sequence], len(fitting.validation), limit)
        within = np.flatnonzero((n_accepted > 0) & (n_wrong <= limit.risk * n_accepted))
        most = within[n_accepted[within].argmax()]
        plug_in = float(settings[most]), int(n_accepted[most])
        # The first in order with these figures: all up to the last are certified.
        same = (settings == found.threshold) & (n_accepted == found.n_accepted) & (n_wrong == found.n_wrong)
        return int(sequence[same[sequence]][0]), certificate_of(limit, found, plug_in)


def _early(solutions: Sequence[Solution], examples: Examples, read: Any) -> tuple[Ints, Ints]:
    """Count the rows that each solution answers without the last model of its order, and of these the wrong ones."""
    right, counts = examples.correct(), []
    for solution in solutions:
        takers, calls = solution.replay(read)
        early = ~calls[:, solution.order[-1]]
        counts.append((early.sum(), (early & ~right[np.arange(len(takers)), takers]).sum()))
    accepted, wrong = np.array(counts, dtype=np.int64).T
    return accepted, wrong


def _replayed(solution: Solution, examples: Examples, answers: Ints, read: Any) -> Answers:
    takers, calls = solution.replay(read)
    return with_embedding_paid(Answers(answers[np.arange(len(takers)), takers], calls), examples)


def measure_solutions(solutions: Sequence[Solution], examples: Examples, read: Any) -> Curve:
    """Measure each solution on labelled examples; the settings are their costs there."""
    chain, answers = examples.chain, own_answers(examples.chain)
    replayed = [_replayed(solution, examples, answers, read) for solution in solutions]
    cost = np.array([own.costs(chain).mean() for own in replayed])
    accuracy = np.array([np.mean(own.predictions == chain.labels) for own in replayed])
    f1 = np.array([macro_f1(own.predictions, chain.labels) for own in replayed])
    return Curve(cost, cost, accuracy, f1, np.array([own.calls[:, -1].mean() for own in replayed]))
