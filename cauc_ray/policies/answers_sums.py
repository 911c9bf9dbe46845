"""Statistics of a chain's calibrated answers, summed over the rows of all its parts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np

from cauc_ray.numbers.calibrators import Calibrator
from cauc_ray.numbers.chain import Chain, ChainPart
from cauc_ray.numbers.metrics import CalibrationSums
from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.types import Bools, Floats, Summed


@dataclass(frozen=True, slots=True)
class Moments:
    """The mean of n numbers, and the sum of squared deviations from it."""

    n: int
    mean: float
    square: float

    def __add__(self, other: Moments) -> Moments:
        """Return the statistics of both sets of numbers (Chan, Golub and LeVeque, 1983)."""
        n, apart = self.n + other.n, other.mean - self.mean
        return Moments(
            n,
            self.mean + apart * other.n / n,
            self.square + other.square + apart * apart * self.n * other.n / n,
        )

    @property
    def std(self) -> float:
        """Return the standard deviation."""
        return float(np.sqrt(self.square / self.n))


@dataclass(frozen=True, slots=True)
class AnswerSums(Summed):
    """Sums over the n rows that a stage answers.

    n_right: answers that are the label.   before, after: of confidences at T = 1 and calibrated.
    logits: calibrated, of all real options.   n_gain, n_loss: as the paper's eq. 6 counts them, with the last stage.
    """

    n: int
    n_right: int
    before: CalibrationSums
    after: CalibrationSums
    logits: Moments
    n_gain: int
    n_loss: int

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.n_right / self.n

    @property
    def complementarity_rate(self) -> float:
        """Return (N_gain - N_loss) / N where the stage is more confident than the last (paper, eq. 6)."""
        return (self.n_gain - self.n_loss) / self.n


def sum_answers(chain: Chain, calibrators: Mapping[int, Calibrator]) -> dict[int, AnswerSums]:
    """Return the sums of some stages, by stage.   calibrators: theirs; with the last stage's, gains and losses."""
    return _added(chain.each(partial(_sum_part, dict(calibrators))))


def _added(sums: Iterable[dict[int, AnswerSums]]) -> dict[int, AnswerSums]:
    return reduce(lambda one, other: {stage: own + other[stage] for stage, own in one.items()}, sums)


def _sum_part(calibrators: dict[int, Calibrator], part: ChainPart) -> dict[int, AnswerSums]:
    return _added(_sum_block(calibrators, part, rows) for rows in part.blocks())


def _sum_block(calibrators: dict[int, Calibrator], part: ChainPart, rows: slice) -> dict[int, AnswerSums]:
    labels, large, sums = part.labels[rows], None, {}
    # The last stage first: the others' complementarity is with it.
    for stage in sorted(calibrators, reverse=True):
        logits = part.logits[stage][rows]
        scores = calibrators[stage].scores(logits)
        predictions, confidences = calibrators[stage].answers(scores)
        raw_predictions, raw_confidences = top_option(logits)
        own = predictions == labels, confidences
        if stage == len(part.logits) - 1:
            large = own
        real = scores[np.isfinite(scores)]
        mean = float(real.mean())
        sums[stage] = AnswerSums(
            len(labels),
            int(own[0].sum()),
            CalibrationSums.of(raw_confidences, raw_predictions == labels),
            CalibrationSums.of(confidences, own[0]),
            Moments(len(real), mean, float(((real - mean) ** 2).sum())),
            *_gains_and_losses(own, large or own),
        )
    return sums


def _gains_and_losses(small: tuple[Bools, Floats], large: tuple[Bools, Floats]) -> tuple[int, int]:
    """Return how often a more confident answer is right, and wrong, where the other is not."""
    bolder = small[1] > large[1]
    return int((bolder & small[0] & ~large[0]).sum()), int((bolder & ~small[0] & large[0]).sum())
