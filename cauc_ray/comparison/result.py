"""The result of a comparison: rows, curves, their summary over seeds, and how they are shown and saved."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from cauc_ray.api.plots import accuracy_over_cost
from cauc_ray.api.tables import Grid, Mark, number
from cauc_ray.comparison.differences import AREA_DIFFERENCE, DIFFERENCE
from cauc_ray.comparison.drawing import draw_methods, draw_models
from cauc_ray.comparison.latex import booktabs
from cauc_ray.errors import DataError
from cauc_ray.files.documents import make_folder, read_json, write_bytes, write_json, write_text
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.notebook import Shown, SmallTable, share_text
from cauc_ray.policies.predictions import pandas_frame

_KEYS = ("set", "chain", "method", "budget_kind", "budget")
_FIGURES = ("accuracy", "macro_f1", "cost", "relative_cost", "avoided", "setup_s", "budget_cost")
# Of a summary as it is in any of its rows.
_POOLED = ("paradigm", *DIFFERENCE, "area", "area_budgets", *AREA_DIFFERENCE)
# A Holm-adjusted p-value below each of these is a star.
_STARS = (0.05, 0.01, 0.001)


@dataclass(frozen=True, slots=True, repr=False)
class Comparison(Shown):
    """Methods side by side.

    Attributes:
        about: The chain, or several chains, the splits, the budget, the conventions of the metrics.
        rows: One for each set, chain, method, seed and budget.
        curves: Every operating point that validation tells apart, with its figures on the measured split.
        not_run: Methods without figures, and why.
    """

    about: dict[str, Any]
    rows: list[dict[str, Any]]
    curves: pa.Table
    not_run: list[dict[str, Any]]

    def as_json(self) -> dict[str, Any]:
        """Return what `cauc compare --json` prints: all but the curves."""
        return {**self.about, "rows": self.rows, "summary": self.summary, "not_run": self.not_run}

    def row(self, method: str, **keys: Any) -> dict[str, Any]:
        """Return a method's first row that has some values, such as budget=4.0 or seed=1."""
        keys = {"method": method, **keys}
        return next(row for row in self.rows if all(row[key] == value for key, value in keys.items()))

    @property
    def chains(self) -> list[dict[str, Any]]:
        """Return what is known of each chain: set, chain, models, rows, unit, calibration, reference."""
        chains: list[dict[str, Any]] = self.about.get("chains", [self.about])
        return chains

    @property
    def summary(self) -> list[dict[str, Any]]:
        """Return for each set, chain, method and budget the mean and standard deviation of its seeds.

        n is the number of seeds with figures, n_unmet of those whose budget is not met, n_failed of those without
        figures. Standard deviations (n - 1) are None below two seeds.
        """
        grouped: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in self.rows:
            grouped.setdefault(tuple(row[key] for key in _KEYS), []).append(row)
        return [{**dict(zip(_KEYS, key, strict=True)), **_spread(rows)} for key, rows in grouped.items()]

    def to_arrow(self) -> pa.Table:
        """Return the rows as a table; what is true of all of them is in its metadata."""
        about = {key: str(value) for key, value in self.about.items()}
        return pa.Table.from_pylist(self.rows).replace_schema_metadata(about)

    def to_pandas(self) -> Any:
        """Return to_arrow() as a pandas DataFrame. Raises ConfigError where pandas is missing."""
        return pandas_frame(self.to_arrow())

    @classmethod
    def load(cls, path: str | AnyPath) -> Comparison:
        """Read what save() has written: a folder or its comparison.json. Raises DataError for anything else."""
        location = path_of(path)
        folder = location if location.is_dir() else location.parent
        about = read_json(folder / "comparison.json" if location.is_dir() else location)
        curves = folder / "curves.parquet"
        try:
            rows, not_run, _ = (about.pop(key) for key in ("rows", "not_run", "summary"))
        except (AttributeError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a comparison of this version; make it again") from error
        return cls(about, rows, read_parquet(curves) if curves.is_file() else pa.table({}), not_run)

    def save(self, output: str | AnyPath) -> None:
        """Write the result to a file, by its suffix: .csv, .json, .parquet, .tex, .pdf, .png, .svg; or into a folder.

        A folder gets comparison.json, rows.parquet, rows.csv, curves.parquet, summary.parquet, comparison.tex and,
        where matplotlib is installed, accuracy-cost.pdf and .png.
        """
        path = path_of(output)
        if is_file(path):
            _FILES[path.suffix](self, path)
            return
        make_folder(path)
        for name in ("comparison.json", "rows.parquet", "rows.csv", "comparison.tex"):
            self.save(path / name)
        write_parquet(path / "curves.parquet", self.curves)
        write_parquet(path / "summary.parquet", pa.Table.from_pylist(self.summary))
        if find_spec("matplotlib") is not None:
            for form in ("pdf", "png"):
                self.save(path / f"accuracy-cost.{form}")

    def grids(self) -> list[Grid]:
        """Return a table for people of each chain: methods by budgets."""
        return [_grid(self.about, chain, self._summary_of(chain)) for chain in self.chains]

    def small_table(self) -> SmallTable:
        """Return each method's accuracy and cost, as people see them; over budgets, its accuracy at each."""
        chains, rows, grids = self.chains, self.summary, self.grids()
        first = chains[0]
        chain = f"{' → '.join(first['models'])}{f' and {len(chains) - 1} more' if len(chains) > 1 else ''}"
        if len(chains) > 1 or len({row["budget"] for row in rows}) > 1:
            named = [(f"{grid.title}: " if len(chains) > 1 else "", row) for grid in grids for row in grid.rows]
            lines = [[name + row[0], *row[1:]] for name, row in named]
            return SmallTable(f"{chain}, accuracy (%) at budgets", grids[0].headings, lines)
        unit = first["cost_unit"]
        lines = [
            [
                row["method"],
                share_text(row["accuracy_mean"]),
                number(row["cost_mean"]),
                "–" if row["relative_cost_mean"] is None else f"{row['relative_cost_mean']:.2f}",
                share_text(row["avoided_mean"]),
            ]
            for row in rows
        ]
        budget = "base's cost" if self.about["budget"] is None else f"{self.about['budget']:.4g} {unit}"
        caption = f"{chain} on {first['n']:,} examples, methods at a budget of {budget}"
        return SmallTable(caption, ["method", "accuracy", f"cost ({unit})", "relative", "last model avoided"], lines)

    def plot(self, axes: Any = None, *, objective: Objective | None = None) -> Any:
        """Draw accuracy over cost: each method's curve with its points at budgets, and each model by itself.

        A curve has the points that validation chooses for any budget, measured on the measured split; with several
        seeds it is through the means at budgets.

        Args:
            axes: Of matplotlib, to draw the first chain on; without them a new figure's, one for each chain.
            objective: What is drawn over cost (default: what was maximised).

        Returns:
            The axes; a list of them for several chains.

        Raises:
            ConfigError: Matplotlib is missing.
        """
        objective = objective or self.about["objective"]
        quality = "accuracy" if objective == "accuracy" else "macro_f1"
        if axes is not None or len(self.chains) == 1:
            axes = accuracy_over_cost(self.chains[0]["cost_unit"], axes, objective)
            self._draw(axes, self.chains[0], quality)
            return axes
        accuracy_over_cost("", None, objective).remove()  # raises where matplotlib is missing
        from matplotlib.pyplot import subplots

        _, panels = subplots(
            len(self.chains), figsize=(6.4, 4.2 * len(self.chains)), layout="constrained", squeeze=False
        )
        for panel, chain in zip(panels[:, 0], self.chains, strict=True):
            self._draw(accuracy_over_cost(chain["cost_unit"], panel, objective), chain, quality)
            panel.set_title(f"{chain['set']}: {' → '.join(chain['models'])}", parse_math=False)
        return list(panels[:, 0])

    def _draw(self, axes: Any, chain: Mapping[str, Any], quality: str) -> None:
        curves = self.curves
        for key in ("set", "chain"):
            curves = curves.filter(pc.equal(curves[key], chain[key]))
        curves = curves if len(self.about["seeds"]) == 1 else curves.slice(0, 0)
        rows = self._summary_of(chain)
        draw_methods(axes, rows, curves, quality)
        draw_models(axes, rows, curves, quality)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)

    def _summary_of(self, chain: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [row for row in self.summary if (row["set"], row["chain"]) == (chain["set"], chain["chain"])]


def _spread(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the summary of the rows of one method at one budget, one for each seed."""
    measured = [row for row in rows if row["accuracy"] is not None]
    counts = {f"n_{status}": sum(row["status"] == status for row in rows) for status in ("unmet", "failed")}
    spread: dict[str, Any] = {"n": len(measured), **counts, **{key: rows[0][key] for key in _POOLED}}
    for figure in _FIGURES:
        values = [row[figure] for row in measured if row[figure] is not None]
        spread[f"{figure}_mean"] = float(np.mean(values)) if values else None
        spread[f"{figure}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    spread["accuracy_interval"] = measured[0]["accuracy_interval"] if len(rows) == len(measured) == 1 else None
    return spread


def _grid(about: Mapping[str, Any], chain: Mapping[str, Any], summary: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the table of a chain: each method's accuracy at each budget, the best in bold."""
    budgets = list(dict.fromkeys((row["budget_kind"], row["budget"]) for row in summary))
    by_cell = {(row["method"], row["budget_kind"], row["budget"]): row for row in summary}
    rows, marks = [], dict[tuple[int, int], Mark]()
    methods = list(dict.fromkeys(row["method"] for row in summary))
    for method in methods:
        of_method = [by_cell[method, *budget] for budget in budgets]
        last = of_method[-1]
        more = (
            _with_stars(last["area"], None, last["area_difference_p"])
            if len(budgets) > 1
            else number(last["cost_mean"])
        )
        rows.append((method, *map(_cell, of_method), more))
    for column, budget in enumerate(budgets, start=1):
        values = [_comparable(by_cell[method, *budget]) for method in methods]
        marks |= {(place, column): "bold" for place, value in enumerate(values) if value == max(values) > 0}
    unit, reference = chain.get("cost_unit", ""), chain["reference"]
    headings = {
        "relative": "{:g} rel.",
        "cost": f"{{:.4g}} {unit}",
        "base": "at base's cost",
        None: "–",
    }
    spread = (
        f"the standard deviation over {len(about['seeds'])} seeds"
        if len(about["seeds"]) > 1
        else "half of the 95 % interval"
    )
    notes = [
        f"Accuracy in percent on {chain.get('n', 0):,} examples ± {spread}; the best that sees no labels in bold. "
        f"*, **, ***: differs from {reference} with a Holm-adjusted p below 0.05, 0.01, 0.001 (all seeds pooled). "
        "†: costs more than the budget on validation. rel.: of the most expensive model's cost."
    ]
    if len(budgets) > 1:
        n_common = next((row["area_budgets"] for row in summary if row["area_budgets"]), 0)
        notes.append(f"Mean: over the {n_common} budgets that all methods with several operating points meet.")
    titles = [headings[kind].format(budget) for kind, budget in budgets]
    last_title = "mean" if len(budgets) > 1 else f"cost ({unit})"
    title = f"{chain['set']}: {' → '.join(chain['models'])}"
    return Grid(title, ("method", *titles, last_title), tuple(rows), tuple(notes), marks=marks)


def _comparable(row: Mapping[str, Any]) -> float:
    """Return the accuracy of a method that may be the best at a budget, 0 of others."""
    return 0.0 if row["paradigm"] in (None, "control") or row["n_unmet"] else float(row["accuracy_mean"] or 0.0)


def _cell(row: Mapping[str, Any]) -> str:
    if not row["n"]:
        return "failed"
    interval = row["accuracy_interval"]
    spread = row["accuracy_std"] if interval is None else (interval[1] - interval[0]) / 2
    return _with_stars(row["accuracy_mean"], spread, row["difference_p"]) + ("†" if row["n_unmet"] else "")


def _with_stars(value: float | None, spread: float | None, p_value: float | None) -> str:
    if value is None:
        return "–"
    stars = "" if p_value is None else "*" * sum(p_value < level for level in _STARS)
    return f"{100 * value:.2f}{'' if spread is None else f' ± {100 * spread:.2f}'}{stars}"


def is_file(path: AnyPath) -> bool:
    """Return whether an output is one file, by its suffix."""
    return path.suffix in _FILES


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with a column for each value: nested names joined, intervals as low and high."""
    columns: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            columns |= {f"{key}_{name}": nested for name, nested in _flat(value).items()}
        elif isinstance(value, list) or key.endswith("_interval"):
            low, high = value or (None, None)
            columns |= {
                f"{key.removesuffix('_interval')}_{end}": bound for end, bound in (("low", low), ("high", high))
            }
        else:
            columns[key] = value
    return columns


def _write_csv(comparison: Comparison, path: AnyPath) -> None:
    text = io.BytesIO()
    pa_csv.write_csv(pa.Table.from_pylist([_flat(row) for row in comparison.rows]), text)
    write_bytes(path, text.getvalue())


def _write_figure(comparison: Comparison, path: AnyPath) -> None:
    from matplotlib import pyplot

    image = io.BytesIO()
    panels = comparison.plot()
    figure = (panels[0] if isinstance(panels, list) else panels).figure
    figure.savefig(image, format=path.suffix[1:], dpi=160)
    pyplot.close(figure)
    write_bytes(path, image.getvalue())


_FILES: Mapping[str, Callable[[Comparison, AnyPath], None]] = {
    ".csv": _write_csv,
    ".json": lambda comparison, path: write_json(path, comparison.as_json()),
    ".parquet": lambda comparison, path: write_parquet(path, comparison.to_arrow()),
    ".tex": lambda comparison, path: write_text(path, booktabs(comparison.grids())),
    **dict.fromkeys((".pdf", ".png", ".svg"), _write_figure),
}
