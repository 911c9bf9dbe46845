"""Products of rows and weights that depend, to the last bit, on nothing but the row.

A matrix product adds in an order that changes with the number of rows. Here its terms are whole numbers of 24 bits
each way, whose sums float64 holds exactly in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.types import Floats

# Vectors of length 1 are rounded to this: products of two have 48 bits, and so have their sums, by Cauchy and Schwarz.
_UNIT = 2.0**24


def lengths_of(vectors: Floats) -> Floats:
    """Return the Euclidean lengths of rows, float64 (n,).   vectors: float (n, d)."""
    lengths: Floats = np.sqrt(np.square(np.asarray(vectors, dtype=np.float64, order="C")).sum(axis=1))
    return lengths


def _units(vectors: Floats) -> tuple[Floats, Floats]:
    """Return rows scaled to length 1, in whole numbers of 1 / _UNIT, and their lengths; rows of length 0 stay."""
    lengths = lengths_of(vectors)
    scaled: Floats = np.rint(vectors * (_UNIT / np.where(lengths > 0, lengths, 1.0))[:, None])
    return scaled, lengths


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that are prepared once for many products.

    Attributes:
        units: Scaled to length 1, in whole numbers of 1 / 2^24, float64 (m, d).
        lengths: Their lengths, float64 (m,).
    """

    units: Floats
    lengths: Floats

    @classmethod
    def of(cls, weights: Floats) -> Weights:
        """Prepare weights, float (m, d)."""
        return cls(*_units(weights))


def products(rows: Floats, weights: Floats | Weights) -> Floats:
    """Return the inner products of rows, float (n, d), and weights, float (m, d) or prepared, float64 (n, m).

    They are as precise as in float32. Rows are finite.

    >>> products(np.array([[3.0, 4.0]]), np.array([[1.0, 0.0], [0.0, 2.0]])).round(6).tolist()
    [[3.0, 8.0]]
    """
    (unit_rows, of_rows), prepared = _units(rows), weights if isinstance(weights, Weights) else Weights.of(weights)
    inner: Floats = (unit_rows @ prepared.units.T) * (of_rows / _UNIT)[:, None] * (prepared.lengths / _UNIT)
    return inner
