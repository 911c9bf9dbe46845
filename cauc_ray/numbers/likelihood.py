"""The negative log likelihood of weighted logits, with its derivatives, in one pass over the rows.

With P arrays of logits S_1..S_P of shape (N, K) and weights w, the scores of a row are w_1 S_1 + ... + w_P S_P.
A pass visits blocks of rows that stay in the processor's cache and keeps only sums over the rows, in float64:
the NLL, its gradient E[S] - S_y and its curvature Cov[S] under the softmax. What is summed is computed in
float64 too, but for large float32 logits, whose own rounding is of the size of that of float32 arithmetic: it
moves a fitted weight by some 1e-7 of itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Ints

# A label's score, less the largest that its row could have, below which exp comes near the end of float32.
_LOWEST_SCORE = -60.0

# Float32 logits of at least so many elements are computed with as they are.
_FLOAT32_ELEMENTS = 4_000_000
# A block's arrays stay in the second-level cache of one core.
_BLOCK_BYTES = 768 * 1024

_Taken = TypeVar("_Taken")


class Rows(Protocol):
    """Logits of N rows, float (N, K), read by slices or places: an array, or what stands elsewhere."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (N, K)."""
        ...

    @property
    def dtype(self) -> np.dtype[np.floating]:
        """Return the type of what is read."""
        ...

    def __getitem__(self, rows: slice | Ints, /) -> Floats:
        """Return some rows, float (n, K)."""
        ...


@dataclass(frozen=True, slots=True)
class Extent:
    """What is known of rows before any pass.

    n: how many.   spreads: (P,), summed over the rows, the distance of a row's largest logit from its mean.
    best: whether there is one source and every label is its row's largest logit.   n_options: K.   lacking: the rank of
    the first row that lacks some of them, None where none does.
    """

    n: int
    spreads: Floats
    best: bool
    n_options: int
    lacking: int | None


@dataclass(frozen=True, slots=True)
class RowSample:
    """Some rows of a likelihood.   ranks: int (n,).   sources: P arrays (n, K).   labels: int (n,)."""

    ranks: Ints
    sources: list[Floats]
    labels: Ints


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of a pass.

    gaps: logits less their row's largest, P arrays (rows, K).   terms: exp of their weighted sum less its
    peak, (rows, K).   spare: room of that shape.   sums: of the terms, (rows,).   label_gaps: (P, rows).
    nll: summed over the rows.
    """

    gaps: list[Floats]
    terms: Floats
    spare: Floats
    sums: Floats
    label_gaps: Floats
    nll: float


def suits_float32(shape: tuple[int, ...], *dtypes: np.dtype[Any]) -> bool:
    """Say whether logits of such a shape and of these types are computed with in float32."""
    return math.prod(shape) >= _FLOAT32_ELEMENTS and all(dtype == np.float32 for dtype in dtypes)


def _block_rows(n: int, k: int, n_sources: int, dtype: type[np.floating]) -> int:
    return min(n, max(1, _BLOCK_BYTES // (k * np.dtype(dtype).itemsize * (n_sources + 2))))


class _Buffers:
    """Room for a block: P gaps, the terms, and a spare array, all (rows, K)."""

    def __init__(self, n_sources: int, n: int, k: int, dtype: type[np.floating]) -> None:
        rows = _block_rows(n, k, n_sources, dtype)
        self.arrays = [np.empty((rows, k), dtype=dtype) for _ in range(n_sources + 2)]
        self.ones = np.ones(k, dtype=dtype)


def _block_sums(block: _Block) -> Floats:
    """Return NLL, gradient (P,), curvature (P, P) and gradient outer products (P, P) of a block, end to end."""
    p = len(block.gaps)
    means = np.stack([np.vecdot(block.terms, gap) / block.sums for gap in block.gaps]).astype(np.float64)
    curvature = np.empty((p, p))
    for i in range(p):
        weighted = np.multiply(block.terms, block.gaps[i], out=block.spare)
        for j in range(i, p):
            second = np.vecdot(weighted, block.gaps[j]) / block.sums
            curvature[i, j] = curvature[j, i] = (second - means[i] * means[j]).sum(dtype=np.float64)
    residuals = means - block.label_gaps
    scatter = residuals @ residuals.T
    return np.concatenate([[block.nll], residuals.sum(axis=1), curvature.ravel(), scatter.ravel()])


class Likelihood:
    """Logit arrays and labels, checked, with what every pass needs of each row."""

    def __init__(
        self,
        sources: Sequence[Rows],
        labels: Ints,
        *,
        narrow: bool | None = None,
        ranks: Ints | None = None,
    ) -> None:
        """Take P sources of shape (N, K) and labels int (N,).

        narrow: whether to compute in float32, None for what suits so many logits of such a type.   ranks: int (N,), the
        rows' places among all where these are but a part of them.
        """
        n, k = sources[0].shape
        self.sources, self.labels = list(sources), np.asarray(labels)
        if n == 0 or k == 0:
            raise DataError(f"a fit needs at least one row and one option, got logits of shape {(n, k)}")
        if self.labels.shape != (n,) or any(s.shape != (n, k) for s in self.sources):
            shapes = [s.shape for s in self.sources]
            raise DataError(f"logits {shapes} and labels {self.labels.shape} do not describe the same rows")
        self.ranks = np.arange(n) if ranks is None else ranks
        if self.labels.min() < 0 or self.labels.max() >= k:
            row = int(np.flatnonzero((self.labels < 0) | (self.labels >= k))[0])
            raise DataError(f"row {self.ranks[row]}: label {self.labels[row]} is outside the {k} options")
        if narrow is None:
            narrow = suits_float32((n, k), *(s.dtype for s in self.sources))
        self.dtype: type[np.floating] = np.float32 if narrow else np.float64
        self.tops = [np.empty((n, 1), dtype=self.dtype) for _ in self.sources]
        self.label_gaps = np.empty((len(self.sources), n))
        self.padded = False
        self._lacking: int | None = None
        self._spreads = np.zeros(len(self.sources))
        for rows in self._slices():
            for place, source in enumerate(self.sources):
                self._look(place, source[rows], rows)

    def _look(self, place: int, logits: Floats, rows: slice) -> None:
        """Note what every pass needs of a block of a source."""
        top, labels = logits.max(axis=1), self.labels[rows]
        if not np.isfinite(top).all():
            row = int(np.flatnonzero(~np.isfinite(top))[0])
            rank = self.ranks[rows][row]
            raise DataError(f"row {rank}: largest logit is {top[row]}; NaN, +inf and rows of -inf cannot be fitted")
        gap = np.float64(logits[np.arange(len(labels)), labels]) - np.float64(top)
        if not np.isfinite(gap).all():
            row = int(np.flatnonzero(~np.isfinite(gap))[0])
            rank = self.ranks[rows][row]
            raise DataError(f"row {rank}: label {labels[row]} points at an option that the row does not have")
        # A missing option makes its row's sum -inf. Only the search's bounds need the sums: float32 will do.
        total = np.vecdot(logits, np.ones(logits.shape[1], dtype=logits.dtype))
        n_options: int | Ints = logits.shape[1]
        if np.isneginf(total).any():
            self.padded = True
            lacking = int(self.ranks[rows][np.isneginf(total)].min())
            self._lacking = lacking if self._lacking is None else min(lacking, self._lacking)
            there = np.isfinite(logits)
            total, n_options = np.where(there, logits, 0).sum(axis=1), there.sum(axis=1)
        self.tops[place][rows, 0] = top
        self.label_gaps[place, rows] = gap
        self._spreads[place] += float((top - total / n_options).sum(dtype=np.float64))

    def extent(self) -> Extent:
        """Return what is known of the rows before any pass."""
        best = len(self.sources) == 1 and not self.label_gaps.any()
        return Extent(len(self.labels), self._spreads, best, self.sources[0].shape[1], self._lacking)

    def sample(self, step: int) -> RowSample:
        """Return every row whose rank is a multiple of step."""
        places = np.flatnonzero(self.ranks % step == 0)
        return RowSample(self.ranks[places], [s[places] for s in self.sources], self.labels[places])

    def nll(self, weights: Floats) -> float:
        """Return the NLL at these weights, in nats, summed over the rows."""
        return sum(self._over_blocks(weights, lambda block: block.nll))

    def totals(self, weights: Floats) -> Floats:
        """Visit all rows once at these weights. Returns what sums of these are made of, float64 (1 + P + 2 P^2,)."""
        totals: Floats = np.array(self._over_blocks(weights, _block_sums)).sum(axis=0)
        return totals

    def _slices(self) -> Iterator[slice]:
        n, k = self.sources[0].shape
        size = _block_rows(n, k, len(self.sources), self.dtype)
        return (slice(start, min(start + size, n)) for start in range(0, n, size))

    def _over_blocks(self, weights: Floats, take: Callable[[_Block], _Taken]) -> list[_Taken]:
        """Take something from every block of rows, in their order."""
        n, k = self.sources[0].shape
        buffers = _Buffers(len(self.sources), n, k, self.dtype)
        label_scores = weights @ self.label_gaps
        scale = [self.dtype(weight) for weight in weights]
        return [take(self._block(rows, scale, label_scores, buffers)) for rows in self._slices()]

    def _block(self, rows: slice, scale: list[np.floating], label_scores: Floats, buffers: _Buffers) -> _Block:
        """Compute a block of rows in the buffers, which the next one overwrites."""
        *gaps, terms, spare = (array[: rows.stop - rows.start] for array in buffers.arrays)
        for gap, source, top in zip(gaps, self.sources, self.tops, strict=True):
            np.subtract(source[rows], top[rows], out=gap)
        missing = self._drop_missing(gaps) if self.padded else None
        np.multiply(gaps[0], scale[0], out=terms)
        for gap, weight in zip(gaps[1:], scale[1:], strict=True):
            terms += np.multiply(gap, weight, out=spare)
        if missing is not None:
            terms[missing] = -np.inf
        peak_sum = 0.0
        # No term exceeds 0. Where the label's own is not so low that the sums could vanish, no peak is missed.
        if float(label_scores[rows].min()) < _LOWEST_SCORE:
            peaks = terms.max(axis=1, keepdims=True)
            terms -= peaks
            peak_sum = float(peaks.sum(dtype=np.float64))
        np.exp(terms, out=terms)
        # By dot products: a matrix product would start threads of its own.
        sums = np.vecdot(terms, buffers.ones)
        nll = float(np.log(sums).sum(dtype=np.float64)) + peak_sum - float(label_scores[rows].sum())
        return _Block(gaps, terms, spare, sums, self.label_gaps[:, rows], nll)

    @staticmethod
    def _drop_missing(gaps: list[Floats]) -> Bools:
        """Mark the options that a row lacks and set them to 0, as 0 x exp(-inf) is 0 and -inf x 0 is NaN."""
        missing = np.isneginf(gaps[0])
        for gap in gaps[1:]:
            missing |= np.isneginf(gap)
        for gap in gaps:
            gap[missing] = 0.0
        return missing
