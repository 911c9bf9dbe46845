"""Any method on recalibrated logits: what a method gains by recalibration alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from cauc_ray.policies.candidates import StackedFits
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.trace import Examples

Recalibration: TypeAlias = Callable[[Examples], Examples]


def fit_recalibrated(fit: Callable[[Fitting], Family], fitting: Fitting) -> Family:
    """Fit a method on the logits that a stacked cascade makes of each model's alone."""
    if "recalibration" not in fitting.shared:
        fitting.shared["recalibration"] = _recalibration(fitting)
    recalibrate: Recalibration = fitting.shared["recalibration"]
    calibration, validation = recalibrate(fitting.calibration), recalibrate(fitting.validation)
    training = None if fitting.training is None else recalibrate(fitting.training)
    own = replace(fitting, calibration=calibration, validation=validation, training=training, shared={})
    return replace(fit(own), validation=fitting.validation, reading=recalibrate)


def _recalibration(fitting: Fitting) -> Recalibration:
    """Fit each model alone with the biases that cross-validation gives it."""
    chain = fitting.calibration.chain
    fits = StackedFits(Examples(chain), None)
    alone = [fits.candidates([model])[0].stages[0] for model in range(len(chain.models))]

    def recalibrate(examples: Examples) -> Examples:
        by_model = zip(alone, examples.chain.logits, strict=True)
        logits = tuple(stage.scores_after(own, None) for stage, own in by_model)
        return replace(examples, chain=replace(examples.chain, logits=logits))

    return recalibrate
