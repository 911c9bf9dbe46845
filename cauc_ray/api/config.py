"""Configs of jobs: YAML, checked by pydantic, with paths that are taken from the file's own folder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
)

from cauc_ray.errors import ConfigError, explain
from cauc_ray.files.documents import read_yaml
from cauc_ray.files.paths import AnyPath, RemotePath, path_of

Config = TypeVar("Config", bound=BaseModel)


def folder_of(info: ValidationInfo) -> Path:
    """Return the folder that a config's relative paths are taken from: its file's, else the current one."""
    return Path((info.context or {}).get("folder", "."))


def _located(path: Path, info: ValidationInfo) -> Path:
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path)):
        raise ValueError(f"a path is needed here, not the URI {path}")
    return (folder_of(info) / path).resolve()


FilePath: TypeAlias = Annotated[Path, AfterValidator(_located)]


def located(value: object, info: ValidationInfo) -> AnyPath:
    """Return the path that a config's text names: a URI as it is, else taken from the config's folder."""
    if not isinstance(value, str | Path | RemotePath):
        raise ValueError(f"a path or a URI was expected, got {value!r}")
    path = path_of(value)
    return path if isinstance(path, RemotePath) else _located(path, info)


Location: TypeAlias = Annotated[
    AnyPath,
    PlainValidator(located),
    PlainSerializer(str, when_used="json"),
    WithJsonSchema({"type": "string", "format": "path"}),
]


def read_config(path: str | Path, forms: Sequence[type[Config]]) -> Config:
    """Read a config that has one of some forms: the first whose required keys are there, else the likest.

    Raises ConfigError in one line when the file is missing, no YAML, or has an unknown key, name or value.
    """
    path = Path(path)
    content = read_yaml(path, "config")
    if not isinstance(content, dict):
        keys = ", ".join(_required(forms[0]))
        raise ConfigError(f"{path} holds no config: a mapping with {keys} was expected")
    form = next((form for form in forms if _required(form).keys() <= content.keys()), None)
    form = form or max(forms, key=lambda form: len(_keys(form) & content.keys()))
    try:
        return form.model_validate(content, context={"folder": path.parent})
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error)}") from error


def _required(form: type[BaseModel]) -> dict[str, None]:
    """Return the keys that a form cannot do without, in their order."""
    return {field.alias or name: None for name, field in form.model_fields.items() if field.is_required()}


def _keys(form: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in form.model_fields.items()}
