"""All methods side by side on one chain: the Python side of `cauc compare`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from cauc_ray.data.logits import LogitKinds, LogitTable
from cauc_ray.data.queries import Texts
from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.execution.ledger import new_folder
from cauc_ray.files.documents import write_json
from cauc_ray.files.parquet import write_parquet
from cauc_ray.front.calibrating import CONVENTIONS as CALIBRATION_CONVENTIONS
from cauc_ray.front.calibrating import calibration_of
from cauc_ray.front.examples import ExampleReader
from cauc_ray.front.fingerprints import fingerprints_of
from cauc_ray.front.measuring import CONVENTIONS, Bench
from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.policies.baselines.simple import fit_single
from cauc_ray.policies.method import Curve, Fitted, Fitting, Method
from cauc_ray.policies.methods import METHODS

# Every model of the chain, alone: rows that are named single:<model>.
SINGLE = "single"
MOST_SEEDS = 2**63


@dataclass(frozen=True, slots=True)
class Comparison:
    """Methods side by side.

    about: the chain, the splits, the budget, the conventions of the metrics.   rows: one for each method.
    curves: every operating point that validation tells apart, with its final figures.   not_run: methods and why.
    """

    about: dict[str, Any]
    rows: list[dict[str, Any]]
    curves: pa.Table
    not_run: list[dict[str, str]]

    def as_json(self) -> dict[str, Any]:
        """Return what `cauc compare --json` prints: all but the curves."""
        return {**self.about, "rows": self.rows, "not_run": self.not_run}

    def row(self, method: str) -> dict[str, Any]:
        """Return a method's row."""
        return next(row for row in self.rows if row["method"] == method)

    def rows_table(self) -> pa.Table:
        """Return the rows as a table; what was true of all of them is in its metadata."""
        about = {key: str(value) for key, value in self.about.items()}
        return pa.Table.from_pylist(self.rows).replace_schema_metadata(about)


def compare(
    logits: str | Path,
    *,
    models: Sequence[str],
    methods: Sequence[str] = ("all",),
    embedding: str | None = None,
    texts: str | Path | None = None,
    text_column: str = "question",
    checkpoints: Mapping[str, str] = MappingProxyType({}),
    costs: Sequence[float] | None = None,
    calibration_split: str = "calibration",
    validation_split: str = "validation",
    split: str = "test",
    budget: float | None = None,
    seed: int = 0,
    logit_kind: LogitKinds = None,
    on_method: Callable[[str, int, int], None] = lambda name, place, of: None,
) -> Comparison:
    """Fit methods on one chain, and measure them on a split that none of them has seen.

    methods: names of METHODS and "single", or "all".   embedding: an encoder of the table, whose embeddings routers
    look at; one that is named like a model of the table is that model, whose call they pay on every example; without
    one they look at the first model's outputs, and pay for its call.   texts, text_column: a Parquet file of the
    queries' texts, and checkpoints, by a method's name the hub id or folder of the model that it trains on them: for
    the methods that train on texts.   budget: mean cost per example to match; without one what Base costs on validation
    at its own threshold.   seed: of all random draws.   logit_kind: as for fit.
    on_method: told each method's name, its place and their number before it is fitted.
    Methods whose packages, texts or checkpoint are missing are left out of "all", and the comparison says so.
    Raises CaucError as fit does, and ConfigError where a method that was named cannot run.
    """
    chosen, not_run = _chosen(methods, models, set(checkpoints) if texts is not None else set())
    if budget is not None and not math.isfinite(budget):
        raise ConfigError(f"a budget must be a finite number, got {budget}")
    if not 0 <= seed < MOST_SEEDS:
        raise ConfigError(f"a seed must be a number from 0 to {MOST_SEEDS - 1}, got {seed}")
    for name in checkpoints:
        if name not in METHODS or not METHODS[name].needs_texts:
            takers = [method.name for method in METHODS.values() if method.needs_texts]
            raise ConfigError(f"method {name!r} takes no checkpoint; those that do: {', '.join(takers)}")
    table = LogitTable(logits, logit_kind)
    reader = ExampleReader(table, models, costs, embedding, Texts(texts, text_column) if texts is not None else None)
    calibration, validation = reader.read_fitting_splits(calibration_split, validation_split)
    fitting = Fitting(calibration, validation, seed)
    test = reader.read_final(split, "a comparison", fitting)
    bench = Bench(fitting, test, budget, checkpoints)
    measured = []
    for place, entry in enumerate(chosen):
        on_method(entry.method.name, place, len(chosen))
        measured.append(bench.measure(entry.method, entry.load()))
    largest = max(float(curve.cost.max()) for _, curve, _ in measured)
    rows = [row | bench.areas(curve, largest) for row, curve, _ in measured]
    about = {
        "source": str(table.path),
        "models": list(models),
        "splits": {"calibration": calibration_split, "validation": validation_split, "final": split},
        "n": len(test),
        "cost_unit": test.chain.costs.unit,
        "budget": bench.budget,
        "budget_rule": "given" if budget is not None else f"what base costs on {validation_split} at its own threshold",
        "embedding": embedding,
        "seed": seed,
        "fingerprints": fingerprints_of(calibration.chain, validation.chain, test.chain),
        "calibration": calibration_of(fitting, test),
        "conventions": {**CONVENTIONS, **CALIBRATION_CONVENTIONS},
    }
    curves = [_curve_table(row["method"], curve, points) for row, curve, points in measured]
    return Comparison(about, rows, pa.concat_tables(curves), not_run)


def save_comparison(comparison: Comparison, folder: str | Path) -> None:
    """Write a comparison into a new folder: rows.parquet, curves.parquet and comparison.json.

    Raises ConfigError where the folder exists and is not empty, or cannot be made.
    """
    path = Path(folder)
    with new_folder(path):
        write_json(path / "comparison.json", comparison.as_json())
        write_parquet(path / "rows.parquet", comparison.rows_table())
        write_parquet(path / "curves.parquet", comparison.curves)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A row to be: a method, and what returns the function that fits it."""

    method: Method
    load: Callable[[], Callable[[Fitting], Fitted]]


def _chosen(
    names: Sequence[str], models: Sequence[str], trainable: set[str]
) -> tuple[list[_Entry], list[dict[str, str]]]:
    """Return the methods to run in the order of tables, and those of "all" that cannot run here, with the reason.

    trainable: those for which there are texts and a checkpoint.
    """
    known = ("all", SINGLE, *METHODS)
    for name in names:
        if name not in known:
            raise ConfigError(unknown_name("method", name, known))
    entries, cannot = [], []
    if "all" in names or SINGLE in names:
        entries = [_single(model, place) for place, model in enumerate(models)]
    for name in METHODS if "all" in names else [name for name in METHODS if name in names]:
        method = METHODS[name]
        why = None
        if method.needs_texts and name not in trainable:
            why = "trains a model on the queries' texts: give texts, and its checkpoint"
        elif method.absent:
            why = f"needs {', '.join(method.absent)}: pip install 'cauc-ray[{method.extra}]'"
        if why is None:
            entries.append(_Entry(method, method.load))
        elif name in names:
            raise ConfigError(f"method {name!r} {why}")
        else:
            cannot.append({"method": name, "why": why})
    return entries, cannot


def _single(model: str, place: int) -> _Entry:
    return _Entry(Method(f"{SINGLE}:{model}", "single-model", ""), lambda: partial(fit_single, model=place))


def _curve_table(method: str, curve: Curve, points: OperatingPoints) -> pa.Table:
    return pa.table(
        {
            "method": pa.array([method] * len(curve.cost), pa.string()),
            "setting": curve.settings,
            "validation_accuracy": points.quality,
            "validation_cost": points.cost,
            "accuracy": curve.accuracy,
            "macro_f1": curve.macro_f1,
            "cost": curve.cost,
            "avoided": 1.0 - curve.last_share,
        }
    )
