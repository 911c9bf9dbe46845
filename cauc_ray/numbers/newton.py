"""The Newton solver behind every fit of softmax temperatures.

With P arrays of logits S_1..S_P of shape (N, K) and weights w > 0, minimise the mean negative log likelihood
of softmax(w_1 S_1 + ... + w_P S_P): a convex problem. A pass over the data visits blocks of rows that stay in
the processor's cache and keeps only sums over the rows, in float64: the mean NLL, its gradient E[S] - S_y and
its curvature Cov[S] under the softmax. What is summed is computed in float64 too, but for large float32 logits,
whose own rounding is of the size of that of float32 arithmetic: it moves a weight by some 1e-7 of itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Ints

# Weights are searched between these multiples of 1/spread, where the spread of a logit array is the mean
# distance of a row's largest logit from the row's mean: in these units T scales with the logits. At the
# lower bound the logits no longer matter, at the upper one every confidence is 1 to float32.
_LOWEST, _HIGHEST = 1e-8, 1e3
_LARGEST_GROWTH = 8.0
_MAX_STEPS = 100

# Fits of many rows let a sample of about so many say where to go.
_SAMPLE_ROWS = 512
_MAX_SAMPLE_STEPS = 6
# They end where the error to be expected is this share of a weight: of the NLL, that is some 1e-12.
_SAMPLE_ERROR = 1e-6
# Rounding may raise the NLL by so much, relatively, where a step lowers it by less.
_NOISE = 1e-7

# A label's score, less the largest that its row could have, below which exp comes near the end of float32.
_LOWEST_SCORE = -60.0

# Float32 logits of at least so many elements are computed with as they are.
_FLOAT32_ELEMENTS = 4_000_000
# A block's arrays stay in the second-level cache of one core.
_BLOCK_BYTES = 768 * 1024

_Taken = TypeVar("_Taken")


class FitStatus(StrEnum):
    """How a fit ended.

    CONVERGED: at the minimum.   SEPARABLE: the likelihood still rises where confidences are all 1; clamped.
    UNINFORMATIVE: the likelihood falls as soon as these logits count; clamped to next to no weight.
    """

    CONVERGED = "converged"
    SEPARABLE = "separable"
    UNINFORMATIVE = "uninformative"


@dataclass(frozen=True, slots=True)
class WeightFit:
    """Fitted weights (P,), their standard errors (NaN where clamped), NLL in nats at the start and after."""

    weights: Floats
    standard_errors: Floats
    nll_before: float
    nll_after: float
    statuses: tuple[FitStatus, ...]


@dataclass(frozen=True, slots=True)
class _Sums:
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


class _Problem:
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

    def sample(self) -> _Problem:
        """Return every n-th row, so that about _SAMPLE_ROWS are left."""
        step = max(1, len(self.labels) // _SAMPLE_ROWS)
        return _Problem([s[::step] for s in self.sources], self.labels[::step], narrow=self.dtype is np.float32)

    def nll(self, weights: Floats) -> float:
        """Return the mean NLL at these weights, in nats."""
        return sum(self._over_blocks(weights, lambda block: block.nll)) / len(self.labels)

    def sums(self, weights: Floats) -> _Sums:
        """Visit all rows once at these weights."""
        p = len(self.sources)
        parts = np.array(self._over_blocks(weights, _block_sums)).sum(axis=0) / len(self.labels)
        gradient, curvature, scatter = np.split(parts[1:], [p, p + p * p])
        return _Sums(float(parts[0]), gradient, curvature.reshape(p, p), scatter.reshape(p, p))

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


def fit_weights(sources: Sequence[Floats], labels: Ints, start: float) -> WeightFit:
    """Fit the weights of P logit arrays, float (N, K), on labels int (N,), from one starting value for all.

    Raises DataError naming the row when a label points at a missing option or a logit is NaN or +inf.
    """
    problem = _Problem(sources, labels)
    flat = problem.spreads <= 0
    units = 1.0 / np.where(flat, 1.0, problem.spreads)
    box = _Box(_LOWEST * units, _HIGHEST * units)
    # Constant logits say nothing, and nothing would move their weight.
    initial = np.where(flat, box.lowest, np.clip(start, box.lowest, box.highest))

    found = None
    if problem.separable_alone() and not flat.any():
        found = _Minimum(box.highest, problem.sums(box.highest), separable=True)
    elif len(problem.labels) >= 8 * _SAMPLE_ROWS:
        found = _by_sample(problem, initial, box)
    if found is None:
        found = _newton(problem.sums, initial, box, problem.perfect)

    weights, sums = found.weights, found.sums
    statuses = tuple(
        FitStatus.UNINFORMATIVE
        if weight <= low
        else FitStatus.SEPARABLE
        if found.separable or weight >= high
        else FitStatus.CONVERGED
        for weight, low, high in zip(weights, box.lowest, box.highest, strict=True)
    )
    errors = _standard_errors(sums, len(problem.labels))
    return WeightFit(
        weights=weights,
        standard_errors=np.where([s is FitStatus.CONVERGED for s in statuses], errors, np.nan),
        nll_before=problem.nll(np.full(len(sources), start)),
        nll_after=sums.nll,
        statuses=statuses,
    )


@dataclass(frozen=True, slots=True)
class _Box:
    """Between which bounds the weights are sought, (P,) each."""

    lowest: Floats
    highest: Floats

    def inside(self, weights: Floats) -> bool:
        """Say whether no weight is near a bound."""
        return bool(((weights > 10 * self.lowest) & (weights < self.highest / 10)).all())


@dataclass(frozen=True, slots=True)
class _Minimum:
    """Weights, the sums there or within the last step of there, and whether the data turned out separable."""

    weights: Floats
    sums: _Sums
    separable: bool = False


def _by_sample(problem: _Problem, initial: Floats, box: _Box) -> _Minimum | None:
    """Minimise in two or three passes over all rows, with a sample of them to say where to go.

    After each pass the sample's NLL, bent by a quadratic so that value, slope and curvature agree with all
    rows', is minimised in place of theirs: it errs only in what its third derivative differs by, times the
    square of the step, where Newton's step errs by the whole of it. Returns None where that leads nowhere.
    """
    sample = problem.sample()
    weights = _newton(sample.sums, initial, box, sample.perfect, last_step=1e-3).weights
    last, last_size = np.inf, 0.1
    for _ in range(_MAX_SAMPLE_STEPS):
        # The sample may be separable, or say nothing, where the whole is not, or the reverse.
        if not box.inside(weights):
            return None
        whole = problem.sums(weights)
        if whole.nll > last + _NOISE * (1 + abs(last)):
            return None
        bent = _newton(_bent(sample, whole, weights), weights, box, perfect=-np.inf)
        size = float((np.abs(bent.weights - weights) / weights).max())
        # The error that the last step left was this one's size; errors go with the squares of the steps.
        if size**3 / last_size**2 < _SAMPLE_ERROR:
            at_end = _Sums(bent.sums.nll, whole.gradient, whole.curvature, whole.scatter)
            return _Minimum(bent.weights, at_end) if box.inside(bent.weights) else None
        weights, last, last_size = bent.weights, whole.nll, max(size, 1e-3)
    return None


def _bent(sample: _Problem, whole: _Sums, at: Floats) -> Callable[[Floats], _Sums]:
    """Return the sample's sums, bent by a quadratic to those of all rows at the given weights."""
    own = sample.sums(at)
    slope, curvature = whole.gradient - own.gradient, whole.curvature - own.curvature

    def sums(weights: Floats) -> _Sums:
        if weights is at:
            return whole
        here, step = sample.sums(weights), weights - at
        return _Sums(
            nll=here.nll + whole.nll - own.nll + float(slope @ step + step @ curvature @ step / 2),
            gradient=here.gradient + slope + curvature @ step,
            curvature=here.curvature + curvature,
            scatter=here.scatter,
        )

    return sums


def _newton(
    sums_at: Callable[[Floats], _Sums],
    weights: Floats,
    box: _Box,
    perfect: float,
    last_step: float = 1e-5,
) -> _Minimum:
    """Minimise within the box by Newton's method.

    A step that raises the NLL is halved: the problem is convex, so a short one lowers it. A step of relative
    size last_step is the last: it leaves an error of about its square. Below perfect every row gives its label
    more than half; more weight in the same proportion is then always better, and the weights go to the box.
    """
    sums = sums_at(weights)
    for _ in range(_MAX_STEPS):
        if sums.nll < perfect:
            break
        step = _step(weights, sums, box)
        size = float((np.abs(step) / weights).max())
        target = np.clip(weights + step, box.lowest, box.highest)
        if size < last_step:
            return _Minimum(target, sums)
        trial = sums_at(target)
        while trial.nll > sums.nll + _NOISE * (1.0 + abs(sums.nll)) and size > last_step:
            step, size = step / 2, size / 2
            target = np.clip(weights + step, box.lowest, box.highest)
            trial = sums_at(target)
        weights, sums = target, trial
    # Only a minimum at infinity keeps a safeguarded Newton iteration going for so long.
    weights = weights * (box.highest / weights).min()
    return _Minimum(weights, sums_at(weights), separable=True)


def _step(weights: Floats, sums: _Sums, box: _Box) -> Floats:
    """Return the step to the minimum of the NLL's quadratic model within the box.

    A weight that the step would take below the box, the furthest first, is set to its lowest value, and the
    others' step is found anew; one may grow to eight times its value, or to what matters at all if that is more.
    """
    lowest, highest = box.lowest, box.highest
    held = ((weights <= lowest) & (sums.gradient >= 0)) | ((weights >= highest) & (sums.gradient <= 0))
    step = np.zeros_like(weights)
    # In units of 1 / spread, in which the sources are alike. The ridge makes the step along a direction in
    # which nothing changes (two copies of one model) the shortest.
    unit = lowest / _LOWEST
    curvature = sums.curvature * np.outer(unit, unit)
    slope = sums.gradient * unit
    while not held.all():
        free = ~held
        target = slope + curvature @ (step / unit)
        within = curvature[np.ix_(free, free)]
        ridge = 1e-11 * float(np.trace(within)) + 1e-300
        step[free] = -np.linalg.solve(within + ridge * np.eye(len(within)), target[free]) * unit[free]
        beyond = np.where(free, (lowest - weights - step) / unit, 0.0)
        if beyond.max() <= 0.0:
            break
        furthest = int(beyond.argmax())
        step[free] = 0.0
        step[furthest] = lowest[furthest] - weights[furthest]
        held[furthest] = True
    largest: Floats = np.maximum((_LARGEST_GROWTH - 1) * weights, unit)
    return np.minimum(step, largest)


def _standard_errors(sums: _Sums, n: int) -> Floats:
    """Return the sandwich standard errors of the weights, which hold for a misspecified softmax too.

    White, Maximum likelihood estimation of misspecified models, Econometrica 1982: H^-1 G H^-1 / N with
    H the curvature and G the mean outer product of the rows' gradients.
    """
    bread = np.linalg.pinv(sums.curvature, hermitian=True)
    errors: Floats = np.sqrt(np.maximum(np.diag(bread @ sums.scatter @ bread) / n, 0.0))
    return errors
