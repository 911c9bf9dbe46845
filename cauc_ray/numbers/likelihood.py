"""The negative log likelihood of weighted logits, with its derivatives, in one pass over the rows.

With P arrays of logits S_1..S_P of shape (N, K), weights w and biases b, the scores of a row are
w_1 S_1 + ... + w_P S_P + b. A pass visits blocks of rows that stay in the processor's cache and keeps only sums over
the rows, in float64: the NLL, its gradient E[S] - S_y and its curvature Cov[S] under the softmax. Sums of the parts of
a table add up to those of the whole. What is summed is computed in float64 too, but for large float32 logits, whose own
rounding is of the size of that of float32 arithmetic: it moves a fitted weight by some 1e-7 of itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Ints, Summed

# A label's score, less the largest that its row could have, below which exp comes near the end of float32.
_LOWEST_SCORE = -60.0

# Float32 logits of at least so many elements are computed with as they are.
_FLOAT32_ELEMENTS = 4_000_000
# A block's arrays stay in the second-level cache of one core.
_BLOCK_BYTES = 768 * 1024

# With biases, products of rows x K x K up to this size are left to one thread by BLAS. Where others compute next to
# this process, threads that wait for one another take many times as long; only large K are worth that, and blocks of
# some rows.
_ONE_THREAD, _SOME_ROWS, _MANY_OPTIONS_BYTES = 1 << 17, 8, 4 << 20


class Rows(Protocol):
    """Logits of N rows, float (N, K), read by slices or positions: an array, or what is stored elsewhere."""

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
class Facts(Summed):
    """What is known of n rows before any pass.

    n_missed: rows whose label is not their largest logit in some array.
    spreads: (P,), the distances of a row's largest logit from its mean.   log_margins, n_margins: (P,), the logarithms
    of that distance from the next smaller logit, and how many rows have one.
    lacking: of each part that has some, the rank of its first row that lacks an option.
    """

    n: int
    n_missed: int
    spreads: Floats
    log_margins: Floats
    n_margins: Floats
    lacking: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Sums(Summed):
    """Sums over the rows at some weights and biases, D numbers in all.

    value: the NLL in nats.   gradient: (D,).   curvature: (D, D).   scatter: (P, P), the outer product of the rows'
    gradients in the weights.
    """

    value: float
    gradient: Floats
    curvature: Floats
    scatter: Floats

    def __truediv__(self, n: int) -> Sums:
        """Return the means."""
        return Sums(self.value / n, self.gradient / n, self.curvature / n, self.scatter / n)


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows of a pass.

    gaps: logits less their row's largest, P arrays (rows, K).   terms: exp of their scores less their peak, (rows, K).
    spare: room of that shape.   sums: of the terms, (rows,).   labels: (rows,).   label_gaps: (P, rows).   nll: summed
    over the rows.
    """

    gaps: list[Floats]
    terms: Floats
    spare: Floats
    sums: Floats
    labels: Ints
    label_gaps: Floats
    nll: float

    def means(self) -> Floats:
        """Return the mean gap of each array under the softmax, float64 (P, rows)."""
        return np.stack([np.vecdot(self.terms, gap) / self.sums for gap in self.gaps]).astype(np.float64)


def suits_float32(shape: tuple[int, ...], *dtypes: np.dtype[Any]) -> bool:
    """Say whether logits of such a shape and of these types are computed with in float32."""
    return math.prod(shape) >= _FLOAT32_ELEMENTS and all(dtype == np.float32 for dtype in dtypes)


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
        """Look at all rows once. Raises DataError naming a row that cannot be fitted.

        narrow: whether to compute in float32, None for what suits so many logits of such a type.
        ranks: int (N,), the rows' positions among all where these are but a part of them.
        """
        n, k = sources[0].shape
        self.sources, self.labels = list(sources), np.asarray(labels)
        if n == 0 or k == 0:
            raise DataError(f"a fit needs at least one row and one option, got logits of shape {(n, k)}")
        if self.labels.shape != (n,) or any(s.shape != (n, k) for s in self.sources):
            shapes = [s.shape for s in self.sources]
            raise DataError(f"logits {shapes} and labels {self.labels.shape} do not describe the same rows")
        self.ranks = np.arange(n) if ranks is None else ranks
        self._require(self.labels, (self.labels < 0) | (self.labels >= k), f"label {{}} is outside the {k} options")
        if narrow is None:
            narrow = suits_float32((n, k), *(s.dtype for s in self.sources))
        self.dtype: type[np.floating] = np.float32 if narrow else np.float64
        self._tops = [np.empty((n, 1), dtype=self.dtype) for _ in self.sources]
        self._label_gaps = np.empty((len(self.sources), n))
        self._padded = False
        self._lacking: list[int] = []
        self._buffers: list[Floats] = []
        self._spreads, self._log_margins, self._n_margins = np.zeros((3, len(self.sources)))
        for rows in self._slices(self.dtype):
            for place, source in enumerate(self.sources):
                self._look(place, source[rows], rows)

    def _require(self, values: Any, bad: Bools, why: str, rows: slice = slice(None)) -> None:
        """Raise DataError naming the first bad row, int (n,), of some.   why: with room for its value."""
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise DataError(f"row {self.ranks[rows][row]}: {why.format(values[row])}")

    def _look(self, place: int, logits: Floats, rows: slice) -> None:
        """Note what every pass needs of a block of a source."""
        top, labels = logits.max(axis=1), self.labels[rows]
        unfit = "largest logit is {}; NaN, +inf and rows of -inf cannot be fitted"
        self._require(top, ~np.isfinite(top), unfit, rows)
        gap = np.float64(logits[np.arange(len(labels)), labels]) - np.float64(top)
        self._require(labels, ~np.isfinite(gap), "label {} points at an option that the row does not have", rows)
        # A missing option makes its row's sum -inf. Only the search's bounds need the sums: float32 will do.
        total = np.vecdot(logits, np.ones(logits.shape[1], dtype=logits.dtype))
        n_options: int | Ints = logits.shape[1]
        if np.isneginf(total).any():
            self._padded = True
            self._lacking.append(int(self.ranks[rows][np.isneginf(total)].min()))
            there = np.isfinite(logits)
            total, n_options = np.where(there, logits, 0).sum(axis=1), there.sum(axis=1)
        self._tops[place][rows, 0] = top
        self._label_gaps[place, rows] = gap
        self._spreads[place] += float((top - total / n_options).sum(dtype=np.float64))
        margins = top - np.where(logits < top[:, None], logits, -np.inf).max(axis=1)
        margins = margins[np.isfinite(margins)]
        self._log_margins[place] += float(np.log(margins, dtype=np.float64).sum())
        self._n_margins[place] += len(margins)

    def n_options(self) -> int:
        """Return K."""
        return self.sources[0].shape[1]

    def facts(self) -> Facts:
        """Return what is known of the rows before any pass."""
        return Facts(
            n=len(self.labels),
            n_missed=int(self._label_gaps.any(axis=0).sum()),
            spreads=self._spreads,
            log_margins=self._log_margins,
            n_margins=self._n_margins,
            lacking=(min(self._lacking),) if self._lacking else (),
        )

    def sample(self, step: int) -> tuple[Ints, list[Floats], Ints]:
        """Return every row whose rank is a multiple of step: ranks (n,), P arrays (n, K), labels (n,)."""
        places = np.flatnonzero(self.ranks % step == 0)
        return self.ranks[places], [source[places] for source in self.sources], self.labels[places]

    def nll(self, at: Floats) -> float:
        """Return the NLL at these weights and biases, in nats, summed over the rows."""
        return sum(block.nll for block in self._blocks(at))

    def sums(self, at: Floats) -> Sums:
        """Visit all rows once at these weights and biases."""
        p, d = len(self.sources), len(at)
        value, gradient, curvature, scatter = 0.0, np.zeros(d), np.zeros((d, d)), np.zeros((p, p))
        for block in self._blocks(at):
            means = block.means()
            value += block.nll
            for i in range(p):
                weighted = np.multiply(block.terms, block.gaps[i], out=block.spare)
                for j in range(i, p):
                    second = np.vecdot(weighted, block.gaps[j]) / block.sums
                    curvature[i, j] += (second - means[i] * means[j]).sum(dtype=np.float64)
                    curvature[j, i] = curvature[i, j]
            residuals = means - block.label_gaps
            gradient[:p] += residuals.sum(axis=1)
            scatter += residuals @ residuals.T
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

    def squares(self, at: Floats, directions: Floats) -> Floats:
        """Return the NLL, and the squares of the rows' gradients along directions, (P, D), summed over the rows."""
        p = len(self.sources)
        totals = np.zeros(1 + p)
        for block in self._blocks(at):
            of_biases = (
                np.vecdot(block.terms[None], directions[:, None, p:]) / block.sums - directions[:, p + block.labels]
            )
            along = directions[:, :p] @ (block.means() - block.label_gaps) + of_biases
            totals += block.nll, *np.vecdot(along, along)
        return totals

    def _slices(self, dtype: type[np.floating], *, biased: bool = False) -> Iterator[slice]:
        n, k = self.sources[0].shape
        size = _BLOCK_BYTES // (k * np.dtype(dtype).itemsize * (len(self.sources) + 2))
        if biased:
            size = _ONE_THREAD // (k * k)
            if size < _SOME_ROWS:
                size = _MANY_OPTIONS_BYTES // (8 * k)
        size = max(1, size)
        return (slice(start, min(start + size, n)) for start in range(0, n, size))

    def _blocks(self, at: Floats) -> Iterator[_Block]:
        """Compute blocks of rows in buffers, which the next one overwrites."""
        p, k = len(self.sources), self.sources[0].shape[1]
        weights, biases = at[:p], at[p:]
        biased = len(biases) > 0
        dtype = np.float64 if biased else self.dtype
        slices = list(self._slices(dtype, biased=biased))
        # Kept from pass to pass: fresh memory costs as much as what is computed in it.
        if not (self._buffers and self._buffers[0].dtype == dtype and len(self._buffers[0]) == slices[0].stop):
            self._buffers = [np.empty((slices[0].stop, k), dtype=dtype) for _ in range(p + 2)]
        ones = np.ones(k, dtype=dtype)
        label_scores = weights @ self._label_gaps
        if biased:
            label_scores += biases[self.labels]
        for rows in slices:
            *gaps, terms, spare = (array[: rows.stop - rows.start] for array in self._buffers)
            for gap, source, top in zip(gaps, self.sources, self._tops, strict=True):
                np.subtract(source[rows], top[rows], out=gap, dtype=dtype)
            missing = self._drop_missing(gaps) if self._padded else None
            np.multiply(gaps[0], dtype(weights[0]), out=terms)
            for gap, weight in zip(gaps[1:], weights[1:], strict=True):
                terms += np.multiply(gap, dtype(weight), out=spare)
            if biased:
                terms += biases
            if missing is not None:
                terms[missing] = -np.inf
            peak_sum = 0.0
            # Without biases no term exceeds 0. Where the label's own is not so low that the sums could vanish, no peak
            # is missed.
            if biased or float(label_scores[rows].min()) < _LOWEST_SCORE:
                peaks = terms.max(axis=1, keepdims=True)
                terms -= peaks
                peak_sum = float(peaks.sum(dtype=np.float64))
            np.exp(terms, out=terms)
            # By dot products: a matrix product would start threads of its own.
            sums = np.vecdot(terms, ones)
            nll = float(np.log(sums).sum(dtype=np.float64)) + peak_sum - float(label_scores[rows].sum())
            yield _Block(gaps, terms, spare, sums, self.labels[rows], self._label_gaps[:, rows], nll)

    @staticmethod
    def _drop_missing(gaps: list[Floats]) -> Bools:
        """Mark the options that a row lacks and set them to 0, as 0 x exp(-inf) is 0 and -inf x 0 is NaN."""
        missing = np.isneginf(gaps[0])
        for gap in gaps[1:]:
            missing |= np.isneginf(gap)
        for gap in gaps:
            gap[missing] = 0.0
        return missing
