"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.errors import ConfigError, DataError

_STREAM_BYTES = 1 << 18


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a path beside the given one to write to; rename it into place if the block succeeds.

    A symbolic link keeps pointing at what is then the new file. Raises ConfigError where no file can be written:
    there is no folder, or what stands there is a folder, a device or a pipe.
    """
    try:
        target = path.resolve()
        if not target.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
        if target.exists() and not target.is_file():
            raise ConfigError(f"cannot write {path}: it is a folder or no regular file")
        # A name of its own: the target's may be as long as names can be.
        beside = target.with_name(f".cauc-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            yield beside
            beside.replace(target)
        finally:
            with suppress(OSError):
                beside.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def make_folder(path: Path) -> None:
    """Make a folder and the ones above it, unless they are there. Raises ConfigError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"output {path} cannot be made: {error.strerror}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with written_beside(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically, for people too. Raises ValueError on NaN, which JSON does not have."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False) + "\n")


def write_parquet(path: Path, table: pa.Table) -> None:
    """Write a Parquet file atomically."""
    with written_beside(path) as beside:
        pq.write_table(table, beside)


def read_json(path: Path) -> Any:
    """Read a JSON file. Raises DataError when it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{path} is not a readable JSON file: {error}") from error


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def read_parquet(path: Path) -> pa.Table:
    """Read one Parquet file. Raises DataError naming it when it is missing, truncated or of another format."""
    with open_parquet(path) as file:
        try:
            return file.read()
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read: {first_line(error)}") from error


def open_parquet(path: Path, *, streamed: bool = False) -> pq.ParquetFile:
    """Open a Parquet file to read parts of it. Raises DataError as read_parquet does.

    streamed: take row groups from the disk a little at a time, which may be larger than memory; else each at once.
    """
    try:
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        buffer_size = _STREAM_BYTES if streamed else 0
        file = pq.ParquetFile(path, buffer_size=buffer_size, pre_buffer=not streamed, page_checksum_verification=True)
        names = file.schema_arrow.names
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            file.close()
            raise DataError(f"{path} has two columns named {twice!r}")
        return file
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {first_line(error)}") from error


def count_rows(path: Path) -> int:
    """Return the rows of a Parquet file, 0 where there is none. Raises DataError as read_parquet does."""
    if not path.exists():
        return 0
    with open_parquet(path) as file:
        n: int = file.metadata.num_rows
        return n


def parquet_files(path: Path) -> list[Path]:
    """Return a Parquet file, or all those of a folder and below it, by name. Raises DataError if none."""
    if path.is_file():
        return [path]
    files = sorted(_visible_parquet(path))
    if not files:
        raise DataError(f"there are no .parquet files in {path}" if path.is_dir() else f"there is no file {path}")
    return files


def has_parquet_files(folder: Path) -> bool:
    """Say whether there are Parquet files in a folder or below it."""
    return any(True for _ in _visible_parquet(folder))


def _visible_parquet(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*.parquet"):
        # Hidden files and folders are other programs': half-written parts, a notebook's checkpoints.
        if file.is_file() and not any(part.startswith(".") for part in file.relative_to(folder).parts):
            yield file


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, its type's name where it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]
