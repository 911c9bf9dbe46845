"""JSON schemas of what people write and other programs read: policies, pools, and requests to a service.

`python -m cauc_ray.schemas` writes them anew: next to this file, and the service's next to its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from cauc_ray.models.pool import Pool
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.schemas.openapi import openapi
from cauc_ray.serving.documents import OPENAPI


def _policy() -> dict[str, Any]:
    either: TypeAdapter[Any] = TypeAdapter(Annotated[BasePolicy | RFPolicy, Field(discriminator="method")])
    return either.json_schema()


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "policy": _policy,
    "pool": Pool.model_json_schema,
    "openapi": openapi,
}


def schema_path(name: str) -> Path:
    """Return where the schema of a policy or pool file lies, or a service's OpenAPI description."""
    if name == "openapi":
        return OPENAPI
    return Path(__file__).parent / f"{name}.schema.json"
