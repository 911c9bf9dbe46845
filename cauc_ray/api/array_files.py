"""Arrays of logits and labels in files: .npy, .npz and .csv."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
from pydantic import PlainSerializer, PlainValidator, ValidationInfo, WithJsonSchema

from cauc_ray.api.options import Flag, located
from cauc_ray.errors import ConfigError, DataError, first_line
from cauc_ray.files.paths import AnyPath, readable

_NAMED = re.compile(r"([^/=]+)=(.+\.(?:npy|csv))")
# In an .npz file, next to an array for each model.
_LABELS = "labels"


def _located_logits(value: object, info: ValidationInfo) -> tuple[AnyPath, ...] | dict[str, AnyPath]:
    """Return the paths of tables, or by model those of arrays: a path, a mapping, or several, as small=small.npy."""
    if isinstance(value, Mapping):
        return {str(model): located(path, info) for model, path in value.items()}
    parts = value if isinstance(value, list | tuple) else [value]
    named = [_NAMED.fullmatch(str(part)) for part in parts]
    if not parts:
        raise ValueError("a path is missing")
    if None not in named:
        return {match[1]: located(match[2], info) for match in named if match}
    if any(named):
        unnamed_part = next(str(part) for part, match in zip(parts, named, strict=True) if not match)
        raise ValueError(f"every array is given as NAME=FILE (.npy or .csv), got {unnamed_part!r}")
    # One .csv alone may be a table of scores.
    of_arrays = (".npy", ".csv") if len(parts) > 1 else (".npy",)
    unnamed = next((Path(str(part)).name for part in parts if str(part).endswith(of_arrays)), None)
    if unnamed is not None:
        raise ValueError(f"name the model of each array, as {Path(unnamed).stem}={unnamed}")
    return tuple(located(part, info) for part in parts)


def _plain(value: Any) -> Any:
    return {model: str(path) for model, path in value.items()} if isinstance(value, dict) else list(map(str, value))


_SCHEMA = {
    "anyOf": [
        {"type": "string", "format": "path"},
        {"type": "array", "items": {"type": "string", "format": "path"}},
        {"type": "object", "additionalProperties": {"type": "string", "format": "path"}},
    ]
}
LogitFiles: TypeAlias = Annotated[
    tuple[AnyPath, ...] | dict[str, AnyPath],
    PlainValidator(_located_logits),
    PlainSerializer(_plain, when_used="json"),
    WithJsonSchema(_SCHEMA),
    Flag("LOGITS", is_positional=True, is_several=True),
]


def read_logits(
    paths: tuple[AnyPath, ...] | dict[str, AnyPath], labels: AnyPath | None, *, require_labels: bool = True
) -> tuple[AnyPath | dict[str, Any], Any]:
    """Return a logit table's path, or arrays by model with their labels.

    Args:
        paths: A table, an .npz file with an array for each model and perhaps labels, or a .npy or .csv file by model.
        labels: The file of the arrays' labels; None for those in an .npz file.
        require_labels: Whether arrays without labels are refused.

    Raises:
        ConfigError: Labels are missing or do not go with a table.
        DataError: A file cannot be read as an array.
    """
    if isinstance(paths, dict):
        arrays: dict[str, Any] = {model: _read(path) for model, path in paths.items()}
    else:
        table, *more_tables = paths
        if more_tables:
            raise ConfigError(f"one logit table was expected, got {len(paths)}: {', '.join(map(str, paths))}")
        if table.suffix != ".npz":
            if labels is not None:
                raise ConfigError("labels are those of arrays; a logit table has its own")
            return table, None
        arrays = _load(table)
    stored = arrays.pop(_LABELS, None)
    if labels is None and stored is None and require_labels:
        names = (
            ""
            if isinstance(paths, dict)
            else f", or name an array {_LABELS!r}; {paths[0].name} has {', '.join(arrays) or 'none'}"
        )
        raise ConfigError(f"arrays need labels: give their file as labels (--labels FILE){names}")
    known_labels = stored if labels is None else _read(labels)
    # A column or a row of labels is taken, too; one label stays an array.
    return arrays, None if known_labels is None else np.atleast_1d(np.squeeze(known_labels))


def files_of(paths: tuple[AnyPath, ...] | dict[str, AnyPath]) -> tuple[AnyPath, ...]:
    """Return all paths of logits."""
    return tuple(paths.values()) if isinstance(paths, dict) else paths


def _read(path: AnyPath) -> Any:
    """Return the array of a .npy or .csv file."""
    if path.suffix == ".npy":
        return _load(path)
    if path.suffix != ".csv":
        raise ConfigError(f"{path}: an array was expected in a .npy or .csv file")
    with _explained(path):
        lines = path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines()
        titles = [title.strip(b' "') for title in (lines or [b""])[0].split(b",")]
        if len(titles) > 1 and titles[0] in (b"", b"Unnamed: 0"):
            raise ValueError("its first column has no name, as an index that pandas writes; write it with index=False")
        rows = lines[_is_header(titles) :]
        if not rows:
            raise ValueError("it has no rows")
        try:
            columns = np.loadtxt(rows, delimiter=",", ndmin=2)
        except ValueError:
            parts = rows[0].replace(b",", b".").split(b";")
            if len(parts) > 1 and _numbers(parts):
                raise ValueError("its columns are separated by semicolons; write it with commas between them") from None
            if len(titles) > 1:
                raise
            return np.array([row.decode().strip(" \"'") for row in rows])  # words, which make segments
        return columns[:, 0] if columns.shape[1] == 1 else columns


def _load(path: AnyPath) -> Any:
    with _explained(path):
        loaded = np.load(path if isinstance(path, Path) else io.BytesIO(path.read_bytes()), allow_pickle=False)
        return dict(loaded) if isinstance(loaded, np.lib.npyio.NpzFile) else loaded


@contextmanager
def _explained(path: AnyPath) -> Iterator[None]:
    """Turn what a file that holds no array raises into a DataError of one line."""
    with readable(path):
        try:
            yield
        except (ValueError, EOFError, BadZipFile) as error:
            raise DataError(f"{path} does not hold an array of numbers: {first_line(error)}") from error


def _is_header(titles: list[bytes]) -> bool:
    """Return whether the first line names columns: by words, or by numbers as pandas does where they have no names."""
    numbers = _numbers(titles)
    return not numbers or (len(numbers) > 2 and numbers == list(range(len(numbers))))


def _numbers(titles: list[bytes]) -> list[float]:
    """Return the titles of a line as numbers; none if one of them is a word."""
    try:
        return [float(title) for title in titles]
    except ValueError:
        return []
