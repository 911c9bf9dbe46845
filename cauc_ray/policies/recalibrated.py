"""Any method on recalibrated logits: what a method gains by recalibration alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from cauc_ray.numbers.sweep import OperatingPoints
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.candidates import StackedFits
from cauc_ray.policies.methods import Curve, Fitted, Fitting
from cauc_ray.policies.trace import Answers, Examples

Recalibration: TypeAlias = Callable[[Examples], Examples]


@dataclass(frozen=True, slots=True)
class Recalibrated:
    """A method that was fitted on recalibrated logits, and is given them wherever it answers."""

    fitted: Fitted
    recalibrate: Recalibration

    @property
    def note(self) -> str:
        """Return how it differs from the published method."""
        return self.fitted.note

    @property
    def points(self) -> OperatingPoints:
        """Return the validation split's results at every distinct setting."""
        return self.fitted.points

    @property
    def default(self) -> float:
        """Return the setting without a budget."""
        return self.fitted.default

    def answers(self, examples: Examples, setting: float) -> Answers:
        """Answer examples at a setting."""
        return self.fitted.answers(self.recalibrate(examples), setting)

    def curve(self, examples: Examples, settings: Floats) -> Curve:
        """Measure settings on labelled examples."""
        return self.fitted.curve(self.recalibrate(examples), settings)


def fit_recalibrated(fit: Callable[[Fitting], Fitted], fitting: Fitting) -> Fitted:
    """Fit a method on the logits that a stacked cascade makes of each model's alone."""
    if "recalibration" not in fitting.shared:
        fitting.shared["recalibration"] = _recalibration(fitting)
    recalibrate: Recalibration = fitting.shared["recalibration"]
    calibration, validation = recalibrate(fitting.calibration), recalibrate(fitting.validation)
    training = None if fitting.training is None else recalibrate(fitting.training)
    own = replace(fitting, calibration=calibration, validation=validation, training=training, shared={})
    return Recalibrated(fit(own), recalibrate)


def _recalibration(fitting: Fitting) -> Recalibration:
    """Fit each model alone with the biases that cross-validation gives it."""
    chain = fitting.calibration.chain
    fits = StackedFits(Examples(chain), None)
    alone = [fits.candidates([model])[0].policy.stages[0] for model in range(len(chain.models))]

    def recalibrate(examples: Examples) -> Examples:
        by_model = zip(alone, examples.chain.logits, strict=True)
        logits = tuple(stage.scores_after(own, None) for stage, own in by_model)
        return replace(examples, chain=replace(examples.chain, logits=logits))

    return recalibrate
