"""Accuracy over cost of every method that the folder's numbers allow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.files import read_parquet
from cauc_ray.errors import DataError
from cauc_ray.front.report.finding import Found
from cauc_ray.front.report.measured import Measured
from cauc_ray.numbers.metrics import Share, share
from cauc_ray.numbers.sweep import OperatingPoints, most_within
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.method import Fitted, Fitting, Method, Steered
from cauc_ray.policies.methods import METHODS
from cauc_ray.policies.replay import single_model_accuracy
from cauc_ray.policies.trace import Examples, PolicyCascade

# Fitted in a second or two from logits alone, in the order of legends.
COMPUTED = ("base", "rf", "duo", "margin", "max-probability", "random")
# Of a curve, at most; they are those that validation would choose.
_MOST_POINTS = 160
_COLUMNS = ("method", "validation_accuracy", "validation_cost", "accuracy", "cost")


@dataclass(frozen=True, slots=True)
class MethodCurve:
    """A method's test accuracy over its test cost, by rising validation cost; float64 (P,) each.

    at_cost: what it has where validation chooses for the policy's own validation cost; None where nothing is so cheap.
    source: the file that it was read from, empty where it was computed.   is_own: it is the policy itself.
    """

    name: str
    cost: Floats
    accuracy: Floats
    at_cost: tuple[float, Share] | None
    source: str
    is_own: bool


@dataclass(frozen=True, slots=True)
class SingleModel:
    """A model alone, on test."""

    name: str
    cost: float
    accuracy: Share


@dataclass(frozen=True, slots=True)
class MethodCurves:
    """All methods, the policy's own first.   matched_cost: on validation, where at_cost is; None without one.

    n: test examples, of which accuracies are shares.
    """

    curves: tuple[MethodCurve, ...]
    singles: tuple[SingleModel, ...]
    matched_cost: float | None
    n: int


def trace_methods(found: Found, measured: Measured) -> MethodCurves:
    """Fit the methods that need no more than the table, and read the others where a comparison or sweep has them."""
    chain = measured.test
    singles = tuple(
        SingleModel(name, float(chain.costs.means[place]), single_model_accuracy(chain, place))
        for place, name in enumerate(chain.models)
    )
    if measured.validation is None:
        return MethodCurves((), singles, None, len(chain))
    validation, test = Examples(measured.validation), Examples(chain)
    own = Steered(PolicyCascade(measured.policy), validation, given=measured.policy.threshold)
    at = own.curve(validation, np.array([own.default]))
    matched = float(at.cost[0])
    curves = [_curve(METHODS[measured.policy.method], own, test, matched, is_own=True)]
    if len(chain.models) > 1:
        fitting = Fitting(Examples(measured.calibration), validation)
        others = [METHODS[name] for name in COMPUTED if name != measured.policy.method]
        curves += [_curve(method, method.load()(fitting), test, matched) for method in others]
    curves += _read_curves(found, {curve.name for curve in curves}, matched, len(chain))
    return MethodCurves(tuple(curves), singles, matched, len(chain))


def _curve(method: Method, fitted: Fitted, test: Examples, matched: float, *, is_own: bool = False) -> MethodCurve:
    points = fitted.points
    settings = points.pareto(_MOST_POINTS).settings if len(points.settings) > 1 else np.array([fitted.default])
    curve = fitted.curve(test, settings)
    at_cost = None
    if points.cost.min() <= most_within(matched):
        setting = method.setting(fitted, matched)
        at = fitted.curve(test, np.array([fitted.default if setting is None else setting]))
        at_cost = _point(at.cost[0], at.accuracy[0], len(test))
    return MethodCurve(method.name, curve.cost, curve.accuracy, at_cost, "", is_own)


def _read_curves(found: Found, known: set[str], matched: float, n: int) -> Iterator[MethodCurve]:
    """Yield the curves of other methods that files have, each method once."""
    files = [] if found.comparison is None else [found.comparison / "curves.parquet"]
    if found.sweep is not None:
        files.append(found.sweep)
    for path in files:
        table = read_parquet(path)
        absent = [name for name in _COLUMNS if name not in table.column_names]
        if absent:
            raise DataError(f"{path} has no column {absent[0]!r}, which curves have")
        for name in table.column("method").unique().to_pylist():
            rows = table.filter(pc.equal(table.column("method"), name))
            if name not in known and name in METHODS and not METHODS[name].sees_labels and _is_of(rows, n):
                known.add(name)
                yield _curve_of_file(METHODS[name], rows, path, matched, n)


def _is_of(rows: pa.Table, n: int) -> bool:
    """Say whether accuracies can be of n examples; else the file is of another table."""
    hits = n * rows.column("accuracy").to_numpy()
    return bool(np.allclose(hits, np.round(hits), rtol=0, atol=1e-6))


def _curve_of_file(method: Method, rows: pa.Table, path: Path, matched: float, n: int) -> MethodCurve:
    of = {name: rows.column(name).to_numpy() for name in _COLUMNS if name != "method"}
    # The rows themselves are the settings.
    places = np.arange(rows.num_rows, dtype=np.float64)
    points = OperatingPoints(places, of["validation_cost"], of["validation_accuracy"], "")
    kept = points.pareto(_MOST_POINTS).settings.astype(np.int64)
    at_cost = None
    if points.cost.min() <= most_within(matched):
        at = points.index_of_dearest(matched) if method.spends_budget else points.index_of_best(matched)
        at_cost = _point(of["cost"][at], of["accuracy"][at], n)
    return MethodCurve(method.name, of["cost"][kept], of["accuracy"][kept], at_cost, str(path), is_own=False)


def _point(cost: float, accuracy: float, n: int) -> tuple[float, Share]:
    return float(cost), share(round(n * float(accuracy)), n)
