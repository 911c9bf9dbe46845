"""Search for the best sub-chain of a pool, with its threshold, on validation among all sub-chains.

Sub-chains are visited depth first, so that common prefixes share fits and steps. Each is measured exactly as a fit of
its models would be, by the steps of fits and replays.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import BudgetError, CaucWarning, ConfigError, unknown_name
from cauc_ray.numbers.calibration import fit_pair
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.logits import top_option
from cauc_ray.numbers.sweep import Frontier, OperatingPoint, OperatingPoints, most_within, pareto
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.calibrated import calibrator_of, require_calibrator
from cauc_ray.policies.candidates import StackedFits
from cauc_ray.policies.cauc import BasePolicy, fold
from cauc_ray.policies.evidence import ChainSearch, ChosenChain, FoundChain
from cauc_ray.policies.family import cascade_of
from cauc_ray.policies.fitting import Fitting, fit_base, require_base_rule
from cauc_ray.policies.policy import Step
from cauc_ray.policies.stacked import StackedPolicy
from cauc_ray.policies.threshold import ThresholdRule, random_halves
from cauc_ray.policies.trace import Examples, Trace

MOST_MODELS = 12
N_RUNNERS_UP = 5


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


def sub_chains_of_rf(calibration: ChainLogits, validation: ChainLogits, kind: CalibratorKind) -> Iterator[SubChain]:
    """Fit CAUC-RF to every sub-chain of a pool (paper, eq. 8-10): each prefix has its own pair and its own r."""
    n_models = len(calibration.models)
    calibrators = [calibrator_of(calibration, index, kind).calibrator for index in range(n_models)]
    scores = [
        (calibrator.scores(calibration.logits[index]), calibrator.scores(validation.logits[index]))
        for index, calibrator in enumerate(calibrators)
    ]

    def after(
        indices: tuple[int, ...], state: tuple[Floats, Floats] | None, steps: list[tuple[Ints, Floats]]
    ) -> Iterator[SubChain]:
        for index in range(indices[-1] + 1 if indices else 0, n_models):
            r, r_validation = scores[index]
            if state is not None:
                alpha, beta = fit_pair(state[0], r, calibration.labels).temperatures
                r, r_validation = fold(r, alpha, beta, state[0]), fold(r_validation, alpha, beta, state[1])
            longer, answered = (*indices, index), [*steps, top_option(r_validation)]
            yield SubChain("rf", longer, _in_turn(longer, answered, n_models))
            yield from after(longer, (r, r_validation), answered)

    return after((), None, [])


def _in_turn(indices: Sequence[int], steps: Sequence[tuple[Ints, Floats]], n_models: int) -> Trace:
    """Return the trace of a cascade of some of a pool's models.

    Args:
        indices: Indices of the models.
        steps: Answers and confidences of each model, (N,).
        n_models: Number of models in the pool.
    """
    predictions, confidences = (np.stack(of) for of in zip(*steps, strict=True))
    calls = np.zeros((len(steps), n_models), dtype=bool)
    calls[:, [*indices]] = np.tri(len(steps), dtype=bool)
    return Trace(predictions.T, confidences.T, calls)


def sub_chains_of_base(calibration: ChainLogits, validation: ChainLogits, kind: CalibratorKind) -> Iterator[SubChain]:
    """Fit CAUC Base to every sub-chain of a pool (paper, algorithm 1): fusion depends only on the last model.

    One fit for each last model serves all chains that end there. Stages before it answer by themselves, independently
    of other stages, and only fused stages change the last answer.
    """
    fits = [calibrator_of(calibration, index, kind) for index in range(len(calibration.models))]
    for last in range(len(calibration.models)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaucWarning)  # the final fit of the chosen chain issues the warnings
            policy = fit_base(calibration.of_models(range(last + 1)), calibrator=kind, fits=fits[: last + 1])
        unfused = [policy.unfused_step(index, logits) for index, logits in enumerate(validation.logits[: last + 1])]
        yield from _ending(policy, unfused, (), None, policy.fuse(last, unfused[last], None), len(calibration.models))


def _ending(
    policy: BasePolicy, unfused: list[Step], indices: tuple[int, ...], state: Floats | None, end: Step, n_models: int
) -> Iterator[SubChain]:
    """Return all chains that start with these indices and end with the policy's last stage.

    Args:
        policy: A fit of all models of the pool up to its last stage.
        unfused: Unfused step of each stage.
        indices: Indices of the chain's models so far.
        state: State after these models.
        end: The last stage's step from that state.
        n_models: Number of models in the pool.
    """
    last = len(policy.stages) - 1
    steps = [(step.predictions, step.confidences) for step in (*(unfused[index] for index in indices), end)]
    chain = *indices, last
    yield SubChain("base", chain, _in_turn(chain, steps, n_models), policy.threshold)
    for index in range(indices[-1] + 1 if indices else 0, last):
        after = state, end
        if policy.stages[index].fused:
            longer = policy.fuse(index, unfused[index], state).state
            after = longer, policy.fuse(last, unfused[last], longer)
        yield from _ending(policy, unfused, (*indices, index), *after, n_models)


_METHODS = {"base": sub_chains_of_base, "rf": sub_chains_of_rf}
_SEARCHED = (*_METHODS, "stacked", "auto")
# Largest number of sub-chains to fit stacked cascades to, which takes longer: those that are best as CAUC-RF.
N_STACKED = 8


def check_pool(models: Sequence[str]) -> None:
    """Raise ConfigError if a pool is too large to search all its sub-chains."""
    if len(models) > MOST_MODELS:
        raise ConfigError(f"a search supports up to {MOST_MODELS} models, got {len(models)}; reduce --models")


def search_chains(
    method: str,
    calibration: Examples,
    validation: Examples | None,
    rule: ThresholdRule,
    split: str,
    *,
    calibrator: CalibratorKind = "temperature",
) -> ChainSearch:
    """Find the sub-chain of a pool that has the highest quality on validation, at the threshold chosen by the rule.

    Each of the 2^M - 1 sub-chains is measured as a fit of its models would be; stacked cascades, which take longer to
    fit, only on those that are best as CAUC-RF. Chains are ordered by mean cost on calibration, ties by the order in
    the pool. Among equals the cheapest is chosen, then the shortest.

    Args:
        method: base, rf or stacked; auto is stacked at a budget, with embeddings if the examples have them.
        calibration: Examples with the logits of all models of the pool, at most MOST_MODELS, in any order.
        validation: Examples to choose the chain on; required.
        rule: How to choose the threshold of each chain.
        split: Name of the validation split.
        calibrator: Kind of calibrator of every model.

    Raises:
        ConfigError: The pool is too large, or the method does not support the rule.
        DataError: Labels are missing.
        BudgetError: No model is within the budget.
    """
    check_pool(calibration.chain.models)
    if method not in _SEARCHED:
        raise ConfigError(unknown_name("method", method, _SEARCHED))
    require_calibrator(calibrator, method, len(calibration.chain.models))
    if method == "base":
        require_base_rule(rule)
    if method == "auto" and rule.budget is None:
        raise ConfigError("method auto chooses a chain at a budget; give one")
    if method == "stacked" and rule.threshold is not None:
        raise ConfigError("stacked cascades have a threshold for each stage: search them by a budget, not a threshold")
    if validation is None:
        raise ConfigError("a search chooses the chain on a validation split; give one")
    calibration.chain.require_labels("calibration")
    validation.chain.require_labels("choosing a chain")
    calibration, validation = _by_cost(calibration, validation)
    _require_affordable(validation.chain, rule)
    halves = random_halves(len(validation)) if len(validation) > 1 else ()
    chains = calibration.chain, validation.chain
    subs = _METHODS["rf" if method in ("stacked", "auto") else method](*chains, calibrator)
    results = _measured(subs, validation, rule, halves)
    if method in ("stacked", "auto"):
        shortlist = _shortlist(results, (), len(calibration.chain.models))
        stacked = (
            SubChain("stacked", indices, cascade_of(policy)(validation))
            for indices, policy in _stacked(calibration, validation, shortlist)
        )
        results = _measured(stacked, validation, rule, halves)
    return _report(results, validation.chain, rule, split)


def fit_sub_chains(fitting: Fitting) -> Sequence[StackedPolicy]:
    """Fit stacked cascades to the sub-chains that are best as CAUC-RF, for a comparison.

    Raises ConfigError for too many models.
    """
    check_pool(fitting.calibration.chain.models)
    calibration, validation = _by_cost(fitting.calibration, fitting.validation)
    costs, rule = validation.chain.costs.means, ThresholdRule(objective=fitting.objective)
    budgets = np.linspace(costs.min(), costs.max(), N_STACKED).tolist()
    as_rf = _measured(sub_chains_of_rf(calibration.chain, validation.chain, "temperature"), validation, rule)
    fits = list(_stacked(calibration, validation, _shortlist(as_rf, budgets, len(calibration.chain.models))))
    fits.sort(key=lambda fit: (len(fit[0]), fit[0]))  # among equals the shortest
    return [policy for _, policy in fits]


def _by_cost(calibration: Examples, validation: Examples) -> tuple[Examples, Examples]:
    order = np.argsort(calibration.chain.costs.means, kind="stable").tolist()
    return calibration.of_models(order), validation.of_models(order)


def _measured(
    subs: Iterable[SubChain], validation: Examples, rule: ThresholdRule, halves: tuple[Ints, ...] = ()
) -> list[_MeasuredChain]:
    parts = [(rows, validation.chain.of_rows(rows)) for rows in (np.arange(len(validation)), *halves)]
    return [_measure(sub, parts, rule) for sub in subs]


def _stacked(
    calibration: Examples, validation: Examples, chains: Sequence[tuple[int, ...]]
) -> Iterator[tuple[tuple[int, ...], StackedPolicy]]:
    """Fit stacked cascades to some sub-chains: the policies of each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaucWarning)  # the final fit of the chosen chain issues the warnings
        fits = StackedFits(calibration, validation)
    for indices in sorted(chains):  # those that begin alike follow each other, and share fits
        for policy in fits.candidates(indices):
            yield indices, policy


def _shortlist(results: Sequence[_MeasuredChain], budgets: Sequence[float], n_models: int) -> list[tuple[int, ...]]:
    """Return the chains to fit stacked cascades to: the best, the best on each half, and that of all models.

    Args:
        results: Results of CAUC-RF on all sub-chains.
        budgets: Budgets to rank the chains at; without any, they are ranked at the rule's threshold.
        n_models: Number of models in the pool.
    """
    ranked = [sorted(results, key=lambda one: _rank(one, one.within(budget))) for budget in budgets or (None,)]
    firsts = [next(one for one in ranked[-1] if len(one.indices) == size) for size in (1, 2) if size <= n_models]
    on_halves = [min(results, key=lambda one: _rank(one, one.halves[half])) for half in range(len(results[0].halves))]
    best = list(dict.fromkeys(one.indices for place in zip(*ranked, strict=True) for one in place))[:N_STACKED]
    return list(dict.fromkeys([*best, *(one.indices for one in (*firsts, *on_halves)), tuple(range(n_models))]))


def _require_affordable(validation: ChainLogits, rule: ThresholdRule) -> None:
    means = validation.costs.means
    if rule.budget is not None and means.min() > most_within(rule.budget):
        cheapest, unit = int(means.argmin()), validation.costs.unit
        raise BudgetError(
            f"budget {rule.budget:g} {unit} is below the cost of the cheapest chain, {means[cheapest]:g} {unit} "
            f"({validation.models[cheapest]!r} alone); raise the budget or add a cheaper model"
        )


# The quality of a chain without a threshold within the budget.
_UNAFFORDABLE = OperatingPoint(threshold=np.nan, cost=np.inf, quality=-np.inf)


@dataclass(frozen=True, slots=True, eq=False)  # two stacked cascades may be of one chain
class _MeasuredChain:
    """A method's chain measured on validation.

    Attributes:
        method: Method of the fit.
        indices: Indices of its models in the pool.
        points: Operating points that a budget can choose; their quality is accuracy.
        overall: Operating point at the threshold chosen on all of validation; its quality is that of the objective.
        halves: Operating point on each half, at the threshold chosen on it.
        held_out: Operating points at these thresholds on the opposite halves.
    """

    method: str
    indices: tuple[int, ...]
    points: OperatingPoints
    overall: OperatingPoint
    halves: tuple[OperatingPoint, ...]
    held_out: tuple[OperatingPoint, ...]

    def within(self, budget: float | None) -> OperatingPoint:
        """Return the point of highest accuracy within a budget; without one, the overall point."""
        if budget is None:
            return self.overall
        affordable = np.flatnonzero(self.points.cost <= most_within(budget))
        if not len(affordable):
            return _UNAFFORDABLE
        best = affordable[-1]  # of Pareto-optimal points by rising cost
        return OperatingPoint(
            *(float(of[best]) for of in (self.points.settings, self.points.cost, self.points.quality))
        )


def _measure(one: SubChain, parts: Sequence[tuple[Ints, ChainLogits]], rule: ThresholdRule) -> _MeasuredChain:
    """Measure a chain.   parts: rows of validation with their chain: all of them, then halves."""
    fixed = rule.threshold if rule.threshold is not None or rule.budget is not None else one.reference

    def chosen(on: Frontier) -> OperatingPoint:
        try:
            return on.best(rule.budget) if fixed is None else on.at(fixed)
        except BudgetError:
            return _UNAFFORDABLE

    traces = [(one.trace.of_rows(rows), chain) for rows, chain in parts]
    overall, *on_halves = (trace.frontier(chain, rule.objective) for trace, chain in traces)
    points_of_halves = tuple(chosen(half) for half in on_halves)
    pairs = zip(on_halves[::-1], points_of_halves, strict=True)
    held_out = tuple(point if point is _UNAFFORDABLE else opposite.at(point.threshold) for opposite, point in pairs)
    accuracy = overall if rule.objective == "accuracy" else traces[0][0].frontier(parts[0][1])
    points = accuracy.some(pareto(overall.cost, overall.quality))
    return _MeasuredChain(one.method, one.indices, points, chosen(overall), points_of_halves, held_out)


def _rank(chain: _MeasuredChain, on: OperatingPoint) -> tuple[float, float, int, tuple[int, ...]]:
    """Return a sort key that orders chains from best to worst on some examples."""
    # Sums of the same costs in different orders differ by rounding.
    return -on.quality, float(f"{on.cost:.9e}"), len(chain.indices), chain.indices


def _report(results: list[_MeasuredChain], validation: ChainLogits, rule: ThresholdRule, split: str) -> ChainSearch:
    def named(one: _MeasuredChain) -> FoundChain:
        affordable = np.isfinite(one.overall.quality)
        return FoundChain(
            method=one.method,
            models=tuple(validation.models[index] for index in one.indices),
            quality=one.overall.quality if affordable else None,
            cost=one.overall.cost if affordable else None,
        )

    def best_on_halves(among: list[_MeasuredChain]) -> list[_MeasuredChain]:
        return [min(among, key=lambda one: _rank(one, one.halves[half])) for half in range(len(among[0].halves))]

    def chosen(among: list[_MeasuredChain]) -> ChosenChain:
        """Choose among chains on all of validation, and on each half to measure the choice on the other."""
        best = min(among, key=lambda one: _rank(one, one.overall))
        held_out = [one.held_out[half] for half, one in enumerate(best_on_halves(among))]
        measured = [(of.quality, of.cost) for of in held_out if np.isfinite(of.quality)]
        quality, cost = np.mean(measured, axis=0).tolist() if measured else (None, None)
        return ChosenChain(**dict(named(best)), holdout_quality=quality, holdout_cost=cost)

    def of_size(size: int) -> list[_MeasuredChain]:
        return [one for one in results if len(one.indices) == size]

    m = len(validation.models)
    best, *following = sorted(results, key=lambda one: _rank(one, one.overall))
    runners_up = [named(one) for one in following[:N_RUNNERS_UP]]
    return ChainSearch(
        pool=validation.models,
        split=split,
        objective=rule.objective,
        budget=rule.budget,
        n_chains=2**m - 1,
        n_measured=len({one.indices for one in results}),
        n_halves=len(best.halves),
        n_same=best_on_halves(results).count(best),
        chosen=chosen(results),
        full=chosen(of_size(m)),
        pair=chosen(of_size(2)) if m > 1 else None,
        single=chosen(of_size(1)),
        runners_up=tuple(one for one in runners_up if one.quality is not None),
    )
