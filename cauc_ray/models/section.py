"""Parts of files that people write."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, model_validator

from cauc_ray.errors import unknown_name


class Section(BaseModel):
    """A part of a file that people write; unknown keys and numbers that JSON does not have are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        """Name the keys that there are, which pydantic's own error does not."""
        if cls.model_config.get("extra") != "forbid":
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((key for key in value if key not in known), None) if isinstance(value, dict) else None
        if unknown is not None:
            raise ValueError(unknown_name("key", str(unknown), known))
        return value
