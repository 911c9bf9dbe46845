"""Accuracy over cost of every method: those that are fitted here in a second, and those of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow.compute as pc

from cauc_ray.api.fingerprints import difference, fingerprints_of
from cauc_ray.comparison.quoted import paper_name
from cauc_ray.errors import DataError
from cauc_ray.files.documents import read_json
from cauc_ray.files.parquet import read_parquet
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.intervals import Share, share
from cauc_ray.numbers.sweep import OperatingPoints, most_within
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.methods import METHODS, Fitted, Fitting, Thresholded, cascade_of
from cauc_ray.policies.trace import Examples
from cauc_ray.reporting.measured import Measured

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
}
_COLUMNS = ("method", "validation_accuracy", "validation_cost", "accuracy", "cost")


@dataclass(frozen=True, slots=True)
class MethodCurve:
    """A method's test accuracy over its test cost, by rising validation cost.

    title: the name in legends and tables.   cost: float64 (P,).   accuracy: P shares of the test examples.
    matched: cost and accuracy where validation chooses for what the policy costs there; None where no point is so
    cheap.   source: the comparison that it was read from, None where it was fitted here.
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


def trace_methods(measured: Measured) -> tuple[MethodCurve, ...]:
    """Fit methods that need no more than logits; the policy's own is the first.

    Returns their curves, none without a labelled validation split.
    """
    if measured.validation is None:
        return ()
    validation, test = Examples(measured.validation), Examples(measured.test)
    own_method, threshold = measured.policy.method, measured.policy.threshold
    own = Thresholded(cascade_of(measured.policy), validation, given=threshold)
    fitted: dict[str, Fitted] = {own_method: own}
    if len(test.chain.models) > 1:
        fitting = Fitting(Examples(measured.calibration), validation)
        fitted |= {name: METHODS[name].load()(fitting) for name in FITTED_HERE if name != own_method}
    curves = []
    for name, of_fit in fitted.items():
        at = of_fit.curve(test, of_fit.points.settings)
        curves.append(_curve(name, of_fit.points, at.cost, at.accuracy, measured))
    return tuple(curves)


def _curve(
    name: str,
    points: OperatingPoints,
    cost: Floats,
    accuracy: Floats,
    measured: Measured,
    source: AnyPath | None = None,
) -> MethodCurve:
    """Return a curve thinned to what validation would choose.   cost, accuracy: float64 (P,), on test, as points."""
    n, budget = len(measured.test), measured.expected_cost
    assert budget is not None
    kept = replace(points, settings=np.arange(len(cost), dtype=np.float64)).pareto(_MOST_POINTS).settings.astype(int)
    at = None
    if points.cost.min() <= most_within(budget):
        choose = points.index_of_most_expensive if METHODS[name].spends_budget else points.index_of_best
        chosen = choose(budget)
        at = float(cost[chosen]), share(round(n * float(accuracy[chosen])), n)
    shares = tuple(share(round(n * value), n) for value in accuracy[kept].tolist())
    return MethodCurve(name, title_of(name), cost[kept], shares, at, source)


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
        if name in METHODS and name not in (*FITTED_HERE, measured.policy.method) and not METHODS[name].sees_labels:
            rows = table.filter(pc.equal(table.column("method"), name))
            of = {key: rows.column(key).to_numpy() for key in _COLUMNS[1:]}
            points = OperatingPoints(of["cost"], of["validation_cost"], of["validation_accuracy"], "")
            curves.append(_curve(name, points, of["cost"], of["accuracy"], measured, path))
    return tuple(curves)
