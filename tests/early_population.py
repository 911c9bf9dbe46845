"""Populations of confidences whose early answers have a risk that is known at every threshold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Population:
    """Stages whose confidences are uniform on [1/2, 1] and independent.

    Stage j is right with probability 1 - slopes[j] (1 - p) - floors[j]: calibrated with slope 1 and floor 0, too
    confident with more.
    """

    slopes: tuple[float, ...]
    floors: tuple[float, ...]

    def draw(self, rng, n):
        """Return confidences float64 (n, S - 1) and whether a row is right at each stage, bool (n, S - 1)."""
        confidences = rng.uniform(0.5, 1, (n, len(self.slopes)))
        wrong = np.array(self.slopes) * (1 - confidences) + np.array(self.floors)
        return confidences, rng.random(confidences.shape) >= wrong

    def risk(self, threshold):
        """Return P(wrong | answered early), by the exact integral over each stage's confidences."""
        at = max(threshold, 0.5)
        accepted_here = (1 - at) / 0.5
        reached, n_wrong, n_early = 1.0, 0.0, 0.0
        for slope, floor in zip(self.slopes, self.floors, strict=True):
            n_wrong += reached * accepted_here * (slope * (1 - at) / 2 + floor)
            n_early += reached * accepted_here
            reached *= 1 - accepted_here
        return n_wrong / n_early


# What two and three stages look like, and the hardest: a risk that is a hair above 5 % at every threshold.
PAIR = Population((0.5,), (0.0,))
CHAIN = Population((0.5, 0.2, 0.4), (0.0, 0.015, 0.0))
HARDEST = Population((0.0,), (0.05001,))
