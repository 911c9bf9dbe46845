"""JSON schemas of what people write and other programs read: policies, pools, configs, and requests to a service.

`python -m cauc_ray.schemas` writes them anew: next to this file, and the service's next to its code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from cauc_ray.cli.verbs import VERBS
from cauc_ray.models.pool import Pool
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy
from cauc_ray.schemas.openapi import openapi
from cauc_ray.serving.documents import OPENAPI

# The verbs that people give a config file (`--config`).
CONFIGS = ("collect", "fit", "evaluate", "compare", "sweep", "run", "serve", "plan", "paper")


def _policy() -> dict[str, Any]:
    either: TypeAdapter[Any] = TypeAdapter(Annotated[BasePolicy | RFPolicy, Field(discriminator="method")])
    return either.json_schema()


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "policy": _policy,
    "pool": Pool.model_json_schema,
    "openapi": openapi,
    **{verb: VERBS[verb].options.model_json_schema for verb in CONFIGS},
}


def schema_path(name: str) -> Path:
    """Return where the schema of a policy or pool file is, or a service's OpenAPI description."""
    if name == "openapi":
        return OPENAPI
    return Path(__file__).parent / f"{name}.schema.json"
