"""Three small torch classifiers of handwritten digits, of clearly different cost; and the stages' factory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Floats, Ints

SIDE = 8
N_CLASSES = 10


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(SIDE * SIDE // 4, 32),
        nn.ReLU(),
        nn.Linear(32, N_CLASSES),
    )


def _convolutional(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (SIDE // 4) ** 2, N_CLASSES),
    )


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a classifier is built and trained: passes over the training images, step size of Adam."""

    build: Callable[[], nn.Module]
    epochs: int
    learning_rate: float


# Cheapest first.
RECIPES: Mapping[str, Recipe] = {
    "perceptron": Recipe(_perceptron, epochs=30, learning_rate=0.01),
    "small-cnn": Recipe(lambda: _convolutional(8), epochs=25, learning_rate=0.01),
    "large-cnn": Recipe(lambda: _convolutional(16), epochs=40, learning_rate=0.005),
}


def train(name: str, images: Floats, labels: Ints, seed: int) -> nn.Module:
    """Train a classifier by cross-entropy.   images: float32 (N, 64) in [0, 1].   labels: int (N,)."""
    recipe = RECIPES[name]
    torch.set_num_threads(1)  # several threads only wait for each other on networks so small
    torch.manual_seed(seed)
    network = recipe.build()
    pixels = torch.from_numpy(np.array(images)).reshape(-1, 1, SIDE, SIDE)
    targets = torch.from_numpy(np.array(labels, dtype=np.int64))
    optimiser = torch.optim.Adam(network.parameters(), lr=recipe.learning_rate)
    for _ in range(recipe.epochs):
        for rows in torch.randperm(len(targets)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(pixels[rows]), targets[rows]).backward()
            optimiser.step()
    return network.eval()


def load(name: str, weights: str) -> Callable[[Batch], Floats]:
    """Load trained weights as a stage: from a batch with `image` (n, 64) to logits (n, 10)."""
    network = RECIPES[name].build()
    network.load_state_dict(torch.load(weights, weights_only=True))
    network.eval()

    def answer(batch: Batch) -> Floats:
        images = torch.from_numpy(np.array(batch["image"], dtype=np.float32)).reshape(-1, 1, SIDE, SIDE)
        with torch.inference_mode():
            logits: Floats = network(images).numpy()
        return logits

    return answer
