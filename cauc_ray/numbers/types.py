"""Names for the array types of every layer; the docstrings give shapes and dtypes."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Summed:
    """Sums over rows, field by field: those of a table's parts add up to those of the whole table."""

    def __add__(self, sums: Self) -> Self:
        """Return the sums over the rows of both."""
        return type(self)(*(getattr(self, part.name) + getattr(sums, part.name) for part in fields(self)))
