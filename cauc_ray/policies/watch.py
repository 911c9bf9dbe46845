"""Watching a policy's answers: what they are worth so far, and whether they are still like those on validation."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import PolicyError
from cauc_ray.numbers.drift import ShareDrift
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import N_BINS, N_GROUPS, N_LIKELIEST, Reference
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.reference import Answered, bins_of, counts_of_likeliest
from cauc_ray.policies.watched_sums import StageSums

# How probable it is that a policy which holds is ever said not to, however long it is watched.
FALSE_ALARM_RATE = 0.05
NEEDED = -math.log10(FALSE_ALARM_RATE)
# Each feature is tested by itself, with so much of that rate.
FEATURES: Mapping[str, float] = {
    "confidence": 0.3,  # which stages answer, how confidently: hence deferral, and cost
    "answers": 0.3,  # which options an answer finds likeliest, and in which order
    "calibration": 0.2,  # how often answers of a stage are right at a confidence
    "accuracy": 0.1,  # how often answers of a stage are right
    "agreement": 0.1,  # how often the whole cascade would have given a stage's answer
}


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a feature says against a policy.

    n: rows.   log10: of the highest that the evidence has been, 0 without any; it speaks once this is NEEDED.
    at: after how many of its rows it spoke, None where it has not.   since: after how many the change began, likely.
    """

    n: int = 0
    log10: float = -math.inf
    at: int | None = None
    since: int | None = None

    @property
    def holds(self) -> bool:
        """Return whether nothing speaks against the policy."""
        return self.at is None


@dataclass(frozen=True, slots=True)
class Watched:
    """What has been seen of a policy's answers.   stages: sums of each.   evidence: by feature."""

    stages: tuple[StageSums, ...]
    evidence: Mapping[str, Evidence]

    @property
    def holds(self) -> bool:
        """Return whether no feature speaks against the policy."""
        return all(one.holds for one in self.evidence.values())

    @classmethod
    def merged(cls, watched: Iterable[Watched]) -> Watched:
        """Return what several watches of one policy have seen, which began as so many.

        Of evidence the highest counts: each watch has its part of the rate of false alarms.
        """
        all_of_them = list(watched)
        stages = [sum(sums, StageSums()) for sums in zip(*(one.stages for one in all_of_them), strict=True)]
        evidence = {}
        for name in FEATURES:
            own = [one.evidence[name] for one in all_of_them]
            highest = max(own, key=lambda one: one.log10)
            evidence[name] = Evidence(sum(one.n for one in own), highest.log10, highest.at, highest.since)
        return cls(tuple(stages), evidence)


class _Feature:
    """The test of one feature.   share: of the rate of false alarms."""

    def __init__(self, reference: Ints, share: float) -> None:
        self._test, self._log_share = ShareDrift(reference), math.log(share)
        self.evidence = Evidence()

    def add(self, contexts: Ints, categories: Ints) -> None:
        if not len(categories):
            return
        n = self._test.n
        found = (self._test.add(contexts, categories) + self._log_share) / math.log(10)
        at, since = self.evidence.at, self.evidence.since
        if at is None and found.max() >= NEEDED:
            at, since = n + int((found >= NEEDED).argmax()) + 1, self._test.since
        self.evidence = Evidence(self._test.n, max(self.evidence.log10, float(found.max())), at, since)


class Watch:
    """Compares a policy's answers with its reference as they come, in as many parts as they like."""

    def __init__(self, policy: Policy, n_watches: int = 1) -> None:
        """Begin without rows.   n_watches: that see other answers of the same service, this one included.

        Raises PolicyError where the policy has no reference.
        """
        if policy.reference is None:
            raise PolicyError(
                "the policy has nothing that answers could be compared with: fit it at this threshold or budget, "
                "with a validation split that has all labels"
            )
        counts = _counts(policy.reference)
        self._features = {name: _Feature(counts[name], share / n_watches) for name, share in FEATURES.items()}
        self._sums = [StageSums() for _ in policy.stages]

    def add(self, answered: Answered) -> None:
        """Take answers, in their order; no label is needed."""
        none, stages = np.zeros(len(answered), dtype=np.int64), answered.stages.astype(np.int64)
        self._features["confidence"].add(none, stages * N_BINS + bins_of(answered.confidences))
        self._features["answers"].add(none, stages * N_GROUPS**N_LIKELIEST + answered.likeliest)
        for stage in np.unique(stages):
            here = stages == stage
            self._sums[stage] += StageSums.of_answers(answered.confidences[here], answered.costs[here])

    def add_outcomes(self, stages: Ints, confidences: Floats, correct: Bools) -> None:
        """Take what has become known of answers, added or not.

        stages: int (n,), which gave them.   confidences: float64 (n,).   correct: bool (n,).
        """
        stages, right = stages.astype(np.int64), correct.astype(np.int64)
        self._features["calibration"].add(stages * N_BINS + bins_of(confidences), right)
        self._features["accuracy"].add(stages, right)
        for stage in np.unique(stages):
            here = stages == stage
            self._sums[stage] += StageSums.of_outcomes(confidences[here], correct[here])

    def add_agreements(self, stages: Ints, agreed: Bools) -> None:
        """Take whether the whole cascade gave the same answers as stages before the last.

        stages: int (n,), which gave them.   agreed: bool (n,).
        """
        stages = stages.astype(np.int64)
        self._features["agreement"].add(stages, agreed.astype(np.int64))
        for stage in np.unique(stages):
            self._sums[stage] += StageSums.of_agreements(agreed[stages == stage])

    def watched(self) -> Watched:
        """Return what has been seen so far."""
        return Watched(tuple(self._sums), {name: feature.evidence for name, feature in self._features.items()})


def _counts(reference: Reference) -> Mapping[str, Ints]:
    """Return for each feature how many validation rows had each category in each context."""
    n, right = (np.array([getattr(stage, what) for stage in reference.stages]) for what in ("confidences", "right"))
    answers = np.concatenate([counts_of_likeliest(stage) for stage in reference.stages])
    of_stages, agreed = n.sum(axis=1), np.array([stage.agreed for stage in reference.stages])
    return {
        "confidence": n.reshape(1, -1),
        "answers": answers.reshape(1, -1),
        "calibration": np.stack([n - right, right], axis=-1).reshape(-1, 2),
        "accuracy": np.stack([of_stages - right.sum(axis=1), right.sum(axis=1)], axis=-1),
        "agreement": np.stack([of_stages - agreed, agreed], axis=-1),
    }
