"""Ids of examples: texts, or row numbers, which are texts only where one is shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Ints

# A number of more digits has no sort key in 64 bits.
_MOST_DIGITS = 16
_POWERS: Ints = 10 ** np.arange(_MOST_DIGITS + 1)


class NumberIds(Sequence[str]):
    """Numbers in place of their decimal texts.

    Attributes:
        numbers: Int64 (N,), 0 or more.
    """

    def __init__(self, numbers: Ints) -> None:
        """Take the numbers."""
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> NumberIds: ...
    def __getitem__(self, index: int | slice) -> str | NumberIds:
        return NumberIds(self.numbers[index]) if isinstance(index, slice) else str(self.numbers[index])

    def __iter__(self) -> Iterator[str]:
        return map(str, self.numbers.tolist())

    def __eq__(self, ids: object) -> bool:
        if isinstance(ids, NumberIds):
            return np.array_equal(self.numbers, ids.numbers)
        return isinstance(ids, Sequence) and tuple(self) == tuple(ids)

    def __repr__(self) -> str:
        return f"NumberIds({self.numbers!r})"

    def text_order(self) -> Ints:
        """Return the rows in the order of their texts, int (N,)."""
        n_digits = self._n_digits()
        aligned = self.numbers * _POWERS[n_digits.max(initial=1) - n_digits]
        # Of 1, 10 and 100 the shorter comes first. A stable sort merges the runs that ascending numbers have.
        return np.argsort(aligned * (_MOST_DIGITS + 1) + n_digits, kind="stable")

    def lines(self) -> bytes:
        """Return the texts, one on each line."""
        n_digits = self._n_digits()
        width = int(n_digits.max(initial=1))
        characters = np.full((len(self), width + 1), ord("\n"), dtype=np.uint8)
        left = self.numbers
        for position in range(width - 1, -1, -1):
            tens = left // 10
            characters[:, position] = left - 10 * tens + ord("0")
            left = tens
        return characters[np.arange(width + 1) >= width - n_digits[:, None]][:-1].tobytes()

    def _n_digits(self) -> Ints:
        return np.searchsorted(_POWERS[1:], self.numbers, side="right") + 1


def ids_of(values: Any) -> NumberIds | tuple[str, ...]:
    """Return ids, (N,), as numbers if they are such, else as texts. Raises DataError for a single value."""
    if isinstance(values, str | bytes) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        raise DataError(f"ids are a list or an array with one for each row, got {values!r}")
    are_integers = isinstance(values, np.ndarray) and values.dtype.kind in "iu" and values.ndim == 1
    if are_integers and len(values) and values.min() >= 0 and values.max() < _POWERS[-1]:
        return NumberIds(values.astype(np.int64))
    return tuple(map(str, values))


def rows_of(ids: Sequence[str], rows: Ints) -> NumberIds | tuple[str, ...]:
    """Return the ids of some rows, int (n,)."""
    return NumberIds(ids.numbers[rows]) if isinstance(ids, NumberIds) else tuple(np.array(ids, dtype=object)[rows])


def text_order(ids: Sequence[str]) -> Ints:
    """Return the rows in the order of their ids as texts, int (N,)."""
    return ids.text_order() if isinstance(ids, NumberIds) else np.argsort(np.array(ids))


def number_order(ids: Sequence[str]) -> Ints:
    """Return the rows in the order of their ids by length, then as texts: that of numbers, int (N,)."""
    if isinstance(ids, NumberIds):
        return np.argsort(ids.numbers, kind="stable")
    return np.array(sorted(range(len(ids)), key=lambda row: (len(ids[row]), ids[row])), dtype=np.int64)


def lines_of(ids: Sequence[str]) -> bytes:
    """Return the ids, one on each line."""
    return ids.lines() if isinstance(ids, NumberIds) else "\n".join(ids).encode()


def duplicate_of(ids: Sequence[str]) -> str | None:
    """Return an id that occurs twice; None if there is none."""
    if isinstance(ids, NumberIds):
        ascending = np.sort(ids.numbers, kind="stable")
        twice = ascending[1:][ascending[1:] == ascending[:-1]]
        return str(twice[0]) if len(twice) else None
    if len(set(ids)) == len(ids):
        return None
    return next(example for example, count in Counter(ids).items() if count > 1)
