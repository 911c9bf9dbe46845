"""Search for the best sub-chain of a pool, with its threshold, on validation among all sub-chains.

Sub-chains are visited depth first, so that common prefixes share fits and steps. Each is measured as a fit of its
models would be, by the steps of fits and replays; of large tables, fusions are fitted to float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from cauc_ray.errors import BudgetError, ConfigError, unknown_name
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import ChainLogits, cost_text
from cauc_ray.numbers.sweep import most_within
from cauc_ray.policies.evidence import ChainSearch, ChosenChain, FoundChain
from cauc_ray.policies.method import METHODS, method_named
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.pools import MeasuredChain, Pool, check_pool, rank
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples

N_RUNNERS_UP = 5


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
    fit, only on those that are best as CAUC-RF. A budget at a confidence is kept by all sub-chains together. Chains are
    ordered by mean cost on calibration, ties by the order in the pool. Among equals the cheapest is chosen, then the
    shortest.

    Args:
        method: A method that fits sub-chains.
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
    registered = method_named(method)
    if registered.sub_chains is None:
        searched = [name for name, of in METHODS.items() if of.sub_chains is not None]
        raise ConfigError(unknown_name("method", method, searched))
    registered.require_calibrator(calibrator, len(calibration.chain.models))
    if validation is None:
        raise ConfigError("a search chooses the chain on a validation split; give one")
    calibration.chain.require_labels("calibration")
    validation.chain.require_labels("choosing a chain")
    pool = Pool.of(calibration, validation, of_sub_chains(rule, len(calibration.chain.models)), calibrator)
    _require_affordable(pool.validation.chain, rule)
    return _report(pool.measured(registered.sub_chains(pool)), pool.validation.chain, rule, split)


def of_sub_chains(rule: ThresholdRule, n_models: int) -> ThresholdRule:
    """Return the rule of each sub-chain of a pool: a budget at a confidence is one that all of them keep together."""
    return rule if rule.confidence is None else replace(rule, n_candidates=2**n_models - 1)


def with_search(policy: Policy, search: ChainSearch) -> Policy:
    """Return a policy of the chain that a search chose, with what is expected of the choice.

    On validation its chain looks better than on new examples, as its threshold does: the expected accuracy is that of
    each half by what the other one chooses.
    """
    changes: dict[str, Any] = {"search": search}
    measures, held_out = policy.on_selection or policy.expected, search.chosen.holdout_accuracy
    if measures is not None and held_out is not None:
        expected = measures.model_copy(update={"accuracy": measures.to_come(held_out=held_out)})
        changes |= {"on_selection": measures, "expected": expected}
    return policy.model_copy(update=changes)


def _require_affordable(validation: ChainLogits, rule: ThresholdRule) -> None:
    means = validation.costs.means
    if rule.budget is not None and means.min() > most_within(rule.budget):
        cheapest, unit = int(means.argmin()), validation.costs.unit
        raise BudgetError(
            f"budget {cost_text(rule.budget, unit, 6)} is below the cost of the cheapest chain, "
            f"{cost_text(means[cheapest], unit, 6)} ({validation.models[cheapest]!r} alone); raise the "
            "budget or add a cheaper model"
        )


def _report(results: list[MeasuredChain], validation: ChainLogits, rule: ThresholdRule, split: str) -> ChainSearch:
    def named(one: MeasuredChain) -> FoundChain:
        affordable = np.isfinite(one.overall.quality)
        return FoundChain(
            method=one.method,
            models=tuple(validation.models[index] for index in one.indices),
            quality=one.overall.quality if affordable else None,
            cost=one.overall.cost if affordable else None,
        )

    def best_on_halves(among: list[MeasuredChain]) -> list[MeasuredChain]:
        return [min(among, key=lambda one: rank(one, one.halves[half])) for half in range(len(among[0].halves))]

    def chosen(among: list[MeasuredChain]) -> ChosenChain:
        """Choose among chains on all of validation, and on each half to measure the choice on the other."""
        best = min(among, key=lambda one: rank(one, one.overall))
        held_out = [(one.held_out[half], one.held_out_accuracy[half]) for half, one in enumerate(best_on_halves(among))]
        measured = [(on.quality, on.cost, accuracy) for on, accuracy in held_out if np.isfinite(on.quality)]
        quality, cost, accuracy = np.mean(measured, axis=0).tolist() if measured else (None, None, None)
        return ChosenChain(**dict(named(best)), holdout_quality=quality, holdout_cost=cost, holdout_accuracy=accuracy)

    def of_size(size: int) -> list[MeasuredChain]:
        return [one for one in results if len(one.indices) == size]

    m = len(validation.models)
    best, *following = sorted(results, key=lambda one: rank(one, one.overall))
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
