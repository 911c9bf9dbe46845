"""Logits as they come from a table or a model: masks, and probabilities instead of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Summed

LogitKind: TypeAlias = Literal["raw", "log-probabilities", "probabilities", "surrogate"]
LOGIT_KINDS: tuple[LogitKind, ...] = get_args(LogitKind)
# Kinds whose rows must not be probabilities. Declared surrogates are not checked.
MUST_BE_DECLARED: tuple[LogitKind, ...] = ("raw", "log-probabilities")
# The kind of a chain whose models differ.
MIXED = "mixed"

# A value further below its row's largest logit is a mask: -1e4, -65504, -1e9, finfo.min.
MASK_DEPTH = 5000.0
# The logarithm of a probability of 0: improbable, not impossible.
LEAST_LOG = -50.0

# Rows without negative values are probabilities if their sums differ from one by no more than this: in half precision
# or rounded to three decimals if there are many rows; in float32 if there are few. For raw logits of two options, about
# one row in 2,000 meets the first limit by accident, and one in a million the second.
_ENOUGH_ROWS, _LOOSE, _TIGHT = 8, 5e-3, 1e-5
# Looking at this many rows suffices for most logits.
_FIRST_ROWS = 64


def kind_of(text: str) -> LogitKind | None:
    """Return the kind that a text names, None if models differ.

    Earlier versions wrote free text that begins with the kind; without one, logits are raw.

    >>> kind_of("surrogate: log p on the answered option"), kind_of("unknown"), kind_of("mixed: see each source")
    ('surrogate', 'raw', None)
    """
    if text.startswith(MIXED):
        return None
    if text.startswith("log-"):
        return "log-probabilities"
    return next((kind for kind in LOGIT_KINDS if text.startswith(kind)), "raw")


def joint_kind(kinds: Sequence[LogitKind]) -> str:
    """Return the common kind of a chain's models, MIXED if they differ."""
    return kinds[0] if len(set(kinds)) == 1 else MIXED


def real_options(logits: Floats) -> Floats:
    """Return logits with -inf for masks: values more than MASK_DEPTH below their row's largest.

    logits: float (n, K), returned as they are if they have no masks.

    >>> real_options(np.array([[1.0, -4000.0, -1e9]])).tolist()
    [[1.0, -4000.0, -inf]]
    """
    logits = np.asarray(logits)
    if logits.dtype.kind != "f":
        logits = logits.astype(np.float64)
    if not logits.size:
        return logits
    # In float64: float32 would round the difference between the largest value and a mask.
    floors = logits.max(axis=1).astype(np.float64) - MASK_DEPTH
    suspects = np.flatnonzero(logits.min(axis=1) < floors)
    chosen = logits[suspects]
    masks = (chosen < floors[suspects, None]) & (chosen > -np.inf)
    if not masks.any():
        return logits
    cleaned = logits.copy()
    cleaned[suspects] = np.where(masks, -np.inf, chosen)
    return cleaned


def as_logits(values: Floats, kind: LogitKind) -> Floats:
    """Convert a model's output to logits, float (n, K), -inf where a row has no such option.

    Probabilities p become max(log p, LEAST_LOG). Raises DataError naming the first row that is not probabilities.

    >>> as_logits(np.array([[0.5, 0.0]]), "probabilities").round(2)
    array([[ -0.69, -50.  ]])
    """
    logits = real_options(values)
    if kind != "probabilities":
        return logits
    wrong = np.flatnonzero(~hold_probabilities(logits))
    if len(wrong):
        raise DataError(f"row {wrong[0]} of the batch: {NOT_PROBABILITIES}")
    missing = np.isneginf(logits)
    with np.errstate(divide="ignore"):
        # In float64: its last bits depend on a value's position in the array, and float32 rounds them away.
        logs = np.log(np.where(missing, 1.0, np.maximum(logits, 0.0)), dtype=np.float64)
    np.maximum(logs, LEAST_LOG, out=logs)
    logs[missing] = -np.inf
    return logs.astype(logits.dtype)


NOT_PROBABILITIES = "declared as probabilities, but values are outside 0 to 1 or all 0"


def hold_probabilities(values: Floats) -> Bools:
    """Return which rows can be probabilities, bool (n,).   values: (n, K), -inf for missing options."""
    largest = values.max(axis=1, initial=0.0)
    below = ((values < -_TIGHT) & (values > -np.inf)).any(axis=1)
    possible: Bools = (largest > 0) & (largest <= 1 + _LOOSE) & ~below
    return possible


@dataclass(frozen=True, slots=True)
class SumsToOne(Summed):
    """Counts of rows that look like probabilities, to detect probabilities that are declared as logits.

    n: rows of two options or more.   n_near, n_exact: of these, rows whose sum is one in half precision, and in
    float32. n_between: of these, rows whose largest value is below 1; rows of zeros and a single one may be logits.
    n_negative: rows with a value below 0, which no probability has; if there are any, nothing else is counted.
    """

    n: int = 0
    n_near: int = 0
    n_exact: int = 0
    n_between: int = 0
    n_negative: int = 0

    @classmethod
    def of(cls, logits: Floats) -> SumsToOne:
        """Count rows, float (n, K), -inf where a row has no such option."""
        for some in (logits[:_FIRST_ROWS], logits):
            n_negative = int(((some < 0) & (some > -np.inf)).any(axis=1).sum())
            if n_negative:
                return cls(n_negative=n_negative)
        real = np.isfinite(logits)
        rows = real.sum(axis=1) > 1
        values = np.where(real[rows], logits[rows], 0.0)
        away = np.abs(values.sum(axis=1, dtype=np.float64) - 1)
        return cls(
            n=len(values),
            n_near=int((away <= _LOOSE).sum()),
            n_exact=int((away <= _TIGHT).sum()),
            n_between=int((values.max(axis=1, initial=0.0) < 1).sum()),
        )

    @property
    def possible(self) -> bool:
        """Return whether the rows may be probabilities: at least half sum to one, since some may be truncated."""
        return not self.n_negative and 2 * self.n_near >= self.n

    @property
    def certain(self) -> bool:
        """Return whether the rows are probabilities."""
        return self.possible and (self.n >= _ENOUGH_ROWS or (self.n_between > 0 and self.n_exact == self.n))
