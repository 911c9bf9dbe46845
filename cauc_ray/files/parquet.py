"""Parquet files: finding, opening, reading by rows, and writing atomically."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.errors import DataError, first_line
from cauc_ray.files.documents import atomic_file
from cauc_ray.files.paths import AnyPath, RemotePath, SomePath, files_below, readable

_STREAM_BYTES = 1 << 18


class UnreadableError(DataError):
    """A file cannot be read, or only up to some row."""


class UnopenedError(UnreadableError):
    """A file is missing or cannot be opened; it may be readable later."""


def write_parquet(path: AnyPath, table: pa.Table) -> None:
    """Write a Parquet file atomically."""
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary)


@dataclass(frozen=True, slots=True)
class SeenFile:
    """A Parquet file with the state in which it was read.   digest: of its footer."""

    path: AnyPath
    n_rows: int
    digest: str


def read_parquet(path: AnyPath, columns: Collection[str] | None = None) -> pa.Table:
    """Read one Parquet file, or those of the given columns that it has.

    Raises UnreadableError naming the file if it is missing, truncated or not Parquet.
    """
    return read_seen(path, columns)[0]


def read_seen(path: AnyPath, columns: Collection[str] | None = None) -> tuple[pa.Table, SeenFile]:
    """Read a file as read_parquet does, and return it with the file's state."""
    with open_parquet(path) as file:
        names = None if columns is None else [name for name in file.schema_arrow.names if name in columns]
        try:
            return file.read(names), SeenFile(path, file.metadata.num_rows, footer_digest(file))
        except (pa.ArrowException, OSError) as error:
            raise UnreadableError(f"{path} cannot be read: {first_line(error)}") from error


def open_parquet(path: AnyPath, *, streamed: bool = False) -> pq.ParquetFile:
    """Open a Parquet file to read some of its rows. Raises UnopenedError naming it; DataError for duplicate columns.

    streamed: read row groups, which may be larger than memory, in small pieces; else each row group at once.
    """
    try:
        if not path.is_file():
            raise UnopenedError(f"there is no file {path}")
        file = pq.ParquetFile(
            path.open_input() if isinstance(path, RemotePath) else path,
            buffer_size=_STREAM_BYTES if streamed else 0,
            pre_buffer=not streamed,
            page_checksum_verification=True,
        )
        names = file.schema_arrow.names
    except (pa.ArrowException, OSError, UnicodeDecodeError, DataError) as error:
        reason = f"{path} is not a readable Parquet file: {first_line(error)}"
        raise UnopenedError(str(error) if isinstance(error, DataError) else reason) from error
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        file.close()
        raise DataError(f"{path} has two columns named {twice!r}")
    return file


def footer_digest(file: pq.ParquetFile) -> str:
    """Return a digest of an open file's footer, which changes when the file is rewritten with other rows."""
    footer = pa.BufferOutputStream()
    file.metadata.write_metadata_file(footer)
    return hashlib.blake2b(footer.getvalue(), digest_size=16).hexdigest()


def read_rows(
    opened: pq.ParquetFile,
    file: AnyPath,
    rows: npt.NDArray[np.integer[Any]],
    columns: Sequence[str],
    size: int,
    most_bytes: int = 1 << 62,
) -> Iterator[pa.Table]:
    """Yield some rows of an open file. Only row groups with such rows are decoded, in small batches.

    rows: int64 (n,), the rows' numbers in the file, ascending.   size, most_bytes: limits of what is decoded at once.
    Column types are plain (see plain_schema). Raises UnreadableError naming the file and the row group.
    """
    start = 0
    schema = plain_schema(opened.schema_arrow)
    schema = pa.schema([schema.field(name) for name in columns])
    for group in range(opened.metadata.num_row_groups):
        about = opened.metadata.row_group(group)
        end = start + about.num_rows
        first, last = np.searchsorted(rows, [start, end])
        reason = "it ends too early"
        at_once = max(1, min(size, most_bytes * about.num_rows // max(1, about.total_byte_size)))
        try:
            batches = opened.iter_batches(at_once, [group], columns, use_threads=False) if first < last else ()
            for batch in batches:
                batch.validate(full=True)  # damaged files may decode to invalid values
                upto = np.searchsorted(rows, start + len(batch))
                if first < upto:
                    # Parquet also returns a column "a.b" for "a". Arrow cannot take rows of view types.
                    table = cast_table(pa.Table.from_batches([batch]).select(columns), schema)
                    yield table if upto - first == len(table) else table.take(rows[first:upto] - start)
                first, start = upto, start + len(batch)
                if first == last:
                    break
        except (pa.ArrowException, OSError) as error:
            reason = first_line(error)
        if first < last:
            raise UnreadableError(f"{file} cannot be read in row group {group}: {reason}")
        start = end


def cast_table(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return a table cast to a schema; Arrow's cast imports pandas, so it is skipped where nothing changes."""
    return table if table.schema.equals(schema) else table.cast(schema)


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """Return a schema without dictionary and view types, which differ between files of one dataset."""
    return pa.schema([pa.field(field.name, _plain(field.type)) for field in schema])


def _plain(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_list(kind):  # drops the name of its items
        return pa.list_(_plain(kind.value_type))
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(kind, kind)


def count_rows(path: AnyPath) -> int:
    """Return a Parquet file's number of rows, 0 if it does not exist. Raises DataError as read_parquet does."""
    if not path.exists():
        return 0
    with open_parquet(path) as file:
        n: int = file.metadata.num_rows
        return n


def parquet_files(path: SomePath) -> list[SomePath]:
    """Return a Parquet file, or all visible ones in a folder and its subfolders, sorted. Raises DataError if none."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"there is no file {path}")
    files = parquet_below(path)
    if not files:
        raise DataError(f"there are no .parquet files in {path}")
    return files


def parquet_below(folder: SomePath) -> list[SomePath]:
    """Return the visible Parquet files in a folder and its subfolders, sorted; possibly none."""
    with readable(folder):
        return list(filter(is_parquet, files_below(folder)))


def is_parquet(file: AnyPath) -> bool:
    """Return whether a file's name is that of a Parquet file."""
    return file.name.endswith(".parquet")
