"""Atomic writes, on any filesystem, and text files: JSON that programs write and YAML that people write."""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, ValidatorFunctionWrapHandler, field_validator

from cauc_ray.errors import ConfigError, DataError, explain
from cauc_ray.files.paths import AnyPath, RemotePath, path_of

Model = TypeVar("Model", bound=BaseModel)
# Written to a store, which tells its rights only by refusing.
_PROBE = ".cauc-probe"


class Settings(BaseModel):
    """Settings that people write; unknown keys are errors, as are booleans for numbers, which pydantic takes as 1."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="wrap")
    @classmethod
    def _booleans_stay(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Any:
        result = read(value)
        _require_booleans(value, result)
        return result


def _require_booleans(value: Any, result: Any) -> None:
    """Raise ValueError where a boolean in a value has become something else in what was read from it."""
    if isinstance(value, bool):
        if not isinstance(result, bool):
            raise ValueError(f"a number was expected, got {str(value).lower()}")
    elif isinstance(value, Mapping) and isinstance(result, Mapping):
        for key in value.keys() & result.keys():
            _require_booleans(value[key], result[key])
    elif isinstance(value, list | tuple) and isinstance(result, Sequence):
        for part, part_result in zip(value, result, strict=False):
            _require_booleans(part, part_result)


@contextmanager
def _refused(fault: str, path: AnyPath) -> Iterator[None]:
    """Turn an OSError in the block, or a bucket of the path that does not exist, into a ConfigError in one line."""
    try:
        # Object stores need no other folders.
        if isinstance(path, RemotePath) and path.root.startswith("s3://") and not path_of(path.root).is_dir():
            raise ConfigError(f"{fault}: bucket {path.root} does not exist")
        yield
    except OSError as error:
        raise ConfigError(f"{fault}: {error.strerror or error}") from error


def require_writable(path: AnyPath) -> None:
    """Raise ConfigError if a file cannot be written: no such folder, or the path is a folder, a device or a pipe."""
    fault = f"cannot write {path}"
    with _refused(fault, path):
        target = path if isinstance(path, RemotePath) else path.resolve()
        if isinstance(target, Path) and not target.parent.is_dir():
            raise ConfigError(f"{fault}: folder {path.parent} does not exist")
        if target.exists() and not target.is_file():
            raise ConfigError(f"{fault}: it is a folder or not a regular file")


def require_new(path: AnyPath) -> None:
    """Raise ConfigError if a new folder's path exists and is not an empty folder, or its bucket does not exist."""
    with _refused(f"output {path} cannot be created", path):
        if path.exists() and (not path.is_dir() or any(entry.name != _PROBE for entry in path.iterdir())):
            raise ConfigError(f"output {path} exists and is not an empty folder; choose another path or remove it")


def require_folder(path: AnyPath) -> None:
    """Raise ConfigError unless a path is a folder that can be written to, or one can be created there."""
    fault = f"output {path} cannot be created"
    with _refused(fault, path):
        if isinstance(path, RemotePath):
            if path.root.startswith(("http:", "https:")):
                raise ConfigError(f"{fault}: a web address cannot be written to; give s3://, gs://, abfs:// or hf://")
            if path.root.startswith("memory:"):
                raise ConfigError(f"{fault}: it would lie in the memory of one process, which others cannot read")
            probe = path / _PROBE
            probe.write_bytes(b"")
            with suppress(ConfigError, OSError):  # some buckets keep all that is written
                probe.unlink()
            return
        parent = next(folder for folder in (path, *path.parents) if folder.exists())
        if not parent.is_dir():
            raise ConfigError(f"{fault}: {parent} is not a folder")
        if not os.access(parent, os.W_OK | os.X_OK) or parent.is_relative_to("/proc"):
            raise ConfigError(f"{fault}: {parent} is not writable")


@contextmanager
def new_folder(path: AnyPath) -> Iterator[None]:
    """Create a folder and its parents for the block; if the block fails, remove those that are still empty.

    Raises ConfigError if the folder exists and is not empty, or cannot be created.
    """
    require_new(path)
    if isinstance(path, RemotePath):
        yield
        return
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folder(path)
    try:
        yield
    except BaseException:
        # Deepest first; a folder that is not empty stays, and so do its parents.
        below = sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True)
        with suppress(OSError):
            for folder in (*below, *made):
                folder.rmdir()
        raise


@contextmanager
def atomic_file(path: AnyPath) -> Iterator[Path]:
    """Yield a local path to write a file to; if the block succeeds, move that file to the given path.

    For a local path, the file is written in the same folder and renamed; a symbolic link then points at the new file.
    For a remote path, it is uploaded in one put. Raises ConfigError as require_writable does.
    """
    require_writable(path)
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory(prefix="cauc-") as folder:
            temporary = Path(folder, path.name)
            yield temporary
            import pyarrow as pa

            with pa.memory_map(str(temporary)) as written:
                path.write_bytes(written.read_buffer())
        return
    with _refused(f"cannot write {path}", path):
        target = path.resolve()
        # A name of its own: the target's name may already have the maximum length.
        temporary = target.with_name(f".cauc-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            yield temporary
            # Without this, a crash of the machine may leave the new name with no content, or with the old content.
            _sync(temporary, os.O_RDWR)
            temporary.replace(target)
            _sync_folder(target.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)


def _sync(path: Path, flags: int) -> None:
    """Flush a file's content, or a folder's names, to disk."""
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        _sync(folder, os.O_RDONLY)


def make_folder(path: AnyPath) -> None:
    """Create a folder and its parents where they do not exist. Raises ConfigError if that fails.

    An object store has no folders: the first file creates them.
    """
    if isinstance(path, RemotePath):
        return
    with _refused(f"output {path} cannot be created", path):
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in new:
            _sync_folder(folder.parent)


def write_text(path: AnyPath, text: str) -> None:
    """Write a text file atomically."""
    write_bytes(path, text.encode())


def write_bytes(path: AnyPath, content: bytes) -> None:
    """Write a file atomically."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)


def write_json(path: AnyPath, value: Any) -> None:
    """Write a JSON file atomically. Raises ValueError on NaN, which JSON does not have."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def read_json(path: AnyPath) -> Any:
    """Read a JSON file. Raises DataError if it is missing or not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a readable JSON file: {error}") from error


def read_model(path: AnyPath, kind: type[Model], file_format: str | None = None, *, strict: bool = False) -> Model:
    """Read a JSON file as a pydantic model.

    Args:
        path: The file.
        kind: The model.
        file_format: The expected value of its key "format", if it has one.
        strict: Do not convert values to other types.

    Raises:
        DataError: It is missing, not JSON, or does not fit the model.
        ConfigError: It has another format.
    """
    content = read_json(path)
    stored_format = content.get("format", file_format) if isinstance(content, dict) else file_format
    if file_format is not None and stored_format != file_format:
        remedy = "remove its folder or choose another -o"
        raise ConfigError(f"{path} has format {stored_format}, this version reads {file_format}; {remedy}")
    try:
        return kind.model_validate(content, strict=strict)
    except ValidationError as error:
        raise DataError(f"{path}: {explain(error)}") from error


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def read_yaml(path: AnyPath, kind: str) -> Any:
    """Read a YAML file, which messages call by its kind, such as "pool file".

    Raises:
        ConfigError: It is missing, not a file, or not YAML; in one line.
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
