"""FrugalGPT and RouterDC as published: with encoders that are fine-tuned on the queries' texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from string import ascii_uppercase
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModel

from cauc_ray.baselines.frugalgpt import by_order, first_taken, search
from cauc_ray.baselines.networks.model_vectors import (
    Neighbours,
    RouterDC,
    answer_quality,
    clusters,
    sample_model_loss,
)
from cauc_ray.baselines.networks.training import Schedule, train
from cauc_ray.baselines.routing import routed
from cauc_ray.errors import ConfigError
from cauc_ray.numbers.logits import softmax
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.family import Control, Member, Route
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.methods.single import fit_single
from cauc_ray.policies.trace import Examples, Trace, costs_to_come, own_answers
from cauc_ray.text_routers.reading import (
    BERT_TOKENS,
    Labelled,
    Reader,
    Recipe,
    classifier,
    drawn_from,
    fine_tune,
    load_pretrained,
    longest,
    passes,
    require_training,
    texts_of,
)

# The published trainer's, but for its warm-up.
SCORER = Recipe(rate=5e-5, weight_decay=0.01, batch_size=8, check_every=None, n_checks=8, patience=8)

ENCODER_RATE = 5e-5
ENCODER_SCHEDULE = Schedule(batch_size=64, n_steps=1000, check_every=50, patience=6)
# Queries whose texts, with the four that each is contrasted with, are in memory together.
QUERIES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Known:
    """What a network says of texts, each read once.   read: of texts, float64 (n, C)."""

    read: Callable[[Sequence[str]], Floats]
    rows: dict[str, Floats] = field(default_factory=dict)

    def __call__(self, texts: Sequence[str]) -> Floats:
        """Return what it says, float64 (N, C)."""
        unread = sorted({*texts} - self.rows.keys())
        if unread:
            self.rows.update(zip(unread, self.read(unread), strict=True))
        return np.stack([self.rows[text] for text in texts])


def answered(examples: Examples, model: int) -> list[str]:
    """Return the queries' texts, each with the letter of a model's answer."""
    letters = [
        ascii_uppercase[own] if own < len(ascii_uppercase) else str(own)
        for own in own_answers(examples.chain, [model])[:, 0].tolist()
    ]
    return [f"{text} {letter}" for text, letter in zip(texts_of(examples), letters, strict=True)]


def fit_frugalgpt_bert(fitting: Fitting, recipe: Recipe = SCORER) -> Sequence[Member]:
    """Fine-tune for each model a classifier of query and answer into right or wrong; orders and thresholds as usual.

    The published one is DistilBERT. Raises ConfigError where there are no texts or the checkpoint cannot be loaded.
    """
    checkpoint, scorers = require_training(fitting), list[Known]()
    splits = fitting.calibration, fitting.validation
    for model in range(len(fitting.calibration.chain.models)):
        own, other = (Labelled(answered(split, model), split.correct()[:, model].astype(np.int64)) for split in splits)
        with drawn_from(fitting.seed):
            reader = classifier(checkpoint, n_classes=2)
            reader.tokenizer.truncation_side = "left"  # the answer ends the text
            fine_tune(reader, own, other, recipe, fitting.seed)
        scorers.append(Known(reader.probabilities))
    distances, correct = distances_of(scorers, fitting.validation), fitting.validation.correct()
    costs = np.broadcast_to(costs_to_come(fitting.validation).per_call, distances.shape)
    orders = by_order(search(distances, correct, costs))
    return [_cascade(scorers, order, solutions) for order, solutions in orders.items()]


def _cascade(scorers: Sequence[Known], order: tuple[int, ...], solutions: tuple[tuple[float, ...], ...]) -> Control:
    """Return the cascade of some models in an order."""

    def trace(examples: Examples) -> Trace:
        answers = own_answers(examples.chain, order)
        calls = np.cumsum(np.eye(len(examples.chain.models), dtype=bool)[[*order]], axis=0, dtype=bool)
        return Trace(answers, np.ones(answers.shape), calls)

    def route(examples: Examples) -> Route:
        return partial(first_taken, distances_of(scorers, examples)[:, order[:-1]])

    return Control(trace, solutions=solutions, route=route)


def distances_of(scorers: Sequence[Known], examples: Examples) -> Floats:
    """Return 1 less the probability that each model's answer is right, float64 (N, M)."""
    return np.stack([scorer(answered(examples, model))[:, 0] for model, scorer in enumerate(scorers)], axis=1)


class FirstToken(nn.Module):
    """An encoder, of which the last hidden state of the first token is read, float32 (n, d)."""

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder

    @property
    def device(self) -> torch.device:
        """Return where it computes."""
        found: torch.device = self.encoder.device
        return found

    def forward(self, **given: torch.Tensor) -> SimpleNamespace:
        """Return the states as a classifier returns logits."""
        return SimpleNamespace(logits=self.encoder(**given).last_hidden_state[:, 0])


class Reading(nn.Module):
    """A reader as a module: its network is trained."""

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self.reader, self.network = reader, reader.network

    def forward(self, tokens: Sequence[list[int]]) -> torch.Tensor:
        """Return what the network gives for texts in tokens, float32 (n, d)."""
        return self.reader.logits(tokens)


def fit_routerdc_encoder(
    fitting: Fitting, schedule: Schedule = ENCODER_SCHEDULE, rate: float = ENCODER_RATE
) -> Sequence[Member]:
    """Train an encoder and a vector for each model by both contrasts of RouterDC.

    The published one is mDeBERTa-v3-base. Clusters are those of the untrained encoder's states, by principal
    components and k-means. Raises as fit_frugalgpt_bert.
    """
    checkpoint, chain = require_training(fitting), fitting.calibration.chain
    if len(chain.models) == 1:
        return fit_single(fitting, 0)
    with drawn_from(fitting.seed):
        tokenizer, encoder = load_pretrained(AutoModel, checkpoint, new_head=True)
        reader = Reader(tokenizer, FirstToken(encoder), (), longest(encoder, BERT_TOKENS), next_token=False)
        generator = torch.Generator().manual_seed(fitting.seed)
        network = RouterDC(Reading(reader), len(chain.models), encoder.config.hidden_size, generator)
        _train(network, reader, fitting, schedule, rate, generator)

    def similarities(texts: Sequence[str]) -> Floats:
        with torch.inference_mode():
            found = network.similarities(network.projected(reader.tokens(texts)))
        values: Floats = found.double().cpu().numpy()
        return values

    known, prices = (
        Known(lambda texts: _in_parts(similarities, texts, reader)),
        costs_to_come(fitting.calibration).means,
    )

    def cascade(examples: Examples) -> Trace:
        return routed(softmax(known(texts_of(examples))), prices, examples.chain)

    return [Control(cascade, threshold=0.0)]


def _in_parts(read: Callable[[Sequence[str]], Floats], texts: Sequence[str], reader: Reader) -> Floats:
    """Read texts a part at a time."""
    parts = list(passes(reader.tokens(texts), np.arange(len(texts))))
    found = np.concatenate([read([texts[row] for row in rows]) for rows in parts])
    return found[np.argsort(np.concatenate(parts))]


def _train(
    network: RouterDC, reader: Reader, fitting: Fitting, schedule: Schedule, rate: float, generator: torch.Generator
) -> None:
    own, held_out = (reader.tokens(texts_of(split)) for split in (fitting.calibration, fitting.validation))
    quality, held_out_quality = (
        torch.from_numpy(answer_quality(split)).to(reader.network.device)
        for split in (fitting.calibration, fitting.validation)
    )

    def projected(tokens: Sequence[list[int]], rows: Ints) -> torch.Tensor:
        return network.projected([tokens[row] for row in rows])

    def validation_loss() -> float:
        total = 0.0
        for rows in passes(held_out, np.arange(len(held_out))):
            similarities = network.similarities(projected(held_out, rows))
            total += float(sample_model_loss(similarities, held_out_quality[rows])) * len(rows)
        if not math.isfinite(total):
            raise ConfigError("the checkpoint cannot be trained: its loss on the validation split is not finite")
        return total / len(held_out)

    network.eval()
    with torch.inference_mode():
        parts = list(passes(own, np.arange(len(own))))
        states = np.concatenate([projected(own, rows).cpu().numpy() for rows in parts])
    near = Neighbours(clusters(states[np.argsort(np.concatenate(parts))], fitting.seed), generator)
    train(
        network,
        torch.optim.AdamW(network.parameters(), lr=rate),
        lambda rows: network.loss(lambda drawn: [own[row] for row in drawn.tolist()], rows, quality, near),
        validation_loss,
        len(own),
        schedule,
        generator,
        split=lambda rows: rows.split(QUERIES_AT_ONCE),
        gradient_norm=1.0,
    )
