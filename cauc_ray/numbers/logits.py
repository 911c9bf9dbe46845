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

# The last two are not logits, but what encoders and models that say something give in their place.
LogitKind: TypeAlias = Literal["raw", "log-probabilities", "probabilities", "surrogate", "embedding", "answers"]
LOGIT_KINDS: tuple[LogitKind, ...] = get_args(LogitKind)[:-2]
ANSWERS: LogitKind = "answers"
VECTOR_KINDS: tuple[LogitKind, ...] = ("embedding", ANSWERS)
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
# Of features, lower log probabilities carry no more information; also that of options that a row does not have.
LOG_FLOOR = -20.0
# The log-probability that stands for "not among those that the server returned".
UNLISTED_LOG = -100.0

# Rows without negative values are probabilities if their sums differ from one by no more than this: in half precision
# or rounded to three decimals if there are many rows; in float32 if there are few. For raw logits of two options, about
# one row in 2,000 meets the first limit by accident, and one in a million the second.
_ENOUGH_ROWS, _LOOSE, _TIGHT = 8, 5e-3, 1e-5
# Looking at this many rows suffices for most logits.
_FIRST_ROWS = 64

NOT_PROBABILITIES = "declared as probabilities, but values are outside 0 to 1 or all 0"

# The bits of 1.0, and how many whole numbers up to 2^52 add up to less than 2^64.
_ONE, _EXACT_TERMS = int(np.float64(1.0).view(np.uint64)), 4095


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
    return next((kind for kind in (*LOGIT_KINDS, ANSWERS) if text.startswith(kind)), "raw")


def joint_kind(kinds: Sequence[LogitKind]) -> str:
    """Return the common kind of a chain's models, MIXED if they differ."""
    return kinds[0] if len(set(kinds)) == 1 else MIXED


def real_options(logits: Floats, kind: LogitKind = "raw") -> Floats:
    """Return logits with -inf for masks: values more than MASK_DEPTH below their row's largest.

    Args:
        logits: Logits, float (n, K), returned as they are if they have no masks.
        kind: Their kind; of log-probabilities only MASKS are masks, and VECTOR_KINDS have none.

    >>> real_options(np.array([[1.0, -4000.0, -1e9]])).tolist()
    [[1.0, -4000.0, -inf]]
    """
    logits = np.asarray(logits)
    if logits.dtype.kind != "f":
        logits = logits.astype(np.float64)
    if not logits.size or kind in VECTOR_KINDS:
        return logits
    # In float64: float32 would round the difference between the largest value and a mask.
    lowest, highest = np.minimum.reduce(logits, axis=None), np.maximum.reduce(logits, axis=None)
    if float(lowest) >= float(highest) - MASK_DEPTH:  # of all rows: one look at most tables
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


def laid_out(values: Floats, n_options: Ints, width: int = 0) -> Floats:
    """Return lists as (N, K), padded with -inf to the longest list, or to a larger width."""
    width = max(width, int(n_options.max(initial=0)))
    if len(values) == len(n_options) * width:
        return values.reshape(len(n_options), width)
    logits = np.full((len(n_options), width), -np.inf, dtype=values.dtype)
    logits[np.arange(width) < n_options[:, None]] = values
    return logits


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

    Attributes:
        n: Rows of two options or more.
        n_near: Of these, rows whose sum is one in half precision.
        n_exact: Of these, rows whose sum is one in float32.
        n_between: Of these, rows whose largest value is below 1; rows of zeros and a single one may be logits.
        n_negative: Values below 0, which no probability is; if there are any, nothing else is counted.
    """

    n: int = 0
    n_near: int = 0
    n_exact: int = 0
    n_between: int = 0
    n_negative: int = 0

    @classmethod
    def of(cls, logits: Floats) -> SumsToOne:
        """Count rows, float (n, K), -inf where a row has no such option."""
        for some in (logits[:_FIRST_ROWS], logits[_FIRST_ROWS:]):
            n_negative = int(np.count_nonzero((some < 0) & (some > -np.inf)))
            if n_negative:
                return cls(n_negative=n_negative)
        real = np.isfinite(logits)
        rows = real.sum(axis=1) > 1
        values = np.where(real[rows], logits[rows], 0.0)
        distances = np.abs(values.sum(axis=1, dtype=np.float64) - 1)
        return cls(
            n=len(values),
            n_near=int((distances <= _LOOSE).sum()),
            n_exact=int((distances <= _TIGHT).sum()),
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

    Plain sums are not: two rows whose options are permuted would get confidences that differ in the last bit, a
    threshold could fall between them, and a live batch would differ from the replay of the whole table. Every term is
    rounded to a whole number of 2^-52; sums of these are exact, and exact sums are the same in any order.

    Args:
        terms: Between 0 and 1, float64 (N, K), overwritten.

    Returns:
        The sums, float64 (N,).

    >>> row_sums(np.array([[1.0, 0.5, 0.25]]))
    array([1.75])
    """
    # The bits of 1 + t are those of 1, plus t as a whole number of 2^-52.
    terms += 1.0
    whole, k = terms.view(np.uint64), terms.shape[1]
    if k <= _EXACT_TERMS:
        total = row_total(whole) - np.uint64(k * _ONE % (1 << 64))
        return np.ldexp(total.astype(np.float64), -52)
    # In two parts, whose sums do not overflow.
    whole -= np.uint64(_ONE)
    high, low = (row_total(part).astype(np.float64) for part in (whole >> np.uint64(32), whole & np.uint64(0xFFFFFFFF)))
    return np.ldexp(high, -20) + np.ldexp(low, -52)


def top_option(scores: Floats) -> tuple[Ints, Floats]:
    """Return each row's best option and its softmax probability (paper, eq. 3 and 10).

    Args:
        scores: Float (N, K), calibrated logits; -inf where a row has no such option.

    Returns:
        The option, int32 (N,), the lowest index among equals, and its probability, float64 (N,).

    Raises:
        DataError: A row has no option, or a NaN; names the row.

    >>> top_option(np.array([[0.0, np.log(3.0)]]))
    (array([1], dtype=int32), array([0.75]))
    """
    option, terms = _terms(scores)
    return option.astype(np.int32), 1.0 / row_sums(terms)


def likeliest(scores: Floats, n: int) -> Ints:
    """Return each row's n best options, best first, int64 (N, n); a row that has fewer repeats its last one.

    Args:
        scores: Float (N, K), as for top_option; among equals the lowest index comes first.
        n: Number of options.

    >>> likeliest(np.array([[0.0, 2.0, 1.0], [3.0, 1.0, -np.inf]]), 3)
    array([[1, 2, 0],
           [0, 1, 1]])
    """
    left, rows = np.array(scores, dtype=np.float64), np.arange(len(scores))
    option, _ = row_argmax(left)
    options = [option]
    for _ in range(n - 1):
        left[rows, option] = -np.inf
        following, largest = row_argmax(left)
        option = np.where(largest == -np.inf, option, following)
        options.append(option)
    return np.stack(options, axis=1).astype(np.int64)


def softmax(scores: Floats) -> Floats:
    """Return each row's probabilities, float64 (N, K), 0 where there is no such option.

    Args:
        scores: As for top_option, which returns bit-identical largest probabilities.

    Raises:
        DataError: As top_option does.

    >>> softmax(np.array([[0.0, np.log(3.0), -np.inf]]))
    array([[0.25, 0.75, 0.  ]])
    """
    _, terms = _terms(scores)
    probabilities: Floats = terms / row_sums(terms.copy())[:, None]
    return probabilities


def _terms(scores: Floats) -> tuple[Ints, Floats]:
    """Return each row's best option, int (N,), and exp(scores - its score), float64 (N, K)."""
    scores = np.asarray(scores, dtype=np.float64)
    option, top = row_argmax(scores)
    if not np.isfinite(top).all():
        row = int(np.flatnonzero(~np.isfinite(top))[0])
        raise DataError(f"row {row}: the largest score is not finite ({top[row]}), so no option can be chosen")
    # exp of a contiguous array: strided input may take another code path and differ in the last bit.
    terms: Floats = scores - top[:, None]
    return option, np.exp(terms, out=terms)


def log_softmax(scores: Floats) -> Floats:
    """Return the log probabilities of each row, float64 (N, K); -inf stays -inf.

    >>> np.exp(log_softmax(np.array([[0.0, 0.0, -np.inf]])))
    array([[0.5, 0.5, 0. ]])
    """
    scores = np.asarray(scores, dtype=np.float64)
    log_probabilities: Floats = scores - row_max(scores)[:, None]
    log_probabilities -= np.log(row_sums(np.exp(log_probabilities)))[:, None]
    return log_probabilities


def same_width(scores: Floats, state: Floats, names: tuple[str, str]) -> tuple[Floats, Floats]:
    """Pad the narrower of two (n, K) arrays with -inf; what the wider has beyond must be padding too.

    names: of their stages, for the message of the DataError that is raised otherwise.
    """
    k, width = sorted((scores.shape[1], state.shape[1]))
    if k == width:
        return scores, state
    more = np.flatnonzero(np.isfinite((scores if scores.shape[1] > k else state)[:, k:]).any(axis=1))
    if len(more):
        raise DataError(
            f"row {more[0]} of the batch has {k} options or fewer at one stage and up to {width} at "
            f"another ({names[0]!r} and {names[1]!r}); all models of a chain must have the same options"
        )
    return widened(scores, width), widened(state, width)


def plain_scores(logits: Floats) -> Floats:
    """Return logits less their row's largest, float64 (n, K): log probabilities up to a constant of the row."""
    scores: Floats = np.array(logits, dtype=np.float64)
    scores -= scores.max(axis=1, keepdims=True)
    return scores


def floored_logs(logits: Floats) -> Floats:
    """Return log softmax of logits, of at least LOG_FLOOR, float64 (n, K); -inf stays.

    Rounded to float32: the last bits of a logarithm may depend on a row's position in a batch.
    """
    logs = log_softmax(logits).astype(np.float32).astype(np.float64)
    return np.where(np.isneginf(logs), logs, np.maximum(logs, LOG_FLOOR))
