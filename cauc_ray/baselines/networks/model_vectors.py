"""Routers that learn a vector for each model: RouteLLM's matrix factorisation, EmbedLLM and RouterDC.

RouteLLM (Ong et al., ICLR 2025) estimates the probability that the last model of a chain would win over the first, and
calls the last where that is high enough; models between the two are never called. EmbedLLM (Zhuang et al., ICLR 2025)
predicts on which queries a model is right. RouterDC (Chen et al., NeurIPS 2024) learns by contrast which are best.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import randomized_svd
from torch import nn
from torch.nn import functional

from cauc_ray.baselines.networks.training import Schedule, array_of, linear, one_thread, train, with_noise
from cauc_ray.baselines.routing import Read
from cauc_ray.numbers.logits import top_option
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.trace import Examples

# RouteLLM.
MF_DIMENSION, MF_RATE, MF_DECAY, MF_NOISE = 128, 3e-4, 1e-5, 0.1
MF_BATCH, MF_EPOCHS, MF_MOST_STEPS, MF_CHECK_WITHIN, MF_PATIENCE = 64, 100, 4000, 100, 20

# EmbedLLM.
EMBED_DIMENSION, EMBED_RATE, EMBED_DECAY, EMBED_NOISE = 232, 1e-4, 1e-5, 0.05
EMBED_PAIRS, EMBED_STEPS, EMBED_CHECK_EVERY, EMBED_PATIENCE = 256, 3000, 50, 10

# RouterDC.
DC_DIMENSION, DC_MODEL_DEVIATION, DC_RATE = 768, 0.78, 1e-3
DC_SCHEDULE = Schedule(batch_size=64, n_steps=1000, check_every=50, patience=6)
N_CONTRASTED, WRONG_BELOW, N_OTHERS = 3, 0.5, 3
N_CLUSTERS, CLUSTER_AXES, ROWS_PER_CLUSTER = 8, 5, 8


def _both(fitting: Fitting, vectors: Read, read: Callable[[Examples], Any]) -> list[torch.Tensor]:
    """Return query vectors, float32 (N, d), and what is read of the answers: of calibration, then of validation."""
    splits = fitting.calibration, fitting.validation
    return [torch.from_numpy(of(split)) for split in splits for of in (vectors, read)]


class MatrixFactorisation(nn.Module):
    """The logit u (P_j * W e) of a model j on a query e; P_j has length 1.

    Attributes:
        models: P, float32 (M, D).
        projection: W, d to D.
        classifier: u, D to 1.
    """

    def __init__(self, n_features: int, n_models: int, generator: torch.Generator) -> None:
        super().__init__()
        self.models = nn.Parameter(torch.randn((n_models, MF_DIMENSION), generator=generator))
        self.projection = linear(n_features, MF_DIMENSION, generator, bias=False)
        self.classifier = linear(MF_DIMENSION, 1, generator, bias=False)

    def forward(self, queries: torch.Tensor, winners: torch.Tensor, losers: torch.Tensor) -> torch.Tensor:
        """Return the logit of each winner less its loser's, float32 (N,).

        Args:
            queries: float32 (N, d).
            winners: Indices of models, int64 (N,).
            losers: Indices of models, int64 (N,).
        """
        models = functional.normalize(self.models, dim=1)
        logits: torch.Tensor = self.classifier((models[winners] - models[losers]) * self.projection(queries))[:, 0]
        return logits

    def weights(self) -> torch.Tensor:
        """Return what the logit that the last model wins over the first is linear in, float32 (d,)."""
        models = functional.normalize(self.models, dim=1)
        return (self.classifier.weight[0] * (models[-1] - models[0])) @ self.projection.weight


@one_thread()
def trained_mf(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train RouteLLM's matrix factorisation, and return what the logit that the last model wins is linear in."""
    generator = torch.Generator().manual_seed(fitting.seed)
    queries, battle_rows, held_out, held_out_battles = _both(fitting, vectors, battles)
    network = MatrixFactorisation(queries.shape[1], len(fitting.calibration.chain.models), generator)
    if not len(battle_rows):
        nn.init.zeros_(network.classifier.weight)  # nothing to learn from: even odds
        return {"weights": array_of(network.weights())}, {}

    def nll(logits: torch.Tensor) -> torch.Tensor:
        return functional.softplus(-logits).sum() / max(len(logits), 1)  # 0 where there are none

    def loss(rows: torch.Tensor) -> torch.Tensor:
        asked, winners, losers = battle_rows[rows].T
        return nll(network(with_noise(queries[asked], MF_NOISE, generator), winners, losers))

    def validation_loss() -> torch.Tensor:
        asked, winners, losers = held_out_battles.T
        return nll(network(held_out[asked], winners, losers))

    optimiser = torch.optim.Adam(network.parameters(), lr=MF_RATE, weight_decay=MF_DECAY)
    epoch = math.ceil(len(battle_rows) / MF_BATCH)
    schedule = Schedule(MF_BATCH, min(MF_EPOCHS * epoch, MF_MOST_STEPS), min(epoch, MF_CHECK_WITHIN), MF_PATIENCE)
    train(network, optimiser, loss, validation_loss, len(battle_rows), schedule, generator)
    return {"weights": array_of(network.weights())}, {}


def battles(examples: Examples) -> Ints:
    """Return every query with every two models of which one is right: query, winner, loser, int64 (B, 3)."""
    right = examples.correct()
    triples: Ints = np.argwhere(right[:, :, None] & ~right[:, None, :])
    return triples


class EmbedLLM(nn.Module):
    """Correctness logits cls(P_j * (W e + b)) of model j on a query e.

    Attributes:
        models: P, float32 (M, D).
        projection: W and b, d to D.
        classifier: D to 2, wrong and right.
    """

    def __init__(self, n_features: int, n_models: int, generator: torch.Generator) -> None:
        super().__init__()
        self.models = nn.Parameter(torch.randn((n_models, EMBED_DIMENSION), generator=generator))
        self.projection = linear(n_features, EMBED_DIMENSION, generator)
        self.classifier = linear(EMBED_DIMENSION, 2, generator)

    def forward(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the logits of being wrong and right on queries, float32 (N, d): float32 (N, M, 2)."""
        logits: torch.Tensor = self.classifier(self.models * self.projection(queries)[:, None, :])
        return logits

    def linear(self) -> dict[str, Any]:
        """Return the linear form of a model's logit of being right less that of being wrong.

        Returns:
            "weights" of queries, float32 (M, d), and "offsets", float32 (M,).
        """
        wrong, right = self.classifier.weight
        of_models = self.models * (right - wrong)
        offset = self.classifier.bias[1] - self.classifier.bias[0]
        offsets = of_models @ self.projection.bias + offset
        return {"weights": array_of(of_models @ self.projection.weight), "offsets": array_of(offsets)}


@one_thread()
def trained_embedllm(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train with the published optimiser and noise, on batches of all models on some of the queries.

    Published are 50 epochs of batches of 2,048 pairs of a model and a query, over a table of 112 models: tens of
    thousands of steps. A chain's table has a few thousand pairs; at that batch it would see a few hundred steps, which
    leave the network where it started. Here a batch has 256 pairs, and training ends after 3,000 steps, or when 10
    checks on the validation split, one every 50 steps, have brought no improvement.
    """
    generator = torch.Generator().manual_seed(fitting.seed)
    queries, right, held_out, held_out_right = _both(fitting, vectors, lambda split: split.correct().astype(np.int64))
    n_models = right.shape[1]
    network = EmbedLLM(queries.shape[1], n_models, generator)

    def nll(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(logits.flatten(0, 1), right.flatten())

    optimiser = torch.optim.Adam(network.parameters(), lr=EMBED_RATE, weight_decay=EMBED_DECAY)
    train(
        network,
        optimiser,
        lambda rows: nll(network(with_noise(queries[rows], EMBED_NOISE, generator)), right[rows]),
        lambda: nll(network(held_out), held_out_right),
        len(queries),
        Schedule(max(EMBED_PAIRS // n_models, 1), EMBED_STEPS, EMBED_CHECK_EVERY, EMBED_PATIENCE),
        generator,
    )
    return network.linear(), {}


class RouterDC(nn.Module):
    """Cosine similarities of a query's vector to a vector of each model.

    Attributes:
        read: From n queries to their vectors, float32 (n, D).
        models: The models' vectors, float32 (M, D).
    """

    def __init__(self, read: nn.Module, n_models: int, dimension: int, generator: torch.Generator) -> None:
        super().__init__()
        self.read = read
        self.models = nn.Parameter(DC_MODEL_DEVIATION * torch.randn((n_models, dimension), generator=generator))

    def projected(self, queries: Any) -> torch.Tensor:
        """Return the vectors of n queries, scaled to length 1, float32 (n, D)."""
        return functional.normalize(self.read(queries), dim=1)

    def similarities(self, projected: torch.Tensor) -> torch.Tensor:
        """Return the similarities of n queries to the models, float32 (n, M)."""
        return projected @ functional.normalize(self.models.to(projected.device), dim=1).T

    def loss(
        self, of: Callable[[torch.Tensor], Any], rows: torch.Tensor, quality: torch.Tensor, near: Neighbours
    ) -> Any:
        """Return the mean over a batch of the sum of both losses.

        Args:
            of: From rows, int64, to their queries.
            rows: The batch, int64 (B,).
            quality: Of each model's answer to each query, float32 (N, M).
            near: Draws the queries to contrast with.
        """
        if not near.n_others:
            return sample_model_loss(self.similarities(self.projected(of(rows))), quality[rows])
        drawn = torch.cat([rows[:, None], near.draw(rows)], dim=1)
        projected = self.projected(of(drawn.flatten())).unflatten(0, drawn.shape)
        anchors, contrast = projected[:, 0], projected[:, 1:]
        return sample_model_loss(self.similarities(anchors), quality[rows]) + sample_sample_loss(anchors, contrast)


@one_thread()
def trained_routerdc(fitting: Fitting, vectors: Read) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train for the published 1,000 steps of 64 queries, or until 6 checks on validation bring no improvement.

    The published learning rate is for an encoder's weights; Adam's usual one is for a projection's.
    """
    generator = torch.Generator().manual_seed(fitting.seed)
    queries, quality, held_out, held_out_quality = _both(fitting, vectors, answer_quality)
    neighbours = Neighbours(clusters(queries.numpy(), fitting.seed), generator)
    projection = linear(queries.shape[1], DC_DIMENSION, generator, bias=False)
    network = RouterDC(projection, quality.shape[1], DC_DIMENSION, generator)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return network.loss(queries.__getitem__, rows, quality, neighbours)

    def validation_loss() -> torch.Tensor:
        return sample_model_loss(network.similarities(network.projected(held_out)), held_out_quality)

    optimiser = torch.optim.Adam(network.parameters(), lr=DC_RATE)
    train(network, optimiser, loss, validation_loss, len(queries), DC_SCHEDULE, generator)
    return {"projection": array_of(projection.weight), "models": array_of(network.models)}, {}


def answer_quality(examples: Examples) -> Floats:
    """Return the probability that each model gives its answer where that is right, and 0 elsewhere, float32 (N, M)."""
    confidences = np.stack([top_option(logits)[1] for logits in examples.chain.logits], axis=1)
    quality: Floats = np.where(examples.correct(), confidences, 0.0).astype(np.float32)
    return quality


def sample_model_loss(similarities: torch.Tensor, quality: torch.Tensor) -> torch.Tensor:
    """Return the mean over queries of the contrast between their best models and their worst.

    The contrast is, for each of a query's three best models, -log of its share of a softmax over itself and the three
    worst; worst ones of quality above 0.5 are left out, best ones of quality 0 do not count. Of fewer than six models
    half are best and half worst, so that none is both.

    Args:
        similarities: float32 (N, M).
        quality: float32 (N, M).
    """
    n_contrasted = min(N_CONTRASTED, quality.shape[1] // 2)
    order = quality.argsort(dim=1, descending=True, stable=True)
    best, worst = order[:, :n_contrasted], order[:, -n_contrasted:]
    against = similarities.gather(1, worst).masked_fill(quality.gather(1, worst) > WRONG_BELOW, -torch.inf)
    of_best = similarities.gather(1, best)[:, :, None]
    contrast = torch.cat([of_best, against[:, None, :].expand(-1, n_contrasted, -1)], dim=2)
    terms = -functional.log_softmax(contrast, dim=2)[:, :, 0]
    return torch.where(quality.gather(1, best) > 0, terms, 0.0).sum(dim=1).mean()


def sample_sample_loss(anchors: torch.Tensor, contrast: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log of the share of a query of the same cluster in a softmax with those of others.

    Args:
        anchors: The queries, float32 (B, D), of length 1, so that products are cosines.
        contrast: The query of the same cluster, then those of others, float32 (B, 1 + H, D), of length 1.
    """
    similarities = torch.bmm(contrast, anchors[:, :, None])[:, :, 0]
    return -functional.log_softmax(similarities, dim=1)[:, 0].mean()


def clusters(vectors: Floats, seed: int) -> Ints:
    """Return the cluster of each query, int (N,): k-means on the first principal components.

    There are at most 8 clusters, at most one for every 8 queries, and at most one for every different query.
    """
    n_clusters = min(N_CLUSTERS, len(vectors) // ROWS_PER_CLUSTER)
    if n_clusters < 2:
        return np.zeros(len(vectors), dtype=np.int64)
    left, scales, _ = randomized_svd(vectors - vectors.mean(axis=0), CLUSTER_AXES, random_state=seed)
    n_clusters = min(n_clusters, len(np.unique(left * scales, axis=0)))
    with warnings.catch_warnings():
        # Of queries that are almost the same there may be fewer clusters than asked for, which is fine.
        warnings.simplefilter("ignore", ConvergenceWarning)
        indices: Ints = KMeans(n_clusters, n_init=1, random_state=seed).fit_predict(left * scales).astype(np.int64)
    return indices


class Neighbours:
    """Queries drawn at random from a query's own cluster and from the others.

    Attributes:
        n_others: Number of queries outside the largest cluster.
    """

    def __init__(self, of_cluster: Ints, generator: torch.Generator) -> None:
        cluster = torch.from_numpy(of_cluster)
        sizes = torch.bincount(cluster)
        self._order = cluster.argsort(stable=True)  # a cluster's queries lie together: a block
        self._start = (sizes.cumsum(0) - sizes)[cluster]
        self._size = sizes[cluster]
        self._generator = generator
        self.n_others = len(cluster) - int(sizes.max())

    def draw(self, rows: torch.Tensor) -> torch.Tensor:
        """Return for queries, int64 (B,), one of its cluster each and three of others, int64 (B, 4)."""
        start, size = self._start[rows, None], self._size[rows, None]
        same = start + self._below(size)
        outside = self._below((len(self._order) - size).expand(-1, N_OTHERS))
        outside = torch.where(outside >= start, outside + size, outside)  # skip the block
        return self._order[torch.cat([same, outside], dim=1)]

    def _below(self, bounds: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(bounds.shape, generator=self._generator, dtype=torch.float64)
        return (drawn * bounds).long()
