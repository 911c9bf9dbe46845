"""What calibration does to each model of a chain, and what Base's threshold promised and kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cauc_ray.numbers.calibrators import UNCALIBRATED
from cauc_ray.numbers.metrics import CalibrationSums, aurc, brier, calibration_error, nll
from cauc_ray.numbers.softmax import log_softmax, top_option
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.fitting import fit_base
from cauc_ray.policies.methods import Fitting
from cauc_ray.policies.trace import Examples, measure_replay

CONVENTIONS: Mapping[str, str] = {
    "ece": "Sum over 15 bins of equal width of their share of rows times |accuracy - mean confidence|.",
    "ece_equal_mass": "The same over 15 bins of as many rows each.",
    "nll": "Mean negative log probability of the label, in nats.",
    "brier": "Mean over rows of the squared distance of the probabilities to the label's, summed over options.",
    "aurc": "Mean error among the k most confident rows, over all k; rows of equal confidence count alike.",
    "z": "Spiegelhalter's statistic of the confidences, standard normal where they are calibrated; with its p-value.",
    "selective_risk": "Error among the rows that a stage of Base accepted, beside 1 less the threshold, which it does "
    "not exceed where confidences are calibrated.",
}


def calibration_of(fitting: Fitting, test: Examples) -> dict[str, Any]:
    """Measure every model's confidences on labelled examples, before and after its temperature, and Base's stages.

    Returns models: for each its temperature and figures before and after; and base: its threshold, and for each stage
    the rows that reached it, the share accepted, their error with its interval, and what was promised.
    """
    policy = fit_base(fitting.calibration.chain)
    models = []
    for stage, logits in zip(policy.stages, test.chain.logits, strict=True):
        before, after = (_figures(by.scores(logits), test.chain.labels) for by in (UNCALIBRATED, stage.calibrator))
        models.append({"model": stage.name, "temperature": stage.temperature, "before": before, "after": after})
    return {"models": models, "base": {"threshold": policy.threshold, "stages": _stages(policy, test)}}


def _figures(scores: Floats, labels: Ints) -> dict[str, float | None]:
    predictions, confidences = top_option(scores)
    correct, log_probabilities = predictions == labels, log_softmax(scores)
    z = CalibrationSums.of(confidences, correct).test
    return {
        "ece": calibration_error(confidences, correct),
        "ece_equal_mass": calibration_error(confidences, correct, "equal-mass"),
        "nll": nll(log_probabilities, labels),
        "brier": brier(np.exp(log_probabilities), labels),
        "aurc": aurc(confidences, correct),
        "z": None if z is None else z.z,
        "z_p": None if z is None else z.p_value,
    }


def _stages(policy: BasePolicy, test: Examples) -> list[dict[str, Any]]:
    """Return what Base's stages but the last accepted, and how often that was wrong."""
    _, measures = measure_replay(policy, test.chain)
    return [
        {
            "stage": stage.name,
            "reached": stage.reached,
            "coverage": stage.coverage.value if stage.coverage else None,
            "risk": 1 - right.value if (right := stage.accepted_accuracy) else None,
            "risk_interval": [1 - right.high, 1 - right.low] if right else None,
            "promised": 1 - policy.threshold,
        }
        for stage in measures.stages[:-1]
    ]
