"""Guarantees: the paper's propositions as numbers, and thresholds whose risk is certified.

The propositions are about conditional accuracies, which are unknown. They are estimated over bins of equal width, split
once more at the threshold so that each bin is accepted or deferred as a whole. For these estimates the inequalities are
valid up to rounding on every sample; the estimates themselves may differ from the population's values.

A certificate is fixed-sequence testing with exact binomial tails.
The risk is that of every answer given before the last stage, whichever stage gave it. A threshold's hypothesis is that
its risk is above the limit; among the rows that it accepts, errors are binomial, which makes the tail an exact
p-value. Thresholds are tested one after another, each at the full level, in an order fixed before validation is
looked at, up to the first that is not rejected: that a wrong one is ever accepted then has no more than the
probability of one test (Angelopoulos et al., "Learn then Test"). The calibration split fixes the order: the
thresholds, by the shares of rows that they accept, and the first one, which has the least p-value there.

Of several segments, a threshold is rejected where its hypothesis is rejected in each of them at the full level. That it
is rejected falsely in any is then no more likely than in one (Berger, Technometrics 1982).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np

from cauc_ray.errors import ConfigError, DataError, OptionError, RiskError
from cauc_ray.numbers.chain import Costs
from cauc_ray.numbers.intervals import binomial_tail, least_accepted, risk_upper_bound
from cauc_ray.numbers.metrics import EDGES, CalibrationSums, bins_of
from cauc_ray.numbers.sweep import Frontier, sweep
from cauc_ray.numbers.types import Bools, Floats, Ints

# Each threshold accepts a hundredth more of the calibration rows than the one before it: what the steps leave of
# coverage, and with finer ones noise would more often end the sequence early.
N_STEPS = 100
_SPELLING = re.compile(r"risk<=([0-9]*\.?[0-9]+)@([0-9]*\.?[0-9]+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class StageGuarantees:
    """Propositions 1 and 2 (in general form) on the n rows that reached a stage; losses are errors plus weighed costs.

    Attributes:
        epsilon: Estimate of E|eta(P) - P|.
        epsilon_by_chance: What it would be on average if confidences were calibrated.
        coverage: The share of rows that is accepted.
        accepted_accuracy: Of these rows.
        accepted_accuracy_bound: Its lower bound, threshold - epsilon / coverage; both are NaN if no row is accepted.
        threshold_regret: Estimate of the excess loss over an oracle that knows both conditional losses and sees the
            confidence.
        threshold_regret_bound: Sum of epsilon and fallback_variation.
        fallback_variation: Estimate of Delta_fb = E|L_fb(P) - reference loss|.
        fallback_loss: Its mean.
        reference_loss: 1 - threshold.
        cost_weight: What a unit of cost counts, in errors.
    """

    n: int
    epsilon: float
    epsilon_by_chance: float
    coverage: float
    accepted_accuracy: float
    accepted_accuracy_bound: float
    threshold_regret: float
    threshold_regret_bound: float
    fallback_variation: float
    fallback_loss: float
    reference_loss: float
    cost_weight: float

    def as_json(self) -> dict[str, float | None]:
        """Return the numbers by name; None for accuracies if no row was accepted."""
        return {name: None if math.isnan(value) else value for name, value in asdict(self).items()}


def stage_guarantees(
    confidences: Floats, correct: Bools, fallback_correct: Bools, fallback_costs: Floats, threshold: float
) -> StageGuarantees:
    """Evaluate both propositions at a threshold; a confidence equal to it is accepted.

    A threshold is best where it is 1 less the fallback's loss. The weight of a unit of cost is therefore the one at
    which the fallback's mean loss is 1 - threshold, so that only its variation is left; 0 where the threshold is above
    the fallback's accuracy, which no cost explains.

    Args:
        confidences: Float (n,) in [0, 1], of the rows that reached the stage.
        correct: Bool (n,), whether its answer is right.
        fallback_correct: Bool (n,), whether the rest of the cascade is right where the row goes on, also for rows that
            do not.
        fallback_costs: Float (n,), what the rest costs.
        threshold: Confidence at which an answer is accepted.

    >>> found = stage_guarantees(np.array([0.9, 0.9, 0.6]), np.array([True, False, True]), np.ones(3), np.zeros(3), 0.8)
    >>> found.accepted_accuracy, found.accepted_accuracy_bound <= found.accepted_accuracy
    (0.5, True)
    """
    edges: Floats = np.union1d(EDGES, [threshold])
    index = bins_of(confidences, edges)

    def by_bin(values: Floats) -> Floats:
        return np.bincount(index, weights=values, minlength=len(edges) + 1).astype(np.float64)

    n, reference, accepted = len(correct), 1 - threshold, confidences >= threshold
    calibration = CalibrationSums.of(confidences, correct, edges)
    coverage = int(accepted.sum()) / n

    error, cost = 1 - float(fallback_correct.mean()), float(fallback_costs.mean())
    weight = max(0.0, (reference - error) / cost) if cost > 0 else 0.0
    of_fallback, of_accepting = by_bin(1.0 - fallback_correct + weight * fallback_costs), by_bin(1.0 - correct)
    taken = np.where(np.append(-np.inf, edges) >= threshold, of_accepting, of_fallback)
    variation = float(np.abs(of_fallback - reference * by_bin(np.ones(n))).sum()) / n
    return StageGuarantees(
        n=n,
        epsilon=calibration.error,
        epsilon_by_chance=calibration.error_by_chance,
        coverage=coverage,
        accepted_accuracy=float(correct[accepted].mean()) if coverage else math.nan,
        accepted_accuracy_bound=threshold - calibration.error / coverage if coverage else math.nan,
        threshold_regret=float((taken - np.minimum(of_accepting, of_fallback)).sum()) / n,
        threshold_regret_bound=calibration.error + variation,
        fallback_variation=variation,
        fallback_loss=error + weight * cost,
        reference_loss=reference,
        cost_weight=weight,
    )


@dataclass(frozen=True, slots=True)
class RiskLimit:
    """The largest allowed risk of early answers, and the confidence with which it is certified; both in (0, 1)."""

    risk: float
    confidence: float

    def __post_init__(self) -> None:
        for name, value in (("risk", self.risk), ("confidence", self.confidence)):
            if not 0 < value < 1:
                raise ConfigError(f"a {name} to certify must lie between 0 and 1, got {value:g}")

    @classmethod
    def parse(cls, text: str) -> RiskLimit:
        """Read "risk<=RISK@CONFIDENCE". Raises ConfigError for any other text.

        >>> RiskLimit.parse("risk<=0.05@0.95")
        RiskLimit(risk=0.05, confidence=0.95)
        """
        matched = _SPELLING.fullmatch(text)
        if matched is None:
            raise OptionError(
                f"{{certify}}: {text!r} is not of the form risk<=RISK@CONFIDENCE, such as risk<=0.05@0.95"
            )
        return cls(float(matched[1]), float(matched[2]))


@dataclass(frozen=True, slots=True)
class EarlyAnswers:
    """At every threshold: how many of n rows are answered before the last stage, and how many of these wrongly.

    Attributes:
        n_accepted: Rows answered early at the frontier's points, int (P,).
        n_wrong: Of these, rows answered wrongly, int (P,).
        highest: Float64 (n,), the highest threshold at which each row is answered early.
        frontier: Operating points, whose cost is the share of deferred rows.
        n_answerable: Rows that some stage before the last answers right.
    """

    n: int
    n_accepted: Ints
    n_wrong: Ints
    highest: Floats
    frontier: Frontier
    n_answerable: int

    def least_deferred(self, risk: float) -> float:
        """Return the share of rows that any rule of early answers defers at a risk of at most this, on these rows.

        With a share m of rows that no early stage answers right, it is (m - risk) / (1 - risk), where positive.
        """
        return max(0.0, (1 - self.n_answerable / self.n - risk) / (1 - risk))

    def at(self, thresholds: Floats) -> tuple[Ints, Ints]:
        """Return n_accepted and n_wrong at the given thresholds."""
        points = self.frontier.index(thresholds)
        return self.n_accepted[points], self.n_wrong[points]

    def plug_in(self, risk: float) -> tuple[float, int] | None:
        """Return the threshold of most coverage whose risk on these rows is within the limit, and its coverage in rows.

        None if there is none. It guarantees nothing: it is selected on the same rows, and on new ones its risk exceeds
        the limit about half of the time.
        """
        within = np.flatnonzero((self.n_accepted > 0) & (self.n_wrong <= risk * self.n_accepted))
        if not len(within):
            return None
        return float(self.frontier.settings[within[0]]), int(self.n_accepted[within[0]])


@dataclass(frozen=True, slots=True)
class CertifiedSegment:
    """A segment in which a risk is certified, too.

    Attributes:
        name: Value of the column.
        n: Its rows of validation.
        n_accepted: Rows answered early.
        n_wrong: Of these, rows answered wrongly.
    """

    name: str
    n: int
    n_accepted: int
    n_wrong: int


@dataclass(frozen=True, slots=True)
class CertifiedThreshold:
    """A threshold whose risk is certified, with its counts on validation.

    Attributes:
        threshold: The threshold.
        n: Rows of validation.
        n_accepted: Rows answered early.
        n_wrong: Of these, rows answered wrongly.
        upper_bound: Exact bound of the risk at the limit's confidence.
        segments: Segments in each of which the risk is certified.
    """

    threshold: float
    n: int
    n_accepted: int
    n_wrong: int
    upper_bound: float
    segments: tuple[CertifiedSegment, ...] = ()


def early_answers(confidences: Floats, correct: Bools) -> EarlyAnswers:
    """Count early answers at every threshold.

    Args:
        confidences: Float64 (n, S - 1), of the stages but the last.
        correct: Bool (n, S - 1), whether a row is right if it stops there.

    Raises:
        DataError: Without rows, or without such stages.
    """
    if confidences.ndim != 2 or correct.shape != confidences.shape or not confidences.size:
        raise DataError(
            f"a certificate needs confidences and correctness of the same rows at one stage or more before the last, "
            f"got {confidences.shape} and {correct.shape}"
        )
    n, m = confidences.shape
    # The last stage counts as always right, so errors are those of early answers; only it costs, so cost is deferral.
    answers = np.concatenate([correct, np.ones((n, 1), dtype=bool)], axis=1).astype(np.int32)
    costs = Costs("rows", np.append(np.zeros(m), 1.0))
    frontier = sweep(confidences, answers, np.ones(n, dtype=np.int32), costs)
    n_deferred, n_right = (np.rint(n * part).astype(np.int64) for part in (frontier.cost, frontier.quality))
    n_answerable = int(correct.any(axis=1).sum())
    return EarlyAnswers(n, n - n_deferred, n - n_right, confidences.max(axis=1), frontier, n_answerable)


def certify(
    calibration: EarlyAnswers,
    validation: EarlyAnswers,
    limit: RiskLimit,
    segments: Mapping[str, tuple[EarlyAnswers, EarlyAnswers]] = MappingProxyType({}),
) -> CertifiedThreshold:
    """Return the threshold of most coverage whose risk is certified on validation.

    With probability limit.confidence over the validation rows, its risk on inputs of their distribution is at most
    limit.risk, for each calibration split; with segments, in all of them together.

    Args:
        calibration: Early answers on calibration.
        validation: Early answers on validation.
        limit: Risk to certify.
        segments: Those of calibration and of validation in each segment, by name.

    Raises:
        RiskError: No threshold is certified, or no rule could be.
    """
    for name, part in {"": validation, **{name: later for name, (_, later) in segments.items()}}.items():
        require_certifiable(part.n_answerable, limit, name, " that a model before the last answers right")
    sequence = order_of_tests(calibration, limit, [earlier for earlier, _ in segments.values()])
    parts = {name: (later.n, *later.at(sequence)) for name, (_, later) in segments.items()}
    try:
        return tested(sequence, *validation.at(sequence), validation.n, limit, parts)
    except RiskError as error:
        least = validation.least_deferred(limit.risk)
        raise RiskError(f"{error}; any rule defers at least {100 * least:.3g} % for that risk") from None


def require_certifiable(n: int, limit: RiskLimit, segment: str = "", condition: str = "") -> None:
    """Raise RiskError unless so many validation rows, all answered early and right, would certify a risk.

    Args:
        n: Number of rows.
        limit: Risk to certify.
        segment: Name of their segment; empty for all rows.
        condition: Condition that these rows meet, for the message.
    """
    if n < least_accepted(limit.risk, limit.confidence):
        rows = f"{n:,} validation examples{_place(segment)}{condition}"
        raise RiskError(f"no threshold is certified, by any rule: with 0 of the {rows} wrong, {_above(0, n, limit)}")


def _place(segment: str) -> str:
    return f" in segment {segment!r}" if segment else ""


def tested(
    sequence: Floats,
    accepted: Ints,
    wrong: Ints,
    n: int,
    limit: RiskLimit,
    segments: Mapping[str, tuple[int, Ints, Ints]],
) -> CertifiedThreshold:
    """Return the last of some thresholds, in order, before the first that is not certified.

    Args:
        sequence: Thresholds in the order of their tests.
        accepted: Validation rows answered early at each of them.
        wrong: Of these, rows answered wrongly.
        n: Validation rows.
        limit: Risk to certify.
        segments: Rows of each segment, by name, and of these what accepted and wrong are of all; each is tested.

    Raises:
        RiskError: None is certified.
    """
    parts = segments or {"": (n, accepted, wrong)}
    p_values = np.array([_p_values(n_accepted, n_wrong, limit) for _, n_accepted, n_wrong in parts.values()])
    rejected = np.all(p_values <= 1 - limit.confidence, axis=0)
    last = (len(rejected) if rejected.all() else int(rejected.argmin())) - 1
    if last < 0:
        worst, (_, n_accepted, n_wrong) = list(parts.items())[int(p_values[:, 0].argmax())]
        raise RiskError(_why_none(float(sequence[0]), int(n_accepted[0]), int(n_wrong[0]), limit, worst))
    in_segments = tuple(
        CertifiedSegment(name, n_rows, int(n_accepted[last]), int(n_wrong[last]))
        for name, (n_rows, n_accepted, n_wrong) in segments.items()
    )
    bound = risk_upper_bound(int(wrong[last]), int(accepted[last]), limit.confidence)
    return CertifiedThreshold(float(sequence[last]), n, int(accepted[last]), int(wrong[last]), bound, in_segments)


def order_of_tests(calibration: EarlyAnswers, limit: RiskLimit, segments: Sequence[EarlyAnswers] = ()) -> Floats:
    """Return the thresholds to test in order, falling, float64 (at most N_STEPS,).

    The first has the smallest p-value on the calibration rows, or in the worst of the segments of these (the highest
    threshold among equals); all lower ones follow.
    """
    # What is answered early at every threshold, or at none, lies beyond the others.
    finite = calibration.highest[np.isfinite(calibration.highest)]
    lowest, highest = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    ranked = np.sort(np.clip(calibration.highest, lowest - 1, highest + 1))[::-1]
    ranks = np.unique((np.arange(1, N_STEPS + 1) * len(ranked) + N_STEPS - 1) // N_STEPS)
    above, below = ranked[ranks - 1], np.append(ranked, 0.0 if ranked[-1] >= 0 else ranked[-1] - 1)[ranks]
    grid = np.unique(below + (above - below) / 2)[::-1]
    worst = np.max([_p_values(*part.at(grid), limit) for part in segments or (calibration,)], axis=0)
    sequence: Floats = grid[int(worst.argmin()) :]
    return sequence


def strongest(accepted: Ints, wrong: Ints, limit: RiskLimit) -> int:
    """Return the index of the smallest p-value, the first among equals.   accepted, wrong: int (P,)."""
    return int(np.argmin(_p_values(accepted, wrong, limit)))


def _p_values(accepted: Ints, wrong: Ints, limit: RiskLimit) -> list[float]:
    pairs = zip(accepted.tolist(), wrong.tolist(), strict=True)
    return [binomial_tail(n_wrong, n_accepted, limit.risk) for n_accepted, n_wrong in pairs]


def _why_none(threshold: float, n_accepted: int, n_wrong: int, limit: RiskLimit, segment: str) -> str:
    return (
        f"no threshold is certified: at {threshold:.4g}, where calibration has the strongest evidence, {n_wrong:,} of "
        f"the {n_accepted:,} validation examples answered early{_place(segment)} are wrong, so "
        f"{_above(n_wrong, n_accepted, limit)}"
    )


def _above(n_wrong: int, n: int, limit: RiskLimit) -> str:
    bound = risk_upper_bound(n_wrong, n, limit.confidence)
    return (
        f"the risk may be as high as {100 * bound:.3g} % at {100 * limit.confidence:g} % confidence, above the limit "
        f"of {100 * limit.risk:g} %; allow more risk or less confidence, or label more validation examples (at least "
        f"{least_accepted(limit.risk, limit.confidence):,} must be answered early, even if none is wrong)"
    )
