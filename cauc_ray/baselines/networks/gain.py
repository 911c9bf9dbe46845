"""The network of Post-Hoc-Embed."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

from cauc_ray.baselines.networks.training import Schedule, array_of, one_thread, train
from cauc_ray.numbers.types import Floats

WIDTH, DROPOUT = 128, 0.1
LEARNING_RATE, WEIGHT_DECAY, BATCH_SIZE = 1e-3, 1e-4, 128
MOST_EPOCHS, PATIENCE = 200, 20
HELD_OUT = 0.2


class GainNetwork(nn.Module):
    """A network of ReLU layers with one output.

    Attributes:
        layers: Weights and, in the last row, biases, float32 (d_in + 1, d_out) each, drawn as torch draws linear
            layers.
    """

    def __init__(self, n_features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.layers = nn.ParameterList(
            (torch.rand((n_in + 1, n_out), generator=generator) * 2 - 1) / n_in**0.5
            for n_in, n_out in pairwise((n_features, WIDTH, WIDTH, 1))
        )
        self._generator = generator

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the output for each row, float32 (N,); in training, a share of the inner outputs is dropped."""
        hidden = vectors
        for layer in self.layers[:-1]:
            hidden = torch.relu(torch.addmm(layer[-1], hidden, layer[:-1]))
            if self.training:  # torch's own dropout draws from the global generator
                retained_mask = torch.rand(hidden.shape, generator=self._generator) >= DROPOUT
                hidden = hidden * retained_mask / (1 - DROPOUT)
        last = self.layers[-1]
        return torch.addmm(last[-1], hidden, last[:-1])[:, 0]


@one_thread()
def trained(vectors: Floats, targets: Floats, seed: tuple[int, ...]) -> list[Floats]:
    """Train by AdamW on MSE, until a held-out slice of the rows has not improved for PATIENCE epochs.

    Args:
        vectors: Features of the rows, float32 (N, d).
        targets: Gains to predict, float32 (N,).
        seed: Random seed.

    Returns:
        The layers, float32 (d_in + 1, d_out) each.
    """
    # torch's generators take one number.
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    order = torch.randperm(len(vectors), generator=generator)
    n_held_out = max(1, round(HELD_OUT * len(vectors)))
    held_out, rows = order[:n_held_out], order[n_held_out:] if len(order) > 1 else order
    inputs, gains = torch.from_numpy(vectors), torch.from_numpy(targets)
    network = GainNetwork(vectors.shape[1], generator)

    def loss_on(rows: torch.Tensor) -> torch.Tensor:
        return mse_loss(network(inputs[rows]), gains[rows])

    train(
        network,
        torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        lambda batch: loss_on(rows[batch]),
        lambda: loss_on(held_out),
        len(rows),
        Schedule.in_epochs(len(rows), BATCH_SIZE, MOST_EPOCHS, PATIENCE),
        generator,
    )
    return [array_of(layer) for layer in network.layers]
