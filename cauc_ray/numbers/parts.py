"""The rows of a fit in one part or in several, of which a solver only asks sums."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add, methodcaller
from typing import Protocol, TypeVar

import numpy as np

from cauc_ray.numbers.likelihood import Facts, Likelihood, unpacked
from cauc_ray.numbers.types import Floats

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sums:
    """Means over the rows at some weights and biases, D numbers in all, which a solver minimises.

    value: the NLL.   gradient: (D,).   curvature: (D, D).   scatter: (P, P), the outer product of the rows' gradients
    in the weights.
    """

    value: float
    gradient: Floats
    curvature: Floats
    scatter: Floats

    def eliminated(self, p: int) -> Reduced:
        """Return the quadratic model in the P weights alone, at the best biases for each."""
        if len(self.gradient) == p:
            return Reduced(self.gradient, self.curvature, np.empty((0, p)), np.empty(0))
        cross, within = self.curvature[p:, :p], self.curvature[p:, p:]
        solved = np.linalg.solve(within, np.column_stack([cross, self.gradient[p:]]))
        by_weights, by_slopes = solved[:, :p], solved[:, p]
        return Reduced(
            self.gradient[:p] - cross.T @ by_slopes,
            self.curvature[:p, :p] - cross.T @ by_weights,
            by_weights,
            by_slopes,
        )


@dataclass(frozen=True, slots=True)
class Reduced:
    """A quadratic model in weights alone.   gradient: (P,).   curvature: (P, P).

    by_weights, by_slopes: (K, P), (K,), of which the best biases are made.
    """

    gradient: Floats
    curvature: Floats
    by_weights: Floats
    by_slopes: Floats

    def biases(self, step: Floats) -> Floats:
        """Return the step of the biases, (K,), that goes with one of the weights, (P,)."""
        return -self.by_slopes - self.by_weights @ step

    def inverse(self) -> Floats:
        """Return the weights' rows of the inverse of the whole curvature, (P, D)."""
        own = np.linalg.pinv(self.curvature, hermitian=True)
        return np.concatenate([own, -own @ self.by_weights.T], axis=1)


class Each(Protocol):
    """Asks every part's likelihood the same, and returns the answers in the parts' order."""

    def __call__(self, ask: Callable[[Likelihood], T], /) -> list[T]:
        """Ask all parts."""
        ...


class Parts:
    """The rows of a fit in one part or in several, here or elsewhere, of which only sums are asked.

    each: asks every part's likelihood the same.   narrow: whether they compute in float32.   facts: of all rows.
    """

    def __init__(self, each: Each, *, narrow: bool) -> None:
        """Ask the parts what is known before any pass."""
        self.each, self.narrow = each, narrow
        self.facts: Facts = reduce(add, each(methodcaller("facts")))

    @classmethod
    def of(cls, likelihood: Likelihood) -> Parts:
        """Return rows that are all here."""

        def each(ask: Callable[[Likelihood], T], /) -> list[T]:
            return [ask(likelihood)]

        return cls(each, narrow=likelihood.dtype is np.float32)

    @property
    def spreads(self) -> Floats:
        """Return the mean distance of a row's largest logit from the row's mean, (P,)."""
        return self.facts.spreads / self.facts.n

    @cached_property
    def margins(self) -> Floats:
        """Return the geometric mean of that distance from the next smaller logit, (P,), no more than the spread.

        Options far below the others do not change it.
        """
        counts, spreads = self.facts.n_margins, self.spreads
        margins = np.where(counts > 0, np.exp(self.facts.log_margins / np.maximum(counts, 1)), spreads)
        return np.minimum(margins, spreads)

    @property
    def perfect(self) -> float:
        """Return the mean NLL below which every row gives its label more than half."""
        return float(np.log(2.0)) / self.facts.n

    def sample(self, rows: int) -> Parts:
        """Return every n-th row by rank, so that about so many are left, as one part."""
        ranks, sources, labels = zip(*self.each(methodcaller("sample", max(1, self.facts.n // rows))), strict=True)
        order = np.argsort(np.concatenate(ranks))
        arrays = [np.concatenate(of_parts)[order] for of_parts in zip(*sources, strict=True)]
        return Parts.of(Likelihood(arrays, np.concatenate(labels)[order], narrow=self.narrow))

    def nll(self, at: Floats) -> float:
        """Return the mean NLL at these weights and biases, in nats."""
        return float(sum(self.each(methodcaller("nll", at)))) / self.facts.n

    def sums(self, at: Floats) -> Sums:
        """Visit all rows once at these weights and biases."""
        totals = reduce(add, self.each(methodcaller("totals", at))) / self.facts.n
        return Sums(float(totals[0]), *unpacked(totals, len(self.facts.spreads), len(at)))

    def squares(self, at: Floats, directions: Floats) -> tuple[float, Floats]:
        """Return the mean NLL, and the mean squares of the rows' gradients along directions, (P, D)."""
        totals = reduce(add, self.each(methodcaller("squares", at, directions))) / self.facts.n
        return float(totals[0]), totals[1:]
