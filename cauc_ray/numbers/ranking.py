"""Whether confidences rank right answers above wrong ones."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.types import Bools, Floats


@dataclass(frozen=True, slots=True)
class Ranking:
    """The area under the ROC curve of confidences against being right: 1/2 tells nothing.

    p_value: of so large an area or a larger one, were confidences and being right independent.
    """

    area: float
    p_value: float


def ranking(confidences: Floats, correct: Bools) -> Ranking | None:
    """Return how well confidences rank, by the rank-sum test (Mann and Whitney, 1947) with ties at mid-ranks.

    confidences: float (N,).   correct: bool (N,). Its normal limit is used, whose variance is lessened for ties.
    Returns None where all rows are right or all are wrong: nothing can be ranked there.

    >>> ranking(np.array([0.9, 0.8, 0.7, 0.6]), np.array([True, True, False, False])).area
    1.0
    """
    n, n_right = len(correct), int(correct.sum())
    if n_right in (0, n):
        return None
    _, index, counts = np.unique(confidences, return_inverse=True, return_counts=True)
    mid_ranks = np.cumsum(counts) - (counts - 1) / 2
    n_pairs = n_right * (n - n_right)
    area = (float(mid_ranks[index[correct]].sum()) - n_right * (n_right + 1) / 2) / n_pairs
    ties = float((counts.astype(np.float64) ** 3 - counts).sum()) / (n * (n - 1))
    variance = (n + 1 - ties) / (12 * n_pairs)
    # All confidences equal: they rank nothing.
    p_value = 1.0 if variance <= 0 else math.erfc((area - 0.5) / math.sqrt(2 * variance)) / 2
    return Ranking(area, p_value)
