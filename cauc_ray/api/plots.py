"""Plots with matplotlib: one look for all figures, and axes of accuracy over cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from cauc_ray.errors import require_packages
from cauc_ray.numbers.sweep import Objective

# Of Okabe and Ito (2008): colours that everybody can tell apart.
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
SKY, BLACK, GREY = "#56B4E9", "#000000", "#888888"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
# An axis of costs whose end is so many times its beginning is logarithmic.
LOG_FROM = 25
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

STYLE = {
    "font.size": 10,
    "axes.titlesize": 10.5,
    "axes.labelsize": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.7,
    "figure.constrained_layout.w_pad": 0.1,
    "figure.constrained_layout.h_pad": 0.1,
    "svg.fonttype": "none",  # words stay words
}


def accuracy_over_cost(unit: str, costs: Collection[float], axes: Any = None, objective: Objective = "accuracy") -> Any:
    """Return axes of accuracy, or macro-F1, in percent over cost, which is logarithmic where costs differ by much.

    Args:
        unit: The unit of costs.
        costs: The costs that are shown.
        axes: Of matplotlib; without them a new figure's.
        objective: What is over cost.

    Raises:
        ConfigError: Matplotlib is missing.
    """
    require_packages("a plot", "reports", "matplotlib")
    from matplotlib.ticker import LogLocator, NullFormatter

    if axes is None:
        import matplotlib.pyplot as plt

        _, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    low, high = min(costs, default=0), max(costs, default=0)
    if low > 0 and high >= LOG_FROM * low:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 1000 * low else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.margins(x=0.1, y=0.12)
    axes.set_xlabel(f"mean cost per example ({unit})", parse_math=False)
    axes.set_ylabel("accuracy (%)" if objective == "accuracy" else "macro-F1 (%)")
    axes.grid(alpha=0.25)
    return axes


def plot_point(axes: Any, cost: float, accuracy: float, interval: Sequence[float] | None, **look: Any) -> None:
    """Draw a point of shares in percent, with its interval where there is one.   look: as errorbar takes it."""
    spread = None if interval is None else [[100 * (accuracy - interval[0])], [100 * (interval[1] - accuracy)]]
    axes.errorbar(cost, 100 * accuracy, yerr=spread, elinewidth=0.8, capsize=2.5, **look)


def plot_model(
    axes: Any,
    model: str,
    cost: float,
    accuracy: float,
    interval: Sequence[float] | None = None,
    *,
    is_above: bool = False,
) -> None:
    """Draw a single model as a point with its name, when all else is drawn.

    Args:
        axes: Of matplotlib.
        model: Name of the model.
        cost: Its mean cost.
        accuracy: A share, or a macro-F1.
        interval: Its interval.
        is_above: Whether the name is above the point.
    """
    plot_point(axes, cost, accuracy, interval, fmt="o", color=BLACK, markersize=5, zorder=5)
    left, right, at = axes.xaxis.get_transform().transform([*axes.get_xlim(), cost])
    is_left = (at - left) / (right - left) > (0.2 if is_above else 0.75)  # where there is room
    name = axes.annotate(
        model,
        (cost, 100 * accuracy),
        xytext=(-7 if is_left else 7, 10 if is_above else -12),
        textcoords="offset points",
        ha="right" if is_left else "left",
        va="center",
        fontsize=9,
        zorder=7,
        path_effects=halo(),
        parse_math=False,
    )
    name.set_in_layout(False)  # a long name shall not make its axes narrow


def halo() -> list[Any]:
    """Return what keeps words readable over lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]
