"""The figures of a page: SVG by matplotlib, in the page's own colours, fonts and letters."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

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
_STYLE = {
    **STYLE,
    "text.parse_math": False,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": SOFT,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "grid.color": RULE,
    "grid.alpha": 1,
}
# Widths and heights of the curves' figure, in points: a style sheet shows the one that suits the screen.
SIZES = {"wide": (640, 390), "narrow": (290, 420)}
# An axis of costs whose end is so many times its beginning is logarithmic.
_LOG_FROM = 25
_MOST_LETTERS = 22
_BOUNDS = ("low", "value", "high")
# What the slider moves.
_MARK = '<g class="mark" data-mark="{}" hidden=""><circle r="8"/><circle class="dot" r="2.5"/></g></svg>'


def draw_curves(
    measured: Measured, curves: Sequence[MethodCurve], budgets: Budgets | None, size: str
) -> tuple[str, list[list[float]]]:
    """Draw accuracy over cost.   size: a key of SIZES.

    Returns the SVG, and where the point of each budget is in it. Bands have the ids SIZE-band-0 and so on; the mark
    that the slider moves has the class mark.
    """
    measures = measured.evaluation.measures
    assert measures.accuracy is not None
    with _figure(size, *SIZES[size]) as figure:
        axes = accuracy_over_cost(shortened(measured.policy.cost_unit, 24), figure.subplots())
        axes.grid(alpha=1)
        for place, curve in enumerate(curves):
            color, dash = METHODS[place % len(METHODS)], _DASHES[place % len(_DASHES)]
            if len(curve.cost) == 1:  # a method with nothing to choose
                _plot(axes, curve.cost[0], curve.accuracy[0], color=color, fmt="o", label=curve.title)
                continue
            low, value, high = (np.array([100 * getattr(each, of) for each in curve.accuracy]) for of in _BOUNDS)
            axes.plot(curve.cost, value, dashes=dash, color=color, linewidth=1.7 if place else 3, label=curve.title)
            axes.fill_between(curve.cost, low, high, color=color, alpha=0.15, linewidth=0, gid=f"band-{place}")
        look = {"color": ACCENT, "fmt": "D", "markersize": 7, "label": "this policy as it is, 95 % interval"}
        _plot(axes, measures.cost, measures.accuracy, **look)
        _scale_costs(axes, [*(c for curve in curves for c in curve.cost), *(each.cost for each in measured.singles)])
        for each in measured.singles:
            of, own = each.accuracy, curves[0] if curves else None
            is_above = own is None or of.value > np.interp(each.cost, own.cost, [at.value for at in own.accuracy])
            plot_model(axes, shortened(each.name), each.cost, of.value, (of.low, of.high), is_above=bool(is_above))
        for name in axes.texts:
            name.set_path_effects(())  # a white halo would be wrong in the dark; the style sheet has one
        if size == "narrow":
            axes.set_xlabel(axes.get_xlabel().replace(" (", "\n(", 1), parse_math=False)
        figure.legend(loc="outside lower left", ncols=2 if size == "wide" else 1)
        svg = _svg(figure, size, "Accuracy over mean cost per example; the table below has the numbers")
        tests = [] if budgets is None else [point.test for point in budgets.points]
        points = [(test.cost, 100 * test.accuracy.value) for test in tests if test.accuracy]
        at = axes.transData.transform(np.reshape(points, (-1, 2)))
    svg = svg.removesuffix("</svg>") + _MARK.format(size)
    return svg, [[round(x, 2), round(SIZES[size][1] - y, 2)] for x, y in at.tolist()]


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
        return _svg(figure, f"model{number}", f"Reliability of {of.stage.name}; the folded table has every bin")


def draw_confidences(bars: Sequence[int], number: int) -> str:
    """Draw how many wrong answers have each tenth of confidence."""
    with _figure(f"wrong{number}", 250, 105) as figure:
        axes = figure.subplots()
        axes.stairs(bars, np.linspace(0, 1, len(bars) + 1), color=BAD, fill=True)
        axes.set(xlim=(0, 1), xlabel="confidence")
        axes.yaxis.get_major_locator().set_params(nbins=3, integer=True)
        return _svg(figure, f"wrong{number}", f"Wrong answers by tenths of confidence: {list(bars)}")


def shortened(name: str, most: int = _MOST_LETTERS) -> str:
    """Return a name of at most so many letters, without those that XML cannot hold.

    >>> shortened("resnet_preact_bottleneck_164", 12)
    'resnet_prea…'
    """
    name = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name)
    return name if len(name) <= most else f"{name[: most - 1]}…"


@contextmanager
def _figure(name: str, width: float, height: float) -> Iterator[Any]:
    """Yield a figure of a size in points, which are the units of an SVG.   name: as _svg takes it."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({**_STYLE, "svg.hashsalt": name}):
        yield Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")


def _svg(figure: Any, name: str, alt: str) -> str:
    """Return a figure as SVG within HTML: in the page's colours, and without styles, which the page's policy refuses.

    name: what its ids begin with, so that no two figures of a page share one.   alt: what is read out in its place.
    """
    text = StringIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has other fonts
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    root = ElementTree.fromstring(text.getvalue())
    for parent in root.iter():
        for child in [child for child in parent if child.tag.endswith(("}metadata", "}style"))]:
            parent.remove(child)
        own = dict(parent.attrib)
        for declared in filter(None, own.pop("style", "").split("; ")):
            key, _, value = declared.partition(": ")
            own[key] = value
        own.pop("font-family", None)
        parent.tag = parent.tag.rpartition("}")[2]
        parent.attrib.clear()
        parent.attrib.update((key.rpartition("}")[2], _own(key, value, name)) for key, value in own.items())
    del root.attrib["width"], root.attrib["height"]
    # What is black in matplotlib has no fill of its own.
    root.attrib |= {"class": f"chart {name}", "fill": "var(--ink)", "role": "img", "aria-label": alt}
    return ElementTree.tostring(root, encoding="unicode")


def _own(key: str, value: str, name: str) -> str:
    """Return an attribute's value with the page's colour in place of matplotlib's, and with the figure's own ids."""
    if key == "id":
        return f"{name}-{value}"
    if key.endswith("href"):
        return f"#{name}-{value[1:]}"
    return f"var(--{_VARIABLES[value]})" if value in _VARIABLES else value.replace("url(#", f"url(#{name}-")
