"""EmbedLLM (Zhuang et al., ICLR 2025): a vector for each model, which predicts on which queries it is right."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from cauc_ray.policies.baselines.features import QueryVectors
from cauc_ray.policies.baselines.routing import Values, fit_router
from cauc_ray.policies.baselines.training import Schedule, learned, linear, one_thread, train, with_noise
from cauc_ray.policies.methods import Fitted, Fitting
from cauc_ray.policies.trace import Examples

DIMENSION = 232
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 1e-5
NOISE = 0.05
PAIRS_PER_STEP = 256
N_STEPS, CHECK_EVERY, PATIENCE = 3000, 50, 10


class EmbedLLM(nn.Module):
    """Correctness logits cls(P_j * (W e + b)) of model j on a query e.

    models: P, float32 (M, D).   projection: W and b, d to D.   classifier: D to 2, wrong and right.
    """

    def __init__(self, n_features: int, n_models: int, generator: torch.Generator) -> None:
        super().__init__()
        self.models = nn.Parameter(torch.randn((n_models, DIMENSION), generator=generator))
        self.projection = linear(n_features, DIMENSION, generator)
        self.classifier = linear(DIMENSION, 2, generator)

    def forward(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the logits of being wrong and right, float32 (N, M, 2).   queries: float32 (N, d)."""
        logits: torch.Tensor = self.classifier(self.models * self.projection(queries)[:, None, :])
        return logits

    def probabilities(self, queries: torch.Tensor) -> torch.Tensor:
        """Return each model's probability of being right, float64 (N, M)."""
        return functional.softmax(self(queries).double(), dim=2)[:, :, 1]


def fit_embedllm(fitting: Fitting) -> Fitted:
    """Train on the calibration split's correctness, up to the lowest NLL on validation.

    The published rule, the model of the highest logit difference between right and wrong, knows no cost; here the
    probability of being right, which rises with it, is what a price is set against.
    """
    return fit_router(fitting, _trained)


@one_thread()
def _trained(fitting: Fitting, vectors: QueryVectors) -> Values:
    """Train with the published optimiser and noise, on batches of all models on some of the queries.

    Published are 50 epochs of batches of 2,048 pairs of a model and a query, over a table of 112 models: tens of
    thousands of steps. A chain's table has a few thousand pairs; at that batch it would see a few hundred steps, which
    leave the network where it started. Here a batch has 256 pairs, and training ends after 3,000 steps, or when 10
    checks on the validation split, one every 50 steps, have brought no improvement.
    """
    generator = torch.Generator().manual_seed(fitting.seed)
    queries, right = _table(fitting.calibration, vectors)
    held_out, held_out_right = _table(fitting.validation, vectors)
    n_models = right.shape[1]
    network = EmbedLLM(queries.shape[1], n_models, generator)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return _nll(network(with_noise(queries[rows], NOISE, generator)), right[rows])

    def validation_loss() -> torch.Tensor:
        return _nll(network(held_out), held_out_right)

    optimiser = torch.optim.Adam(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = Schedule(max(PAIRS_PER_STEP // n_models, 1), N_STEPS, CHECK_EVERY, PATIENCE)
    train(network, optimiser, loss, validation_loss, len(queries), schedule, generator)
    return learned(vectors, network.probabilities)


def _table(examples: Examples, vectors: QueryVectors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query vectors, float32 (N, d), and whether each model is right, int64 (N, M)."""
    return torch.from_numpy(vectors(examples)), torch.from_numpy(examples.correct()).long()


def _nll(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), right.flatten())
