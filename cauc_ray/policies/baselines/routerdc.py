"""RouterDC (Chen et al., NeurIPS 2024): contrastive learning of vectors for queries and models."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import randomized_svd
from torch import nn
from torch.nn import functional

from cauc_ray.numbers.softmax import top_option
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.baselines.features import QueryVectors
from cauc_ray.policies.baselines.routing import Values, fit_router
from cauc_ray.policies.baselines.training import Schedule, learned, linear, one_thread, train
from cauc_ray.policies.methods import Fitted, Fitting
from cauc_ray.policies.trace import Examples

DIMENSION = 768
MODEL_DEVIATION = 0.78
N_CONTRASTED = 3
WRONG_BELOW = 0.5
N_OTHERS = 3
N_CLUSTERS, CLUSTER_AXES, ROWS_PER_CLUSTER = 8, 5, 8
LEARNING_RATE = 1e-3
SCHEDULE = Schedule(batch_size=64, n_steps=1000, check_every=50, patience=6)


class RouterDC(nn.Module):
    """Cosine similarities of a query's projection W e to a vector of each model.

    projection: W, d to D.   models: float32 (M, D).
    """

    def __init__(self, n_features: int, n_models: int, generator: torch.Generator) -> None:
        super().__init__()
        self.projection = linear(n_features, DIMENSION, generator, bias=False)
        self.models = nn.Parameter(MODEL_DEVIATION * torch.randn((n_models, DIMENSION), generator=generator))

    def projected(self, queries: torch.Tensor) -> torch.Tensor:
        """Return queries, float32 (N, d), projected and scaled to length 1, float32 (N, D)."""
        return functional.normalize(self.projection(queries), dim=1)

    def similarities(self, projected: torch.Tensor) -> torch.Tensor:
        """Return the similarities of projected queries to the models, float32 (N, M)."""
        return projected @ functional.normalize(self.models, dim=1).T

    def shares(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the softmax of the similarities over the models, float64 (N, M)."""
        return functional.softmax(self.similarities(self.projected(queries)).double(), dim=1)


def fit_routerdc(fitting: Fitting) -> Fitted:
    """Train a projection of frozen features, where the original trains its encoder, with both of its losses.

    The weights kept are those of the lowest sample-model loss on validation. Clusters are found by principal
    components and k-means, where the original takes t-SNE and k-means. Nothing in the method knows of costs: a price
    is set against the softmax of the similarities.
    """
    return fit_router(fitting, _trained, "frozen encoder, clusters by PCA")


@one_thread()
def _trained(fitting: Fitting, vectors: QueryVectors) -> Values:
    """Train for the published 1,000 steps of 64 queries, or until 6 checks on validation bring no improvement.

    The published learning rate is for an encoder's weights; Adam's usual one is for a projection's.
    """
    generator = torch.Generator().manual_seed(fitting.seed)
    inputs = vectors(fitting.calibration)
    neighbours = Neighbours(clusters(inputs, fitting.seed), generator)
    queries, held_out = torch.from_numpy(inputs), torch.from_numpy(vectors(fitting.validation))
    quality, held_out_quality = (torch.from_numpy(answer_quality(e)) for e in (fitting.calibration, fitting.validation))
    network = RouterDC(queries.shape[1], quality.shape[1], generator)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        if not neighbours.n_others:
            return sample_model_loss(network.similarities(network.projected(queries[rows])), quality[rows])
        drawn = torch.cat([rows[:, None], neighbours.draw(rows)], dim=1)
        projected = network.projected(queries[drawn.flatten()]).unflatten(0, drawn.shape)
        own, contrast = projected[:, 0], projected[:, 1:]
        return sample_model_loss(network.similarities(own), quality[rows]) + sample_sample_loss(own, contrast)

    def validation_loss() -> torch.Tensor:
        return sample_model_loss(network.similarities(network.projected(held_out)), held_out_quality)

    optimiser = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE)
    train(network, optimiser, loss, validation_loss, len(queries), SCHEDULE, generator)
    return learned(vectors, network.shares)


def answer_quality(examples: Examples) -> Floats:
    """Return the probability that each model gives its answer where that is right, and 0 elsewhere, float32 (N, M)."""
    confidences = np.stack([top_option(logits)[1] for logits in examples.chain.logits], axis=1)
    quality: Floats = np.where(examples.correct(), confidences, 0.0).astype(np.float32)
    return quality


def sample_model_loss(similarities: torch.Tensor, quality: torch.Tensor) -> torch.Tensor:
    """Return the mean over queries of the contrast between their best models and their worst.

    similarities, quality: float32 (N, M). For each of a query's three best models, -log of its share of a softmax
    over itself and the three worst; worst ones of quality above 0.5 are left out, best ones of quality 0 do not
    count. Of fewer than six models half are best and half worst, so that none is both.
    """
    n_contrasted = min(N_CONTRASTED, quality.shape[1] // 2)
    order = quality.argsort(dim=1, descending=True, stable=True)
    best, worst = order[:, :n_contrasted], order[:, -n_contrasted:]
    against = similarities.gather(1, worst).masked_fill(quality.gather(1, worst) > WRONG_BELOW, -torch.inf)
    own = similarities.gather(1, best)[:, :, None]
    contrast = torch.cat([own, against[:, None, :].expand(-1, n_contrasted, -1)], dim=2)
    terms = -functional.log_softmax(contrast, dim=2)[:, :, 0]
    return torch.where(quality.gather(1, best) > 0, terms, 0.0).sum(dim=1).mean()


def sample_sample_loss(own: torch.Tensor, contrast: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log of the share of a query of the same cluster in a softmax with those of others.

    own: float32 (B, D).   contrast: float32 (B, 1 + H, D), the one of the same cluster first. All have length 1, so
    that products are cosines.
    """
    similarities = torch.bmm(contrast, own[:, :, None])[:, :, 0]
    return -functional.log_softmax(similarities, dim=1)[:, 0].mean()


def clusters(vectors: Floats, seed: int) -> Ints:
    """Return the cluster of each query, int (N,): k-means on the first principal components.

    There are 8, of fewer queries one for every 8 of them, and no more than there are different queries.
    """
    n_clusters = min(N_CLUSTERS, len(vectors) // ROWS_PER_CLUSTER)
    if n_clusters < 2:
        return np.zeros(len(vectors), dtype=np.int64)
    left, scales, _ = randomized_svd(vectors - vectors.mean(axis=0), CLUSTER_AXES, random_state=seed)
    n_clusters = min(n_clusters, len(np.unique(left * scales, axis=0)))
    with warnings.catch_warnings():
        # Of queries that are almost the same there may be fewer clusters than asked for, which is fine.
        warnings.simplefilter("ignore", ConvergenceWarning)
        found: Ints = KMeans(n_clusters, n_init=1, random_state=seed).fit_predict(left * scales).astype(np.int64)
    return found


class Neighbours:
    """Queries drawn at random from a query's own cluster and from the others.

    n_others: of queries outside the largest cluster.
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
        other = self._below((len(self._order) - size).expand(-1, N_OTHERS))
        other = torch.where(other >= start, other + size, other)  # skip the block
        return self._order[torch.cat([same, other], dim=1)]

    def _below(self, bounds: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(bounds.shape, generator=self._generator, dtype=torch.float64)
        return (drawn * bounds).long()
