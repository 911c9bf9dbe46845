"""Logits as they enter, from a table or from a model: masks, and probabilities in place of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Summed

LogitKind: TypeAlias = Literal["raw", "log-probabilities", "probabilities", "surrogate"]
LOGIT_KINDS: tuple[LogitKind, ...] = get_args(LogitKind)
# Rows of these that are probabilities are wrong. Who declares surrogates has looked at them.
MUST_BE_DECLARED: tuple[LogitKind, ...] = ("raw", "log-probabilities")
# Of a chain whose models differ.
MIXED = "mixed"

# An option that lies further below its row's largest logit is a mask: -1e4, -65504, -1e9, finfo.min.
MASK_DEPTH = 5000.0
# The logarithm of a probability of 0: improbable, not impossible.
LEAST_LOG = -50.0

# Rows of no negative value are probabilities where sums differ from one by no more than this: in half precision or
# rounded to three decimals, if there are so many rows; in float32, if there are few. Of raw logits of two options, one
# row in some 2,000 comes so close by accident in the first sense, and one in a million in the second.
_ENOUGH_ROWS, _LOOSE, _TIGHT = 8, 5e-3, 1e-5
# A look at so many rows is enough for most logits.
_FIRST_ROWS = 64


def kind_of(text: str) -> LogitKind | None:
    """Return the kind that a text names, None where models differ.

    Earlier versions wrote free texts, which begin with the kind; one that names none is of raw logits.

    >>> kind_of("surrogate: log p on the answered option"), kind_of("unknown"), kind_of("mixed: see each source")
    ('surrogate', 'raw', None)
    """
    if text.startswith(MIXED):
        return None
    if text.startswith("log-"):
        return "log-probabilities"
    return next((kind for kind in LOGIT_KINDS if text.startswith(kind)), "raw")


def joint_kind(kinds: Sequence[LogitKind]) -> str:
    """Return the kind of all models of a chain, MIXED where they differ."""
    return kinds[0] if len(set(kinds)) == 1 else MIXED


def real_options(logits: Floats) -> Floats:
    """Return logits with -inf for masks: values more than MASK_DEPTH below their row's largest.

    logits: float (n, K), which are returned themselves where they hold no mask.

    >>> real_options(np.array([[1.0, -4000.0, -1e9]])).tolist()
    [[1.0, -4000.0, -inf]]
    """
    logits = np.asarray(logits)
    if logits.dtype.kind != "f":
        logits = logits.astype(np.float64)
    if not logits.size:
        return logits
    # In float64: float32 would round what lies between the largest value and a mask.
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
    """Return what a model gives as logits, float (n, K), -inf where a row has no such option.

    Probabilities p become max(log p, LEAST_LOG). Raises DataError naming the first row that holds none.

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
        # In float64, whose last bits, which depend on where a value lies in an array, float32 rounds away.
        logs = np.log(np.where(missing, 1.0, np.maximum(logits, 0.0)), dtype=np.float64)
    np.maximum(logs, LEAST_LOG, out=logs)
    logs[missing] = -np.inf
    return logs.astype(logits.dtype)


NOT_PROBABILITIES = "it was declared as probabilities, which lie between 0 and 1 and are not all 0"


def hold_probabilities(values: Floats) -> Bools:
    """Return which rows can be probabilities of options, bool (n,).   values: (n, K), -inf for missing options."""
    largest = values.max(axis=1, initial=0.0)
    below = ((values < -_TIGHT) & (values > -np.inf)).any(axis=1)
    possible: Bools = (largest > 0) & (largest <= 1 + _LOOSE) & ~below
    return possible


@dataclass(frozen=True, slots=True)
class SumsToOne(Summed):
    """How many rows look like probabilities, which under another kind would be taken for logits.

    n: rows of two options or more.   n_near, n_exact: of those, whose sums are one in half precision, and in float32.
    n_between: of those, whose largest value is below 1; a few rows of zeros and a one may be logits.   n_negative: rows
    with a value below 0, as no probability is; where there are some, nothing else is counted.
    """

    n: int = 0
    n_near: int = 0
    n_exact: int = 0
    n_between: int = 0
    n_negative: int = 0

    @classmethod
    def of(cls, logits: Floats) -> SumsToOne:
        """Look at rows, float (n, K), -inf where one has no such option."""
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
        """Return whether the rows may be probabilities: at least half sum to one, as some may have been cut."""
        return not self.n_negative and 2 * self.n_near >= self.n

    @property
    def certain(self) -> bool:
        """Return whether the rows are probabilities."""
        return self.possible and (self.n >= _ENOUGH_ROWS or (self.n_between > 0 and self.n_exact == self.n))
