"""The one loop that trains a baseline's network: minibatches, looks at a validation loss, the best weights kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from cauc_ray.numbers.types import Floats


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long a network is trained.

    batch_size: rows of a step.   n_steps: at most.   check_every: steps between two looks at the validation loss.
    patience: looks without a better one after which training ends.
    """

    batch_size: int
    n_steps: int
    check_every: int
    patience: int


def train(
    optimiser: torch.optim.Optimizer,
    loss: Callable[[torch.Tensor], torch.Tensor],
    validation_loss: Callable[[], torch.Tensor],
    n_rows: int,
    schedule: Schedule,
    generator: torch.Generator,
) -> Floats:
    """Train the optimiser's parameters, and leave them as they were at the lowest validation loss.

    loss: from row indices, int64 (B,), to the mean loss of these rows.   validation_loss: as the parameters are.
    n_rows: of which batches are drawn, at least 1.   generator: of the batches.
    Returns the validation loss at every look, float64 (L,). Of equal ones the last is the best, so that a validation
    split that cannot tell weights apart stops nothing.
    """
    parameters = [parameter for group in optimiser.param_groups for parameter in group["params"]]
    kept = [parameter.detach().clone() for parameter in parameters]
    seen: list[float] = []
    best = 0
    with one_thread():
        for step, rows in enumerate(islice(batches(n_rows, schedule.batch_size, generator), schedule.n_steps), 1):
            optimiser.zero_grad()
            loss(rows).backward()
            optimiser.step()
            if step % schedule.check_every:
                continue
            with torch.no_grad():
                seen.append(float(validation_loss()))
            if seen[-1] <= min(seen):
                kept, best = [parameter.detach().clone() for parameter in parameters], len(seen)
            elif len(seen) - best >= schedule.patience:
                break
    with torch.no_grad():
        for parameter, value in zip(parameters, kept, strict=True):
            parameter.copy_(value)
    return np.array(seen)


def batches(n_rows: int, size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield row indices, int64 (at most size,), without end: all rows in a new order by lot, then all again."""
    while True:
        yield from torch.randperm(n_rows, generator=generator).split(size)


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread.

    On networks so small several threads mostly wait for each other, and the order in which they add, so the last
    bits of what is learned, would depend on how many the machine has.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def linear(n_in: int, n_out: int, generator: torch.Generator, *, bias: bool = True) -> torch.nn.Linear:
    """Return a linear layer with PyTorch's own first weights, uniform within 1 / sqrt(n_in), from a generator."""
    layer = torch.nn.utils.skip_init(torch.nn.Linear, n_in, n_out, bias=bias)
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter, -(n_in**-0.5), n_in**-0.5, generator=generator)
    return layer


def with_noise(vectors: torch.Tensor, deviation: float, generator: torch.Generator) -> torch.Tensor:
    """Return vectors with Gaussian noise added, as some methods train on."""
    return vectors + deviation * torch.randn(vectors.shape, generator=generator)
