"""Any method on recalibrated logits: what a method gains by recalibration alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from cauc_ray.numbers.types import Floats
from cauc_ray.policies.family import Family
from cauc_ray.policies.fitting import Fitting, entries_of_models
from cauc_ray.policies.methods.stacked import StackedStage
from cauc_ray.policies.policy import Stage
from cauc_ray.policies.stacking import PENALTIES, Stacking
from cauc_ray.policies.trace import Examples

Recalibration: TypeAlias = Callable[[Examples], Examples]


def fit_recalibrated(fit: Callable[[Fitting], Family], fitting: Fitting) -> Family:
    """Fit a method on the logits that a stacked cascade makes of each model's alone.

    Those of a calibration row are made by fits that did not see it, as new rows are: in-sample ones are overconfident.
    """
    if "recalibration" not in fitting.shared:
        fitting.shared["recalibration"] = _recalibration(fitting.calibration)
    recalibrate, calibration = fitting.shared["recalibration"]
    splits = {"calibration": calibration, "validation": recalibrate(fitting.validation)}
    if fitting.training is not None:
        splits["training"] = recalibrate(fitting.training)
    family = fit(replace(fitting, **splits, shared={}))
    return replace(family, validation=fitting.validation, reading=recalibrate)


def _recalibration(calibration: Examples) -> tuple[Recalibration, Examples]:
    """Fit each model alone, with the biases that cross-validation gives it.

    Returns the map of other examples, and the calibration split by the fits on the other folds.
    """
    chain = calibration.chain
    entries = [Stage(**entry) for entry in entries_of_models(chain)]
    pairs = zip(entries, chain.logits, strict=True)
    stacking = Stacking([stage.bounded(logits) for stage, logits in pairs], chain.labels)
    stages, held_out = list[StackedStage](), list[Floats]()
    for model, stage in enumerate(entries):
        (fit,) = stacking.chain([model], PENALTIES)
        stages.append(StackedStage(**dict(stage), **fit.numbers))
        held_out.append(stacking.held_out_scores([model], PENALTIES))

    def recalibrate(examples: Examples) -> Examples:
        by_model = zip(stages, examples.chain.logits, strict=True)
        logits = tuple(stage.scores_after(raw, None) for stage, raw in by_model)
        return replace(examples, chain=replace(examples.chain, logits=logits))

    return recalibrate, replace(calibration, chain=replace(chain, logits=tuple(held_out)))
