"""Networks in torch that classify or embed texts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import EMBEDDING, Batch, ModelFacts, Unusable, batch_size, require_columns
from cauc_ray.models.encoders import TextEncoderSpec
from cauc_ray.models.hub import context_length, fetched, load_placed, loading, option_names
from cauc_ray.models.kind import Placement
from cauc_ray.models.passes import Passes, row_texts, text_passes, texts_in
from cauc_ray.models.torch_device import TorchModel, choose_device, choose_dtype, compute_in_float32, last_linear
from cauc_ray.models.transformers import TransformersClassifierSpec

# Text that one token holds, in languages with spaces and in those without.
_BYTES_PER_TOKEN = 3


def load_classifier(spec: TransformersClassifierSpec, placement: Placement) -> TextClassifier:
    """Load a text classifier and its tokenizer. Raises ConfigError if they cannot be loaded."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    config = fetched(AutoConfig, spec)
    network = load_placed(AutoModelForSequenceClassification, spec, placement, config=config)
    if network.config.num_labels < 2 or network.config.problem_type == "multi_label_classification":
        raise ConfigError(f"model {spec.model!r} does not choose one of several classes")
    return TextClassifier(spec, fetched(AutoTokenizer, spec), network)


class TextClassifier(TorchModel):
    """A network that classifies texts; those of like lengths share a forward pass, and padding changes no answer."""

    def __init__(self, spec: TransformersClassifierSpec, tokenizer: Any, network: Any) -> None:
        labels = option_names(network.config.id2label)
        super().__init__(
            network, ModelFacts(f"transformers {spec.model}", labels=labels), network.device, network.dtype
        )
        self._spec, self._tokenizer = spec, tokenizer
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        network.config.pad_token_id = tokenizer.pad_token_id  # decoders look at the last token that is not padding
        compute_in_float32(last_linear(network))
        limits = (spec.max_tokens or tokenizer.model_max_length, context_length(network.config), max_positions(network))
        self._max_tokens = min(limits)

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into padded passes of tokens. Raises DataError when a column is missing."""

        def encode(texts: list[list[str]]) -> list[dict[str, Any]]:
            columns = map(list, zip(*texts, strict=True))
            encoded = self._tokenizer(*columns, truncation=True, max_length=self._max_tokens)
            return [{key: values[row] for key, values in encoded.items()} for row in range(len(texts))]

        def collate(encodings: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
            padded = self._tokenizer.pad(encodings, return_tensors="pt")
            return {name: self.on_host(tensor) for name, tensor in padded.items()}

        texts = row_texts(batch, self._spec.text)
        return text_passes(texts, encode, collate, self._spec.batch_tokens, self.pass_tokens)

    def launch(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Start on padded texts."""
        logits: torch.Tensor = self._network(**{name: self.on_device(tensor) for name, tensor in inputs.items()}).logits
        return logits


def max_positions(network: nn.Module) -> int:
    """Return how many tokens a network's learned positions allow; a large number without any.

    Positions of RoBERTa and its kin begin after that of padding.
    """
    tables = [module for name, module in network.named_modules() if name.endswith("position_embeddings")]
    offsets = [table for table in tables if getattr(table, "padding_idx", None) is not None]
    return min((int(table.num_embeddings - table.padding_idx - 1) for table in offsets), default=10**9)


def load_encoder(spec: TextEncoderSpec, placement: Placement) -> TextEncoder:
    """Load a sentence encoder of sentence-transformers. Raises ConfigError if it cannot be loaded."""
    from sentence_transformers import SentenceTransformer

    device = choose_device(spec.device)
    dtype = choose_dtype(spec.dtype, device)
    settings = {"device": str(device), "revision": spec.revision, "model_kwargs": {"dtype": dtype}}
    with loading(spec.model):
        encoder = SentenceTransformer(spec.model, **settings)
    return TextEncoder(spec, encoder, device, dtype)


class TextEncoder(TorchModel):
    """A sentence encoder that reads text columns."""

    def __init__(self, spec: TextEncoderSpec, encoder: Any, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(encoder, ModelFacts(f"sentence-transformers {spec.model}", EMBEDDING), device, dtype)
        self._spec = spec

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Return texts of like lengths together; rows without text are failures.

        Raises:
            DataError: The batch lacks a required column, or all of them.
        """
        required = self._spec.required
        columns = [name for name in self._spec.columns if name in batch]
        require_columns(batch, *(required or columns or self._spec.columns))
        texts: dict[int, str | Unusable] = {}
        for row in range(batch_size(batch)):
            text = "\n".join(texts_in(batch[name][row] for name in columns))
            missing = [name for name in required if not any(texts_in([batch[name][row]]))]
            why = f"it has no text in {', '.join(missing or columns)}"
            texts[row] = Unusable(why) if missing or not text else text
        return text_passes(texts, list, list, self._spec.batch_tokens, self.pass_tokens, self._n_tokens)

    def _n_tokens(self, text: str) -> int:
        """Return about how many tokens a text has; the library counts them itself."""
        return min(self._network.max_seq_length or 10**9, 1 + len(text.encode()) // _BYTES_PER_TOKEN)

    def launch(self, inputs: list[str]) -> torch.Tensor:
        """Return the embeddings of texts, (m, d)."""
        settings = {"batch_size": len(inputs), "convert_to_tensor": True, "show_progress_bar": False}
        vectors: torch.Tensor = self._network.encode(inputs, **settings)
        return vectors
