"""Search for the best sub-chain of a pool, with its threshold, on validation among all sub-chains.

Sub-chains are visited depth first, so that common prefixes share fits and steps. Each is measured exactly as a fit of
its models would be, by the steps of fits and replays.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cauc_ray.errors import BudgetError, CaucWarning, ConfigError, unknown_name
from cauc_ray.numbers.calibration import fit_pair
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.logits import top_option
from cauc_ray.numbers.sweep import Frontier, OperatingPoint, most_within, sweep
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.calibrated import calibrator_of, require_calibrator
from cauc_ray.policies.cauc import BasePolicy, fold
from cauc_ray.policies.evidence import ChainSearch, ChosenChain, FoundChain
from cauc_ray.policies.fitting import fit_base, require_base_rule
from cauc_ray.policies.policy import Step
from cauc_ray.policies.stacking import variants_of
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import trace_policy

MOST_MODELS = 12
N_RUNNERS_UP = 5

# A step's answers, int32 (N,), and its confidences in them, float64 (N,).
_Answers: TypeAlias = tuple[Ints, Floats]


@dataclass(frozen=True, slots=True)
class SubChain:
    """The answers on validation, for any threshold, of a fitted chain of S of a pool's models.

    indices: of the models in the pool.   steps: S.   reference: the default threshold; None for the best on validation.
    """

    indices: tuple[int, ...]
    steps: tuple[_Answers, ...]
    reference: float | None = None


def sub_chains_of_rf(calibration: ChainLogits, validation: ChainLogits, kind: CalibratorKind) -> Iterator[SubChain]:
    """Fit CAUC-RF to every sub-chain of a pool (paper, eq. 8-10): each prefix has its own pair and its own r."""
    n_models = len(calibration.models)
    calibrators = [calibrator_of(calibration, index, kind)[0] for index in range(n_models)]
    scores = [
        (calibrator.scores(calibration.logits[index]), calibrator.scores(validation.logits[index]))
        for index, calibrator in enumerate(calibrators)
    ]

    def after(
        indices: tuple[int, ...], state: tuple[Floats, Floats] | None, steps: tuple[_Answers, ...]
    ) -> Iterator[SubChain]:
        for index in range(indices[-1] + 1 if indices else 0, n_models):
            r, r_validation = scores[index]
            if state is not None:
                alpha, beta = fit_pair(state[0], r, calibration.labels).temperatures
                r, r_validation = fold(r, alpha, beta, state[0]), fold(r_validation, alpha, beta, state[1])
            longer, answered = (*indices, index), (*steps, top_option(r_validation))
            yield SubChain(longer, answered)
            yield from after(longer, (r, r_validation), answered)

    return after((), None, ())


def sub_chains_of_base(calibration: ChainLogits, validation: ChainLogits, kind: CalibratorKind) -> Iterator[SubChain]:
    """Fit CAUC Base to every sub-chain of a pool (paper, algorithm 1): fusion depends only on the last model.

    One fit for each last model serves all chains that end there. Stages before it answer by themselves, independently
    of other stages, and only fused stages change the last answer.
    """
    for last in range(len(calibration.models)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CaucWarning)  # the final fit of the chosen chain issues the warnings
            policy = fit_base(calibration.of_models(range(last + 1)), calibrator=kind)
        own = [policy.own(index, logits) for index, logits in enumerate(validation.logits[: last + 1])]
        yield from _ending(policy, own, (), None, policy.fuse(last, own[last], None))


def _ending(
    policy: BasePolicy, own: list[Step], indices: tuple[int, ...], state: Floats | None, end: Step
) -> Iterator[SubChain]:
    """Return all chains that start with these indices and end with the policy's last stage.

    own: answers of all stages.   state: after these indices.   end: the last stage's step from that state.
    """
    last = len(policy.stages) - 1
    steps = *(own[index] for index in indices), end
    answers = tuple((step.predictions, step.confidences) for step in steps)
    yield SubChain((*indices, last), answers, policy.threshold)
    for index in range(indices[-1] + 1 if indices else 0, last):
        after = state, end
        if policy.stages[index].fused:
            longer = policy.fuse(index, own[index], state).state
            after = longer, policy.fuse(last, own[last], longer)
        yield from _ending(policy, own, (*indices, index), *after)


def sub_chains_of_stacked(
    calibration: ChainLogits, validation: ChainLogits, chains: Iterable[tuple[int, ...]]
) -> Iterator[SubChain]:
    """Fit stacked cascades to some sub-chains: every variant of each."""
    for indices in chains:
        own = validation.of_models(indices)
        for policy in variants_of(calibration.of_models(indices), own):
            trace = trace_policy(policy, own)
            yield SubChain(indices, tuple(zip(trace.predictions.T, trace.compared.T, strict=True)))


_METHODS = {"base": sub_chains_of_base, "rf": sub_chains_of_rf}
# What method auto chooses among.
AUTO = ("base", "rf", "stacked")
# A stacked cascade takes seconds to fit: of a pool's sub-chains, those that are best as CAUC-RF are.
N_STACKED = 8


def check_pool(models: Iterable[str]) -> None:
    """Raise ConfigError if a pool is too large to search all its sub-chains."""
    n = len(tuple(models))
    if n > MOST_MODELS:
        raise ConfigError(f"a search supports up to {MOST_MODELS} models, got {n}; reduce --models")


def search_chains(
    method: str,
    calibration: ChainLogits,
    validation: ChainLogits | None,
    rule: ThresholdRule,
    split: str,
    *,
    calibrator: CalibratorKind = "temperature",
) -> ChainSearch:
    """Find the sub-chain of a pool that has the highest quality on validation, at the threshold chosen by the rule.

    calibration, validation: of all models of the pool, at most MOST_MODELS, in any order; chains are ordered by mean
    cost on calibration, ties as given.   split: validation's name.
    method: base, rf, stacked, or auto for the best of the three at the rule's budget. Each of the 2^M - 1 sub-chains is
    measured as a fit of its models would be; stacked cascades, which take longer to fit, on those that are best as
    CAUC-RF. Among equals the cheapest is chosen, then the shortest. Raises ConfigError for a pool that is too large or
    a rule that the method does not support, DataError if labels are missing, BudgetError if no model is within the
    budget.
    """
    check_pool(calibration.models)
    methods = AUTO if method == "auto" else (method,)
    for name in methods:
        if name not in AUTO:
            raise ConfigError(unknown_name("method", name, (*AUTO, "auto")))
        require_calibrator(calibrator, name, len(calibration.models))
    if method == "base":
        require_base_rule(rule)
    if method == "auto" and rule.budget is None:
        raise ConfigError("method auto compares methods at a budget; give one")
    if validation is None:
        raise ConfigError("a search chooses the chain on a validation split; give one")
    calibration.require_labels("calibration")
    validation.require_labels("choosing a chain")
    order = np.argsort(calibration.costs.means, kind="stable").tolist()
    calibration, validation = calibration.of_models(order), validation.of_models(order)
    _require_affordable(validation, rule)
    halves = _halves(len(validation))
    found: list[_Found] = []
    for name in methods:
        if name == "stacked":
            as_rf = [one for one in found if one.method == "rf"] or [
                _measure(one, validation, rule, halves, "rf")
                for one in sub_chains_of_rf(calibration, validation, calibrator)
            ]
            chains = _promising(as_rf, len(calibration.models))
            subs = sub_chains_of_stacked(calibration, validation, chains)
        else:
            subs = _METHODS[name](calibration, validation, calibrator)
        found += [_measure(one, validation, rule, halves, name) for one in subs]
    return _report(found, validation, rule, split)


def _promising(found: Sequence[_Found], n_models: int) -> list[tuple[int, ...]]:
    """Return the chains that stacked cascades are fitted to: the best on all rows and on each half, and the whole one.

    found: CAUC-RF's, of all sub-chains.
    """
    ranked = sorted(found, key=lambda one: _rank(one, one.whole))
    firsts = [next(one for one in ranked if len(one.indices) == size) for size in (1, 2) if size <= n_models]
    on_halves = [min(found, key=lambda one: _rank(one, one.halves[half])) for half in range(len(found[0].halves))]
    chains = [one.indices for one in (*ranked[:N_STACKED], *firsts, *on_halves)]
    return list(dict.fromkeys([*chains, tuple(range(n_models))]))


def _require_affordable(validation: ChainLogits, rule: ThresholdRule) -> None:
    means = validation.costs.means
    if rule.budget is not None and means.min() > most_within(rule.budget):
        cheapest, unit = int(means.argmin()), validation.costs.unit
        raise BudgetError(
            f"budget {rule.budget:g} {unit} is below the cost of the cheapest chain, {means[cheapest]:g} {unit} "
            f"({validation.models[cheapest]!r} alone); raise the budget or add a cheaper model"
        )


def _halves(n: int, seed: int = 0) -> tuple[Ints, ...]:
    """Return the ascending rows of two random halves of n examples; none for a single example."""
    order = np.random.default_rng(seed).permutation(n)
    return () if n < 2 else (np.sort(order[: n // 2]), np.sort(order[n // 2 :]))


# The quality of a chain without a threshold within the budget.
_UNAFFORDABLE = OperatingPoint(threshold=np.nan, cost=np.inf, quality=-np.inf)


@dataclass(frozen=True, slots=True)
class _Found:
    """A method's chain measured on validation.

    whole: at its threshold there.   halves: on each half, at the threshold chosen on it.   held_out: at that threshold
    on the other half.
    """

    method: str
    indices: tuple[int, ...]
    whole: OperatingPoint
    halves: tuple[OperatingPoint, ...]
    held_out: tuple[OperatingPoint, ...]


def _measure(
    one: SubChain, validation: ChainLogits, rule: ThresholdRule, halves: tuple[Ints, ...], method: str
) -> _Found:
    given = rule.threshold if rule.threshold is not None or rule.budget is not None else one.reference
    of_chain = validation.costs.of_models(one.indices)
    predictions, confidences = (np.stack(of) for of in zip(*one.steps, strict=True))

    def swept(rows: Ints) -> Frontier:
        # Contiguous by stage, the order in which a sweep reads them.
        inner, answers = confidences[:-1].take(rows, axis=1).T, predictions.take(rows, axis=1).T
        return sweep(inner, answers, validation.labels[rows], of_chain.of_rows(rows), rule.objective)

    def chosen(on: Frontier) -> OperatingPoint:
        try:
            return on.best(rule.budget) if given is None else on.at(given)
        except BudgetError:
            return _UNAFFORDABLE

    on_halves = [swept(half) for half in halves]
    own = tuple(chosen(half) for half in on_halves)
    pairs = zip(on_halves[::-1], own, strict=True)
    held_out = tuple(_UNAFFORDABLE if of is _UNAFFORDABLE else other.at(of.threshold) for other, of in pairs)
    return _Found(method, one.indices, chosen(swept(np.arange(len(validation)))), own, held_out)


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
