"""What a fit asks of a chain's parts: calibrators, RF's pairs of temperatures, sums over calibrated answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.calibration import (
    MOST_OPTIONS,
    Parts,
    TemperatureFit,
    solve_bias_corrected,
    solve_temperatures,
)
from cauc_ray.numbers.calibrators import Calibrator, CalibratorKind, Isotonic, fit_isotonic
from cauc_ray.numbers.chain import Chain, ChainPart, Rows
from cauc_ray.numbers.floors import FloorFit, fit_floor
from cauc_ray.numbers.likelihood import first_lacking
from cauc_ray.numbers.logits import bounded_below, top_option
from cauc_ray.numbers.metrics import CalibrationSums
from cauc_ray.numbers.threads import in_threads
from cauc_ray.numbers.types import Bools, Floats, Ints, Summed
from cauc_ray.policies.trace import of_rows


@dataclass(frozen=True, slots=True)
class Moments:
    """The mean of n numbers, and the sum of squared deviations from it."""

    n: int
    mean: float
    square: float

    def __add__(self, addend: Moments) -> Moments:
        """Return the statistics of both sets of numbers (Chan, Golub and LeVeque, 1983)."""
        n, difference = self.n + addend.n, addend.mean - self.mean
        return Moments(
            n,
            self.mean + difference * addend.n / n,
            self.square + addend.square + difference * difference * self.n * addend.n / n,
        )

    @property
    def std(self) -> float:
        """Return the standard deviation."""
        return float(np.sqrt(self.square / self.n))


@dataclass(frozen=True, slots=True)
class AnswerSums(Summed):
    """Sums over the n rows that a stage answers.

    Attributes:
        n: Rows.
        n_right: Right answers.
        before: Sums of the confidences at T = 1.
        after: Sums of the calibrated confidences.
        logits: Moments of the calibrated logits of all real options.
        n_gain: Rows where it is more confident than the last stage, and only it is right (paper, eq. 6).
        n_loss: Rows where it is more confident than the last stage, and only the last is right.
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
    """Return the sums of some stages, by stage.

    Args:
        chain: Labelled rows.
        calibrators: By stage; gains and losses are counted only if the last stage is among them.
    """
    return _added(chain.each(partial(_sum_part, dict(calibrators))))


def _added(sums: Iterable[dict[int, AnswerSums]]) -> dict[int, AnswerSums]:
    return reduce(lambda left, right: {stage: addend + right[stage] for stage, addend in left.items()}, sums)


def _sum_part(calibrators: dict[int, Calibrator], part: ChainPart) -> dict[int, AnswerSums]:
    return _added(in_threads(partial(_sum_block, calibrators, part), list(part.blocks())))


def _sum_block(calibrators: dict[int, Calibrator], part: ChainPart, rows: slice) -> dict[int, AnswerSums]:
    labels, large, sums = part.labels[rows], None, {}
    # The last stage first: the complementarity of the earlier stages is with it.
    for stage in sorted(calibrators, reverse=True):
        logits = part.logits[stage][rows]
        scores = calibrators[stage].scores(logits)
        predictions, confidences = calibrators[stage].answers(scores)
        raw_predictions, raw_confidences = top_option(logits)
        correct = predictions == labels
        answers = correct, confidences
        if stage == len(part.logits) - 1:
            large = answers
        finite = np.isfinite(scores)
        # In order of rows: arrays by columns, as some chains hold them, would have other last digits of sums.
        real = scores.ravel() if finite.all() else scores[finite]
        mean = float(real.mean())
        sums[stage] = AnswerSums(
            len(labels),
            int(correct.sum()),
            CalibrationSums.of(raw_confidences, raw_predictions == labels),
            CalibrationSums.of(confidences, correct),
            Moments(real.size, mean, float(np.square(real - mean).sum())),
            *_gains_and_losses(answers, large or answers),
        )
    return sums


def _gains_and_losses(small: tuple[Bools, Floats], large: tuple[Bools, Floats]) -> tuple[int, int]:
    """Return how often a more confident answer is right, and wrong, where the other is not."""
    bolder = small[1] > large[1]
    return int((bolder & small[0] & ~large[0]).sum()), int((bolder & ~small[0] & large[0]).sum())


@dataclass(frozen=True, slots=True)
class CalibratorFit:
    """A fitted calibrator.

    Attributes:
        calibrator: The calibrator.
        temperature: Fit of its temperature; nll_after is that of the calibrator's probabilities.
        floor: Fit of its floor; None without one.
    """

    calibrator: Calibrator
    temperature: TemperatureFit
    floor: FloorFit | None


def calibrator_of(chain: Chain, stage: int, kind: CalibratorKind) -> CalibratorFit:
    """Fit a stage's calibrator.

    Raises:
        DataError: As fit_temperature does; or, for offsets, an example lacks an option or a model has too many.
    """
    raw = parts_of(chain, lambda part: part.of_models([stage]))
    floor_fit = fit_floor(raw.ask_parts, raw.n, chain.logit_kinds[stage])
    floor = None if floor_fit is None else floor_fit.floor
    parts = raw if floor is None else parts_of(chain, partial(_bounded, stage, floor))
    fit = solve_temperatures(parts)
    if floor is not None:
        fit = replace(fit, nll_before=raw.nll(np.ones(1)))
    if kind == "offsets":
        fit = _bias_corrected(chain, stage, parts, fit)
    calibrator = Calibrator(fit.temperature, fit.biases, floor=floor)
    if kind == "isotonic":
        confidences, correct = of_rows(chain, partial(_answers, stage, calibrator))
        isotonic = fit_isotonic(confidences, correct)
        calibrator = replace(calibrator, isotonic=isotonic)
        fit = replace(fit, nll_after=fit.nll_after - _nll_saved(isotonic, confidences, correct))
    return CalibratorFit(calibrator, fit, floor_fit)


def _bounded(stage: int, floor: float, part: ChainPart) -> ChainPart:
    """Return a part with one stage's logits, raised to a floor as they are read."""
    source = part.logits[stage]
    raised = ComputedRows((source,), lambda logits: bounded_below(logits[0], floor), source.dtype)
    return replace(part, logits=(raised,))


def _answers(stage: int, calibrator: Calibrator, part: ChainPart, rows: slice) -> tuple[Floats, Bools]:
    """Return each row's confidence and whether its answer is right."""
    predictions, confidences = calibrator.answers(calibrator.scores(part.logits[stage][rows]))
    return confidences, predictions == part.labels[rows]


def _nll_saved(isotonic: Isotonic, confidences: Floats, correct: Bools) -> float:
    """Return the decrease of the mean NLL when each answer gets its new confidence and the others share the rest."""
    after = isotonic.of(confidences)
    tiny = np.finfo(np.float64).tiny
    right = np.log(np.maximum(after, tiny)) - np.log(confidences)
    wrong = np.log(np.maximum(1 - after, 2.0**-53)) - np.log(np.maximum(1 - confidences, 2.0**-53))
    return float(np.where(correct, right, wrong).mean())


def _bias_corrected(chain: Chain, stage: int, parts: Parts, alone: TemperatureFit) -> TemperatureFit:
    n_options, model = parts.n_options, chain.models[stage]
    lacking = [rank for rank in parts.ask_parts(first_lacking) if rank is not None]
    if lacking:
        raise DataError(
            f"{chain.source}: example {chain.example_ids[min(lacking)]!r} lacks some of the {n_options} options of "
            f"model {model!r}; offsets need the same options for all examples, use --calibrator temperature"
        )
    if n_options > MOST_OPTIONS:
        raise DataError(
            f"{chain.source}: offsets support up to {MOST_OPTIONS:,} options, model {model!r} has "
            f"{n_options:,}; use --calibrator temperature"
        )
    return solve_bias_corrected(parts, alone)


@dataclass(frozen=True, slots=True)
class ComputedRows:
    """Rows, float (n, K), that are computed from some models' logits as they are read."""

    logits: tuple[Rows, ...]
    compute: Callable[[list[Floats]], Floats]
    dtype: np.dtype[np.floating] = field(default_factory=lambda: np.dtype(np.float64))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the rows, (n, K)."""
        return self.logits[0].shape

    def __getitem__(self, rows: slice | Ints, /) -> Floats:
        return self.compute([logits[rows] for logits in self.logits])


def parts_of(chain: Chain, sources: Callable[[ChainPart], ChainPart]) -> Parts:
    """Return a chain's parts for a fit.   sources: replaces a part's logits by the arrays to fit."""
    return Parts(lambda ask: chain.each(lambda part: ask(sources(part))), len(chain))
