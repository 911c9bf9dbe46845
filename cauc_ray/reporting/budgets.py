"""Every budget's operating point: chosen on validation as `cauc fit --budget` chooses it, measured on test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.chain import Chain
from cauc_ray.policies.evidence import Measures
from cauc_ray.policies.trace import Trace, measure, trace_policy
from cauc_ray.reporting.measured import Measured

# Places of the slider between the cheapest point and the dearest, about.
_N_PLACES = 120
# Macro-F1 along a sweep is rounded so finely.
_ROUNDING = 1e-11
# A cost below this share of another is less.
_NOTICED = 0.99


@dataclass(frozen=True, slots=True)
class AtThreshold:
    """A threshold with what it has on validation and on test."""

    threshold: float
    validation: Measures
    test: Measures


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """An operating point that is the best within some budgets.   cost, quality: on validation, as the choice has them.

    quality is of the policy's objective.
    """

    cost: float
    quality: float
    at: AtThreshold


@dataclass(frozen=True, slots=True)
class Budgets:
    """All operating points that any budget can choose, by rising cost, and the budgets at the slider's places.

    objective: what a budget buys.   places: rising budgets, the cheapest point's cost first.   start: the place of
    the policy's own budget, or of what it costs on validation at its own threshold.   own: the policy as it is.
    better: what is as good on validation as that, and noticeably cheaper; None if nothing is.
    """

    objective: str
    unit: str
    points: tuple[BudgetPoint, ...]
    places: tuple[float, ...]
    start: int
    own: AtThreshold
    better: BudgetPoint | None


def find_budgets(measured: Measured) -> Budgets | None:
    """Find every budget's operating point, None where there is no labelled validation split to choose on.

    The points are all that validation tells apart, not the thinned curve in the policy's file.
    """
    policy, validation = measured.policy, measured.validation
    if validation is None:
        return None
    objective = policy.threshold_choice.objective or "accuracy"
    trace = trace_policy(policy, validation)
    on_validation, on_test = (trace, validation), (measured.trace, measured.test)
    of_all = trace.frontier(validation, objective)
    best = of_all.pareto(max(2, len(of_all.settings)))
    points = tuple(
        BudgetPoint(cost, quality, _at(on_validation, on_test, threshold, objective))
        for threshold, cost, quality in zip(
            best.settings.tolist(), best.cost.tolist(), best.quality.tolist(), strict=True
        )
    )
    own = _at(on_validation, on_test, policy.threshold, objective)
    asked = policy.budget if policy.budget is not None else own.validation.cost
    places = _places(points[0].cost, points[-1].cost)
    asked = _rounded_up(asked)
    if places[0] < asked < places[-1]:
        places = tuple(sorted({*places, asked}))
    start = int(np.searchsorted(places, asked, side="right")) - 1
    return Budgets(objective, best.unit, points, places, max(0, start), own, _better(points, own))


def _better(points: Sequence[BudgetPoint], own: AtThreshold) -> BudgetPoint | None:
    """Return the cheapest point that is as good on validation as the policy's own threshold, if it saves something."""
    f1 = own.validation.macro_f1
    assert own.validation.accuracy is not None
    quality = own.validation.accuracy.value if f1 is None else f1
    as_good = next((point for point in points if point.quality >= quality - _ROUNDING), points[-1])
    return as_good if as_good.quality >= quality - _ROUNDING and as_good.cost < _NOTICED * own.validation.cost else None


def _at(validation: tuple[Trace, Chain], test: tuple[Trace, Chain], threshold: float, objective: str) -> AtThreshold:
    def on(trace: Trace, chain: Chain, *, with_f1: bool) -> Measures:
        return measure(trace.at(threshold, chain), chain, chain.source, with_f1=with_f1)

    return AtThreshold(threshold, on(*validation, with_f1=objective != "accuracy"), on(*test, with_f1=True))


def _places(low: float, high: float) -> tuple[float, ...]:
    """Return budgets from one cost to another: both ends, rounded up, and round numbers between them."""
    low, high = _rounded_up(low), _rounded_up(high)
    if not high > low:
        return (low,)
    step = _round_step((high - low) / _N_PLACES)
    digits = max(0, -math.floor(math.log10(step)))
    inner = (round(n * step, digits) for n in range(math.floor(low / step) + 1, math.ceil(high / step)))
    return (low, *(budget for budget in inner if low < budget < high), high)


def _rounded_up(cost: float) -> float:
    """Return a number of six digits that is no less than a cost, so that it buys what the cost does."""
    near = float(f"{cost:.6g}")
    if near >= cost:
        return near
    return float(f"{near + 10.0 ** (math.floor(math.log10(cost)) - 5):.6g}")


def _round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, ... times a power of ten that is no less than a number above 0."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-12))
