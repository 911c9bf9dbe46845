"""Methods without anything but temperatures to learn: single models, raw confidences, the Asymmetric Duo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from cauc_ray.numbers.calibration import fit_temperatures
from cauc_ray.numbers.softmax import log_softmax, top_option
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.methods import Fitted, Fitting, Thresholded
from cauc_ray.policies.trace import Examples, Trace, calls_in_turn, own_answers


def fit_single(fitting: Fitting, model: int) -> Fitted:
    """Return one model of the chain alone, by its index."""

    def alone(examples: Examples) -> Trace:
        answers = own_answers(examples.chain, [model])
        return Trace(answers, np.ones(answers.shape), np.arange(len(examples.chain.models))[None] == model)

    return Thresholded(alone, fitting.validation)


def raw_cascade(confidence: Callable[[Floats], Floats], examples: Examples) -> Trace:
    """Return each stage's own answer, and how sure it is by its raw logits; nothing is trained.

    confidence: of logits (N, K), float64 (N,). In a chain of several models one threshold holds for every stage.
    """
    chain = examples.chain
    confidences = np.stack([confidence(logits) for logits in chain.logits], axis=1)
    return Trace(own_answers(chain), confidences, calls_in_turn(len(chain.models)))


def margins(logits: Floats) -> Floats:
    """Return p(1) - p(2), the two largest raw probabilities, float64 (N,); 1 where there is one option."""
    probabilities = np.exp(log_softmax(logits))
    if probabilities.shape[1] == 1:
        return np.ones(len(logits))
    second, first = np.partition(probabilities, -2, axis=1)[:, -2:].T
    found: Floats = first - second
    return found


def fit_margin(fitting: Fitting) -> Fitted:
    """Return Margin Sampling (Ramirez et al., COLM 2024), published for two models."""
    return Thresholded(partial(raw_cascade, margins), fitting.validation)


def fit_max_probability(fitting: Fitting) -> Fitted:
    """Return the cascade of raw probabilities: CAUC without calibration or fusion, as a control."""
    return Thresholded(partial(raw_cascade, lambda logits: top_option(logits)[1]), fitting.validation)


def fit_duo(fitting: Fitting) -> Fitted:
    """Fit Asymmetric Duo's temperatures (Zhou et al., 2025) jointly, to the lowest NLL on the calibration split.

    All models always answer; their logits are summed by weights 1 / (M T_m).
    With two models that is the problem of CAUC-RF's pair, whose published form searches a grid, then by L-BFGS;
    with more it is its natural extension, one temperature for each.
    """
    chain = fitting.calibration.chain
    weights = fit_temperatures(chain.logits, chain.labels).weights

    def duo(examples: Examples) -> Trace:
        logits = examples.chain.logits
        fused = sum(weight * np.float64(own) for weight, own in zip(weights, logits, strict=True))
        predictions, confidences = top_option(np.asarray(fused))
        return Trace(predictions[:, None], confidences[:, None], np.ones((1, len(logits)), dtype=bool))

    note = "" if len(chain.models) == 2 else f"extended to {len(chain.models)} models"
    return Thresholded(duo, fitting.validation, note=note)
