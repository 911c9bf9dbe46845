"""Figures of accuracy over cost: what every method makes of every budget."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from cauc_ray.comparison.comparing import SINGLE, Comparison
from cauc_ray.comparison.quoted import paper_name
from cauc_ray.paper.config import ComparedChain
from cauc_ray.paper.drawing import BLACK, BLUE, CYCLE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, figure, halo

CAPTION = (
    "Quality over cost on the test split, at every setting that validation tells apart. Ringed: CAUC at its own "
    "threshold, without a budget. Single models with the 95 % interval of their accuracy."
)
# Beyond this, only what the paper's figures have.
MOST_LINES = 10
BY_LOT = "random"

_OURS, _CASCADES = (BLUE, VERMILION), (GREEN, PURPLE, ORANGE, BLACK)
_ROUTERS = (SKY, "#9467bd", "#8c564b", "#7f7f7f", "#8a8a00", "#2f4f4f")
_DASHES = ("--", "-.", (0, (1, 1)), (0, (5, 1)), (0, (3, 1, 1, 1, 1, 1)), (0, (7, 3)))


@dataclass(frozen=True, slots=True)
class _Line:
    """How a method is drawn."""

    colour: str
    width: float
    dashes: Any = "-"
    over: int = 2


def draw_curves(found: Sequence[tuple[ComparedChain, Comparison]], path: Path) -> None:
    """Draw one panel for each chain, and one legend for all."""
    n_columns = min(2, len(found))
    n_rows = math.ceil(len(found) / n_columns)
    lines = _lines([comparison for _, comparison in found])
    with figure(5.2 * n_columns + 0.4, 3.7 * n_rows + 0.9, path) as drawn:
        panels = drawn.subplots(n_rows, n_columns, squeeze=False)
        handles: dict[str, Any] = {}
        for panel, (chain, comparison) in zip(panels.flat, found, strict=False):
            handles |= _draw_panel(panel, chain, comparison, lines)
        for panel in panels.flat[len(found) :]:
            panel.set_visible(False)
        order = [name for name in (*lines, *handles) if name in handles]
        handles = {name: handles[name] for name in dict.fromkeys(order)}
        drawn.legend(
            handles.values(),
            [_legend_name(name) for name in handles],
            loc="outside lower center",
            ncols=2 * n_columns + 1,
        )


def _legend_name(method: str) -> str:
    return "single models mixed by lot" if method == BY_LOT else paper_name(method)


def _lines(comparisons: Sequence[Comparison]) -> dict[str, _Line]:
    """Return how each method that a line can show is drawn: ours stand out, routers stand back."""
    paradigms: dict[str, str] = {}
    for comparison in comparisons:
        steered = {row["method"]: row["paradigm"] for row in comparison.rows if row["steered"]}
        paradigms |= steered
    order = {"ours": 0, "cascade": 1, "router": 2, "control": 3}
    by_rank = sorted((m for m in paradigms if paradigms[m] in order), key=lambda m: order[paradigms[m]])
    drawn = [m for m in by_rank if paradigms[m] != "control" or m == BY_LOT]
    if len(by_rank) <= MOST_LINES:
        drawn += [m for m in by_rank if m not in drawn and m != "shuffled"]
    lines: dict[str, _Line] = {}
    for method in drawn:
        paradigm = paradigms[method]
        place = sum(paradigms[other] == paradigm for other in lines)
        if method == BY_LOT:
            lines[method] = _Line(GREY, 1.1, (0, (1, 1.5)), over=1)
        elif paradigm == "ours":
            lines[method] = _Line(_OURS[place % 2], 3.6 if place == 0 else 1.7, over=4)
        elif paradigm == "cascade":
            lines[method] = _Line(_CASCADES[place % len(_CASCADES)], 1.5, over=3)
        else:
            lines[method] = _Line(_ROUTERS[place % len(_ROUTERS)], 1.0, _DASHES[place % len(_DASHES)])
    return lines


def _draw_panel(panel: Any, chain: ComparedChain, comparison: Comparison, lines: Mapping[str, _Line]) -> dict[str, Any]:
    """Draw one chain. Returns what the legend shows, by method."""
    column = "accuracy" if chain.objective == "accuracy" else "macro_f1"
    handles = {}
    for method, line in lines.items():
        curve = comparison.curves.filter(pc.equal(comparison.curves.column("method"), method))
        if curve.num_rows > 1:
            quality = [100 * value for value in curve.column(column).to_pylist()]
            how = {"color": line.colour, "linewidth": line.width, "linestyle": line.dashes, "zorder": line.over}
            (handles[method],) = panel.plot(curve.column("cost").to_pylist(), quality, **how)
    handles |= _draw_points(panel, column, comparison.rows)
    panel.margins(x=0.06, y=0.12)
    _draw_singles(panel, chain, column, comparison)
    panel.set_title(chain.name)
    panel.set_xlabel(f"mean cost per example ({comparison.about['cost_unit']})")
    panel.set_ylabel("test accuracy (%)" if column == "accuracy" else "test macro-F1 (%)")
    return handles


def _draw_points(panel: Any, column: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Draw what nothing steers, and where CAUC stands by itself."""
    for row in rows:
        at = (row["default"]["cost"], 100 * row["default"][column])
        if row["method"] == "base":
            panel.plot(
                *at, "o", markersize=8, markerfacecolor="white", markeredgecolor=BLUE, markeredgewidth=2, zorder=6
            )
        elif row["paradigm"] == "ensemble":
            (point,) = panel.plot(*at, "D", color=CYCLE[6], markersize=6, markerfacecolor=ORANGE, zorder=5)
            yield row["method"], point


def _draw_singles(panel: Any, chain: ComparedChain, column: str, comparison: Comparison) -> None:
    """Draw every model alone, its name above where it is above CAUC's curve, else below."""
    rows = {row["method"]: row for row in comparison.rows}
    of_base = comparison.curves.filter(pc.equal(comparison.curves.column("method"), "base"))
    for model in chain.models:
        row = rows.get(f"{SINGLE}:{model}")
        if row is None:
            continue
        x, y = row["cost"], 100 * row[column]
        if column == "accuracy":
            low, high = (100 * value for value in row["accuracy_interval"])
            panel.errorbar(x, y, yerr=[[y - low], [high - y]], color=BLACK, elinewidth=0.8, capsize=2.5, zorder=5)
        panel.plot(x, y, "o", color=BLACK, markersize=5, zorder=5)
        reached = y
        if of_base.num_rows and model != chain.models[0]:
            reached = 100 * float(np.interp(x, of_base.column("cost").to_numpy(), of_base.column(column).to_numpy()))
        bottom, top = panel.get_ylim()
        _name(panel, model, (x, y), is_above=y > reached + 0.02 * (top - bottom))


def _name(panel: Any, model: str, at: tuple[float, float], *, is_above: bool) -> None:
    """Write a model's name beside its point, on the side where its panel has room."""
    left, right = panel.get_xlim()
    place = (at[0] - left) / (right - left)
    is_left = place > (0.2 if is_above else 0.75)
    name = panel.annotate(
        model,
        at,
        xytext=(-7 if is_left else 7, 10 if is_above else -12),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="center",
        fontsize=9,
        zorder=7,
        path_effects=halo(),
    )
    name.set_in_layout(False)  # a long name shall not make its panel narrow
