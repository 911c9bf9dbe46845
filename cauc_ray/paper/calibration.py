"""The figure of calibration: what confidences promise, before and after, and how many are high."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cauc_ray.numbers.metrics import Reliability
from cauc_ray.paper.config import ReliabilityFigure
from cauc_ray.paper.drawing import BLUE, CYCLE, GREY, MARKERS, ORANGE, VERMILION, figure, halo
from cauc_ray.paper.measured import HIGH, ModelReliability

# A bin of fewer rows says nothing: its interval spans half of the panel.
LEAST_ROWS = 20
# Words in the colour of the line need more contrast than the line.
DARK_ORANGE = "#9a6a00"


def caption(config: ReliabilityFigure, found: Mapping[str, ModelReliability]) -> str:
    """Say what the figure shows."""
    of = found[config.model]
    return (
        f"{config.set}, {of.n:,} test examples; temperatures of calibration. (a) {config.model} before and after "
        f"(T = {of.temperature:.3f}). (b) {len(config.models)} models at matched calibrated confidence. (c), (d) "
        f"Examples of a confidence in [{HIGH}, 1], with the models' cost as a line. Bins of {LEAST_ROWS} rows and more "
        "with the 95 % interval of their accuracy."
    )


def draw_calibration(config: ReliabilityFigure, found: Mapping[str, ModelReliability], path: Path) -> None:
    """Draw the four panels."""
    with figure(10.4, 8.2, path) as drawn:
        (one, several), (before, after) = drawn.subplots(2, 2)
        of = found[config.model]
        _draw_promise(one)
        _draw_reliability(one, of.before, "before (T = 1)", VERMILION, "s")
        _draw_reliability(one, of.after, f"after (T = {of.temperature:.2f})", BLUE, "o")
        one.set_title(f"(a) {config.model} before and after calibration")
        _draw_promise(several)
        for place, model in enumerate(config.models):
            _draw_reliability(several, found[model].after, model, CYCLE[place], MARKERS[place])
        several.set_title("(b) Accuracy at matched calibrated confidence")
        for panel in (one, several):
            panel.set_xlabel("confidence (mean of the bin)")
            panel.set_ylabel("test accuracy")
            panel.legend(loc="upper left")
        counted = [found[model] for model in config.counted]
        _draw_counts(before, counted, [each.n_high_before for each in counted])
        _draw_counts(after, counted, [each.n_high_after for each in counted])
        before.set_title(f"(c) Confidence in [{HIGH}, 1] before calibration")
        after.set_title(f"(d) Confidence in [{HIGH}, 1] after calibration")


def _draw_promise(panel: Any) -> None:
    panel.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", zorder=1)
    panel.set_xlim(0, 1.02)
    panel.set_ylim(0, 1.02)
    panel.set_aspect("equal", adjustable="box")


def _draw_reliability(panel: Any, of: Reliability, label: str, colour: str, marker: str) -> None:
    told = of.counts >= LEAST_ROWS
    x, y = of.confidence[told], of.accuracy[told]
    spread = [y - of.low[told], of.high[told] - y]
    panel.errorbar(x, y, yerr=spread, fmt="none", ecolor=colour, elinewidth=0.8, capsize=2, alpha=0.6)
    panel.plot(x, y, color=colour, marker=marker, markersize=5, linewidth=1.6, label=label)


def _draw_counts(panel: Any, models: Sequence[ModelReliability], counts: Sequence[int]) -> None:
    """Draw bars of counts up to the size of the split, and the models' cost over them."""
    places = list(range(len(models)))
    panel.bar(places, counts, color=BLUE, alpha=0.75, width=0.62)
    panel.set_ylim(0, 1.15 * max(*(each.n_high_before for each in models), *(each.n_high_after for each in models), 1))
    panel.set_ylabel("test examples")
    panel.set_xticks(places, [each.model for each in models], rotation=25, ha="right", rotation_mode="anchor")
    panel.grid(visible=False, axis="x")
    costs = panel.twinx()
    costs.plot(places, [each.cost for each in models], color=ORANGE, marker="o", markersize=5, linewidth=2)
    _scale_costs(costs, models[0].cost_unit)
    for place, (model, count) in enumerate(zip(models, counts, strict=True)):
        height, of_line = _height(panel, count), _height(costs, model.cost)
        if -0.03 < of_line - height < 0.07:  # the line passes where the number would stand
            height = of_line + 0.02
        how = {"ha": "center", "va": "bottom", "fontsize": 9, "path_effects": halo()}
        costs.text(place, height + 0.005, f"{count:,}", transform=panel.get_xaxis_transform(), **how)


def _scale_costs(panel: Any, unit: str) -> None:
    """Scale the axis of costs, logarithmically unless some are zero."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, NullLocator

    low, high = panel.dataLim.intervaly
    if low > 0:
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(FormatStrFormatter("%g"))
        panel.yaxis.set_minor_locator(NullLocator())
        # Below the tops of the highest bars, where their counts stand.
        panel.set_ylim(low * (low / high) ** 0.12, high * (high / low) ** 0.5 if high > low else 2 * high)
    else:
        panel.set_ylim(0, 1.5 * high if high > 0 else 1)
    panel.set_ylabel(f"cost of a call ({unit}{', log scale' if low > 0 else ''})", color=DARK_ORANGE)
    panel.tick_params(axis="y", colors=DARK_ORANGE)
    panel.grid(visible=False)
    panel.spines["right"].set_visible(True)


def _height(panel: Any, value: float) -> float:
    """Return how high a value stands in a panel, from 0 to 1."""
    at = panel.transAxes.inverted().transform(panel.transData.transform((0, value)))
    return float(at[1])
