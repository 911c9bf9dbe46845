"""Fits of a temperature with one offset for each option of a fixed set: softmax(z / T + b).

Minimise sum NLL + |b|^2 / (2 v) over 1/T > 0 and b of K options: convex in both together. The second term is that of a
normal prior of variance v on every offset, in nats of log odds. It also fixes what the likelihood leaves open, a
constant added to all offsets: theirs is a sum of 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.likelihood import Likelihood
from cauc_ray.numbers.newton import HIGHEST, LARGEST_GROWTH, LOWEST, MAX_STEPS, NOISE, FitStatus
from cauc_ray.numbers.problem import Problem
from cauc_ray.numbers.temperature import TemperatureFit, solve_temperature
from cauc_ray.numbers.types import Floats, Ints

# Odds that are wrong by a factor of e are one standard deviation of the prior.
PRIOR_VARIANCE = 1.0
# The curvature is of K x K numbers: 134 MB.
MOST_OPTIONS = 4096

_BLOCK_BYTES = 4 << 20
# Products of rows x K x K up to this size are left to one thread by BLAS. Where others compute beside this process,
# threads that wait for one another take many times as long; only large K are worth that, and blocks of some rows.
_ONE_THREAD, _SOME_ROWS = 1 << 17, 8
_LAST_STEP = 1e-5


@dataclass(frozen=True, slots=True)
class OffsetFit:
    """A fitted temperature with offsets (K,), which sum to 0; the rest is TemperatureFit's.

    nll_before: at T = 1 without offsets.   nll_after: of the rows, without the prior's part.
    """

    temperature: float
    offsets: tuple[float, ...]
    standard_error: float
    nll_before: float
    nll_after: float
    status: FitStatus


def fit_offsets(logits: Floats, labels: Ints, variance: float = PRIOR_VARIANCE) -> OffsetFit:
    """Fit a temperature and an offset for each option that minimise the negative log likelihood with its prior.

    logits: float (N, K), raw, of rows that have all K options.   labels: int (N,), the right option.   variance: of
    the prior. Returns an OffsetFit. Raises DataError as fit_temperature does, and naming a row that lacks an option.

    >>> import numpy as np
    >>> logits = np.array([[3.0, 0.0], [3.0, 0.0], [0.0, 3.0], [0.0, 3.0]])
    >>> fit_offsets(logits, np.array([0, 1, 1, 1])).offsets[1] > 0
    True
    """
    problem = Problem.of(Likelihood([logits], labels))
    if problem.lacking is not None:
        raise DataError(f"row {problem.lacking} lacks some of the {problem.n_options} options; offsets need all")
    return solve_offsets(problem, solve_temperature(problem), variance)


def solve_offsets(problem: Problem, alone: TemperatureFit, variance: float = PRIOR_VARIANCE) -> OffsetFit:
    """Fit the offsets of a problem's one source, raw logits of rows that have all options, with the temperature.

    alone: what the temperature is without them. Where it is clamped as separable so is this one, and offsets are 0:
    there is no error left that they could mend.
    """
    k = problem.n_options
    if alone.status is FitStatus.SEPARABLE:
        return _fit(alone.temperature, np.zeros(k), np.nan, alone.nll_before, alone.nll_after, alone.status)
    spread = float(problem.spreads[0])
    unit = 1.0 / spread if spread > 0 else 1.0
    lowest, highest = LOWEST * unit, HIGHEST * unit
    objective = _Objective(problem, 1.0 / (variance * problem.n))
    start = _Point(min(max(1.0 / alone.temperature, lowest), highest), np.zeros(k))
    at, sums = _minimum(objective, start, lowest, highest, unit)
    status = FitStatus.CONVERGED
    if at.weight <= lowest * (1 + 1e-9):
        status = FitStatus.UNINFORMATIVE
    elif at.weight >= highest * (1 - 1e-9):
        status = FitStatus.SEPARABLE
    nll, variance_of_weight = objective.variance(at, sums)
    error = np.sqrt(variance_of_weight) / at.weight**2 if status is FitStatus.CONVERGED else np.nan
    return _fit(1.0 / at.weight, at.offsets, error, alone.nll_before, nll, status)


def _minimum(objective: _Objective, at: _Point, lowest: float, highest: float, unit: float) -> tuple[_Point, _Sums]:
    """Minimise by Newton's method, with the weight between bounds. Returns also the sums of the last step's start.

    As for temperatures: a step that raises the objective is halved, and one of relative size _LAST_STEP is the last.
    unit: of weights, one of which may grow to eight times its value or to that.
    """
    sums = objective.sums(at)
    for _ in range(MAX_STEPS):
        growth = max((LARGEST_GROWTH - 1) * at.weight, unit)
        step = sums.step(lowest - at.weight, min(highest - at.weight, growth))
        size = max(abs(step.weight) / at.weight, float(np.abs(step.offsets).max()))
        if size < _LAST_STEP:
            return at.moved(step), sums
        trial = objective.sums(at.moved(step))
        while trial.value > sums.value + NOISE * (1.0 + abs(sums.value)) and size > _LAST_STEP:
            step, size = step.halved(), size / 2
            trial = objective.sums(at.moved(step))
        at, sums = at.moved(step), trial
    return at, sums


def _fit(
    temperature: float, offsets: Floats, error: float, nll_before: float, nll_after: float, status: FitStatus
) -> OffsetFit:
    return OffsetFit(float(temperature), tuple(offsets.tolist()), float(error), nll_before, float(nll_after), status)


@dataclass(frozen=True, slots=True)
class _Point:
    """A weight 1/T and offsets (K,), or a step of them."""

    weight: float
    offsets: Floats

    def moved(self, step: _Point) -> _Point:
        return _Point(self.weight + step.weight, self.offsets + step.offsets)

    def halved(self) -> _Point:
        return _Point(self.weight / 2, self.offsets / 2)


@dataclass(frozen=True, slots=True)
class _Sums:
    """The objective, a mean over the rows, at a point, with its derivatives by the weight and the offsets.

    cross: (K,), by both.   curvature: (K, K), by the offsets, positive definite.
    """

    value: float
    slope: float
    slopes: Floats
    bend: float
    cross: Floats
    curvature: Floats

    def step(self, least: float, most: float) -> _Point:
        """Return the step to the minimum of the quadratic model where the weight moves within bounds.

        The offsets are eliminated, and what is left is a parabola in the weight, which can be cut off at the bounds.
        """
        by_weight, by_slopes = np.linalg.solve(self.curvature, np.stack([self.cross, self.slopes], axis=1)).T
        bend = self.bend - float(self.cross @ by_weight)
        slope = self.slope - float(self.cross @ by_slopes)
        # Logits that say nothing bend nothing.
        weight = float(np.clip(-slope / max(bend, 1e-12 * self.bend + 1e-300), least, most))
        return _Point(weight, -by_slopes - weight * by_weight)

    def row_of_inverse(self) -> _Point:
        """Return the weight's row of the inverse curvature."""
        by_weight = np.linalg.solve(self.curvature, self.cross)
        own = 1.0 / max(self.bend - float(self.cross @ by_weight), 1e-300)
        return _Point(own, -own * by_weight)


class _Objective:
    """What is minimised.   strength: of the prior, over the number of rows."""

    def __init__(self, problem: Problem, strength: float) -> None:
        self._problem, self._strength = problem, strength

    def sums(self, at: _Point) -> _Sums:
        """Visit all rows once."""
        k, n = len(at.offsets), self._problem.n
        totals = np.sum(self._problem.each(partial(_totals, at)), axis=0) / n
        (nll, slope, bend), slopes, cross, curvature = np.split(totals, [3, 3 + k, 3 + 2 * k])
        return _Sums(
            value=float(nll + self._strength * (at.offsets @ at.offsets) / 2),
            slope=float(slope),
            slopes=slopes + self._strength * at.offsets,
            bend=float(bend),
            cross=cross,
            curvature=curvature.reshape(k, k) + self._strength * np.eye(k),
        )

    def variance(self, at: _Point, sums: _Sums) -> tuple[float, float]:
        """Return the mean NLL of the rows at a point, and the sandwich variance of the weight.

        White 1982, as for temperatures: H^-1 G H^-1 / N, of which one row of H^-1 is enough.   sums: at the point.
        """
        totals = np.sum(self._problem.each(partial(_projected, at, sums.row_of_inverse())), axis=0)
        nll, squares = totals / self._problem.n
        return float(nll), float(squares / self._problem.n)


@dataclass(frozen=True, slots=True)
class _Block:
    """Some rows: logits less their row's largest (n, K), probabilities (n, K), labels (n,), and NLL (n,)."""

    gaps: Floats
    probabilities: Floats
    labels: Ints
    label_gaps: Floats
    nll: Floats


def _blocks(likelihood: Likelihood, at: _Point) -> Iterator[_Block]:
    n, k = likelihood.sources[0].shape
    size = _ONE_THREAD // (k * k)
    if size < _SOME_ROWS:
        size = max(1, _BLOCK_BYTES // (8 * k))
    for start in range(0, n, size):
        rows = slice(start, min(start + size, n))
        gaps = np.subtract(likelihood.sources[0][rows], likelihood.tops[0][rows], dtype=np.float64)
        labels, label_gaps = likelihood.labels[rows], likelihood.label_gaps[0, rows]
        scores = at.weight * gaps
        scores += at.offsets
        scores -= scores.max(axis=1, keepdims=True)
        of_labels = scores[np.arange(len(labels)), labels]
        terms = np.exp(scores, out=scores)
        sums = terms.sum(axis=1)
        terms /= sums[:, None]
        yield _Block(gaps, terms, labels, label_gaps, np.log(sums) - of_labels)


def _totals(at: _Point, likelihood: Likelihood) -> Floats:
    """Return what sums at a point are made of, end to end, float64 (3 + 2 K + K^2,)."""
    k = len(at.offsets)
    of_weight, slopes, cross, curvature = np.zeros(3), np.zeros(k), np.zeros(k), np.zeros((k, k))
    for block in _blocks(likelihood, at):
        p, means = block.probabilities, np.vecdot(block.probabilities, block.gaps)
        weighted = p * (block.gaps - means[:, None])
        of_weight += block.nll.sum(), (means - block.label_gaps).sum(), np.vecdot(weighted, block.gaps).sum()
        of_options = p.sum(axis=0)
        slopes += of_options - np.bincount(block.labels, minlength=k)
        cross += weighted.sum(axis=0)
        curvature -= p.T @ p
        curvature[np.diag_indices(k)] += of_options
    return np.concatenate([of_weight, slopes, cross, curvature.ravel()])


def _projected(at: _Point, onto: _Point, likelihood: Likelihood) -> Floats:
    """Return the NLL, and the squares of the rows' gradients along a direction, summed over the rows, (2,)."""
    totals = np.zeros(2)
    for block in _blocks(likelihood, at):
        residuals = np.vecdot(block.probabilities, block.gaps) - block.label_gaps
        along = onto.weight * residuals + np.vecdot(block.probabilities, onto.offsets) - onto.offsets[block.labels]
        totals += block.nll.sum(), along @ along
    return totals
