"""Ridge regression whose penalty has the least leave-one-out error, which is exact and takes no refits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.types import Floats

PENALTIES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True, slots=True)
class RidgeFit:
    """A fit of T targets on d features.

    weights: float64 (d, T).   centre: of the features, float64 (d,).   level: of the targets, float64 (T,).
    penalty: the one chosen.   held_out: each row's prediction by the fit on all others, float64 (N, T).
    """

    weights: Floats
    centre: Floats
    level: Floats
    penalty: float
    held_out: Floats

    @property
    def offsets(self) -> Floats:
        """Return what is added to products of features and weights, float64 (T,)."""
        found: Floats = self.level - self.centre @ self.weights
        return found

    def predict(self, features: Floats) -> Floats:
        """Return predictions, float64 (n, T).   features: float (n, d)."""
        found: Floats = self.level + (features - self.centre) @ self.weights
        return found


def fit_ridge(features: Floats, targets: Floats, penalties: Sequence[float] = PENALTIES) -> RidgeFit:
    """Fit a ridge regression with a free intercept, at the penalty of least squared leave-one-out error.

    features: float (N, d), N of 2 and more.   targets: float (N, T).
    Leaving a row out changes its residual by a factor of 1 / (1 - h), where h is its entry on the diagonal of the
    matrix that maps targets to fitted values (Allen's PRESS); the intercept's share of it is 1 / N.

    >>> fit = fit_ridge(np.array([[0.0], [1.0], [2.0]]), np.array([[0.0], [1.0], [2.0]]), [1e-9])
    >>> fit.predict(np.array([[3.0]])).round(6)
    array([[3.]])
    """
    n = len(features)
    centre, level = features.mean(axis=0, dtype=np.float64), targets.mean(axis=0, dtype=np.float64)
    centred, residual = features - centre, targets - level
    squares, axes = np.linalg.eigh(centred.T @ centred)
    squares = np.maximum(squares, 0.0)
    rotated = centred @ axes
    along = rotated.T @ residual

    def held_out(penalty: float) -> Floats:
        left_out = residual - (rotated / (squares + penalty)) @ along
        leverage = 1 / n + (rotated**2 / (squares + penalty)).sum(axis=1)
        found: Floats = targets - left_out / np.maximum(1 - leverage, 1e-12)[:, None]
        return found

    penalty = min(penalties, key=lambda each: float(((held_out(each) - targets) ** 2).sum()))
    weights = axes @ (along / (squares + penalty)[:, None])
    return RidgeFit(weights, centre, level, penalty, held_out(penalty))
