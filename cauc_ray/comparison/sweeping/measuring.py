"""What a task of a sweep measures: one method on one chain with one seed, at all budgets."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np

from cauc_ray.api.examples import ExampleReader
from cauc_ray.api.options import MeasureOptions
from cauc_ray.api.sources import Source
from cauc_ray.comparison.comparing import SINGLE
from cauc_ray.comparison.sweeping.config import BudgetKind
from cauc_ray.comparison.sweeping.redrawing import redraw
from cauc_ray.errors import BudgetError
from cauc_ray.files.paths import AnyPath
from cauc_ray.policies.baselines.simple import fit_single
from cauc_ray.policies.methods import Fitted, Fitting, Method, method_named
from cauc_ray.policies.trace import Examples

# measured; no operating point is within the budget; there is no value, and a reason why.
Status: TypeAlias = Literal["ok", "unmet", "missing"]


@dataclass(frozen=True, slots=True)
class Point:
    """What a task is of.

    set_name, logits, embedding: the set.   models: the chain.   splits: to fit on, choose on and measure on.
    redrawn: those of them that the seed cuts anew.   budgets: each with what it is a number of.
    """

    set_name: str
    logits: AnyPath
    embedding: str | None
    models: tuple[str, ...]
    method: str
    seed: int
    splits: tuple[str, str, str]
    redrawn: tuple[str, ...]
    budgets: tuple[tuple[BudgetKind, float], ...]

    @property
    def keys(self) -> list[dict[str, Any]]:
        """Return what names each of its rows, in their order."""
        return [
            {
                "set": self.set_name,
                "chain": ",".join(self.models),
                "method": self.method,
                "seed": self.seed,
                "budget_kind": kind,
                "budget": budget,
            }
            for kind, budget in self.budgets
        ]

    def read(self) -> tuple[Fitting, Examples]:
        """Return what the method is fitted from, and what it is measured on, as the seed draws them."""
        calibration, validation, split = self.splits
        options = MeasureOptions(
            models=self.models, calibration_split=calibration, validation_split=validation, split=split
        )
        read = ExampleReader(Source(str(self.logits), options), self.embedding).read("measuring a sweep")
        drawn = redraw(dict(zip(self.splits, read, strict=True)), self.redrawn, self.seed)
        return Fitting(drawn[calibration], drawn[validation], self.seed), drawn[split]


def measure_point(point: Point) -> list[dict[str, Any]]:
    """Fit the method and measure it at all budgets.

    Returns a row for each budget: its keys, status and reason, what the budget is in the table's unit with this
    draw, the setting chosen on validation and whether anything steers it, what the final split had there, and the
    seconds that fitting and choosing took. Raises CaucError.
    """
    fitting, final = point.read()
    method, fit = method_of(point.method, point.models)
    started = time.perf_counter()
    fitted = fit(fitting)
    _ = fitted.points
    setup_s = time.perf_counter() - started
    dearest = float(fitting.validation.chain.costs.means.max())
    rows = []
    for key in point.keys:
        budget = key["budget"] * (dearest if key["budget_kind"] == "relative" else 1.0)
        rows.append({**key, "budget_cost": budget, **_figures(method, fitted, final, budget), "setup_s": setup_s})
    return rows


def method_of(name: str, models: tuple[str, ...]) -> tuple[Method, Callable[[Fitting], Fitted]]:
    """Return a method by its name, single:MODEL among them, and the function that fits it."""
    kind, is_single, model = name.partition(":")
    if is_single and kind == SINGLE:
        return Method(name, "single-model", ""), partial(fit_single, model=models.index(model))
    method = method_named(name)
    return method, method.load()


def _figures(method: Method, fitted: Fitted, final: Examples, budget: float) -> dict[str, Any]:
    of_all = {"n": len(final), "cost_unit": final.chain.costs.unit}
    try:
        if not method.sees_labels:
            fitted.points.index_of_best(budget)  # also for one that nothing steers: raises where it costs more
        steered = method.setting(fitted, budget)
    except BudgetError as error:
        return {"status": "unmet", "reason": str(error), **of_all}
    setting = fitted.default if steered is None else steered
    curve = fitted.curve(final, np.array([setting]))
    cost, of_last = float(curve.cost[0]), float(final.chain.costs.means[-1])
    return {
        "status": "ok",
        "reason": None,
        "setting": setting,
        "steered": steered is not None,
        "accuracy": float(curve.accuracy[0]),
        "macro_f1": float(curve.macro_f1[0]),
        "cost": cost,
        "relative_cost": cost / of_last if of_last > 0 else None,
        "avoided": 1.0 - float(curve.last_share[0]),
        **of_all,
    }
