"""The Newton solver behind every fit of softmax temperatures.

Minimises the NLL of softmax(w_1 S_1 + ... + w_P S_P) over weights w > 0: a convex problem.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cauc_ray.numbers.likelihood import Likelihood, Rows
from cauc_ray.numbers.problem import Problem, Sums
from cauc_ray.numbers.types import Floats, Ints

# Weights are searched between these multiples of 1/spread, where the spread of a logit array is the mean
# distance of a row's largest logit from the row's mean: in these units T scales with the logits. At the
# lower bound the logits no longer matter, at the upper one every confidence is 1 to float32.
LOWEST, HIGHEST = 1e-8, 1e3
LARGEST_GROWTH = 8.0
MAX_STEPS = 100

# Fits of many rows let a sample of about so many say where to go.
_SAMPLE_ROWS = 512
_MAX_SAMPLE_STEPS = 6
# They end where the error to be expected is this share of a weight; float32 arithmetic gives no more.
_FLOAT32_ERROR, _FLOAT64_ERROR = 1e-6, 1e-10
# Rounding may raise the NLL by so much, relatively, where a step lowers it by less.
NOISE = 1e-7


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


def fit_weights(sources: Sequence[Rows], labels: Ints, start: float) -> WeightFit:
    """Fit the weights of P logit arrays, float (N, K), on labels int (N,), from one starting value for all.

    Raises DataError naming the row when a label points at a missing option or a logit is NaN or +inf.
    """
    return minimise(Problem.of(Likelihood(sources, labels)), start)


def minimise(problem: Problem, start: float) -> WeightFit:
    """Fit the weights of a problem's sources, from one starting value for all."""
    flat = problem.spreads <= 0
    units = 1.0 / np.where(flat, 1.0, problem.spreads)
    box = _Box(LOWEST * units, HIGHEST * units)
    # Constant logits say nothing, and nothing would move their weight.
    initial = np.where(flat, box.lowest, np.clip(start, box.lowest, box.highest))

    found = None
    if problem.separable_alone and not flat.any():
        found = _Minimum(box.highest, problem.sums(box.highest), separable=True)
    elif problem.n >= 8 * _SAMPLE_ROWS:
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
    errors = _standard_errors(sums, problem.n)
    return WeightFit(
        weights=weights,
        standard_errors=np.where([s is FitStatus.CONVERGED for s in statuses], errors, np.nan),
        nll_before=problem.nll(np.full(len(initial), start)),
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
    sums: Sums
    separable: bool = False


def _by_sample(problem: Problem, initial: Floats, box: _Box) -> _Minimum | None:
    """Minimise in two or three passes over all rows, with a sample of them to say where to go.

    After each pass the sample's NLL, bent by a quadratic so that value, slope and curvature agree with all
    rows', is minimised in place of theirs: it errs only in what its third derivative differs by, times the
    square of the step, where Newton's step errs by the whole of it. Returns None where that leads nowhere.
    """
    sample = problem.sample(_SAMPLE_ROWS)
    weights = _newton(sample.sums, initial, box, sample.perfect, last_step=1e-3).weights
    last, last_size = np.inf, 0.1
    enough = _FLOAT32_ERROR if problem.narrow else _FLOAT64_ERROR
    for _ in range(_MAX_SAMPLE_STEPS):
        # The sample may be separable, or say nothing, where the whole is not, or the reverse.
        if not box.inside(weights):
            return None
        whole = problem.sums(weights)
        if whole.nll > last + NOISE * (1 + abs(last)):
            return None
        bent = _newton(_bent(sample, whole, weights), weights, box, perfect=-np.inf)
        size = float((np.abs(bent.weights - weights) / weights).max())
        # The error that the last step left was this one's size; errors go with the squares of the steps.
        if size**3 / last_size**2 < enough:
            at_end = Sums(bent.sums.nll, whole.gradient, whole.curvature, whole.scatter)
            return _Minimum(bent.weights, at_end) if box.inside(bent.weights) else None
        weights, last, last_size = bent.weights, whole.nll, max(size, 1e-3)
    return None


def _bent(sample: Problem, whole: Sums, at: Floats) -> Callable[[Floats], Sums]:
    """Return the sample's sums, bent by a quadratic to those of all rows at the given weights."""
    own = sample.sums(at)
    slope, curvature = whole.gradient - own.gradient, whole.curvature - own.curvature

    def sums(weights: Floats) -> Sums:
        if weights is at:
            return whole
        here, step = sample.sums(weights), weights - at
        return Sums(
            nll=here.nll + whole.nll - own.nll + float(slope @ step + step @ curvature @ step / 2),
            gradient=here.gradient + slope + curvature @ step,
            curvature=here.curvature + curvature,
            scatter=here.scatter,
        )

    return sums


def _newton(
    sums_at: Callable[[Floats], Sums],
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
    for _ in range(MAX_STEPS):
        if sums.nll < perfect:
            break
        step = _step(weights, sums, box)
        size = float((np.abs(step) / weights).max())
        target = np.clip(weights + step, box.lowest, box.highest)
        if size < last_step:
            return _Minimum(target, sums)
        trial = sums_at(target)
        while trial.nll > sums.nll + NOISE * (1.0 + abs(sums.nll)) and size > last_step:
            step, size = step / 2, size / 2
            target = np.clip(weights + step, box.lowest, box.highest)
            trial = sums_at(target)
        weights, sums = target, trial
    # Only a minimum at infinity keeps a safeguarded Newton iteration going for so long.
    weights = weights * (box.highest / weights).min()
    return _Minimum(weights, sums_at(weights), separable=True)


def _step(weights: Floats, sums: Sums, box: _Box) -> Floats:
    """Return the step to the minimum of the NLL's quadratic model within the box.

    A weight that the step would take below the box, the furthest first, is set to its lowest value, and the
    others' step is found anew; one may grow to eight times its value, or to what matters at all if that is more.
    """
    lowest, highest = box.lowest, box.highest
    held = ((weights <= lowest) & (sums.gradient >= 0)) | ((weights >= highest) & (sums.gradient <= 0))
    step = np.zeros_like(weights)
    # In units of 1 / spread, in which the sources are alike. The ridge makes the step along a direction in
    # which nothing changes (two copies of one model) the shortest.
    unit = lowest / LOWEST
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
    largest: Floats = np.maximum((LARGEST_GROWTH - 1) * weights, unit)
    return np.minimum(step, largest)


def _standard_errors(sums: Sums, n: int) -> Floats:
    """Return the sandwich standard errors of the weights, which hold for a misspecified softmax too.

    White, Maximum likelihood estimation of misspecified models, Econometrica 1982: H^-1 G H^-1 / N with
    H the curvature and G the mean outer product of the rows' gradients.
    """
    bread = np.linalg.pinv(sums.curvature, hermitian=True)
    errors: Floats = np.sqrt(np.maximum(np.diag(bread @ sums.scatter @ bread) / n, 0.0))
    return errors
