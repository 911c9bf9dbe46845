"""EmbedLLM (Zhuang et al., ICLR 2025): a vector for each model, which predicts on which queries it is right."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from cauc_ray.numbers.types import Floats
from cauc_ray.policies.baselines.controls import fit_single
from cauc_ray.policies.baselines.features import QueryVectors
from cauc_ray.policies.baselines.routing import router
from cauc_ray.policies.baselines.training import Schedule, linear, train, with_noise
from cauc_ray.policies.method import Fitted, Fitting, Steered
from cauc_ray.policies.trace import Examples

DIMENSION = 232
LEARNING_RATE, WEIGHT_DECAY = 1e-4, 1e-5
NOISE = 0.05
PAIRS_PER_STEP = 256
N_STEPS, CHECK_EVERY, PATIENCE = 3000, 50, 10


@dataclass(frozen=True, slots=True)
class EmbedLLM:
    """Correctness logits cls(P_j * (W e + b)) of model j on a query e.

    vectors: e of examples.   models: P, float32 (M, D).   projection: W and b, d to D.   classifier: D to 2, wrong
    and right.
    """

    vectors: QueryVectors
    models: torch.Tensor
    projection: torch.nn.Linear
    classifier: torch.nn.Linear

    def logits(self, queries: torch.Tensor) -> torch.Tensor:
        """Return the logits of being wrong and right, float32 (N, M, 2).   queries: float32 (N, d)."""
        return self.classifier(self.models * self.projection(queries)[:, None, :])

    def __call__(self, examples: Examples) -> Floats:
        """Return each model's probability of being right, float64 (N, M)."""
        with torch.inference_mode():
            logits = self.logits(torch.from_numpy(self.vectors(examples))).double()
            probabilities: Floats = functional.softmax(logits, dim=2)[:, :, 1].numpy()
        return probabilities


def fit_embedllm(fitting: Fitting) -> Fitted:
    """Train on the calibration split's correctness, up to the lowest NLL on validation.

    The published rule, the model of the highest logit difference between right and wrong, knows no cost; here the
    probability of being right, which rises with it, is what a price is set against.
    """
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    vectors = QueryVectors.of(fitting.calibration)
    cascade = router(_trained(fitting, vectors), fitting.validation, paid=vectors.paid)
    return Steered(cascade, fitting.validation, given=0.0, note=vectors.note())


def _trained(fitting: Fitting, vectors: QueryVectors) -> EmbedLLM:
    """Train with the published optimiser and noise, on batches of all models on some of the queries.

    Published are 50 epochs of batches of 2,048 pairs of a model and a query, over a table of 112 models: tens of
    thousands of steps. A chain's table has a few thousand pairs; at that batch it would see a few hundred steps, which
    leave the network where it started. Here a batch has 256 pairs, and training ends after 3,000 steps, or when 10
    looks at the validation split, one every 50 steps, have brought nothing.
    """
    generator = torch.Generator().manual_seed(fitting.seed)
    queries, right = _table(fitting.calibration, vectors)
    held_out, held_out_right = _table(fitting.validation, vectors)
    n_models = right.shape[1]
    network = EmbedLLM(
        vectors,
        torch.randn((n_models, DIMENSION), generator=generator).requires_grad_(),
        linear(queries.shape[1], DIMENSION, generator),
        linear(DIMENSION, 2, generator),
    )

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return _nll(network.logits(with_noise(queries[rows], NOISE, generator)), right[rows])

    def validation_loss() -> torch.Tensor:
        return _nll(network.logits(held_out), held_out_right)

    weights = [network.models, *network.projection.parameters(), *network.classifier.parameters()]
    optimiser = torch.optim.Adam(weights, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = Schedule(max(PAIRS_PER_STEP // n_models, 1), N_STEPS, CHECK_EVERY, PATIENCE)
    train(optimiser, loss, validation_loss, len(queries), schedule, generator)
    return network


def _table(examples: Examples, vectors: QueryVectors) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query vectors, float32 (N, d), and whether each model is right, int64 (N, M)."""
    return torch.from_numpy(vectors(examples)), torch.from_numpy(examples.correct()).long()


def _nll(logits: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), right.flatten())
