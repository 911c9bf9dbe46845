"""Image classifiers without training: models as CLIP and SigLIP compare an image with a text for each label."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from jinja2 import TemplateError
from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError, first_line
from cauc_ray.models.kind import Placement
from cauc_ray.models.prompts import Labelled, Labels, rendered
from cauc_ray.models.transformers import HubImageSpec

if TYPE_CHECKING:
    from cauc_ray.models.classifiers import ImageModel


class TransformersZeroShotSpec(Labelled, HubImageSpec):
    """`{kind: transformers-zero-shot, model: openai/clip-vit-base-patch32, labels: [cat, dog]}`: image-text similarity.

    labels: names of the classes, or names with their descriptions.   prompt: a Jinja template over `label` and
    `description` of the text that an image is compared with; the logits are the similarities, scaled as in training.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.zero_shot:load"
    REQUIRED_HEAD: ClassVar[tuple[str, str]] = ("zero-shot image classifier", "")
    kind: Literal["transformers-zero-shot"]
    labels: Labels = Field(min_length=2)
    prompt: str = Field(default="a photo of a {{ label }}", min_length=1)

    @model_validator(mode="after")
    def _texts_differ(self) -> TransformersZeroShotSpec:
        try:
            texts = self.label_texts
        except TemplateError as error:
            raise ValueError(f"prompt: {first_line(error)}") from error
        if len(set(texts)) < len(texts):
            raise ValueError(
                "two labels have one text: the prompt must read {{ label }} or a {{ description }} of each"
            )
        return self

    @property
    def shown(self) -> str:
        """Return the labels' texts, one on each line."""
        return "\n".join(self.label_texts)

    @property
    def label_texts(self) -> list[str]:
        """Return the text of each label. Raises TemplateError for a prompt that reads anything else."""
        about = dict.fromkeys(self.labels or (), "") | self.descriptions
        return [rendered(self.prompt, label=name, description=text) for name, text in about.items()]


def load(spec: TransformersZeroShotSpec, placement: Placement) -> ImageModel:
    """Load the network, its preprocessing and the labels' texts. Raises ConfigError if they cannot be loaded."""
    import torch
    from transformers import AutoModelForZeroShotImageClassification, AutoTokenizer

    from cauc_ray.models.classifiers import image_model
    from cauc_ray.models.hub import context_length, fetched, load_network

    class Compares(torch.nn.Module):
        """A network's tower of images, and the embeddings of texts."""

        def __init__(self, network: Any, texts: torch.Tensor) -> None:
            super().__init__()
            self.network = network
            self.register_buffer("texts", texts)

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            output = self.network.get_image_features(pixel_values=images)
            # In bfloat16 a similarity of 0.25, which is scaled by 100, has steps of 0.002.
            with torch.autocast(images.device.type, enabled=False):
                similarities = _embedding(output) @ self.texts.T
            return similarities * self.network.logit_scale.exp() + getattr(self.network, "logit_bias", 0)

    network = load_network(AutoModelForZeroShotImageClassification, spec).float().eval()
    if not hasattr(network, "logit_scale"):
        raise ConfigError(f"model {spec.model!r} does not compare images with texts as CLIP and SigLIP do")
    # SigLIP was trained on texts of one length.
    padding = "max_length" if "siglip" in network.config.model_type else True
    longest = context_length(network.config.text_config)
    settings = {"padding": padding, "truncation": True, "max_length": longest, "return_tensors": "pt"}
    tokens = fetched(AutoTokenizer, spec)(spec.label_texts, **settings)
    with torch.inference_mode():
        texts = _embedding(network.get_text_features(**tokens))
    for name in ("text_model", "text_projection"):  # which have done their work
        setattr(network, name, None)
    return image_model(spec, Compares(network, texts.clone()), spec.label_names)


def _embedding(output: Any) -> Any:
    """Return the embeddings in a tower's output, each of length 1, in float32."""
    vectors = getattr(output, "pooler_output", output).float()
    return vectors / vectors.norm(dim=-1, keepdim=True)
