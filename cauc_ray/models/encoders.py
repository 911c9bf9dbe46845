"""Embeddings for routers: of questions by a sentence encoder, of images by a vision encoder or a stage's network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import SerializeAsAny

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import EMBEDDING, Batch, Model, ModelFacts, Unusable, batch_size, parted, require_columns
from cauc_ray.models.kind import Device, HubModel, ImageSpec, KindSpec
from cauc_ray.models.passes import LocalModel, Passes
from cauc_ray.models.transformers import HubSpec, image_model, load_network, loading
from cauc_ray.numbers.logits import LogitKind
from cauc_ray.numbers.types import Floats

if TYPE_CHECKING:
    from cauc_ray.models.classifiers import ImageModel


class FeaturesSpec(KindSpec):
    """A stage's network up to its last linear layer."""

    kind: Literal["features"] = "features"
    of: SerializeAsAny[KindSpec]

    def load(self) -> Model:
        """Load the network. Raises ConfigError if it has no such layer."""
        model = self.of.load()
        if not hasattr(model, "features"):
            raise ConfigError(f"a model of kind {self.of.kind!r} has no layer before its last one to read")
        features: Model = model.features()
        return features


class ImageEncoderSpec(HubSpec, ImageSpec):
    """Any image model of transformers, by hub id or local folder; its pooled output is the embedding."""

    COMPLETE: ClassVar[tuple[str, str]] = ("image encoder", "")
    kind: Literal["vision-encoder"] = "vision-encoder"

    @property
    def answers_kind(self) -> LogitKind:
        """Return that it gives embeddings."""
        return EMBEDDING

    def load(self) -> ImageModel:
        """Load the encoder. Raises ConfigError if it cannot be loaded."""
        self.require("transformers", "torch", "transformers", "PIL")
        from torch import nn
        from transformers import AutoModel

        class Pooled(nn.Module):
            """An encoder's pooled output, or the mean over its patches if it has no pooler.

            A classifier's weights often lack the pooler, which transformers then initialises at random: it is unused.
            """

            def __init__(self, encoder: Any) -> None:
                super().__init__()
                self.encoder = getattr(encoder, "vision_model", encoder)
                self.pools = not encoder.lacks_optional

            def forward(self, images: Any) -> Any:
                output = self.encoder(pixel_values=images)
                pooled = getattr(output, "pooler_output", None) if self.pools else None
                if pooled is not None:
                    return pooled.flatten(1)
                patches = output.last_hidden_state  # (N, patches, C), or (N, C, H, W) of a convolution
                return patches.mean(dim=1 if patches.ndim == 3 else (2, 3))

        return image_model(self, Pooled(load_network(AutoModel, self, optional="pooler.")))


class TextEncoderSpec(KindSpec):
    """A sentence encoder of sentence-transformers, by hub id or local folder.

    columns: what it reads, line by line; those of a question by default.   required: those that each row must have.
    """

    kind: Literal["sentence-encoder"] = "sentence-encoder"
    model: HubModel
    device: Device = "auto"
    columns: tuple[str, ...] = ("context", "question", "choices")
    required: tuple[str, ...] = ("question", "choices")

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that each row must have."""
        return frozenset(self.required)

    @property
    def reads(self) -> frozenset[str]:
        """Return all columns that it reads."""
        return frozenset((*self.columns, *self.required))

    @property
    def answers_kind(self) -> LogitKind:
        """Return that it gives embeddings."""
        return EMBEDDING

    def load(self) -> Model:
        """Load the encoder. Raises ConfigError if it cannot be loaded."""
        self.require("embeddings", "torch", "sentence_transformers")
        from sentence_transformers import SentenceTransformer

        from cauc_ray.models.torch_device import choose_device

        with loading(self.model):
            encoder = SentenceTransformer(self.model, device=str(choose_device(self.device)))
        return TextEncoder(self, encoder, ModelFacts(f"sentence-transformers {self.model}", EMBEDDING))


class TextEncoder(LocalModel):
    """A sentence encoder that reads text columns."""

    def __init__(self, spec: TextEncoderSpec, encoder: Any, facts: ModelFacts) -> None:
        self._spec = spec
        self._encoder = encoder
        self.facts = facts

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Return each row's text; rows without one are failures. Raises DataError if the batch has no such column."""
        columns = [name for name in self._spec.columns if name in batch]
        require_columns(batch, *(self._spec.required or columns or self._spec.columns))
        found: dict[int, str | Unusable] = {}
        for row in range(batch_size(batch)):
            text = "\n".join(_texts(batch[name][row] for name in columns))
            missing = [name for name in self._spec.required if not any(_texts([batch[name][row]]))]
            found[row] = Unusable(f"it has no text in {', '.join(missing or columns)}") if missing or not text else text
        texts, faults = parted(found)
        return [([*texts], [*texts.values()])] if texts else [], faults

    def launch(self, inputs: list[str]) -> Floats:
        """Return the embeddings of texts, float32 (m, d)."""
        vectors: Floats = self._encoder.encode(inputs, convert_to_numpy=True, show_progress_bar=False)
        return vectors.astype(np.float32)


def _texts(values: Iterable[Any]) -> Iterator[str]:
    """Yield the texts of a row's values and lists."""
    for value in values:
        if isinstance(value, str):
            yield from filter(None, [value])
        elif isinstance(value, list | tuple | np.ndarray):
            yield from _texts(value)
