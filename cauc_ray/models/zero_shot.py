"""Image classifiers without training: models as CLIP and SigLIP compare an image with a text for each label."""

from __future__ import annotations

from typing import ClassVar, Literal

from jinja2 import TemplateError
from pydantic import Field, model_validator

from cauc_ray.errors import first_line
from cauc_ray.models.prompts import Labelled, Labels, rendered
from cauc_ray.models.transformers import HubImageSpec


class TransformersZeroShotSpec(Labelled, HubImageSpec):
    """`{kind: transformers-zero-shot, model: openai/clip-vit-base-patch32, labels: [cat, dog]}`: image-text similarity.

    The logits are the similarities, scaled as in training.

    Attributes:
        labels: Names of the classes, or names with their descriptions.
        prompt: A Jinja template over `label` and `description` of the text that an image is compared with.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.image_networks:load_zero_shot"
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
