"""Logits as they come from a table or a model, and softmax quantities of rows.

A softmax quantity of a row depends, to the last bit, on nothing but the row itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.rows import row_argmax, row_max, row_total
from cauc_ray.numbers.types import Bools, Floats, Ints, Summed

# An embedding is not logits, but what an encoder gives in their place.
LogitKind: TypeAlias = Literal["raw", "log-probabilities", "probabilities", "surrogate", "embedding"]
LOGIT_KINDS: tuple[LogitKind, ...] = get_args(LogitKind)[:-1]
# Kinds whose rows must not be probabilities. Declared surrogates are not checked.
MUST_BE_DECLARED: tuple[LogitKind, ...] = ("raw", "log-probabilities")
# The kind of a chain whose models differ.
MIXED = "mixed"

# A value further below its row's largest logit is a mask: -1e4, -65504, -1e9, finfo.min.
MASK_DEPTH = 5000.0
# Log-probabilities of long texts may be as low as that; of these only such values are masks.
MASKS = np.array([-1e4, -9999.0, -65504.0, np.finfo(np.float32).min, np.finfo(np.float64).min])
# The logarithm of a probability of 0: improbable, not impossible.
LEAST_LOG = -50.0
# The log-probability that stands for "not among those that the server returned".
UNLISTED_LOG = -100.0

# Rows without negative values are probabilities if their sums differ from one by no more than this: in half precision
# or rounded to three decimals if there are many rows; in float32 if there are few. For raw logits of two options, about
# one row in 2,000 meets the first limit by accident, and one in a million the second.
_ENOUGH_ROWS, _LOOSE, _TIGHT = 8, 5e-3, 1e-5
# Looking at this many rows suffices for most logits.
_FIRST_ROWS = 64

NOT_PROBABILITIES = "declared as probabilities, but values are outside 0 to 1 or all 0"

# The first sum, which finds the exponent for the second, is exact for up to 2^20 terms.
_HEADROOM = 20


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


def real_options(logits: Floats, kind: LogitKind = "raw") -> Floats:
    """Return logits with -inf for masks: values more than MASK_DEPTH below their row's largest.

    Args:
        logits: Logits, float (n, K), returned as they are if they have no masks.
        kind: Their kind; of log-probabilities only MASKS are masks.

    >>> real_options(np.array([[1.0, -4000.0, -1e9]])).tolist()
    [[1.0, -4000.0, -inf]]
    """
    logits = np.asarray(logits)
    if logits.dtype.kind != "f":
        logits = logits.astype(np.float64)
    if not logits.size:
        return logits
    # In float64: float32 would round the difference between the largest value and a mask.
    if np.float64(logits.min()) >= np.float64(logits.max()) - MASK_DEPTH:  # of all rows: one look at most tables
        return logits
    floors = row_max(logits).astype(np.float64) - MASK_DEPTH
    suspects = np.flatnonzero(-row_max(-logits) < floors)
    chosen = logits[suspects]
    masks = (chosen < floors[suspects, None]) & (chosen > -np.inf)
    if kind == "log-probabilities":
        masks &= np.isin(chosen, np.append(MASKS, np.finfo(chosen.dtype).min))
    if not masks.any():
        return logits
    cleaned = logits.copy()
    cleaned[suspects] = np.where(masks, -np.inf, chosen)
    return cleaned


def bounded_below(logits: Floats, floor: float | None) -> Floats:
    """Return logits of probabilities of at least a floor, float (n, K); -inf stays.

    Args:
        logits: Logarithms of probabilities, float (n, K); -inf where a row has no such option.
        floor: Probability that lower values count as; None to leave logits as they are.

    >>> bounded_below(np.array([[0.0, -50.0, -np.inf]]), 0.01).round(2)
    array([[ 0.  , -4.61,  -inf]])
    """
    if floor is None:
        return logits
    return np.maximum(logits, np.log(floor), out=logits.copy(), where=logits > -np.inf, dtype=logits.dtype)


def widened(rows: Floats, width: int) -> Floats:
    """Return rows (n, K) padded with -inf to a width; as they are if they have it."""
    missing = width - rows.shape[1]
    return np.pad(rows, ((0, 0), (0, missing)), constant_values=-np.inf) if missing > 0 else rows


def stacked(parts: Sequence[Floats]) -> Floats:
    """Concatenate rows (n, K), padded with -inf to the widest part."""
    width = max(part.shape[1] for part in parts)
    return np.concatenate([widened(part, width) for part in parts])


def as_logits(values: Floats, kind: LogitKind) -> Floats:
    """Convert a model's output to logits, float (n, K), -inf where a row has no such option.

    Probabilities p become max(log p, LEAST_LOG). Raises DataError naming the first row that is not probabilities.

    >>> as_logits(np.array([[0.5, 0.0]]), "probabilities").round(2)
    array([[ -0.69, -50.  ]])
    """
    logits = real_options(values, kind)
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


def row_sums(terms: Floats) -> Floats:
    """Sum each row independently, to the last bit, of the order of its terms, its padding and its neighbours.

    terms: float64 (N, K), at least 0, overwritten.   Returns float64 (N,).

    Every term is first rounded to a multiple of about 2^-51 of the row's sum. Sums of such multiples are exact,
    and exact sums are the same in any order. Plain sums are not: two rows whose options are permuted would get
    confidences that differ in the last bit, a threshold could fall between them, and a live batch would differ from
    the replay of the whole table.
    The sum whose exponent defines the multiples must not depend on the order either: near a power of two, plain sums
    in two orders may have two exponents. It is a sum of multiples of 2^-31 of the row's largest term.

    >>> row_sums(np.array([[1.0, 2.0, 3.0]]))
    array([6.])
    """
    _, exponents = np.frexp(row_max(terms)[:, None])
    _, exponents = np.frexp(_sums_of_multiples(terms.copy(), exponents + _HEADROOM))
    sums: Floats = _sums_of_multiples(terms, exponents)[:, 0]
    return sums


def _sums_of_multiples(terms: Floats, exponents: Ints) -> Floats:
    """Round terms, float64 (N, K), to multiples of 2^(e - 51) and sum the rows, float64 (N, 1).

    exponents: e, int (N, 1); exact if the row's sum is at most about 2^e.
    """
    # Adding 1.5 x 2^(e + 1) rounds away a term's bits below 2^(e - 51); subtracting it again leaves the rounded term.
    magnitudes = np.ldexp(3.0, exponents)
    terms += magnitudes
    terms -= magnitudes
    return row_total(terms)[:, None]


def top_option(scores: Floats) -> tuple[Ints, Floats]:
    """Return each row's best option and its softmax probability (paper, eq. 3 and 10).

    scores: float (N, K), calibrated logits; -inf where a row has no such option.
    Returns the option, int32 (N,), the lowest index among equals, and its probability, float64 (N,).
    Raises DataError naming a row that has no option, or a NaN.

    >>> top_option(np.array([[0.0, np.log(3.0)]]))
    (array([1], dtype=int32), array([0.75]))
    """
    option, terms = _terms(scores)
    return option.astype(np.int32), 1.0 / row_sums(terms)


def likeliest(scores: Floats, n: int) -> Ints:
    """Return each row's n best options, best first, int64 (N, n); a row that has fewer repeats its last one.

    scores: float (N, K), as for top_option; among equals the lowest index comes first.

    >>> likeliest(np.array([[0.0, 2.0, 1.0], [3.0, 1.0, -np.inf]]), 3)
    array([[1, 2, 0],
           [0, 1, 1]])
    """
    left = np.array(scores, dtype=np.float64, order="C")
    flat, firsts = left.reshape(-1), np.arange(0, left.size, left.shape[1])
    at = firsts + left.argmax(axis=1)
    found = [at]
    for _ in range(n - 1):
        flat[at] = -np.inf
        following = firsts + left.argmax(axis=1)
        at = np.where(flat[following] == -np.inf, at, following)
        found.append(at)
    return np.stack(found, axis=1) - firsts[:, None]


def softmax(scores: Floats) -> Floats:
    """Return each row's probabilities, float64 (N, K), 0 where there is no such option.

    scores: as for top_option, which returns bit-identical largest probabilities. Raises DataError as it does.

    >>> softmax(np.array([[0.0, np.log(3.0), -np.inf]]))
    array([[0.25, 0.75, 0.  ]])
    """
    _, terms = _terms(scores)
    probabilities: Floats = terms / row_sums(terms.copy())[:, None]
    return probabilities


def _terms(scores: Floats) -> tuple[Ints, Floats]:
    """Return each row's best option, int (N,), and exp(scores - its score), float64 (N, K)."""
    scores = np.ascontiguousarray(scores, dtype=np.float64)
    option, top = row_argmax(scores)
    if not np.isfinite(top).all():
        row = int(np.flatnonzero(~np.isfinite(top))[0])
        raise DataError(f"row {row}: the largest score is not finite ({top[row]}), so no option can be chosen")
    # exp of a contiguous array: strided input may take another code path and differ in the last bit.
    return option, np.exp(scores - top[:, None])


def log_softmax(scores: Floats) -> Floats:
    """Return the log probabilities of each row, float64 (N, K); -inf stays -inf.

    >>> np.exp(log_softmax(np.array([[0.0, 0.0, -np.inf]])))
    array([[0.5, 0.5, 0. ]])
    """
    scores = np.ascontiguousarray(scores, dtype=np.float64)
    shifted = scores - row_max(scores)[:, None]
    log_probabilities: Floats = shifted - np.log(row_sums(np.exp(shifted)))[:, None]
    return log_probabilities
