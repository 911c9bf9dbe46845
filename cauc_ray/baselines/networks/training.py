"""The one loop that trains a network: minibatches, early stopping on a validation loss, the best weights kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which the first optimiser would load while a method's setup is timed
from torch import nn
from torch.nn.utils import clip_grad_norm_

from cauc_ray.numbers.types import Floats


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a network is trained.

    Attributes:
        batch_size: Rows of a step.
        n_steps: The most steps.
        check_every: Steps between two validation losses.
        patience: Validation losses without improvement that end training.
        warm_up: First validation losses that do not count.
    """

    batch_size: int
    n_steps: int
    check_every: int
    patience: int
    warm_up: int = 0

    @classmethod
    def in_epochs(cls, n_rows: int, batch_size: int, n_epochs: int, patience: int) -> Schedule:
        """Return n_epochs over n_rows, with a check after each."""
        epoch = math.ceil(n_rows / batch_size)
        return cls(batch_size, n_epochs * epoch, epoch, patience)


def train(
    network: nn.Module,
    optimiser: torch.optim.Optimizer,
    loss: Callable[[torch.Tensor], torch.Tensor],
    validation_loss: Callable[[], torch.Tensor | float],
    n_rows: int,
    schedule: Schedule,
    generator: torch.Generator,
    *,
    split: Callable[[torch.Tensor], Iterable[torch.Tensor]] = lambda rows: (rows,),
    gradient_norm: float = math.inf,
) -> Floats:
    """Train a network, and leave it, in evaluation mode, as it was at the lowest validation loss.

    Args:
        network: What is trained.
        optimiser: Of its parameters.
        loss: From row indices, int64 (B,), to the mean loss of these rows.
        validation_loss: Of the network as it is.
        n_rows: Rows that batches are drawn from, at least 1.
        schedule: When to check and when to stop.
        generator: Of the batches; torch's global generator is not used.
        split: From the rows of a batch to the parts of it that are in memory together.
        gradient_norm: Longer gradients are scaled down to this length.

    Returns:
        The validation loss at every check, float64 (L,). Among equals the last is the best, so that a validation
        split that cannot distinguish weights stops nothing.
    """
    best_state = _copied(network)
    seen: list[float] = []
    lowest, best = math.inf, schedule.warm_up
    for step, rows in enumerate(islice(batches(n_rows, schedule.batch_size, generator), schedule.n_steps), 1):
        network.train()
        optimiser.zero_grad()
        for part in split(rows):
            (loss(part) * (len(part) / len(rows))).backward()
        if math.isfinite(gradient_norm):
            clip_grad_norm_(network.parameters(), gradient_norm)
        optimiser.step()
        if step % schedule.check_every:
            continue
        network.eval()
        with torch.no_grad():
            seen.append(float(validation_loss()))
        if len(seen) > schedule.warm_up and seen[-1] <= lowest:
            best_state, lowest, best = _copied(network), seen[-1], len(seen)
        elif len(seen) - best >= schedule.patience:
            break
    network.load_state_dict(best_state)
    network.eval()
    return np.array(seen)


def _copied(network: nn.Module) -> dict[str, Any]:
    return {name: values.detach().clone() for name, values in network.state_dict().items()}


def batches(n_rows: int, size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield row indices, int64 (at most size,), indefinitely: all rows in a random order, then all in another."""
    while True:
        yield from torch.randperm(n_rows, generator=generator).split(size)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread.

    On small networks several threads mostly wait for each other, and the order in which they add, and so the last
    bits of what is learned, would depend on how many the machine has.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def array_of(values: torch.Tensor) -> Floats:
    """Return numbers of a trained network as an array."""
    array: Floats = values.detach().numpy().copy()
    return array


def linear(n_in: int, n_out: int, generator: torch.Generator, *, bias: bool = True) -> nn.Linear:
    """Return a linear layer with PyTorch's own initial weights, uniform within 1 / sqrt(n_in), from a generator."""
    layer = nn.utils.skip_init(nn.Linear, n_in, n_out, bias=bias)
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, -(n_in**-0.5), n_in**-0.5, generator=generator)
    return layer


def with_noise(vectors: torch.Tensor, deviation: float, generator: torch.Generator) -> torch.Tensor:
    """Return vectors with Gaussian noise added, as some methods train on."""
    return vectors + deviation * torch.randn(vectors.shape, generator=generator)
