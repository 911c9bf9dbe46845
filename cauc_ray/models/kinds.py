"""The kinds of models that a pool file may name: built-in ones, and those that other packages register."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, Union, get_args

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.models.answers import Model
from cauc_ray.models.encoders import ImageEncoderSpec, TextEncoderSpec
from cauc_ray.models.kind import DeclaringSpec, KindSpec
from cauc_ray.models.onnx import OnnxSpec
from cauc_ray.models.openai import DecisionsSpec, OpenAISpec
from cauc_ray.models.prompts import PromptSettings
from cauc_ray.models.python import PythonSpec, imported, python_model
from cauc_ray.models.remote import RemoteSpec
from cauc_ray.models.saved import SavedSpec
from cauc_ray.models.torchvision import TorchvisionSpec
from cauc_ray.models.transformers import (
    TransformersChoiceSpec,
    TransformersClassifierSpec,
    TransformersImageSpec,
)
from cauc_ray.models.vllm import VllmSpec
from cauc_ray.models.zero_shot import TransformersZeroShotSpec

# A package registers a kind as an entry point of this group: its name, and a factory as `python` takes one.
ENTRY_POINTS = "cauc_ray.model_kinds"
_SPECS: tuple[type[KindSpec], ...] = (
    DecisionsSpec,
    ImageEncoderSpec,
    OnnxSpec,
    OpenAISpec,
    PythonSpec,
    RemoteSpec,
    SavedSpec,
    TextEncoderSpec,
    TorchvisionSpec,
    TransformersChoiceSpec,
    TransformersClassifierSpec,
    TransformersImageSpec,
    TransformersZeroShotSpec,
    VllmSpec,
)
_BY_KIND = {str(get_args(spec.model_fields["kind"].annotation)[0]): spec for spec in _SPECS}
BUILT_IN = tuple(_BY_KIND)
# The settings of a pool or a stage on how its models are asked, by the kinds that take them.
ASKED = {
    kind: own for kind, spec in _BY_KIND.items() if (own := PromptSettings.model_fields.keys() & spec.model_fields)
}


class RegisteredSpec(DeclaringSpec):
    """`{kind: NAME, logit_kind: …, …}`: a kind that another package registers; all other keys go to its factory."""

    model_config = ConfigDict(extra="allow", frozen=True)
    # Without this, a built-in kind would match two alternatives of the schema, which allows only one.
    kind: str = Field(json_schema_extra={"not": {"enum": [*BUILT_IN]}})

    def load(self) -> Model:
        """Call the registered factory. Raises ConfigError if it cannot be imported or does not return a callable."""
        entry = next(iter(entry_points(group=ENTRY_POINTS, name=self.kind)), None)
        if entry is None:  # the pool was read on another machine
            raise ConfigError(unknown_name("kind", self.kind, known_kinds()))
        source = f"{self.kind} {entry.value}"
        return python_model(
            imported(entry.value, f"kind {self.kind!r}")(**(self.model_extra or {})), source, self.logit_kind
        )


def known_kinds() -> tuple[str, ...]:
    """Return the names of all kinds that can be used here."""
    return tuple(dict.fromkeys([*BUILT_IN, *(entry.name for entry in entry_points(group=ENTRY_POINTS))]))


def _tag(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    return kind if kind in BUILT_IN else "registered"


def _known(value: Any) -> Any:
    """Refuse an unknown kind with the nearest one, which the schema's own message lacks."""
    kind = value.get("kind") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind not in known_kinds():
        raise ValueError(unknown_name("kind", kind, known_kinds()))
    return value


if TYPE_CHECKING:
    ModelSpec: TypeAlias = KindSpec
else:
    _TAGGED = [Annotated[spec, Tag(kind)] for kind, spec in (*_BY_KIND.items(), ("registered", RegisteredSpec))]
    ModelSpec = Annotated[Union[tuple(_TAGGED)], Discriminator(_tag), BeforeValidator(_known)]  # noqa: UP007
