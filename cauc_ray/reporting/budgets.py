"""Every budget's operating point of a policy, for the slider of its page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cauc_ray.display import number, percent, share_text
from cauc_ray.numbers.sweep import COST_TOLERANCE
from cauc_ray.policies.evidence import Measures
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.solved import SolvedPolicy
from cauc_ray.policies.threshold import Halves, without_optimism
from cauc_ray.policies.trace import measure, trace_policy
from cauc_ray.reporting.measured import Measured

# A number as the library has it, None where there is none, and the text in which it is shown.
Figure: TypeAlias = tuple[float | None, str]
# Steps of the slider from the cheapest point to the most expensive.
N_STEPS = 200
# Macro-F1 along a sweep is rounded so finely.
_ROUNDING = 1e-11
# A cost below this share of another is less.
_NOTICED = 0.99


@dataclass(frozen=True, slots=True)
class BudgetPoint:
    """A threshold with its figures.

    Attributes:
        cost: Mean cost on validation.
        quality: The objective on validation.
        figures: Figures by label, in the order of the table.
        test: Its measures on test.
    """

    cost: float
    quality: float
    figures: dict[str, Figure]
    test: Measures


@dataclass(frozen=True, slots=True)
class Budgets:
    """All operating points that any budget can choose.

    Attributes:
        objective: What is chosen for.
        unit: The unit of costs.
        points: The points, by rising cost.
        start: The policy's own budget, or its cost on validation.
        current: The policy as it is.
        better: The cheapest point that is as good on validation as that, None unless it is noticeably cheaper.
    """

    objective: str
    unit: str
    points: tuple[BudgetPoint, ...]
    start: float
    current: BudgetPoint
    better: BudgetPoint | None

    def as_json(self, places: Sequence[Sequence[float]]) -> dict[str, Any]:
        """Return what the slider's script reads.   places: of the points in the figure of the curves."""
        low, high = _shown(self.points[0].cost), _shown(self.points[-1].cost)
        step = (high - low) / N_STEPS
        return {
            "unit": self.unit,
            "tolerance": COST_TOLERANCE,
            "low": low,
            "high": high,
            "start": self.start,
            "steps": N_STEPS,
            "digits": max(0, -math.floor(math.log10(step))) if step > 0 else 0,
            "points": [
                {"cost": of.cost, "figures": list(of.figures.values()), "answered": of.test.answered, "at": place}
                for of, place in zip(self.points, places, strict=True)
            ],
        }


def find_budgets(measured: Measured) -> Budgets | None:
    """Find every budget's operating point, None without a labelled validation split to choose on.

    The points are all that validation tells apart, not the thinned curve in the policy's file.
    """
    policy, validation, test = measured.policy, measured.validation, measured.test
    if validation is None or isinstance(policy, SolvedPolicy):  # whose points are not those of one threshold
        return None
    objective = policy.threshold_choice.objective or "accuracy"
    on_validation, on_test = trace_policy(policy, validation), trace_policy(policy, test)

    halves = Halves.of(policy, on_validation, validation, objective)

    def point(threshold: float, cost: float, quality: float) -> BudgetPoint:
        fitted = measure(on_validation.at(threshold, validation), validation, "", with_f1=False)
        held_out = None if halves is None else halves.right(on_validation, validation, cost, threshold)
        expected = fitted if held_out is None else without_optimism(fitted, held_out)
        measures = measure(on_test.at(threshold, test), test, "")
        return BudgetPoint(cost, quality, _figures(threshold, expected, measures, measured), measures)

    frontier = on_validation.frontier(validation, objective)
    best = frontier.pareto(max(2, len(frontier.settings)))
    points = tuple(map(point, best.settings.tolist(), best.cost.tolist(), best.quality.tolist()))
    now = frontier.at(policy.setting)
    current = point(policy.setting, now.cost, now.quality)
    as_good = next((point for point in points if point.quality >= current.quality - _ROUNDING), None)
    return Budgets(
        objective=objective,
        unit=policy.cost_unit,
        points=points,
        start=_shown(current.cost if policy.budget is None else policy.budget),
        current=current,
        better=as_good if as_good is not None and as_good.cost < _NOTICED * current.cost else None,
    )


def _shown(cost: float) -> float:
    """Return a cost in ten digits; as a budget that buys the same, since a budget may be missed by more than that."""
    return float(f"{cost:.10g}")


def _figures(threshold: float, expected: Measures, test: Measures, measured: Measured) -> dict[str, Figure]:
    policy, split = measured.policy, measured.split
    assert expected.accuracy is not None
    assert test.accuracy is not None
    assert policy.validation is not None
    chosen_on, of_unit = policy.validation.split, f"({policy.cost_unit})"
    relative = test.relative_cost
    figures: dict[str, Figure] = {
        **_thresholds(policy, threshold),
        f"{chosen_on} accuracy, expected": (expected.accuracy.value, percent(expected.accuracy.value)),
        f"{chosen_on} cost, expected {of_unit}": (expected.cost, number(expected.cost)),
        f"{split} accuracy (95 % interval)": (test.accuracy.value, share_text(test.accuracy)),
        **({} if test.macro_f1 is None else {f"{split} macro-F1": (test.macro_f1, percent(test.macro_f1))}),
        f"{split} cost {of_unit}": (test.cost, number(test.cost)),
        f"cost relative to {policy.models[-1]} alone": (relative, "–" if relative is None else f"{relative:.2f}"),
    }
    for stage, (name, n) in enumerate(zip(policy.models, test.answered, strict=True), start=1):
        figures[f"answered by stage {stage}, {name}"] = (n, f"{percent(n / test.n)} ({n:,})")
    return figures


def _thresholds(policy: Policy, setting: float) -> dict[str, Figure]:
    """Return the threshold of all stages, or that of each."""
    if policy.schedule is None:
        return {"threshold": (setting, f"{setting:.6g}")}
    row = min(max(math.ceil(setting), 0), len(policy.schedule) - 1)
    of_stages = zip(policy.answering, policy.schedule[row].tolist(), strict=False)
    return {f"threshold of {stage.name}": (threshold, f"{threshold:.6g}") for stage, threshold in of_stages}
