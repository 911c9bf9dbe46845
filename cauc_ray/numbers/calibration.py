"""Fits of softmax temperatures, one Newton solver for all of them.

Minimise the NLL of softmax(w_1 S_1 + ... + w_P S_P + b) over weights w > 0: a convex problem. P = 1 with w = 1/T is
temperature scaling (paper, eq. 2); P = 2 with w = (1/(2 alpha), 1/(2 beta)) is the recursive fusion's pair (eq. 9).
With a bias b for each of K options, which has a normal prior, P = 1 is bias-corrected temperature scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial, reduce
from typing import Any

import numpy as np

from cauc_ray.numbers.chain import ChainPart, Rows
from cauc_ray.numbers.likelihood import Sums, nll, sample, squares, sums
from cauc_ray.numbers.types import Floats, Ints

# One standard deviation of a bias's prior changes odds by a factor of e.
PRIOR_VARIANCE = 1.0
# The curvature in the biases has K x K numbers: 134 MB.
MOST_OPTIONS = 4096

# Weights are searched from the first multiple of 1/spread to the second one of 1/margin: in these units T scales with
# the logits. The spread of a logit array is the mean distance of a row's largest logit from the row's mean, the margin
# that from the next smaller one: an option far below the others, which no weight brings near, widens only the spread.
# At the lower bound the logits no longer matter, at the upper one every confidence is 1 to float32.
_LOWEST, _HIGHEST = 1e-8, 1e3
_LARGEST_GROWTH = 8.0
_MAX_STEPS = 100
# The search stops at a step of this relative size: the error is then about its square, and float32's is 1e-7.
_LAST_STEP, _LAST_FLOAT32_STEP = 1e-5, 3e-4

# Fits of at least this many rows start from the minimum on a sample: of one row in 64, within these bounds, or up to
# twice as many.
_SAMPLED_ROWS, _SAMPLED_SHARE, _LEAST_SAMPLE_ROWS, _MOST_SAMPLE_ROWS = 3_000, 64, 512, 16_384
# Fits to at least this many float32 logits compute in float32.
_FLOAT32_ELEMENTS = 4_000_000
# Relative rounding error of the NLL: steps may seem to raise it by this much.
_NOISE = 1e-7
_SMALLEST = 1e-290


class FitStatus(StrEnum):
    """How a fit ended.

    Attributes:
        CONVERGED: At the minimum.
        SEPARABLE: The likelihood still rises when all confidences are 1; labels then count as a little uncertain.
        UNINFORMATIVE: Any weight on these logits lowers the likelihood; clamped to almost no weight.
    """

    CONVERGED = "converged"
    SEPARABLE = "separable"
    UNINFORMATIVE = "uninformative"


@dataclass(frozen=True, slots=True)
class TemperatureFit:
    """Fitted temperatures of P logit arrays.

    Attributes:
        weights: P numbers 1 / (P T).
        standard_errors: Of the temperatures, P sandwich estimates in their unit; NaN if a temperature was clamped.
        nll_before: Mean NLL in nats at temperatures of 1, without biases.
        nll_after: Mean NLL in nats at the fitted ones, without the prior's part.
        statuses: How each fit ended, P.
        biases: Biases of K options, which sum to 0; None if none were fitted.
    """

    weights: tuple[float, ...]
    standard_errors: tuple[float, ...]
    nll_before: float
    nll_after: float
    statuses: tuple[FitStatus, ...]
    biases: tuple[float, ...] | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Return the temperatures."""
        return tuple(1.0 / len(self.weights) / weight for weight in self.weights)

    @property
    def temperature(self) -> float:
        """Return the temperature of a fit of one array."""
        (temperature,) = self.temperatures
        return temperature

    @property
    def standard_error(self) -> float:
        """Return the standard error of the temperature of a fit of one array."""
        (error,) = self.standard_errors
        return error

    @property
    def status(self) -> FitStatus:
        """Return the status of a fit of one array."""
        (status,) = self.statuses
        return status

    def diagnostics(self, *prefixes: str) -> dict[str, Any]:
        """Return the fit's entries in a policy file, with None for NaN.   prefixes: of each array's keys."""
        named = zip(prefixes or ("",), self.statuses, self.standard_errors, strict=True)
        entries: dict[str, Any] = {"nll_before": self.nll_before, "nll_after": self.nll_after}
        for prefix, status, error in named:
            entries |= {f"{prefix}status": status, f"{prefix}standard_error": None if math.isnan(error) else error}
        return entries


def fit_temperature(logits: Floats, labels: Ints) -> TemperatureFit:
    """Fit the softmax temperature that minimises the negative log likelihood (paper, eq. 2).

    Args:
        logits: Float (N, K), raw; -inf where a row has no such option.
        labels: Int (N,), the right option.

    Raises:
        DataError: A label points at a missing option, or a logit is NaN or +inf; names the row.

    >>> import numpy as np
    >>> logits = np.array([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    >>> abs(3.0 / fit_temperature(logits, np.array([0, 0, 0, 1])).temperature - np.log(3)) < 1e-9
    np.True_
    """
    return fit_temperatures([logits], labels)


def fit_pair(state: Floats, logits: Floats, labels: Ints) -> TemperatureFit:
    """Fit alpha and beta of softmax((state / alpha + logits / beta) / 2) on the labels (paper, eq. 8-9).

    Args:
        state: Accumulated prediction r, float (N, K); -inf where a row has no such option.
        logits: The new model's calibrated logits, float (N, K); -inf likewise.
        labels: Int (N,).

    Returns:
        A fit whose temperatures are alpha and beta.

    Raises:
        DataError: As fit_temperature does.

    >>> import numpy as np
    >>> r = np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0]]); y = np.array([0, 1, 1])
    >>> fit = fit_pair(r, r[::-1].copy(), y)
    >>> fit.nll_after <= fit.nll_before
    True
    """
    return fit_temperatures([state, logits], labels)


def fit_temperatures(sources: Sequence[Rows], labels: Ints) -> TemperatureFit:
    """Fit the temperatures of softmax(mean of S_p / T_p), P arrays float (N, K), on labels int (N,).

    Raises DataError as fit_temperature does.
    """
    labels = np.asarray(labels)
    return solve_temperatures(Parts.of(ChainPart(tuple(sources), labels, np.arange(len(labels)))))


def dtype_of(n: int, k: int) -> type[np.floating]:
    """Return the dtype in which a fit computes: float32 for arrays (n, k) that are large.

    Logits themselves are rounded to it, and the sum over so many rows averages what rounding adds.
    """
    return np.float32 if n * k >= _FLOAT32_ELEMENTS else np.float64


class Parts:
    """The rows of a fit in one or more parts, local or remote; a fit asks only for sums and for a few rows.

    Attributes:
        ask_parts: Asks every part the same question, and returns the answers in the order of the parts.
        n: Rows of all parts.
        units: Weights of comparable effect, (P,).
        lowest: Lower bounds of the weights, (P,).
        highest: Upper bounds, (P,).
        flat: Which arrays are constant, (P,).
    """

    def __init__(self, ask_parts: Callable[[Callable[[ChainPart], Any]], list[Any]], n: int) -> None:
        """Ask the parts for some rows."""
        self.ask_parts, self.n = ask_parts, n
        self.some = gathered(ask_parts, n, min(max(n // _SAMPLED_SHARE, _LEAST_SAMPLE_ROWS), _MOST_SAMPLE_ROWS))
        arrays = tuple(source[:] for source in self.some.logits)
        self.n_options = arrays[0].shape[1]
        narrow = all(array.dtype == np.float32 for array in arrays) and dtype_of(n, self.n_options) is np.float32
        self._dtype: type[np.floating] = np.float32 if narrow else np.float64
        self.last_step = _LAST_FLOAT32_STEP if narrow else _LAST_STEP
        spreads, margins = np.array([_scales(array) for array in arrays]).T
        # Constant logits have neither spread nor margin.
        self.flat = spreads <= 0
        self.units = 1.0 / np.where(self.flat, 1.0, spreads)
        self.highest = _HIGHEST / np.where(self.flat, 1.0, np.minimum(margins, spreads))
        self.lowest = _LOWEST * self.units

    @classmethod
    def of(cls, part: ChainPart) -> Parts:
        """Return rows in memory as one part."""
        return cls(lambda ask: [ask(part)], len(part))

    def means(self, at: Floats) -> Sums:
        """Return the means over all rows at these weights and biases, in one pass."""
        dtype = self._dtype if len(at) == len(self.lowest) else np.float64
        parts_sums: list[Sums] = self.ask_parts(partial(sums, at=at, dtype=dtype))
        return reduce(Sums.__add__, parts_sums) / self.n

    def means_of_some(self, at: Floats) -> Sums:
        """Return the means over the chosen rows at these weights and biases."""
        return sums(self.some, at, self._dtype) / len(self.some)

    def nll(self, at: Floats) -> float:
        """Return the mean NLL at these weights, in nats."""
        return float(sum(self.ask_parts(partial(nll, at=at, dtype=self._dtype)))) / self.n

    def squares(self, at: Floats, directions: Floats) -> tuple[float, Floats]:
        """Return the mean NLL, and the mean squares of the rows' gradients along directions, (P, D)."""
        totals = np.sum(self.ask_parts(partial(squares, at=at, directions=directions)), axis=0) / self.n
        return float(totals[0]), totals[1:]

    def clipped(self, at: Floats) -> Floats:
        """Return weights and biases with the weights between their bounds."""
        p = len(self.lowest)
        return np.concatenate([np.clip(at[:p], self.lowest, self.highest), at[p:]])


def gathered(ask_parts: Callable[[Callable[[ChainPart], Any]], list[Any]], n: int, n_rows: int) -> ChainPart:
    """Return evenly spaced rows of all parts in memory, the same rows however they are split.

    Args:
        ask_parts: Asks every part the same question.
        n: Number of rows of all parts.
        n_rows: Fewest rows to return; at most twice as many are returned, and all of fewer than that.

    Raises:
        DataError: A label is outside the options; names the row.
    """
    samples: list[ChainPart] = ask_parts(partial(sample, step=max(1, n // n_rows)))
    ranks = np.concatenate([part.ranks for part in samples])
    order = np.argsort(ranks)
    arrays = tuple(
        np.concatenate([source[:] for source in sources])[order]
        for sources in zip(*(part.logits for part in samples), strict=True)
    )
    return ChainPart(arrays, np.concatenate([part.labels for part in samples])[order], ranks[order])


def _scales(logits: Floats) -> tuple[float, float]:
    """Return the spread of rows of logits, and their margin, the geometric mean."""
    with np.errstate(invalid="ignore"):  # rows that cannot be fitted are refused by the first pass
        top, finite = logits.max(axis=1, keepdims=True), np.isfinite(logits)
        spread = (top[:, 0] - np.where(finite, logits, 0).sum(axis=1) / finite.sum(axis=1)).mean(dtype=np.float64)
        margins = top[:, 0] - np.where(logits < top, logits, -np.inf).max(axis=1)
    margins = margins[np.isfinite(margins)]
    return float(spread), float(np.exp(np.log(margins, dtype=np.float64).mean())) if len(margins) else float(spread)


def solve_temperatures(parts: Parts) -> TemperatureFit:
    """Fit the temperatures of the arrays in the parts."""
    p = len(parts.lowest)
    start = np.full(p, 1.0 / p)
    # Constant logits carry no information: the likelihood does not depend on their weight.
    initial: Floats = np.where(parts.flat, parts.lowest, parts.clipped(start))
    if parts.n >= _SAMPLED_ROWS:
        initial = _newton(parts.means_of_some, initial, parts).at
    minimum = _newton(parts.means, initial, parts)
    nll_before = minimum.first_value if (initial == start).all() else parts.nll(start)
    if minimum.separable or (minimum.at >= parts.highest).any():
        minimum = _smoothed(parts, initial)
    directions = _inverse(minimum.means, p)
    squares = np.diag(directions @ minimum.means.scatter @ directions.T)
    return _fit(minimum, parts, squares, nll_before, minimum.means.value)


def _smoothed(parts: Parts, initial: Floats) -> _Minimum:
    """Fit separable data to labels that are uncertain (Platt, 1999): each has a probability of (N + 1) / (N + 2).

    What is left is spread over the other options. To the mean NLL that adds a share of w (S_label - mean of S), whose
    mean is the NLL's negative gradient at weights of 0.
    """
    k, n = parts.n_options, parts.n
    share = k / max(1, k - 1) / (n + 2)
    pull = -share * parts.means(np.zeros_like(initial)).gradient

    def means(at: Floats) -> Sums:
        total = parts.means(at)
        return replace(total, value=total.value + float(pull @ at), gradient=total.gradient + pull)

    total = _newton(means, initial, parts, can_separate=False)
    return replace(total, means=parts.means(total.at), separable=True)


def solve_bias_corrected(
    parts: Parts, without_biases: TemperatureFit, variance: float = PRIOR_VARIANCE
) -> TemperatureFit:
    """Fit T and a bias for each option of softmax(z / T + b) by the likelihood and a normal prior of every bias.

    Alexandari, Kundaje and Shrikumar, Maximum likelihood with bias-corrected calibration, ICML 2020; the prior also
    fixes what the likelihood leaves open, a constant added to all biases.

    Args:
        parts: Rows of one array of logits z, which have all options.
        without_biases: Fit of the temperature alone. If it is clamped as separable, so is this one, with biases of 0:
            they have nothing to correct.
        variance: Variance of the prior.
    """
    k = parts.n_options
    if without_biases.status is FitStatus.SEPARABLE:
        return replace(without_biases, biases=(0.0,) * k)
    strength = 1.0 / (variance * parts.n)

    def means(at: Floats) -> Sums:
        total, biases = parts.means(at), at[1:]
        total.gradient[1:] += strength * biases
        total.curvature[1:, 1:] += strength * np.eye(k)
        return replace(total, value=total.value + strength * float(biases @ biases) / 2)

    start = np.concatenate([parts.clipped(np.array(without_biases.weights)), np.zeros(k)])
    minimum = _newton(means, start, parts)
    nll_after, squares = parts.squares(minimum.at, _inverse(minimum.means, 1))
    fit = _fit(minimum, parts, squares, without_biases.nll_before, nll_after)
    return replace(fit, biases=tuple(minimum.at[1:].tolist()))


def _fit(minimum: _Minimum, parts: Parts, squares: Floats, nll_before: float, nll_after: float) -> TemperatureFit:
    """Return a minimum as a fit.   squares: n times the weights' variances, (P,)."""
    p = len(parts.lowest)
    weights = minimum.at[:p]
    statuses = tuple(
        FitStatus.UNINFORMATIVE
        if weight <= low
        else FitStatus.SEPARABLE
        if minimum.separable or weight >= high
        else FitStatus.CONVERGED
        for weight, low, high in zip(weights, parts.lowest, parts.highest, strict=True)
    )
    # White, Maximum likelihood estimation of misspecified models, Econometrica 1982: these standard errors are valid
    # even if the softmax model is wrong.
    errors = np.sqrt(np.maximum(squares / parts.n, 0.0)) * p * (1.0 / p / weights) ** 2
    errors = np.where([status is FitStatus.CONVERGED for status in statuses], errors, np.nan)
    return TemperatureFit(tuple(weights.tolist()), tuple(errors.tolist()), nll_before, nll_after, statuses)


@dataclass(frozen=True, slots=True)
class _Minimum:
    """Weights and biases (D,), the means there or within one step of them, and whether the data are separable.

    Attributes:
        at: Weights and biases (D,).
        means: Means there, or within one step.
        first_value: The value at the start of the search.
    """

    at: Floats
    means: Sums
    first_value: float
    separable: bool = False


def _newton(means_at: Callable[[Floats], Sums], at: Floats, parts: Parts, *, can_separate: bool = True) -> _Minimum:
    """Minimise by Newton's method, with the weights between parts' bounds.   at: the start, (D,).

    A step that raises the value is halved: the problem is convex, so a short one lowers it. Without biases a value
    below log(2) / N means that every row gives its label more than half; more weight in the same proportion is then
    always better, and the weights go to their bounds.
    """
    p, means = len(parts.lowest), means_at(at)
    first_value, perfect = means.value, math.log(2) / parts.n if len(at) == p and can_separate else -math.inf
    for _ in range(_MAX_STEPS):
        if means.value < perfect:
            break
        step = _step(at, means, parts)
        # Relative for weights; biases are log odds.
        size = float((np.abs(step) / np.append(at[:p], np.ones(len(at) - p))).max())
        target = parts.clipped(at + step)
        if size < parts.last_step:
            return _Minimum(target, means, first_value)
        trial = means_at(target)
        while trial.value > means.value + _NOISE * (1.0 + abs(means.value)) and size > parts.last_step:
            step, size = step / 2, size / 2
            target = parts.clipped(at + step)
            trial = means_at(target)
        at, means = target, trial
    # A safeguarded Newton iteration only takes this long if the minimum is at infinity.
    at = np.append(at[:p] * (parts.highest / at[:p]).min(), at[p:])
    return _Minimum(at, means_at(at), first_value, separable=True)


def _step(at: Floats, means: Sums, parts: Parts) -> Floats:
    """Return the step of weights and biases to the minimum of the quadratic model, with the weights in their bounds.

    A weight that the step would take below its bound is set to the bound, the furthest first, and the step of the
    others is recomputed; a weight may grow at most eightfold, or to the smallest weight that has an effect if that is
    more. Biases follow the weights.
    """
    lowest, highest, p = parts.lowest, parts.highest, len(parts.lowest)
    weights, (slope, curvature, by_slopes, by_weights) = at[:p], _eliminated(means, p)
    factor = _step_factor(weights, slope, curvature)
    held = ((weights <= lowest) & (slope >= 0)) | ((weights >= highest) & (slope <= 0))
    step = np.zeros_like(weights)
    # In units of 1 / spread, in which the arrays have comparable scales. The ridge picks the shortest step along
    # directions in which nothing changes (two copies of one model).
    unit = parts.units
    slope, curvature = slope * unit, curvature * np.outer(unit, unit)
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
    step = np.minimum(np.where(held, step, step * factor), np.maximum((_LARGEST_GROWTH - 1) * weights, unit))
    return np.append(step, by_slopes + by_weights @ (np.clip(weights + step, lowest, highest) - weights))


def _step_factor(weights: Floats, slope: Floats, curvature: Floats) -> float:
    """Return the factor to multiply a Newton step by: curvature falls as weights grow, which a plain step ignores.

    Steps of the weights' logarithms would be the same to the second order where the weights keep their proportion.
    """
    growth = -float(weights @ slope) / max(float(weights @ curvature @ weights), 1e-300)
    return 1 / (1 - 1.5 * min(max(growth, -1 / 3), 1 / 3))


def _inverse(means: Sums, p: int) -> Floats:
    """Return the P weights' rows of the inverse of the curvature, (P, D)."""
    _, curvature, _, by_weights = _eliminated(means, p)
    # Of separable rows, whose weights are clamped, the curvature may be too small to invert.
    invertible = np.abs(curvature).max() > _SMALLEST
    inverse = np.linalg.pinv(curvature if invertible else np.zeros_like(curvature), hermitian=True)
    return np.concatenate([inverse, inverse @ by_weights.T], axis=1)


def _eliminated(means: Sums, p: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Return slope (P,) and curvature (P, P) of the quadratic model in the P weights alone, at the best biases of each.

    The best step of the biases is the third value, (K,), plus the fourth, (K, P), times the step of the weights.
    """
    slope, curvature = means.gradient[:p], means.curvature[:p, :p]
    if len(means.gradient) == p:
        return slope, curvature, np.empty(0), np.empty((0, p))
    cross, within = means.curvature[p:, :p], means.curvature[p:, p:]
    solved = -np.linalg.solve(within, np.column_stack([cross, means.gradient[p:]]))
    by_weights, by_slopes = solved[:, :p], solved[:, p]
    return slope + cross.T @ by_slopes, curvature + cross.T @ by_weights, by_slopes, by_weights
