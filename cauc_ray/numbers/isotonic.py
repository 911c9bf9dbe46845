"""Isotonic regression of being right on the confidence, as a rising map of confidences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class Isotonic:
    """A map of confidences that is linear between its breakpoints.

    confidences: B numbers, rising from 0 to 1.   accuracies: what each becomes, B numbers in [0, 1] that rise too.
    Strictly rising: what is more confident before is so after, and a threshold finds as many operating points.
    """

    confidences: tuple[float, ...]
    accuracies: tuple[float, ...]

    def of(self, confidences: Floats) -> Floats:
        """Return what confidences in [0, 1], float (n,), become, float64 (n,)."""
        return np.interp(confidences, self.confidences, self.accuracies)


def fit_isotonic(confidences: Floats, correct: Bools) -> Isotonic:
    """Fit the rising map that is nearest in squares to being right (Ayer et al. 1955; Zadrozny and Elkan, KDD 2002).

    confidences: float (N,) in [0, 1].   correct: bool (N,). Equal confidences count as one.
    The regression is constant on blocks of confidences; between two blocks the map is linear. It is then drawn to the
    identity by 1 / N of the distance, far less than N rows can tell, so that it rises within blocks too.
    Raises DataError where the arrays are not that, or empty.

    >>> fit_isotonic(np.array([0.6, 0.7, 0.8, 0.9]), np.array([True, False, True, True])).of(np.array([0.6, 0.9]))
    array([0.525, 0.975])
    """
    if confidences.shape != correct.shape or correct.ndim != 1 or not len(correct):
        raise DataError(
            f"an isotonic fit needs confidences and correctness of the same rows, (N,) and at least one; "
            f"got {confidences.shape} and {correct.shape}"
        )
    values, index = np.unique(confidences.astype(np.float64), return_inverse=True)
    ends, means = _pooled(np.bincount(index), np.bincount(index[correct], minlength=len(values)))
    starts = np.concatenate([[0], ends[:-1]])
    edges = np.stack([values[starts], values[ends - 1]], axis=1).ravel()
    # Beyond the outermost confidences it stays as it is there.
    knots = np.concatenate([[0.0], edges, [1.0]])
    heights = np.concatenate([means[:1], np.repeat(means, 2), means[-1:]])
    tilted = heights + (knots - heights) / len(correct)
    # Blocks of one confidence have one edge, and edges may be nearer than the tilt can tell apart.
    apart = np.append((np.diff(knots) > 0) & (np.diff(tilted) > 0), True)
    knots, tilted = knots[apart], tilted[apart]
    knots[0] = 0.0
    return Isotonic(tuple(knots.tolist()), tuple(tilted.tolist()))


def _pooled(counts: Ints, hits: Ints) -> tuple[Ints, Floats]:
    """Pool adjacent violators.   counts, hits: int (V,), of each value. Returns where blocks end and their means."""
    blocks: list[tuple[int, int, int]] = []
    for end, (n, n_hits) in enumerate(zip(counts.tolist(), hits.tolist(), strict=True), start=1):
        # Counts, not means, are compared: exact, and equal means are pooled.
        while blocks and blocks[-1][2] * n >= n_hits * blocks[-1][1]:
            _, more, more_hits = blocks.pop()
            n, n_hits = n + more, n_hits + more_hits
        blocks.append((end, n, n_hits))
    ends, n_rows, n_right = np.array(blocks).T
    return ends, n_right / n_rows
