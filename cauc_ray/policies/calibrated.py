"""Fits of a stage's calibrator, of the kind that is asked for, on the parts of a chain."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.numbers.calibrators import KINDS, Calibrator, CalibratorKind
from cauc_ray.numbers.chain import Chain, ChainPart
from cauc_ray.numbers.isotonic import Isotonic, fit_isotonic
from cauc_ray.numbers.temperature import FitStatus
from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.weighed import offsets_of, temperature_of

# A map of confidences of its own for every model is for a small and a large one: what a third is worth to the two
# would be decided by three maps, each of which knows only how often its own model is right.
MOST_ISOTONIC = 2


@dataclass(frozen=True, slots=True)
class CalibratorFit:
    """A fitted calibrator; the temperature's standard error, NaN where it was clamped; mean NLL in nats.

    nll_before: of the logits as they are.   nll_after: of the calibrator's probabilities.
    """

    calibrator: Calibrator
    standard_error: float
    nll_before: float
    nll_after: float
    status: FitStatus


def require_calibrator(kind: CalibratorKind, method: str, n_models: int) -> None:
    """Raise ConfigError unless a method can use such calibrators with so many models."""
    if kind not in KINDS:
        raise ConfigError(unknown_name("calibrator", kind, KINDS))
    if kind == "isotonic" and (method != "base" or n_models > MOST_ISOTONIC):
        raise ConfigError(
            f"the calibrator isotonic is for method base with one or two models, got {method} with {n_models}; "
            "take temperature or offsets"
        )


def calibrator_of(chain: Chain, stage: int, kind: CalibratorKind) -> CalibratorFit:
    """Fit a stage's calibrator. Raises DataError as fit_temperature and offsets_of do."""
    if kind == "offsets":
        shifted = offsets_of(chain, stage)
        calibrator = Calibrator(shifted.temperature, shifted.offsets)
        return CalibratorFit(calibrator, shifted.standard_error, shifted.nll_before, shifted.nll_after, shifted.status)
    fit = temperature_of(chain, stage)
    calibrator, nll_after = Calibrator(fit.temperature), fit.nll_after
    if kind == "isotonic":
        confidences, correct = _answers_of(chain, stage, calibrator)
        isotonic = fit_isotonic(confidences, correct)
        nll_after -= _nll_saved(isotonic, confidences, correct)
        calibrator = Calibrator(fit.temperature, isotonic=isotonic)
    return CalibratorFit(calibrator, fit.standard_error, fit.nll_before, nll_after, fit.status)


def _answers_of(chain: Chain, stage: int, calibrator: Calibrator) -> tuple[Floats, Bools]:
    """Return each row's confidence and whether its answer is right, in any order."""
    parts = chain.each(partial(_part_answers, stage, calibrator))
    confidences, correct = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return confidences, correct


def _part_answers(stage: int, calibrator: Calibrator, part: ChainPart) -> tuple[Floats, Bools]:
    confidences, correct = np.empty(len(part)), np.empty(len(part), dtype=bool)
    for rows in part.blocks():
        predictions, confidences[rows] = calibrator.answers(calibrator.scores(part.logits[stage][rows]))
        correct[rows] = predictions == part.labels[rows]
    return confidences, correct


def _nll_saved(isotonic: Isotonic, confidences: Floats, correct: Bools) -> float:
    """Return by how much less the mean NLL is where an answer has its new confidence, and the others share the rest."""
    after = isotonic.of(confidences)
    tiny = np.finfo(np.float64).tiny
    right = np.log(np.maximum(after, tiny)) - np.log(confidences)
    wrong = np.log(np.maximum(1 - after, 2.0**-53)) - np.log(np.maximum(1 - confidences, 2.0**-53))
    return float(np.where(correct, right, wrong).mean())
