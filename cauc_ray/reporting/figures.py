"""The figure of accuracy over cost: where everything stands, for a template to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.api.tables import number
from cauc_ray.numbers.intervals import Share, share
from cauc_ray.reporting.budgets import Budgets
from cauc_ray.reporting.comparison import MethodCurve, MethodCurves, SingleModel
from cauc_ray.reporting.labels import Box, Label, place_label
from cauc_ray.reporting.scales import Axis, cost_axis, path, share_axis
from cauc_ray.reporting.verdict import Verdict


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a drawing, in units in which its words are so many high."""

    name: str
    width: int
    height: int
    letters: int
    n_ticks: int


# Beside the accent, which is the policy's own.
N_COLOURS = 7

# The same figure twice: a style sheet shows the one that suits the screen.
SIZES = (Size("wide", 820, 440, 14, 7), Size("narrow", 380, 400, 14, 4))


@dataclass(frozen=True, slots=True)
class Tick:
    """A value written beside an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Whisker:
    """A point with an interval."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """A method's curve.   place: among all methods.   look: the class by which it is coloured.   band: at 95 %.

    point: in place of a line, for a method that nothing steers.
    """

    name: str
    place: int
    look: str
    path: str
    band: str
    point: Whisker | None


@dataclass(frozen=True, slots=True)
class Marked:
    """A model alone, and where its name is written."""

    name: str
    at: Whisker
    label: Label


@dataclass(frozen=True, slots=True)
class CurvesFigure:
    """A drawing of accuracy over cost.   own: where the policy stands.   at: where each budget's point stands."""

    size: Size
    left: float
    right: float
    top: float
    bottom: float
    costs: tuple[Tick, ...]
    accuracies: tuple[Tick, ...]
    is_log: bool
    lines: tuple[Line, ...]
    singles: tuple[Marked, ...]
    own: Whisker
    at: tuple[tuple[float, float], ...]


def draw_curves(curves: MethodCurves, budgets: Budgets | None, verdict: Verdict, size: Size) -> CurvesFigure:
    """Lay out the figure in a size."""
    left, right, top, bottom = 4.2 * size.letters, size.width - 12.0, 30.0, size.height - 3.6 * size.letters
    points = [] if budgets is None else [point.at.test for point in budgets.points]
    costs = [verdict.cost, *(each.cost for each in curves.singles), *(point.cost for point in points)]
    accuracies = [verdict.accuracy.low, verdict.accuracy.high]
    accuracies += [bound for each in curves.singles for bound in (each.accuracy.low, each.accuracy.high)]
    for curve in curves.curves:
        costs += curve.cost.tolist()
        accuracies += curve.accuracy.tolist()
    x, y = cost_axis(costs, left, right), share_axis(accuracies, bottom, top)
    lines = tuple(_line(curve, place, curves.n, x, y) for place, curve in enumerate(curves.curves))
    own = Whisker(x.at(verdict.cost), *_heights(verdict.accuracy, y))
    return CurvesFigure(
        size=size,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        costs=tuple(Tick(x.at(value), number(value)) for value in x.ticks(size.n_ticks)),
        accuracies=tuple(Tick(y.at(value), f"{100 * value:g}") for value in y.ticks(7)),
        is_log=x.is_log,
        lines=lines,
        singles=_singles(curves, own, x, y, size, Box(left, top, right, bottom)),
        own=own,
        at=tuple((x.at(point.cost), y.at(point.accuracy.value)) for point in points if point.accuracy),
    )


def _heights(accuracy: Share, y: Axis) -> tuple[float, float, float]:
    return y.at(accuracy.value), y.at(accuracy.low), y.at(accuracy.high)


def _line(curve: MethodCurve, place: int, n: int, x: Axis, y: Axis) -> Line:
    shares = [share(round(n * value), n) for value in curve.accuracy.tolist()]
    across = [x.at(cost) for cost in curve.cost.tolist()]
    again, colour = divmod(place - 1, N_COLOURS)
    look = "m0" if place == 0 else f"m{colour + 1}{' again' if again else ''}"
    if len(shares) == 1:
        return Line(curve.name, place, look, "", "", Whisker(across[0], *_heights(shares[0], y)))
    line = path((at, y.at(each.value)) for at, each in zip(across, shares, strict=True))
    # There along the lower bounds and back along the upper ones; no lower than the axis begins.
    there = [(at, y.at(max(each.low, y.low))) for at, each in zip(across, shares, strict=True)]
    back = [(at, y.at(min(each.high, y.high))) for at, each in zip(across, shares, strict=True)]
    return Line(curve.name, place, look, line, f"{path([*there, *reversed(back)])}Z", None)


def _singles(curves: MethodCurves, own: Whisker, x: Axis, y: Axis, size: Size, frame: Box) -> tuple[Marked, ...]:
    """Mark every model alone; names keep clear of each other, of all points and, if they can, of the curves."""
    at = {each.name: Whisker(x.at(each.cost), *_heights(each.accuracy, y)) for each in curves.singles}
    taken = [Box(w.x - 7, w.high, w.x + 7, w.low) for w in (*at.values(), own)]
    lines = np.array(
        [
            (x.at(cost), y.at(accuracy))
            for curve in curves.curves
            for cost, accuracy in zip(curve.cost.tolist(), curve.accuracy.tolist(), strict=True)
        ]
    ).reshape(-1, 2)
    marked = []
    for each in _by_cost(curves.singles):
        label = place_label(each.name, at[each.name].x, at[each.name].y, size.letters, taken, lines, frame)
        taken.append(label.box)
        marked.append(Marked(each.name, at[each.name], label))
    return tuple(marked)


def _by_cost(singles: Sequence[SingleModel]) -> list[SingleModel]:
    return sorted(singles, key=lambda each: each.cost)
