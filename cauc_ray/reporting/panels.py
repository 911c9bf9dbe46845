"""The small figures: a model's reliability, how sure wrong answers were, who answered what share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cauc_ray.numbers.metrics import Reliability
from cauc_ray.reporting.calibration import ModelCalibration
from cauc_ray.reporting.scales import Axis, path

WIDTH, HEIGHT = 300, 330
# Where confidence and accuracy are drawn, and under it the bars of counts.
LEFT, RIGHT, TOP, BOTTOM = 42.0, 290.0, 8.0, 228.0
BARS_TOP, BARS_BOTTOM = 240.0, 286.0
# A bin of fewer rows says little: it is drawn faintly.
LEAST_ROWS = 20


@dataclass(frozen=True, slots=True)
class BinMark:
    """A bin with rows: its mean confidence and accuracy with the 95 % interval, and the bar of its count."""

    x: float
    y: float
    low: float
    high: float
    faint: bool
    bar_x: float
    bar_y: float
    bar_width: float
    bar_height: float


@dataclass(frozen=True, slots=True)
class ReliabilityPanel:
    """A model's diagram before and after calibration.   ticks: where 0, 0.5 and 1 stand, across and upwards."""

    of: ModelCalibration
    before: tuple[BinMark, ...]
    after: tuple[BinMark, ...]
    before_path: str
    after_path: str
    ticks: tuple[tuple[str, float, float], ...]
    most_rows: int


def draw_reliability(of: ModelCalibration) -> ReliabilityPanel:
    """Lay out a model's diagram."""
    x, y = Axis(0, 1, LEFT, RIGHT), Axis(0, 1, BOTTOM, TOP)
    most = max(int(of.before.counts.max()), int(of.after.counts.max()))
    before, after = (_marks(bins, most, x, y) for bins in (of.before, of.after))
    return ReliabilityPanel(
        of=of,
        before=before,
        after=after,
        before_path=path((mark.x, mark.y) for mark in before if not mark.faint),
        after_path=path((mark.x, mark.y) for mark in after if not mark.faint),
        ticks=tuple((f"{tick:g}", x.at(tick), y.at(tick)) for tick in (0, 0.25, 0.5, 0.75, 1)),
        most_rows=most,
    )


def _marks(bins: Reliability, most: int, x: Axis, y: Axis) -> tuple[BinMark, ...]:
    marks = []
    width = (RIGHT - LEFT) / len(bins.counts)
    for place, n in enumerate(bins.counts.tolist()):
        if n:
            height = (BARS_BOTTOM - BARS_TOP) * n / most
            marks.append(
                BinMark(
                    x=x.at(float(bins.confidence[place])),
                    y=y.at(float(bins.accuracy[place])),
                    low=y.at(float(bins.low[place])),
                    high=y.at(float(bins.high[place])),
                    faint=n < LEAST_ROWS,
                    bar_x=round(LEFT + place * width + 1, 2),
                    bar_y=round(BARS_BOTTOM - height, 2),
                    bar_width=round(width - 2, 2),
                    bar_height=round(height, 2),
                )
            )
    return tuple(marks)


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar of a row of bars that is 100 wide and 100 high."""

    x: float
    y: float
    width: float
    height: float
    n: int


def draw_bars(counts: Sequence[int]) -> tuple[Bar, ...]:
    """Lay out counts beside each other."""
    width, most = 100 / max(1, len(counts)), max(1, *counts, 1)
    heights = [100 * n / most for n in counts]
    return tuple(
        Bar(round(place * width + 0.6, 2), round(100 - height, 2), round(width - 1.2, 2), round(height, 2), n)
        for place, (height, n) in enumerate(zip(heights, counts, strict=True))
    )


def draw_stack(counts: Sequence[int]) -> tuple[Bar, ...]:
    """Lay out the shares of a whole behind one another."""
    total, bars, x = max(1, sum(counts)), [], 0.0
    for n in counts:
        width = 100 * n / total
        bars.append(Bar(round(x, 4), 0, round(width, 4), 100, n))
        x += width
    return tuple(bars)
