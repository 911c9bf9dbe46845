"""Accuracy over cost: every budget's operating point of the policy, and the curves of other methods."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import pyarrow.compute as pc

from cauc_ray.api.sources import difference, fingerprints_of
from cauc_ray.comparison.published import paper_name
from cauc_ray.display import number, percent
from cauc_ray.errors import DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import read_parquet
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.intervals import Share, share
from cauc_ray.numbers.sweep import COST_TOLERANCE, OperatingPoints, most_within
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.evidence import Measures
from cauc_ray.policies.family import Control, Family, cascade_of
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.solved import SolvedPolicy
from cauc_ray.policies.threshold import Halves, without_optimism
from cauc_ray.policies.trace import EmbeddingCall, Examples, measure, trace_policy
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
        f"{split} macro-F1": (test.macro_f1, percent(test.macro_f1)),
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


def share_text(share: Share | None) -> str:
    """Return a share with its interval, in percent; a dash without rows to measure it on."""
    if share is None or not share.n:
        return "–"
    return f"{percent(share.value)} ({100 * share.low:.1f} – {100 * share.high:.1f})"


# Fitted from logits alone, in the order of legends.
FITTED_HERE = ("base", "rf", "duo", "margin", "max-probability", "random")
# Of a curve, at most; they are those that validation would choose.
_MOST_POINTS = 160
# What the paper has no name for, or one for two things.
_TITLES = {
    "base": "CAUC Base",
    "max-probability": "uncalibrated confidence",
    "random": "single models at random",
    "shuffled": "CAUC-RF, confidences shuffled",
    "single": "a single model",
}
_COLUMNS = ("method", "validation_accuracy", "validation_cost", "accuracy", "cost")


@dataclass(frozen=True, slots=True)
class MethodCurve:
    """A method's test accuracy over its test cost, by rising validation cost.

    Attributes:
        name: The method.
        title: Its name in legends and tables.
        cost: Test costs, float64 (P,).
        accuracy: Test accuracies, P.
        matched: Cost and accuracy where validation chooses for the policy's cost there; None if all points cost more.
        source: The comparison that it was read from, None if it was fitted for the report.
    """

    name: str
    title: str
    cost: Floats
    accuracy: tuple[Share, ...]
    matched: tuple[float, Share] | None
    source: AnyPath | None


def title_of(method: str) -> str:
    """Return a method's name for people."""
    return _TITLES.get(method) or paper_name(method)


def _examples(measured: Measured, chain: ChainLogits) -> Examples:
    """Return the examples of a policy's chain, cheapest first, whose embeddings are not a model's answers."""
    policy, indices = measured.policy, range(measured.n_encoders, len(chain.models))
    if not (policy.scored or policy.encoder):
        return Examples(chain)
    models = chain.of_models(sorted(indices, key=lambda index: policy.stages[index].cost))
    if policy.encoder is None:
        return Examples(models)
    call = EmbeddingCall(policy.encoder, None, policy.stages[0].cost)
    return Examples(models, chain.logits[0], None, call, policy.encoder)


def trace_methods(measured: Measured) -> tuple[MethodCurve, ...]:
    """Fit methods that need no more than logits; the policy's own is the first.

    Returns their curves, none without a labelled validation split.
    """
    if measured.validation is None:
        return ()
    validation, test = _examples(measured, measured.validation), _examples(measured, measured.test)
    method, threshold = measured.policy.method, measured.policy.setting
    fitted = {method: Family([Control(cascade_of(measured.policy), threshold)], validation)}
    if len(test.chain.models) > 1:
        fitting = Fitting(_examples(measured, measured.calibration), validation)
        fitted |= {name: METHODS[name].family(fitting) for name in FITTED_HERE if name != method}
    curves = []
    for name, of_fit in fitted.items():
        at = of_fit.curve(test, of_fit.points.settings)
        spends_budget = of_fit.members[0].spends_budget
        curves.append(_curve(name, of_fit.points, at.cost, at.accuracy, measured, spends_budget=spends_budget))
    return tuple(curves)


def _curve(
    name: str,
    points: OperatingPoints,
    cost: Floats,
    accuracy: Floats,
    measured: Measured,
    source: AnyPath | None = None,
    *,
    spends_budget: bool = False,
) -> MethodCurve:
    """Return a curve thinned to what validation would choose.   cost, accuracy: float64 (P,), on test, as points."""
    n, budget = len(measured.test), measured.expected_cost
    assert budget is not None
    indices = replace(points, settings=np.arange(len(cost), dtype=np.float64)).pareto(_MOST_POINTS).settings.astype(int)
    at = None
    if points.cost.min() <= most_within(budget):
        choose = points.index_of_most_expensive if spends_budget else points.index_of_best
        chosen = choose(budget)
        at = float(cost[chosen]), share(round(n * float(accuracy[chosen])), n)
    shares = tuple(share(round(n * value), n) for value in accuracy[indices].tolist())
    return MethodCurve(name, title_of(name), cost[indices], shares, at, source)


def read_curves(path: AnyPath, measured: Measured) -> tuple[MethodCurve, ...]:
    """Return the curves of methods of a comparison that are not fitted here, without those that see the labels.

    Raises DataError unless they were measured on the same table.
    """
    if measured.validation is None:
        raise DataError(f"{path}: the policy has no labelled validation split to compare methods on")
    about, table = read_json(path / "comparison.json"), read_parquet(path / "curves.parquet", _COLUMNS)
    expected = fingerprints_of(measured.calibration, measured.validation, measured.test)
    why = difference(about.get("fingerprints") if isinstance(about, dict) else None, expected)
    if why is not None:
        raise DataError(f"{path}: {why}")
    if table.num_columns < len(_COLUMNS):
        raise DataError(f"{path / 'curves.parquet'} lacks one of the columns {', '.join(_COLUMNS)}")
    curves = []
    for name in table.column("method").unique().to_pylist():
        drawn = (*FITTED_HERE, "rf-shared", measured.policy.method)
        if name in METHODS and name not in drawn and not METHODS[name].sees_labels:
            rows = table.filter(pc.equal(table.column("method"), name))
            of = {key: rows.column(key).to_numpy() for key in _COLUMNS[1:]}
            points = OperatingPoints(of["cost"], of["validation_cost"], of["validation_accuracy"], "")
            curves.append(_curve(name, points, of["cost"], of["accuracy"], measured, path))
    return tuple(curves)
