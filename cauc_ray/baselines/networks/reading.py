"""Networks of the transformers library that read texts, fine-tuned whole to predict each text's outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from cauc_ray.baselines.networks.training import Schedule, train
from cauc_ray.errors import ConfigError
from cauc_ray.models.hub import loading
from cauc_ray.numbers.types import Floats, Ints

# Longer gradients are scaled down to this length, as transformers' own trainer does.
GRADIENT_NORM = 1.0
# Tokens in memory together, padding included: four texts of the longest context.
TOKENS_AT_ONCE = 4096
BERT_TOKENS, CAUSAL_TOKENS = 512, 1024
SCORES = tuple(f"<|quality {score}|>" for score in range(1, 6))
_QUESTION = "\n\nQuality of the answer, from 1 to 5: "


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a network is fine-tuned: by AdamW at a constant rate.

    Attributes:
        rate: Learning rate.
        weight_decay: Weight decay.
        batch_size: Texts of one update.
        check_every: Updates between two validation losses; None for an epoch.
        n_checks: Most checks.
        patience: Checks without a lower loss that end the training.
    """

    rate: float
    weight_decay: float
    batch_size: int
    check_every: int | None
    n_checks: int
    patience: int

    def schedule(self, n_texts: int) -> Schedule:
        """Return when to check and to stop on a number of texts."""
        check_every = self.check_every or math.ceil(n_texts / self.batch_size)
        return Schedule(self.batch_size, self.n_checks * check_every, check_every, self.patience)


class Reader(nn.Module):
    """A network that reads texts, with its tokenizer.

    It is a classifier, or an encoder, of which the first token's last hidden state is read, or a causal language model,
    of which the logits of the token after the text are read.

    Attributes:
        max_tokens: Longer texts are cut to as many tokens, on the tokenizer's truncation side.
    """

    def __init__(
        self, tokenizer: Any, network: Any, most_tokens: int, outcomes: Sequence[int] = (), *, is_causal: bool = False
    ) -> None:
        """Keep the network.

        Args:
            tokenizer: Its tokenizer.
            network: The network.
            most_tokens: Most tokens that it is given, if it can read as many.
            outcomes: Which of its logits is that of each of C outcomes.
            is_causal: Whether it is a causal language model, which is asked for the answer's quality after the text.
        """
        super().__init__()
        self.tokenizer, self.network, self.outcomes = tokenizer, network, list(outcomes)
        self.max_tokens = min(most_tokens, getattr(network.config, "max_position_embeddings", None) or most_tokens)
        self._is_causal = is_causal

    def tokens(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of N texts."""
        closed = [text + _QUESTION * self._is_causal for text in texts]
        tokens: list[list[int]] = self.tokenizer(closed, truncation=True, max_length=self.max_tokens)["input_ids"]
        return tokens

    def forward(self, tokens: Sequence[list[int]]) -> torch.Tensor:
        """Return the network's logits, or states, of n texts in tokens, float32 (n, d).

        Padding is on the left for a language model, which continues the text, else on the right. The mask and, on the
        left, the positions leave it out: a text's logits do not depend on its neighbours beyond rounding.
        """
        width = max(map(len, tokens))
        inputs = torch.full((len(tokens), width), self.tokenizer.pad_token_id or 0)
        mask = torch.zeros_like(inputs)
        for row, text in enumerate(tokens):
            columns = slice(width - len(text), width) if self._is_causal else slice(len(text))
            inputs[row, columns] = torch.tensor(text)
            mask[row, columns] = 1
        device = self.network.device
        arguments = {"input_ids": inputs.to(device), "attention_mask": mask.to(device)}
        if not self._is_causal:
            output = self.network(**arguments)
            return output.logits if "logits" in output else output.last_hidden_state[:, 0]
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0).to(device)
        # Only products are bfloat16: weights in it would lose updates of 1e-5 to rounding.
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            output = self.network(**arguments, position_ids=positions, logits_to_keep=1, use_cache=False)
        return output.logits[:, -1].float()

    def of_all(self, tokens: Sequence[list[int]], read: Callable[[Ints], torch.Tensor]) -> Floats:
        """Return what is read of N texts, a few at a time, float64 (N, ...).

        Args:
            tokens: Of the texts.
            read: What is computed of some of them by their rows, int (n,), a tensor (n, ...).
        """
        self.eval()
        parts = list(passes(tokens, np.arange(len(tokens))))
        with torch.inference_mode():
            values = np.concatenate([read(rows).double().cpu().numpy() for rows in parts])
        in_order: Floats = values[np.argsort(np.concatenate(parts))]
        return in_order

    def probabilities(self, texts: Sequence[str]) -> Floats:
        """Return the probabilities of the outcomes of N texts, among these alone, float64 (N, C)."""
        tokens = self.tokens(texts)
        return self.of_all(tokens, lambda rows: self(some(tokens, rows))[:, self.outcomes].double().softmax(dim=1))


def some(tokens: Sequence[list[int]], rows: Ints) -> list[list[int]]:
    """Return the tokens of some texts."""
    return [tokens[row] for row in rows.tolist()]


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

    Args:
        factory: The auto class.
        checkpoint: A hub id or a local folder.
        new_head: Whether what the checkpoint lacks above its encoder is initialised at random.
        options: Further arguments of from_pretrained.

    Raises:
        ConfigError: It cannot be loaded, or lacks other weights, which transformers would invent.
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
        missing = ", ".join(sorted(drawn)[:3])
        raise ConfigError(
            f"checkpoint {checkpoint!r} is not a {type(network).__name__}: it lacks the weights {missing}"
        )
    return tokenizer, network.to("cuda" if torch.cuda.is_available() else "cpu")


def classifier(checkpoint: str, n_classes: int = 3) -> Reader:
    """Load an encoder with a new head for some classes."""
    factory = AutoModelForSequenceClassification
    tokenizer, network = load_pretrained(factory, checkpoint, new_head=True, num_labels=n_classes)
    return Reader(tokenizer, network, BERT_TOKENS, range(n_classes))


def scorer(checkpoint: str) -> Reader:
    """Load a causal language model and give it a token for each score; of long texts it reads the end."""
    tokenizer, network = load_pretrained(AutoModelForCausalLM, checkpoint, new_head=False)
    tokenizer.truncation_side = "left"
    tokenizer.add_tokens(list(SCORES), special_tokens=True)
    if len(tokenizer) > network.get_input_embeddings().num_embeddings:  # many vocabularies are padded: room enough
        network.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    outcomes = tokenizer.convert_tokens_to_ids(list(SCORES))
    return Reader(tokenizer, network, CAUSAL_TOKENS, outcomes, is_causal=True)


@contextmanager
def drawn_from(seed: int) -> Iterator[None]:
    """Seed torch's own generators, which new heads and dropout draw from, and restore their state afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(seed)
        yield


def fine_tune(
    reader: Reader, texts: Sequence[Sequence[str]], outcomes: Sequence[Ints], recipe: Recipe, seed: int
) -> None:
    """Train all of a network's weights; keep those of the lowest validation loss.

    Args:
        reader: The network.
        texts: Of the calibration and the validation split.
        outcomes: Of both splits' texts, int64 (N,) each, indices among the reader's.
        recipe: How.
        seed: Of the order of the calibration texts, shuffled again for every epoch.

    Raises:
        ConfigError: The loss on validation is not finite.
    """
    training, held_out = map(reader.tokens, texts)
    targets = [torch.tensor(reader.outcomes)[torch.from_numpy(of)].to(reader.network.device) for of in outcomes]

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return cross_entropy(reader(some(training, rows.numpy())), targets[0][rows])

    def losses(rows: Ints) -> torch.Tensor:
        return cross_entropy(reader(some(held_out, rows)), targets[1][rows], reduction="none")

    train(
        reader,
        torch.optim.AdamW(reader.parameters(), lr=recipe.rate, weight_decay=recipe.weight_decay),
        loss,
        lambda: finite(float(reader.of_all(held_out, losses).mean())),
        len(training),
        recipe.schedule(len(training)),
        torch.Generator().manual_seed(seed),
        split=lambda rows: map(torch.from_numpy, passes(training, rows.numpy())),
        gradient_norm=GRADIENT_NORM,
    )


def finite(loss: float) -> float:
    """Return a validation loss. Raises ConfigError unless it is finite."""
    if not math.isfinite(loss):
        raise ConfigError("the checkpoint cannot be trained: its loss on the validation split is not finite")
    return loss
