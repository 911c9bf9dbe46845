"""Softmax quantities of rows that depend, to the last bit, on nothing but the row itself."""

from __future__ import annotations

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Floats, Ints

# The first sum, which finds the exponent for the second, is exact for up to 2^20 terms.
_HEADROOM = 20


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
    _, exponents = np.frexp(terms.max(axis=1, keepdims=True))
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
    sums: Floats = terms.sum(axis=1, keepdims=True)
    return sums


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
    option = scores.argmax(axis=1)
    top = scores[np.arange(len(scores)), option]
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
    shifted = scores - scores.max(axis=1, keepdims=True)
    log_probabilities: Floats = shifted - np.log(row_sums(np.exp(shifted)))[:, None]
    return log_probabilities
