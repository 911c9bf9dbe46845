"""A pool of models, whose sub-chains are fitted, measured on validation, and ranked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cauc_ray.errors import BudgetError, ConfigError
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import ChainExamples
from cauc_ray.numbers.sweep import Frontier, OperatingPoint, OperatingPoints, most_within, pareto
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.threshold import ThresholdRule, random_halves, sure_points
from cauc_ray.policies.trace import Examples, Trace

MOST_MODELS = 12
# Largest number of sub-chains that a method fits which takes longer: those that are best as CAUC-RF.
N_STACKED = 8


@dataclass(frozen=True, slots=True)
class SubChain:
    """A fitted chain of S of a pool's models, with its answers on validation.

    Attributes:
        method: Method of the fit.
        indices: Indices of the models in the pool.
        trace: Trace on validation; its calls are of the pool's models.
        reference: Default threshold; None for the best on validation.
    """

    method: str
    indices: tuple[int, ...]
    trace: Trace
    reference: float | None = None

    @classmethod
    def of_steps(
        cls,
        method: str,
        indices: tuple[int, ...],
        steps: Sequence[tuple[Ints, Floats]],
        n_models: int,
        reference: float | None = None,
    ) -> SubChain:
        """Return a cascade of some of a pool's models, one after the other.

        Args:
            method: Method of the fit.
            indices: Indices of the models.
            steps: Answers and confidences of each model, (N,).
            n_models: Number of models in the pool.
            reference: Default threshold.
        """
        predictions, confidences = (np.stack(of) for of in zip(*steps, strict=True))
        calls = np.zeros((len(steps), n_models), dtype=bool)
        calls[:, [*indices]] = np.tri(len(steps), dtype=bool)
        return cls(method, indices, Trace(predictions.T, confidences.T, calls), reference)


def check_pool(models: Sequence[str]) -> None:
    """Raise ConfigError if a pool is too large to search all its sub-chains."""
    if len(models) > MOST_MODELS:
        raise ConfigError(f"a search supports up to {MOST_MODELS} models, got {len(models)}; reduce --models")


@dataclass(frozen=True)
class Pool:
    """The splits of a pool's models, by rising cost on calibration.

    Attributes:
        calibration: Examples that chains are fitted on.
        validation: Examples that they are measured on.
        rule: How to choose the threshold of each chain.
        calibrator: Kind of calibrator of every model.
    """

    calibration: Examples
    validation: Examples
    rule: ThresholdRule
    calibrator: CalibratorKind = "temperature"

    @classmethod
    def of(
        cls,
        calibration: Examples,
        validation: Examples,
        rule: ThresholdRule,
        calibrator: CalibratorKind = "temperature",
    ) -> Pool:
        """Put the models in order, ties as they are given. Raises ConfigError for too many."""
        check_pool(calibration.chain.models)
        order = np.argsort(calibration.chain.costs.means, kind="stable").tolist()
        return cls(calibration.of_models(order), validation.of_models(order), rule, calibrator)

    @cached_property
    def halves(self) -> tuple[Ints, ...]:
        """Return the rows of two random halves of validation; none of a single row."""
        return random_halves(len(self.validation)) if len(self.validation) > 1 else ()

    def measured(self, chains: Iterable[SubChain]) -> list[MeasuredChain]:
        """Measure chains on all of validation, and on its halves."""
        examples = self.validation.chain.held_as(ChainExamples)  # without the logits, which parts would copy
        parts = [(rows, examples.with_rows(rows)) for rows in (np.arange(len(examples)), *self.halves)]
        return [_measure(chain, parts, self.rule) for chain in chains]

    def shortlist(self, chains: Iterable[SubChain], budgets: Sequence[float] = ()) -> list[tuple[int, ...]]:
        """Return the best chains, the best on each half, the best of one and two models, and that of all models.

        Args:
            chains: All sub-chains.
            budgets: Budgets to rank the chains at; without any, they are ranked at the rule's threshold.
        """
        results, n_models = self.measured(chains), len(self.calibration.chain.models)
        ranked = [sorted(results, key=lambda one: rank(one, one.within(budget))) for budget in budgets or (None,)]
        firsts = [next(one for one in ranked[-1] if len(one.indices) == size) for size in (1, 2) if size <= n_models]
        on_halves = [min(results, key=lambda one: rank(one, one.halves[half])) for half in range(len(self.halves))]
        best = list(dict.fromkeys(one.indices for place in zip(*ranked, strict=True) for one in place))[:N_STACKED]
        return list(dict.fromkeys([*best, *(one.indices for one in (*firsts, *on_halves)), tuple(range(n_models))]))


# The quality of a chain without a threshold within the budget.
UNAFFORDABLE = OperatingPoint(threshold=np.nan, cost=np.inf, quality=-np.inf)


@dataclass(frozen=True, slots=True, eq=False)  # two stacked cascades may be of one chain
class MeasuredChain:
    """A method's chain measured on validation.

    Attributes:
        method: Method of the fit.
        indices: Indices of its models in the pool.
        points: Operating points that a budget can choose; their quality is accuracy.
        overall: Operating point at the threshold chosen on all of validation; its quality is that of the objective.
        halves: Operating point on each half, at the threshold chosen on it.
        held_out: Operating points at these thresholds on the opposite halves.
        held_out_accuracy: Shares of right answers at these points.
    """

    method: str
    indices: tuple[int, ...]
    points: OperatingPoints
    overall: OperatingPoint
    halves: tuple[OperatingPoint, ...]
    held_out: tuple[OperatingPoint, ...]
    held_out_accuracy: tuple[float, ...]

    def within(self, budget: float | None) -> OperatingPoint:
        """Return the point of highest accuracy within a budget; without one, the overall point."""
        if budget is None:
            return self.overall
        affordable = np.flatnonzero(self.points.cost <= most_within(budget))
        if not len(affordable):
            return UNAFFORDABLE
        best = affordable[-1]  # of Pareto-optimal points by rising cost
        return OperatingPoint(
            *(float(of[best]) for of in (self.points.settings, self.points.cost, self.points.quality))
        )


def _measure(one: SubChain, parts: Sequence[tuple[Ints, ChainExamples]], rule: ThresholdRule) -> MeasuredChain:
    """Measure a chain.   parts: rows of validation with their chain: all of them, then halves."""
    fixed = rule.threshold if rule.threshold is not None or rule.budget is not None else one.reference
    traces = [(one.trace.of_rows(rows), chain) for rows, chain in parts]
    overall, *on_halves = (trace.frontier(chain, rule.objective) for trace, chain in traces)
    budget = rule.budget
    if rule.confidence is not None:
        # What all of validation may cost for new inputs to keep the budget; halves are measured within it, too.
        try:
            budget = float(sure_points(*traces[0], overall, rule).cost[-1])
        except BudgetError:
            budget = -1.0  # no point costs so little

    def chosen(on: Frontier) -> OperatingPoint:
        try:
            return on.best(budget) if fixed is None else on.at(fixed)
        except BudgetError:
            return UNAFFORDABLE

    points_of_halves = tuple(chosen(half) for half in on_halves)
    pairs = zip(on_halves[::-1], points_of_halves, strict=True)
    held_out = tuple(point if point is UNAFFORDABLE else opposite.at(point.threshold) for opposite, point in pairs)
    opposite_halves = zip(traces[:0:-1], points_of_halves, strict=True)
    right = tuple(_accuracy(trace, chain, point) for (trace, chain), point in opposite_halves)
    accuracy = overall if rule.objective == "accuracy" else traces[0][0].frontier(parts[0][1])
    points = accuracy.some(pareto(overall.cost, overall.quality))
    return MeasuredChain(one.method, one.indices, points, chosen(overall), points_of_halves, held_out, right)


def _accuracy(trace: Trace, chain: ChainExamples, point: OperatingPoint) -> float:
    if point is UNAFFORDABLE:
        return point.quality
    return float(np.mean(trace.answers(point.threshold).predictions == chain.labels))


def rank(chain: MeasuredChain, on: OperatingPoint) -> tuple[float, float, int, tuple[int, ...]]:
    """Return a sort key that orders chains from best to worst on some examples."""
    # Sums of the same costs in different orders differ by rounding.
    return -on.quality, float(f"{on.cost:.9e}"), len(chain.indices), chain.indices
