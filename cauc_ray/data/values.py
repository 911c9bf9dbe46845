"""A column's values as models read them: numpy arrays, of objects where no other type fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def as_column(rows: Sequence[Any]) -> npt.NDArray[Any]:
    """Stack rows of numbers or arrays of one shape; return other rows as an array of objects."""
    if len(rows) and all(
        isinstance(row, np.ndarray | np.generic) and row.dtype.kind in "biufmM" and row.shape == rows[0].shape
        for row in rows
    ):
        return np.stack(rows)
    return objects(rows)


def objects(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Return values of any type as an array of objects (n,)."""
    return np.fromiter(values, dtype=object, count=len(values))


def concat_column(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join one column's values from several blocks."""
    if any(part.dtype == object for part in parts) or len({part.shape[1:] for part in parts}) > 1:
        return as_column([row for part in parts for row in part])
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
