"""All methods side by side on one chain: the Python side of `cauc compare`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.api.options import CompareOptions, Cut
from cauc_ray.api.plots import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    accuracy_over_cost,
    plot_model,
    plot_point,
)
from cauc_ray.api.sources import Logits, Source, fingerprints_of, read_examples
from cauc_ray.api.tables import number
from cauc_ray.comparison.measuring import (
    CONVENTIONS,
    NO_DIFFERENCE,
    Bench,
    calibration_of,
    choose_methods,
    hidden_of,
    method_of,
)
from cauc_ray.data.logits import LogitKinds, Texts
from cauc_ray.errors import ConfigError
from cauc_ray.files.documents import new_folder, write_json
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.sweep import Objective, OperatingPoints
from cauc_ray.policies.by_method import SINGLE
from cauc_ray.policies.family import Curve
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.notebook import Shown, SmallTable, share_text
from cauc_ray.policies.predictions import pandas_frame

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


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
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

    def to_arrow(self) -> pa.Table:
        """Return the rows as a table; what was true of all of them is in its metadata."""
        about = {key: str(value) for key, value in self.about.items()}
        return pa.Table.from_pylist(self.rows).replace_schema_metadata(about)

    def to_pandas(self) -> Any:
        """Return to_arrow() as a pandas DataFrame. Raises ConfigError where pandas is missing."""
        return pandas_frame(self.to_arrow())

    def plot(self, axes: Any = None, *, objective: Objective = "accuracy") -> Any:
        """Draw accuracy over cost: each method's curve with its point at the budget, and each model by itself.

        axes: of matplotlib, to draw on; without them a new figure's.   objective: what is drawn over cost; intervals
        are of accuracy.   Returns the axes. Raises ConfigError where matplotlib is missing.
        """
        axes = accuracy_over_cost(self.about["cost_unit"], axes, objective)
        quality = "accuracy" if objective == "accuracy" else "macro_f1"
        n_drawn: Counter[str] = Counter()
        for row in self.rows:
            method, paradigm = row["method"], row["paradigm"]
            if paradigm in _LOOKS and method != "rf-shared":  # its curve is CAUC-RF's
                look = _look(paradigm, n_drawn[paradigm])
                n_drawn[paradigm] += 1
                curve = self._curve(method)
                names = [method, None] if len(curve) > 1 else [None, method]
                axes.plot(curve["cost"], 100 * curve[quality].to_numpy(), label=names[0], **look)
                is_ours = paradigm == "ours"
                interval = row["accuracy_interval"] if is_ours and objective == "accuracy" else None
                point = {"fmt": "D" if is_ours else "o", "markersize": 7 if is_ours else 4.5, "color": look["color"]}
                plot_point(axes, row["cost"], row[quality], interval, label=names[1], zorder=6, **point)
        axes.axvline(self.about["budget"], color=GREY, linestyle=":", label="budget")
        self._plot_models(axes, quality)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        return axes

    def _plot_models(self, axes: Any, quality: str) -> None:
        """Draw single models, the name of each where the curve of Base, or of the first method, is not."""
        methods = [row["method"] for row in self.rows if row["paradigm"] in _LOOKS]
        curve = self._curve("base" if "base" in methods else methods[0]) if methods else None
        for row in self.rows:
            if row["paradigm"] == "single-model":
                interval = row["accuracy_interval"] if quality == "accuracy" else None
                reached = 1.0 if curve is None else float(np.interp(row["cost"], curve["cost"], curve[quality]))
                model = row["method"].removeprefix(f"{SINGLE}:")
                plot_model(axes, model, row["cost"], row[quality], interval, is_above=row[quality] > reached)

    def _curve(self, method: str) -> pa.Table:
        return self.curves.filter(pc.equal(self.curves["method"], method)).sort_by("cost")

    def small_table(self) -> SmallTable:
        """Return each method's accuracy and cost, as people see them."""
        unit = self.about["cost_unit"]
        rows = [
            [
                row["method"],
                share_text(row["accuracy"]),
                number(row["cost"]),
                "–" if row["relative_cost"] is None else f"{row['relative_cost']:.2f}",
                share_text(row["avoided"]),
            ]
            for row in self.rows
        ]
        caption = (
            f"{' → '.join(self.about['models'])} on {self.about['n']:,} examples, methods at a budget of "
            f"{self.about['budget']:.4g} {unit}"
        )
        return SmallTable(caption, ["method", "accuracy", f"cost ({unit})", "relative", "last model avoided"], rows)


def compare(
    logits: Logits,
    labels: Any = None,
    *,
    example_ids: Any = None,
    models: Sequence[str] | None = None,
    methods: Sequence[str] = ("all",),
    embedding: str | None = None,
    texts: str | AnyPath | None = None,
    text_column: str = "question",
    checkpoints: Mapping[str, str] = MappingProxyType({}),
    costs: Mapping[str, float] | Sequence[float] | None = None,
    cost_unit: str | None = None,
    calibration_split: str = "calibration",
    validation_split: str = "validation",
    validation: Cut = None,
    split: str = "test",
    test: Cut = None,
    budget: float | None = None,
    objective: Objective = "accuracy",
    reference: str | None = None,
    training_split: str | None = None,
    seed: int = 0,
    logit_kind: LogitKinds = None,
    on_method: Callable[[str, int, int], None] = lambda name, place, of: None,
) -> Comparison:
    """Fit methods on one chain, and measure them on a split that none of them has seen.

    Methods whose packages, texts or checkpoint are missing are left out of "all", and the comparison says so.

    Args:
        logits: a table or arrays, as for fit().
        labels: as for fit(), like example_ids, models, costs, cost_unit, calibration_split, validation_split and
            logit_kind.
        example_ids: of arrays.
        models: the chain.
        methods: names of methods, "single" for each model alone, "recalibrated" for each model alone and each other
            method that is named once more on recalibrated logits, or "all".
        embedding: an encoder of the table, whose embeddings routers look at. One that is named like a model of the
            table is that model, whose call they pay on every example; without one they look at the first model's
            outputs, and pay for its call.
        texts: a Parquet file of the queries' texts, for the methods that train on them.
        text_column: of that file.
        checkpoints: by such a method's name the hub id or folder of the model that it trains.
        costs: of a call of each model.
        cost_unit: of costs.
        calibration_split: what methods are fitted on.
        validation_split: what they are chosen on.
        validation: in place of that split a share of the calibration examples, drawn at random; or of arrays a pair, as
            for fit().
        split: what they are measured on.
        test: in place of that split, like validation.
        budget: mean cost per example to match; without one what Base costs on validation at its own threshold.
        objective: what is maximised within the budget.
        reference: the method, or single:MODEL, that others are compared with: rf where that is measured, else base,
            else the last model alone.
        training_split: a split of the table on which routers and scorers are trained, in place of the calibration
            split, on which CAUC's own numbers and temperatures are fitted.
        seed: of all random draws.
        logit_kind: of the models.
        on_method: called with each method's name, its index and their number before its fit.

    Returns:
        The methods, one row each, and their curves.

    Raises:
        CaucError: as fit() does, and ConfigError where a method that was named cannot run.

    Examples:
        >>> import cauc_ray
        >>> found = cauc_ray.compare(cauc_ray.sample_logits(), methods=["base", "rf", "oracle"])
        >>> found.row("oracle")["accuracy"] >= found.row("rf")["accuracy"]
        True
    """
    options = CompareOptions.of({**locals(), "checkpoints": dict(checkpoints)})
    source = Source(logits, options, labels, example_ids)
    trainable = checkpoints if texts is not None else ()
    chosen, not_run = choose_methods(options.methods, source.models, trainable, embedding, source.hidden)
    for name in checkpoints:
        if name not in METHODS or not METHODS[name].needs_texts:
            takers = [method.name for method in METHODS.values() if method.needs_texts]
            raise ConfigError(f"method {name!r} takes no checkpoint; those that do: {', '.join(takers)}")
    queries = None if texts is None else Texts(texts, text_column)
    hidden = hidden_of(chosen, source.models)
    calibrating, choosing, final, *training = read_examples(source, "a comparison", embedding, queries, hidden)
    fitting = Fitting(calibrating, choosing, seed, training=training[0] if training else None, objective=objective)
    bench = Bench(fitting, final, budget, checkpoints, objective)
    measured = []
    for place, name in enumerate(chosen):
        on_method(name, place, len(chosen))
        measured.append(bench.measure(*method_of(name, source.models)))
    largest = max(float(curve.cost.max()) for _, curve, _ in measured)
    if reference is None:
        reference = next((name for name in ("rf", "base") if name in chosen), f"{SINGLE}:{source.models[-1]}")
    differences = bench.differences(reference)
    rows = [
        {**row, **differences.get(row["method"], NO_DIFFERENCE), **bench.areas(curve, points, largest)}
        for row, curve, points in measured
    ]
    about = {
        "source": str(source.path),
        "models": list(source.models),
        "splits": {
            "calibration": calibration_split,
            "validation": validation_split,
            "final": split,
            "training": training_split,
        },
        "n": len(final),
        "n_fitted": sum(map(len, (calibrating, choosing, *training))),
        "cost_unit": final.chain.costs.unit,
        "budget": bench.budget,
        "budget_rule": "given" if budget is not None else f"what base costs on {validation_split} at its own threshold",
        "objective": objective,
        "reference": reference,
        "logit_kinds": dict(zip(final.chain.models, final.chain.logit_kinds, strict=True)),
        "embedding": embedding,
        "seed": seed,
        "fingerprints": fingerprints_of(*(each.chain for each in (calibrating, choosing, final, *training))),
        "calibration": calibration_of(fitting, final),
        "conventions": dict(CONVENTIONS),
    }
    curves = [_curve_table(row["method"], curve, points) for row, curve, points in measured]
    return Comparison(about, rows, pa.concat_tables(curves), not_run)


def save_comparison(comparison: Comparison, folder: str | AnyPath) -> None:
    """Write a comparison into a new folder: rows.parquet, curves.parquet and comparison.json.

    Raises ConfigError where the folder exists and is not empty, or cannot be made.
    """
    path = path_of(folder)
    with new_folder(path):
        write_json(path / "comparison.json", comparison.as_json())
        write_parquet(path / "rows.parquet", comparison.to_arrow())
        write_parquet(path / "curves.parquet", comparison.curves)


def _look(paradigm: str, index: int) -> dict[str, Any]:
    """Return how the curve of a paradigm's method is drawn, by its index among them."""
    *cycles, zorder = _LOOKS[paradigm]
    color, width, dashes = (cycle[index % len(cycle)] for cycle in cycles)
    return {"color": color, "linewidth": width, "linestyle": dashes, "zorder": zorder}


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
