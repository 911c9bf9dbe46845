"""Softmax quantities of a row, computed so that nothing but the row itself can change a bit of them."""

from __future__ import annotations

import numpy as np

from cauc_ray.numbers.types import Floats, Ints


def row_sums(terms: Floats) -> Floats:
    """Sum each row, in an order that is fixed by the columns alone.

    terms: float64 (N, K), overwritten.   Returns float64 (N,).

    The upper half of the columns, cut at a power of two, is added onto the lower half until one column is
    left. Trailing zeros are then added to something at every step, so padding a row, or having other rows
    beside it, changes nothing: a library's own sum promises neither, and a live batch must give what the
    replay of the whole table gives.

    >>> row_sums(np.array([[1.0, 2.0, 3.0]]))
    array([6.])
    """
    width = terms.shape[1]
    while width > 1:
        half = 1 << (width - 1).bit_length() - 1
        terms[:, : width - half] += terms[:, half:width]
        width = half
    return terms[:, 0].copy()


def top_option(scores: Floats) -> tuple[Ints, Floats]:
    """Return each row's best option and its softmax probability (paper, eq. 3 and 10).

    scores: float (N, K), calibrated logits; -inf where a row has no such option.
    Returns the option, int32 (N,), the lowest index among equals, and its probability, float64 (N,).

    >>> top_option(np.array([[0.0, np.log(3.0)]]))
    (array([1], dtype=int32), array([0.75]))
    """
    scores = np.ascontiguousarray(scores, dtype=np.float64)
    option = scores.argmax(axis=1)
    top = scores[np.arange(len(scores)), option]
    # exp of a contiguous array: strided input may take another code path, with another last bit.
    terms = np.exp(scores - top[:, None])
    return option.astype(np.int32), 1.0 / row_sums(terms)


def log_softmax(scores: Floats) -> Floats:
    """Return the log probabilities of each row, float64 (N, K); -inf stays -inf.

    >>> np.exp(log_softmax(np.array([[0.0, 0.0, -np.inf]])))
    array([[0.5, 0.5, 0. ]])
    """
    scores = np.ascontiguousarray(scores, dtype=np.float64)
    shifted = scores - scores.max(axis=1, keepdims=True)
    return shifted - np.log(row_sums(np.exp(shifted)))[:, None]
