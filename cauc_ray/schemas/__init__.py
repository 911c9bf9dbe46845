"""JSON schemas of the files that people write and other programs read: policies and pools.

`python -m cauc_ray.schemas` writes them anew beside this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter

from cauc_ray.models.pool import Pool
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.cauc_rf import RFPolicy


def _policy() -> dict[str, Any]:
    either: TypeAdapter[Any] = TypeAdapter(Annotated[BasePolicy | RFPolicy, Field(discriminator="method")])
    return either.json_schema()


SCHEMAS: Mapping[str, Callable[[], dict[str, Any]]] = {"policy": _policy, "pool": Pool.model_json_schema}


def schema_path(name: str) -> Path:
    """Return where the schema of a policy or pool file lies."""
    return Path(__file__).parent / f"{name}.schema.json"
