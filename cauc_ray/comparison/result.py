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
from cauc_ray.comparison.differences import AREA_DIFFERENCE, DIFFERENCE
from cauc_ray.comparison.drawing import draw_methods, draw_models
from cauc_ray.comparison.latex import booktabs
from cauc_ray.comparison.sheets import budget_grid, comparison_sheet, difference_grid
from cauc_ray.display import Grid, Sheet, Shown
from cauc_ray.errors import DataError, require_packages
from cauc_ray.files.documents import make_folder, read_json, write_bytes, write_json, write_text
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.sweep import Objective
from cauc_ray.policies.predictions import pandas_frame

_KEYS = ("set", "chain", "method", "budget_kind", "budget")
_FIGURES = ("accuracy", "macro_f1", "cost", "relative_cost", "avoided", "setup_s", "budget_cost")
# Of a summary as it is in any of its rows.
_POOLED = ("paradigm", *DIFFERENCE, "area", "area_budgets", *AREA_DIFFERENCE)


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
        """Return tables for people of each chain: accuracies at budgets, and their differences to the reference's."""
        grids = []
        for chain in self.chains:
            summary = self._summary_of(chain)
            grids.append(budget_grid(self.about, chain, summary))
            if any(row["difference"] is not None for row in summary):
                grids.append(difference_grid(chain, summary))
        return grids

    def sheet(self) -> Sheet:
        """Return the methods side by side: at one budget their figures, else their accuracies at the budgets."""
        return comparison_sheet(self.as_json(), self.grids())

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
        if axes is not None or len(self.chains) == 1:
            return self._draw(axes, self.chains[0], objective)
        require_packages("a plot", "reports", "matplotlib")
        from matplotlib.pyplot import subplots

        _, panels = subplots(
            len(self.chains), figsize=(6.4, 4.2 * len(self.chains)), layout="constrained", squeeze=False
        )
        for panel, chain in zip(panels[:, 0], self.chains, strict=True):
            self._draw(panel, chain, objective)
            panel.set_title(f"{chain['set']}: {' → '.join(chain['models'])}", parse_math=False)
        return list(panels[:, 0])

    def _draw(self, axes: Any, chain: Mapping[str, Any], objective: Objective) -> Any:
        """Draw a chain on axes, or on a new figure's, and return them."""
        quality = "accuracy" if objective == "accuracy" else "macro_f1"
        curves = self.curves
        for key in ("set", "chain"):
            curves = curves.filter(pc.equal(curves[key], chain[key]))
        curves = curves if len(self.about["seeds"]) == 1 else curves.slice(0, 0)
        rows = self._summary_of(chain)
        costs = [row["cost_mean"] for row in rows if row["cost_mean"] is not None]
        axes = accuracy_over_cost(chain["cost_unit"], costs, axes, objective)
        draw_methods(axes, rows, curves, quality)
        draw_models(axes, rows, curves, quality)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        return axes

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
