"""Classifiers of texts as stages: the text columns of a row, read by a tokenizer of the tokenizers library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Batch, ModelFacts, Unusable, batch_size, bucketed, parted, require_columns
from cauc_ray.models.passes import LocalModel, Passes
from cauc_ray.models.transformers import SpreadSpec, fetched, load_placed, option_names


class TransformersClassifierSpec(SpreadSpec):
    """`{kind: transformers-classifier, model: ORG/NAME, text: [text]}`: any AutoModelForSequenceClassification.

    text: the column that it reads, or two for a pair such as a premise and a hypothesis.   max_tokens: longer texts are
    cut, by default at the model's own limit.   batch_tokens: most tokens, padding included, of one forward pass.
    """

    COMPLETE: ClassVar[tuple[str, str]] = ("text classifier", "ForSequenceClassification")
    kind: Literal["transformers-classifier"]
    text: tuple[str, ...] = Field(default=("text",), min_length=1, max_length=2)
    max_tokens: int | None = Field(default=None, ge=4)
    batch_tokens: int = Field(default=16384, ge=1)

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that it reads."""
        return frozenset(self.text)

    texts = needs

    def load(self, *, over_gpus: bool = False) -> TextClassifier:
        """Load the network and its tokenizer. Raises ConfigError if they cannot be loaded, or it is no classifier."""
        self.require("transformers", "torch", "transformers")
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        network = load_placed(AutoModelForSequenceClassification, self, over_gpus=over_gpus)
        if network.config.num_labels < 2 or network.config.problem_type == "multi_label_classification":
            raise ConfigError(f"model {self.model!r} does not choose one of several classes")
        tokenizer = fetched(AutoTokenizer, self.model, revision=self.revision)
        return TextClassifier(self, tokenizer, network)


def text_passes(
    batch: Batch,
    columns: Sequence[str],
    encode: Callable[[list[list[str]]], Sequence[Any]],
    collate: Callable[[list[Any]], Any],
    batch_tokens: int,
    *,
    on_gpu: bool = False,
) -> tuple[Passes, dict[int, str]]:
    """Return texts of like lengths as passes of at most so many tokens, and why the other rows are in none.

    columns: of a text, or of a pair.   encode: from rows of texts to their encodings, each with its `input_ids`.
    collate: from encodings to the inputs of a pass. Raises DataError if a column is missing.
    """
    require_columns(batch, *columns)

    def texts(row: int) -> list[str] | Unusable:
        own = {name: batch[name][row] for name in columns}
        missing = [name for name, text in own.items() if not isinstance(text, str)]
        return Unusable(f"it has no text in {missing[0]!r}") if missing else list(own.values())

    asked, faults = parted({row: texts(row) for row in range(batch_size(batch))})
    encoded = dict(zip(asked, encode(list(asked.values())) if asked else [], strict=True))
    lengths = {row: len(own["input_ids"]) for row, own in encoded.items()}
    return [
        (own, collate([encoded[row] for row in own])) for own in bucketed(lengths, batch_tokens, on_gpu=on_gpu)
    ], faults


class TextClassifier(LocalModel):
    """A network that classifies texts; those of like lengths share a forward pass, and padding changes no answer."""

    def __init__(self, spec: TransformersClassifierSpec, tokenizer: Any, network: Any) -> None:
        from cauc_ray.models.torch_device import DeviceTime, dtype_name, params_b

        self._spec = spec
        self._tokenizer = tokenizer
        self._network = network
        self._device_time: DeviceTime = DeviceTime(network.device)
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

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into padded passes of tokens. Raises DataError when a column is missing."""

        def encode(texts: list[list[str]]) -> list[dict[str, Any]]:
            columns = map(list, zip(*texts, strict=True))
            encoded = self._tokenizer(*columns, truncation=True, max_length=self._max_tokens)
            return [{key: values[place] for key, values in encoded.items()} for place in range(len(texts))]

        def collate(own: list[dict[str, Any]]) -> Any:
            padded = self._tokenizer.pad(own, return_tensors="pt")
            return {name: values.pin_memory() if on_gpu else values for name, values in padded.items()}

        on_gpu = self._network.device.type == "cuda"
        return text_passes(batch, self._spec.text, encode, collate, self._spec.batch_tokens, on_gpu=on_gpu)

    def launch(self, inputs: Any) -> Any:
        """Start on padded texts."""
        import torch

        with torch.inference_mode():
            given = {name: values.to(self._network.device, non_blocking=True) for name, values in inputs.items()}
            with self._device_time.forward():
                return self._network(**given).logits
