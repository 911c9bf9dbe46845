"""The kinds of models that a pool file may name: entry points of installed packages, this one among them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, Union

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    SerializeAsAny,
    Tag,
    TypeAdapter,
    ValidationInfo,
)
from pydantic_core import CoreSchema

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.files.entry_points import is_ours, loaded, registered
from cauc_ray.models.answers import Model
from cauc_ray.models.kind import DeclaringSpec, KindSpec, Placement
from cauc_ray.models.prompts import PromptSettings
from cauc_ray.models.python import called, imported, python_model

# An entry point of this group names a kind, and either its KindSpec or a factory as kind `python` takes one.
GROUP = "cauc_ray.model_kinds"


class RegisteredSpec(DeclaringSpec):
    """`{kind: NAME, logit_kind: …, …}`: a kind whose entry point is a factory; all other keys are its arguments."""

    model_config = ConfigDict(extra="allow", frozen=True)
    LOADER: ClassVar[str] = "cauc_ray.models.kinds:load_registered"
    SPANS_GPUS: ClassVar[bool] = True


def load_registered(spec: RegisteredSpec, placement: Placement) -> Model:
    """Call a registered factory. Raises ConfigError if it cannot be imported or does not return a callable."""
    entry = registered(GROUP).get(spec.kind)
    if entry is None:  # the pool was read on another machine
        raise ConfigError(unknown_name("kind", spec.kind, known_kinds()))
    function = called(imported(entry.value, f"kind {spec.kind!r}"), spec.model_extra or {}, placement)
    return python_model(function, f"{spec.kind} {entry.value}", spec.logit_kind)


def known_kinds() -> tuple[str, ...]:
    """Return the names of all kinds that can be used here, sorted."""
    return tuple(sorted(registered(GROUP)))


def spec_class(kind: str) -> type[KindSpec]:
    """Return the settings of a kind. Raises ValueError for an unknown kind, or one that cannot be imported."""
    entry = registered(GROUP).get(kind)
    if entry is None:
        raise ValueError(unknown_name("kind", kind, known_kinds()))
    try:
        target = loaded(entry, "kind")
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return target if isinstance(target, type) and issubclass(target, KindSpec) else RegisteredSpec


def built_in_specs() -> dict[str, type[KindSpec]]:
    """Return the settings of this package's kinds by name."""
    return {name: spec_class(name) for name, entry in registered(GROUP).items() if is_ours(entry)}


def prompt_fields(kind: object) -> frozenset[str]:
    """Return the settings of a pool or a stage that models of a kind take; none for an unknown kind."""
    if not isinstance(kind, str) or kind not in registered(GROUP):
        return frozenset()
    return frozenset(PromptSettings.model_fields.keys() & spec_class(kind).model_fields.keys())


def _by_kind(value: Any, info: ValidationInfo) -> Any:
    kind = value.get("kind") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        if isinstance(value, KindSpec):
            return value
        raise ValueError(f"give a model as a mapping with a kind, one of {', '.join(known_kinds())}")
    return spec_class(kind).model_validate(value, context=info.context)


class _AnyKind:
    """The JSON schema of a model: that of its kind."""

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        specs = built_in_specs()
        other_kinds = Annotated[str, Field(json_schema_extra={"not": {"enum": sorted(specs)}})]
        registered = type("RegisteredSpec", (RegisteredSpec,), {"__annotations__": {"kind": other_kinds}})
        tagged = [Annotated[spec, Tag(name)] for name, spec in (*sorted(specs.items()), ("", registered))]
        union: Any = Annotated[Union[tuple(tagged)], Discriminator(lambda model: model.kind)]  # noqa: UP007
        return handler(TypeAdapter(union).core_schema)


if TYPE_CHECKING:
    ModelSpec: TypeAlias = KindSpec
else:
    ModelSpec = Annotated[SerializeAsAny[KindSpec], BeforeValidator(_by_kind), _AnyKind()]
