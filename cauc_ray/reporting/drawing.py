"""The figures of a page: SVG by matplotlib, in the page's own colours and fonts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from cauc_ray.api.evaluated import Evaluation
from cauc_ray.api.plots import BLACK, BLUE, COLORS, GREY, STYLE, VERMILION
from cauc_ray.comparison.result import Comparison
from cauc_ray.reporting.measured import ModelCalibration

if TYPE_CHECKING:
    from cauc_ray.reporting.budgets import Budgets

# Colours in which figures are drawn, and the variables of the style sheet that take their place.
_SOFT, _RULE = "#5a6068", "#dddcd5"
_VARIABLES = {color: f"m{place}" for place, color in enumerate(COLORS)}
_VARIABLES |= {BLACK: "ink", GREY: "soft", _SOFT: "soft", _RULE: "rule"}
_COLORED = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_STYLE = STYLE | dict.fromkeys(_COLORED, _SOFT) | {"text.parse_math": False, "grid.color": _RULE}
# Width and height of figures of costs, in points: their letters are of a size to read on a phone and on a desk.
_WIDTH, _HEIGHT = 370, 360
_MOST_LETTERS = 22
_METADATA = ("Creator", "Date", "Format", "Type")
# What the slider moves.
_MARK = '<g id="mark" hidden=""><circle r="8"/><circle class="dot" r="2.5"/></g></svg>'


def draw_curve(evaluation: Evaluation, budgets: Budgets | None) -> tuple[str, list[list[float]]]:
    """Draw the accuracy of all thresholds over their cost.

    Returns:
        The SVG, and the place of each budget's point in it.
    """
    with _figure("curve", _WIDTH, _HEIGHT) as figure:
        axes = evaluation.plot(figure.subplots())
        svg = _svg(figure, "Accuracy over mean cost per example; the table below has the numbers")
        tests = [] if budgets is None else [point.test for point in budgets.points]
        points = [(test.cost, 100 * test.accuracy.value) for test in tests if test.accuracy]
        places = axes.transData.transform(np.reshape(points, (-1, 2)))
    return svg.replace("</svg>", _MARK), [[round(x, 2), round(_HEIGHT - y, 2)] for x, y in places.tolist()]


def draw_comparison(comparison: Comparison) -> str:
    """Draw the curves of a comparison's methods."""
    with _figure("methods", _WIDTH, _HEIGHT) as figure:
        comparison.plot(figure.subplots())
        return _svg(figure, "Accuracy over mean cost per example by method; the tables below have the numbers")


def draw_reliability(of: ModelCalibration, number: int) -> str:
    """Draw a model's accuracy over its confidence, before and after calibration, and how many examples have each."""
    with _figure(f"model{number}", 250, 280) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        upper.plot([0, 1], [0, 1], linestyle="--", color=_SOFT, linewidth=1)
        edges = np.linspace(0, 1, len(of.after.counts) + 1)
        for bins, look in ((of.before, {"color": VERMILION, "linestyle": "--"}), (of.after, {"color": BLUE})):
            some = bins.counts > 0
            low, value, high = bins.low[some], bins.accuracy[some], bins.high[some]
            upper.errorbar(bins.confidence[some], value, yerr=[value - low, high - value], marker="o", **look)
            lower.stairs(bins.counts, edges, **look)
        upper.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel="accuracy")
        lower.set(xlabel="confidence", ylabel="examples")
        return _svg(figure, f"Reliability of {of.stage.name}; the folded table has every bin")


def shortened(name: str, most: int = _MOST_LETTERS) -> str:
    """Return a name of at most so many letters, without those that XML cannot hold.

    >>> shortened("resnet_preact_bottleneck_164", 12)
    'resnet_prea…'
    """
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


@contextmanager
def _figure(name: str, width: float, height: float) -> Iterator[Any]:
    """Yield a figure of a size in points, which are the units of an SVG.   name: makes its ids its own."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")


def _svg(figure: Any, alt: str) -> str:
    """Return a figure as SVG within HTML, in the page's colours.   alt: what is read out in its place."""
    for axes in figure.axes:
        for text in axes.texts:
            text.set_path_effects(())  # a white halo would be wrong in the dark; the style sheet has one
            text.set_text(shortened(text.get_text()))
        axes.xaxis.label.set_text(shortened(axes.get_xlabel(), 50))
        if (legend := axes.get_legend()) is not None:  # below, where it hides nothing
            legend.remove()
            figure.legend(loc="outside lower left", ncols=2)
    text = StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    # What comes first is a style for the whole page.
    body = re.sub(r'<g id="[^"]*"', "<g", text.getvalue().partition("</defs>")[2])
    body = re.sub(r"font-family: [^;]*; ", "", body)
    for color, name in _VARIABLES.items():
        body = body.replace(color.lower(), f"var(--{name})")
    width, height = figure.get_size_inches() * 72
    return f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(alt)}">{body}'
