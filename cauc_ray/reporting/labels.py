"""Where names are written in a drawing, so that they keep clear of what else is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cauc_ray.numbers.types import Floats

Anchor: TypeAlias = Literal["start", "middle", "end"]

# Letters of a name that are written; all of them are told to who points at it, or has it read out.
MOST_LETTERS = 22
# Of a letter's width to its height, on average.
_ASPECT = 0.58


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: Box) -> float:
        """Return the area that both have."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(0.0, width) * max(0.0, height)

    def beyond(self, frame: Box) -> float:
        """Return by how much it leaves a frame."""
        return (
            max(0.0, frame.left - self.left)
            + max(0.0, self.right - frame.right)
            + max(0.0, frame.top - self.top)
            + max(0.0, self.bottom - frame.bottom)
        )

    def n_within(self, points: Floats) -> int:
        """Return how many of some points, float (n, 2), it covers."""
        x, y = points.T
        return int(((x > self.left) & (x < self.right) & (y > self.top) & (y < self.bottom)).sum())


@dataclass(frozen=True, slots=True)
class Label:
    """A short name, where it is written and how it stands to that place."""

    text: str
    x: float
    y: float
    anchor: Anchor
    box: Box


def shortened(name: str, most: int = MOST_LETTERS) -> str:
    """Return a name of at most so many letters.

    >>> shortened("resnet_preact_bottleneck_164", 12)
    'resnet_prea…'
    """
    return name if len(name) <= most else f"{name[: most - 1]}…"


def place_label(name: str, x: float, y: float, letters: int, taken: Sequence[Box], lines: Floats, frame: Box) -> Label:
    """Return where a point's name is written.

    letters: their height.   taken: boxes to keep clear of.   lines: float (n, 2), points of lines that names had
    better not cover.   frame: to stay within.
    """
    text = shortened(name)
    width, gap = _ASPECT * letters * len(text), 11.0
    sides: tuple[tuple[float, Anchor], ...] = ((gap, "start"), (-gap, "end"), (0.0, "middle"))
    places: list[tuple[float, float, Anchor]] = [
        (x + dx, y + dy, anchor)
        for dy in (-1.1 * letters, 1.7 * letters, 0.35 * letters, -2.6 * letters, 3.2 * letters)
        for dx, anchor in sides
        if not (dx == 0.0 and abs(dy) < letters)
    ]
    labels = [
        Label(text, round(at_x, 2), round(at_y, 2), anchor, _box(at_x, at_y, width, letters, anchor))
        for at_x, at_y, anchor in places
    ]
    return min(labels, key=lambda label: _crowding(label.box, taken, lines, frame))


def _box(x: float, y: float, width: float, letters: int, anchor: Anchor) -> Box:
    left = {"start": x, "middle": x - width / 2, "end": x - width}[anchor]
    return Box(left, y - letters, left + width, y + 0.3 * letters)


def _crowding(box: Box, taken: Sequence[Box], lines: Floats, frame: Box) -> float:
    # To stand on a line is ugly, on another name unreadable.
    on_lines = min(box.n_within(lines), 10)
    return 200 * box.beyond(frame) + 30 * sum(box.overlap(other) for other in taken) + 12 * on_lines
