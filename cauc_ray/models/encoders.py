"""Embeddings for routers: of questions by a sentence encoder, of images by a vision encoder or a stage's network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import SerializeAsAny

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import EMBEDDING, Batch, Model, ModelFacts, Unusable, batch_size, parted, require_columns
from cauc_ray.models.kind import Device, HubModel, InputColumns, KindSpec, Placement
from cauc_ray.models.passes import LocalModel, Passes
from cauc_ray.models.transformers import HubImageSpec
from cauc_ray.numbers.logits import LogitKind
from cauc_ray.numbers.types import Floats

if TYPE_CHECKING:
    from cauc_ray.models.classifiers import ImageModel


class FeaturesSpec(KindSpec):
    """A stage's network up to its last linear layer."""

    LOADER: ClassVar[str] = "cauc_ray.models.encoders:load_features"
    kind: Literal["features"] = "features"
    of: SerializeAsAny[KindSpec]

    @property
    def columns_read(self) -> InputColumns:
        """Return the columns of its network."""
        return self.of.columns_read


def load_features(spec: FeaturesSpec, placement: Placement) -> Model:
    """Load the network. Raises ConfigError if it has no such layer."""
    model = spec.of.load(placement)
    if not hasattr(model, "features"):
        raise ConfigError(f"a model of kind {spec.of.kind!r} has no layer before its last one to read")
    features: Model = model.features()
    return features


class ImageEncoderSpec(HubImageSpec):
    """Any image model of transformers, by hub id or local folder; its pooled output is the embedding."""

    LOADER: ClassVar[str] = "cauc_ray.models.encoders:load_image_encoder"
    REQUIRED_HEAD: ClassVar[tuple[str, str]] = ("image encoder", "")
    kind: Literal["vision-encoder"] = "vision-encoder"

    @property
    def answers_kind(self) -> LogitKind:
        """Return that it gives embeddings."""
        return EMBEDDING


def load_image_encoder(spec: ImageEncoderSpec, placement: Placement) -> ImageModel:
    """Load the encoder. Raises ConfigError if it cannot be loaded."""
    from torch import nn
    from transformers import AutoModel

    from cauc_ray.models.classifiers import image_model
    from cauc_ray.models.hub import load_network

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

    return image_model(spec, Pooled(load_network(AutoModel, spec, optional="pooler.")))


class TextEncoderSpec(KindSpec):
    """A sentence encoder of sentence-transformers, by hub id or local folder.

    columns: what it reads, line by line; those of a question by default.   required: those that each row must have.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.encoders:load_text_encoder"
    PACKAGES: ClassVar[tuple[str, ...]] = ("embeddings", "torch", "sentence_transformers")
    kind: Literal["sentence-encoder"] = "sentence-encoder"
    model: HubModel
    device: Device = "auto"
    columns: tuple[str, ...] = ("context", "question", "choices")
    required: tuple[str, ...] = ("question", "choices")

    @property
    def columns_read(self) -> InputColumns:
        """Return the columns that each row must have, and those that it may have."""
        return InputColumns(frozenset(self.required), frozenset(self.columns))

    @property
    def answers_kind(self) -> LogitKind:
        """Return that it gives embeddings."""
        return EMBEDDING


def load_text_encoder(spec: TextEncoderSpec, placement: Placement) -> Model:
    """Load the encoder. Raises ConfigError if it cannot be loaded."""
    from sentence_transformers import SentenceTransformer

    from cauc_ray.models.hub import loading
    from cauc_ray.models.torch_device import choose_device

    with loading(spec.model):
        encoder = SentenceTransformer(spec.model, device=str(choose_device(spec.device)))
    return TextEncoder(spec, encoder, ModelFacts(f"sentence-transformers {spec.model}", EMBEDDING))


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
