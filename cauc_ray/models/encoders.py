"""Embeddings for routers: of questions by a sentence encoder, of images by a vision encoder or a stage's network."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, SerializeAsAny

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import EMBEDDING, Model
from cauc_ray.models.kind import InputColumns, KindSpec, Placement, Precision
from cauc_ray.models.transformers import HubImageSpec, HubSpec
from cauc_ray.numbers.logits import LogitKind


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

    LOADER: ClassVar[str] = "cauc_ray.models.image_networks:load_image_encoder"
    LOGITS: ClassVar[LogitKind] = EMBEDDING
    REQUIRED_HEAD: ClassVar[tuple[str, str]] = ("image encoder", "")
    kind: Literal["vision-encoder"] = "vision-encoder"


class TextEncoderSpec(HubSpec):
    """A sentence encoder of sentence-transformers, by hub id or local folder.

    Attributes:
        dtype: Precision of the computation.
        batch_tokens: Most tokens of one forward pass, at about three bytes of text each.
        columns: What it reads, line by line; those of a question by default.
        required: Columns that each row must have.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.text_networks:load_encoder"
    LOGITS: ClassVar[LogitKind] = EMBEDDING
    PACKAGES: ClassVar[tuple[str, ...]] = ("embeddings", "torch", "sentence_transformers")
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = frozenset({"device", "batch_tokens"})
    REVISION: ClassVar[int] = 1  # dtype is that of the computation, whatever that of the file
    kind: Literal["sentence-encoder"] = "sentence-encoder"
    dtype: Precision = "float32"
    batch_tokens: int = Field(default=16384, ge=1)
    columns: tuple[str, ...] = ("context", "question", "choices")
    required: tuple[str, ...] = ("question", "choices")

    @property
    def columns_read(self) -> InputColumns:
        """Return the columns that each row must have, and those that it may have."""
        return InputColumns(frozenset(self.required), frozenset(self.columns))
