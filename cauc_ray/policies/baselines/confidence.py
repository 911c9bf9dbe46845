"""Cascades that stop at a raw confidence: Margin Sampling, and the plain largest probability."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.softmax import log_softmax, top_option
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.method import Fitted, Fitting, Steered
from cauc_ray.policies.trace import Examples, Trace, calls_in_turn


@dataclass(frozen=True, slots=True)
class MarginSampling:
    """Margin Sampling (Ramirez et al., COLM 2024): stop where the two best options lie far enough apart.

    Each stage answers for itself; the stopping statistic is p(1) - p(2) of its raw probabilities. The original has
    two models; with more, every stage but the last is held to the same threshold. Nothing is trained.
    """

    def trace(self, examples: Examples) -> Trace:
        """Return answers and margins. A row of one option has margin 1."""
        return _trace(examples.chain, [_margins(logits) for logits in examples.chain.logits])


@dataclass(frozen=True, slots=True)
class MaxProbability:
    """Stop at the largest probability as the models give it: CAUC without calibration or fusion, as a control."""

    def trace(self, examples: Examples) -> Trace:
        """Return answers and their raw probabilities."""
        return _trace(examples.chain, [top_option(logits)[1] for logits in examples.chain.logits])


def _trace(chain: ChainLogits, confidences: list[Floats]) -> Trace:
    predictions = [answers_of(logits) for logits in chain.logits]
    return Trace(np.stack(predictions, axis=1), np.stack(confidences, axis=1), calls_in_turn(len(predictions)))


def answers_of(logits: Floats) -> Ints:
    """Return a model's own answers, int32 (N,), the lowest index among equals."""
    answers: Ints = logits.argmax(axis=1).astype(np.int32)
    return answers


def _margins(logits: Floats) -> Floats:
    probabilities = np.exp(log_softmax(logits))
    if probabilities.shape[1] == 1:
        return np.ones(len(logits))
    second, first = np.partition(probabilities, -2, axis=1)[:, -2:].T
    margins: Floats = first - second
    return margins


def fit_margin(fitting: Fitting) -> Fitted:
    """Return Margin Sampling, which is nothing but its threshold."""
    return Steered(MarginSampling(), fitting.validation)


def fit_max_probability(fitting: Fitting) -> Fitted:
    """Return the cascade of raw probabilities, which is nothing but its threshold."""
    return Steered(MaxProbability(), fitting.validation)
