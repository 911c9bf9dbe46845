"""The best sub-chain of a pool, with its threshold, found on validation among all of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import combinations

import numpy as np

from cauc_ray.errors import BudgetError, ConfigError, unknown_name
from cauc_ray.numbers.calibrators import CalibratorKind
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.subsets import SubsetPoint, sweep_subsets
from cauc_ray.numbers.sweep import most_within
from cauc_ray.numbers.types import Bools
from cauc_ray.policies.calibrated import require_calibrator
from cauc_ray.policies.evidence import ChainSearch, ChosenChain, FoundChain
from cauc_ray.policies.fitting import require_base_rule
from cauc_ray.policies.growing import BaseGrowth, Grown, Growth, RFGrowth
from cauc_ray.policies.holdout import Half, halves, measure_held_out
from cauc_ray.policies.threshold import ThresholdRule

MOST_MODELS = 12
N_RUNNERS_UP = 5

# How often validation is halved. Each half of an F1 needs a sweep of its own, where accuracies share one.
_HALVINGS = {"accuracy": 3, "macro-f1": 1}
# Macro-F1 is rounded at 1e-12; a chain is given up only where it is worse by more than rounding.
_QUALITY_TOLERANCE = 1e-9


def check_pool(models: Iterable[str]) -> None:
    """Raise ConfigError where a pool is too large to search all its sub-chains."""
    n = len(tuple(models))
    if n > MOST_MODELS:
        raise ConfigError(f"a search takes up to {MOST_MODELS} models, got {n}: leave some out of --models")


def search_chains(
    method: str,
    calibration: ChainLogits,
    validation: ChainLogits | None,
    rule: ThresholdRule,
    split: str,
    *,
    calibrator: CalibratorKind = "temperature",
) -> ChainSearch:
    """Find the sub-chain of a pool whose threshold, as the rule gives it, has the highest quality on validation.

    calibration, validation: of all models of the pool, at most MOST_MODELS, in any order; chains are ordered by mean
    cost on calibration, those that cost the same as given.   split: validation's name.
    Each of the 2^M - 1 sub-chains is measured as a fit of its models would, or proven worse than those that are named
    in the result: see _Walk. Among equals the cheaper is chosen, then the shorter.
    Raises ConfigError for a pool that is too large or a rule that the method cannot follow, DataError where labels are
    missing, BudgetError where no model is as cheap as the budget.
    """
    check_pool(calibration.models)
    if method not in _GROWTHS:
        raise ConfigError(unknown_name("method", method, _GROWTHS))
    require_calibrator(calibrator, method, len(calibration.models))
    if method == "base":
        require_base_rule(rule)
    if validation is None:
        raise ConfigError("a search chooses the chain on a validation split; give one")
    calibration.require_labels("calibration")
    validation.require_labels("choosing a chain")
    order = np.argsort(calibration.costs.means, kind="stable").tolist()
    calibration, validation = calibration.of_models(order), validation.of_models(order)
    _require_affordable(validation, rule)

    cut = halves(len(validation), _HALVINGS[rule.objective])
    members = np.stack([np.full(len(validation), True), *(half.chosen_on for half in cut)])
    walk = _Walk(_GROWTHS[method](calibration, validation, calibrator), validation, rule, members)
    walk.visit_all()
    return _report(walk, cut, split)


_GROWTHS: dict[str, type[BaseGrowth] | type[RFGrowth]] = {"base": BaseGrowth, "rf": RFGrowth}


def _require_affordable(validation: ChainLogits, rule: ThresholdRule) -> None:
    means = validation.costs.means
    if rule.budget is not None and means.min() > most_within(rule.budget):
        cheapest, unit = int(means.argmin()), validation.costs.unit
        raise BudgetError(
            f"budget {rule.budget:g} {unit} is below what the cheapest chain costs, {means[cheapest]:g} {unit} "
            f"({validation.models[cheapest]!r} alone); raise the budget or add a cheaper model"
        )


class _Walk:
    """Visits all sub-chains depth first, so that those which begin alike share their fits, and skips hopeless ones.

    A chain that goes on from a beginning P answers as P does where P's confidences reach the threshold. For every
    other example it pays P's models and at least the cheapest call of a later one. Let an imagined chain pay exactly
    that and be right on all of those examples: at each threshold it costs no more, and its answers are those of the
    real chain with some wrong ones made right. That never lowers accuracy, nor macro-F1: the F1 of the right class
    rises, as 2 (h + 1) / (l + a + 1) >= 2 h / (l + a) for h hits among l labels and a answers; that of the wrong
    class, which loses a false answer, does not fall, or it leaves the mean, where it counted 0. So the imagined chain's
    best quality within the budget bounds that of all chains that begin with P. They are skipped where it is below what
    is already found: on all of validation below the last of the runners-up, and on every half below the best.
    """

    def __init__(self, growth: Growth, validation: ChainLogits, rule: ThresholdRule, members: Bools) -> None:
        """Take a pool in order of cost.   members: bool (H, N), the examples to choose on, all of them first."""
        self.growth, self.validation, self.rule = growth, validation, rule
        self.found: dict[tuple[int, ...], SubsetPoint] = {}
        self._members = members
        self._leaders = [-np.inf] * (1 + N_RUNNERS_UP)
        self._incumbents = np.full(len(members), -np.inf)

    @property
    def n_models(self) -> int:
        """Return the size of the pool."""
        return len(self.validation.models)

    def visit_all(self) -> None:
        """Measure every chain that is not proven hopeless."""
        m = self.n_models
        # What the result names in any case; and the better the first chains, the more others can be skipped.
        for size in sorted({1, min(2, m), m}):
            for places in combinations(range(m), size):
                self._measure(self.build(places))
        for place in range(m):
            self._visit(self.growth.grow(None, place))

    def build(self, places: tuple[int, ...]) -> Grown:
        """Return a chain of the pool."""
        grown = self.growth.grow(None, places[0])
        for place in places[1:]:
            grown = self.growth.grow(grown, place)
        return grown

    def given_threshold(self, places: tuple[int, ...]) -> float | None:
        """Return a chain's threshold where it is not chosen on validation."""
        if self.rule.threshold is not None or self.rule.budget is not None:
            return self.rule.threshold
        return self.growth.reference(places[-1])

    def _visit(self, grown: Grown) -> None:
        if grown.places not in self.found:
            self._measure(grown)
        later = range(grown.places[-1] + 1, self.n_models)
        if not later or self._hopeless(grown):
            return
        for place in later:
            self._visit(self.growth.grow(grown, place))

    def _measure(self, grown: Grown) -> None:
        trace, threshold = grown.trace(), self.given_threshold(grown.places)
        swept = sweep_subsets(
            trace.confidences[:, :-1],
            trace.predictions,
            self.validation.labels,
            self.validation.of_models(grown.places).costs,
            self._members,
            self.rule.objective,
        )
        point = swept.best(self.rule.budget) if threshold is None else swept.at(threshold)
        self.found[grown.places] = point
        heapq.heappushpop(self._leaders, float(point.quality[0]))
        self._incumbents = np.maximum(self._incumbents, point.quality)
        self._incumbents[0] = self._leaders[0]

    def _hopeless(self, grown: Grown) -> bool:
        """Say whether no chain that goes on from this one can be among those that the result names."""
        if self.rule.budget is None:
            return False
        per_call = self.validation.costs.per_call
        own, later = per_call[..., list(grown.places)], per_call[..., grown.places[-1] + 1 :].min(axis=-1)
        if float(np.mean(own.sum(axis=-1) + later)) <= self.rule.budget:
            return False  # every example can go on, and the imagined chain is always right
        trace = grown.trace_to(self.validation.labels)
        swept = sweep_subsets(
            trace.confidences[:, :-1],
            trace.predictions,
            self.validation.labels,
            Costs(self.validation.costs.unit, np.concatenate([own, later[..., None]], axis=-1)),
            self._members,
            self.rule.objective,
        )
        bound = swept.best(self.rule.budget).quality
        return bool((bound < self._incumbents - _QUALITY_TOLERANCE).all())


def _ranked(walk: _Walk, subset: int, sizes: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """Return the chains of these sizes from the best on a subset to the worst."""

    def key(places: tuple[int, ...]) -> tuple[float, float, int, tuple[int, ...]]:
        point = walk.found[places]
        # Sums of the same costs in another order are equal but for rounding.
        return -point.quality[subset], float(f"{point.cost[subset]:.9e}"), len(places), places

    wanted = set(sizes)
    yield from sorted((places for places in walk.found if len(places) in wanted), key=key)


def _report(walk: _Walk, cut: list[Half], split: str) -> ChainSearch:
    m = walk.n_models
    of_sizes = {"chosen": range(1, m + 1), "full": [m], "pair": [2], "single": [1]}
    choices = {}
    for name, sizes in of_sizes.items():
        if name != "pair" or m > 1:
            choices[name] = _choice(walk, cut, sizes)
    best, *others = _ranked(walk, 0, of_sizes["chosen"])
    on_halves = [next(_ranked(walk, 1 + place, of_sizes["chosen"])) for place in range(len(cut))]
    runners_up = [_found(walk, places) for places in others[:N_RUNNERS_UP]]
    return ChainSearch(
        pool=walk.validation.models,
        split=split,
        objective=walk.rule.objective,
        budget=walk.rule.budget,
        n_chains=2**m - 1,
        n_measured=len(walk.found),
        n_halves=len(cut),
        n_same=on_halves.count(best),
        chosen=choices["chosen"],
        full=choices["full"],
        pair=choices.get("pair"),
        single=choices["single"],
        runners_up=tuple(found for found in runners_up if found.quality is not None),
    )


def _found(walk: _Walk, places: tuple[int, ...]) -> FoundChain:
    point = walk.found[places]
    quality, cost = float(point.quality[0]), float(point.cost[0])
    affordable = np.isfinite(quality)
    return FoundChain(
        models=tuple(walk.validation.models[place] for place in places),
        quality=quality if affordable else None,
        cost=cost if affordable else None,
    )


def _choice(walk: _Walk, cut: list[Half], sizes: Iterable[int]) -> ChosenChain:
    """Choose among the chains of these sizes, on all of validation and on each half."""
    held_out = []
    for place, half in enumerate(cut):
        on_half = next(_ranked(walk, 1 + place, sizes))
        if np.isfinite(walk.found[on_half].quality[1 + place]):
            trace, given = walk.build(on_half).trace(), walk.given_threshold(on_half)
            held_out.append(measure_held_out(trace, walk.validation.of_models(on_half), half, walk.rule, given))
    quality, cost = np.mean(held_out, axis=0).tolist() if held_out else (None, None)
    found = _found(walk, next(_ranked(walk, 0, sizes)))
    return ChosenChain(**dict(found), holdout_quality=quality, holdout_cost=cost)
