"""RouteLLM (Ong et al., ICLR 2025): matrix factorisation, and ranking by similar queries.

Both estimate the probability that the last model of a chain would win over the first, and ask the last where that
probability is high enough. What a longer chain has between the two is never called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.baselines.confidence import answers_of
from cauc_ray.policies.baselines.controls import fit_single
from cauc_ray.policies.baselines.features import QueryVectors, unit_rows
from cauc_ray.policies.baselines.routing import chosen_calls
from cauc_ray.policies.baselines.training import Schedule, linear, train, with_noise
from cauc_ray.policies.method import Fitted, Fitting, Steered
from cauc_ray.policies.trace import Examples, Trace

DIMENSION = 128
LEARNING_RATE, WEIGHT_DECAY = 3e-4, 1e-5
NOISE = 0.1
BATCH_SIZE, N_EPOCHS = 64, 100
MOST_STEPS, LOOK_EVERY, PATIENCE = 4000, 100, 20

# Similarities that are computed at a time: 64 MB of float32.
BLOCK = 2**24

# Cosines of float32 vectors are known to about this.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class FirstOrLast:
    """A router between the first and the last model of a chain.

    wins: of examples, the probability that the last model wins over the first, float64 (N,).   paid: its features
    are the first model's outputs.
    """

    wins: Callable[[Examples], Floats]
    paid: bool

    def trace(self, examples: Examples) -> Trace:
        """Return both models' answers; the first's are trusted by the probability that it does not lose."""
        logits = examples.chain.logits
        answers = np.stack([answers_of(logits[0]), answers_of(logits[-1])], axis=1)
        confidences = np.column_stack([1.0 - self.wins(examples), np.ones(len(examples))])
        calls = chosen_calls(np.array([0, len(logits) - 1]), len(logits), paid=self.paid)
        return Trace(answers, confidences, calls)


@dataclass(frozen=True, slots=True)
class MatrixFactorisation:
    """The logit u (P_j * W e) of a model j on a query e; P_j has length 1.

    vectors: e of examples.   models: P, float32 (M, D).   projection: W, d to D.   classifier: u, D to 1.
    """

    vectors: QueryVectors
    models: torch.Tensor
    projection: torch.nn.Linear
    classifier: torch.nn.Linear

    def logits(self, queries: torch.Tensor, winners: torch.Tensor, losers: torch.Tensor) -> torch.Tensor:
        """Return the logit of each winner less its loser's, float32 (N,).

        queries: float32 (N, d).   winners, losers: int64 (N,), places of models.
        """
        models = functional.normalize(self.models, dim=1)
        return self.classifier((models[winners] - models[losers]) * self.projection(queries))[:, 0]

    def __call__(self, examples: Examples) -> Floats:
        """Return the probability that the last model wins over the first, float64 (N,)."""
        first = torch.zeros(len(examples), dtype=torch.int64)
        last = torch.full_like(first, len(self.models) - 1)
        with torch.inference_mode():
            logits = self.logits(torch.from_numpy(self.vectors(examples)), last, first)
            wins: Floats = torch.sigmoid(logits.double()).numpy()
        return wins


def fit_routellm_mf(fitting: Fitting) -> Fitted:
    """Train on the battles of the calibration split: a query and two models, of which only the first is right.

    Battles of all models are used. Optimiser, batch, noise and 100 epochs are the published ones, but training ends
    after 4,000 steps, or when 20 looks at the validation split's battles, one each epoch or 100 steps, have brought
    nothing. Published is to keep the last weights; here they are those of the lowest loss on these battles.
    """
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    vectors = QueryVectors.of(fitting.calibration)
    network = _trained(fitting, vectors)
    return Steered(FirstOrLast(network, vectors.paid), fitting.validation, note=_note(fitting, vectors))


def _trained(fitting: Fitting, vectors: QueryVectors) -> MatrixFactorisation:
    generator = torch.Generator().manual_seed(fitting.seed)
    queries, held_out = (torch.from_numpy(vectors(e)) for e in (fitting.calibration, fitting.validation))
    own, held_out_own = (torch.from_numpy(battles(e)) for e in (fitting.calibration, fitting.validation))
    n_models = len(fitting.calibration.chain.models)
    network = MatrixFactorisation(
        vectors,
        torch.randn((n_models, DIMENSION), generator=generator).requires_grad_(),
        linear(queries.shape[1], DIMENSION, generator, bias=False),
        linear(DIMENSION, 1, generator, bias=False),
    )
    if not len(own):
        with torch.no_grad():  # nothing to learn from: even odds
            network.classifier.weight.zero_()
        return network

    def loss(rows: torch.Tensor) -> torch.Tensor:
        which, winners, losers = own[rows].T
        return _nll(network.logits(with_noise(queries[which], NOISE, generator), winners, losers))

    def validation_loss() -> torch.Tensor:
        which, winners, losers = held_out_own.T
        return _nll(network.logits(held_out[which], winners, losers))

    weights = [network.models, *network.projection.parameters(), *network.classifier.parameters()]
    optimiser = torch.optim.Adam(weights, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    train(optimiser, loss, validation_loss, len(own), _schedule(len(own)), generator)
    return network


def _schedule(n_battles: int) -> Schedule:
    epoch = -(-n_battles // BATCH_SIZE)
    return Schedule(BATCH_SIZE, min(N_EPOCHS * epoch, MOST_STEPS), min(epoch, LOOK_EVERY), PATIENCE)


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
        # To a query that resembles none all are alike.
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
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    vectors = QueryVectors.of(fitting.calibration)
    right = fitting.calibration.correct().astype(np.float32)
    wins = SimilarityWeighted(vectors, unit_rows(vectors(fitting.calibration)), right[:, -1] - right[:, 0])
    return Steered(FirstOrLast(wins, vectors.paid), fitting.validation, note=_note(fitting, vectors))


def _note(fitting: Fitting, vectors: QueryVectors) -> str:
    between = "first and last model only" if len(fitting.calibration.chain.models) > 2 else ""
    return vectors.note(between)
