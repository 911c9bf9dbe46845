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

    indices: of the models in the pool.   trace: its calls are of the pool's models.   reference: the default threshold;
    None for the best on validation.
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
    """Return the trace of a cascade of some of a pool's models.   steps: answers and confidences of each, (N,)."""
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
        own = [policy.own(index, logits) for index, logits in enumerate(validation.logits[: last + 1])]
        yield from _ending(policy, own, (), None, policy.fuse(last, own[last], None), len(calibration.models))


def _ending(
    policy: BasePolicy, own: list[Step], indices: tuple[int, ...], state: Floats | None, end: Step, n_models: int
) -> Iterator[SubChain]:
    """Return all chains that start with these indices and end with the policy's last stage.

    own: answers of all stages.   state: after these indices.   end: the last stage's step from that state.
    n_models: of the pool.
    """
    last = len(policy.stages) - 1
    steps = [(step.predictions, step.confidences) for step in (*(own[index] for index in indices), end)]
    chain = *indices, last
    yield SubChain("base", chain, _in_turn(chain, steps, n_models), policy.threshold)
    for index in range(indices[-1] + 1 if indices else 0, last):
        after = state, end
        if policy.stages[index].fused:
            longer = policy.fuse(index, own[index], state).state
            after = longer, policy.fuse(last, own[last], longer)
        yield from _ending(policy, own, (*indices, index), *after, n_models)


_METHODS = {"base": sub_chains_of_base, "rf": sub_chains_of_rf}
_SEARCHED = (*_METHODS, "stacked", "auto")
# Stacked cascades take longer to fit: of a pool's sub-chains, those that are best as CAUC-RF are, so many at most.
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

    calibration, validation: of all models of the pool, at most MOST_MODELS, in any order; chains are ordered by mean
    cost on calibration, ties as given.   split: validation's name.
    method: base, rf or stacked; auto is stacked at a budget, with embeddings where there are some. Each of the 2^M - 1
    sub-chains is measured as a fit of its models would be; stacked cascades, which take longer to fit, on those that
    are best as CAUC-RF. Among equals the cheapest is chosen, then the shortest.
    Raises ConfigError for a pool that is too large or a rule that the method does not support, DataError if labels are
    missing, BudgetError if no model is within the budget.
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
    found = _measured(subs, validation, rule, halves)
    if method in ("stacked", "auto"):
        shortlist = _shortlist(found, (), len(calibration.chain.models))
        stacked = (
            SubChain("stacked", indices, cascade_of(policy)(validation))
            for indices, policy in _stacked(calibration, validation, shortlist)
        )
        found = _measured(stacked, validation, rule, halves)
    return _report(found, validation.chain, rule, split)


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
) -> list[_Found]:
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


def _shortlist(found: Sequence[_Found], budgets: Sequence[float], n_models: int) -> list[tuple[int, ...]]:
    """Return the chains that stacked cascades are fitted to: the best, the best on each half, and the whole one.

    found: CAUC-RF's, of all sub-chains.   budgets: each of which has its best; without them the rule has.
    """
    ranked = [sorted(found, key=lambda one: _rank(one, one.within(budget))) for budget in budgets or (None,)]
    firsts = [next(one for one in ranked[-1] if len(one.indices) == size) for size in (1, 2) if size <= n_models]
    on_halves = [min(found, key=lambda one: _rank(one, one.halves[half])) for half in range(len(found[0].halves))]
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
class _Found:
    """A method's chain measured on validation.

    points: those that a budget can choose; their quality is accuracy.   whole: at its threshold there, of the
    objective.   halves: on each half, at the threshold chosen on it.   held_out: at that threshold on the other half.
    """

    method: str
    indices: tuple[int, ...]
    points: OperatingPoints
    whole: OperatingPoint
    halves: tuple[OperatingPoint, ...]
    held_out: tuple[OperatingPoint, ...]

    def within(self, budget: float | None) -> OperatingPoint:
        """Return the point of highest accuracy within a budget; without one the whole."""
        if budget is None:
            return self.whole
        affordable = np.flatnonzero(self.points.cost <= most_within(budget))
        if not len(affordable):
            return _UNAFFORDABLE
        best = affordable[-1]  # of Pareto-optimal points by rising cost
        return OperatingPoint(
            *(float(of[best]) for of in (self.points.settings, self.points.cost, self.points.quality))
        )


def _measure(one: SubChain, parts: Sequence[tuple[Ints, ChainLogits]], rule: ThresholdRule) -> _Found:
    """Measure a chain.   parts: rows of validation with their chain: all of them, then halves."""
    given = rule.threshold if rule.threshold is not None or rule.budget is not None else one.reference

    def chosen(on: Frontier) -> OperatingPoint:
        try:
            return on.best(rule.budget) if given is None else on.at(given)
        except BudgetError:
            return _UNAFFORDABLE

    traces = [(one.trace.of_rows(rows), chain) for rows, chain in parts]
    whole, *on_halves = (trace.frontier(chain, rule.objective) for trace, chain in traces)
    own = tuple(chosen(half) for half in on_halves)
    pairs = zip(on_halves[::-1], own, strict=True)
    held_out = tuple(_UNAFFORDABLE if of is _UNAFFORDABLE else other.at(of.threshold) for other, of in pairs)
    accuracy = whole if rule.objective == "accuracy" else traces[0][0].frontier(parts[0][1])
    points = accuracy.some(pareto(whole.cost, whole.quality))
    return _Found(one.method, one.indices, points, chosen(whole), own, held_out)


def _rank(found: _Found, on: OperatingPoint) -> tuple[float, float, int, tuple[int, ...]]:
    """Return a sort key that orders chains from best to worst on some examples."""
    # Sums of the same costs in different orders differ by rounding.
    return -on.quality, float(f"{on.cost:.9e}"), len(found.indices), found.indices


def _report(found: list[_Found], validation: ChainLogits, rule: ThresholdRule, split: str) -> ChainSearch:
    def named(one: _Found) -> FoundChain:
        affordable = np.isfinite(one.whole.quality)
        return FoundChain(
            method=one.method,
            models=tuple(validation.models[index] for index in one.indices),
            quality=one.whole.quality if affordable else None,
            cost=one.whole.cost if affordable else None,
        )

    def best_on_halves(among: list[_Found]) -> list[_Found]:
        return [min(among, key=lambda one: _rank(one, one.halves[half])) for half in range(len(among[0].halves))]

    def chosen(among: list[_Found]) -> ChosenChain:
        """Choose among chains on all of validation, and on each half to measure the choice on the other."""
        best = min(among, key=lambda one: _rank(one, one.whole))
        held_out = [one.held_out[half] for half, one in enumerate(best_on_halves(among))]
        measured = [(of.quality, of.cost) for of in held_out if np.isfinite(of.quality)]
        quality, cost = np.mean(measured, axis=0).tolist() if measured else (None, None)
        return ChosenChain(**dict(named(best)), holdout_quality=quality, holdout_cost=cost)

    def of_size(size: int) -> list[_Found]:
        return [one for one in found if len(one.indices) == size]

    m = len(validation.models)
    best, *others = sorted(found, key=lambda one: _rank(one, one.whole))
    runners_up = [named(one) for one in others[:N_RUNNERS_UP]]
    return ChainSearch(
        pool=validation.models,
        split=split,
        objective=rule.objective,
        budget=rule.budget,
        n_chains=2**m - 1,
        n_measured=len({one.indices for one in found}),
        n_halves=len(best.halves),
        n_same=best_on_halves(found).count(best),
        chosen=chosen(found),
        full=chosen(of_size(m)),
        pair=chosen(of_size(2)) if m > 1 else None,
        single=chosen(of_size(1)),
        runners_up=tuple(one for one in runners_up if one.quality is not None),
    )
