"""JSON schemas of what people write and other programs read: policies, pools, configs, and requests to a service.

`python -m cauc_ray.schemas` writes them anew: next to this file, and a service's requests into its OpenAPI description.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import BaseModel, Field, TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from cauc_ray.api.docstrings import items, sections
from cauc_ray.cli.verbs import VERBS
from cauc_ray.models.pool import Pool
from cauc_ray.policies.by_method import SINGLE
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.policy import POLICY_CLASSES
from cauc_ray.protocol.messages import InferenceRequest
from cauc_ray.serving.chat import ChatRequest
from cauc_ray.serving.decisions import DecisionRequest
from cauc_ray.serving.feedback import FeedbackMessage
from cauc_ray.serving.http_app import OPENAPI
from cauc_ray.serving.policies_live import PolicyChange


def _policy() -> dict[str, Any]:
    methods = dict(METHODS)  # whose modules register the classes of their policies
    classes = {POLICY_CLASSES[name] for name in (*methods, SINGLE) if name in POLICY_CLASSES}
    classes = {kind for kind in classes if kind.__module__.startswith("cauc_ray.")}
    kinds: Any = Union[tuple(sorted(classes, key=lambda kind: kind.__name__))]  # noqa: UP007
    either: TypeAdapter[Any] = TypeAdapter(Annotated[kinds, Field(discriminator="method")])
    return either.json_schema()


def _openapi() -> dict[str, Any]:
    """Return the hand-written description of a service's addresses, with the requests as the code has them."""
    openapi: dict[str, Any] = json.loads(OPENAPI.read_text(encoding="utf-8"))
    adapters: list[Any] = [
        (message, "validation", TypeAdapter(message))
        for message in (InferenceRequest, PolicyChange, FeedbackMessage, DecisionRequest, ChatRequest)
    ]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    openapi["components"]["schemas"] |= _described(schemas)["$defs"]
    return openapi


def _schema(name: str, schema: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    dialect = {"$schema": GenerateJsonSchema.schema_dialect, "$id": f"urn:cauc-ray:{_file_name(name)}"}
    return dialect | _described(schema())


def _described(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema whose keys are described by the docstrings of their classes, inherited ones included."""
    classes = _subclasses(BaseModel)
    for definition in (schema, *schema.get("$defs", {}).values()):
        if "properties" in definition:
            docstring = definition.get("description")
            parents = classes.get(definition.get("title", ""), BaseModel).__mro__
            docstrings = [*(parent.__doc__ for parent in reversed(parents)), docstring]
            texts = {name: text for part in docstrings for name, text in items(part, "Attributes").items()}
            for key, value in definition["properties"].items():
                if key in texts:
                    value.setdefault("description", texts[key].removesuffix("."))
            if docstring:
                definition["description"] = sections(docstring)[""]
    return schema


def _subclasses(parent: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """Return by name the classes of the package that are made from one."""
    classes: dict[str, type[BaseModel]] = {}
    for child in parent.__subclasses__():
        classes |= _subclasses(child) | ({child.__name__: child} if child.__module__.startswith("cauc_ray") else {})
    return classes


# The files that people write and programs read, and the configs of all verbs (`--config`).
_FILES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "policy": _policy,
    "pool": Pool.model_json_schema,
    **{name: verb.options.model_json_schema for name, verb in VERBS.items()},
}
SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "openapi": _openapi,
    **{name: partial(_schema, name, schema) for name, schema in _FILES.items()},
}


def schema_path(name: str) -> Path:
    """Return where a schema is, of policy or pool files or of a verb's configs, or a service's OpenAPI description."""
    return OPENAPI if name == "openapi" else Path(__file__).parent / f"{_file_name(name)}.schema.json"


def _file_name(name: str) -> str:
    return name.replace(" ", "-")
