"""The NLL of rows that lie in one part or in several, of which only sums are asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import methodcaller
from typing import Protocol, TypeVar

import numpy as np

from cauc_ray.numbers.likelihood import Likelihood
from cauc_ray.numbers.types import Floats

T = TypeVar("T")


class Each(Protocol):
    """Asks every part's likelihood the same, and returns what they say, in the parts' order."""

    def __call__(self, ask: Callable[[Likelihood], T], /) -> list[T]:
        """Ask all parts."""
        ...


@dataclass(frozen=True, slots=True)
class Sums:
    """Means over the rows of a pass: NLL, gradient (P,), curvature (P, P), gradient outer product (P, P)."""

    nll: float
    gradient: Floats
    curvature: Floats
    scatter: Floats


class Problem:
    """What a solver asks of the rows.

    n: how many there are.   spreads: (P,), the mean distance of a row's largest logit from the row's mean.
    separable_alone: there is one source and every label is its largest logit, so that more weight is always better.
    n_options: K.   lacking: the rank of a row that lacks some of them, None where all rows have all.
    each: asks every part's likelihood the same.
    """

    def __init__(self, each: Each, *, narrow: bool) -> None:
        """Take what asks the parts.   narrow: whether these compute in float32."""
        self.each, self.narrow = each, narrow
        extents = each(methodcaller("extent"))
        self.n: int = sum(extent.n for extent in extents)
        self.spreads: Floats = np.sum([extent.spreads for extent in extents], axis=0) / self.n
        self.separable_alone = all(extent.best for extent in extents)
        self.n_options: int = extents[0].n_options
        self.lacking: int | None = min((e.lacking for e in extents if e.lacking is not None), default=None)

    @classmethod
    def of(cls, likelihood: Likelihood) -> Problem:
        """Return the problem of rows that are all here."""

        def each(ask: Callable[[Likelihood], T], /) -> list[T]:
            return [ask(likelihood)]

        return cls(each, narrow=likelihood.dtype is np.float32)

    @property
    def perfect(self) -> float:
        """Return the mean NLL below which every row gives its label more than half."""
        return float(np.log(2.0)) / self.n

    def sample(self, rows: int) -> Problem:
        """Return that of every n-th row by rank, so that about so many are left."""
        parts = self.each(methodcaller("sample", max(1, self.n // rows)))
        order = np.argsort(np.concatenate([part.ranks for part in parts]))
        sources = [np.concatenate(arrays)[order] for arrays in zip(*(part.sources for part in parts), strict=True)]
        labels = np.concatenate([part.labels for part in parts])[order]
        return Problem.of(Likelihood(sources, labels, narrow=self.narrow))

    def nll(self, weights: Floats) -> float:
        """Return the mean NLL at these weights, in nats."""
        return float(sum(self.each(methodcaller("nll", weights)))) / self.n

    def sums(self, weights: Floats) -> Sums:
        """Visit all rows once at these weights."""
        p = len(self.spreads)
        totals = np.sum(self.each(methodcaller("totals", weights)), axis=0) / self.n
        gradient, curvature, scatter = np.split(totals[1:], [p, p + p * p])
        return Sums(float(totals[0]), gradient, curvature.reshape(p, p), scatter.reshape(p, p))
