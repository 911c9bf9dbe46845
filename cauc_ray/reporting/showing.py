"""The figures of an operating point, each with its exact value and the words in which it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cauc_ray.api.tables import number, percent
from cauc_ray.numbers.intervals import Share
from cauc_ray.numbers.sweep import COST_TOLERANCE
from cauc_ray.reporting.budgets import AtThreshold, Budgets
from cauc_ray.reporting.figures import CurvesFigure
from cauc_ray.reporting.panels import draw_stack


@dataclass(frozen=True, slots=True)
class Shown:
    """A figure as `cauc evaluate` has it.   value: exact, null where there is none.   text: as it is shown."""

    value: float | None
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of the budget's table.   own: the policy's, as it is.   start: of the budget that is shown first."""

    key: str
    label: str
    own: Shown
    start: Shown


def budget_rows(
    budgets: Budgets, start: AtThreshold, models: Sequence[str], split: str, of_validation: str
) -> list[Row]:
    """Return the rows of the table beside the slider."""
    unit = budgets.unit
    labels = {
        "threshold": "threshold",
        "validation_accuracy": f"{of_validation} accuracy, expected",
        "validation_cost": f"{of_validation} cost, expected ({unit})",
        "accuracy": f"{split} accuracy (95 % interval)",
        "macro_f1": f"{split} macro-F1",
        "cost": f"{split} cost ({unit})",
        "relative_cost": f"relative to {models[-1]} alone",
    }
    labels |= {f"answered_{place}": f"answered by {name}" for place, name in enumerate(models)}
    own, first = figures_of(budgets.own), figures_of(start)
    return [Row(key, label, own[key], first[key]) for key, label in labels.items()]


def point_within(budgets: Budgets, budget: float) -> AtThreshold:
    """Return the best point within a budget that is no less than the cheapest point's cost."""
    most = budget + COST_TOLERANCE * abs(budget)
    return next(point.at for point in reversed(budgets.points) if point.cost <= most)


def figures_of(at: AtThreshold) -> dict[str, Shown]:
    """Return all figures of an operating point."""
    validation, test = at.validation, at.test
    relative = test.relative_cost
    assert validation.accuracy is not None
    assert test.accuracy is not None
    figures = {
        "threshold": Shown(at.threshold, f"{at.threshold:.6g}"),
        "validation_accuracy": Shown(validation.accuracy.value, percent(validation.accuracy.value)),
        "validation_cost": Shown(validation.cost, number(validation.cost)),
        "accuracy": Shown(test.accuracy.value, with_interval(test.accuracy)),
        "macro_f1": Shown(test.macro_f1, percent(test.macro_f1)),
        "cost": Shown(test.cost, number(test.cost)),
        "relative_cost": Shown(relative, "–" if relative is None else f"{relative:.2f}"),
    }
    for place, answered in enumerate(test.answered):
        figures[f"answered_{place}"] = Shown(answered, f"{percent(answered / test.n)} ({answered:,})")
    return figures


def points_for_script(budgets: Budgets, figures: Sequence[CurvesFigure]) -> dict[str, Any]:
    """Return what the slider's script reads: all points by rising cost, with what is shown at each."""
    points = []
    for place, point in enumerate(budgets.points):
        shown = figures_of(point.at)
        points.append(
            {
                "cost": point.cost,
                "figures": {key: [each.value, each.text] for key, each in shown.items()},
                "shares": [[bar.x, bar.width] for bar in draw_stack(point.at.test.answered)],
                "at": {figure.size.name: figure.at[place] for figure in figures},
            }
        )
    return {
        "tolerance": COST_TOLERANCE,
        "unit": budgets.unit,
        "cheapest": f"{budgets.points[0].cost:g}",
        "places": budgets.places,
        "points": points,
    }


def with_interval(share: Share | None) -> str:
    """Return a share with its interval, in percent; a dash where there are no rows to measure it on."""
    if share is None or not share.n:
        return "–"
    return f"{percent(share.value)} ({100 * share.low:.1f} – {100 * share.high:.1f})"
