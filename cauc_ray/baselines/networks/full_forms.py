"""Published forms that fine-tune an encoder or a language model on the queries' texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from string import ascii_uppercase

import numpy as np
import torch
from transformers import AutoModel

from cauc_ray.baselines.frugalgpt import by_order, first_taken, search
from cauc_ray.baselines.networks import model_vectors, reading
from cauc_ray.baselines.networks.reading import Reader, Recipe, drawn_from, fine_tune, some
from cauc_ray.baselines.networks.training import Schedule, train
from cauc_ray.baselines.routing import routed
from cauc_ray.errors import ConfigError
from cauc_ray.numbers.logits import log_softmax, softmax
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.family import Control, Member, Route
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.methods.single import fit_single
from cauc_ray.policies.trace import Examples, Trace, costs_to_come, own_answers

# Rate, decay, batch and about 2,000 updates are from the paper's text; the published code, which holds no training,
# does not confirm them.
BERT = Recipe(rate=1e-5, weight_decay=0.01, batch_size=16, check_every=100, n_checks=20, patience=4)
# Eight devices with four texts each, as in the published training code.
CAUSAL = Recipe(rate=1e-5, weight_decay=0.0, batch_size=32, check_every=None, n_checks=5, patience=1)
# The published trainer's, without its warm-up.
SCORER = Recipe(rate=5e-5, weight_decay=0.01, batch_size=8, check_every=None, n_checks=8, patience=8)
ENCODER_RATE = 5e-5
ENCODER_SCHEDULE = Schedule(batch_size=64, n_steps=1000, check_every=50, patience=6)
# Queries whose texts, with the four that each is contrasted with, are in memory together.
QUERIES_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Cached:
    """A function of texts that reads each text once: splits are traced more than once.

    Attributes:
        read: From n texts to float64 (n, C).
        rows: What was read, by text.
    """

    read: Callable[[Sequence[str]], Floats]
    rows: dict[str, Floats] = field(default_factory=dict)

    def __call__(self, texts: Sequence[str]) -> Floats:
        """Return the function of texts, float64 (N, C)."""
        unread = sorted({*texts} - self.rows.keys())
        if unread:
            self.rows.update(zip(unread, self.read(unread), strict=True))
        return np.stack([self.rows[text] for text in texts])


def texts_of(examples: Examples) -> tuple[str, ...]:
    """Return the queries' texts. Raises ConfigError where they are missing."""
    if examples.texts is None:
        raise ConfigError(f"{examples.chain.source}: this router reads the queries' texts; give them with the examples")
    return examples.texts


def _splits(fitting: Fitting) -> tuple[str, tuple[Examples, Examples]]:
    """Return the checkpoint to train, and both splits.

    Raises:
        ConfigError: A checkpoint or texts are missing.
        DataError: Labels are missing.
    """
    splits = fitting.calibration, fitting.validation
    for split in splits:
        split.chain.require_labels("training a router")
        texts_of(split)
    if fitting.checkpoint is None:
        raise ConfigError("this router fine-tunes a checkpoint; give one by its hub id or local folder")
    return fitting.checkpoint, splits


def fit_routellm_bert(fitting: Fitting, recipe: Recipe = BERT) -> Sequence[Member]:
    """Fine-tune a classifier of texts into: the last model wins, a tie, the first wins; w = 1 - P(the latter two).

    Labels are from correctness, not from people's preferences. The weights with the lowest validation loss are kept,
    checked every 100 updates; training ends when four checks in a row did not lower it.
    Raises ConfigError where texts are missing or the checkpoint cannot be loaded.
    """
    return _first_or_last(fitting, recipe, reading.classifier, comparisons, n_last=1)


def fit_routellm_causal(fitting: Fitting, recipe: Recipe = CAUSAL) -> Sequence[Member]:
    """Fine-tune a causal language model to continue a text with a score of the first model; w = 1 - P(score >= 4).

    The score is one of five added tokens, the only one that the loss counts; its probabilities are taken among the
    five. Labels are bins of the first model's probability of the right option, not a judge's opinion of its answer.
    The weights of the epoch with the lowest validation loss are kept; training ends after one that did not lower it.
    Raises ConfigError where texts are missing or the checkpoint cannot be loaded.
    """
    return _first_or_last(fitting, recipe, reading.scorer, qualities, n_last=3)


def _first_or_last(
    fitting: Fitting, recipe: Recipe, load: Callable[[str], Reader], outcomes: Callable[[Examples], Ints], n_last: int
) -> Sequence[Member]:
    """Fit a router to the last model by the probability of the first n_last outcomes, else to the first."""
    checkpoint, splits = _splits(fitting)
    if len(fitting.calibration.chain.models) == 1:
        return fit_single(fitting, 0)
    with drawn_from(fitting.seed):
        reader = load(checkpoint)
        fine_tune(
            reader, [texts_of(split) for split in splits], [outcomes(split) for split in splits], recipe, fitting.seed
        )
    probabilities = Cached(reader.probabilities)

    def trace(examples: Examples) -> Trace:
        ends = np.array([0, len(examples.chain.models) - 1])
        wins = probabilities(texts_of(examples))[:, :n_last].sum(axis=1)
        confidences = np.column_stack([1.0 - wins, np.ones(len(examples))])
        return Trace(own_answers(examples.chain, ends), confidences, np.eye(ends[1] + 1, dtype=bool)[ends])

    return [Control(trace)]


def comparisons(examples: Examples) -> Ints:
    """Return who wins, int64 (N,): 0 where only the last model is right, 2 where only the first is, 1 elsewhere."""
    correct = examples.correct().astype(np.int64)
    winners: Ints = 1 - correct[:, -1] + correct[:, 0]
    return winners


def qualities(examples: Examples) -> Ints:
    """Return the first model's score less one, int64 (N,): fifths of its probability of the right option, 0 to 4."""
    chain = examples.chain
    right = np.exp(log_softmax(chain.logits[0]))[np.arange(len(chain)), chain.labels]
    return np.minimum((len(reading.SCORES) * right).astype(np.int64), len(reading.SCORES) - 1)


def fit_frugalgpt_bert(fitting: Fitting, recipe: Recipe = SCORER) -> Sequence[Member]:
    """Fine-tune for each model a classifier of query and answer into right or wrong; orders and thresholds as usual.

    The published one is DistilBERT. Raises ConfigError where texts are missing or the checkpoint cannot be loaded.
    """
    checkpoint, splits = _splits(fitting)
    scorers, correct = list[Cached](), [split.correct().astype(np.int64) for split in splits]
    for model in range(len(fitting.calibration.chain.models)):
        texts = [answered(split, model) for split in splits]
        with drawn_from(fitting.seed):
            reader = reading.classifier(checkpoint, n_classes=2)
            reader.tokenizer.truncation_side = "left"  # the answer ends the text
            fine_tune(reader, texts, [of[:, model] for of in correct], recipe, fitting.seed)
        scorers.append(Cached(reader.probabilities))
    distances = distances_of(scorers, fitting.validation)
    costs = np.broadcast_to(costs_to_come(fitting.validation).per_call, distances.shape)
    solutions = by_order(search(distances, fitting.validation.correct(), costs))
    return [_cascade(scorers, order, thresholds) for order, thresholds in solutions.items()]


def _cascade(scorers: Sequence[Cached], order: Sequence[int], thresholds: tuple[tuple[float, ...], ...]) -> Control:
    """Return the cascade of some models in an order."""

    def trace(examples: Examples) -> Trace:
        answers = own_answers(examples.chain, order)
        calls = np.cumsum(np.eye(len(examples.chain.models), dtype=bool)[[*order]], axis=0, dtype=bool)
        return Trace(answers, np.ones(answers.shape), calls)

    def route(examples: Examples) -> Route:
        return partial(first_taken, distances_of(scorers, examples)[:, order[:-1]])

    return Control(trace, solutions=thresholds, route=route)


def answered(examples: Examples, model: int) -> list[str]:
    """Return the queries' texts, each with the letter of a model's answer."""
    answers = zip(texts_of(examples), own_answers(examples.chain, [model])[:, 0].tolist(), strict=True)
    return [f"{text} {ascii_uppercase[answer : answer + 1] or answer}" for text, answer in answers]


def distances_of(scorers: Sequence[Cached], examples: Examples) -> Floats:
    """Return 1 less the probability that each model's answer is right, float64 (N, M)."""
    return np.stack([scorer(answered(examples, model))[:, 0] for model, scorer in enumerate(scorers)], axis=1)


def fit_routerdc_encoder(
    fitting: Fitting, schedule: Schedule = ENCODER_SCHEDULE, rate: float = ENCODER_RATE
) -> Sequence[Member]:
    """Train an encoder and a vector for each model by both contrasts of RouterDC.

    The published one is mDeBERTa-v3-base. Clusters are those of the untrained encoder's states, by principal
    components and k-means. Raises as fit_frugalgpt_bert.
    """
    checkpoint, splits = _splits(fitting)
    n_models = len(fitting.calibration.chain.models)
    if n_models == 1:
        return fit_single(fitting, 0)
    with drawn_from(fitting.seed):
        tokenizer, encoder = reading.load_pretrained(AutoModel, checkpoint, new_head=True)
        reader, generator = Reader(tokenizer, encoder, reading.BERT_TOKENS), torch.Generator().manual_seed(fitting.seed)
        network = model_vectors.RouterDC(reader, n_models, encoder.config.hidden_size, generator)
        training, held_out = (reader.tokens(texts_of(split)) for split in splits)
        quality, held_out_quality = (torch.from_numpy(model_vectors.answer_quality(split)) for split in splits)
        quality = quality.to(encoder.device)

        def similarities(tokens: Sequence[list[int]]) -> Floats:
            return reader.of_all(tokens, lambda rows: network.similarities(network.projected(some(tokens, rows))))

        def validation_loss() -> float:
            loss = model_vectors.sample_model_loss(torch.from_numpy(similarities(held_out)), held_out_quality)
            return reading.finite(float(loss))

        states = reader.of_all(training, lambda rows: network.projected(some(training, rows)))
        near = model_vectors.Neighbours(model_vectors.clusters(states, fitting.seed), generator)
        train(
            network,
            torch.optim.AdamW(network.parameters(), lr=rate),
            lambda rows: network.loss(lambda drawn: some(training, drawn.numpy()), rows, quality, near),
            validation_loss,
            len(training),
            schedule,
            generator,
            split=lambda rows: rows.split(QUERIES_AT_ONCE),
            gradient_norm=reading.GRADIENT_NORM,
        )
    cached, prices = Cached(lambda texts: similarities(reader.tokens(texts))), costs_to_come(fitting.calibration).means

    def trace(examples: Examples) -> Trace:
        return routed(softmax(cached(texts_of(examples))), prices, examples.chain)

    return [Control(trace, threshold=0.0)]
