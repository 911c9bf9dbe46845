"""Embeddings for routers: of questions by a sentence encoder, of images by a vision encoder or a stage's network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import EMBEDDING, Answers, Batch, Model, ModelFacts, batch_size, require_columns, spread
from cauc_ray.models.kind import KindSpec, require
from cauc_ray.models.kinds import ModelSpec
from cauc_ray.models.transformers import HubModelSpec, HubSpec, image_model, load_network, loading, refuse_missing

if TYPE_CHECKING:
    from cauc_ray.models.vision import ImageModel


class FeaturesSpec(KindSpec):
    """A stage's network up to its last linear layer."""

    kind: Literal["features"] = "features"
    of: ModelSpec

    def load(self) -> Model:
        """Load the network. Raises ConfigError if it has no such layer."""
        model = self.of.load()
        if not hasattr(model, "features"):
            raise ConfigError(f"a model of kind {self.of.kind!r} has no layer before its last one to read")
        features: Model = model.features()
        return features


class ImageEncoderSpec(HubSpec):
    """Any image model of transformers, by hub id or local folder; its pooled output is the embedding."""

    kind: Literal["image-encoder"] = "image-encoder"

    def load(self) -> ImageModel:
        """Load the encoder. Raises ConfigError if it cannot be loaded."""
        require("transformers", "torch", "transformers", "PIL")
        from torch import nn
        from transformers import AutoModel

        class Pooled(nn.Module):
            """An encoder's pooled output, or the mean over its patches if it has no pooler.

            A classifier's weights often lack the pooler, which transformers then initialises at random: it is unused.
            """

            def __init__(self, encoder: nn.Module, missing: frozenset[str]) -> None:
                super().__init__()
                self.encoder = getattr(encoder, "vision_model", encoder)
                self.pools = not missing

            def forward(self, images: Any) -> Any:
                output = self.encoder(pixel_values=images)
                pooled = getattr(output, "pooler_output", None) if self.pools else None
                if pooled is not None:
                    return pooled.flatten(1)
                patches = output.last_hidden_state  # (N, patches, C), or (N, C, H, W) of a convolution
                return patches.mean(dim=1 if patches.ndim == 3 else (2, 3))

        network, missing = load_network(AutoModel, self)
        refuse_missing(self.model, "image encoder", [name for name in missing if not name.startswith("pooler.")])
        return image_model(self, Pooled(network, missing))


class TextEncoderSpec(HubModelSpec):
    """A sentence encoder of sentence-transformers, by hub id or local folder.

    columns: what it reads, line by line; those of a question by default.   required: those that each row must have.
    """

    kind: Literal["text-encoder"] = "text-encoder"
    columns: tuple[str, ...] = ("context", "question", "choices")
    required: tuple[str, ...] = ("question", "choices")

    def load(self) -> Model:
        """Load the encoder. Raises ConfigError if it cannot be loaded."""
        require("embeddings", "torch", "sentence_transformers")
        from sentence_transformers import SentenceTransformer

        from cauc_ray.models.torch_device import choose_device

        with loading(self.model):
            encoder = SentenceTransformer(self.model, device=str(choose_device(self.device)))
        return TextEncoder(self, encoder, ModelFacts(f"sentence-transformers {self.model}", EMBEDDING))


class TextEncoder:
    """A sentence encoder that reads text columns."""

    def __init__(self, spec: TextEncoderSpec, encoder: Any, facts: ModelFacts) -> None:
        self._spec = spec
        self._encoder = encoder
        self.facts = facts

    def __call__(self, batch: Batch) -> Answers:
        """Return each row's embedding, float32 (n, d); rows without a text are failures.

        Raises DataError if the batch has none of the columns.
        """
        columns = [name for name in self._spec.columns if name in batch]
        require_columns(batch, *(self._spec.required or columns or self._spec.columns))
        texts, faults = {}, {}
        for row in range(batch_size(batch)):
            texts[row] = "\n".join(_texts(batch[name][row] for name in columns))
            missing = [name for name in self._spec.required if not any(_texts([batch[name][row]]))]
            if missing or not texts[row]:
                faults[row] = f"it has no text in {', '.join(missing or columns)}"
        asked = {row: text for row, text in texts.items() if row not in faults}
        vectors = np.zeros((0, 1), np.float32)
        if asked:
            given = self._encoder.encode([*asked.values()], convert_to_numpy=True, show_progress_bar=False)
            vectors = given.astype(np.float32)
        return Answers(spread(batch_size(batch), list(asked), vectors), failures=faults)


def _texts(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts of a row's values and lists."""
    for value in values:
        if isinstance(value, str):
            yield from filter(None, [value])
        elif isinstance(value, list | tuple | np.ndarray):
            yield from _texts(value)
