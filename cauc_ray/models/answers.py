"""What a model answers to a batch, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Floats

# The input's columns, each (n, ...): numbers as arrays, text, bytes and ragged lists as arrays of objects.
Batch: TypeAlias = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Answers:
    """Logits of n rows, float32 (n, K), -inf beyond a row's options; what each call cost, float64 (n,), or None."""

    logits: Floats
    costs: Floats | None = None


class Model(Protocol):
    """A loaded model."""

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch. Raises whatever the model raises; DataError for logits that nobody can use."""
        ...


def batch_size(batch: Batch) -> int:
    """Return the number of rows of a batch."""
    return len(next(iter(batch.values()), ()))


def as_answers(output: object, n: int) -> Answers:
    """Take what a user's callable returned for n rows: logits (n, K), or n vectors where K differs.

    Raises DataError when the number of rows is another, a row is empty, or a logit is NaN or +inf.
    """
    if not isinstance(output, np.ndarray | list | tuple):
        raise DataError(
            f"a model must return logits as a numpy array or a list of vectors, not {type(output).__name__}"
        )
    if len(output) != n:
        raise DataError(f"the model returned {len(output)} rows of logits for {n} inputs")
    try:
        if isinstance(output, np.ndarray) and output.dtype != object:
            logits = output.astype(np.float32, copy=False)
        else:
            logits = _padded([np.asarray(row, dtype=np.float32) for row in output])
    except (TypeError, ValueError) as error:
        raise DataError(f"the model's logits are not numbers: {error}") from error
    if logits.ndim != 2 or logits.shape[1] == 0:
        raise DataError(f"the model returned logits of shape {logits.shape}; expected ({n}, number of options)")
    bad = np.flatnonzero(~np.isfinite(logits.max(axis=1)))
    if len(bad):
        raise DataError(f"row {bad[0]} of the batch: a logit is NaN or +inf, or the row has none")
    return Answers(logits)


def _padded(rows: list[Floats]) -> Floats:
    if any(row.ndim != 1 for row in rows):
        raise DataError("a model that returns a list must return one vector of logits for each row")
    logits = np.full((len(rows), max((len(r) for r in rows), default=0)), -np.inf, dtype=np.float32)
    for place, row in enumerate(rows):
        logits[place, : len(row)] = row
    return logits
