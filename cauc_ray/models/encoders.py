"""Embeddings for routers: of questions by a sentence encoder, of images by a vision encoder or a stage's network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, SerializeAsAny

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import EMBEDDING, Model
from cauc_ray.models.kind import HubModel, InputColumns, KindSpec, Placement, Precision, TorchDevice
from cauc_ray.models.transformers import HubImageSpec
from cauc_ray.numbers.logits import LogitKind

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

    Attributes:
        model: A hub id or a local folder.
        device: Where it computes; auto is a GPU if the stage has one.
        revision: Of the hub's repository.
        dtype: Precision of the computation.
        batch_tokens: Most tokens of one forward pass, at about three bytes of text each.
        columns: What it reads, line by line; those of a question by default.
        required: Columns that each row must have.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.sentence_encoder:load"
    PACKAGES: ClassVar[tuple[str, ...]] = ("embeddings", "torch", "sentence_transformers")
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = frozenset({"device", "batch_tokens"})
    kind: Literal["sentence-encoder"] = "sentence-encoder"
    model: HubModel
    device: TorchDevice = "auto"
    revision: str | None = None
    dtype: Precision = "float32"
    batch_tokens: int = Field(default=16384, ge=1)
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
