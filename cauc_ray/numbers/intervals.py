"""Confidence intervals and tests of shares, differences and means; exact for counts of rows.

scipy.special is imported inside functions, which keeps the import of cauc_ray fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Ints

# Of an established sign, of two-sided intervals of differences, and of all of several together.
ERROR_RATE = 0.05
# Rows of a class that the chi-square test needs.
FEWEST_EXPECTED = 5
# Samples of a bootstrap.
N_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Share:
    """A share of n rows with its 95 % Wilson interval; all NaN if n is 0.

    Attributes:
        value: The share.
        low: Lower end of the interval.
        high: Upper end of the interval.
        n: Number of rows.
    """

    value: float
    low: float
    high: float
    n: int


def share(n_hits: float, n: float, error_rate: float = ERROR_RATE) -> Share:
    """Return n_hits / n with its score interval (Wilson, JASA 1927).   error_rate: of the interval.

    >>> share(90, 100)
    Share(value=0.9, low=0.8256343384950865, high=0.9447708629393249, n=100)
    """
    if n == 0:
        return Share(float("nan"), float("nan"), float("nan"), 0)
    z = NormalDist().inv_cdf(1 - error_rate / 2)
    value = n_hits / n
    centre = (value + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (value * (1 - value) / n + z * z / (4 * n * n)) ** 0.5
    # At 0 and 1 the interval ends exactly there, without rounding.
    low = 0.0 if n_hits == 0 else centre - half
    high = 1.0 if n_hits == n else centre + half
    return Share(value, low, high, int(n))


def share_to_come(n_hits: int, n: int, n_later: int | None = None) -> Share:
    """Return n_hits / n with an interval of the share that n_later other rows of the same kind will have, or more rows.

    Both samples vary, so the difference of their shares does as a share of n n_later / (n + n_later) rows does: the
    score interval for these. The share of all such rows lies in it more often than 95 times in 100.

    Args:
        n_hits: Rows that count.
        n: All rows.
        n_later: Number of other rows; None for n.

    >>> share_to_come(90, 100)
    Share(value=0.9, low=0.7863976856252035, high=0.9565242350681096, n=100)
    """
    weight = 0.5 if n_later is None else n_later / (n + n_later)
    later = share(n_hits * weight, n * weight)
    return Share(later.value, later.low, later.high, n)


def binomial_tail(n_hits: int, n: int, probability: float) -> float:
    """Return P(X <= n_hits) for X ~ Binomial(n, probability).

    This is the p-value of the hypothesis that the error rate is at least `probability`, if n_hits of n rows are wrong.

    >>> binomial_tail(0, 59, 0.05)  # 0.95 ** 59
    0.0484...
    """
    from scipy.special import betaincc

    # As the upper tail of a beta distribution, which avoids computing 1 - probability and losing digits.
    return 1.0 if n_hits == n else float(betaincc(n_hits + 1, n - n_hits, probability))


def risk_upper_bound(n_wrong: int, n: int, confidence: float) -> float:
    """Return the exact upper confidence bound of a risk (Clopper and Pearson, Biometrika 1934), one-sided.

    The largest risk at which this few or fewer wrong rows of n have a probability of 1 - confidence; 1 if n is 0.

    >>> risk_upper_bound(0, 59, 0.95)  # 1 - 0.05 ** (1 / 59)
    0.0495...
    """
    from scipy.special import betainccinv

    return 1.0 if n_wrong == n else float(betainccinv(n_wrong + 1, n - n_wrong, 1 - confidence))


def exact_share(n_hits: int, n: int, error_rate: float) -> Share:
    """Return n_hits / n with its exact interval (Clopper and Pearson, 1934).   error_rate: of the interval.

    >>> exact_share(9, 10, 0.05)
    Share(value=0.9, low=0.554..., high=0.997..., n=10)
    """
    confidence = 1 - error_rate / 2
    low, high = 1 - risk_upper_bound(n - n_hits, n, confidence), risk_upper_bound(n_hits, n, confidence)
    return Share(n_hits / n, low, high, n)


def least_accepted(risk: float, confidence: float) -> int:
    """Return the smallest number of rows, all of them right, whose risk bound is at most the given risk.

    >>> least_accepted(0.05, 0.95)
    59
    """
    n = max(1, math.ceil(math.log1p(-confidence) / math.log1p(-risk)) - 1)
    while binomial_tail(0, n, risk) > 1 - confidence:
        n += 1
    return n


@dataclass(frozen=True, slots=True)
class Signs:
    """A paired comparison on n rows, by the sign test.

    Attributes:
        n: Rows.
        n_gain: Rows where only the first method is right.
        n_loss: Rows where only the second method is right.
        rate: (n_gain - n_loss) / n.
        p_gain: One-sided exact p-value of this many gains, if gains and losses were equally likely.
        p_loss: The same of losses.
    """

    n: int
    n_gain: int
    n_loss: int
    rate: float
    p_gain: float
    p_loss: float

    @property
    def gains(self) -> bool:
        """Return whether the first method is significantly more often right."""
        return self.p_gain <= ERROR_RATE

    @property
    def p_value(self) -> float:
        """Return the two-sided p-value of equal accuracy."""
        return min(1.0, 2 * min(self.p_gain, self.p_loss))


def signs(n_gain: int, n_loss: int, n: int) -> Signs:
    """Test gains against losses: the sign test (McNemar, Psychometrika 1947), one-sided and exact.

    If no row differs, both p-values are 1.

    Raises:
        DataError: n is not positive, or less than n_gain + n_loss.

    >>> test = signs(9, 1, 100)
    >>> round(test.p_gain, 4), test.gains
    (0.0107, True)
    """
    n_differ = n_gain + n_loss
    if n < 1 or min(n_gain, n_loss) < 0 or n_differ > n:
        raise DataError(f"gains and losses must be at least 0 and at most the rows, got {n_gain} and {n_loss} of {n}")
    p_gain, p_loss = (binomial_tail(hits, n_differ, 0.5) for hits in (n_loss, n_gain))
    return Signs(n, n_gain, n_loss, (n_gain - n_loss) / n, p_gain, p_loss)


def signs_of(correct: Bools, reference: Bools) -> Signs:
    """Return the signs of one method against another.   correct, reference: bool (N,), right answers.

    Raises DataError without rows, or if the two differ in length.
    """
    if correct.shape != reference.shape or correct.ndim != 1 or not len(correct):
        raise DataError(
            f"a paired difference needs two methods on the same rows, both (N,) with N at least 1; "
            f"got {correct.shape} and {reference.shape}"
        )
    return signs(int(np.sum(correct & ~reference)), int(np.sum(reference & ~correct)), len(correct))


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of two accuracies on the same n rows.

    Attributes:
        low: Lower end of the percentile bootstrap interval.
        high: Upper end.
        p_value: Two-sided, of equal accuracy.
    """

    value: float
    low: float
    high: float
    n: int
    p_value: float


def paired_difference(correct_a: Bools, correct_b: Bools, seed: int = 0) -> Difference:
    """Return the accuracy of a less that of b, with its paired 95 % percentile bootstrap interval over rows.

    A row contributes -1, 0 or +1, so drawing rows with replacement is drawing three counts from a multinomial with the
    three shares: the bootstrap over rows (Efron, Annals of Statistics 1979) without drawing single rows. The p-value is
    that of the sign test.

    Args:
        correct_a: Right answers of a, bool (N,).
        correct_b: Right answers of b, bool (N,), in the same order.
        seed: Random seed.

    Raises:
        DataError: As signs_of does.

    >>> paired_difference(np.array([True] * 90 + [False] * 10), np.array([True] * 80 + [False] * 20))
    Difference(value=0.1, low=0.05, high=0.16, n=100, p_value=0.001953125)
    """
    counts = signs_of(correct_a, correct_b)
    n, cells = counts.n, np.array([counts.n_loss, counts.n - counts.n_gain - counts.n_loss, counts.n_gain])
    drawn = np.random.default_rng(seed).multinomial(n, cells / n, size=N_RESAMPLES)
    low, high = np.quantile((drawn[:, 2] - drawn[:, 0]) / n, [ERROR_RATE / 2, 1 - ERROR_RATE / 2])
    return Difference(counts.rate, float(low), float(high), n, counts.p_value)


def holm(p_values: Floats) -> tuple[Floats, Floats]:
    """Adjust the p-values of several hypotheses so that any false rejection is rare (Holm, Scand. J. Statist. 1979).

    Args:
        p_values: Of the hypotheses, float (H,).

    Returns:
        Adjusted p-values, float (H,), and the error rate of each hypothesis' own interval, float (H,): of the i-th
        smallest p-value ERROR_RATE / (H - i), i from 0.

    >>> adjusted, error_rates = holm(np.array([0.04, 0.01]))
    >>> adjusted, error_rates
    (array([0.04, 0.02]), array([0.05 , 0.025]))
    """
    order = np.argsort(p_values, kind="stable")
    n_left = np.arange(len(order), 0, -1)
    adjusted, error_rates = np.empty(len(order)), np.empty(len(order))
    adjusted[order] = np.minimum(1.0, np.maximum.accumulate(p_values[order] * n_left))
    error_rates[order] = ERROR_RATE / n_left
    return adjusted, error_rates


@dataclass(frozen=True, slots=True)
class NormalTest:
    """A statistic that is standard normal under the null hypothesis, with its two-sided p-value."""

    z: float

    @property
    def p_value(self) -> float:
        """Return the two-sided p-value."""
        return math.erfc(abs(self.z) / math.sqrt(2))

    @property
    def p_above(self) -> float:
        """Return the one-sided p-value of a statistic this large or larger."""
        return math.erfc(self.z / math.sqrt(2)) / 2


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of n independent rows and their standard deviation, in the same unit."""

    value: float
    deviation: float
    n: int

    @classmethod
    def of(cls, values: Floats) -> Mean:
        """Return the mean of values, float (n,)."""
        return cls(float(values.mean()), float(np.std(values)), len(values))

    @classmethod
    def of_sums(cls, n: int, total: float, squares: float) -> Mean:
        """Return the mean of n values from their sum and the sum of their squares."""
        mean = total / n
        return cls(mean, math.sqrt(max(0.0, squares / n - mean**2)), n)


def mean_difference(first: Mean, second: Mean) -> NormalTest:
    """Compare two means by the two-sample z test, whose normal limit needs dozens of rows.

    Both samples are of one population unless something has changed, whose deviation is that of all rows together: where
    few rows differ from the others, a small sample has none of them, and would by itself not vary at all. Means that
    differ by float32 rounding are equal.

    >>> round(mean_difference(Mean(1.1, 0.5, 400), Mean(1.0, 0.5, 400)).z, 3)
    2.814
    """
    difference = first.value - second.value
    if abs(difference) <= 1e-6 * max(abs(first.value), abs(second.value)):
        return NormalTest(0.0)
    share = first.n / (first.n + second.n)
    variance = share * first.deviation**2 + (1 - share) * second.deviation**2 + share * (1 - share) * difference**2
    return NormalTest(difference / math.sqrt(variance * (1 / first.n + 1 / second.n)))


def label_shift(one: Ints, two: Ints) -> float:
    """Return the p-value of two samples' labels having the same shares, by the chi-square test (Pearson, 1900).

    Classes of which either sample is expected to have fewer than FEWEST_EXPECTED rows count as one.

    Args:
        one: Labels of a sample, int (N,).
        two: Labels of the other sample, int (N',).

    >>> round(label_shift(np.repeat([0, 1], [60, 40]), np.repeat([0, 1], [45, 55])), 3)
    0.034
    """
    from scipy.special import chdtrc

    classes = np.unique(np.concatenate([one, two]), return_inverse=True)[1]
    counts = np.stack([np.bincount(of, minlength=int(classes.max()) + 1) for of in np.split(classes, [len(one)])])
    shares = counts.sum(axis=1, keepdims=True) / counts.sum()
    rare = (shares * counts.sum(axis=0)).min(axis=0) < FEWEST_EXPECTED
    counts = np.column_stack([counts[:, ~rare], counts[:, rare].sum(axis=1)])
    expected = shares * counts.sum(axis=0)
    common = expected.min(axis=0) >= FEWEST_EXPECTED  # all rare classes together may be rare, too
    if common.sum() < 2:
        return 1.0
    squares = (counts - expected)[:, common] ** 2 / expected[:, common]
    return float(chdtrc(common.sum() - 1, squares.sum()))


def ranking(confidences: Floats, correct: Bools) -> float | None:
    """Return the area under the ROC curve of confidences against correctness (Mann and Whitney, 1947): 1/2 is chance.

    Args:
        confidences: Confidences, float (N,); half of the ties count.
        correct: Which answers are right, bool (N,).

    Returns:
        The area; None if all rows are right or all are wrong.

    >>> ranking(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, True, False, False]))
    1.0
    """
    right, wrong = np.sort(confidences[correct]), np.sort(confidences[~correct])
    if not (n_pairs := len(right) * len(wrong)):
        return None
    # Quicker than the ranks of all: sorting values is cheaper than sorting positions.
    below, not_above = (int(np.searchsorted(right, wrong, side).sum()) for side in ("left", "right"))
    return (n_pairs - (below + not_above) / 2) / n_pairs
