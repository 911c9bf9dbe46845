"""Which rows of a simulated stage go on: by chance, or just the stage's share of them in random order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from cauc_ray.front.planning.stages import PlannedStage
from cauc_ray.numbers.types import Bools

_DRAWN = 1 << 16


class Lots(Protocol):
    """What decides."""

    def deferred(self, place: int, n: int) -> Bools:
        """Return which of a stage's next n rows go on, bool (n,)."""


class Chance:
    """Every row goes on with its stage's rate, whatever became of the others."""

    def __init__(self, stages: Sequence[PlannedStage], rng: np.random.Generator) -> None:
        self._deferral = [stage.deferral for stage in stages]
        self._rng = rng
        self._drawn = rng.random(_DRAWN)
        self._n_drawn = 0

    def deferred(self, place: int, n: int) -> Bools:
        """Return which of a stage's next n rows go on. So many numbers at a time are drawn that it costs little."""
        if self._n_drawn + n > len(self._drawn):
            self._drawn, self._n_drawn = self._rng.random(max(n, _DRAWN)), 0
        self._n_drawn += n
        going: Bools = self._drawn[self._n_drawn - n : self._n_drawn] < self._deferral[place]
        return going


class Shuffled:
    """Of n rows that the first stage gets, every stage defers its share as exactly as their number allows."""

    def __init__(self, stages: Sequence[PlannedStage], n: int, rng: np.random.Generator) -> None:
        self._masks: list[Bools] = []
        self._taken = [0] * len(stages)
        for stage in stages:
            n_going = round(stage.deferral * n)
            self._masks.append(rng.permutation(n) < n_going)
            n = n_going

    def deferred(self, place: int, n: int) -> Bools:
        """Return which of a stage's next n rows go on, bool (n,)."""
        start = self._taken[place]
        self._taken[place] += n
        return self._masks[place][start : start + n]
