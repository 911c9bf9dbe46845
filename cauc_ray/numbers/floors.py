"""The floor of a model's probabilities: what its zeros are worth, fitted on calibration.

A probability of 0 stands for an unknown small one: a forest of 30 trees has no vote for the option, a server rounds to
0.01. Read as e^-50, zeros of right options dominate the likelihood, and the temperature flattens all confidences.

The floor is the probability that lower values count as. One rule covers rounding and votes: floor and temperature
maximise the likelihood jointly, under a wide prior of the floor around half of the smallest step. For an exactly
calibrated model whose probabilities are rounded to 0.01, fitted on 3,000 rows:

    options                     4              10             77
    T, ECE of zeros as e^-50    1.01, 0.018    1.19, 0.067    7.47, 0.326
    T, ECE at half a step       0.97, 0.019    0.92, 0.017    0.79, 0.053
    T, ECE at the fitted floor  1.01, 0.018    0.99, 0.025    0.98, 0.020

A fitted share of the uniform distribution, mixed into all probabilities, has the same likelihood on new rows of
forests, nearest neighbours and trees to 0.002 nats. The floor needs one mechanism for both cases, can be applied twice
without effect, and leaves higher values as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from cauc_ray.numbers.calibration import Parts, gathered, solve_temperatures
from cauc_ray.numbers.chain import ChainPart
from cauc_ray.numbers.logits import LEAST_LOG, UNLISTED_LOG, LogitKind, bounded_below
from cauc_ray.numbers.types import Floats

# Logits that stand for a probability of 0 if no logit is lower.
ZERO_LOGITS: dict[LogitKind, float] = {"probabilities": LEAST_LOG, "log-probabilities": UNLISTED_LOG}

# The likelihood is that of a sample of at most twice as many rows.
_SAMPLE_ROWS, _FEWEST_SAMPLE_ROWS, _SAMPLE_LOGITS = 20_000, 1_000, 2_000_000
# A floor is at most half of the uniform distribution, so that it outranks no listed option.
_LARGEST_SHARE = 0.5
# The search starts from this many floors, evenly spaced in the logarithm, down to e^-7 of the prior's centre.
_START_FLOORS, _DEPTH, _LAST_STEP = 8, 7.0, 3e-3

# Steps of a grid are 1 / n: votes and decimals. A value v is on the grid if v n differs from a whole number by at most
# n times this, thrice the rounding error of a float32 value and of its logarithm. Fewer distinct values may be
# multiples of a coarse step by accident.
_STEP_DIVISORS = (*range(1, 1001), 10_000, 100_000)
_VALUE_ROUNDING = 2e-7
_FEWEST_VALUES, _COMPARED_VALUES = 8, 2_000


@dataclass(frozen=True, slots=True)
class FloorFit:
    """A fitted floor of a model's probabilities.

    Attributes:
        floor: Probability that lower values count as.
        step: Step of the grid that all probabilities lie on; None for none.
        n_zeros: Number of probabilities of 0 on the fitted rows.
        n_right_zeros: Number of these that belong to right options.
    """

    floor: float
    step: float | None
    n_zeros: int
    n_right_zeros: int

    def __str__(self) -> str:
        """Return a description in one line.

        >>> print(FloorFit(0.0051, 0.01, 250, 3))
        probabilities are multiples of 0.01 and 0 for 250 options, 3 of them right; lower ones count as 0.0051
        """
        zeros = f"0 for {self.n_zeros:,} options, {self.n_right_zeros:,} of them right" if self.n_zeros else ""
        grid = f"multiples of {self.step:.4g}" if self.step is not None else ""
        return f"probabilities are {' and '.join(filter(None, (grid, zeros)))}; lower ones count as {self.floor:.4g}"


def fit_floor(ask_parts: Callable[[Callable[[ChainPart], Any]], list[Any]], n: int, kind: LogitKind) -> FloorFit | None:
    """Fit the floor of one model's probabilities.

    Args:
        ask_parts: Asks every part of the rows the same question; parts have the logits of this model only.
        n: Number of rows of all parts.
        kind: Kind of the model's logits.

    Returns:
        The floor; None for raw logits, and for probabilities without zeros that lie on no grid.

    Raises:
        DataError: As fit_temperature does.
    """
    zero = ZERO_LOGITS.get(kind)
    if zero is None:
        return None
    n_zeros, n_right_zeros, n_lower, smallest, widths = zip(*ask_parts(partial(_extent, zero=zero)), strict=True)
    if any(n_lower) or (kind != "probabilities" and not any(n_zeros)):
        return None
    k = max(widths)
    part = gathered(ask_parts, n, max(_FEWEST_SAMPLE_ROWS, min(_SAMPLE_ROWS, _SAMPLE_LOGITS // k)))
    logits = part.logits[0][:]
    step = grid_step(np.exp(np.unique(logits[logits > zero]).astype(np.float64)))
    if not any(n_zeros):
        return None if step is None else FloorFit(step / 2, step, 0, 0)
    floor = _likeliest_floor(part, (step or math.exp(min(smallest))) / 2, _LARGEST_SHARE / k)
    # Rounded, since its last digits say nothing.
    return FloorFit(float(f"{floor:.4g}"), step, sum(n_zeros), sum(n_right_zeros))


def grid_step(values: Floats) -> float | None:
    """Return the largest step 1 / n of which all probabilities are multiples, None for none.

    Args:
        values: Distinct probabilities above 0, ascending, exact to float32.

    >>> grid_step(np.arange(1, 20) / 50)
    0.02
    """
    if len(values) < _FEWEST_VALUES:
        return None
    values = values[:: -(-len(values) // _COMPARED_VALUES)]
    divisor: int
    for divisor in _STEP_DIVISORS:
        multiples = values * divisor
        if (np.abs(multiples - np.round(multiples)) <= divisor * _VALUE_ROUNDING).all():
            return 1 / divisor
    return None


def _extent(part: ChainPart, zero: float) -> tuple[int, int, int, float, int]:
    """Count zeros, zeros of right options and lower logits; return the smallest logit above, and the width."""
    n_zeros = n_right_zeros = n_lower = 0
    smallest, (_, k) = math.inf, part.logits[0].shape
    for rows in part.blocks():
        logits = part.logits[0][rows]
        zeros = logits == zero
        right = np.clip(part.labels[rows], 0, k - 1)  # invalid labels are refused later
        n_zeros += int(zeros.sum())
        n_right_zeros += int(zeros[np.arange(len(right)), right].sum())
        n_lower += int(((logits < zero) & (logits > -np.inf)).sum())
        smallest = min(smallest, float(logits.min(initial=math.inf, where=logits > zero)))
    return n_zeros, n_right_zeros, n_lower, smallest, k


def _likeliest_floor(part: ChainPart, centre: float, largest: float) -> float:
    """Return the floor of the largest likelihood at its best temperature, times a Cauchy prior of its logarithm.

    The prior has scale 1: an observation or two overrule it, even from far away, and without any right zero the floor
    stays above 0.
    """
    from scipy.optimize import minimize_scalar

    middle, highest = math.log(centre), math.log(largest)

    def loss(log_floor: float) -> float:
        floored = replace(part, logits=(bounded_below(part.logits[0][:], math.exp(log_floor)),))
        return len(part) * solve_temperatures(Parts.of(floored)).nll_after + math.log1p((log_floor - middle) ** 2)

    # The loss may have several minima if the lowest values above 0 are spread over many orders of magnitude.
    starts = np.linspace(min(middle, highest) - _DEPTH, highest, _START_FLOORS)
    best = int(np.argmin([loss(start) for start in starts]))
    bounds = starts[max(best - 1, 0)], starts[min(best + 1, len(starts) - 1)]
    return math.exp(minimize_scalar(loss, bounds=bounds, method="bounded", options={"xatol": _LAST_STEP}).x)
