"""How probable it is that an answer is right, by signals such as the confidences in it: a logistic regression.

The log odds are a sum of functions that rise with each signal, linear or linear between knots, and of terms for flags,
such as whether an earlier answer is the same. The form and the penalty are chosen by cross-validation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np

from cauc_ray.numbers.types import Bools, Floats

ScaleKind: TypeAlias = Literal["share", "log-share", "number"]
# What a fit is made of: linear terms, or also ramps between knots.
Form: TypeAlias = Literal["linear", "ramps"]

PENALTIES = (0.3, 3.0, 30.0)
FORMS: tuple[Form, ...] = get_args(Form)
N_FOLDS, N_RAMPS = 5, 8
# Rows that the form and the penalty are chosen on; the fit itself has all.
MOST_CHOOSING = 4000
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
        form: What its terms are.
        penalty: Of the squares of its weights.
        scales: Of each of F signals.
        intercept: Log odds of a row whose signals are at their centres, without flags.
        weights: Of the terms.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "allow_inf_nan": False}

    form: Form
    penalty: float
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
        for weight, (term, _) in zip(self.weights, _terms(signals, flags, self.scales, self.form), strict=True):
            odds += weight * term
        return odds


def _terms(signals: Floats, flags: Bools, scales: Sequence[Scale], form: Form) -> Iterator[tuple[Floats, float]]:
    """Yield the terms of rows, float64 (n,), each with its least weight."""
    for values, scale in zip(signals.T, scales, strict=True):
        scaled = scale(values)
        lacking = np.isnan(scaled)
        linear = np.where(lacking, 0.0, scaled)
        if flags.shape[1]:  # a slope for each value of the first flag
            yield linear * flags[:, 0], _LEAST_SLOPE
            yield linear * ~flags[:, 0], _LEAST_SLOPE
        else:
            yield linear, _LEAST_SLOPE
        if form == "ramps":
            filled = np.where(lacking, scale.knots[0] if scale.knots else 0.0, scaled)
            for low, high in zip(scale.knots[:-1], scale.knots[1:], strict=True):
                yield np.clip((filled - low) / (high - low), 0.0, 1.0), 0.0
        if scale.may_lack:
            yield lacking.astype(np.float64), -np.inf
    for flag in flags.T:
        yield flag.astype(np.float64), -np.inf


def fit_correctness(
    signals: Floats, flags: Bools, right: Bools, like: Correctness | None = None, *, plain: int = 0
) -> Correctness:
    """Fit the probability of being right.

    The weights minimise the negative log likelihood plus half of the penalty times their squares, with one more right
    and one more wrong row at the centre, so that no model is infallible.

    Args:
        signals: Float (n, F), NaN where a row lacks one; the probability rises with each.
        flags: Bool (n, A).
        right: Whether each answer is right, bool (n,).
        like: A fit whose form and penalty to take; None to choose them by cross-validation.
        plain: How many of the last signals are log odds or other numbers, whatever their values.
    """
    signals = np.asarray(signals, dtype=np.float64)
    form: Form = "linear" if like is None else like.form
    penalty = PENALTIES[-1] if like is None else like.penalty
    if like is None and len(right) >= 2 * N_FOLDS:
        form, penalty = _chosen(signals, flags, right, plain)
    scales = _scales(signals, plain)
    weights = _solve(*_design(signals, flags, scales, form), right, penalty)
    return Correctness(form, penalty, scales, float(weights[0]), tuple(weights[1:].tolist()))


def fold_of(n: int) -> Any:
    """Return the fold of each of n rows, int (n,), drawn at random."""
    return np.random.default_rng(0).permutation(n) % N_FOLDS


def _scales(signals: Floats, plain: int) -> tuple[Scale, ...]:
    first_plain = signals.shape[1] - plain
    return tuple(Scale.of(values, plain=index >= first_plain) for index, values in enumerate(signals.T))


def _chosen(signals: Floats, flags: Bools, right: Bools, plain: int) -> tuple[Form, float]:
    """Return the form and the penalty of the least log loss on left-out folds."""
    some = np.random.default_rng(0).permutation(len(right))[:MOST_CHOOSING]
    signals, flags, right = signals[some], flags[some], right[some]
    folds = fold_of(len(right))
    losses = dict.fromkeys([(form, penalty) for form in FORMS for penalty in PENALTIES[::-1]], 0.0)
    for fold in range(N_FOLDS):
        seen, held_out = folds != fold, folds == fold
        scales = _scales(signals[seen], plain)
        for form in FORMS:
            design, lowest = _design(signals, flags, scales, form)
            weights: Floats | None = None
            for penalty in PENALTIES[::-1]:
                weights = _solve(design[seen], lowest, right[seen], penalty, weights)
                signed = np.where(right[held_out], -1.0, 1.0) * np.vecdot(design[held_out], weights)
                losses[form, penalty] += float(np.logaddexp(0.0, signed).sum())
    return min(losses, key=losses.__getitem__)


def _design(signals: Floats, flags: Bools, scales: Sequence[Scale], form: Form) -> tuple[Floats, Floats]:
    """Return the terms of rows as columns after one of ones, float64 (n, P), and their least weights, float64 (P,)."""
    terms = list(_terms(signals, flags, scales, form))
    lowest = np.array([-np.inf, *(least for _, least in terms)])
    return np.column_stack([np.ones(len(signals)), *(term for term, _ in terms)]), lowest


def _solve(design: Floats, lowest: Floats, right: Bools, penalty: float, start: Floats | None = None) -> Floats:
    """Return the weights, float64 (P,), the intercept's first, by projected Newton steps (Bertsekas, 1982)."""
    from scipy.special import expit

    n, p = design.shape
    signs, penalties = np.where(right, 1.0, -1.0), np.full(p, penalty)
    penalties[0] = 0.0

    def loss(weights: Floats) -> float:
        # One right and one wrong row at the centre.
        margins = np.append(signs * np.vecdot(design, weights), [weights[0], -weights[0]])
        return float(np.logaddexp(0.0, -margins).sum() + 0.5 * penalties @ weights**2)

    weights = np.maximum(np.zeros(p), lowest) if start is None else start
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
