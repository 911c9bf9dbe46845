"""The figures of calibration and of fusion, each as PNG, SVG and the Parquet file of the numbers that it shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pyarrow as pa

from cauc_ray.api.plots import BLUE, COLORS, GREY, MARKERS, ORANGE, STYLE, VERMILION, halo
from cauc_ray.files.documents import atomic_file, make_folder
from cauc_ray.files.parquet import write_parquet
from cauc_ray.files.paths import AnyPath
from jobs.paper.config import ReliabilityFigure
from jobs.paper.measured import HIGH
from jobs.paper.tables import CONTENTS, Row

# Bins of fewer rows are left out: their interval spans half of the axes.
LEAST_ROWS = 20
# Words in the colour of a line need more contrast than the line.
_DARK_ORANGE = "#9a6a00"


@dataclass(frozen=True, slots=True)
class PaperFigure:
    """A figure of the report.

    Attributes:
        title: Its title.
        image: Its file, relative to the report.
        caption: What it shows.
    """

    title: str
    image: str
    caption: str


@contextmanager
def _saved(folder: AnyPath, name: str, rows: Sequence[Row], width: float, height: float) -> Iterator[Any]:
    """Yield a figure of this many inches, and write it as PNG and SVG next to the rows that it shows."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        make_folder(folder)
        write_parquet(folder / f"{name}.parquet", pa.Table.from_pylist([dict(row) for row in rows]))
        for form in ("png", "svg"):
            with atomic_file(folder / f"{name}.{form}") as temporary:
                figure.savefig(temporary, format=form, dpi=160)


def draw_reliability(entry: ReliabilityFigure, rows: Sequence[Row], folder: AnyPath) -> PaperFigure:
    """Draw accuracy over confidence before and after calibration, and the number of high confidences."""
    bins: dict[tuple[str, bool], list[Row]] = {}
    for row in rows:
        bins.setdefault((row["model"], row["calibrated"]), []).append(row)
    name = f"calibration-reliability-{entry.name}"
    with _saved(folder / "figures", name, rows, 10.4, 8.2) as figure:
        upper, lower = figure.subplots(2, 2)
        _draw_confidences(upper, entry, bins)
        _draw_counts(lower, entry, bins)
    of_model = bins[entry.model, True]
    caption = CONTENTS["captions"]["calibration-reliability"].format(
        set=entry.set,
        split=entry.split,
        n=sum(row["n"] for row in of_model),
        model=entry.model,
        temperature=of_model[0]["temperature"],
        n_models=len(entry.models),
        high=HIGH,
        least_rows=LEAST_ROWS,
    )
    title = CONTENTS["titles"]["calibration-reliability"].format(name=entry.name)
    return PaperFigure(title, f"figures/{name}.png", caption.strip())


def _draw_confidences(
    panels: Sequence[Any], entry: ReliabilityFigure, bins: Mapping[tuple[str, bool], Sequence[Row]]
) -> None:
    """Draw accuracy over confidence: one model before and after, and several after."""
    temperature = bins[entry.model, True][0]["temperature"]
    before, after = ("before (T = 1)", VERMILION, "s"), (f"after (T = {temperature:.2f})", BLUE, "o")
    one = [(entry.model, False, *before), (entry.model, True, *after)]
    looks = zip(COLORS, MARKERS, strict=True)
    several = [(model, True, model, *look) for model, look in zip(entry.models, looks, strict=False)]
    titles = (f"(a) {entry.model} before and after calibration", "(b) Accuracy at matched calibrated confidence")
    for panel, lines, title in zip(panels, (one, several), titles, strict=True):
        panel.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", zorder=1)
        for model, is_calibrated, label, color, marker in lines:
            drawn = [row for row in bins[model, is_calibrated] if row["n"] >= LEAST_ROWS]
            x, y = ([row[key] for row in drawn] for key in ("confidence", "accuracy"))
            spread = [[abs(row["accuracy"] - row[key]) for row in drawn] for key in ("accuracy_low", "accuracy_high")]
            panel.errorbar(x, y, yerr=spread, fmt="none", ecolor=color, elinewidth=0.8, capsize=2, alpha=0.6)
            panel.plot(x, y, color=color, marker=marker, markersize=5, linewidth=1.6, label=label)
        panel.set(xlim=(0, 1.02), ylim=(0, 1.02), xlabel="confidence (mean of the bin)", ylabel="test accuracy")
        panel.set_aspect("equal", adjustable="box")
        panel.set_title(title)
        panel.legend(loc="upper left")


def _draw_counts(
    panels: Sequence[Any], entry: ReliabilityFigure, bins: Mapping[tuple[str, bool], Sequence[Row]]
) -> None:
    """Draw the number of high confidences of each model, before and after, and the models' cost over them."""
    models = list(range(len(entry.counted)))
    counts = [[bins[model, is_calibrated][0]["n_high"] for model in entry.counted] for is_calibrated in (False, True)]
    costs, unit = [bins[model, True][0]["cost"] for model in entry.counted], bins[entry.model, True][0]["cost_unit"]
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
            look = {"ha": "center", "va": "bottom", "fontsize": 9, "path_effects": halo()}
            over.text(model, count, f"{count:,}", transform=panel.transData, **look)


def draw_gains(rows: Sequence[Row], folder: AnyPath) -> PaperFigure:
    """Draw the gain of fusing over the complementarity rate, for every pair of every set."""
    by_set: dict[str, list[Row]] = {}
    for row in rows:
        by_set.setdefault(row["set"], []).append(row)
    name = "complementarity-gain"
    with _saved(folder / "figures", name, rows, 8.6, 5.2) as figure:
        panel = figure.subplots()
        panel.axhline(0, color=GREY, linewidth=1, linestyle="--", zorder=1)
        panel.axvline(0, color=GREY, linewidth=1, linestyle="--", zorder=1)
        for set_name, color, marker in zip(by_set, cycle(COLORS), cycle(MARKERS), strict=False):
            x, y = ([100 * row[key] for row in by_set[set_name]] for key in ("complementarity_rate", "gain_of_fusing"))
            panel.scatter(
                x, y, s=34, color=color, marker=marker, alpha=0.75, linewidths=0.4, edgecolors="white",
                label=f"{set_name} ({len(x)})",
            )  # fmt: skip
        panel.margins(y=0.1)
        panel.set_xlabel("complementarity rate on calibration (percentage points)")
        panel.set_ylabel("test accuracy, fusing less direct deferral (points)")
        figure.legend(loc="outside right upper", title="set (pairs)")
        look: dict[str, Any] = {"xycoords": "axes fraction", "fontsize": 9, "color": "#555555"}
        panel.annotate("Base fuses, and fusing helps", (0.985, 0.975), ha="right", va="top", **look)
        panel.annotate("Base defers, and fusing would hurt", (0.015, 0.025), ha="left", va="bottom", **look)
    right = Counter(row["set"] for row in rows if row["cr_chose_the_better"])
    counts = ", ".join(f"{set_name} {right[set_name]} of {len(by_set[set_name])}" for set_name in by_set)
    caption = CONTENTS["captions"][name].format(n_right=right.total(), n_pairs=len(rows), by_set=counts)
    return PaperFigure(CONTENTS["titles"][name], f"figures/{name}.png", caption.strip())
