"""The figure of complementarity: what calibration promises of fusing, and what fusing gained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cauc_ray.paper.drawing import CYCLE, GREY, MARKERS, figure
from cauc_ray.paper.fused import gain_of, sign_is_right
from cauc_ray.paper.measured import PairMeasures


def caption(found: Mapping[str, Sequence[PairMeasures]]) -> str:
    """Say what the figure shows."""
    n_right = {name: sum(sign_is_right(pair) for pair in pairs) for name, pairs in found.items()}
    by_set = ", ".join(f"{name} {n_right[name]} of {len(pairs)}" for name, pairs in found.items())
    return (
        "Complementarity rate on calibration against the accuracy that fusing gained over direct deferral on test, "
        "Base at its own threshold. Each point is a pair of models of one set of which the second is the dearer and, "
        "on calibration, the more accurate. The sign chose the better, or as good, for "
        f"{sum(n_right.values())} of {sum(map(len, found.values()))} pairs: {by_set}."
    )


def draw_gains(found: Mapping[str, Sequence[PairMeasures]], path: Path) -> None:
    """Draw every pair of every set."""
    with figure(8.6, 5.2, path) as drawn:
        panel = drawn.subplots()
        panel.axhline(0, color=GREY, linewidth=1, linestyle="--", zorder=1)
        panel.axvline(0, color=GREY, linewidth=1, linestyle="--", zorder=1)
        for place, (name, pairs) in enumerate(found.items()):
            panel.scatter(
                [100 * pair.complementarity_rate for pair in pairs],
                [100 * gain_of(pair) for pair in pairs],
                s=34,
                color=CYCLE[place % len(CYCLE)],
                marker=MARKERS[place % len(MARKERS)],
                alpha=0.75,
                linewidths=0.4,
                edgecolors="white",
                label=f"{name} ({len(pairs)})",
                zorder=2,
            )
        panel.margins(y=0.1)
        panel.set_xlabel("complementarity rate on calibration (percentage points)")
        panel.set_ylabel("test accuracy, fusing less direct deferral (points)")
        drawn.legend(loc="outside right upper", title="set (pairs)")
        corner = {"xycoords": "axes fraction", "fontsize": 9, "color": "#555555"}
        panel.annotate("Base fuses, and fusing helps", (0.985, 0.975), ha="right", va="top", **corner)
        panel.annotate("Base defers, and fusing would hurt", (0.015, 0.025), ha="left", va="bottom", **corner)
