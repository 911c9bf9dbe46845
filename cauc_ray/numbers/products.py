"""Products of rows and weights that depend, to the last bit, on nothing but the row.

A matrix product adds in an order that changes with the number of rows. Here its terms are whole numbers of 24 bits
each way, whose sums float64 holds exactly in any order.
"""

from __future__ import annotations

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


def products(rows: Floats, weights: Floats) -> Floats:
    """Return the inner products of rows, float (n, d), and weights, float (m, d), float64 (n, m).

    They are as precise as in float32. Rows are finite.

    >>> products(np.array([[3.0, 4.0]]), np.array([[1.0, 0.0], [0.0, 2.0]])).round(6).tolist()
    [[3.0, 8.0]]
    """
    (unit_rows, of_rows), (unit_weights, of_weights) = _units(rows), _units(weights)
    inner: Floats = (unit_rows @ unit_weights.T) * (of_rows / _UNIT)[:, None] * (of_weights / _UNIT)
    return inner
