"""Names of classes, in a pool file or in a text file next to it."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, WithJsonSchema

from cauc_ray.errors import ConfigError
from cauc_ray.files.paths import AnyPath


def _named(labels: tuple[str, ...] | None) -> tuple[str, ...] | None:
    # Two classes may have one name: ImageNet has two cranes.
    if labels is not None and not labels:
        raise ValueError("the list of labels is empty")
    for index, label in enumerate(labels or ()):
        if not label.strip():
            raise ValueError(f"class {index} has an empty name")
    return labels


# A path in the pool file, names once the file has been read.
_NAMES_OR_PATH = {"type": ["array", "string", "null"], "items": {"type": "string"}, "minItems": 1, "minLength": 1}
Labels: TypeAlias = Annotated[tuple[str, ...] | None, AfterValidator(_named), WithJsonSchema(_NAMES_OR_PATH)]


def read_labels(path: AnyPath, source: str) -> list[str]:
    """Read names, one per line. Empty lines are kept, so that later names keep their numbers.

    source: the pool, for messages. Raises ConfigError.
    """
    try:
        if not path.is_file():
            raise ConfigError(f"{source}: labels: there is no file {path}")
        text = path.read_text(encoding="utf-8-sig").rstrip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source}: labels: {path} is not UTF-8 text") from error
    except OSError as error:
        raise ConfigError(f"{source}: labels: {path} cannot be read: {error.strerror}") from error
    if not text:
        raise ConfigError(f"{source}: labels: {path} is empty")
    return [line.strip() for line in text.split("\n")]
