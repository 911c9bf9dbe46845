"""Segments of examples: those that have the same value in a column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Ints


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments that a column divides examples into.

    Attributes:
        column: Name of the column.
        by_id: Value of each example, by its id.
    """

    column: str
    by_id: Mapping[str, str]

    def rows(self, example_ids: Sequence[str]) -> dict[str, Ints]:
        """Return the rows of each segment, int (n,), by its name, in the order of names.

        Raises:
            DataError: The column has no value for an example.
        """
        try:
            values = np.array([self.by_id[example] for example in example_ids])
        except KeyError as error:
            raise DataError(f"column {self.column!r} has no value for example {error.args[0]!r}") from None
        names, codes = np.unique(values, return_inverse=True)
        return {str(name): np.flatnonzero(codes == code) for code, name in enumerate(names)}
