"""How probable it is that an answer is right, by signals such as the confidences in it: a logistic regression.

The log odds are a sum of functions that rise with each signal, linear between knots, and of terms for flags, such as
whether an earlier answer is the same. Penalties are the same for every fit: at 100 rows, cross-validation chooses worse
ones than these, and with thousands they hardly matter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np

from cauc_ray.numbers.types import Bools, Floats

ScaleKind: TypeAlias = Literal["share", "log-share", "number"]
# Penalties of the squares of weights: slopes, of signals whose spread is 1; ramps, which bend them; flags.
_OF_SLOPE, _OF_RAMP, _OF_FLAG = 1.0, 5.0, 0.3
N_RAMPS = 8
# Shares are kept so far from 0 and 1, of which the log odds are infinite.
_LEAST_SHARE = 1e-3
# Slopes are at least this: rows whose confidences differ then differ in their log odds, and any budget can be spent. A
# slope of 0 would leave a third of the rows at one probability, which a threshold cannot divide.
_LEAST_SLOPE = 1e-3
_MOST_STEPS, _TOLERANCE, _SHORTEST = 100, 1e-9, 1e-10


@dataclass(frozen=True, slots=True)
class Scale:
    """How a signal enters the log odds.

    Attributes:
        kind: A share in [0, 1] and the logarithm of one become log odds; other numbers stay.
        centre: Subtracted.
        spread: Divided by.
        knots: Rising values of the result, between which ramps rise from 0 to 1.
        may_lack: Whether rows may lack the signal, which then has a term of its own.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    kind: ScaleKind
    centre: float
    spread: float
    knots: tuple[float, ...]
    may_lack: bool

    @classmethod
    def of(cls, values: Floats, *, plain: bool = False) -> Scale:
        """Return the scale of a signal's values, float64 (n,), NaN where a row lacks it.   plain: of kind number."""
        present = values[~np.isnan(values)]
        kind: ScaleKind = "number"
        if plain:
            pass
        elif present.size and present.min() >= 0 and present.max() <= 1:
            kind = "share"
        elif present.size and present.max() <= 0:
            kind = "log-share"
        log_odds = _in_log_odds(present, kind)
        centre, spread = (float(log_odds.mean()), float(log_odds.std())) if log_odds.size else (0.0, 1.0)
        spread = spread if spread > 1e-9 * max(1.0, abs(centre)) else 1.0
        levels = np.unique((log_odds - centre) / spread)
        if len(levels) > N_RAMPS + 1:
            levels = np.unique(np.quantile((log_odds - centre) / spread, np.linspace(0, 1, N_RAMPS + 1)))
        return cls(kind, centre, spread, tuple(levels.tolist()), present.size < values.size)

    def is_foreign(self, values: Floats) -> Bools:
        """Return which values, float64 (n,), are of another kind, such as percentages in place of shares, bool (n,).

        Those that are just outside the range count as its ends: it is that of the rows that were fitted.
        """
        lowest, highest = {"share": (-1.0, 2.0), "log-share": (-np.inf, 1.0), "number": (-np.inf, np.inf)}[self.kind]
        foreign_mask: Bools = (values < lowest) | (values > highest)
        return foreign_mask

    def __call__(self, values: Floats) -> Floats:
        """Return values as they enter linear terms, float64 (n,), NaN where a row lacks the signal."""
        scaled: Floats = (_in_log_odds(values, self.kind) - self.centre) / self.spread
        return scaled


def _in_log_odds(values: Floats, kind: ScaleKind) -> Floats:
    from scipy import special

    # By functions of single numbers: numpy's may round one in another way at another place of an array.
    if kind == "share":
        odds: Floats = special.logit(np.clip(values, _LEAST_SHARE, 1 - _LEAST_SHARE))
    elif kind == "log-share":
        logs = np.minimum(values, np.log1p(-_LEAST_SHARE))
        odds = logs - special.log1p(-1 - special.expm1(logs))
    else:
        odds = values
    return odds


@dataclass(frozen=True, slots=True)
class Correctness:
    """A fitted probability of being right.

    Attributes:
        scales: Of each of F signals.
        intercept: Log odds of a row whose signals are at their centres, without flags.
        weights: Of the terms.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    scales: tuple[Scale, ...]
    intercept: float
    weights: tuple[float, ...]

    def log_odds(self, signals: Floats, flags: Bools) -> Floats:
        """Return the log odds that answers are right, float64 (n,).

        Args:
            signals: Float (n, F), NaN where a row lacks one.
            flags: Bool (n, A).
        """
        odds = np.full(len(signals), self.intercept)
        for weight, (term, _, _) in zip(self.weights, _terms(signals, flags, self.scales), strict=True):
            odds += weight * term
        return odds


def _terms(signals: Floats, flags: Bools, scales: Sequence[Scale]) -> Iterator[tuple[Floats, float, float]]:
    """Yield the terms of rows, float64 (n,), each with its least weight and its penalty."""
    for values, scale in zip(signals.T, scales, strict=True):
        scaled = scale(values)
        lacking = np.isnan(scaled)
        linear = np.where(lacking, 0.0, scaled)
        if flags.shape[1]:  # a slope for each value of the first flag
            yield linear * flags[:, 0], _LEAST_SLOPE, _OF_SLOPE
            yield linear * ~flags[:, 0], _LEAST_SLOPE, _OF_SLOPE
        else:
            yield linear, _LEAST_SLOPE, _OF_SLOPE
        filled = np.where(lacking, scale.knots[0] if scale.knots else 0.0, scaled)
        for low, high in zip(scale.knots[:-1], scale.knots[1:], strict=True):
            yield np.clip((filled - low) / (high - low), 0.0, 1.0), 0.0, _OF_RAMP
        if scale.may_lack:
            yield lacking.astype(np.float64), -np.inf, _OF_FLAG
    for flag in flags.T:
        yield flag.astype(np.float64), -np.inf, _OF_FLAG


def fit_correctness(signals: Floats, flags: Bools, right: Bools, *, plain: int = 0) -> Correctness:
    """Fit the probability of being right.

    The weights minimise the negative log likelihood plus half of the penalties times their squares, with one more right
    and one more wrong row at the centre, so that no model is infallible.

    Args:
        signals: Float (n, F), NaN where a row lacks one; the probability rises with each.
        flags: Bool (n, A).
        right: Whether each answer is right, bool (n,).
        plain: How many of the last signals are log odds or other numbers, whatever their values.
    """
    signals = np.asarray(signals, dtype=np.float64)
    first_plain = signals.shape[1] - plain
    scales = tuple(Scale.of(values, plain=index >= first_plain) for index, values in enumerate(signals.T))
    terms = list(_terms(signals, flags, scales))
    design = np.column_stack([np.ones(len(signals)), *(term for term, _, _ in terms)])
    lowest = np.array([-np.inf, *(least for _, least, _ in terms)])
    weights = _solve(design, lowest, np.array([0.0, *(penalty for _, _, penalty in terms)]), right)
    return Correctness(scales, float(weights[0]), tuple(weights[1:].tolist()))


def _solve(design: Floats, lowest: Floats, penalties: Floats, right: Bools) -> Floats:
    """Return the weights, float64 (P,), the intercept's first, by projected Newton steps (Bertsekas, 1982).

    Args:
        design: The terms of rows as columns after one of ones, float64 (n, P).
        lowest: The least weights, float64 (P,).
        penalties: Of their squares, float64 (P,).
        right: Whether each answer is right, bool (n,).
    """
    from scipy.special import expit

    n, p = design.shape
    signs = np.where(right, 1.0, -1.0)

    def loss(weights: Floats) -> float:
        # One right and one wrong row at the centre.
        margins = np.append(signs * np.vecdot(design, weights), [weights[0], -weights[0]])
        return float(np.logaddexp(0.0, -margins).sum() + 0.5 * penalties @ weights**2)

    weights = np.maximum(np.zeros(p), lowest)
    value = loss(weights)
    for _ in range(_MOST_STEPS):
        shares, of_centre = expit(np.vecdot(design, weights)), expit(weights[0])
        slope = np.vecdot(design.T, shares - right) + penalties * weights
        slope[0] += 2.0 * of_centre - 1.0
        free = ~((weights <= lowest) & (slope > 0))
        if np.abs(slope[free]).max(initial=0.0) <= _TOLERANCE * n:
            break
        curvature = (design.T * (shares * (1.0 - shares))) @ design + np.diag(penalties)
        curvature[0, 0] += 2.0 * of_centre * (1.0 - of_centre)
        step, size = np.zeros(p), 1.0
        step[free] = -np.linalg.solve(curvature[np.ix_(free, free)], slope[free])
        while True:
            moved = np.maximum(weights + size * step, lowest)
            moved_value = loss(moved)
            if moved_value <= value + 1e-4 * float(slope @ (moved - weights)) or size < _SHORTEST:
                break
            size /= 2.0
        if moved_value >= value:
            break
        weights, value = moved, moved_value
    return weights
