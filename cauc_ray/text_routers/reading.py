"""Networks of the transformers library that read texts, fine-tuned whole to predict each text's outcome."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from cauc_ray.baselines.networks.training import Schedule, train
from cauc_ray.errors import ConfigError
from cauc_ray.models.hub import loading
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.trace import Examples

# Longer gradients are scaled down to this length, as transformers' own trainer does.
_GRADIENT_NORM = 1.0

# Tokens in memory together, padding included: four texts of the longest context.
TOKENS_AT_ONCE = 4096

BERT_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a network is fine-tuned: by AdamW at a constant rate.

    batch_size: texts of one update.   check_every: updates between two validation losses; None for an epoch.
    n_checks: at most.   patience: checks without a lower loss that end it.
    """

    rate: float
    weight_decay: float
    batch_size: int
    check_every: int | None
    n_checks: int
    patience: int

    def schedule(self, n_texts: int) -> Schedule:
        """Return when to check and to stop on so many texts."""
        check_every = self.check_every or math.ceil(n_texts / self.batch_size)
        return Schedule(self.batch_size, self.n_checks * check_every, check_every, self.patience)


@dataclass(frozen=True, slots=True)
class Labelled:
    """Texts with their outcomes.   texts: N.   outcomes: int64 (N,), indices among a reader's outcomes."""

    texts: Sequence[str]
    outcomes: Ints


@dataclass(frozen=True, slots=True)
class Reader:
    """A network that reads texts, with its tokenizer.

    outcomes: which of the network's logits is that of each of C outcomes.   max_tokens: longer texts are cut to as
    many, on the tokenizer's truncation side.   next_token: it is a causal language model, whose logits are those of
    the token after the text; else a classifier.   closing: the question that ends every text.
    """

    tokenizer: Any
    network: Any
    outcomes: tuple[int, ...]
    max_tokens: int
    next_token: bool
    closing: str = ""

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of N texts."""
        closed = [text + self.closing for text in texts]
        found: list[list[int]] = self.tokenizer(closed, truncation=True, max_length=self.max_tokens)["input_ids"]
        return found

    def logits(self, tokens: Sequence[list[int]]) -> torch.Tensor:
        """Return the network's logits on n texts in tokens, float32 (n, classes) or (n, vocabulary).

        Padding is on the left for a language model, which continues the text, else on the right. The mask and, on the
        left, the positions leave it out: a text's logits do not depend on the others beyond rounding.
        """
        width = max(map(len, tokens))
        inputs = torch.full((len(tokens), width), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(inputs)
        for row, own in enumerate(tokens):
            where = slice(width - len(own), width) if self.next_token else slice(len(own))
            inputs[row, where] = torch.tensor(own)
            mask[row, where] = 1
        device = self.network.device
        given = {"input_ids": inputs.to(device), "attention_mask": mask.to(device)}
        if not self.next_token:
            return self.network(**given).logits
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0).to(device)
        # Only products are bfloat16: weights in it would lose updates of 1e-5 to rounding.
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            output = self.network(**given, position_ids=positions, logits_to_keep=1, use_cache=False)
        return output.logits[:, -1].float()

    def nll(self, tokens: Sequence[list[int]], outcomes: Ints) -> torch.Tensor:
        """Return the sum of the NLL of n texts' outcomes among all of the network's logits, in nats."""
        targets = torch.tensor(self.outcomes)[torch.from_numpy(outcomes)]
        return cross_entropy(self.logits(tokens), targets.to(self.network.device), reduction="sum")

    def probabilities(self, texts: Sequence[str]) -> Floats:
        """Return the probabilities of the outcomes of N texts, among these alone, float64 (N, C)."""
        self.network.eval()
        tokens = self.tokens(texts)
        found = np.empty((len(texts), len(self.outcomes)))
        with torch.inference_mode():
            for rows in passes(tokens, np.arange(len(tokens))):
                logits = self.logits([tokens[row] for row in rows])[:, list(self.outcomes)]
                found[rows] = logits.double().softmax(dim=1).cpu().numpy()
        return found

    def mean_nll(self, labelled: Labelled) -> float:
        """Return the mean NLL of texts' outcomes among all of the network's logits, in nats."""
        self.network.eval()
        tokens = self.tokens(labelled.texts)
        with torch.inference_mode():
            parts = passes(tokens, np.arange(len(tokens)))
            sums = [self.nll([tokens[row] for row in rows], labelled.outcomes[rows]) for rows in parts]
        return float(sum(sums)) / len(tokens)


def passes(tokens: Sequence[list[int]], rows: Ints) -> Iterator[Ints]:
    """Yield the rows of texts of like length, as many together as may be in memory."""
    lengths = np.array([len(tokens[row]) for row in rows])
    order = np.argsort(lengths, kind="stable")
    while len(order):
        n_tokens = lengths[order] * np.arange(1, len(order) + 1)
        n = max(1, int(np.searchsorted(n_tokens, TOKENS_AT_ONCE, side="right")))
        yield rows[order[:n]]
        order = order[n:]


def load_pretrained(factory: Any, checkpoint: str, *, new_head: bool, **options: Any) -> tuple[Any, Any]:
    """Load a checkpoint's tokenizer and, by one of transformers' auto classes, its network in float32.

    checkpoint: a hub id or a local folder.   new_head: what the checkpoint lacks above its encoder is initialised at
    random. Raises ConfigError where it cannot be loaded or lacks other weights, which transformers would invent.
    """
    with loading(checkpoint):
        tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        network, report = factory.from_pretrained(
            checkpoint, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    drawn = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if new_head:
        encoder = f"{network.base_model_prefix}."
        drawn = {name for name in drawn if name.startswith(encoder) and not name.startswith(f"{encoder}pooler.")}
    if drawn:
        named = ", ".join(sorted(drawn)[:3])
        raise ConfigError(f"checkpoint {checkpoint!r} is not a {type(network).__name__}: it lacks the weights {named}")
    return tokenizer, network.to("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed torch's own generators, which new heads and dropout draw from, and restore their state afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def fine_tune(reader: Reader, calibration: Labelled, validation: Labelled, recipe: Recipe, seed: int) -> Floats:
    """Train all of a network's weights; keep those of the lowest validation loss.

    seed: of the order of the calibration split's texts, shuffled again for every epoch.
    Returns the mean NLL on the validation split at every check. Raises ConfigError where that is not finite.
    """
    tokens = reader.tokens(calibration.texts)

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return reader.nll([tokens[row] for row in rows], calibration.outcomes[rows.numpy()]) / len(rows)

    def validation_loss() -> float:
        found = reader.mean_nll(validation)
        if not math.isfinite(found):
            raise ConfigError("the checkpoint cannot be trained: its loss on the validation split is not finite")
        return found

    return train(
        reader.network,
        torch.optim.AdamW(reader.network.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay),
        loss,
        validation_loss,
        len(tokens),
        recipe.schedule(len(tokens)),
        torch.Generator().manual_seed(seed),
        split=lambda rows: map(torch.from_numpy, passes(tokens, rows.numpy())),
        gradient_norm=_GRADIENT_NORM,
    )


def texts_of(examples: Examples) -> tuple[str, ...]:
    """Return the queries' texts. Raises ConfigError where there are none."""
    if examples.texts is None:
        raise ConfigError(f"{examples.chain.source}: this router reads the queries' texts; give them with the examples")
    return examples.texts


def require_training(fitting: Fitting) -> str:
    """Return the checkpoint to train. Raises ConfigError without one or without texts, DataError without labels."""
    for split in (fitting.calibration, fitting.validation):
        split.chain.require_labels("training a router")
        texts_of(split)
    if fitting.checkpoint is None:
        raise ConfigError("this router fine-tunes a checkpoint; give one by its hub id or local folder")
    return fitting.checkpoint


def classifier(checkpoint: str, n_classes: int = 3) -> Reader:
    """Load an encoder with a new head for some classes."""
    tokenizer, network = load_pretrained(
        AutoModelForSequenceClassification, checkpoint, new_head=True, num_labels=n_classes
    )
    return Reader(tokenizer, network, tuple(range(n_classes)), longest(network, BERT_TOKENS), next_token=False)


def longest(network: Any, n_tokens: int) -> int:
    """Return how many tokens a network reads, at most some number."""
    return min(n_tokens, getattr(network.config, "max_position_embeddings", None) or n_tokens)
