"""Largest values, sums and dot products of rows: of a few columns one after the other, which numpy does row by row."""

from __future__ import annotations

import numpy as np

from cauc_ray.numbers.types import Floats, Ints

# Up to so many columns, and from so many rows on, numpy's loop over rows costs more than one over columns.
_FEW_COLUMNS, _MANY_ROWS = 16, 64


def _loops(values: Floats) -> bool:
    n, k = values.shape
    return bool(0 < k <= _FEW_COLUMNS and n >= _MANY_ROWS)


def row_max(values: Floats) -> Floats:
    """Return each row's largest value, float (n,), NaN where a row has one, -inf without columns.   values: (n, K)."""
    if not _loops(values):
        largest: Floats = values.max(axis=1, initial=-np.inf)
        return largest
    largest = values[:, 0].copy()
    for column in values.T[1:]:
        np.maximum(largest, column, out=largest)
    return largest


def row_argmax(values: Floats) -> tuple[Ints, Floats]:
    """Return the first position of each row's largest value, int (n,), and that value, float (n,).

    values: float (n, K), K at least 1. The value is NaN where a row has one; the position then means nothing.
    """
    if not _loops(values):
        position = values.argmax(axis=1)
        return position, values[np.arange(len(values)), position]
    position, largest = np.zeros(len(values), dtype=np.intp), values[:, 0].copy()
    for index, column in enumerate(values.T[1:], start=1):
        position[column > largest] = index
        np.maximum(largest, column, out=largest)
    return position, largest


def row_total(values: Floats) -> Floats:
    """Return each row's sum, float (n,), where these are exact in any order.   values: float (n, K), K at least 1."""
    if not _loops(values):
        total: Floats = values.sum(axis=1)
        return total
    total = values[:, 0].copy()
    for column in values.T[1:]:
        total += column
    return total


def row_dot(left: Floats, right: Floats) -> Floats:
    """Return the dot product of each row of two arrays, float (n,).   left: float (n, K).   right: (n, K) or (1, K)."""
    if not _loops(left):
        # A matrix product would start threads.
        products: Floats = np.vecdot(left, right)
        return products
    total: Floats = left[:, 0] * right[:, 0]
    for column, other in zip(left.T[1:], right.T[1:], strict=True):
        total += column * other
    return total


def by_columns(shape: tuple[int, int], dtype: type[np.floating]) -> Floats:
    """Return an empty array whose columns are contiguous if there are few, else its rows."""
    n, k = shape
    return np.empty((k, n), dtype=dtype).T if k <= _FEW_COLUMNS else np.empty(shape, dtype=dtype)
