"""Fits of softmax temperatures, one Newton solver for all of them.

Minimise the NLL of softmax(w_1 S_1 + ... + w_P S_P + b) over weights w > 0: a convex problem. P = 1 with w = 1/T is
temperature scaling (paper, eq. 2); P = 2 with w = (1/(2 alpha), 1/(2 beta)) is the recursive fusion's pair (eq. 9).
With a bias b for each of K options, which has a normal prior, P = 1 is bias-corrected temperature scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import reduce
from math import isnan
from typing import Any, Protocol, TypeVar

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.likelihood import Facts, Likelihood, Rows, Sums
from cauc_ray.numbers.types import Floats, Ints

T = TypeVar("T")

# Odds that are wrong by a factor of e are one standard deviation of the prior of a bias.
PRIOR_VARIANCE = 1.0
# The curvature in the biases is of K x K numbers: 134 MB.
MOST_OPTIONS = 4096

# Weights are searched from the first multiple of 1/spread to the second one of 1/margin: in these units T scales with
# the logits. The spread of a logit array is the mean distance of a row's largest logit from the row's mean, the margin
# that from the next smaller one: an option far below the others, which no weight brings near, widens only the spread.
# At the lower bound the logits no longer matter, at the upper one every confidence is 1 to float32.
_LOWEST, _HIGHEST = 1e-8, 1e3
_LARGEST_GROWTH = 8.0
_MAX_STEPS = 100
# A step of this relative size is the last: it leaves an error of about its square.
_LAST_STEP = 1e-5

# Fits of many rows let a sample of about so many say where to go.
_SAMPLE_ROWS = 512
_MAX_SAMPLE_STEPS = 6
# They end where the error to be expected is this share of a weight; float32 arithmetic gives no more.
_FLOAT32_ERROR, _FLOAT64_ERROR = 1e-6, 1e-10
# Rounding may raise the NLL by so much, relatively, where a step lowers it by less.
_NOISE = 1e-7


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
    """Fitted temperatures of P logit arrays.

    weights: P numbers 1 / (P T).   standard_errors: of the temperatures, P sandwich estimates in their unit; NaN where
    a temperature was clamped.   nll_before, nll_after: mean NLL in nats, at temperatures of 1 without biases and at the
    fitted ones, without the prior's part.   statuses: P.   biases: of K options, which sum to 0; None if none were
    fitted.
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
        """Return the temperature of the only array."""
        (temperature,) = self.temperatures
        return temperature

    @property
    def standard_error(self) -> float:
        """Return the standard error of the only temperature."""
        (error,) = self.standard_errors
        return error

    @property
    def status(self) -> FitStatus:
        """Return how the fit of the only temperature ended."""
        (status,) = self.statuses
        return status

    def diagnostics(self, *prefixes: str) -> dict[str, Any]:
        """Return what a policy's file says of the fit, with None for NaN.   prefixes: of each array's keys."""
        named = zip(prefixes or ("",), self.statuses, self.standard_errors, strict=True)
        found: dict[str, Any] = {"nll_before": self.nll_before, "nll_after": self.nll_after}
        for prefix, status, error in named:
            found |= {f"{prefix}status": status, f"{prefix}standard_error": None if isnan(error) else error}
        return found


def fit_temperature(logits: Floats, labels: Ints) -> TemperatureFit:
    """Fit the softmax temperature that minimises the negative log likelihood (paper, eq. 2).

    logits: float (N, K), raw; -inf where a row has no such option.   labels: int (N,), the right option.
    Raises DataError naming the row when a label points at a missing option or a logit is NaN or +inf.

    >>> import numpy as np
    >>> logits = np.array([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    >>> abs(3.0 / fit_temperature(logits, np.array([0, 0, 0, 1])).temperature - np.log(3)) < 1e-9
    np.True_
    """
    return fit_temperatures([logits], labels)


def fit_pair(state: Floats, logits: Floats, labels: Ints) -> TemperatureFit:
    """Fit alpha and beta of softmax((state / alpha + logits / beta) / 2) on the labels (paper, eq. 8-9).

    state: float (N, K), the accumulated prediction r; logits: float (N, K), the new model's calibrated
    logits; -inf in both where a row has no such option.   labels: int (N,).
    The fit's temperatures are alpha and beta. Raises DataError as fit_temperature does.

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
    return solve_temperatures(Parts.of(sources, labels))


def fit_bias_corrected(logits: Floats, labels: Ints, variance: float = PRIOR_VARIANCE) -> TemperatureFit:
    """Fit T and a bias for each option of softmax(z / T + b) by the likelihood and a normal prior of every bias.

    Alexandari, Kundaje and Shrikumar, Maximum likelihood with bias-corrected calibration, ICML 2020; the prior also
    fixes what the likelihood leaves open, a constant added to all biases.
    logits: float (N, K), raw, of rows that have all K options.   labels: int (N,), the right option.   variance: of
    the prior. Raises DataError as fit_temperature does, and naming a row that lacks an option.

    >>> import numpy as np
    >>> logits = np.array([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0], [0.0, 3.0]])
    >>> fit_bias_corrected(logits, np.array([0, 1, 1, 1])).biases[1] > 0
    True
    """
    parts = Parts.of([logits], labels)
    if parts.facts.lacking:
        raise DataError(f"row {min(parts.facts.lacking)} lacks some of the {logits.shape[1]} options; biases need all")
    return solve_bias_corrected(parts, solve_temperatures(parts), variance)


class Each(Protocol):
    """Asks every part's likelihood the same, and returns the answers in the parts' order."""

    def __call__(self, ask: Callable[[Likelihood], T], /) -> list[T]:
        """Ask all parts."""
        ...


class Parts:
    """The rows of a fit in one part or in several, here or elsewhere, of which only sums are asked.

    each: asks every part's likelihood the same.   narrow: whether they compute in float32.   facts: of all rows.
    lowest, highest: between which the weights are sought, (P,).
    """

    def __init__(self, each: Each, *, narrow: bool) -> None:
        """Ask the parts what is known before any pass."""
        self.each, self.narrow = each, narrow
        self.facts = facts = reduce(Facts.__add__, each(Likelihood.facts))
        # The mean NLL wherever all rows were visited: most searches begin where nll() is asked for too.
        self._values: dict[bytes, float] = {}
        self.n, spreads, counts = facts.n, facts.spreads / facts.n, facts.n_margins
        margins = np.where(counts > 0, np.exp(facts.log_margins / np.maximum(counts, 1)), spreads)
        # Constant logits have neither.
        self.flat = spreads <= 0
        self.lowest = _LOWEST * (1.0 / np.where(self.flat, 1.0, spreads))
        self.highest = _HIGHEST / np.where(self.flat, 1.0, np.minimum(margins, spreads))

    @classmethod
    def of(cls, sources: Sequence[Rows], labels: Ints, *, narrow: bool | None = None) -> Parts:
        """Return rows that are all here; arguments are those of Likelihood."""
        likelihood = Likelihood(sources, labels, narrow=narrow)

        def each(ask: Callable[[Likelihood], T], /) -> list[T]:
            return [ask(likelihood)]

        return cls(each, narrow=likelihood.dtype is np.float32)

    @property
    def n_options(self) -> int:
        """Return K."""
        return max(self.each(Likelihood.n_options))

    @property
    def perfect(self) -> float:
        """Return the mean NLL below which every row gives its label more than half."""
        return float(np.log(2.0)) / self.n

    def sample(self, rows: int) -> Parts:
        """Return every n-th row by rank, so that about so many are left, as one part."""
        step = max(1, self.n // rows)
        ranks, sources, labels = zip(*self.each(lambda part: part.sample(step)), strict=True)
        order = np.argsort(np.concatenate(ranks))
        arrays = [np.concatenate(of_parts)[order] for of_parts in zip(*sources, strict=True)]
        return Parts.of(arrays, np.concatenate(labels)[order], narrow=self.narrow)

    def nll(self, at: Floats) -> float:
        """Return the mean NLL at these weights and biases, in nats."""
        key = at.tobytes()
        return self._values[key] if key in self._values else sum(self.each(lambda part: part.nll(at))) / self.n

    def means(self, at: Floats) -> Sums:
        """Visit all rows once at these weights and biases, and return the means."""
        means = reduce(Sums.__add__, self.each(lambda part: part.sums(at))) / self.n
        self._values[at.tobytes()] = means.value
        return means

    def squares(self, at: Floats, directions: Floats) -> tuple[float, Floats]:
        """Return the mean NLL, and the mean squares of the rows' gradients along directions, (P, D)."""
        totals = np.sum(self.each(lambda part: part.squares(at, directions)), axis=0) / self.n
        return float(totals[0]), totals[1:]

    def clipped(self, at: Floats) -> Floats:
        """Return weights and biases with the weights between their bounds."""
        p = len(self.lowest)
        return np.concatenate([np.clip(at[:p], self.lowest, self.highest), at[p:]])

    def inside(self, weights: Floats) -> bool:
        """Say whether no weight is near a bound."""
        return bool(((weights > 10 * self.lowest) & (weights < self.highest / 10)).all())


def solve_temperatures(parts: Parts) -> TemperatureFit:
    """Fit the temperatures of the arrays that parts hold."""
    p = len(parts.lowest)
    start = np.full(p, 1.0 / p)
    # Constant logits say nothing, and nothing would move their weight.
    initial = np.where(parts.flat, parts.lowest, parts.clipped(start))
    found = None
    if p == 1 and not parts.facts.n_missed and not parts.flat:
        found = _Minimum(parts.highest, parts.means(parts.highest), separable=True)
    elif parts.n >= 8 * _SAMPLE_ROWS:
        found = _by_sample(parts, initial)
    if found is None:
        found = _newton(parts.means, initial, parts, parts.perfect)
    directions = _inverse(found.means, p)
    squares = np.diag(directions @ found.means.scatter @ directions.T)
    return _fit(found, parts, squares, parts.nll(start), found.means.value)


def solve_bias_corrected(parts: Parts, alone: TemperatureFit, variance: float = PRIOR_VARIANCE) -> TemperatureFit:
    """Fit the temperature and biases of the one array that parts hold, of rows that have all options.

    alone: what the temperature is without them. Where it is clamped as separable so is this one, and biases are 0:
    there is no error left that they could correct.
    """
    k = parts.n_options
    if alone.status is FitStatus.SEPARABLE:
        return replace(alone, biases=(0.0,) * k)
    strength = 1.0 / (variance * parts.n)

    def means(at: Floats) -> Sums:
        found, biases = parts.means(at), at[1:]
        found.gradient[1:] += strength * biases
        found.curvature[1:, 1:] += strength * np.eye(k)
        return replace(found, value=found.value + strength * float(biases @ biases) / 2)

    found = _newton(means, np.concatenate([parts.clipped(np.array(alone.weights)), np.zeros(k)]), parts, -np.inf)
    nll_after, squares = parts.squares(found.at, _inverse(found.means, 1))
    fit = _fit(found, parts, squares, alone.nll_before, nll_after)
    return replace(fit, biases=tuple(found.at[1:].tolist()))


def _fit(found: _Minimum, parts: Parts, squares: Floats, nll_before: float, nll_after: float) -> TemperatureFit:
    """Return a minimum as a fit.   squares: n times the weights' variances, (P,)."""
    p = len(parts.lowest)
    weights = found.at[:p]
    statuses = tuple(
        FitStatus.UNINFORMATIVE
        if weight <= low
        else FitStatus.SEPARABLE
        if found.separable or weight >= high
        else FitStatus.CONVERGED
        for weight, low, high in zip(weights, parts.lowest, parts.highest, strict=True)
    )
    # White, Maximum likelihood estimation of misspecified models, Econometrica 1982: they are valid for a misspecified
    # softmax too.
    errors = np.sqrt(np.maximum(squares / parts.n, 0.0)) * p * (1.0 / p / weights) ** 2
    errors = np.where([status is FitStatus.CONVERGED for status in statuses], errors, np.nan)
    return TemperatureFit(tuple(weights.tolist()), tuple(errors.tolist()), nll_before, nll_after, statuses)


@dataclass(frozen=True, slots=True)
class _Minimum:
    """Weights and biases (D,), means there or within the last step of there, and whether the data are separable."""

    at: Floats
    means: Sums
    separable: bool = False


def _by_sample(parts: Parts, initial: Floats) -> _Minimum | None:
    """Minimise in two or three passes over all rows, with a sample of them to say where to go.

    After each pass the sample's NLL, bent by a quadratic so that value, slope and curvature agree with all
    rows', is minimised in place of theirs: it errs only in what its third derivative differs by, times the
    square of the step, where Newton's step errs by the whole of it. Returns None where that leads nowhere.
    """
    sample = parts.sample(_SAMPLE_ROWS)
    weights = _newton(sample.means, initial, parts, sample.perfect, last_step=1e-3).at
    last, last_size = np.inf, 0.1
    enough = _FLOAT32_ERROR if parts.narrow else _FLOAT64_ERROR
    for _ in range(_MAX_SAMPLE_STEPS):
        # The sample may be separable, or say nothing, where the whole is not, or the reverse.
        if not parts.inside(weights):
            return None
        whole = parts.means(weights)
        if whole.value > last + _NOISE * (1 + abs(last)):
            return None
        bent = _newton(_bent(sample, whole, weights), weights, parts, perfect=-np.inf)
        size = float((np.abs(bent.at - weights) / weights).max())
        # The error that the last step left was this one's size; errors go with the squares of the steps.
        if size**3 / last_size**2 < enough:
            return _Minimum(bent.at, replace(whole, value=bent.means.value)) if parts.inside(bent.at) else None
        weights, last, last_size = bent.at, whole.value, max(size, 1e-3)
    return None


def _bent(sample: Parts, whole: Sums, at: Floats) -> Callable[[Floats], Sums]:
    """Return the sample's means, bent by a quadratic to those of all rows at the given weights."""
    own = sample.means(at)
    slope, curvature = whole.gradient - own.gradient, whole.curvature - own.curvature

    def means(weights: Floats) -> Sums:
        if weights is at:
            return whole
        here, step = sample.means(weights), weights - at
        return Sums(
            value=here.value + whole.value - own.value + float(slope @ step + step @ curvature @ step / 2),
            gradient=here.gradient + slope + curvature @ step,
            curvature=here.curvature + curvature,
            scatter=here.scatter,
        )

    return means


def _newton(
    means_at: Callable[[Floats], Sums], at: Floats, parts: Parts, perfect: float, last_step: float = _LAST_STEP
) -> _Minimum:
    """Minimise by Newton's method, with the weights between parts' bounds.   at: where to start, (D,).

    A step that raises the value is halved: the problem is convex, so a short one lowers it. Below perfect every row
    gives its label more than half; more weight in the same proportion is then always better, and the weights go to
    their bounds.
    """
    p, means = len(parts.lowest), means_at(at)
    for _ in range(_MAX_STEPS):
        if means.value < perfect:
            break
        step = _step(at, means, parts)
        # Relative for weights; biases are log odds.
        size = float((np.abs(step) / np.append(at[:p], np.ones(len(at) - p))).max())
        target = parts.clipped(at + step)
        if size < last_step:
            return _Minimum(target, means)
        trial = means_at(target)
        while trial.value > means.value + _NOISE * (1.0 + abs(means.value)) and size > last_step:
            step, size = step / 2, size / 2
            target = parts.clipped(at + step)
            trial = means_at(target)
        at, means = target, trial
    # Only a minimum at infinity keeps a safeguarded Newton iteration going for so long.
    at = np.append(at[:p] * (parts.highest / at[:p]).min(), at[p:])
    return _Minimum(at, means_at(at), separable=True)


def _step(at: Floats, means: Sums, parts: Parts) -> Floats:
    """Return the step of weights and biases to the minimum of the quadratic model, with the weights in their bounds.

    A weight that the step would take below its bound, the furthest first, is set to it, and the others' step is found
    anew; one may grow to eight times its value, or to what matters at all if that is more. Biases follow the weights.
    """
    lowest, highest, p = parts.lowest, parts.highest, len(parts.lowest)
    weights, (slope, curvature, by_slopes, by_weights) = at[:p], _eliminated(means, p)
    held = ((weights <= lowest) & (slope >= 0)) | ((weights >= highest) & (slope <= 0))
    step = np.zeros_like(weights)
    # In units of 1 / spread, in which the sources are alike. The ridge makes the step along a direction in
    # which nothing changes (two copies of one model) the shortest.
    unit = lowest / _LOWEST
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
    step = np.minimum(step, np.maximum((_LARGEST_GROWTH - 1) * weights, unit))
    return np.append(step, by_slopes + by_weights @ (np.clip(weights + step, lowest, highest) - weights))


def _inverse(means: Sums, p: int) -> Floats:
    """Return the P weights' rows of the inverse of the curvature, (P, D)."""
    _, curvature, _, by_weights = _eliminated(means, p)
    own = np.linalg.pinv(curvature, hermitian=True)
    return np.concatenate([own, own @ by_weights.T], axis=1)


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
