"""Asymmetric Duo (Zhou et al., 2025): all models always answer, and their scaled logits are averaged."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.newton import fit_weights
from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.method import Fitted, Fitting, Steered
from cauc_ray.policies.trace import Examples, Trace


@dataclass(frozen=True, slots=True)
class Duo:
    """The sum of the models' logits by weights 1 / (M T_m), float64 (M,)."""

    weights: Floats

    def trace(self, examples: Examples) -> Trace:
        """Return the one answer there is, after all models."""
        logits = examples.chain.logits
        fused = sum(weight * np.float64(own) for weight, own in zip(self.weights, logits, strict=True))
        predictions, confidences = top_option(np.asarray(fused))
        return Trace(predictions[:, None], confidences[:, None], np.ones((1, len(logits)), dtype=bool))


def fit_duo(fitting: Fitting) -> Fitted:
    """Fit the temperatures jointly, to the minimum of the NLL on the calibration split.

    With two models that is the problem of CAUC-RF's pair, whose published form searches a grid, then by L-BFGS;
    with more it is its natural extension, one temperature for each.
    """
    chain = fitting.calibration.chain
    fit = fit_weights(chain.logits, chain.labels, start=1.0 / len(chain.models))
    note = "" if len(chain.models) == 2 else f"extended to {len(chain.models)} models"
    return Steered(Duo(fit.weights), fitting.validation, note=note)
