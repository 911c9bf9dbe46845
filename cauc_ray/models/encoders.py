"""Embeddings for routers: of questions by a sentence encoder, of images by a vision encoder or a stage's network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import EMBEDDING, Answers, Batch, Model, ModelFacts, batch_size, spread
from cauc_ray.models.kind import KindSpec, require
from cauc_ray.models.kinds import ModelSpec
from cauc_ray.models.questions import read_questions
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
    """A sentence encoder of sentence-transformers, by hub id or local folder; it reads questions and choices."""

    kind: Literal["text-encoder"] = "text-encoder"

    def load(self) -> Model:
        """Load the encoder. Raises ConfigError if it cannot be loaded."""
        require("embeddings", "torch", "sentence_transformers")
        from sentence_transformers import SentenceTransformer

        from cauc_ray.models.vision import choose_device

        with loading(self.model):
            encoder = SentenceTransformer(self.model, device=str(choose_device(self.device)))
        return TextEncoder(encoder, ModelFacts(f"sentence-transformers {self.model}", EMBEDDING))


class TextEncoder:
    """A sentence encoder that reads questions."""

    def __init__(self, encoder: Any, facts: ModelFacts) -> None:
        self._encoder = encoder
        self.facts = facts

    def __call__(self, batch: Batch) -> Answers:
        """Return each question's embedding, float32 (n, d); rows without a question are failures."""
        questions, faults = read_questions(batch)
        texts = ["\n".join(filter(None, [q.context, q.question, *q.choices])) for q in questions.values()]
        vectors = np.zeros((0, 1), np.float32)
        if texts:
            vectors = self._encoder.encode(texts, convert_to_numpy=True, show_progress_bar=False).astype(np.float32)
        return Answers(spread(batch_size(batch), list(questions), vectors), failures=faults)
