"""Chains that grow by one model at a time, so that those which begin alike share what they have in common.

A grown chain gives, bit for bit, the trace of the policy that a fit of its models alone would give.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cauc_ray.numbers.calibrators import Calibrator, CalibratorKind
from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.temperature import PairFit, fit_pair
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.answers_sums import AnswerSums, sum_answers
from cauc_ray.policies.calibrated import calibrator_of
from cauc_ray.policies.cauc_base import EPSILON
from cauc_ray.policies.cauc_rf import fold
from cauc_ray.policies.trace import Trace, calls_in_turn


@dataclass(frozen=True, slots=True)
class Grown:
    """What a chain of S models answers on the validation split.

    places: of its models in the pool, cheapest first.   predictions: S arrays int32 (N,), of a stage whose examples
    may go on.   confidences: S arrays float64 (N,).   final: int32 (N,), what the last one answers if none follows.
    fused: r on calibration and on validation, float64 (N, K); None where the method keeps nothing.
    """

    places: tuple[int, ...]
    predictions: tuple[Ints, ...]
    confidences: tuple[Floats, ...]
    final: Ints
    fused: tuple[Floats, Floats] | None = None

    def trace(self) -> Trace:
        """Return every step of every example, were this the whole chain."""
        answers = np.stack([*self.predictions[:-1], self.final]).T
        return Trace(answers, np.stack(self.confidences).T, calls_in_turn(len(self.places)))

    def trace_to(self, labels: Ints) -> Trace:
        """Return the trace of the chain with one more stage, which is always right."""
        answers = np.stack([*self.predictions, labels.astype(np.int32)]).T
        confidences = np.stack([*self.confidences, np.ones(len(labels))]).T
        return Trace(answers, confidences, calls_in_turn(len(self.places) + 1))


class Growth(Protocol):
    """A method whose chains grow over a pool."""

    def grow(self, before: Grown | None, place: int) -> Grown:
        """Put one more of the pool's models at the end of a chain; None is the chain of no model."""
        ...

    def reference(self, place: int) -> float | None:
        """Return the threshold without a budget where a model is last; None for the best on validation."""
        ...


class RFGrowth:
    """CAUC-RF: each beginning of a chain has a pair fit of its own, and r. Fits are kept, r is not."""

    def __init__(self, calibration: ChainLogits, validation: ChainLogits, kind: CalibratorKind = "temperature") -> None:
        """Fit the calibrators of a pool, cheapest first."""
        calibrators = _calibrators(calibration, kind)
        self._labels = calibration.labels
        self._scores = [
            (calibrator.scores(calibration.logits[place]), calibrator.scores(validation.logits[place]))
            for place, calibrator in calibrators.items()
        ]
        self._pairs: dict[tuple[int, ...], PairFit] = {}

    def grow(self, before: Grown | None, place: int) -> Grown:
        """Fold one more model into r (paper, eq. 8-9)."""
        scores = self._scores[place]
        if before is None:
            return self._grown((), (), (place,), scores)
        assert before.fused is not None
        places = (*before.places, place)
        if places not in self._pairs:
            self._pairs[places] = fit_pair(before.fused[0], scores[0], self._labels)
        pair = self._pairs[places]
        r, r_validation = (
            fold(own, pair.alpha, pair.beta, state) for own, state in zip(scores, before.fused, strict=True)
        )
        return self._grown(before.predictions, before.confidences, places, (r, r_validation))

    def reference(self, place: int) -> float | None:
        """Return None: RF has no threshold of its own."""
        return None

    @staticmethod
    def _grown(
        predictions: tuple[Ints, ...],
        confidences: tuple[Floats, ...],
        places: tuple[int, ...],
        fused: tuple[Floats, Floats],
    ) -> Grown:
        answers, own = top_option(fused[1])
        return Grown(places, (*predictions, answers), (*confidences, own), answers, fused)


@dataclass(frozen=True, slots=True)
class _Answered:
    """A model on validation: its own answers int32 (N,), their confidences (N,), its weighted logits (N, K)."""

    predictions: Ints
    confidences: Floats
    weighted: Floats


class BaseGrowth:
    """CAUC Base: a stage answers by itself, whatever the chain; only what the last one fuses depends on the others."""

    def __init__(self, calibration: ChainLogits, validation: ChainLogits, kind: CalibratorKind = "temperature") -> None:
        """Fit the calibrators and complementarity rates of a pool, cheapest first."""
        calibrators = _calibrators(calibration, kind)
        m = len(calibrators)
        sums = [_sums_with_last(calibration, calibrators, last) for last in range(m)]
        self._fused: list[Bools] = [
            np.array([sums[last][place].complementarity_rate > 0 for place in range(last)]) for last in range(m)
        ]
        self._references = [sums[last][last].accuracy for last in range(m)]
        self._models = [
            _answered(validation.logits[place], calibrator, sums[place][place])
            for place, calibrator in calibrators.items()
        ]

    def grow(self, before: Grown | None, place: int) -> Grown:
        """Let one more model answer, and fuse with it what complements it (paper, algorithm 1)."""
        own = self._models[place]
        if before is None:
            return Grown((place,), (own.predictions,), (own.confidences,), own.predictions)
        return Grown(
            (*before.places, place),
            (*before.predictions, own.predictions),
            (*before.confidences, own.confidences),
            self._fuse([other for other in before.places if self._fused[place][other]], place),
        )

    def reference(self, place: int) -> float | None:
        """Return the last model's accuracy on calibration (paper, eq. 5)."""
        return self._references[place]

    def _fuse(self, others: list[int], last: int) -> Ints:
        own = self._models[last]
        if not others:
            return own.predictions
        # Added in the chain's order, as a replay adds them: another order rounds to other bits.
        weight, total = np.zeros(len(own.predictions)), np.zeros(own.weighted.shape)
        for model in (*(self._models[place] for place in others), own):
            weight += model.confidences
            total += model.weighted
        fused: Ints = (total / weight[:, None]).argmax(axis=1).astype(np.int32)
        return fused


def _calibrators(calibration: ChainLogits, kind: CalibratorKind) -> dict[int, Calibrator]:
    return {place: calibrator_of(calibration, place, kind).calibrator for place in range(len(calibration.models))}


def _sums_with_last(
    calibration: ChainLogits, calibrators: Mapping[int, Calibrator], last: int
) -> dict[int, AnswerSums]:
    """Return the sums of the models up to one, with their gains and losses against that one."""
    places = range(last + 1)
    return sum_answers(calibration.of_models(places), {place: calibrators[place] for place in places})


def _answered(logits: Floats, calibrator: Calibrator, sums: AnswerSums) -> _Answered:
    scores = calibrator.scores(logits)
    predictions, confidences = calibrator.answers(scores)
    return _Answered(predictions, confidences, confidences[:, None] * ((scores - sums.mean) / (sums.std + EPSILON)))
