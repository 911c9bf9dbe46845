"""Sentence encoders of the sentence-transformers library."""

from __future__ import annotations

from typing import Any

import torch

from cauc_ray.models.answers import (
    EMBEDDING,
    Batch,
    ModelFacts,
    Unusable,
    batch_size,
    bucketed,
    parted,
    require_columns,
)
from cauc_ray.models.encoders import TextEncoderSpec
from cauc_ray.models.hub import loading
from cauc_ray.models.kind import Placement
from cauc_ray.models.passes import Passes, texts_in
from cauc_ray.models.torch_device import TorchModel, choose_device, choose_dtype

# Text that one token holds, in languages with spaces and in those without.
_BYTES_PER_TOKEN = 3


def load(spec: TextEncoderSpec, placement: Placement) -> TextEncoder:
    """Load the encoder. Raises ConfigError if it cannot be loaded."""
    from sentence_transformers import SentenceTransformer

    device = choose_device(spec.device)
    dtype = choose_dtype(spec.dtype, device)
    settings = {} if dtype == torch.float32 else {"model_kwargs": {"dtype": dtype}}
    with loading(spec.model):
        encoder = SentenceTransformer(spec.model, device=str(device), revision=spec.revision, **settings)
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
        columns = [name for name in self._spec.columns if name in batch]
        require_columns(batch, *(self._spec.required or columns or self._spec.columns))
        by_row: dict[int, str | Unusable] = {}
        for row in range(batch_size(batch)):
            text = "\n".join(texts_in(batch[name][row] for name in columns))
            missing = [name for name in self._spec.required if not any(texts_in([batch[name][row]]))]
            why = f"it has no text in {', '.join(missing or columns)}"
            by_row[row] = Unusable(why) if missing or not text else text
        texts, faults = parted(by_row)
        most = self._network.max_seq_length or max((len(text) for text in texts.values()), default=1)
        lengths = {row: min(most, 1 + len(text.encode()) // _BYTES_PER_TOKEN) for row, text in texts.items()}
        passes = bucketed(lengths, self._spec.batch_tokens, self.pass_tokens)
        return [(rows, [texts[row] for row in rows]) for rows in passes], faults

    def launch(self, inputs: list[str]) -> torch.Tensor:
        """Return the embeddings of texts, (m, d)."""
        settings = {"batch_size": len(inputs), "convert_to_tensor": True, "show_progress_bar": False}
        vectors: torch.Tensor = self._network.encode(inputs, **settings)
        return vectors
