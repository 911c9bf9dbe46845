"""What a chain's calibrated answers amount to, summed over the rows of every part of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np

from cauc_ray.numbers.calibrators import Calibrator
from cauc_ray.numbers.chain import Chain, ChainPart
from cauc_ray.numbers.metrics import calibration_gaps
from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.types import Bools, Floats


@dataclass(frozen=True, slots=True)
class AnswerSums:
    """Sums over n rows of what a stage answers.

    n_right: answers that are the label.   gaps_before, gaps_after: calibration_gaps at T = 1 and calibrated.
    n_options, mean, square: how many real options there are, the mean of their calibrated logits, and the sum of
    squared distances from it.   n_gain, n_loss: as the paper's eq. 6 counts them, with the last stage.
    """

    n: int
    n_right: int
    gaps_before: Floats
    gaps_after: Floats
    n_options: int
    mean: float
    square: float
    n_gain: int = 0
    n_loss: int = 0

    def __add__(self, other: AnswerSums) -> AnswerSums:
        """Return the sums of both's rows; means merge as Chan, Golub and LeVeque have it (1983)."""
        n_options = self.n_options + other.n_options
        apart = other.mean - self.mean
        return AnswerSums(
            n=self.n + other.n,
            n_right=self.n_right + other.n_right,
            gaps_before=self.gaps_before + other.gaps_before,
            gaps_after=self.gaps_after + other.gaps_after,
            n_options=n_options,
            mean=self.mean + apart * other.n_options / n_options,
            square=self.square + other.square + apart * apart * self.n_options * other.n_options / n_options,
            n_gain=self.n_gain + other.n_gain,
            n_loss=self.n_loss + other.n_loss,
        )

    @property
    def accuracy(self) -> float:
        """Return the share of right answers."""
        return self.n_right / self.n

    @property
    def calibration_errors(self) -> tuple[float, float]:
        """Return the calibration error over 15 equal-width bins before and after."""
        return float(np.abs(self.gaps_before).sum() / self.n), float(np.abs(self.gaps_after).sum() / self.n)

    @property
    def std(self) -> float:
        """Return the deviation of the calibrated logits over all real options."""
        return float(np.sqrt(self.square / self.n_options))

    @property
    def complementarity_rate(self) -> float:
        """Return (N_gain - N_loss) / N where the stage is more confident than the last (paper, eq. 6)."""
        return (self.n_gain - self.n_loss) / self.n


def sum_answers(chain: Chain, calibrators: Mapping[int, Calibrator]) -> dict[int, AnswerSums]:
    """Return the sums of some stages, by stage.   calibrators: theirs; with the last stage's, gains and losses."""
    if not calibrators:
        return {}
    parts = chain.each(partial(_sum_part, dict(calibrators)))
    return {stage: reduce(AnswerSums.__add__, (part[stage] for part in parts)) for stage in calibrators}


def _sum_part(calibrators: dict[int, Calibrator], part: ChainPart) -> dict[int, AnswerSums]:
    sums: dict[int, AnswerSums] = {}
    for rows in part.blocks():
        for stage, own in _sum_block(calibrators, part, rows).items():
            sums[stage] = sums[stage] + own if stage in sums else own
    return sums


@dataclass(frozen=True, slots=True)
class _Answered:
    """A stage's answers to a block: which are right, and how confident it is."""

    correct: Bools
    confidences: Floats


def _sum_block(calibrators: dict[int, Calibrator], part: ChainPart, rows: slice) -> dict[int, AnswerSums]:
    last, large = len(part.logits) - 1, None
    sums = {}
    # The last stage first: the others' complementarity is with it.
    for stage in sorted(calibrators, reverse=True):
        logits = part.logits[stage][rows]
        scores = calibrators[stage].scores(logits)
        predictions, confidences = calibrators[stage].answers(scores)
        raw_predictions, raw_confidences = top_option(logits)
        own = _Answered(predictions == part.labels[rows], confidences)
        if stage == last:
            large = own
        n_gain, n_loss = _gains_and_losses(own, large) if large is not None else (0, 0)
        real = scores[np.isfinite(scores)]
        mean = float(real.mean())
        sums[stage] = AnswerSums(
            n=len(predictions),
            n_right=int(own.correct.sum()),
            gaps_before=calibration_gaps(raw_confidences, raw_predictions == part.labels[rows]),
            gaps_after=calibration_gaps(confidences, own.correct),
            n_options=len(real),
            mean=mean,
            square=float(((real - mean) ** 2).sum()),
            n_gain=n_gain,
            n_loss=n_loss,
        )
    return sums


def _gains_and_losses(small: _Answered, large: _Answered) -> tuple[int, int]:
    bolder = small.confidences > large.confidences
    gains = int((bolder & small.correct & ~large.correct).sum())
    return gains, int((bolder & ~small.correct & large.correct).sum())
