"""Largest values, sums and dot products of rows: of a few columns one after the other, which numpy does row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cauc_ray.numbers.types import Floats, Ints

# Up to so many columns, and from so many rows on, numpy's loop over rows costs more than one over columns.
_FEW_COLUMNS, _MANY_ROWS = 16, 64


def _loops(values: npt.NDArray[Any]) -> bool:
    n, k = values.shape
    return bool(0 < k <= _FEW_COLUMNS and n >= _MANY_ROWS)


def row_max(values: Floats) -> Floats:
    """Return each row's largest value, float (n,), NaN where a row has one, -inf without columns.   values: (n, K)."""
    if not _loops(values):
        largest: Floats = np.maximum.reduce(values, axis=1, initial=-np.inf)
        return largest
    largest = values[:, 0].copy()
    for column in values.T[1:]:
        np.maximum(largest, column, out=largest)
    return largest


def row_argmax(values: Floats) -> tuple[Ints, Floats]:
    """Return the first position of each row's largest value, int (n,), and that value, float (n,).

    Args:
        values: Float (n, K), K at least 1.

    Returns:
        The positions, and the values, NaN where a row has one; its position then means nothing.
    """
    if not _loops(values):
        position = values.argmax(axis=1)
        return position, values[np.arange(len(values)), position]
    largest = row_max(values)
    before, position = np.ones(len(values), dtype=bool), np.zeros(len(values), dtype=np.int8)
    for column in values.T[:-1]:
        before &= column < largest
        position += before
    return position, largest


def row_total(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return each row's sum, (n,), where these are exact in any order.   values: (n, K), K at least 1."""
    if not _loops(values):
        total: npt.NDArray[Any] = values.sum(axis=1)
        return total
    total = values[:, 0].copy()
    for column in values.T[1:]:
        total += column
    return total


def row_dot(left: npt.NDArray[Any], right: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the dot product of each row of two arrays, (n,).   left: (n, K).   right: (n, K) or (1, K)."""
    if not _loops(left):
        # A matrix product would start threads.
        products: npt.NDArray[Any] = np.vecdot(left, right)
        return products
    total: npt.NDArray[Any] = left[:, 0] * right[:, 0]
    for column, factors in zip(left.T[1:], right.T[1:], strict=True):
        total += column * factors
    return total


def row_values(values: npt.NDArray[Any], columns: Ints) -> npt.NDArray[Any]:
    """Return each row's value in a column of its own, (n,).   values: (n, K).   columns: int (n,)."""
    if not _loops(values):
        return values[np.arange(len(values)), columns]
    chosen = values[:, 0].copy()
    for index, column in enumerate(values.T[1:], start=1):
        np.copyto(chosen, column, where=columns == index)
    return chosen


def ascending(rows: Ints, n: int) -> Ints:
    """Return some of n rows, each of which occurs once, in ascending order, int (m,)."""
    mask = np.zeros(n, dtype=bool)
    mask[rows] = True
    return np.flatnonzero(mask)


def by_columns(shape: tuple[int, int], dtype: type[np.floating]) -> Floats:
    """Return an empty array whose columns are contiguous if there are few, else its rows."""
    n, k = shape
    return np.empty((k, n), dtype=dtype).T if k <= _FEW_COLUMNS else np.empty(shape, dtype=dtype)


def in_columns(values: Floats) -> Floats:
    """Return rows, float (n, K), in an array whose columns are contiguous if there are few and many rows."""
    return np.asfortranarray(values) if _loops(values) else values


def rows_at(values: Floats, rows: Ints) -> Floats:
    """Return some rows, int (n,), of an array, float (N, K); columns stay contiguous where they are."""
    columns = values.strides[0] == values.itemsize
    return values.T.take(rows, axis=1).T if columns else values.take(rows, axis=0)
