"""RouteLLM (Ong et al., ICLR 2025).

It estimates the probability that the last model of a chain would win over the first, and calls the last where that is
high enough; models between the two are never called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from cauc_ray.baselines.routing import Read, fit_first_or_last, note_of_router
from cauc_ray.baselines.texts import text_method
from cauc_ray.numbers.products import Weights, products
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.features import unit_rows
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import Method
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.routers import ROWS_AT_ONCE, FirstOrLastRouter, sigmoid

# Cosines of float32 vectors are known to about this.
_COSINE_ROUNDING = 1e-6


class MatrixPolicy(FirstOrLastRouter):
    """Matrix factorisation: the win of the last model is a logistic regression, of array "weights", (d,)."""

    method: Literal["routellm-mf"] = "routellm-mf"

    def values(self, vectors: Floats) -> Floats:
        """Return the probability that the last model wins, float64 (n,)."""
        return sigmoid(products(vectors, self.arrays["weights"][None])[:, 0])


class SimilarityPolicy(FirstOrLastRouter):
    """Similarity-weighted ranking.

    Its arrays are "known", the calibration queries, (n, d), and "outcomes", 1 for a win of the last model, (n,).
    """

    method: Literal["routellm-sw"] = "routellm-sw"

    def values(self, vectors: Floats) -> Floats:
        """Return the share of the last model's wins on known queries, which weigh by their similarity, float64 (n,)."""
        queries, outcomes = self.arrays.once("known", Weights.of), np.float64(self.arrays["outcomes"])
        shares = np.empty(len(vectors))
        for start in range(0, len(vectors), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            similarities = products(unit_rows(vectors[rows]), queries)
            highest = similarities.max(axis=1, keepdims=True)
            # To a query that resembles none, all are equally similar.
            relative = np.where(highest > _COSINE_ROUNDING, similarities, 0.0) / np.maximum(highest, _COSINE_ROUNDING)
            weights = np.power(10.0, relative)
            # Wins less losses, so that ties alone are even odds to the bit, not a choice by rounding.
            shares[rows] = (1.0 + (weights * outcomes).sum(axis=1) / weights.sum(axis=1)) / 2.0
        return shares


def fit_mf(fitting: Fitting) -> Sequence[Policy]:
    """Train on the battles of the calibration split: a query and two models, of which only the first is right.

    Battles of all models are used. Optimiser, batch, noise and 100 epochs are the published ones, but training ends
    after 4,000 steps, or when 20 checks on the validation split's battles, one each epoch or 100 steps, have brought
    no improvement. Published is to keep the last weights; here they are those of the lowest loss on these battles.
    """
    from cauc_ray.baselines.networks.model_vectors import trained_mf  # torch

    return fit_first_or_last(fitting, MatrixPolicy, trained_mf)


def fit_sw(fitting: Fitting) -> Sequence[Policy]:
    """Keep the calibration split's queries, and who won: nothing is trained.

    The original solves a Bradley-Terry regression for each query, in which a battle i weighs
    10 x 10^(similarity_i / highest similarity) and a tie is half a win for each. Of two models' battles alone its
    solution is the weighted share of wins: ratings apart by 400 log10(share / (1 - share)), hence that probability.
    """
    return fit_first_or_last(fitting, SimilarityPolicy, _known_outcomes)


def _known_outcomes(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    right = fitting.calibration.correct().astype(np.int8)
    return {"known": unit_rows(vectors(fitting.calibration)), "outcomes": right[:, -1] - right[:, 0]}, {}


MATRIX = Method(
    "routellm-mf",
    "router",
    fit_mf,
    packages=("torch", "sklearn"),
    extra="baselines",
    note=note_of_router(leaves_middle=True),
    reads="neither",
)
SIMILARITY = Method(
    "routellm-sw",
    "router",
    fit_sw,
    packages=("sklearn",),
    extra="baselines",
    note=note_of_router(leaves_middle=True),
    reads="neither",
)
BERT = text_method(
    "routellm-bert",
    "router",
    "Fine-tune a classifier of texts into a win of the last model, a tie, and a win of the first.",
    "labels from correctness",
    leaves_middle=True,
    reads="neither",
)
CAUSAL = text_method(
    "routellm-causal",
    "router",
    "Fine-tune a causal language model to score the first model's answer from 1 to 5.",
    "scored by the first model's probability of the right option, not by a judge",
    leaves_middle=True,
)
