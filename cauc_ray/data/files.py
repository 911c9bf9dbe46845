"""Files that appear whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.errors import ConfigError, DataError


@contextmanager
def written_beside(path: Path) -> Iterator[Path]:
    """Yield a path beside the given one to write to; rename it into place if the block succeeds."""
    if not path.parent.is_dir():
        raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ConfigError(f"cannot write {path}: it is a folder")
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield beside
        beside.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)


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
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path} is not a readable JSON file: {error}") from error


def read_parquet(path: Path, columns: list[str] | None = None) -> pa.Table:
    """Read one Parquet file. Raises DataError naming it when it is missing, truncated or of another format."""
    with open_parquet(path) as file:
        missing = [c for c in columns or [] if c not in file.schema_arrow.names]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r}; it has {', '.join(file.schema_arrow.names)}")
        try:
            return file.read(columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} cannot be read: {_first_line(error)}") from error


def open_parquet(path: Path) -> pq.ParquetFile:
    """Open a Parquet file to read parts of it. Raises DataError as read_parquet does."""
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable Parquet file: {_first_line(error)}") from error


def parquet_files(path: Path) -> list[Path]:
    """Return a Parquet file, or all those of a folder and below it, by name. Raises DataError if none."""
    if path.is_file():
        return [path]
    files = sorted(f for f in path.rglob("*.parquet") if not f.name.startswith("."))
    if not files:
        raise DataError(f"there are no .parquet files in {path}" if path.is_dir() else f"there is no file {path}")
    return files


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
