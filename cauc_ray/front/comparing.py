"""All methods side by side on one chain: the Python side of `cauc compare`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from json import loads
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa

from cauc_ray.data.files import write_json, write_parquet
from cauc_ray.data.logits import LogitTable
from cauc_ray.data.queries import Texts
from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.execution.ledger import new_folder, require_new
from cauc_ray.front.examples import ExampleReader
from cauc_ray.numbers.areas import CONVENTIONS, aiq, apgr, cpt, deferral_area, oracle_deferral_area
from cauc_ray.numbers.metrics import macro_f1, share
from cauc_ray.numbers.paired import paired_difference
from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.policies.baselines.controls import fit_single, hull
from cauc_ray.policies.method import Curve, Fitted, Fitting, Method
from cauc_ray.policies.methods import METHODS
from cauc_ray.policies.trace import Answers, Examples

__all__ = ["Comparison", "compare", "published", "require_new", "save_comparison"]

# Every model of the chain, alone: rows that are named single:<model>.
SINGLE = "single"
# CPT is told for these shares of the gap between the two models.
GAP_SHARES = (0.5, 0.8)
BASE_FITS = 3
MOST_SEEDS = 2**63

_CONVENTIONS = {
    "accuracy": "Share of the final split's examples answered right, with its 95 % Wilson interval.",
    "macro_f1": "Unweighted mean of the classes' F1, over the classes among answers or labels.",
    "cost": "Mean per example of all calls made: a cascade pays for every stage that it ran, a router for the model "
    "that it chose; encoders and routers themselves are not counted.",
    "relative_cost": "Cost over the mean cost of a call of the last model.",
    "avoided": "Share of the examples that never called the last model.",
    "gain": "Accuracy less the last model's on the same examples, with its 95 % percentile bootstrap interval over "
    "10,000 resamples of the examples.",
    "by_lot": "Accuracy that mixing single models by lot has at the same cost: linear between those on the upper hull "
    "of validation cost and accuracy.",
    "setting": "What steers the method (a threshold; for a router less the price of a unit of cost, for FrugalGPT its "
    "budget), chosen on validation as the best within the budget; controls by lot spend the budget.",
    "default": "At the method's own setting without a budget: Base's reference accuracy, a router's quality first, "
    "else the best on validation.",
    "setup_s": "Seconds to fit the method and choose its threshold; models' and encoders' outputs are given, imports "
    "are not counted.",
}


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


def published() -> dict[str, Any]:
    """Return the paper's own numbers, by the name of their table."""
    content: dict[str, Any] = loads(files("cauc_ray.front").joinpath("published.json").read_text(encoding="utf-8"))
    return content


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
    on_method: Callable[[str, int, int], None] = lambda name, place, of: None,
) -> Comparison:
    """Fit methods on one chain, and measure them on a split that none of them has seen.

    methods: names of METHODS and "single", or "all".   embedding: an encoder of the table, whose embeddings routers
    look at; without one they look at the first model's outputs, and pay for its call.   texts, text_column: a Parquet
    file of the queries' texts, and checkpoints: by a method's name, the hub id or folder of the model that it trains on
    them; for the methods that train on texts.   budget: mean cost
    per example to match; without one what Base costs on validation at its own threshold.   seed: of all lots.
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
    table = LogitTable(logits)
    reader = ExampleReader(table, models, costs, embedding, Texts(texts, text_column) if texts is not None else None)
    calibration, validation = reader.read_fitting_splits(calibration_split, validation_split)
    fitting = Fitting(calibration, validation, seed)
    test = reader.read_final(split, "a comparison", fitting)
    bench = _Bench(fitting, test, budget, checkpoints)
    measured = []
    for place, entry in enumerate(chosen):
        on_method(entry.method.name, place, len(chosen))
        measured.append(bench.measure(entry))
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
        "conventions": {**_CONVENTIONS, **CONVENTIONS},
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
    return _Entry(Method(f"{SINGLE}:{model}", "single-model", ""), lambda: partial(fit_single, place=place))


class _Bench:
    """What all methods of a comparison have in common: the splits, the budget, Base's setup time."""

    def __init__(self, fitting: Fitting, test: Examples, budget: float | None, checkpoints: Mapping[str, str]) -> None:
        self._fitting = fitting
        self._checkpoints = checkpoints
        self._test = test
        self._correct = test.correct()
        fit_base = METHODS["base"].load()
        # In the best of a few: it is short, and the first of a process also pays for what numpy loads.
        base, self._base_s = min((self._set_up(fit_base) for _ in range(BASE_FITS)), key=lambda timed: timed[1])
        self._base = base
        own = base.curve(fitting.validation, np.array([base.default]))
        self.budget = float(own.cost[0]) if budget is None else budget
        base.points.index_of_best(self.budget)  # raises where no cascade is so cheap
        self._published_s = published()["setup_s"]

    def measure(self, entry: _Entry) -> tuple[dict[str, Any], Curve, OperatingPoints]:
        """Fit a method and measure it at the budget, at its own setting, and at every other."""
        method = entry.method
        fitted, setup_s = (
            (self._base, self._base_s)
            if method.name == "base"
            else self._set_up(entry.load(), self._checkpoints.get(method.name))
        )
        at_budget = method.setting(fitted, self.budget)
        setting = fitted.default if at_budget is None else at_budget
        answers = fitted.answers(self._seen(method), setting)
        own = fitted.answers(self._seen(method), fitted.default)
        row = {
            "method": method.name,
            "paradigm": method.paradigm,
            **self._figures(answers),
            "setting": setting,
            "steered": at_budget is not None,
            **self._against_others(answers),
            "default": {"setting": fitted.default, **self._figures(own)},
            "setup_s": setup_s,
            "setup_ratio": setup_s / self._base_s,
            "paper_setup_ratio": self._paper_ratio(method.name),
            "note": fitted.note,
        }
        return row, fitted.curve(self._test, fitted.points.settings), fitted.points

    def areas(self, curve: Curve, largest_cost: float) -> dict[str, float | None]:
        """Return what sums up a curve; what is defined for two models is None for other chains."""
        first, last = float(self._correct[:, 0].mean()), float(self._correct[:, -1].mean())
        names = ["deferral_area", "apgr", *(f"cpt{round(100 * q)}" for q in GAP_SHARES)]
        of_two: dict[str, float | None] = dict.fromkeys(names)
        if self._correct.shape[1] == 2 and len(curve.settings) > 1:
            whole = oracle_deferral_area(self._correct[:, 0], self._correct[:, -1])
            pair = (curve.last_share, curve.accuracy, first, last)
            values = [deferral_area(*pair, whole), apgr(*pair), *(cpt(*pair, q) for q in GAP_SHARES)]
            of_two = dict(zip(names, values, strict=True))
        return {**of_two, "aiq": aiq(curve.cost, curve.accuracy, largest_cost)}

    def _set_up(self, fit: Callable[[Fitting], Fitted], checkpoint: str | None = None) -> tuple[Fitted, float]:
        """Fit a method and find its operating points. Returns it and the seconds that took."""
        started = time.perf_counter()
        fitted = fit(replace(self._fitting, checkpoint=checkpoint))
        _ = fitted.points
        return fitted, time.perf_counter() - started

    def _seen(self, method: Method) -> Examples:
        return self._test if method.sees_labels else self._test.without_labels()

    def _figures(self, answers: Answers) -> dict[str, Any]:
        chain = self._test.chain
        right = answers.predictions == chain.labels
        accuracy = share(int(right.sum()), len(right))
        cost, of_last = float(answers.costs(chain).mean()), float(chain.costs.means[-1])
        return {
            "accuracy": accuracy.value,
            "accuracy_interval": [accuracy.low, accuracy.high],
            "macro_f1": macro_f1(answers.predictions, chain.labels),
            "cost": cost,
            "relative_cost": cost / of_last if of_last > 0 else None,
            "avoided": 1.0 - float(answers.calls[:, -1].mean()),
            "calls": dict(zip(chain.models, answers.calls.mean(axis=0).tolist(), strict=True)),
        }

    def _against_others(self, answers: Answers) -> dict[str, Any]:
        right = answers.predictions == self._test.chain.labels
        gain = paired_difference(right, self._correct[:, -1], seed=self._fitting.seed)
        return {
            "gain": gain.value,
            "gain_interval": [gain.low, gain.high],
            "gain_p": gain.p_value,
            "by_lot": self._by_lot(float(answers.costs(self._test.chain).mean())),
        }

    def _by_lot(self, cost: float) -> float:
        """Return the accuracy of single models mixed by lot at a cost; beyond the dearest, the dearest's."""
        validation = self._fitting.validation
        mixed = hull(validation.chain.costs.means, validation.correct().mean(axis=0))
        costs = self._test.chain.costs.means[mixed]
        return float(np.interp(cost, costs, self._correct.mean(axis=0)[mixed]))

    def _paper_ratio(self, method: str) -> float | None:
        """Return the paper's setup time over that of Base; RouteLLM's, of which variant it does not say, for each."""
        seconds = self._published_s.get(method.split("-")[0] if method.startswith("routellm") else method)
        return None if seconds is None else seconds / self._published_s["base"]


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
