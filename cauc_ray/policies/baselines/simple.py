"""Methods without anything but temperatures to learn: single models, raw confidences, the Asymmetric Duo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.calibration import fit_temperatures
from cauc_ray.numbers.softmax import log_softmax, top_option
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.method import Fitted, Fitting, Thresholded
from cauc_ray.policies.trace import Examples, Trace, calls_in_turn, own_answers


@dataclass(frozen=True, slots=True)
class Single:
    """One model alone, by its index in the chain."""

    model: int

    def trace(self, examples: Examples) -> Trace:
        """Return its answers."""
        answers = own_answers(examples.chain, [self.model])
        calls = np.arange(len(examples.chain.models))[None] == self.model
        return Trace(answers, np.ones(answers.shape), calls)


def fit_single(fitting: Fitting, model: int) -> Fitted:
    """Return one model of the chain alone, by its index."""
    return Thresholded(Single(model), fitting.validation)


@dataclass(frozen=True, slots=True)
class RawCascade:
    """Stop where a confidence in the raw logits is high enough; each stage answers for itself, nothing is trained.

    confidence: of logits (N, K), float64 (N,). In a chain of several models one threshold holds for every stage.
    """

    confidence: Callable[[Floats], Floats]

    def trace(self, examples: Examples) -> Trace:
        """Return answers and confidences."""
        chain = examples.chain
        confidences = np.stack([self.confidence(logits) for logits in chain.logits], axis=1)
        return Trace(own_answers(chain), confidences, calls_in_turn(len(chain.models)))


def margins(logits: Floats) -> Floats:
    """Return p(1) - p(2), the two largest raw probabilities, float64 (N,); 1 where there is one option."""
    probabilities = np.exp(log_softmax(logits))
    if probabilities.shape[1] == 1:
        return np.ones(len(logits))
    second, first = np.partition(probabilities, -2, axis=1)[:, -2:].T
    found: Floats = first - second
    return found


def largest_probabilities(logits: Floats) -> Floats:
    """Return the largest raw probability, float64 (N,)."""
    return top_option(logits)[1]


def fit_margin(fitting: Fitting) -> Fitted:
    """Return Margin Sampling (Ramirez et al., COLM 2024), published for two models."""
    return Thresholded(RawCascade(margins), fitting.validation)


def fit_max_probability(fitting: Fitting) -> Fitted:
    """Return the cascade of raw probabilities: CAUC without calibration or fusion, as a control."""
    return Thresholded(RawCascade(largest_probabilities), fitting.validation)


@dataclass(frozen=True, slots=True)
class Duo:
    """All models always answer; their logits are summed by weights 1 / (M T_m), M of them."""

    weights: tuple[float, ...]

    def trace(self, examples: Examples) -> Trace:
        """Return the one answer there is, after all models."""
        logits = examples.chain.logits
        fused = sum(weight * np.float64(own) for weight, own in zip(self.weights, logits, strict=True))
        predictions, confidences = top_option(np.asarray(fused))
        return Trace(predictions[:, None], confidences[:, None], np.ones((1, len(logits)), dtype=bool))


def fit_duo(fitting: Fitting) -> Fitted:
    """Fit Asymmetric Duo's temperatures (Zhou et al., 2025) jointly, to the lowest NLL on the calibration split.

    With two models that is the problem of CAUC-RF's pair, whose published form searches a grid, then by L-BFGS;
    with more it is its natural extension, one temperature for each.
    """
    chain = fitting.calibration.chain
    fit = fit_temperatures(chain.logits, chain.labels)
    note = "" if len(chain.models) == 2 else f"extended to {len(chain.models)} models"
    return Thresholded(Duo(fit.weights), fitting.validation, note=note)
