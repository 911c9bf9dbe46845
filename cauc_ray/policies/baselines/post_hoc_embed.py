"""Post-Hoc-Embed (Gupta et al., ICLR 2024), reduced: a network foresees what the last model would gain over a stage."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.nn.functional import mse_loss

from cauc_ray.numbers.types import Floats
from cauc_ray.policies.baselines.confidence import answers_of
from cauc_ray.policies.baselines.features import Scaling, option_features
from cauc_ray.policies.baselines.training import Schedule, train
from cauc_ray.policies.method import Fitted, Fitting, Steered
from cauc_ray.policies.trace import Examples, Trace, calls_in_turn

WIDTH, DROPOUT = 128, 0.1
LEARNING_RATE, WEIGHT_DECAY, BATCH_SIZE = 1e-3, 1e-4, 128
MOST_EPOCHS, PATIENCE = 200, 20
HELD_OUT = 0.2


@dataclass(frozen=True, slots=True)
class Network:
    """A network of ReLU layers with one output.   layers: weights, float32 (d_in, d_out), and biases, (d_out,)."""

    layers: tuple[tuple[Floats, Floats], ...]

    def __call__(self, vectors: Floats) -> Floats:
        """Return its output for each row, float64 (N,).   vectors: float32 (N, d)."""
        *inner, (weights, bias) = self.layers
        hidden = vectors
        for inner_weights, inner_bias in inner:
            hidden = np.maximum(hidden @ inner_weights + inner_bias, 0)
        output: Floats = (hidden @ weights + bias)[:, 0].astype(np.float64)
        return output


@dataclass(frozen=True, slots=True)
class Foreseen:
    """A stage's estimate of how much likelier the last model is to be right than the stage itself.

    stage: whose outputs it sees, beside the query's embedding.   n_options: what its features were fitted with.
    """

    stage: int
    n_options: int
    scaling: Scaling
    network: Network

    def __call__(self, examples: Examples) -> Floats:
        """Return the expected gain of deferring, float64 (N,)."""
        return self.network(self.scaling(_vectors(examples, self.stage, self.n_options)))


@dataclass(frozen=True, slots=True)
class PostHocEmbed:
    """A cascade that defers where the last model is expected to gain.   gains: of every stage but the last."""

    gains: tuple[Foreseen, ...]

    def trace(self, examples: Examples) -> Trace:
        """Return each stage's own answer, with the gain of deferring as the lack of confidence."""
        logits = examples.chain.logits
        answers = np.stack([answers_of(own) for own in logits], axis=1)
        confidences = np.zeros(answers.shape)
        for gain in self.gains:
            confidences[:, gain.stage] = -gain(examples)
        return Trace(answers, confidences, calls_in_turn(len(logits)))


def fit_post_hoc_embed(fitting: Fitting) -> Fitted:
    """Fit a network for each stage but the last, by MSE to g = y_last - y_own in {-1, 0, 1}.

    The published method reads hidden states of the small model's decoder and of the large one, and has two models.
    Here a stage's log probabilities, with the query's embedding where there is one, stand for the hidden state. In a
    longer chain all stages foresee the last model: the next one's gain would know nothing of what lies behind it,
    and one threshold holds for all.
    """
    n_stages = len(fitting.calibration.chain.models)
    gains = tuple(_fit_stage(fitting, stage) for stage in range(n_stages - 1))
    seen = "log-probabilities" if fitting.calibration.embeddings is None else "log-probabilities and the embedding"
    return Steered(PostHocEmbed(gains), fitting.validation, note=f"{seen} in place of hidden states")


def _fit_stage(fitting: Fitting, stage: int) -> Foreseen:
    calibration = fitting.calibration
    n_options = calibration.chain.logits[stage].shape[1]
    vectors = _vectors(calibration, stage, n_options)
    scaling = Scaling.of(vectors)
    correct = calibration.correct().astype(np.float32)
    network = _trained(scaling(vectors), correct[:, -1] - correct[:, stage], (fitting.seed, stage))
    return Foreseen(stage, n_options, scaling, network)


def _vectors(examples: Examples, stage: int, n_options: int) -> Floats:
    own = option_features(examples.chain.logits[stage], n_options)
    if examples.embeddings is None:
        return own
    return np.column_stack([own, np.asarray(examples.embeddings, dtype=np.float32)])


def _trained(vectors: Floats, targets: Floats, seed: tuple[int, ...]) -> Network:
    """Train a network by AdamW on MSE, until a held-out slice of the rows has not improved for PATIENCE epochs.

    vectors: float32 (N, d).   targets: float32 (N,). Returns the network of the best epoch on the slice.
    """
    # torch's generators take one number; its global one is the caller's.
    lots = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    order = torch.randperm(len(vectors), generator=lots)
    n_held_out = max(1, round(HELD_OUT * len(vectors)))
    held_out, rows = order[:n_held_out], order[n_held_out:] if len(order) > 1 else order
    inputs, wanted = torch.from_numpy(vectors), torch.from_numpy(targets)[:, None]
    layers = _drawn_layers((vectors.shape[1], WIDTH, WIDTH, 1), lots)
    parameters = [parameter for layer in layers for parameter in layer]
    optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    epoch = -(-len(rows) // BATCH_SIZE)

    def loss(batch: torch.Tensor) -> torch.Tensor:
        return mse_loss(_output(inputs[rows[batch]], layers, lots), wanted[rows[batch]])

    def held_out_loss() -> torch.Tensor:
        return mse_loss(_output(inputs[held_out], layers), wanted[held_out])

    train(optimiser, loss, held_out_loss, len(rows), Schedule(BATCH_SIZE, MOST_EPOCHS * epoch, epoch, PATIENCE), lots)
    arrays = [parameter.detach().numpy() for parameter in parameters]
    return Network(tuple(zip(arrays[::2], arrays[1::2], strict=True)))


def _drawn_layers(widths: tuple[int, ...], lots: torch.Generator) -> list[tuple[Any, Any]]:
    """Return layers as torch draws linear ones, uniform within 1 / sqrt(d_in), but from a generator of their own."""
    layers = []
    for n_in, n_out in pairwise(widths):
        drawn = (torch.rand((n_in + 1, n_out), generator=lots) * 2 - 1) / n_in**0.5
        layers.append((drawn[:-1].clone().requires_grad_(), drawn[-1].clone().requires_grad_()))
    return layers


def _output(inputs: Any, layers: list[tuple[Any, Any]], lots: torch.Generator | None = None) -> Any:
    """Return the output, (n, 1); in training, which has lots to draw, a share of inner outputs is dropped."""
    *inner, (weights, bias) = layers
    hidden = inputs
    for inner_weights, inner_bias in inner:
        hidden = torch.relu(torch.addmm(inner_bias, hidden, inner_weights))
        if lots is not None:  # torch's own dropout draws from the global generator
            kept = torch.rand(hidden.shape, generator=lots) >= DROPOUT
            hidden = hidden * kept / (1 - DROPOUT)
    return torch.addmm(bias, hidden, weights)
