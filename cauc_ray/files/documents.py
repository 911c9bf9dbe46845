"""Text files: JSON that programs write and YAML that people write."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from cauc_ray.errors import ConfigError, DataError, explain
from cauc_ray.files.atomic import atomic_file
from cauc_ray.files.paths import AnyPath

Model = TypeVar("Model", bound=BaseModel)


def write_text(path: AnyPath, text: str) -> None:
    """Write a text file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: AnyPath, value: Any) -> None:
    """Write a JSON file atomically. Raises ValueError on NaN, which JSON does not have."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: AnyPath) -> Any:
    """Read a JSON file. Raises DataError if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a readable JSON file: {error}") from error


def read_model(path: AnyPath, kind: type[Model], file_format: str | None = None, *, strict: bool = False) -> Model:
    """Read a JSON file as a pydantic model.   file_format: the expected value of its key "format", if it has one.

    Raises DataError if it is missing, not JSON, or does not fit the model; ConfigError if it has another format.
    """
    content = read_json(path)
    found = content.get("format", file_format) if isinstance(content, dict) else file_format
    if file_format is not None and found != file_format:
        raise ConfigError(
            f"{path} has format {found}, this version reads {file_format}; remove its folder or choose another -o"
        )
    try:
        return kind.model_validate(content, strict=strict)
    except ValidationError as error:
        raise DataError(f"{path}: {explain(error)}") from error


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def read_yaml(path: AnyPath, kind: str) -> Any:
    """Read a YAML file.   kind: what to call it in messages, such as "pool file".

    Raises ConfigError in one line if it is missing, not a file, or not YAML.
    """
    import yaml

    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path} is not a file")  # reading a pipe would block, and a device never ends
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"there is no {kind} {path}") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line} is not YAML: {error.problem}") from error
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
