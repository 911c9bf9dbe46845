"""The figures of a page: SVG by matplotlib, in the page's own colours and fonts."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

from cauc_ray.api.plots import BLACK, STYLE, accuracy_over_cost, plot_model, plot_point
from cauc_ray.numbers.intervals import Share
from cauc_ray.reporting.measured import Measured, ModelCalibration

if TYPE_CHECKING:
    from cauc_ray.reporting.curves import Budgets, MethodCurve

# Colours in which figures are drawn, and the variables of the style sheet that take their place.
SOFT, RULE, ACCENT, BEFORE, BAD = "#5a6068", "#dddcd5", "#1f5da6", "#a3460f", "#b02a1c"
METHODS = (ACCENT, BEFORE, "#16794f", "#7a4aa0", "#8d6a00", "#777c84", "#b0356f", "#2a7d8c")
_VARIABLES = {BLACK: "ink", SOFT: "soft", RULE: "rule", BAD: "bad"} | {c: f"m{n}" for n, c in enumerate(METHODS)}
_DASHES = ((), (), (5, 2), (6, 2, 1.5, 2), (3, 2), (1, 1.5), (5, 2), (3, 2))
_COLORED = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_STYLE = STYLE | dict.fromkeys(_COLORED, SOFT) | {"text.parse_math": False, "grid.color": RULE, "grid.alpha": 1}
# Width and height of the curves' figure, in points: its letters are of a size to read on a phone and on a desk.
_WIDTH, _HEIGHT = 370, 410
# An axis of costs whose end is so many times its beginning is logarithmic.
_LOG_FROM = 25
_MOST_LETTERS = 22
_METADATA = ("Creator", "Date", "Format", "Type")
# What the slider moves.
_MARK = '<g id="mark" hidden=""><circle r="8"/><circle class="dot" r="2.5"/></g></svg>'


def draw_curves(
    measured: Measured, curves: Sequence[MethodCurve], budgets: Budgets | None
) -> tuple[str, list[list[float]]]:
    """Draw accuracy over cost.

    Returns:
        The SVG, whose bands have the ids band-0 and so on, and the place of each budget's point in it.
    """
    measures = measured.evaluation.measures
    assert measures.accuracy is not None
    with _figure("curves", _WIDTH, _HEIGHT) as figure:
        axes = accuracy_over_cost(shortened(measured.policy.cost_unit, 24), figure.subplots())
        axes.grid(alpha=1)
        for place, curve in enumerate(curves):
            color, dash = METHODS[place % len(METHODS)], _DASHES[place % len(_DASHES)]
            if len(curve.cost) == 1:  # a method with nothing to choose
                _plot(axes, curve.cost[0], curve.accuracy[0], color=color, fmt="o", label=curve.title)
                continue
            low, value, high = 100 * np.array([(at.low, at.value, at.high) for at in curve.accuracy]).T
            axes.plot(curve.cost, value, dashes=dash, color=color, linewidth=1.7 if place else 3, label=curve.title)
            axes.fill_between(curve.cost, low, high, color=color, alpha=0.15, linewidth=0, gid=f"band-{place}")
        look = {"color": ACCENT, "fmt": "D", "markersize": 7, "label": "this policy as it is"}
        _plot(axes, measures.cost, measures.accuracy, **look)
        _scale_costs(axes, [*(c for curve in curves for c in curve.cost), *(model.cost for model in measured.singles)])
        for model in measured.singles:
            ours, at = curves[0] if curves else None, model.accuracy
            is_above = ours is None or at.value > np.interp(model.cost, ours.cost, [of.value for of in ours.accuracy])
            plot_model(axes, shortened(model.name), model.cost, at.value, (at.low, at.high), is_above=bool(is_above))
        for text in axes.texts:
            text.set_path_effects(())  # a white halo would be wrong in the dark; the style sheet has one
        figure.legend(loc="outside lower left", ncols=2)
        svg = _svg(figure, "Accuracy over mean cost per example; the table below has the numbers")
        tests = [] if budgets is None else [point.test for point in budgets.points]
        points = [(test.cost, 100 * test.accuracy.value) for test in tests if test.accuracy]
        places = axes.transData.transform(np.reshape(points, (-1, 2)))
    return svg.replace("</svg>", _MARK), [[round(x, 2), round(_HEIGHT - y, 2)] for x, y in places.tolist()]


def _plot(axes: Any, cost: float, accuracy: Share, **look: Any) -> None:
    plot_point(axes, cost, accuracy.value, (accuracy.low, accuracy.high), **look)


def _scale_costs(axes: Any, costs: Sequence[float]) -> None:
    """Make the axis of costs logarithmic where they differ by much."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = min(costs), max(costs)
    if low > 0 and high >= _LOG_FROM * low:
        axes.set_xscale("log")
        axes.set_xlabel(f"{axes.get_xlabel()}, log scale", parse_math=False)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3) if high < 1000 * low else (1,)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def draw_reliability(of: ModelCalibration, number: int) -> str:
    """Draw a model's accuracy over its confidence, before and after calibration, and how many examples have each."""
    with _figure(f"model{number}", 250, 280) as figure:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        upper.plot([0, 1], [0, 1], linestyle="--", color=SOFT, linewidth=1)
        edges = np.linspace(0, 1, len(of.after.counts) + 1)
        for bins, look in ((of.before, {"color": BEFORE, "linestyle": "--"}), (of.after, {"color": ACCENT})):
            some = bins.counts > 0
            low, value, high = bins.low[some], bins.accuracy[some], bins.high[some]
            upper.errorbar(bins.confidence[some], value, yerr=[value - low, high - value], marker="o", **look)
            lower.stairs(bins.counts, edges, **look)
        upper.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), ylabel="accuracy")
        lower.set(xlabel="confidence", ylabel="examples")
        return _svg(figure, f"Reliability of {of.stage.name}; the folded table has every bin")


def draw_confidences(bars: Sequence[int], number: int) -> str:
    """Draw how many wrong answers have each tenth of confidence."""
    with _figure(f"wrong{number}", 250, 105) as figure:
        axes = figure.subplots()
        axes.stairs(bars, np.linspace(0, 1, len(bars) + 1), color=BAD, fill=True)
        axes.set(xlim=(0, 1), xlabel="confidence")
        axes.yaxis.get_major_locator().set_params(nbins=3, integer=True)
        return _svg(figure, f"Wrong answers by tenths of confidence: {list(bars)}")


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
    text = StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
        figure.savefig(text, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    # What comes first is a style for the whole page.
    body = re.sub(r'<g id="(?!band)[^"]*"', "<g", text.getvalue().partition("</defs>")[2])
    body = re.sub(r"font-family: [^;]*; ", "", body)
    for color, name in _VARIABLES.items():
        body = body.replace(color, f"var(--{name})")
    width, height = figure.get_size_inches() * 72
    return f'<svg class="chart" viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(alt)}">{body}'
