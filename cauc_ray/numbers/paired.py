"""The difference of two methods' accuracies on the same rows, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools


@dataclass(frozen=True, slots=True)
class Difference:
    """An accuracy less another on the same n rows.

    low, high: percentile bootstrap interval.   p_value: two-sided, of the two being equally good.
    """

    value: float
    low: float
    high: float
    n: int
    p_value: float


def paired_difference(
    correct_a: Bools, correct_b: Bools, resamples: int = 10_000, level: float = 0.95, seed: int = 0
) -> Difference:
    """Return the accuracy of a less that of b, with its paired percentile bootstrap interval over rows.

    correct_a, correct_b: bool (N,), whether each method is right on each row, in the same order.
    A row enters only as -1, 0 or +1: rows drawn with replacement are three counts drawn from a multinomial of the
    three shares. That is the bootstrap over rows (Efron, Annals of Statistics 1979) itself, without drawing a row.
    The p-value is exact: McNemar's test (Psychometrika 1947) by the binomial of the rows where one alone is right.
    Where no row differs, the interval is the point 0. Raises DataError without rows, or where the two differ in length.

    >>> paired_difference(np.array([True] * 90 + [False] * 10), np.array([True] * 80 + [False] * 20))
    Difference(value=0.1, low=0.05, high=0.16, n=100, p_value=0.001953125)
    """
    if correct_a.shape != correct_b.shape or correct_a.ndim != 1 or not len(correct_a):
        raise DataError(
            f"a paired difference needs two methods on the same rows, (N,) and at least one; "
            f"got {correct_a.shape} and {correct_b.shape}"
        )
    n = len(correct_a)
    n_wins, n_losses = int((correct_a & ~correct_b).sum()), int((correct_b & ~correct_a).sum())
    cells = np.array([n_losses, n - n_wins - n_losses, n_wins])
    drawn = np.random.default_rng(seed).multinomial(n, cells / n, size=resamples)
    tail = (1 - level) / 2
    low, high = np.quantile((drawn[:, 2] - drawn[:, 0]) / n, [tail, 1 - tail])
    return Difference((n_wins - n_losses) / n, float(low), float(high), n, _sign_test(n_wins, n_losses))


def _sign_test(n_wins: int, n_losses: int) -> float:
    """Return the two-sided p-value of so many wins and losses, were they equally likely."""
    n, fewer = n_wins + n_losses, min(n_wins, n_losses)
    # log C(n, k) for k = 0..fewer: the coefficients themselves pass the largest float from n = 1030 on.
    steps = np.log((n - np.arange(fewer)) / np.arange(1, fewer + 1))
    log_coefficients = np.concatenate([[0.0], np.cumsum(steps)])
    return min(1.0, 2 * float(np.exp(log_coefficients - n * np.log(2)).sum()))
