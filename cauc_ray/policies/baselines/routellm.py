"""RouteLLM (Ong et al., ICLR 2025): matrix factorisation, and ranking by similar queries.

Both estimate the probability that the last model of a chain would win over the first, and call the last where that
probability is high enough. Models of a longer chain between the two are never called.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.baselines.features import QueryVectors, unit_rows
from cauc_ray.policies.baselines.routing import Values, fit_first_or_last
from cauc_ray.policies.baselines.training import Schedule, learned, linear, one_thread, train, with_noise
from cauc_ray.policies.methods import Fitted, Fitting
from cauc_ray.policies.trace import Examples

DIMENSION = 128
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 1e-5
NOISE = 0.1
BATCH_SIZE, N_EPOCHS = 64, 100
MOST_STEPS, CHECK_WITHIN, PATIENCE = 4000, 100, 20

# Similarities that are computed at a time: 64 MB of float32.
BLOCK = 2**24

# Cosines of float32 vectors are known to about this.
ROUNDING = 1e-6


class MatrixFactorisation(nn.Module):
    """The logit u (P_j * W e) of a model j on a query e; P_j has length 1.

    models: P, float32 (M, D).   projection: W, d to D.   classifier: u, D to 1.
    """

    def __init__(self, n_features: int, n_models: int, generator: torch.Generator) -> None:
        super().__init__()
        self.models = nn.Parameter(torch.randn((n_models, DIMENSION), generator=generator))
        self.projection = linear(n_features, DIMENSION, generator, bias=False)
        self.classifier = linear(DIMENSION, 1, generator, bias=False)

    def forward(self, queries: torch.Tensor, winners: torch.Tensor, losers: torch.Tensor) -> torch.Tensor:
        """Return the logit of each winner less its loser's, float32 (N,).

        queries: float32 (N, d).   winners, losers: int64 (N,), indices of models.
        """
        models = functional.normalize(self.models, dim=1)
        logits: torch.Tensor = self.classifier((models[winners] - models[losers]) * self.projection(queries))[:, 0]
        return logits

    def wins(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the probability that the last model wins over the first, float64 (N,)."""
        first = torch.zeros(len(queries), dtype=torch.int64)
        return torch.sigmoid(self(queries, torch.full_like(first, len(self.models) - 1), first).double())


def fit_routellm_mf(fitting: Fitting) -> Fitted:
    """Train on the battles of the calibration split: a query and two models, of which only the first is right.

    Battles of all models are used. Optimiser, batch, noise and 100 epochs are the published ones, but training ends
    after 4,000 steps, or when 20 checks on the validation split's battles, one each epoch or 100 steps, have brought
    no improvement. Published is to keep the last weights; here they are those of the lowest loss on these battles.
    """
    return fit_first_or_last(fitting, _trained)


@one_thread()
def _trained(fitting: Fitting, vectors: QueryVectors) -> Values:
    generator = torch.Generator().manual_seed(fitting.seed)
    queries, held_out = (torch.from_numpy(vectors(e)) for e in (fitting.calibration, fitting.validation))
    own, held_out_own = (torch.from_numpy(battles(e)) for e in (fitting.calibration, fitting.validation))
    network = MatrixFactorisation(queries.shape[1], len(fitting.calibration.chain.models), generator)
    if not len(own):
        nn.init.zeros_(network.classifier.weight)  # nothing to learn from: even odds
        return learned(vectors, network.wins)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        which, winners, losers = own[rows].T
        return _nll(network(with_noise(queries[which], NOISE, generator), winners, losers))

    def validation_loss() -> torch.Tensor:
        which, winners, losers = held_out_own.T
        return _nll(network(held_out[which], winners, losers))

    optimiser = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    epoch = math.ceil(len(own) / BATCH_SIZE)
    schedule = Schedule(BATCH_SIZE, min(N_EPOCHS * epoch, MOST_STEPS), min(epoch, CHECK_WITHIN), PATIENCE)
    train(network, optimiser, loss, validation_loss, len(own), schedule, generator)
    return learned(vectors, network.wins)


def battles(examples: Examples) -> Ints:
    """Return every query with every two models of which one is right: query, winner, loser, int64 (B, 3)."""
    right = examples.correct()
    found: Ints = np.argwhere(right[:, :, None] & ~right[:, None, :])
    return found


def _nll(logits: torch.Tensor) -> torch.Tensor:
    """Return the mean -log probability of the outcomes; 0 where there are none."""
    return functional.softplus(-logits).sum() / max(len(logits), 1)


@dataclass(frozen=True, slots=True)
class SimilarityWeighted:
    """The share of the last model's wins among fitted queries, weighted by their similarity.

    vectors: of examples.   queries: float32 (B, d), of length 1.   outcomes: float32 (B,), 1 where the last model won,
    -1 where the first did, 0 where neither.
    """

    vectors: QueryVectors
    queries: Floats
    outcomes: Floats

    def __call__(self, examples: Examples) -> Floats:
        """Return the probability that the last model wins over the first, float64 (N,)."""
        asked = unit_rows(self.vectors(examples))
        size = max(BLOCK // len(self.queries), 1)
        blocks = [self._shares(asked[start : start + size]) for start in range(0, len(asked), size)]
        return np.concatenate(blocks)

    def _shares(self, asked: Floats) -> Floats:
        similarities = asked @ self.queries.T
        highest = similarities.max(axis=1, keepdims=True)
        # To a query that resembles none, all are equally similar.
        relative = np.where(highest > ROUNDING, similarities, 0.0) / np.maximum(highest, ROUNDING)
        weights = np.power(np.float32(10.0), relative)
        # Wins less losses, so that ties alone are even odds to the bit, not a choice by rounding.
        sums = (weights @ np.column_stack([self.outcomes, np.ones_like(self.outcomes)])).astype(np.float64)
        shares: Floats = (1.0 + sums[:, 0] / sums[:, 1]) / 2.0
        return shares


def fit_routellm_sw(fitting: Fitting) -> Fitted:
    """Keep the calibration split's queries, and who won: nothing is trained.

    The original solves a Bradley-Terry regression for each query, in which a battle i weighs
    10 x 10^(similarity_i / highest similarity) and a tie is half a win for each. Of two models' battles alone its
    solution is the weighted share of wins: ratings apart by 400 log10(share / (1 - share)), hence that probability.
    """
    return fit_first_or_last(fitting, _remembered)


def _remembered(fitting: Fitting, vectors: QueryVectors) -> Values:
    right = fitting.calibration.correct().astype(np.float32)
    return SimilarityWeighted(vectors, unit_rows(vectors(fitting.calibration)), right[:, -1] - right[:, 0])
