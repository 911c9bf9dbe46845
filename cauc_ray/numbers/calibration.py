"""Fits of softmax temperatures, one Newton solver for all of them.

Minimise the NLL of softmax(w_1 S_1 + ... + w_P S_P + b) over weights w > 0: a convex problem. P = 1 with w = 1/T is
temperature scaling (paper, eq. 2); P = 2 with w = (1/(2 alpha), 1/(2 beta)) is the recursive fusion's pair (eq. 9).
With a bias b for each of K options, which has a normal prior, P = 1 is bias-corrected temperature scaling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import isnan
from typing import Any

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.likelihood import Likelihood, Rows
from cauc_ray.numbers.parts import Parts, Sums
from cauc_ray.numbers.types import Floats, Ints

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
    return solve_temperatures(Parts.of(Likelihood(sources, labels)))


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
    parts = Parts.of(Likelihood([logits], labels))
    if parts.facts.lacking is not None:
        raise DataError(f"row {parts.facts.lacking} lacks some of the {parts.facts.n_options} options; biases need all")
    return solve_bias_corrected(parts, solve_temperatures(parts), variance)


def solve_temperatures(parts: Parts) -> TemperatureFit:
    """Fit the temperatures of the arrays that parts hold."""
    box = _Box.of(parts)
    start = 1.0 / box.n
    # Constant logits say nothing, and nothing would move their weight.
    initial = np.where(parts.spreads > 0, np.clip(start, box.lowest, box.highest), box.lowest)
    found = None
    if parts.facts.best and parts.spreads[0] > 0:
        found = _Minimum(box.highest, parts.sums(box.highest), separable=True)
    elif parts.facts.n >= 8 * _SAMPLE_ROWS:
        found = _by_sample(parts, initial, box)
    if found is None:
        found = _newton(parts.sums, initial, box, parts.perfect)
    directions = found.sums.eliminated(box.n).inverse()
    squares = np.diag(directions @ found.sums.scatter @ directions.T)
    nll_before = parts.nll(np.full(box.n, start))
    return _fit(found, box, squares / parts.facts.n, nll_before, found.sums.value)


def solve_bias_corrected(parts: Parts, alone: TemperatureFit, variance: float = PRIOR_VARIANCE) -> TemperatureFit:
    """Fit the temperature and biases of the one array that parts hold, of rows that have all options.

    alone: what the temperature is without them. Where it is clamped as separable so is this one, and biases are 0:
    there is no error left that they could correct.
    """
    k = parts.facts.n_options
    if alone.status is FitStatus.SEPARABLE:
        return replace(alone, biases=(0.0,) * k)
    box, strength = _Box.of(parts), 1.0 / (variance * parts.facts.n)

    def sums(at: Floats) -> Sums:
        found, biases = parts.sums(at), at[1:]
        found.gradient[1:] += strength * biases
        found.curvature[1:, 1:] += strength * np.eye(k)
        return Sums(found.value + strength * float(biases @ biases) / 2, found.gradient, found.curvature, found.scatter)

    initial = np.clip(alone.weights, box.lowest, box.highest)
    found = _newton(sums, np.concatenate([initial, np.zeros(k)]), box, perfect=-np.inf)
    nll_after, squares = parts.squares(found.at, found.sums.eliminated(1).inverse())
    fit = _fit(found, box, squares / parts.facts.n, alone.nll_before, nll_after)
    return replace(fit, biases=tuple(found.at[1:].tolist()))


def _fit(found: _Minimum, box: _Box, variances: Floats, nll_before: float, nll_after: float) -> TemperatureFit:
    """Return a minimum as a fit.   variances: of the weights, (P,)."""
    weights = found.at[: box.n]
    statuses = tuple(
        FitStatus.UNINFORMATIVE
        if weight <= low
        else FitStatus.SEPARABLE
        if found.separable or weight >= high
        else FitStatus.CONVERGED
        for weight, low, high in zip(weights, box.lowest, box.highest, strict=True)
    )
    # White, Maximum likelihood estimation of misspecified models, Econometrica 1982: they are valid for a misspecified
    # softmax too.
    errors = np.sqrt(np.maximum(variances, 0.0)) * box.n * (1.0 / box.n / weights) ** 2
    errors = np.where([status is FitStatus.CONVERGED for status in statuses], errors, np.nan)
    return TemperatureFit(tuple(weights.tolist()), tuple(errors.tolist()), nll_before, nll_after, statuses)


@dataclass(frozen=True, slots=True)
class _Box:
    """Between which bounds the weights are sought, (P,) each; biases have none."""

    lowest: Floats
    highest: Floats

    @classmethod
    def of(cls, parts: Parts) -> _Box:
        flat = parts.spreads <= 0
        lowest = _LOWEST * (1.0 / np.where(flat, 1.0, parts.spreads))
        return cls(lowest, _HIGHEST / np.where(flat, 1.0, parts.margins))

    @property
    def n(self) -> int:
        """Return P."""
        return len(self.lowest)

    def clipped(self, at: Floats) -> Floats:
        """Return weights and biases with the weights in the box."""
        return np.concatenate([np.clip(at[: self.n], self.lowest, self.highest), at[self.n :]])

    def inside(self, weights: Floats) -> bool:
        """Say whether no weight is near a bound."""
        return bool(((weights > 10 * self.lowest) & (weights < self.highest / 10)).all())


@dataclass(frozen=True, slots=True)
class _Minimum:
    """Weights and biases (D,), sums there or within the last step of there, and whether the data are separable."""

    at: Floats
    sums: Sums
    separable: bool = False


def _by_sample(parts: Parts, initial: Floats, box: _Box) -> _Minimum | None:
    """Minimise in two or three passes over all rows, with a sample of them to say where to go.

    After each pass the sample's NLL, bent by a quadratic so that value, slope and curvature agree with all
    rows', is minimised in place of theirs: it errs only in what its third derivative differs by, times the
    square of the step, where Newton's step errs by the whole of it. Returns None where that leads nowhere.
    """
    sample = parts.sample(_SAMPLE_ROWS)
    weights = _newton(sample.sums, initial, box, sample.perfect, last_step=1e-3).at
    last, last_size = np.inf, 0.1
    enough = _FLOAT32_ERROR if parts.narrow else _FLOAT64_ERROR
    for _ in range(_MAX_SAMPLE_STEPS):
        # The sample may be separable, or say nothing, where the whole is not, or the reverse.
        if not box.inside(weights):
            return None
        whole = parts.sums(weights)
        if whole.value > last + _NOISE * (1 + abs(last)):
            return None
        bent = _newton(_bent(sample, whole, weights), weights, box, perfect=-np.inf)
        size = float((np.abs(bent.at - weights) / weights).max())
        # The error that the last step left was this one's size; errors go with the squares of the steps.
        if size**3 / last_size**2 < enough:
            at_end = Sums(bent.sums.value, whole.gradient, whole.curvature, whole.scatter)
            return _Minimum(bent.at, at_end) if box.inside(bent.at) else None
        weights, last, last_size = bent.at, whole.value, max(size, 1e-3)
    return None


def _bent(sample: Parts, whole: Sums, at: Floats) -> Callable[[Floats], Sums]:
    """Return the sample's sums, bent by a quadratic to those of all rows at the given weights."""
    own = sample.sums(at)
    slope, curvature = whole.gradient - own.gradient, whole.curvature - own.curvature

    def sums(weights: Floats) -> Sums:
        if weights is at:
            return whole
        here, step = sample.sums(weights), weights - at
        return Sums(
            value=here.value + whole.value - own.value + float(slope @ step + step @ curvature @ step / 2),
            gradient=here.gradient + slope + curvature @ step,
            curvature=here.curvature + curvature,
            scatter=here.scatter,
        )

    return sums


def _newton(
    sums_at: Callable[[Floats], Sums], at: Floats, box: _Box, perfect: float, last_step: float = _LAST_STEP
) -> _Minimum:
    """Minimise by Newton's method, with the weights in the box.   at: weights and biases to start from, (D,).

    A step that raises the value is halved: the problem is convex, so a short one lowers it. Below perfect every row
    gives its label more than half; more weight in the same proportion is then always better, and the weights go to the
    box.
    """
    sums = sums_at(at)
    for _ in range(_MAX_STEPS):
        if sums.value < perfect:
            break
        step = _step(at, sums, box)
        # Relative for weights; biases are log odds.
        size = float((np.abs(step) / np.concatenate([at[: box.n], np.ones(len(at) - box.n)])).max())
        target = box.clipped(at + step)
        if size < last_step:
            return _Minimum(target, sums)
        trial = sums_at(target)
        while trial.value > sums.value + _NOISE * (1.0 + abs(sums.value)) and size > last_step:
            step, size = step / 2, size / 2
            target = box.clipped(at + step)
            trial = sums_at(target)
        at, sums = target, trial
    # Only a minimum at infinity keeps a safeguarded Newton iteration going for so long.
    weights = at[: box.n] * (box.highest / at[: box.n]).min()
    at = np.concatenate([weights, at[box.n :]])
    return _Minimum(at, sums_at(at), separable=True)


def _step(at: Floats, sums: Sums, box: _Box) -> Floats:
    """Return the step of weights and biases to the minimum of the quadratic model, with the weights in the box.

    A weight that the step would take below the box, the furthest first, is set to its lowest value, and the
    others' step is found anew; one may grow to eight times its value, or to what matters at all if that is more.
    """
    weights, lowest, highest = at[: box.n], box.lowest, box.highest
    model = sums.eliminated(box.n)
    held = ((weights <= lowest) & (model.gradient >= 0)) | ((weights >= highest) & (model.gradient <= 0))
    step = np.zeros_like(weights)
    # In units of 1 / spread, in which the sources are alike. The ridge makes the step along a direction in
    # which nothing changes (two copies of one model) the shortest.
    unit = lowest / _LOWEST
    curvature = model.curvature * np.outer(unit, unit)
    slope = model.gradient * unit
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
    return np.concatenate([step, model.biases(np.clip(weights + step, lowest, highest) - weights)])
