"""JSON schemas of what people write and other programs read: policies, pools, configs, and requests to a service.

`python -m cauc_ray.schemas` writes them anew: next to this file, and a service's requests into its OpenAPI description.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Union

from pydantic import Field, TypeAdapter

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

# The verbs that people give a config file (`--config`).
CONFIGS = ("collect", "fit", "evaluate", "compare", "run", "serve", "plan")


def _policy() -> dict[str, Any]:
    methods = dict(METHODS)  # whose modules register the classes of their policies
    classes = {POLICY_CLASSES[name] for name in (*methods, SINGLE) if name in POLICY_CLASSES}
    classes = {kind for kind in classes if kind.__module__.startswith("cauc_ray.")}
    kinds: Any = Union[tuple(sorted(classes, key=lambda kind: kind.__name__))]  # noqa: UP007
    either: TypeAdapter[Any] = TypeAdapter(Annotated[kinds, Field(discriminator="method")])
    return either.json_schema()


def _openapi() -> dict[str, Any]:
    """Return the hand-written description of a service's addresses, with the requests as the code has them."""
    described: dict[str, Any] = json.loads(OPENAPI.read_text(encoding="utf-8"))
    adapters: list[Any] = [
        (one, "validation", TypeAdapter(one))
        for one in (InferenceRequest, PolicyChange, FeedbackMessage, DecisionRequest, ChatRequest)
    ]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    described["components"]["schemas"] |= schemas["$defs"]
    return described


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "policy": _policy,
    "pool": Pool.model_json_schema,
    "openapi": _openapi,
    **{verb: VERBS[verb].options.model_json_schema for verb in CONFIGS},
}


def schema_path(name: str) -> Path:
    """Return where the schema of a policy or pool file is, or a service's OpenAPI description."""
    if name == "openapi":
        return OPENAPI
    return Path(__file__).parent / f"{name}.schema.json"
