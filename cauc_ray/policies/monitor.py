"""Monitoring of a policy's answers: their quality so far, and whether they have drifted from those on validation.

A policy's file has a reference, counts of its answers on validation. Later answers are compared with it as they
arrive, by the sequential tests of numbers.drift.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cauc_ray.errors import PolicyError
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.drift import ShareDrift
from cauc_ray.numbers.intervals import Share, share
from cauc_ray.numbers.metrics import CalibrationSums, calibration_error, equal_width_bins
from cauc_ray.numbers.types import Bools, Floats, Ints, Summed
from cauc_ray.policies.evidence import N_BINS, N_GROUPS, N_LIKELIEST, Reference, StageReference
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import Answered, Trace

# The probability that a valid policy is ever reported as drifted, however long it is watched.
FALSE_ALARM_RATE = 0.05
NEEDED = -math.log10(FALSE_ALARM_RATE)
# Each feature is tested separately: its share of that rate, and its description in an alarm.
FEATURES: Mapping[str, tuple[float, str]] = {
    "confidence": (0.25, "stages and confidences"),  # hence deferral, and cost
    "answers": (0.25, "answers and their next likeliest options"),
    "calibration": (0.1, "accuracies at each confidence"),
    "accuracy": (0.3, "accuracies"),
    "agreement": (0.1, "agreement of early answers with the last stage"),
}


def reference_of(answered: Answered, trace: Trace, chain: Chain, split: str) -> Reference:
    """Count a policy's answers to labelled examples, which have their likeliest options.

    Args:
        answered: The answers.
        trace: Trace of the examples.
        chain: The examples.
        split: Name of their split.
    """
    assert answered.likeliest is not None
    correct = answered.predictions == chain.labels
    agreed = answered.predictions == trace.predictions[:, -1]
    stages = []
    for stage, name in enumerate(chain.models):
        stage_mask = answered.stages == stage
        confidences, right = answered.confidences[stage_mask], correct[stage_mask]
        bins = equal_width_bins(confidences, N_BINS)
        codes, counts = np.unique(answered.likeliest[stage_mask], return_counts=True)
        stages.append(
            StageReference(
                name=name,
                confidences=tuple(np.bincount(bins, minlength=N_BINS).tolist()),
                right=tuple(np.bincount(bins[right], minlength=N_BINS).tolist()),
                likeliest={
                    np.base_repr(code, N_GROUPS).zfill(N_LIKELIEST): int(count)
                    for code, count in zip(codes, counts, strict=True)
                },
                agreed=int(agreed[stage_mask].sum()),
                cost=float(answered.costs[stage_mask].mean()) if len(right) else None,
                calibration_error=calibration_error(confidences, right) if len(right) else None,
            )
        )
    return Reference(split=split, n=len(chain), stages=tuple(stages))


def require_reference(policy: Policy) -> Reference:
    """Return the reference of a policy. Raises PolicyError if it has none."""
    if policy.reference is None:
        raise PolicyError(
            "the policy has no reference to compare answers with: fit it at this threshold or budget, "
            "with a validation split that has all labels"
        )
    return policy.reference


def _reference_counts(reference: Reference) -> Mapping[str, Ints]:
    """Return for each feature how many validation rows had each category in each context, int (G, K)."""
    n, right = (np.array([getattr(stage, what) for stage in reference.stages]) for what in ("confidences", "right"))
    likeliest = np.zeros((len(n), N_GROUPS**N_LIKELIEST), dtype=np.int64)
    for row, stage in zip(likeliest, reference.stages, strict=True):
        row[[int(digits, N_GROUPS) for digits in stage.likeliest]] = list(stage.likeliest.values())
    of_stages, agreed = n.sum(axis=1), np.array([stage.agreed for stage in reference.stages])
    return {
        "confidence": n.reshape(1, -1),
        "answers": likeliest.reshape(1, -1),
        "calibration": np.stack([n - right, right], axis=-1).reshape(-1, 2),
        "accuracy": np.stack([of_stages - right.sum(axis=1), right.sum(axis=1)], axis=-1),
        "agreement": np.stack([of_stages - agreed, agreed], axis=-1),
    }


@dataclass(frozen=True, slots=True)
class StageSums(Summed):
    """Sums over one stage's answers; those of several sets of rows add up.

    Attributes:
        n: Answers.
        confidence: Sum of their confidences.
        cost: Sum of their costs.
        squared_cost: Sum of their squared costs.
        outcomes: Calibration sums of the labelled answers.
        n_right: Labelled answers that are right.
        n_compared: Answers that were compared with the full cascade's.
        n_agreed: Compared answers that equal the full cascade's.
    """

    n: int = 0
    confidence: float = 0.0
    cost: float = 0.0
    squared_cost: float = 0.0
    outcomes: CalibrationSums = field(default_factory=CalibrationSums)
    n_right: int = 0
    n_compared: int = 0
    n_agreed: int = 0

    @classmethod
    def of_answers(cls, confidences: Floats, costs: Floats) -> StageSums:
        """Return the sums of answers.   confidences, costs: float64 (n,)."""
        squares = float((costs**2).sum())
        return cls(n=len(costs), confidence=float(confidences.sum()), cost=float(costs.sum()), squared_cost=squares)

    @classmethod
    def of_outcomes(cls, confidences: Floats, correct: Bools) -> StageSums:
        """Return the sums of answers whose labels are known.   confidences: float64 (n,).   correct: bool (n,)."""
        return cls(outcomes=CalibrationSums.of(confidences, correct), n_right=int(correct.sum()))

    @classmethod
    def of_agreements(cls, agreed: Bools) -> StageSums:
        """Return the sums of answers that were compared with the full cascade's.   agreed: bool (n,)."""
        return cls(n_compared=len(agreed), n_agreed=int(agreed.sum()))

    @property
    def accuracy(self) -> Share:
        """Return the accuracy of answers with a known label."""
        return share(self.n_right, self.outcomes.n)

    @property
    def agreement(self) -> Share:
        """Return the share of compared answers that equal the full cascade's."""
        return share(self.n_agreed, self.n_compared)

    @property
    def mean_cost(self) -> list[float] | None:
        """Return the answers' mean cost and its 95 % interval, by the normal approximation."""
        if not self.n:
            return None
        mean = self.cost / self.n
        half = 1.96 * math.sqrt(max(0.0, self.squared_cost / self.n - mean**2) / self.n)
        return [mean, mean - half, mean + half]


@dataclass(frozen=True, slots=True)
class DriftEvidence:
    """Evidence of a feature against a policy.

    Attributes:
        n: Rows.
        log10: Logarithm of the highest evidence so far, -inf without any; an alarm is raised once it reaches NEEDED.
        at: Number of rows before the alarm; None without one.
        since: Likely number of rows before the change; None without an alarm.
    """

    n: int = 0
    log10: float = -math.inf
    at: int | None = None
    since: int | None = None

    @property
    def valid(self) -> bool:
        """Return whether the feature has raised no alarm."""
        return self.at is None


@dataclass(frozen=True, slots=True)
class Watched:
    """The state of a policy's monitoring.

    Attributes:
        stages: Sums of each stage.
        evidence: Evidence by feature.
    """

    stages: tuple[StageSums, ...]
    evidence: Mapping[str, DriftEvidence]

    @property
    def valid(self) -> bool:
        """Return whether no feature raises an alarm."""
        return all(one.valid for one in self.evidence.values())

    @classmethod
    def merged(cls, watched: Iterable[Watched]) -> Watched:
        """Merge the states of several watches of one policy, which share the rate of false alarms.

        The highest evidence counts: each watch has its share of the rate of false alarms.
        """
        watches = list(watched)
        stages = [sum(sums, StageSums()) for sums in zip(*(one.stages for one in watches), strict=True)]
        evidence = {}
        for name in FEATURES:
            by_watch = [one.evidence[name] for one in watches]
            highest = max(by_watch, key=lambda one: one.log10)
            evidence[name] = DriftEvidence(sum(one.n for one in by_watch), highest.log10, highest.at, highest.since)
        return cls(tuple(stages), evidence)


class Watch:
    """Compares a policy's answers with its reference as they arrive, in batches of any size."""

    def __init__(self, policy: Policy, n_watches: int = 1) -> None:
        """Start without rows.

        Args:
            policy: Policy with a reference.
            n_watches: Number of watches of the same service, this one included.

        Raises:
            PolicyError: The policy has no reference.
        """
        counts = _reference_counts(require_reference(policy))
        self._counts = counts
        self._tests = {name: ShareDrift(counts[name]) for name in FEATURES}
        self._random = np.random.default_rng(0)
        # Each test has its share of the rate of false alarms.
        self._log_shares = {name: math.log(share / n_watches) for name, (share, _) in FEATURES.items()}
        self._evidence = dict.fromkeys(FEATURES, DriftEvidence())
        self._sums = [StageSums() for _ in policy.stages]

    def add(self, answered: Answered, cut_short: Bools | None = None) -> None:
        """Add answers in the order of their requests, with their likeliest options.

        Args:
            answered: The answers.
            cut_short: Rows that would have escalated from the stage that answered, bool (n,); None if there are none.
                Without them only rows that stop early would remain, so the tests replace them by escalated rows of the
                reference.
        """
        assert answered.likeliest is not None
        cut = np.zeros(len(answered), dtype=bool) if cut_short is None else cut_short
        none, stages = np.zeros(len(answered), dtype=np.int64), answered.stages.astype(np.int64)
        bins, likeliest = equal_width_bins(answered.confidences, N_BINS), answered.likeliest.astype(np.int64)
        for name, stage_categories in (("confidence", bins), ("answers", likeliest)):
            n_categories = self._counts[name].size // len(self._sums)
            categories = stages * n_categories + stage_categories
            for stage in np.unique(stages[cut]):
                cut_mask = cut & (stages == stage)
                categories[cut_mask] = self._later(name, (stage + 1) * n_categories, int(cut_mask.sum()))
            self._test(name, none, categories)
        complete = answered.of_rows(~cut)
        self._sum(stages[~cut], lambda rows: StageSums.of_answers(complete.confidences[rows], complete.costs[rows]))

    def _later(self, name: str, first: int, n: int) -> Ints:
        """Draw n categories from those of reference rows, from the first one on."""
        counts = self._counts[name][0, first:]
        shares = counts / counts.sum() if counts.any() else np.full(len(counts), 1 / len(counts))
        return first + self._random.choice(len(counts), n, p=shares)

    def add_outcomes(self, stages: Ints, confidences: Floats, correct: Bools) -> None:
        """Add whether answers were right; the answers need not have been added before.

        Args:
            stages: Stage of each answer, int (n,).
            confidences: Confidences, float64 (n,).
            correct: Whether the answers are right, bool (n,).
        """
        stages, right = stages.astype(np.int64), correct.astype(np.int64)
        self._test("calibration", stages * N_BINS + equal_width_bins(confidences, N_BINS), right)
        self._test("accuracy", stages, right)
        self._sum(stages, lambda rows: StageSums.of_outcomes(confidences[rows], correct[rows]))

    def add_agreements(self, stages: Ints, agreed: Bools) -> None:
        """Add whether the full cascade gave the same answers as stages before the last.

        Args:
            stages: Stage of each answer, int (n,).
            agreed: Whether the answers are the same, bool (n,).
        """
        stages = stages.astype(np.int64)
        self._test("agreement", stages, agreed.astype(np.int64))
        self._sum(stages, lambda rows: StageSums.of_agreements(agreed[rows]))

    def _test(self, name: str, contexts: Ints, categories: Ints) -> None:
        """Add rows to the evidence of a feature."""
        if not len(categories):
            return
        test, so_far = self._tests[name], self._evidence[name]
        n, at, since = test.n, so_far.at, so_far.since
        evidence = (test.add(contexts, categories) + self._log_shares[name]) / math.log(10)
        if at is None and evidence.max() >= NEEDED:
            at, since = n + int((evidence >= NEEDED).argmax()) + 1, test.since
        self._evidence[name] = DriftEvidence(test.n, max(so_far.log10, float(evidence.max())), at, since)

    def _sum(self, stages: Ints, of: Callable[[Bools], StageSums]) -> None:
        """Add the sums of each stage's rows."""
        for stage in np.unique(stages):
            self._sums[stage] += of(stages == stage)

    def watched(self) -> Watched:
        """Return the state so far."""
        return Watched(tuple(self._sums), dict(self._evidence))


def watch_report(policy: Policy, watched: Watched) -> dict[str, Any]:
    """Return the state as JSON. Evidence is in powers of ten; the policy has a reference.

    Values without rows are null; intervals have level 95 %.
    """
    reference = policy.reference
    assert reference is not None
    total = sum(watched.stages, StageSums())
    costs = ((stage.cost or 0.0) * sum(stage.confidences) for stage in reference.stages)
    return {
        "policy_id": policy.id,
        "valid": watched.valid,
        "verdict": verdict(watched),
        "false_alarm_rate": FALSE_ALARM_RATE,
        "needed": NEEDED,
        "n": total.n,
        "n_labelled": total.outcomes.n,
        "n_compared": total.n_compared,
        "cost_unit": policy.cost_unit,
        "cost": total.mean_cost,
        "reference_cost": sum(costs) / reference.n,
        "features": [
            {
                "name": name,
                "valid": one.valid,
                "n": one.n,
                "evidence": one.log10 if one.n else None,
                "after": one.at,
                "since": one.since,
            }
            for name, one in watched.evidence.items()
        ],
        "stages": [
            _stage_report(sums, of_reference, total.n, reference.n)
            for sums, of_reference in zip(watched.stages, reference.stages, strict=True)
        ],
    }


def _stage_report(sums: StageSums, reference: StageReference, n: int, n_reference: int) -> dict[str, Any]:
    answered, outcomes = sum(reference.confidences), sums.outcomes
    return {
        "name": reference.name,
        "n": sums.n,
        "answered": sums.n / n if n else None,
        "reference_answered": answered / n_reference,
        "confidence": sums.confidence / sums.n if sums.n else None,
        "cost": sums.mean_cost,
        "reference_cost": reference.cost,
        "n_labelled": outcomes.n,
        "accepted_accuracy": _interval(sums.accuracy),
        "reference_accepted_accuracy": sum(reference.right) / answered if answered else None,
        "calibration_error": outcomes.error if outcomes.n else None,
        "calibration_error_by_chance": outcomes.error_by_chance if outcomes.n else None,
        "reference_calibration_error": reference.calibration_error,
        "z": None if outcomes.test is None else outcomes.test.z,
        "z_p_value": None if outcomes.test is None else outcomes.test.p_value,
        "n_compared": sums.n_compared,
        "agreement": _interval(sums.agreement),
        "reference_agreement": reference.agreed / answered if answered else None,
    }


def _interval(of: Share) -> list[float] | None:
    """Return a share and its interval."""
    return [of.value, of.low, of.high] if of.n else None


def verdict(watched: Watched) -> str:
    """Return in one line whether a policy is valid, and if not, which feature raised an alarm first."""
    if watched.valid:
        return "is valid"
    alarms = {name: one for name, one in watched.evidence.items() if not one.valid}
    # Features count their own rows; the one with the fewest rows at its alarm was first.
    name = min(alarms, key=lambda feature: alarms[feature].at or 0)
    first, (_, what) = alarms.pop(name), FEATURES[name]
    later_alarms = f"; {', '.join(alarms)} too" if alarms else ""
    return (
        f"has drifted: {what} differ from validation ({name}), detected after {first.at:,} examples, "
        f"since about example {(first.since or 0) + 1:,}; evidence 1e{first.log10:.1f}, {1 / FALSE_ALARM_RATE:g} needed"
        f"{later_alarms}"
    )
