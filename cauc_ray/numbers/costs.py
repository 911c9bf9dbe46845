"""Costs of calling the models of a chain, in one named unit."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import CaucWarning, DataError
from cauc_ray.numbers.types import Bools, Floats, Ints

LARGEST = 1e100
# The unit of costs that were given without one.
UNNAMED_UNIT = "cost units"


@dataclass(frozen=True, slots=True)
class Costs:
    """Cost of each model's call: float64 (M,), or (N, M) if calls of one model differ, for example by tokens.

    A cascade pays for every stage that it calls: the cost of stopping at stage j is the sum of calls 0..j. A router
    pays for the one model that it chooses.

    >>> Costs("GFLOPs", np.array([1.0, 4.0])).of_stops(np.array([0, 1, 0]))
    array([1., 5., 1.])
    """

    unit: str
    per_call: Floats

    def __post_init__(self) -> None:
        # The bound keeps sums over examples finite.
        bad = ~((self.per_call >= 0) & (self.per_call <= LARGEST))
        if bad.any():
            where = tuple(int(i) for i in np.argwhere(bad)[0])
            raise DataError(
                f"cost {self.per_call[where]} {self.unit} at {where} is not a number between 0 and {LARGEST:g}"
            )

    @property
    def cumulative(self) -> Floats:
        """Return the cost of stopping at each stage, of the shape of per_call."""
        return np.cumsum(self.per_call, axis=-1)

    @property
    def means(self) -> Floats:
        """Return the mean cost of one call of each model, float64 (M,)."""
        return self.per_call if self.per_call.ndim == 1 else self.per_call.mean(axis=0)

    def of_models(self, indices: Sequence[int]) -> Costs:
        """Return the costs of some of the models, in the order of their indices here."""
        return Costs(self.unit, self.per_call[..., list(indices)])

    def of_calls(self, calls: Bools) -> Floats:
        """Return the cost of sets of calls, float64 (S,), or (N, S) if calls differ.   calls: bool (S, M)."""
        total = np.zeros((*self.per_call.shape[:-1], len(calls)))
        for model in range(self.per_call.shape[-1]):  # in their order: the sums are bit for bit those of cumulative
            total += np.where(calls[:, model], self.per_call[..., model, None], 0.0)
        return total

    def of_stops(self, stops: Ints) -> Floats:
        """Return the cost of rows that stopped at these stages, float64 (N,).   stops: int (N,)."""
        cumulative = self.cumulative
        if cumulative.ndim == 1:
            return cumulative[stops]
        return cumulative[np.arange(len(stops)), stops]

    def warn_unless_rising(self, models: tuple[str, ...]) -> None:
        """Warn if a model costs no more than the one before it; the order is used as given."""
        for j, (before, after) in enumerate(zip(self.means[:-1], self.means[1:], strict=True)):
            if after <= before:
                warnings.warn(
                    f"{models[j + 1]!r} costs {after:g} {self.unit}, no more than {models[j]!r} before it "
                    f"({before:g}); the order is used as given",
                    CaucWarning,
                    stacklevel=2,
                )
