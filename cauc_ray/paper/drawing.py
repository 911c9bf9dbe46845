"""How all figures look: fonts, colours that everybody can tell apart, files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cauc_ray.errors import ConfigError
from cauc_ray.files.atomic import atomic_file

# Of Okabe and Ito (2008).
BLUE, VERMILION, GREEN, PURPLE, ORANGE = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00"
SKY, BLACK, GREY = "#56B4E9", "#000000", "#888888"
CYCLE = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_STYLE = {
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


def require_matplotlib() -> None:
    """Raise ConfigError with the install command where matplotlib is missing."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ConfigError("the figures need matplotlib: pip install 'cauc-ray[reports]'") from error


def halo() -> list[Any]:
    """Return what keeps words readable over lines."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.5, foreground="white")]


@contextmanager
def figure(width: float, height: float, path: Path) -> Iterator[Any]:
    """Yield a figure of so many inches to draw on, and write it as path.png and path.svg."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        drawn = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(drawn)
        yield drawn
        for kind in ("png", "svg"):
            with atomic_file(path.with_name(f"{path.name}.{kind}")) as temporary:
                drawn.savefig(temporary, format=kind, dpi=160)
