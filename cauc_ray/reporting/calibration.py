"""What each model's confidences promise on test, before and after calibration."""

from __future__ import annotations

from dataclasses import dataclass

from cauc_ray.numbers.metrics import Reliability, calibration_error, reliability_bins
from cauc_ray.policies.policy_file import Stage
from cauc_ray.reporting.measured import Measured, stage_confidences


@dataclass(frozen=True, slots=True)
class ModelCalibration:
    """A model's reliability on n test examples, and the expected calibration error of its 15 bins."""

    stage: Stage
    n: int
    before: Reliability
    after: Reliability
    error_before: float
    error_after: float


def measure_calibration(measured: Measured) -> tuple[ModelCalibration, ...]:
    """Measure every model of the chain on all test examples, also those that never reach it."""
    chain, found = measured.test, []
    for stage, logits in zip(measured.policy.stages, chain.logits, strict=True):
        bins, errors = [], []
        for calibrated in (False, True):
            answers, confidences = stage_confidences(stage, logits, calibrated=calibrated)
            correct = answers == chain.labels
            bins.append(reliability_bins(confidences, correct))
            errors.append(calibration_error(confidences, correct))
        found.append(ModelCalibration(stage, len(chain), bins[0], bins[1], errors[0], errors[1]))
    return tuple(found)
