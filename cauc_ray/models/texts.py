"""Classifiers of texts as stages: the text columns of a row, read by a tokenizer of the tokenizers library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import (
    Answers,
    Batch,
    ModelFacts,
    PreparingModel,
    batch_size,
    bucketed,
    require_columns,
    spread,
)
from cauc_ray.models.kind import require
from cauc_ray.models.transformers import HubSpec, fetched, load_network, option_names, refuse_missing


class TransformersClassifierSpec(HubSpec):
    """`{kind: transformers-classifier, model: ORG/NAME, text: [text]}`: any AutoModelForSequenceClassification.

    text: the column that it reads, or two for a pair such as a premise and a hypothesis.   max_tokens: longer texts are
    cut, by default at the model's own limit.   batch_tokens: most tokens, padding included, of one forward pass.
    """

    HOW: ClassVar[frozenset[str]] = frozenset({"device", "batch_tokens"})
    kind: Literal["transformers-classifier"]
    text: tuple[str, ...] = Field(default=("text",), min_length=1, max_length=2)
    max_tokens: int | None = Field(default=None, ge=4)
    batch_tokens: int = Field(default=16384, ge=1)

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that it reads."""
        return frozenset(self.text)

    reads = needs

    @property
    def texts(self) -> frozenset[str]:
        """Return the columns that it reads."""
        return frozenset(self.text)

    def load(self) -> TextClassifier:
        """Load the network and its tokenizer. Raises ConfigError if they cannot be loaded, or it is no classifier."""
        require("transformers", "torch", "transformers")
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        network, missing = load_network(AutoModelForSequenceClassification, self)
        refuse_missing(self.model, "text classifier", missing)
        if network.config.num_labels < 2 or network.config.problem_type == "multi_label_classification":
            raise ConfigError(f"model {self.model!r} does not choose one of several classes")
        tokenizer = fetched(AutoTokenizer, self.model, revision=self.revision)
        return TextClassifier(self, tokenizer, network)


def read_texts(batch: Batch, columns: Sequence[str]) -> tuple[dict[int, list[str]], dict[int, str]]:
    """Return each row's texts by row, and why the other rows have none. Raises DataError if a column is missing."""
    require_columns(batch, *columns)
    texts = {row: [batch[name][row] for name in columns] for row in range(batch_size(batch))}
    faults = {
        row: f"it has no text in {name!r}"
        for row, own in texts.items()
        for name, value in reversed([*zip(columns, own, strict=True)])  # the first one is named
        if not isinstance(value, str)
    }
    return {row: own for row, own in texts.items() if row not in faults}, faults


class TextClassifier(PreparingModel):
    """A network that classifies texts; those of like lengths share a forward pass, and padding changes no answer."""

    def __init__(self, spec: TransformersClassifierSpec, tokenizer: Any, network: Any) -> None:
        from cauc_ray.models.torch_device import DeviceTime, choose_device, choose_dtype, dtype_name, params_b

        self._spec = spec
        self._tokenizer = tokenizer
        self._device = choose_device(spec.device)
        self._network = network.eval().to(self._device, choose_dtype(spec.dtype, self._device))
        self._device_time = DeviceTime(self._device)
        config = network.config
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        config.pad_token_id = tokenizer.pad_token_id  # decoders look at the last token that is not padding
        limits = [tokenizer.model_max_length, getattr(config, "max_position_embeddings", None)]
        self._max_tokens = spec.max_tokens or min(limit for limit in limits if limit)
        precision = dtype_name(network.dtype)
        labels = option_names(config.id2label)
        source = f"transformers {spec.model}"
        self.facts = ModelFacts(source, params_b=params_b(network), labels=labels, dtype=precision)

    def prepare(self, batch: Batch) -> tuple[int, list[tuple[list[int], Any]], dict[int, str]]:
        """Turn a batch into padded passes of tokens. Raises DataError when a column is missing."""
        texts, faults = read_texts(batch, self._spec.text)
        rows = list(texts)
        if not rows:
            return batch_size(batch), [], faults
        columns = [list(column) for column in zip(*texts.values(), strict=True)]
        encoded = self._tokenizer(*columns, truncation=True, max_length=self._max_tokens)
        lengths = {place: len(tokens) for place, tokens in enumerate(encoded["input_ids"])}
        passes = []
        for places in bucketed(lengths, self._spec.batch_tokens, on_gpu=self._device.type == "cuda"):
            own = {key: [values[place] for place in places] for key, values in encoded.items()}
            padded = self._tokenizer.pad(own, return_tensors="pt")
            passes.append(([rows[place] for place in places], padded))
        return batch_size(batch), passes, faults

    def answer(self, prepared: tuple[int, list[tuple[list[int], Any]], dict[int, str]]) -> Answers:
        """Answer a batch; rows without a text are failures."""
        import torch

        n, passes, faults = prepared
        self._device_time.start()
        rows, found = list[int](), []
        with torch.inference_mode():
            for own, tokens in passes:
                given = tokens.to(self._device)
                with self._device_time.forward():
                    output = self._network(**given)
                rows += own
                found.append(output.logits.float().cpu().numpy())
        logits = np.concatenate(found) if found else np.zeros((0, self._network.config.num_labels), np.float32)
        bad = [row for row, row_logits in zip(rows, logits, strict=True) if not np.isfinite(row_logits).all()]
        failures = faults | dict.fromkeys(bad, "the network's logits for it are NaN or infinite")
        return Answers(spread(n, rows, logits), failures=failures, device_s=self._device_time.seconds())
