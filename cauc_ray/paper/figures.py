"""The paper's figures, each as PNG, SVG and the Parquet file of the numbers that it shows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, TypeAlias

import pyarrow as pa

from cauc_ray.api.plots import BLUE, COLORS, GREY, MARKERS, ORANGE, VERMILION, halo, saved_figure
from cauc_ray.comparison.published import paper_name
from cauc_ray.comparison.result import Comparison
from cauc_ray.comparison.tasks import Written
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath
from cauc_ray.paper.config import COMPARED, ComparedChain, Entry, ReliabilityFigure
from cauc_ray.paper.measured import GAINS, HIGH, RELIABILITY, comparison_of
from cauc_ray.paper.tables import CONTENTS, Row, surrogate_notes

# By the name of a table or figure: its entries that have a value, with that.
Found: TypeAlias = Mapping[str, Sequence[tuple[Any, Written]]]

# The interval of a bin of fewer rows spans half of the axes.
LEAST_ROWS = 20
MIXED = "random"
# Words in the colour of a line need more contrast than the line.
_DARK_ORANGE = "#9a6a00"


@dataclass(frozen=True, slots=True)
class Drawn:
    """A figure: the name of its files, its title and what it shows."""

    name: str
    title: str
    caption: str


def draw_figures(found: Found, folder: AnyPath, root: AnyPath) -> Iterator[Drawn]:
    """Draw what there are values of, and yield each figure.   root: of all sets."""

    def with_banner(drawn: Drawn, entries: Sequence[tuple[Entry, Written]]) -> Drawn:
        banner = surrogate_notes(model for entry, _ in entries for model in entry.surrogates(root))
        return replace(drawn, caption=" ".join([drawn.caption, *banner]))

    for entry, value in found[RELIABILITY]:
        yield with_banner(_draw_reliability(entry, value.content, folder), [(entry, value)])
    for part in COMPARED:
        if found[part]:
            curves = [(chain, comparison_of(value)) for chain, value in found[part]]
            yield with_banner(_draw_curves(part, curves, folder), found[part])
    gains = [row for _, value in found[GAINS] for row in value.content]
    if gains:
        yield with_banner(_draw_gains(gains, folder), found[GAINS])


def _drawn(part: str, name: str, table: pa.Table, folder: AnyPath, title: Row, caption: Row) -> Drawn:
    """Write what a figure shows next to it.   title, caption: the names in their texts, with values."""
    write_parquet(folder / f"{name}.parquet", table)
    texts = CONTENTS["titles"][part].format(**title), CONTENTS["captions"][part].strip().format(**caption)
    return Drawn(name, *texts)


def _draw_reliability(entry: ReliabilityFigure, content: Row, folder: AnyPath) -> Drawn:
    """Draw what confidences promise before and after calibration, and how many of them are high."""
    found: dict[tuple[str, bool], list[Row]] = {}
    for row in content["rows"]:
        found.setdefault((row["model"], row["calibrated"]), []).append(row)
    name = f"{RELIABILITY}-{entry.name}"
    with saved_figure(10.4, 8.2, folder, name) as figure:
        upper, lower = figure.subplots(2, 2)
        _draw_confidences(upper, entry, found)
        _draw_counts(lower, entry, found, content["cost_unit"])
    of_model = found[entry.model, True]
    about = {
        "set": entry.set,
        "split": entry.split,
        "n": sum(row["n"] for row in of_model),
        "model": entry.model,
        "high": HIGH,
    }
    about |= {"temperature": of_model[0]["temperature"], "n_models": len(entry.models), "least_rows": LEAST_ROWS}
    return _drawn(RELIABILITY, name, pa.Table.from_pylist(content["rows"]), folder, {"name": entry.name}, about)


def _draw_confidences(panels: Sequence[Any], entry: ReliabilityFigure, found: Mapping[Any, Sequence[Row]]) -> None:
    """Draw accuracy over confidence: one model before and after, and several after."""
    temperature = found[entry.model, True][0]["temperature"]
    before, after = ("before (T = 1)", VERMILION, "s"), (f"after (T = {temperature:.2f})", BLUE, "o")
    one = [(entry.model, False, *before), (entry.model, True, *after)]
    looks = zip(COLORS, MARKERS, strict=True)
    several = [(model, True, model, *look) for model, look in zip(entry.models, looks, strict=False)]
    titles = (f"(a) {entry.model} before and after calibration", "(b) Accuracy at matched calibrated confidence")
    for panel, shown, title in zip(panels, (one, several), titles, strict=True):
        panel.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", zorder=1)
        for model, is_calibrated, label, color, marker in shown:
            bins = [row for row in found[model, is_calibrated] if row["n"] >= LEAST_ROWS]
            x, y = ([row[key] for row in bins] for key in ("confidence", "accuracy"))
            spread = [[abs(row["accuracy"] - row[key]) for row in bins] for key in ("accuracy_low", "accuracy_high")]
            panel.errorbar(x, y, yerr=spread, fmt="none", ecolor=color, elinewidth=0.8, capsize=2, alpha=0.6)
            panel.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.6, label=label)
        panel.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence (mean of the bin)", ylabel="test accuracy")
        panel.set_aspect("equal", adjustable="box")
        panel.set_title(title)
        panel.legend(loc="upper left")


def _draw_counts(
    panels: Sequence[Any], entry: ReliabilityFigure, found: Mapping[Any, Sequence[Row]], unit: str
) -> None:
    """Draw how many confidences of each model are high, before and after, and the models' cost over them."""
    models = list(range(len(entry.counted)))
    counts = [[found[model, when][0]["n_high"] for model in entry.counted] for when in (False, True)]
    costs = [found[model, True][0]["cost"] for model in entry.counted]
    titles = (f"(c) Confidence in [{HIGH}, 1] before calibration", f"(d) Confidence in [{HIGH}, 1] after calibration")
    for panel, of_panel, title in zip(panels, counts, titles, strict=True):
        panel.bar(models, of_panel, color=BLUE, alpha=0.75, width=0.62)
        panel.set(title=title, ylabel="test examples", ylim=(0, 1.15 * max(*counts[0], *counts[1], 1)))
        panel.set_xticks(models, entry.counted, rotation=25, ha="right", rotation_mode="anchor")
        panel.grid(visible=False, axis="x")
        over = panel.twinx()
        over.plot(models, costs, color=ORANGE, marker="o", markersize=5, linewidth=2)
        if is_log := min(costs) > 0:
            over.set_yscale("log", subs=[2, 5])
            over.yaxis.set_major_formatter("{x:g}")
            over.yaxis.set_minor_formatter("{x:g}")
        over.margins(y=0.2)
        over.set_ylabel(f"cost of a call ({unit}{', log scale' if is_log else ''})", color=_DARK_ORANGE)
        over.tick_params(axis="y", which="both", colors=_DARK_ORANGE)
        over.grid(visible=False)
        over.spines["right"].set_visible(True)
        for model, count in enumerate(of_panel):
            how = {"ha": "center", "va": "bottom", "fontsize": 9, "path_effects": halo()}
            over.text(model, count, f"{count:,}", transform=panel.transData, **how)


def _draw_curves(part: str, found: Sequence[tuple[ComparedChain, Comparison]], folder: AnyPath) -> Drawn:
    """Draw accuracy over cost: axes for each chain, and one legend for all."""
    name, n_columns = f"accuracy-cost-{part}", min(2, len(found))
    n_rows = math.ceil(len(found) / n_columns)
    with saved_figure(5.2 * n_columns + 0.4, 3.7 * n_rows + 0.9, folder, name) as figure:
        panels = list(figure.subplots(n_rows, n_columns, squeeze=False).flat)
        legend: dict[str, Any] = {}
        for panel, (chain, comparison) in zip(panels, found, strict=False):
            # Of the controls, as in the paper's figures, only models mixed at random.
            shown = [row for row in comparison.rows if row["paradigm"] != "control" or row["method"] == MIXED]
            replace(comparison, rows=shown).plot(panel, objective=chain.objective)
            panel.get_legend().remove()
            panel.set_title(chain.name)
            handles, methods = panel.get_legend_handles_labels()
            legend |= dict(zip(methods, handles, strict=True))
        for panel in panels[len(found) :]:
            panel.set_visible(False)
        labels = ["single models mixed at random" if each == MIXED else paper_name(each) for each in legend]
        figure.legend(legend.values(), labels, loc="outside lower center", ncols=3 * n_columns - 1)
    names = [pa.array([chain.name] * len(comparison.curves), pa.string()) for chain, comparison in found]
    curves = [
        comparison.curves.drop_columns(["set", "chain", "seed"]).add_column(0, "chain", of)
        for of, (_, comparison) in zip(names, found, strict=True)
    ]
    title = CONTENTS["titles"][part]
    about = {"table": f"{title[0].lower()}{title[1:]}"}
    return _drawn("accuracy-cost", name, pa.concat_tables(curves), folder, about, {})


def _draw_gains(rows: Sequence[Row], folder: AnyPath) -> Drawn:
    """Draw what calibration promises of fusing, and what fusing gained, for every pair of every set."""
    by_set: dict[str, list[Row]] = {}
    for row in rows:
        by_set.setdefault(row["set"], []).append(row)
    with saved_figure(8.6, 5.2, folder, GAINS) as figure:
        panel = figure.subplots()
        panel.axhline(0, color=GREY, linewidth=1, linestyle="--", zorder=1)
        panel.axvline(0, color=GREY, linewidth=1, linestyle="--", zorder=1)
        for name, color, marker in zip(by_set, cycle(COLORS), cycle(MARKERS), strict=False):
            x, y = ([100 * row[key] for row in by_set[name]] for key in ("complementarity_rate", "gain_of_fusing"))
            look = {"s": 34, "color": color, "marker": marker, "alpha": 0.75, "linewidths": 0.4, "edgecolors": "white"}
            panel.scatter(x, y, label=f"{name} ({len(x)})", **look)
        panel.margins(y=0.1)
        panel.set_xlabel("complementarity rate on calibration (percentage points)")
        panel.set_ylabel("test accuracy, fusing less direct deferral (points)")
        figure.legend(loc="outside right upper", title="set (pairs)")
        corner = {"xycoords": "axes fraction", "fontsize": 9, "color": "#555555"}
        panel.annotate("Base fuses, and fusing helps", (0.985, 0.975), ha="right", va="top", **corner)
        panel.annotate("Base defers, and fusing would hurt", (0.015, 0.025), ha="left", va="bottom", **corner)
    right = Counter(row["set"] for row in rows if row["cr_chose_the_better"])
    counts = ", ".join(f"{name} {right[name]} of {len(by_set[name])}" for name in by_set)
    about = {"n_right": right.total(), "n_pairs": len(rows), "by_set": counts}
    return _drawn(GAINS, GAINS, pa.Table.from_pylist(list(rows)), folder, {}, about)
