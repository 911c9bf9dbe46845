"""Expected gains per cost of going on from a stage of a cascade: what a price of accuracy is compared with.

Of a stage j and a later one k, u_jk is the expected rise of the confidence p_k - p_j at a confidence p_j: the
decreasing centred isotonic regression (Oron and Flournoy, Statistics in Biopharmaceutical Research, 2017). With the
cumulative mean costs C, the gain per unit of cost is

    G_j(p) = max over k > j of u_jk(p) / (C_k - C_j) - 1e-9 p / C_M,

and a row stops at the first stage where G_j(p_j) is at most the price t. G_j falls strictly, so that the rule is one
confidence threshold for each stage, and the rows that stop at a price stop at every higher one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cauc_ray.numbers.sweep import STOP_NONE, midpoints
from cauc_ray.numbers.types import Floats

# Confidences and the values there of a function that is linear between them, float64 (B,) each.
Knots: TypeAlias = tuple[Floats, Floats]

# Among confidences of one expected gain, the lower goes on first. Calls that cost nothing count as this share.
_TIE = 1e-9


@dataclass(frozen=True, slots=True)
class Gains:
    """Expected gains per cost of going on from each of M - 1 stages.

    Attributes:
        knots: By stage and later stage; values fall strictly from confidence 0 to 1.
    """

    knots: tuple[tuple[Knots, ...], ...]

    def at(self, stage: int, confidences: Floats) -> Floats:
        """Return G of a stage at confidences, float64 (n,)."""
        gains: Floats = np.max([np.interp(confidences, *knots) for knots in self.knots[stage]], axis=0)
        return gains

    def worth(self, confidences: Floats) -> Floats:
        """Return -G of rows at every stage, float64 (N, M), rising with the confidence, by which a sweep orders them.

        Args:
            confidences: Of the stages, float64 (N, M); those of the last, where every row stops, are returned.
        """
        worth = confidences.copy()
        for stage in range(len(self.knots)):
            order = np.argsort(confidences[:, stage])
            # Interpolation may round at a knot.
            worth[order, stage] = np.maximum.accumulate(-self.at(stage, confidences[order, stage]))
        return worth

    def thresholds(self, price: float) -> tuple[float, ...]:
        """Return the least confidence of each stage but the last at which a row stops at a price."""
        ends = {"left": 0.0, "right": STOP_NONE}
        return tuple(
            max(float(np.interp(-price, -gains, confidences, **ends)) for confidences, gains in of_stage)
            for of_stage in self.knots
        )

    def between(self, settings: Floats, confidences: Floats) -> Floats:
        """Return thresholds midway between rows' confidences, float64 (P, M - 1).

        Args:
            settings: Lowest worth at which a row stops: minus the price, float64 (P,).
            confidences: Of the rows, float64 (N, M).
        """
        worth, columns = self.worth(confidences), []
        for stage in range(len(self.knots)):
            levels, first = np.unique(confidences[:, stage], return_index=True)
            below = np.searchsorted(worth[first, stage], settings, side="left")
            columns.append(midpoints(levels)[below])
        return np.stack(columns, axis=1) if columns else np.zeros((len(settings), 0))


def fit_gains(confidences: Floats, costs: Floats) -> Gains:
    """Fit the expected gains of a chain.

    Args:
        confidences: At each stage, of rows that no fit has seen, float64 (M, N).
        costs: Mean costs of the calls, float64 (M,).
    """
    total, n_stages = np.cumsum(costs), len(costs)
    unit = float(total[-1]) or 1.0
    return Gains(
        tuple(
            tuple(
                _falling(
                    confidences[stage],
                    (confidences[later] - confidences[stage]) / max(total[later] - total[stage], _TIE * unit),
                    _TIE / unit,
                )
                for later in range(stage + 1, n_stages)
            )
            for stage in range(n_stages - 1)
        )
    )


def _falling(confidences: Floats, values: Floats, slope: float) -> Knots:
    """Return the decreasing centred isotonic regression of values on confidences, less a slope, from 0 to 1."""
    from scipy.optimize import isotonic_regression

    levels, index = np.unique(confidences, return_inverse=True)
    counts = np.bincount(index).astype(np.float64)
    means = np.bincount(index, weights=values) / counts
    starts = isotonic_regression(means, weights=counts, increasing=False).blocks[:-1]
    n = np.add.reduceat(counts, starts)
    centres, heights = (np.add.reduceat(of * counts, starts) / n for of in (levels, means))
    knots = np.concatenate([[0.0], centres, [1.0]])
    regression = np.interp(knots, centres, heights) - slope * knots
    # Rounding, and a block at an end: values must fall strictly, or a price has no threshold.
    distinct = np.append(True, (np.diff(knots) > 0) & (np.diff(np.minimum.accumulate(regression)) < 0))
    return knots[distinct], regression[distinct]
