"""Thresholds whose risk is certified: fixed-sequence testing with exact binomial tails.

The risk is that of every answer given before the last stage, whichever stage gave it. A threshold's hypothesis is that
its risk is above the limit; among the rows that it accepts, errors are binomial, which makes the tail an exact
p-value. Thresholds are tested one after another, each at the full level, in an order fixed before validation is
looked at, up to the first that is not rejected: that a wrong one is ever accepted then has no more than the
probability of one test (Angelopoulos et al., "Learn then Test"). The order is fixed by the calibration split: it names
the thresholds, by the shares of rows that they accept, and where to begin: at the one of least p-value there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import ConfigError, DataError, RiskError
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.intervals import binomial_tail, least_accepted, risk_upper_bound
from cauc_ray.numbers.sweep import Frontier, sweep
from cauc_ray.numbers.types import Bools, Floats, Ints

# Each threshold accepts a hundredth more of the calibration rows than the one before it: what the steps leave of
# coverage, and with finer ones noise would more often end the sequence early.
N_STEPS = 100

_SPELLING = re.compile(r"risk<=([0-9]*\.?[0-9]+)@([0-9]*\.?[0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class RiskLimit:
    """A risk that answers given early shall not exceed, and the confidence of saying so; both between 0 and 1."""

    risk: float
    confidence: float

    def __post_init__(self) -> None:
        for name, value in (("risk", self.risk), ("confidence", self.confidence)):
            if not 0 < value < 1:
                raise ConfigError(f"a {name} to certify lies between 0 and 1, got {value:g}")

    @classmethod
    def parse(cls, text: str) -> RiskLimit:
        """Read "risk<=RISK@CONFIDENCE". Raises ConfigError for any other text.

        >>> RiskLimit.parse("risk<=0.05@0.95")
        RiskLimit(risk=0.05, confidence=0.95)
        """
        matched = _SPELLING.fullmatch(text)
        if matched is None:
            raise ConfigError(f"{text!r} is not of the form risk<=RISK@CONFIDENCE, as risk<=0.05@0.95")
        return cls(float(matched[1]), float(matched[2]))


@dataclass(frozen=True, slots=True)
class EarlyAnswers:
    """How many of n rows are answered before the last stage, and how many of these wrongly, at every threshold.

    n_accepted, n_wrong: int (P,), at the frontier's points.   highest: float64 (n,), the threshold up to which each row
    is answered early.
    """

    n: int
    n_accepted: Ints
    n_wrong: Ints
    highest: Floats
    frontier: Frontier

    def at(self, thresholds: Floats) -> tuple[Ints, Ints]:
        """Return n_accepted and n_wrong at any thresholds."""
        points = self.frontier.index(thresholds)
        return self.n_accepted[points], self.n_wrong[points]

    def plug_in(self, risk: float) -> tuple[float, int] | None:
        """Return the threshold that accepts most of those whose risk on these rows is at most so much, and how many.

        None where there is none. It promises nothing: chosen among many for its luck, it exceeds the risk about every
        other time.
        """
        kept = np.flatnonzero((self.n_accepted > 0) & (self.n_wrong <= risk * self.n_accepted))
        if not len(kept):
            return None
        return float(self.frontier.settings[kept[0]]), int(self.n_accepted[kept[0]])


@dataclass(frozen=True, slots=True)
class CertifiedThreshold:
    """A threshold whose risk is certified, by what validation showed of it.

    n_accepted: of n rows.   upper_bound: of the risk, exact, at the limit's confidence.
    """

    threshold: float
    n: int
    n_accepted: int
    n_wrong: int
    upper_bound: float


def early_answers(confidences: Floats, correct: Bools) -> EarlyAnswers:
    """Count what is answered early at every threshold.

    confidences: float64 (n, S - 1), of the stages but the last.   correct: bool (n, S - 1), whether a row is right if
    it stops there. Raises DataError where there are no rows or no such stages.
    """
    if confidences.ndim != 2 or correct.shape != confidences.shape or not confidences.size:
        raise DataError(
            f"a certificate needs confidences and correctness of the same rows at one stage or more before the last, "
            f"got {confidences.shape} and {correct.shape}"
        )
    n, m = confidences.shape
    # With a last stage that is always right, errors are the others'; as nothing else has a cost, the cost is deferral.
    answers = np.concatenate([correct, np.ones((n, 1), dtype=bool)], axis=1).astype(np.int32)
    costs = Costs("rows", np.append(np.zeros(m), 1.0))
    frontier = sweep(confidences, answers, np.ones(n, dtype=np.int32), costs)
    n_deferred, n_right = (np.rint(n * part).astype(np.int64) for part in (frontier.cost, frontier.quality))
    return EarlyAnswers(n, n - n_deferred, n - n_right, confidences.max(axis=1), frontier)


def certify(calibration: EarlyAnswers, validation: EarlyAnswers, limit: RiskLimit) -> CertifiedThreshold:
    """Return the threshold of most coverage whose risk is certified on validation.

    With probability limit.confidence over the validation rows, its risk on inputs of their distribution is at most
    limit.risk, for each calibration split. Raises RiskError where none is certified.
    """
    sequence = order_of_tests(calibration, limit)
    accepted, wrong = validation.at(sequence)
    last = -1
    for step, (n_accepted, n_wrong) in enumerate(zip(accepted.tolist(), wrong.tolist(), strict=True)):
        if binomial_tail(n_wrong, n_accepted, limit.risk) > 1 - limit.confidence:
            break
        last = step
    if last < 0:
        raise RiskError(_why_none(float(sequence[0]), int(accepted[0]), int(wrong[0]), limit))
    n_accepted, n_wrong = int(accepted[last]), int(wrong[last])
    bound = risk_upper_bound(n_wrong, n_accepted, limit.confidence)
    return CertifiedThreshold(float(sequence[last]), validation.n, n_accepted, n_wrong, bound)


def order_of_tests(calibration: EarlyAnswers, limit: RiskLimit) -> Floats:
    """Return the thresholds to test in their order, falling, float64 (at most N_STEPS,).

    The first is that of the least p-value on the calibration rows, the highest among equals; after it, all lower ones.
    """
    ranked = np.sort(calibration.highest)[::-1]
    ranks = np.unique((np.arange(1, N_STEPS + 1) * len(ranked) + N_STEPS - 1) // N_STEPS)
    above, below = ranked[ranks - 1], np.append(ranked, 0.0)[ranks]
    grid = np.unique(below + (above - below) / 2)[::-1]
    accepted, wrong = calibration.at(grid)
    tails = [
        binomial_tail(n_wrong, n_accepted, limit.risk)
        for n_accepted, n_wrong in zip(accepted.tolist(), wrong.tolist(), strict=True)
    ]
    sequence: Floats = grid[int(np.argmin(tails)) :]
    return sequence


def _why_none(threshold: float, n_accepted: int, n_wrong: int, limit: RiskLimit) -> str:
    bound = risk_upper_bound(n_wrong, n_accepted, limit.confidence)
    return (
        f"no threshold is certified: at {threshold:.4g}, where calibration has the strongest evidence, {n_wrong:,} of "
        f"the {n_accepted:,} validation examples answered early are wrong, so that the risk may be {100 * bound:.3g} % "
        f"at {100 * limit.confidence:g} % confidence, and {100 * limit.risk:g} % is asked for; allow more risk or less "
        f"confidence, or label more validation examples (it takes {least_accepted(limit.risk, limit.confidence):,} "
        "answered early even if none is wrong)"
    )
