"""Fits of softmax temperatures: one Newton solver for eq. 2 and eq. 9 of the paper.

Both are the same convex problem in inverse temperatures. With P arrays of logits S_1..S_P of shape (N, K)
and weights w > 0, minimise the mean negative log likelihood of softmax(w_1 S_1 + ... + w_P S_P). P = 1 with
w = 1/T is temperature scaling; P = 2 with w = (1/(2 alpha), 1/(2 beta)) is the recursive fusion's pair fit.

A pass over the data visits blocks of rows that stay in the processor's cache and keeps only sums: the mean
NLL, its gradient E[S] - S_y and its curvature Cov[S] under the softmax, all in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Ints

# Weights are searched between these multiples of 1/spread, where the spread of a logit array is the mean
# distance of a row's largest logit from the row's mean: in these units T scales with the logits. At the
# lower bound the logits no longer matter, at the upper one every confidence is 1 to float32.
_LOWEST, _HIGHEST = 1e-8, 1e3
# A step of this relative size leaves an error of about its square, as Newton's method converges
# quadratically: no further pass is worth its time.
_LAST_STEP = 1e-5
# Below this relative step the float32 arithmetic of the first passes would be the limit.
_FLOAT32_STEP = 2e-3
_LARGEST_GROWTH = 8.0
_MAX_PASSES = 100
_BLOCK_ELEMENTS = 64 * 1024
_SAMPLE_ROWS = 1024


class FitStatus(StrEnum):
    """How a fit ended.

    CONVERGED: at the minimum.   SEPARABLE: the likelihood still rises where confidences are all 1; clamped.
    UNINFORMATIVE: the likelihood falls as soon as these logits count; clamped to next to no weight.
    """

    CONVERGED = "converged"
    SEPARABLE = "separable"
    UNINFORMATIVE = "uninformative"


@dataclass(frozen=True, slots=True)
class TemperatureFit:
    """A fitted temperature, its standard error, and the mean NLL in nats at T = 1 and at T.

    The standard error is the sandwich estimate, in the temperature's unit; NaN where the fit was clamped.
    """

    temperature: float
    standard_error: float
    nll_before: float
    nll_after: float
    status: FitStatus


@dataclass(frozen=True, slots=True)
class PairFit:
    """Fitted alpha and beta, their standard errors (NaN where clamped), NLL in nats at alpha = beta = 1 and after."""

    alpha: float
    beta: float
    alpha_standard_error: float
    beta_standard_error: float
    nll_before: float
    nll_after: float
    alpha_status: FitStatus
    beta_status: FitStatus


def fit_temperature(logits: Floats, labels: Ints) -> TemperatureFit:
    """Fit the softmax temperature that minimises the negative log likelihood (paper, eq. 2).

    logits: float (N, K), raw; -inf where a row has no such option.   labels: int (N,), the right option.
    Returns a TemperatureFit. Raises DataError naming the row when a label points at a missing option or a
    logit is NaN or +inf.

    >>> logits = np.array([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    >>> round(3.0 / fit_temperature(logits, np.array([0, 0, 0, 1])).temperature, 6) == round(np.log(3), 6)
    True
    """
    fit = _fit_weights([logits], labels, start=1.0)
    temperature = 1.0 / fit.weights[0]
    return TemperatureFit(
        temperature=float(temperature),
        standard_error=float(fit.standard_errors[0] * temperature**2),
        nll_before=fit.nll_before,
        nll_after=fit.nll_after,
        status=fit.statuses[0],
    )


def fit_pair(state: Floats, logits: Floats, labels: Ints) -> PairFit:
    """Fit alpha and beta of softmax((state / alpha + logits / beta) / 2) on the labels (paper, eq. 8-9).

    state: float (N, K), the accumulated prediction r; logits: float (N, K), the new model's calibrated
    logits; -inf in both where a row has no such option.   labels: int (N,).
    Returns a PairFit. Raises DataError as fit_temperature does.

    >>> r = np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0]]); y = np.array([0, 1, 1])
    >>> fit = fit_pair(r, r[::-1].copy(), y)
    >>> fit.nll_after <= fit.nll_before
    True
    """
    fit = _fit_weights([state, logits], labels, start=0.5)
    alpha, beta = 0.5 / fit.weights
    alpha_error, beta_error = fit.standard_errors * 0.5 / fit.weights**2
    return PairFit(
        alpha=float(alpha),
        beta=float(beta),
        alpha_standard_error=float(alpha_error),
        beta_standard_error=float(beta_error),
        nll_before=fit.nll_before,
        nll_after=fit.nll_after,
        alpha_status=fit.statuses[0],
        beta_status=fit.statuses[1],
    )


@dataclass(frozen=True, slots=True)
class _WeightFit:
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
    """Some rows of a pass: logits less their row's largest, per source; exp of the weighted sum of these,
    less its peak; that exp's sums over the options; the labels' gaps, (P, rows); the rows' summed NLL.
    """

    gaps: list[Floats]
    terms: Floats
    sums: Floats
    label_gaps: Floats
    nll: float


class _Problem:
    """Logit arrays and labels, checked, with what every pass needs of each row."""

    def __init__(self, sources: Sequence[Floats], labels: Ints) -> None:
        self.sources = [np.ascontiguousarray(s) for s in sources]
        self.labels = np.asarray(labels)
        n, k = self.sources[0].shape
        if n == 0 or k == 0:
            raise DataError(f"a fit needs at least one row and one option, got logits of shape {(n, k)}")
        if self.labels.shape != (n,) or any(s.shape != (n, k) for s in self.sources):
            shapes = [s.shape for s in self.sources]
            raise DataError(f"logits {shapes} and labels {self.labels.shape} do not describe the same rows")
        self.tops = [s.max(axis=1, keepdims=True) for s in self.sources]
        for top in self.tops:
            if not np.isfinite(top).all():
                row = int(np.flatnonzero(~np.isfinite(top[:, 0]))[0])
                raise DataError(f"row {row}: largest logit is {top[row, 0]}; NaN, +inf and rows of -inf cannot be fitted")
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
        totals = [s @ np.ones(k, dtype=s.dtype) for s in self.sources]
        self.padded = any(bool(np.isneginf(total).any()) for total in totals)
        self.spreads = np.array(
            [self._spread(*arrays) for arrays in zip(self.sources, self.tops, totals, strict=True)]
        )
        self.rows = max(1, _BLOCK_ELEMENTS // k)

    def _spread(self, source: Floats, tops: Floats, totals: Floats) -> float:
        """Return the mean distance of a row's largest logit from the row's mean; 1 where it is 0."""
        n_options: int | Ints = source.shape[1]
        if self.padded:
            there = np.isfinite(source)
            totals, n_options = np.where(there, source, 0).sum(axis=1), there.sum(axis=1)
        return float((tops[:, 0] - totals / n_options).mean(dtype=np.float64)) or 1.0

    def separable_alone(self) -> bool:
        """Say whether there is one source and every label is its largest logit: more weight is always better."""
        return len(self.sources) == 1 and not self.label_gaps[0].any()

    def sample(self) -> _Problem:
        """Return every n-th row, so that about _SAMPLE_ROWS are left."""
        step = max(1, len(self.labels) // _SAMPLE_ROWS)
        return _Problem([s[::step] for s in self.sources], self.labels[::step])

    def nll(self, weights: Floats, dtype: type[np.floating]) -> float:
        """Return the mean NLL at these weights, in nats; terms in dtype, the sum in float64."""
        total = sum(block.nll for block in self._blocks(weights, dtype))
        return total / len(self.labels)

    def sums(self, weights: Floats, dtype: type[np.floating]) -> _Sums:
        """Visit all rows once at these weights; terms in dtype, sums in float64."""
        n, p = len(self.labels), len(self.sources)
        nll, gradient = 0.0, np.zeros(p)
        curvature, scatter = np.zeros((p, p)), np.zeros((p, p))
        for block in self._blocks(weights, dtype):
            means = np.empty((p, len(block.sums)))
            for i, gap in enumerate(block.gaps):
                np.divide(np.vecdot(block.terms, gap), block.sums, out=means[i])
            for i, gap in enumerate(block.gaps):
                # The last source may overwrite the terms: nothing needs them after it.
                weighted = np.multiply(block.terms, gap, out=block.terms if i == p - 1 else None)
                for j in range(i, p):
                    second = np.vecdot(weighted, block.gaps[j]) / block.sums
                    curvature[i, j] += float((second - means[i] * means[j]).sum(dtype=np.float64))
            residuals = means - block.label_gaps
            nll += block.nll
            gradient += residuals.sum(axis=1)
            scatter += residuals @ residuals.T
        curvature = np.triu(curvature) + np.triu(curvature, 1).T
        return _Sums(nll / n, gradient / n, curvature / n, scatter / n)

    def _blocks(self, weights: Floats, dtype: type[np.floating]) -> Iterator[_Block]:
        """Yield the rows in blocks, each overwriting the one before it."""
        n, k = self.sources[0].shape
        buffers = [np.empty((min(self.rows, n), k), dtype=dtype) for _ in range(len(self.sources) + 1)]
        ones = np.ones(k, dtype=dtype)
        scale = [dtype(w) for w in weights]
        label_gaps = np.stack(self.label_gaps)
        label_scores = weights @ label_gaps
        for start in range(0, n, self.rows):
            rows = slice(start, min(start + self.rows, n))
            *gaps, terms = (buffer[: rows.stop - start] for buffer in buffers)
            for gap, source, top in zip(gaps, self.sources, self.tops, strict=True):
                np.subtract(source[rows], top[rows], out=gap)
            missing = self._drop_missing(gaps) if self.padded else None
            np.multiply(gaps[0], scale[0], out=terms)
            for gap, weight in zip(gaps[1:], scale[1:], strict=True):
                terms += gap * weight
            if missing is not None:
                terms[missing] = -np.inf
            peak_sum = 0.0
            if len(gaps) > 1:  # the models' largest logits stand in different columns
                peaks = terms.max(axis=1, keepdims=True)
                terms -= peaks
                peak_sum = float(peaks.sum(dtype=np.float64))
            np.exp(terms, out=terms)
            sums = terms @ ones
            nll = float(np.log(sums).sum(dtype=np.float64)) + peak_sum - float(label_scores[rows].sum())
            yield _Block(gaps, terms, sums, label_gaps[:, rows], nll)

    @staticmethod
    def _drop_missing(gaps: list[Floats]) -> Bools:
        """Mark the options that a row lacks and set them to 0, as 0 x exp(-inf) is 0 and -inf x 0 is NaN."""
        missing = np.isneginf(gaps[0])
        for gap in gaps[1:]:
            missing |= np.isneginf(gap)
        for gap in gaps:
            gap[missing] = 0.0
        return missing


def _fit_weights(sources: Sequence[Floats], labels: Ints, start: float) -> _WeightFit:
    problem = _Problem(sources, labels)
    lowest, highest = _LOWEST / problem.spreads, _HIGHEST / problem.spreads
    initial = np.clip(np.full(len(sources), start), lowest, highest)
    first_dtype = np.float32 if all(s.dtype == np.float32 for s in problem.sources) else np.float64

    begin = initial
    if len(problem.labels) >= 4 * _SAMPLE_ROWS:
        rough, _, _ = _newton(problem.sample(), initial, lowest, highest, np.float64, last_step=1e-3)
        # A sample may be separable, or say nothing, where the whole is not.
        if ((rough > 10 * lowest) & (rough < highest / 10)).all():
            begin = rough
    if problem.separable_alone():
        weights, sums, separable = highest, problem.sums(highest, np.float64), True
    else:
        weights, sums, separable = _newton(problem, begin, lowest, highest, first_dtype, last_step=_LAST_STEP)

    statuses = tuple(
        FitStatus.UNINFORMATIVE
        if weight <= low
        else FitStatus.SEPARABLE
        if separable or weight >= high
        else FitStatus.CONVERGED
        for weight, low, high in zip(weights, lowest, highest, strict=True)
    )
    errors = _standard_errors(sums, len(problem.labels))
    return _WeightFit(
        weights=weights,
        standard_errors=np.where([s is FitStatus.CONVERGED for s in statuses], errors, np.nan),
        nll_before=problem.nll(np.full(len(sources), start), first_dtype),
        nll_after=sums.nll,
        statuses=statuses,
    )


def _newton(
    problem: _Problem,
    weights: Floats,
    lowest: Floats,
    highest: Floats,
    dtype: type[np.floating],
    last_step: float,
) -> tuple[Floats, _Sums, bool]:
    """Minimise within the box by Newton's method.

    Returns the weights, the sums of the last pass, and whether the data turned out separable.

    Safeguards: a weight grows at most eightfold in a step; one whose step leads below the box goes to its
    lowest value; a step that raises the NLL is halved (the problem is convex, so a short one lowers it);
    weights at a bound stay while the gradient holds them there. Once every row gives its label more than
    half (a total NLL below log 2), more weight in the same proportion is always better: the weights are
    scaled up to the box.
    """
    perfect = np.log(2.0) / len(problem.labels)
    sums = problem.sums(weights, dtype)
    for _ in range(_MAX_PASSES):
        if sums.nll < perfect:
            break
        step = _step(weights, sums, lowest, highest)
        size = float((np.abs(step) / weights).max())
        if size == 0.0:
            return weights, sums, False
        target = np.clip(weights + step, lowest, highest)
        if dtype is np.float64 and size < last_step:
            return target, sums, False
        noise = 1e-5 if dtype is np.float32 else 1e-12
        if size < _FLOAT32_STEP:
            dtype = np.float64
        trial = problem.sums(target, dtype)
        while trial.nll > sums.nll + noise * (1.0 + abs(sums.nll)) and size > last_step:
            step, size = step / 2, size / 2
            target = np.clip(weights + step, lowest, highest)
            trial = problem.sums(target, dtype)
        weights, sums = target, trial
    # Only a minimum at infinity keeps a safeguarded Newton iteration going for so long.
    weights = weights * (highest / weights).min()
    return weights, problem.sums(weights, np.float64), True


def _step(weights: Floats, sums: _Sums, lowest: Floats, highest: Floats) -> Floats:
    """Return Newton's step in the weights that are free to move."""
    gradient = sums.gradient
    free = ~((weights <= lowest) & (gradient >= 0)) & ~((weights >= highest) & (gradient <= 0))
    step = np.zeros_like(weights)
    if not free.any():
        return step
    # In units of the weights: a singular curvature (two copies of one model) takes the shortest relative step.
    curvature = (sums.curvature * np.outer(weights, weights))[np.ix_(free, free)]
    slope = (gradient * weights)[free]
    ridge = 1e-14 * float(np.trace(curvature)) + 1e-300
    relative = -np.linalg.solve(curvature + ridge * np.eye(len(slope)), slope)
    step[free] = np.minimum(relative, _LARGEST_GROWTH - 1) * weights[free]
    return step


def _standard_errors(sums: _Sums, n: int) -> Floats:
    """Return the sandwich standard errors of the weights, which hold for a misspecified softmax too.

    White, Maximum likelihood estimation of misspecified models, Econometrica 1982: H^-1 G H^-1 / N with
    H the curvature and G the mean outer product of the rows' gradients.
    """
    bread = np.linalg.pinv(sums.curvature, hermitian=True)
    variance: Floats = np.diag(bread @ sums.scatter @ bread) / n
    return np.sqrt(np.maximum(variance, 0.0))
