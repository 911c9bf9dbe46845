"""Margin Sampling (Ramirez et al., COLM 2024): stop where the two best options lie far enough apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.softmax import log_softmax
from cauc_ray.policies.cascade import Trace


@dataclass(frozen=True, slots=True)
class MarginSampling:
    """Each stage answers for itself; the stopping statistic is p(1) - p(2) of its raw probabilities.

    The original has two models; with more, every stage but the last is held to the same threshold.
    """

    def trace(self, chain: ChainLogits) -> Trace:
        """Return answers and margins, int32 and float64 (N, M). A row of one option has margin 1."""
        predictions, margins = [], []
        for logits in chain.logits:
            predictions.append(logits.argmax(axis=1).astype(np.int32))
            probabilities = np.exp(log_softmax(logits))
            if probabilities.shape[1] == 1:
                margins.append(np.ones(len(logits)))
                continue
            second, first = np.partition(probabilities, -2, axis=1)[:, -2:].T
            margins.append(first - second)
        return Trace(np.stack(predictions, axis=1), np.stack(margins, axis=1))
