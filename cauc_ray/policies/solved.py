"""Policies that have a solution for each budget: numbers that decide, found by a search of their own."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.scored import MethodPolicy


class SolvedPolicy(MethodPolicy):
    """A policy whose threshold is a budget: it chooses the last solution of the curve within the budget.

    Attributes:
        solutions: Deciding numbers of each point of the curve; in a fit without a curve, all by rising cost.
    """

    NEEDS_ARRAYS: ClassVar[bool] = True
    searched: ClassVar[bool] = True
    solutions: tuple[tuple[float, ...], ...]

    @property
    def n_numbers(self) -> int:
        """Return how many numbers a solution has: one for each model but the last."""
        return len(self.answering) - 1

    def contradictions(self) -> Iterator[str]:
        """Yield the contradictions in the policy."""
        yield from super().contradictions()
        if len(self.solutions) != len(self.curve) or {*map(len, self.solutions)} - {self.n_numbers}:
            yield f"solutions must be of the curve's points, each of {self.n_numbers} numbers"

    def decides(self) -> dict[str, Any]:
        """Return what affects answers: not the budget, but what it chooses."""
        return super().decides() | {"threshold": self.solution}

    @property
    def solution(self) -> tuple[float, ...]:
        """Return the numbers that decide."""
        costs = np.array([point.threshold for point in self.curve])
        return self.solutions[max(int(np.searchsorted(costs, self.threshold, side="right")) - 1, 0)]

    @abstractmethod
    def readings(self, logits: Sequence[Floats]) -> Floats:
        """Return what solutions decide by, float64 (n, ...).   logits: of every stage, float (n, K) each."""

    @abstractmethod
    def stops(self, readings: Floats, numbers: tuple[float, ...]) -> Ints:
        """Return the step of every_step() at which each row stops by a solution's numbers, int (n,)."""
