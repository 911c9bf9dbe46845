"""Accuracy over cost of a comparison's methods."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.api.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    plot_model,
    plot_point,
)
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.by_method import SINGLE

# How curves of each paradigm look: colours, widths, dashes, and what is over what. Ours stand out.
_LOOKS: Mapping[str, Sequence[Any]] = {
    "ours": ((BLUE, VERMILION, "#332288", "#117733", "#AA4499", "#661100"), (3.6, 1.7, 2.4, 1.4, 1.4, 2.0), ("-",), 4),
    "ensemble": ((ORANGE,), (1.5,), ("-",), 3),
    "cascade": ((GREEN, PURPLE, ORANGE, BLACK), (1.5,), ("-",), 3),
    "router": (
        (SKY, "#9467bd", "#8c564b", "#7f7f7f", "#8a8a00", "#2f4f4f"),
        (1.0,),
        ("--", "-.", (0, (1, 1)), (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (7, 3))),
        2,
    ),
    "control": ((GREY, "#7A5195", "#F0A000", "#1B7837"), (1.1,), ((0, (1, 1.5)),), 1),
}


def draw_methods(axes: Any, rows: Sequence[Mapping[str, Any]], curves: pa.Table, quality: str) -> None:
    """Draw each method's curve with its points at budgets.

    Args:
        axes: Of matplotlib.
        rows: The summary of a chain.
        curves: Of the chain; empty to draw lines through the points at budgets.
        quality: The column over cost.
    """
    n_drawn: Counter[str] = Counter()
    for method in dict.fromkeys(row["method"] for row in rows):
        points = [row for row in rows if row["method"] == method and row["n"]]
        paradigm = points[0]["paradigm"] if points else ""
        if paradigm not in _LOOKS or method == "rf-shared":  # its curve is CAUC-RF's
            continue
        look = _look(paradigm, n_drawn[paradigm])
        n_drawn[paradigm] += 1
        cost, values = _curve(method, points, curves, quality)
        labels = [method, None] if len(cost) > 1 else [None, method]
        axes.plot(cost, 100 * values, label=labels[0], **look)
        is_ours = paradigm == "ours"
        marker = {"fmt": "D" if is_ours else "o", "markersize": 7 if is_ours else 4.5, "color": look["color"]}
        for row in points:
            interval = row["accuracy_interval"] if is_ours and quality == "accuracy" else None
            label = labels[1] if row is points[0] else None
            plot_point(axes, row["cost_mean"], row[f"{quality}_mean"], interval, label=label, zorder=6, **marker)
    budgets = {row["budget_cost_mean"] for row in rows if row["budget_cost_mean"] is not None}
    if len(budgets) == 1:
        axes.axvline(budgets.pop(), color=GREY, linestyle=":", label="budget")


def draw_models(axes: Any, rows: Sequence[Mapping[str, Any]], curves: pa.Table, quality: str) -> None:
    """Draw single models, the name of each where the curve of Base, or of the first method, is not.

    Args:
        axes: Of matplotlib.
        rows: The summary of a chain.
        curves: Of the chain, or empty.
        quality: The column over cost.
    """
    methods = [row["method"] for row in rows if row["paradigm"] in _LOOKS and row["n"]]
    first = "base" if "base" in methods else methods[0] if methods else ""
    cost, values = _curve(first, [row for row in rows if row["method"] == first and row["n"]], curves, quality)
    models = {row["method"]: row for row in rows if row["paradigm"] == "single-model" and row["n"]}
    for method, row in models.items():
        at, value = row["cost_mean"], row[f"{quality}_mean"]
        interval = row["accuracy_interval"] if quality == "accuracy" else None
        reached = float(np.interp(at, cost, values)) if len(cost) else 1.0
        plot_model(axes, method.removeprefix(f"{SINGLE}:"), at, value, interval, is_above=value > reached)


def _curve(method: str, points: Sequence[Mapping[str, Any]], curves: pa.Table, quality: str) -> tuple[Floats, Floats]:
    """Return costs and quality by rising cost: of what validation chooses for any budget, else of points at budgets."""
    curve = curves.filter(pc.equal(curves["method"], method)) if len(curves) else curves
    if len(curve):
        curve = curve.sort_by([("validation_cost", "ascending"), ("validation_accuracy", "descending")])
        best = np.maximum.accumulate(curve["validation_accuracy"].to_numpy())
        curve = curve.filter(pa.array(np.diff(best, prepend=-np.inf) > 0))
        cost, values = (curve[name].to_numpy() for name in ("cost", quality))
    else:
        cost, values = (np.array([row[f"{name}_mean"] for row in points]) for name in ("cost", quality))
    order = np.argsort(cost, kind="stable")
    return cost[order], values[order]


def _look(paradigm: str, index: int) -> dict[str, Any]:
    """Return how the curve of a paradigm's method is drawn, by its index among them."""
    *cycles, zorder = _LOOKS[paradigm]
    color, width, dashes = (cycle[index % len(cycle)] for cycle in cycles)
    return {"color": color, "linewidth": width, "linestyle": dashes, "zorder": zorder}
