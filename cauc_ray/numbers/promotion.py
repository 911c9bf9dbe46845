"""Whether a candidate policy is acceptable in place of the incumbent: a sequential test, valid at any time.

A candidate is acceptable if both are true of the requests that a service draws policies for at random:

    its accuracy is at least the incumbent's less accuracy_margin, and
    its mean cost per row is at most the incumbent's times 1 + cost_margin.

It is promoted once both are shown, and rolled back once one of them is shown to be false. A false promotion is that of
a candidate that is not acceptable; a false rollback that of one that is. Of a given candidate only one of the two can
happen, and the probability that it ever does is at most error_rate, however long and however often one looks:

- A difference of rows of both policies lies in [-1, 1], and its mean is at least 0 exactly if the criterion is met; the
  evidence is that of bets (numbers.betting).
- A false promotion needs evidence of 1 / error_rate for a criterion that is not met. A false rollback needs evidence of
  2 / error_rate against one of two that are.
- The capital is a product over differences, so that of several routers is the product of theirs. Rows must be
  independent and their order, and which of them are known, must not depend on how they turned out.

Differences of the same row (both policies asked) vary least. Otherwise rows of both policies are put into blocks: the
mean of one policy's rows less that of the other's, as many rows in each as there are for it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from cauc_ray.numbers.betting import SIDES, log_average, log_capital
from cauc_ray.numbers.types import Bools, Floats, Summed

# Rows of one policy that wait for rows of the other; the oldest are dropped first.
MOST_WAITING = 10_000

Decision: TypeAlias = Literal["promote", "rollback"]


@dataclass(frozen=True, slots=True)
class Rule:
    """When a candidate is acceptable, and how sure a decision is.

    Attributes:
        error_rate: Probability of a false decision on a candidate, of both kinds together.
        accuracy_margin: How much less accurate a candidate may be; negative: how much more accurate it must be.
        cost_margin: How much more a candidate may cost, as a share of the incumbent's cost.
        min_rows: Labelled rows of a candidate before it is promoted.
    """

    error_rate: float = 0.05
    accuracy_margin: float = 0.01
    cost_margin: float = 0.05
    min_rows: int = 200

    def by_accuracy(self, candidate: Floats, incumbent: Floats) -> Floats:
        """Return differences for the first criterion, of mean correctness in [0, 1]."""
        return (candidate - incumbent + self.accuracy_margin) / (1 + abs(self.accuracy_margin))

    def by_cost(self, candidate: Floats, incumbent: Floats) -> Floats:
        """Return differences for the second criterion, of mean costs in [0, 1]."""
        return ((1 + self.cost_margin) * incumbent - candidate) / max(1.0, 1 + self.cost_margin)


@dataclass(frozen=True, slots=True)
class PolicySums(Summed):
    """Sums over the compared rows of one policy.

    Attributes:
        n: Number of rows.
        cost: Cost of these rows.
        n_known: Number of rows with a label.
        n_right: Number of these that are right.
    """

    n: int = 0
    cost: float = 0.0
    n_known: int = 0
    n_right: int = 0

    def as_json(self) -> dict[str, float | None]:
        """Return the counts and means; None without rows."""
        return {
            "rows": self.n,
            "cost": self.cost / self.n if self.n else None,
            "labelled": self.n_known,
            "accuracy": self.n_right / self.n_known if self.n_known else None,
        }


def _no_capital() -> Floats:
    return np.zeros(SIDES.shape)


@dataclass(frozen=True, slots=True)
class PromotionEvidence(Summed):
    """The evidence of some rows; that of all rows is the sum.

    Attributes:
        candidate: Sums over the candidate's rows.
        incumbent: Sums over the incumbent's rows.
        accuracy: Logarithms of the capitals that bet on the first criterion and against it, float64 (2, bets).
        cost: The same of the second criterion.
    """

    candidate: PolicySums = field(default_factory=PolicySums)
    incumbent: PolicySums = field(default_factory=PolicySums)
    accuracy: Floats = field(default_factory=_no_capital)
    cost: Floats = field(default_factory=_no_capital)

    @property
    def log_values(self) -> Mapping[str, float]:
        """Return the logarithm of the evidence for and against each criterion."""
        values = log_average(np.stack([self.accuracy, self.cost]))
        names = ("accurate", "not_accurate", "cheap", "not_cheap")
        return dict(zip(names, values.ravel().tolist(), strict=True))

    def as_json(self, rule: Rule) -> dict[str, Any]:
        """Return what people read: rows, means, and the evidence as log10 next to what decisions need."""
        log10_values = {name: round(value / math.log(10), 3) for name, value in self.log_values.items()}
        needed = {"promote": -math.log10(rule.error_rate), "rollback": math.log10(2 / rule.error_rate)}
        return {
            "candidate": self.candidate.as_json(),
            "incumbent": self.incumbent.as_json(),
            "log10_evidence": log10_values,
            "log10_needed": {k: round(v, 3) for k, v in needed.items()},
        }

    def to_list(self) -> list[Any]:
        """Return the plain numbers, for a store."""
        sums = [[one.n, one.cost, one.n_known, one.n_right] for one in (self.candidate, self.incumbent)]
        return [*sums, self.accuracy.tolist(), self.cost.tolist()]

    @classmethod
    def of_list(cls, numbers: list[Any]) -> PromotionEvidence:
        """Return the evidence of to_list."""
        candidate, incumbent, accuracy, cost = numbers
        return cls(PolicySums(*candidate), PolicySums(*incumbent), np.array(accuracy), np.array(cost))


def decision(evidence: PromotionEvidence, rule: Rule) -> tuple[Decision, str] | None:
    """Return what the evidence decides and why, None while it is open."""
    value, surely = evidence.log_values, -math.log(rule.error_rate)
    accuracy = f"accuracy of the incumbent less {rule.accuracy_margin:g}"
    cost = f"cost of the incumbent times {1 + rule.cost_margin:g}"
    if value["not_accurate"] >= surely + math.log(2):
        return "rollback", f"shown to be below the {accuracy}"
    if value["not_cheap"] >= surely + math.log(2):
        return "rollback", f"shown to be above the {cost}"
    if min(value["accurate"], value["cheap"]) >= surely and evidence.candidate.n_known >= rule.min_rows:
        return "promote", f"shown to be at or above the {accuracy}, and at or below the {cost}"
    return None


class Comparison:
    """Turns rows of a candidate and the incumbent into evidence, where they are answered."""

    def __init__(self, rule: Rule, highest_cost: float) -> None:
        """Take the rule, and the highest cost of a row, in the policies' unit; higher costs count as this one."""
        self._rule, self._highest = rule, highest_cost
        self._right, self._costs = (_Waiting(), _Waiting())
        self._pairs: deque[tuple[Bools, Floats]] = deque(maxlen=MOST_WAITING)

    def outcomes(self, right: Bools, *, of_candidate: bool) -> None:
        """Take which answers of one of the two policies were right, bool (n,)."""
        self._right.of(of_candidate).extend(right.astype(np.float64).tolist())

    def costs(self, costs: Floats, *, of_candidate: bool) -> None:
        """Take what answers of one of the two policies cost, float (n,)."""
        self._costs.of(of_candidate).extend(np.minimum(costs, self._highest).tolist())

    def pairs(self, right: Bools, costs: Floats) -> None:
        """Take the answers of both policies to the same rows, bool and float (n, 2), the candidate's first."""
        self._pairs.append((right, np.minimum(costs, self._highest)))

    def take(self) -> PromotionEvidence:
        """Return the evidence since the last time; more rows may come meanwhile, from another thread."""
        evidence, taken = PromotionEvidence(), [self._pairs.popleft() for _ in range(len(self._pairs))]
        if taken:
            right, costs = (np.concatenate(of) for of in zip(*taken, strict=True))
            evidence += self._of_right(_Blocks.of_pairs(right.astype(np.float64)))
            evidence += self._of_costs(_Blocks.of_pairs(costs))
        if (blocks := self._right.blocks()) is not None:
            evidence += self._of_right(blocks)
        if (blocks := self._costs.blocks()) is not None:
            evidence += self._of_costs(blocks)
        return evidence

    def _of_right(self, blocks: _Blocks) -> PromotionEvidence:
        candidate, incumbent = (PolicySums(n_known=n, n_right=round(total)) for n, total in blocks.sums)
        return PromotionEvidence(candidate, incumbent, accuracy=log_capital(self._rule.by_accuracy(*blocks.means)))

    def _of_costs(self, blocks: _Blocks) -> PromotionEvidence:
        candidate, incumbent = (PolicySums(n=n, cost=total) for n, total in blocks.sums)
        if self._highest:
            differences = self._rule.by_cost(*(of / self._highest for of in blocks.means))
        else:  # where nothing costs anything, nothing is too expensive
            differences = np.ones(len(blocks.means[0]))
        return PromotionEvidence(candidate, incumbent, cost=log_capital(differences))


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Means by block of the candidate and the incumbent; the number of rows of each, and their sum."""

    means: tuple[Floats, Floats]
    sums: tuple[tuple[int, float], tuple[int, float]]

    @classmethod
    def of_pairs(cls, values: Floats) -> _Blocks:
        """Return pairs of values, the candidate's first, float (n, 2), as blocks of one row each."""
        n, (candidate, incumbent) = len(values), values.sum(axis=0).tolist()
        return cls((values[:, 0], values[:, 1]), ((n, candidate), (n, incumbent)))


class _Waiting:
    """Values of rows of both policies, in the order of arrival."""

    def __init__(self) -> None:
        self._values: tuple[deque[float], deque[float]] = (deque(maxlen=MOST_WAITING), deque(maxlen=MOST_WAITING))

    def of(self, candidate: bool) -> deque[float]:
        """Return the values of one policy."""
        return self._values[0 if candidate else 1]

    def blocks(self) -> _Blocks | None:
        """Take all rows, if there are some of both policies."""
        # The number of rows decides, not their values.
        n, m = map(len, self._values)
        if not min(n, m):
            return None
        candidate, incumbent = (
            np.array([values.popleft() for _ in range(size)]) for values, size in zip(self._values, (n, m), strict=True)
        )
        means = (_means(candidate, min(n, m)), _means(incumbent, min(n, m)))
        return _Blocks(means, ((n, float(candidate.sum())), (m, float(incumbent.sum()))))


def _means(values: Floats, n_blocks: int) -> Floats:
    """Return the means of neighbouring stretches of about equal size."""
    starts = np.arange(n_blocks) * len(values) // n_blocks
    means: Floats = np.add.reduceat(values, starts) / np.diff(np.append(starts, len(values)))
    return means
