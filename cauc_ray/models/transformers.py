"""Settings of models of the transformers library: image classifiers, text classifiers, and language models."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from cauc_ray.errors import ConfigError
from cauc_ray.models.kind import HubModel, ImageSpec, InputColumns, TextColumns, TorchSpec
from cauc_ray.models.prompts import LanguageSpec
from cauc_ray.numbers.logits import LogitKind


class HubSpec(TorchSpec):
    """A model of transformers by hub id or local folder.

    Attributes:
        model: A hub id or a local folder.
        revision: Of the hub's repository.
        REQUIRED_HEAD: What a checkpoint must be, and a pattern of the architectures that are saved with the head that
            this needs.
    """

    PACKAGES: ClassVar[tuple[str, ...]] = ("transformers", "torch", "transformers")
    FILES: ClassVar[tuple[str, ...]] = ("model",)
    REQUIRED_HEAD: ClassVar[tuple[str, str]] = ("model", "")
    model: HubModel
    revision: str | None = None

    def check(self, local: bool) -> None:
        """Raise ConfigError if a folder is missing, or its model was saved without the required head, by its config."""
        super().check(local)
        what, head = self.REQUIRED_HEAD
        architectures: list[str] = []
        if Path(self.model).is_absolute():
            with suppress(OSError, ValueError, AttributeError):  # the library explains what cannot be read
                architectures = json.loads(Path(self.model, "config.json").read_bytes()).get("architectures") or []
        if architectures and not any(re.search(head, name) for name in architectures):
            raise ConfigError(f"model {self.model!r} is not a complete {what}: it was saved as {architectures[0]}")


# Arguments of from_pretrained that have a key of their own, or that a stage sets.
_RESERVED = frozenset({"revision", "dtype", "torch_dtype", "device_map", "config", "gguf_file"})


class PretrainedSpec(HubSpec):
    """A model that transformers loads.

    Attributes:
        settings: Further arguments of from_pretrained, such as trust_remote_code, attn_implementation, subfolder or
            quantization_config.
    """

    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("settings")
    @classmethod
    def _are_not_reserved(cls, settings: dict[str, Any]) -> dict[str, Any]:
        for name in sorted(_RESERVED & settings.keys()):
            raise ValueError(
                f"{name} does not belong there: give it as a key of the model, and devices by the stage's resources"
            )
        return settings


class HubImageSpec(PretrainedSpec, ImageSpec):
    """An image model of transformers with the preprocessing of its folder or repository."""

    PACKAGES: ClassVar[tuple[str, ...]] = ("transformers", "torch", "transformers", "PIL")


class TransformersImageSpec(HubImageSpec):
    """`{kind: transformers-image, model: google/vit-base-patch16-224}`: any AutoModelForImageClassification."""

    LOADER: ClassVar[str] = "cauc_ray.models.image_networks:load_image_model"
    REQUIRED_HEAD: ClassVar[tuple[str, str]] = ("image classifier", "ForImageClassification")
    kind: Literal["transformers-image"]


class SpreadSpec(HubSpec):
    """A model of transformers that may be spread over several GPUs."""

    SPANS_GPUS: ClassVar[bool] = True
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = frozenset({"device", "batch_tokens"})


class TransformersClassifierSpec(SpreadSpec, PretrainedSpec):
    """`{kind: transformers-classifier, model: ORG/NAME, text: text}`: any AutoModelForSequenceClassification.

    Attributes:
        text: The column that it reads, or two for a pair such as a premise and a hypothesis.
        max_tokens: Longer texts are cut, by default at the model's own limit.
        batch_tokens: Most tokens of one forward pass, padding included.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.text_networks:load_classifier"
    REQUIRED_HEAD: ClassVar[tuple[str, str]] = ("text classifier", "ForSequenceClassification")
    kind: Literal["transformers-classifier"]
    text: TextColumns = ("text",)
    max_tokens: int | None = Field(default=None, ge=4)
    batch_tokens: int = Field(default=16384, ge=1)

    @property
    def columns_read(self) -> InputColumns:
        """Return the columns of texts."""
        return InputColumns(frozenset(self.text), texts=frozenset(self.text))


class HubLanguageSpec(SpreadSpec, LanguageSpec):
    """A language model by hub id or local folder.

    Attributes:
        chat_template: Whether prompts go through the model's own template; by default if it has one, unless the texts
            of the options are compared.
        chat_template_kwargs: Variables of that template, such as enable_thinking: false.
        max_tokens: Longest sequence, by default the model's context.
    """

    REQUIRED_HEAD: ClassVar[tuple[str, str]] = ("causal language model", "CausalLM|LMHead|Generation|Text2Text")
    chat_template: bool | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    max_tokens: int | None = Field(default=None, ge=1)


class TransformersChoiceSpec(PretrainedSpec, HubLanguageSpec):
    """`{kind: transformers-choice, model: ORG/NAME}`: a language model in torch that chooses among options.

    Attributes:
        gguf_file: A GGUF file there, whose weights are dequantised.
        batch_tokens: Most tokens of one forward pass, padding included; a batch's prompts are sorted by length into
            such passes.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.language:load"
    kind: Literal["transformers-choice"]
    gguf_file: str | None = None
    batch_tokens: int = Field(default=8192, ge=1)

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits: raw for letters."""
        return "raw" if self.answers_with == "letter" else "log-probabilities"
