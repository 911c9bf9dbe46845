"""The negative log likelihood of weighted logits, with its derivatives, in one pass over the rows.

With P arrays of logits S_1..S_P of shape (N, K), weights w and biases b, the scores of a row are
w_1 S_1 + ... + w_P S_P + b. A pass visits blocks of rows that stay in the processor's cache and keeps only sums over
the rows, in float64: the NLL, its gradient E[S] - S_y and its curvature Cov[S] under the softmax. Sums over the parts
of a table add up to those of the whole table. Terms are computed in float64 too, except for large float32 logits,
whose own rounding is as large as that of float32 arithmetic: it changes a fitted weight by about 1e-7 of its value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.chain import ChainPart
from cauc_ray.numbers.rows import by_columns, row_dot, row_max
from cauc_ray.numbers.types import Bools, Floats, Ints, Summed

# The largest sum of a row's terms (its label's term is 1) that is safe in float32.
_LARGEST_SUM = 1e25
# The gap of a missing option: too far for any weight, yet 0 times its square is 0, where 0 x inf would be NaN.
_MISSING = -1e25

# A block's arrays stay in a processor's cache, and are so large that calls of numpy take little time of their own.
# Threads would not help: numpy holds the interpreter's lock in products of up to 500 rows.
_BLOCK_BYTES = 3 << 20

# With biases, BLAS computes products of rows x K x K up to this size in one thread. On a busy machine, threads that
# wait for each other take many times as long; several threads only pay for large K and blocks of several rows.
_ONE_THREAD, _SOME_ROWS, _MANY_OPTIONS_BYTES = 1 << 17, 8, 4 << 20


@dataclass(frozen=True, slots=True)
class Sums(Summed):
    """Sums over the rows at some weights and biases, D numbers in all.

    Attributes:
        value: The NLL in nats.
        gradient: (D,).
        curvature: (D, D).
        scatter: (P, P), the outer product of the rows' gradients in the weights.
    """

    value: float
    gradient: Floats
    curvature: Floats
    scatter: Floats

    def __truediv__(self, n: int) -> Sums:
        """Return the means."""
        return Sums(self.value / n, self.gradient / n, self.curvature / n, self.scatter / n)


def sample(part: ChainPart, step: int) -> ChainPart:
    """Return every row whose rank is a multiple of step. Raises DataError naming a row with an invalid label."""
    k, labels = part.logits[0].shape[1], part.labels
    _require(part.ranks, labels, (labels >= 0) & (labels < k), f"label {{}} is outside the {k} options")
    rows = np.flatnonzero(part.ranks % step == 0)
    return ChainPart(tuple(source[rows] for source in part.logits), labels[rows], part.ranks[rows])


def first_lacking(part: ChainPart) -> int | None:
    """Return the lowest rank of a row that lacks an option in some array, None if no row does."""
    ranks = []
    for rows in part.blocks():
        lacking = np.logical_or.reduce([np.isneginf(source[rows]).any(axis=1) for source in part.logits])
        ranks += part.ranks[rows][lacking].tolist()
    return min(ranks, default=None)


def _require_fit(part: ChainPart, rows: slice) -> None:
    """Raise DataError naming a row that cannot be fitted, if there is one."""
    ranks, labels = part.ranks[rows], part.labels[rows]
    for logits in (source[rows] for source in part.logits):
        top = row_max(logits)
        unfit = "largest logit is {}; NaN, +inf and rows of -inf cannot be fitted"
        _require(ranks, top, np.isfinite(top), unfit)
        gone = "label {} is an option that the row does not have"
        _require(ranks, labels, np.isfinite(logits[np.arange(len(labels)), labels]), gone)


def _require(ranks: Ints, values: Any, good: Bools, why: str) -> None:
    """Raise DataError naming the first invalid row by its rank.   why: with a placeholder for its value."""
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        raise DataError(f"row {ranks[row]}: {why.format(values[row])}")


def sums(part: ChainPart, at: Floats, dtype: type[np.floating]) -> Sums:
    """Sum over all rows in one pass.

    Args:
        part: Rows.
        at: Weights and biases, float64 (D,).
        dtype: Of the computation.

    Raises:
        DataError: A row cannot be fitted; names it.
    """
    p, d = len(part.logits), len(at)
    value, gradient, curvature, scatter = 0.0, np.zeros(d), np.zeros((d, d)), np.zeros((p, p))
    for block in _blocks(part, at, dtype):
        means = block.means()
        value += block.nll
        for i in range(p):
            weighted = np.multiply(block.terms, block.gaps[i], out=block.spare)
            for j in range(i, p):
                second = row_dot(weighted, block.gaps[j]) / block.sums
                curvature[i, j] += (second - means[i] * means[j]).sum(dtype=np.float64)
                curvature[j, i] = curvature[i, j]
        gradient[:p] += means.sum(axis=1)
        scatter += means @ means.T
        if d > p:
            probabilities = np.divide(block.terms, block.sums[:, None], out=block.terms)
            of_options = probabilities.sum(axis=0)
            gradient[p:] += of_options - np.bincount(block.labels, minlength=d - p)
            for i in range(p):
                centred = np.subtract(block.gaps[i], means[i][:, None], out=block.spare)
                curvature[i, p:] += np.multiply(probabilities, centred, out=block.spare).sum(axis=0)
            curvature[p:, p:] -= probabilities.T @ probabilities
            curvature[p:, p:][np.diag_indices(d - p)] += of_options
    curvature[p:, :p] = curvature[:p, p:].T
    return Sums(value, gradient, curvature, scatter)


def nll(part: ChainPart, at: Floats, dtype: type[np.floating]) -> float:
    """Return the NLL in nats, summed over the rows."""
    return sum(block.nll for block in _blocks(part, at, dtype))


def squares(part: ChainPart, at: Floats, directions: Floats) -> Floats:
    """Return the NLL, and the squares of the rows' gradients along directions, (P, D), summed over the rows."""
    p = len(part.logits)
    totals = np.zeros(1 + p)
    for block in _blocks(part, at, np.float64):
        along_biases = np.vecdot(block.terms[None], directions[:, None, p:]) / block.sums
        of_biases = along_biases - directions[:, p + block.labels]
        along = directions[:, :p] @ block.means() + of_biases
        totals += block.nll, *np.vecdot(along, along)
    return totals


@dataclass(frozen=True, slots=True)
class _Block:
    """A block of rows of a pass.

    Attributes:
        gaps: Logits less their label's, P arrays (rows, K).
        terms: Exp of their scores less their label's, or less their peak where that is far above it, (rows, K).
        spare: A buffer of that shape.
        sums: Of the terms, (rows,).
        labels: (rows,).
        nll: Summed over the rows.
    """

    gaps: list[Floats]
    terms: Floats
    spare: Floats
    sums: Floats
    labels: Ints
    nll: float

    def means(self) -> Floats:
        """Return the mean gap of each array under the softmax, float64 (P, rows)."""
        return np.stack([row_dot(self.terms, gap) / self.sums for gap in self.gaps]).astype(np.float64)


def _blocks(part: ChainPart, at: Floats, dtype: type[np.floating]) -> Iterator[_Block]:
    """Compute blocks of rows in buffers that the next block overwrites."""
    p, (n, k) = len(part.logits), part.logits[0].shape
    weights, biases = at[:p], at[p:]
    biased = len(biases) > 0
    size = _BLOCK_BYTES // (k * np.dtype(dtype).itemsize * (p + 2))
    if biased:
        size = _ONE_THREAD // (k * k)
        if size < _SOME_ROWS:
            size = _MANY_OPTIONS_BYTES // (8 * k)
    size = max(1, min(size, n))
    # Allocating memory for each block would take as long as the computation.
    buffers = [by_columns((size, k), dtype) for _ in range(p + 2)]
    ones = np.ones((1, k), dtype=dtype)
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        *gaps, terms, spare = (array[: rows.stop - rows.start] for array in buffers)
        labels = part.labels[rows]
        for gap, source in zip(gaps, part.logits, strict=True):
            logits = source[rows]
            with np.errstate(invalid="ignore"):
                np.subtract(logits, logits[np.arange(len(labels)), labels][:, None], out=gap, dtype=dtype)
            if gap.min() < _MISSING:  # cheaper than clipping values that need none
                np.maximum(gap, dtype(_MISSING), out=gap)
        scores = np.multiply(gaps[0], dtype(weights[0]), out=spare)
        for gap, weight in zip(gaps[1:], weights[1:], strict=True):
            scores += np.multiply(gap, dtype(weight), out=terms)
        if biased:
            scores += biases
            scores -= biases[labels][:, None]
        peaks = 0.0
        with np.errstate(over="ignore", invalid="ignore"):
            np.exp(scores, out=terms)
            sums = row_dot(terms, ones)
        if not sums.max() < _LARGEST_SUM:
            _require_fit(part, rows)
            highest = row_max(scores)[:, None]
            sums = row_dot(np.exp(scores - highest, out=terms), ones)
            peaks = float(highest.sum(dtype=np.float64))
        nll = float(np.log(sums).sum(dtype=np.float64)) + peaks
        yield _Block(gaps, terms, spare, sums, labels, nll)
