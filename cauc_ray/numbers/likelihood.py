"""The negative log likelihood of weighted logits, with its derivatives, in one pass over the rows.

With P arrays of logits S_1..S_P of shape (N, K) and weights w, the scores of a row are w_1 S_1 + ... + w_P S_P.
A pass visits blocks of rows that stay in the processor's cache and keeps only sums over the rows, in float64:
the mean NLL, its gradient E[S] - S_y and its curvature Cov[S] under the softmax. What is summed is computed in
float64 too, but for large float32 logits, whose own rounding is of the size of that of float32 arithmetic: it
moves a fitted weight by some 1e-7 of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

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


@dataclass(frozen=True, slots=True)
class Sums:
    """Means over the rows of a pass: NLL, gradient (P,), curvature (P, P), gradient outer product (P, P)."""

    nll: float
    gradient: Floats
    curvature: Floats
    scatter: Floats


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


class _Buffers:
    """Room for a block: P gaps, the terms, and a spare array, all (rows, K)."""

    def __init__(self, n_sources: int, n: int, k: int, dtype: type[np.floating]) -> None:
        self.rows = min(n, max(1, _BLOCK_BYTES // (k * np.dtype(dtype).itemsize * (n_sources + 2))))
        self.arrays = [np.empty((self.rows, k), dtype=dtype) for _ in range(n_sources + 2)]
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

    def __init__(self, sources: Sequence[Floats], labels: Ints, narrow: bool | None = None) -> None:
        n, k = sources[0].shape
        if narrow is None:
            narrow = n * k >= _FLOAT32_ELEMENTS and all(s.dtype == np.float32 for s in sources)
        self.dtype: type[np.floating] = np.float32 if narrow else np.float64
        self.sources: list[Floats] = [np.ascontiguousarray(s, dtype=self.dtype) for s in sources]
        self.labels = np.asarray(labels)
        if n == 0 or k == 0:
            raise DataError(f"a fit needs at least one row and one option, got logits of shape {(n, k)}")
        if self.labels.shape != (n,) or any(s.shape != (n, k) for s in self.sources):
            shapes = [s.shape for s in self.sources]
            raise DataError(f"logits {shapes} and labels {self.labels.shape} do not describe the same rows")
        self.tops = [s.max(axis=1, keepdims=True) for s in self.sources]
        for top in self.tops:
            if not np.isfinite(top).all():
                row = int(np.flatnonzero(~np.isfinite(top[:, 0]))[0])
                raise DataError(
                    f"row {row}: largest logit is {top[row, 0]}; NaN, +inf and rows of -inf cannot be fitted"
                )
        if self.labels.min() < 0 or self.labels.max() >= k:
            row = int(np.flatnonzero((self.labels < 0) | (self.labels >= k))[0])
            raise DataError(f"row {row}: label {self.labels[row]} is outside the {k} options")
        self.label_gaps = [
            np.float64(s[np.arange(n), self.labels]) - np.float64(t[:, 0])
            for s, t in zip(self.sources, self.tops, strict=True)
        ]
        for gap in self.label_gaps:
            if not np.isfinite(gap).all():
                row = int(np.flatnonzero(~np.isfinite(gap))[0])
                raise DataError(f"row {row}: label {self.labels[row]} points at an option that the row does not have")
        # A missing option makes its row's sum -inf. Only the search's bounds need the sums: float32 will do.
        totals = [np.vecdot(s, np.ones(k, dtype=s.dtype)) for s in self.sources]
        self.padded = any(bool(np.isneginf(total).any()) for total in totals)
        self.spreads = np.array([self._spread(*arrays) for arrays in zip(self.sources, self.tops, totals, strict=True)])

    def _spread(self, source: Floats, tops: Floats, totals: Floats) -> float:
        """Return the mean distance of a row's largest logit from the row's mean."""
        n_options: int | Ints = source.shape[1]
        if self.padded:
            there = np.isfinite(source)
            totals, n_options = np.where(there, source, 0).sum(axis=1), there.sum(axis=1)
        return float((tops[:, 0] - totals / n_options).mean(dtype=np.float64))

    @property
    def perfect(self) -> float:
        """Return the mean NLL below which every row gives its label more than half."""
        return float(np.log(2.0)) / len(self.labels)

    def separable_alone(self) -> bool:
        """Say whether there is one source and every label is its largest logit: more weight is always better."""
        return len(self.sources) == 1 and not self.label_gaps[0].any()

    def sample(self, rows: int) -> Likelihood:
        """Return that of every n-th row, so that about so many are left."""
        step = max(1, len(self.labels) // rows)
        return Likelihood([s[::step] for s in self.sources], self.labels[::step], narrow=self.dtype is np.float32)

    def nll(self, weights: Floats) -> float:
        """Return the mean NLL at these weights, in nats."""
        return sum(self._over_blocks(weights, lambda block: block.nll)) / len(self.labels)

    def sums(self, weights: Floats) -> Sums:
        """Visit all rows once at these weights."""
        p = len(self.sources)
        parts = np.array(self._over_blocks(weights, _block_sums)).sum(axis=0) / len(self.labels)
        gradient, curvature, scatter = np.split(parts[1:], [p, p + p * p])
        return Sums(float(parts[0]), gradient, curvature.reshape(p, p), scatter.reshape(p, p))

    def _over_blocks(self, weights: Floats, take: Callable[[_Block], _Taken]) -> list[_Taken]:
        """Take something from every block of rows, in their order."""
        n, k = self.sources[0].shape
        buffers = _Buffers(len(self.sources), n, k, self.dtype)
        label_gaps = np.stack(self.label_gaps)
        label_scores = weights @ label_gaps
        scale = [self.dtype(weight) for weight in weights]
        blocks = (slice(start, min(start + buffers.rows, n)) for start in range(0, n, buffers.rows))
        return [take(self._block(rows, scale, label_gaps, label_scores, buffers)) for rows in blocks]

    def _block(
        self, rows: slice, scale: list[np.floating], label_gaps: Floats, label_scores: Floats, buffers: _Buffers
    ) -> _Block:
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
        return _Block(gaps, terms, spare, sums, label_gaps[:, rows], nll)

    @staticmethod
    def _drop_missing(gaps: list[Floats]) -> Bools:
        """Mark the options that a row lacks and set them to 0, as 0 x exp(-inf) is 0 and -inf x 0 is NaN."""
        missing = np.isneginf(gaps[0])
        for gap in gaps[1:]:
            missing |= np.isneginf(gap)
        for gap in gaps:
            gap[missing] = 0.0
        return missing
