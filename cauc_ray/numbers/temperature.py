"""Fits of softmax temperatures: eq. 2 and eq. 9 of the paper, as one problem in inverse temperatures.

Minimise the NLL of softmax(w_1 S_1 + ... + w_P S_P) over w > 0: P = 1 with w = 1/T is temperature scaling;
P = 2 with w = (1/(2 alpha), 1/(2 beta)) is the recursive fusion's pair fit.
"""

from __future__ import annotations

from dataclasses import dataclass

from cauc_ray.numbers.likelihood import Likelihood
from cauc_ray.numbers.newton import FitStatus, minimise
from cauc_ray.numbers.problem import Problem
from cauc_ray.numbers.types import Floats, Ints

__all__ = [
    "FitStatus",
    "PairFit",
    "TemperatureFit",
    "fit_pair",
    "fit_temperature",
    "solve_pair",
    "solve_temperature",
]


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

    >>> import numpy as np
    >>> logits = np.array([[3.0, 0.0], [3.0, 0.0], [3.0, 0.0], [3.0, 0.0]])
    >>> abs(3.0 / fit_temperature(logits, np.array([0, 0, 0, 1])).temperature - np.log(3)) < 1e-9
    np.True_
    """
    return solve_temperature(Problem.of(Likelihood([logits], labels)))


def solve_temperature(problem: Problem) -> TemperatureFit:
    """Fit the temperature of a problem's one source, raw logits."""
    fit = minimise(problem, start=1.0)
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

    >>> import numpy as np
    >>> r = np.array([[2.0, 0.0], [2.0, 0.0], [0.0, 1.0]]); y = np.array([0, 1, 1])
    >>> fit = fit_pair(r, r[::-1].copy(), y)
    >>> fit.nll_after <= fit.nll_before
    True
    """
    return solve_pair(Problem.of(Likelihood([state, logits], labels)))


def solve_pair(problem: Problem) -> PairFit:
    """Fit alpha and beta of a problem's two sources, the accumulated prediction and the calibrated logits."""
    fit = minimise(problem, start=0.5)
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
