"""Networks of the transformers library that read texts, fine-tuned whole to tell each text's outcome."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import AutoTokenizer
from transformers.utils import logging

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.types import Floats, Ints

# Gradients longer than this are shortened to it, as transformers' own trainer does.
_GRADIENT_NORM = 1.0

# Tokens of one pass that only reads, padding included.
_TOKENS_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a network is fine-tuned: by AdamW at a constant rate.

    batch: texts of one update.   at_once: of them, texts in memory together.   every: updates from one look at the
    validation loss to the next; None for an epoch.   n_looks: at most.   patience: how many looks in a row without
    a lower loss end it.
    """

    rate: float
    weight_decay: float
    batch: int
    at_once: int
    every: int | None
    n_looks: int
    patience: int


@dataclass(frozen=True, slots=True)
class Labelled:
    """Texts with what became of them.   texts: N.   outcomes: int64 (N,), places among a reader's outcomes."""

    texts: Sequence[str]
    outcomes: Ints


@dataclass(frozen=True, slots=True)
class Reader:
    """A network that reads texts, with its tokenizer.

    outcomes: which of the network's logits stands for each of C outcomes.   max_tokens: longer texts are cut to as
    many, on the tokenizer's truncation side.   next_token: it is a causal language model, whose logits are those of
    the token after the text; else a classifier.   closing: what it is asked after every text.
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

        Padding stands on the left of what a language model continues, else on the right. The mask and, on the left,
        the positions leave it out: a text's logits do not depend on the others beyond rounding.
        """
        width = max(map(len, tokens))
        inputs = torch.full((len(tokens), width), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(inputs)
        for place, own in enumerate(tokens):
            where = slice(width - len(own), width) if self.next_token else slice(len(own))
            inputs[place, where] = torch.tensor(own)
            mask[place, where] = 1
        device = self.network.device
        given = {"input_ids": inputs.to(device), "attention_mask": mask.to(device)}
        if not self.next_token:
            return self.network(**given).logits
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0).to(device)
        # Only products are bfloat16: weights that were would lose updates of 1e-5 to rounding.
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            output = self.network(**given, position_ids=positions, logits_to_keep=1, use_cache=False)
        return output.logits[:, -1].float()

    def nll(self, tokens: Sequence[list[int]], outcomes: Ints) -> torch.Tensor:
        """Return the sum of the NLL of n texts' outcomes among all that the network could say, in nats."""
        targets = torch.tensor(self.outcomes)[torch.from_numpy(outcomes)]
        return cross_entropy(self.logits(tokens), targets.to(self.network.device), reduction="sum")

    def probabilities(self, texts: Sequence[str]) -> Floats:
        """Return the probabilities of the outcomes of N texts, among these alone, float64 (N, C)."""
        self.network.eval()
        tokens = self.tokens(texts)
        found = np.empty((len(texts), len(self.outcomes)))
        with torch.inference_mode():
            for rows in passes(tokens):
                logits = self.logits([tokens[row] for row in rows])[:, list(self.outcomes)]
                found[rows] = logits.double().softmax(dim=1).cpu().numpy()
        return found

    def mean_nll(self, labelled: Labelled) -> float:
        """Return the mean NLL of texts' outcomes among all that the network could say, in nats."""
        self.network.eval()
        tokens = self.tokens(labelled.texts)
        with torch.inference_mode():
            sums = [self.nll([tokens[row] for row in rows], labelled.outcomes[rows]) for rows in passes(tokens)]
        return float(sum(sums)) / len(tokens)


def passes(tokens: Sequence[list[int]]) -> Iterator[Ints]:
    """Yield the rows of texts of like length, together as many as a pass may hold."""
    lengths = np.array([len(own) for own in tokens])
    order = np.argsort(lengths, kind="stable")
    while len(order):
        n_tokens = lengths[order] * np.arange(1, len(order) + 1)
        n = max(1, int(np.searchsorted(n_tokens, _TOKENS_AT_ONCE, side="right")))
        yield order[:n]
        order = order[n:]


def load_pretrained(factory: Any, checkpoint: str, *, new_head: bool, **options: Any) -> tuple[Any, Any]:
    """Load a checkpoint's tokenizer and, by one of transformers' auto classes, its network in float32.

    checkpoint: a hub id or a local folder.   new_head: what the checkpoint lacks above its encoder is drawn by lot.
    Raises ConfigError where it is not to be had or lacks other weights: transformers would draw those too.
    """
    with _quiet():
        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint)
            network, told = factory.from_pretrained(
                checkpoint, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **options
            )
        except Exception as error:  # transformers, safetensors and torch raise whatever the damage leads to
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"checkpoint {checkpoint!r} cannot be loaded: {reason}") from error
    drawn = {*told["missing_keys"], *(name for name, *_ in told["mismatched_keys"])}
    if new_head:
        encoder = f"{network.base_model_prefix}."
        drawn = {name for name in drawn if name.startswith(encoder) and not name.startswith(f"{encoder}pooler.")}
    if drawn:
        named = ", ".join(sorted(drawn)[:3])
        raise ConfigError(f"checkpoint {checkpoint!r} is no {type(network).__name__}: it has no weights {named}")
    return tokenizer, network.to("cuda" if torch.cuda.is_available() else "cpu")


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice off the terminal."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Give torch's own generators, which new heads and dropout draw from, a seed, and afterwards their state back."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def fine_tune(reader: Reader, calibration: Labelled, validation: Labelled, recipe: Recipe, seed: int) -> list[float]:
    """Train all of a network's weights; keep those of the lowest validation loss.

    seed: of the order of the calibration split's texts, which is drawn anew for every epoch.
    Returns the mean NLL on the validation split at every look. Raises ConfigError where that is not finite.
    """
    tokens = reader.tokens(calibration.texts)
    optimizer = torch.optim.AdamW(reader.network.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay)
    batches = _batches(tokens, recipe.batch, np.random.default_rng(seed))
    every = recipe.every or math.ceil(len(tokens) / recipe.batch)
    losses: list[float] = []
    best: dict[str, torch.Tensor] = {}
    while len(losses) < recipe.n_looks and len(losses) - _place_of_lowest(losses) <= recipe.patience:
        reader.network.train()
        for rows in islice(batches, every):
            optimizer.zero_grad()
            for part in np.split(rows, range(recipe.at_once, len(rows), recipe.at_once)):
                loss = reader.nll([tokens[row] for row in part], calibration.outcomes[part]) / len(rows)
                loss.backward()
            clip_grad_norm_(reader.network.parameters(), _GRADIENT_NORM)
            optimizer.step()
        losses.append(reader.mean_nll(validation))
        if not math.isfinite(losses[-1]):
            raise ConfigError("the checkpoint cannot be trained: its loss on the validation split is not finite")
        if _place_of_lowest(losses) == len(losses) - 1:
            best = {name: weights.clone() for name, weights in reader.network.state_dict().items()}
    reader.network.load_state_dict(best)
    return losses


def _place_of_lowest(losses: list[float]) -> int:
    return int(np.argmin(losses)) if losses else 0


def _batches(tokens: Sequence[list[int]], size: int, rng: np.random.Generator) -> Iterator[Ints]:
    """Yield the rows of batches, epoch after epoch without end; within a batch the shorter texts come first."""
    lengths = np.array([len(own) for own in tokens])
    while True:
        order = rng.permutation(len(tokens))
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield rows[np.argsort(lengths[rows], kind="stable")]
