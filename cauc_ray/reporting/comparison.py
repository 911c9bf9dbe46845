"""Accuracy over cost of every method that the folder's numbers allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.api.fingerprints import difference, fingerprints_of
from cauc_ray.errors import DataError
from cauc_ray.files.parquet import read_parquet
from cauc_ray.numbers.intervals import Share, share
from cauc_ray.numbers.sweep import OperatingPoints, most_within
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.methods import METHODS, Fitted, Fitting, Method, Thresholded, cascade_of
from cauc_ray.policies.trace import Examples, single_model_accuracy
from cauc_ray.reporting.finding import CurveFile, Found
from cauc_ray.reporting.measured import Measured

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


def with_own_curves(found: Found, measured: Measured) -> Found:
    """Leave out files whose curves were measured on another table, and all but one comparison and one sweep."""
    if measured.validation is None:
        return replace(found, curve_files=())  # there is nothing to show them beside
    expected = fingerprints_of(measured.calibration, measured.validation, measured.test)
    own: dict[bool, CurveFile] = {}
    left_out = list(found.left_out)
    for file in found.curve_files:
        why = difference(file.fingerprints, expected)
        if why is None and (other := own.get(file.is_comparison)) is not None:
            why = f"{other.path} has the same"
        if why is None:
            own[file.is_comparison] = file
        else:
            left_out.append(f"{file.path}: {why}")
    return replace(found, curve_files=tuple(own.values()), left_out=tuple(left_out))


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
    own = Thresholded(cascade_of(measured.policy), validation, given=measured.policy.threshold)
    at = own.curve(validation, np.array([own.default]))
    matched = float(at.cost[0])
    curves = [_curve(METHODS[measured.policy.method], own, test, matched, is_own=True)]
    if len(chain.models) > 1:
        fitting = Fitting(Examples(measured.calibration), validation)
        others = [METHODS[name] for name in COMPUTED if name != measured.policy.method]
        curves += [_curve(method, method.load()(fitting), test, matched) for method in others]
    curves += _read_curves(found.curve_files, {curve.name for curve in curves}, matched, len(chain))
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


def _read_curves(files: Sequence[CurveFile], known: set[str], matched: float, n: int) -> Iterator[MethodCurve]:
    """Yield the curves of other methods that files have, each method once."""
    for path in (file.curves for file in files):
        table = read_parquet(path)
        absent = [name for name in _COLUMNS if name not in table.column_names]
        if absent:
            raise DataError(f"{path} has no column {absent[0]!r}, which curves have")
        for name in table.column("method").unique().to_pylist():
            rows = table.filter(pc.equal(table.column("method"), name))
            if name not in known and name in METHODS and not METHODS[name].sees_labels:
                known.add(name)
                yield _curve_of_file(METHODS[name], rows, path, matched, n)


def _curve_of_file(method: Method, rows: pa.Table, path: Path, matched: float, n: int) -> MethodCurve:
    of = {name: rows.column(name).to_numpy() for name in _COLUMNS if name != "method"}
    # The rows themselves are the settings.
    places = np.arange(rows.num_rows, dtype=np.float64)
    points = OperatingPoints(places, of["validation_cost"], of["validation_accuracy"], "")
    kept = points.pareto(_MOST_POINTS).settings.astype(np.int64)
    at_cost = None
    if points.cost.min() <= most_within(matched):
        at = points.index_of_most_expensive(matched) if method.spends_budget else points.index_of_best(matched)
        at_cost = _point(of["cost"][at], of["accuracy"][at], n)
    return MethodCurve(method.name, of["cost"][kept], of["accuracy"][kept], at_cost, str(path), is_own=False)


def _point(cost: float, accuracy: float, n: int) -> tuple[float, Share]:
    return float(cost), share(round(n * float(accuracy)), n)
