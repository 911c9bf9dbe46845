"""Post-Hoc-Embed (Gupta et al., ICLR 2024): a network predicts what the last model gains over a stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import mse_loss

from cauc_ray.numbers.logits import real_options
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.baselines.routing import fit_single
from cauc_ray.policies.baselines.training import Schedule, array_of, one_thread, train
from cauc_ray.policies.features import Scaler, answer_features
from cauc_ray.policies.methods import Fitted, Fitting, Thresholded
from cauc_ray.policies.scored import PostHocEmbedPolicy
from cauc_ray.policies.trace import Examples, Trace, own_answers

WIDTH, DROPOUT = 128, 0.1
LEARNING_RATE, WEIGHT_DECAY, BATCH_SIZE = 1e-3, 1e-4, 128
MOST_EPOCHS, PATIENCE = 200, 20
HELD_OUT = 0.2


class GainNetwork(nn.Module):
    """A network of ReLU layers with one output.

    layers: weights and, in the last row, biases, float32 (d_in + 1, d_out) each, drawn as torch draws linear layers.
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
                kept = torch.rand(hidden.shape, generator=self._generator) >= DROPOUT
                hidden = hidden * kept / (1 - DROPOUT)
        last = self.layers[-1]
        return torch.addmm(last[-1], hidden, last[:-1])[:, 0]


def fit_hidden(fitting: Fitting) -> Fitted:
    """Fit the published form: a stage reads quantiles of its log probabilities and its model's own hidden state.

    Answers are one token: in place of quantiles over tokens stand all of those over options, which are the sorted log
    probabilities. The published form that also reads the large model's first layers needs a part of its call.
    """
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    policy = _fitted_policy(fitting, states_of(fitting.calibration), encoded=False)

    def cascade(examples: Examples) -> Trace:
        chain, states = examples.chain, states_of(examples)
        stages = enumerate(zip(chain.logits, states, strict=False))
        worth = [policy.score(stage, real_options(logits), own) for stage, (logits, own) in stages]
        return Trace(own_answers(chain), np.column_stack([*worth, np.ones(len(chain))]), policy.calls)

    return Thresholded(cascade, fitting.validation, note="with each model's own hidden state")


def states_of(examples: Examples) -> list[Floats]:
    """Return the hidden states of each model but the last, float32 (N, d) each."""
    return [examples.hidden[model] for model in examples.chain.models[:-1]]


def fit_post_hoc_embed(fitting: Fitting) -> Fitted:
    """Fit a network for each stage but the last, by MSE to g = y_last - y_own in {-1, 0, 1}.

    The published method reads hidden states of the small model's decoder and of the large one, and has two models.
    Here a stage's log probabilities, with the query's embedding where there is one, replace the hidden state. In a
    longer chain all stages predict the gain of the last model: that of the next one would know nothing of the models
    behind it, and one threshold holds for all.
    """
    calibration = fitting.calibration
    if calibration.embedding_call is not None and calibration.embedding_call.index is not None:
        splits = (replace(each, embeddings=None, embedding_call=None) for each in (calibration, fitting.validation))
        calibration, validation = splits
        fitting = replace(fitting, calibration=calibration, validation=validation)
    n_models, embeddings = len(calibration.chain.models), calibration.embeddings
    if n_models == 1:
        return fit_single(fitting, 0)
    policy = _fitted_policy(fitting, [embeddings] * (n_models - 1), encoded=embeddings is not None)
    seen = "log-probabilities" if embeddings is None else "log-probabilities and the embedding"
    notes = f"{seen} in place of hidden states", calibration.embedding_note
    return Thresholded.of(policy, fitting, note="; ".join(filter(None, notes)))


def _fitted_policy(fitting: Fitting, vectors: Sequence[Floats | None], *, encoded: bool) -> PostHocEmbedPolicy:
    """Train a network for each stage but the last.   vectors: what each reads next to its outputs, float32 (N, d)."""
    chain = fitting.calibration.chain
    correct = fitting.calibration.correct().astype(np.float32)
    arrays, read = dict[str, Floats](), list[dict[str, Any]]()
    for stage, (name, logits) in enumerate(zip(chain.models[:-1], chain.logits, strict=False)):
        read.append({"n_options": logits.shape[1]})
        features = answer_features(logits, logits.shape[1], vectors[stage])
        scaler = Scaler.of(features)
        network = _trained(scaler(features), correct[:, -1] - correct[:, stage], (fitting.seed, stage))
        layers = {f"{name}/layer{index}": array_of(layer) for index, layer in enumerate(network.layers)}
        arrays |= {f"{name}/means": scaler.means, f"{name}/scales": scaler.scales, **layers}
    return fitting.policy(PostHocEmbedPolicy, encoded=encoded, of_stages=[*read, {}]).with_arrays(arrays)


@one_thread()
def _trained(vectors: Floats, targets: Floats, seed: tuple[int, ...]) -> GainNetwork:
    """Train by AdamW on MSE, until a held-out slice of the rows has not improved for PATIENCE epochs.

    vectors: float32 (N, d).   targets: float32 (N,).
    """
    # torch's generators take one number.
    generator = torch.Generator().manual_seed(int(np.random.SeedSequence(seed).generate_state(1)[0]))
    order = torch.randperm(len(vectors), generator=generator)
    n_held_out = max(1, round(HELD_OUT * len(vectors)))
    held_out, rows = order[:n_held_out], order[n_held_out:] if len(order) > 1 else order
    inputs, wanted = torch.from_numpy(vectors), torch.from_numpy(targets)
    network = GainNetwork(vectors.shape[1], generator)

    def loss_on(rows: torch.Tensor) -> torch.Tensor:
        return mse_loss(network(inputs[rows]), wanted[rows])

    train(
        network,
        torch.optim.AdamW(network.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY),
        lambda batch: loss_on(rows[batch]),
        lambda: loss_on(held_out),
        len(rows),
        Schedule.in_epochs(len(rows), BATCH_SIZE, MOST_EPOCHS, PATIENCE),
        generator,
    )
    return network
