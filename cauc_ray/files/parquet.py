"""Parquet files: finding, reading whole or by rows, and writing atomically."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.errors import DataError, first_line
from cauc_ray.files.documents import atomic_file
from cauc_ray.files.paths import AnyPath, RemotePath, SomePath, list_files, readable, side_by_side

# Bytes of neighbouring row groups that are fetched together; one row group may have more.
FETCH_BYTES = 32 << 20
# The most bytes that are decoded at once, uncompressed, and that are streamed at once of each column.
BATCH_BYTES = 4 << 20
# The end of a file that is read at first: most footers fit.
_TAIL_BYTES = 1 << 16

RowNumbers = npt.NDArray[np.integer[Any]]


class UnreadableError(DataError):
    """A file cannot be read, or only up to some row."""


class UnopenedError(UnreadableError):
    """A file is missing or cannot be opened; it may be readable later."""


def changed_file(path: AnyPath) -> DataError:
    """Return the error for a file that is not the one that was opened first."""
    return DataError(
        f"{path} has changed since it was first opened; restore it and continue with --resume, or start a new run"
    )


def write_parquet(path: AnyPath, table: pa.Table) -> None:
    """Write a Parquet file atomically."""
    with atomic_file(path) as temporary:
        pq.write_table(table, temporary)


@dataclass(frozen=True, eq=False)
class ParquetFooter:
    """A Parquet file as it was when its footer was read; picklable, so that no reader asks for the footer again.

    Attributes:
        path: The file.
        size: Its size in bytes.
        n_bytes: The size of its footer.
        digest: A digest of the footer, which changes when the file is rewritten with other rows.
        version: What a store calls this version of the file, "" where it does not.
        stored: The footer's metadata, None to read them again when they are needed.
        content: All of the file, where that was read at once.
    """

    path: AnyPath
    size: int
    n_bytes: int
    digest: str
    version: str
    stored: pq.FileMetaData | None
    content: pa.Buffer | None = None

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The file's metadata. Raises DataError if they are read again and the file has changed."""
        if self.stored is not None:
            return self.stored
        footer = read_footer(self.path)
        if footer.digest != self.digest:
            raise changed_file(self.path)
        return footer.stored

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns, with plain types (see plain_schema)."""
        return plain_schema(self.metadata.schema.to_arrow_schema())

    @cached_property
    def n_rows(self) -> int:
        """The number of rows."""
        n: int = self.metadata.num_rows
        return n

    @cached_property
    def groups(self) -> list[pq.RowGroupMetaData]:
        """The metadata of each row group."""
        return [self.metadata.row_group(number) for number in range(self.metadata.num_row_groups)]

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def read_footer(path: AnyPath, *, whole: bool = False) -> ParquetFooter:
    """Read a Parquet file's footer.

    Args:
        path: The file.
        whole: Read and retain all of the file.

    Raises:
        UnopenedError: The file is missing, truncated or not Parquet.
        DataError: Two of its columns have one name.
    """
    try:
        with open_file(path) as source:
            size, version = source.size(), _version(source)
            n_tail = size if whole else min(size, _TAIL_BYTES)
            tail: bytes = source.read_at(n_tail, size - n_tail)
            n_bytes = int.from_bytes(tail[-8:-4], "little") + 8 if tail.endswith(b"PAR1") else len(tail)
            if len(tail) < n_bytes <= size:
                tail = source.read_at(n_bytes, size - n_bytes)
        metadata = pq.read_metadata(pa.BufferReader(tail[-n_bytes:]))
        content = pa.py_buffer(tail) if whole else None
        footer = ParquetFooter(path, size, n_bytes, _digest(tail[-n_bytes:]), version, metadata, content)
        names = footer.schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UnopenedError(f"{path} is not a readable Parquet file: {first_line(error)}") from error
    require_distinct(path, names)
    return footer


def require_distinct(path: AnyPath, names: Sequence[str]) -> None:
    """Raise DataError if two columns of a file have one name."""
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise DataError(f"{path} has two columns named {duplicate!r}")


def open_file(path: AnyPath) -> Any:
    """Open a file for reading at any position. Raises UnopenedError if that fails."""
    try:
        if isinstance(path, RemotePath):
            return path.open_input()
        if path.is_file():  # opening a pipe would block
            return pa.OSFile(str(path))
    except FileNotFoundError:
        pass
    except (OSError, DataError) as error:
        raise UnopenedError(f"{path} cannot be read: {error}" if isinstance(error, OSError) else str(error)) from error
    raise UnopenedError(f"{path} does not exist")


def _digest(footer: bytes) -> str:
    return hashlib.blake2b(footer, digest_size=16).hexdigest()


def _version(source: Any) -> str:
    """Return what a store calls the version of an open file, which it has reported when the file was opened."""
    try:
        facts = source.metadata() or {}
    except (NotImplementedError, AttributeError, OSError):
        return ""
    tag: bytes = facts.get("ETag") or facts.get(b"ETag", b"")  # the keys' type depends on the version of Arrow
    return tag.decode()


def read_parquet(path: AnyPath, columns: Collection[str] | None = None) -> pa.Table:
    """Read one Parquet file, or those of the given columns that it has.

    Raises:
        UnreadableError: The file is missing, truncated or not Parquet.
    """
    return read_stored(path, columns)[0]


def read_stored(path: AnyPath, columns: Collection[str] | None = None) -> tuple[pa.Table, ParquetFooter]:
    """Read a file as read_parquet does, and return it with the file's footer."""
    footer = read_footer(path)
    names = None if columns is None else [name for name in footer.schema.names if name in columns]
    try:
        with open_file(path) as source:
            return pq.ParquetFile(source, metadata=footer.metadata, pre_buffer=True).read(names), footer
    except (pa.ArrowException, OSError) as error:
        raise UnreadableError(f"{path} cannot be read: {first_line(error)}") from error


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Neighbours among the requested rows, which could be read or could not.

    Attributes:
        n: The number of rows.
        table: The rows, None where they cannot be read.
        error: Why they cannot be read.
    """

    n: int
    table: pa.Table | None = None
    error: UnreadableError | None = None


def read_row_spans(
    requests: Sequence[tuple[ParquetFooter, RowNumbers]], columns: Sequence[str], batch_rows: int
) -> Iterator[RowSpan]:
    """Read some rows of some files. Only row groups with such rows are fetched, neighbouring ones together.

    Args:
        requests: Files with the numbers of the rows, int64 (n,), ascending.
        columns: Their names.
        batch_rows: The most rows that are decoded at once.

    Yields:
        The rows in order, with plain types (see plain_schema); rows that cannot be read are spans with an error.

    Raises:
        DataError: A file has changed since its footer was read.
    """
    remote = any(isinstance(footer.path, RemotePath) for footer, _ in requests)

    def n_bytes(request: tuple[ParquetFooter, RowNumbers]) -> int:
        footer, rows = request
        return footer.size * len(rows) // max(1, footer.n_rows)

    def read(request: tuple[ParquetFooter, RowNumbers]) -> Iterable[RowSpan]:
        spans = _file_spans(*request, columns, batch_rows)
        return list(spans) if remote and n_bytes(request) <= FETCH_BYTES else spans

    for spans in side_by_side(read, requests, remote=remote, n_bytes=n_bytes):
        yield from spans


def _file_spans(footer: ParquetFooter, rows: RowNumbers, columns: Sequence[str], batch_rows: int) -> Iterator[RowSpan]:
    """Yield some rows of a file. Arguments and errors are those of read_row_spans."""
    n_rows = np.array([group.num_rows for group in footer.groups])
    ends = np.cumsum(n_rows)
    numbers = np.searchsorted(ends, rows, side="right")
    groups = np.unique(numbers)
    sizes = np.array([footer.groups[group].total_byte_size for group in groups])
    try:
        source = _reopened(footer)
    except UnopenedError as error:
        yield RowSpan(len(rows), error=error)
        return
    with source:
        opened = pq.ParquetFile(
            source,
            metadata=footer.metadata,
            buffer_size=BATCH_BYTES,
            # Neighbours are then fetched at once; row groups that memory may not hold are streamed.
            pre_buffer=isinstance(footer.path, RemotePath) and sizes.max(initial=0) <= 4 * FETCH_BYTES,
            page_checksum_verification=True,
        )
        for fetch in np.split(groups, np.flatnonzero(np.diff(np.cumsum(sizes) // FETCH_BYTES)) + 1):
            first, last = np.searchsorted(numbers, [fetch[0], fetch[-1] + 1])
            # The rows' places among those of the row groups that are fetched.
            shifts = np.cumsum(n_rows[fetch]) - ends[fetch]
            places = rows[first:last] + shifts[np.searchsorted(fetch, numbers[first:last])]
            yield from _group_spans(opened, footer, fetch.tolist(), places, columns, batch_rows)


def _reopened(footer: ParquetFooter) -> Any:
    """Open a file whose footer was read before.

    Raises:
        DataError: The file has changed.
        UnopenedError: It cannot be opened.
    """
    if footer.content is not None:
        return pa.BufferReader(footer.content)
    try:
        source = open_file(footer.path)
        same = source.size() == footer.size and _version(source) == footer.version
        if same and not footer.version:
            same = _digest(source.read_at(footer.n_bytes, footer.size - footer.n_bytes)) == footer.digest
    except (pa.ArrowException, OSError) as error:
        raise UnopenedError(f"{footer.path} cannot be read: {first_line(error)}") from error
    if not same:
        source.close()
        read_footer(footer.path)  # what is in its place may be no Parquet file, such as half a copy of it
        raise changed_file(footer.path)
    return source


def _group_spans(
    opened: pq.ParquetFile,
    footer: ParquetFooter,
    groups: Sequence[int],
    places: RowNumbers,
    columns: Sequence[str],
    batch_rows: int,
) -> Iterator[RowSpan]:
    """Yield rows by their places among those of some row groups; where that fails, of each group by itself."""
    schema = pa.schema([footer.schema.field(name) for name in columns])
    n_rows = np.array([footer.groups[group].num_rows for group in groups])
    n_bytes = sum(footer.groups[group].total_byte_size for group in groups)
    n = max(1, min(batch_rows, BATCH_BYTES * int(n_rows.sum()) // max(1, n_bytes)))
    start, reason, kind = 0, "it ends too early", UnreadableError
    try:
        for batch in opened.iter_batches(n, groups, columns, use_threads=False):
            batch.validate(full=True)  # damaged files may decode to invalid values
            # Parquet also returns a column "a.b" for "a". Arrow cannot take rows of view types.
            table = cast_table(pa.Table.from_batches([batch]).select(columns), schema)
            picked = picked_rows(table, places - start)
            if len(picked):
                yield RowSpan(len(picked), picked)
            start, places = start + len(batch), places[len(picked) :]
            if not len(places):
                return
    except (pa.ArrowException, OSError) as error:
        reason = first_line(error)
        if isinstance(error, OSError) and isinstance(footer.path, RemotePath):  # the store may answer again
            kind = UnopenedError
    if len(groups) == 1:
        damage = f"{footer.path} cannot be read in row group {groups[0]}: {reason}"
        yield RowSpan(len(places), error=kind(damage))
        return
    for group, end, n_group in zip(groups, np.cumsum(n_rows), n_rows, strict=True):
        inside = places[(places >= end - n_group) & (places < end)] - (end - n_group)
        if len(inside):
            yield from _group_spans(opened, footer, [group], inside, columns, batch_rows)


def picked_rows(table: pa.Table, rows: RowNumbers) -> pa.Table:
    """Return those of some ascending row numbers that a table has."""
    n = int(np.searchsorted(rows, len(table)))
    return table if n == len(table) else table.take(rows[:n])


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
    return read_footer(path).n_rows if path.exists() else 0


def parquet_files(path: SomePath) -> list[SomePath]:
    """Return a Parquet file, or all visible ones in a folder and its subfolders, sorted. Raises DataError if none."""
    files = parquet_below(path)
    if not files:
        raise DataError(f"there are no .parquet files in {path}" if path.is_dir() else f"{path} does not exist")
    return files


def parquet_below(path: SomePath) -> list[SomePath]:
    """Return the files that parquet_files returns; none where nothing is there."""
    with readable(path):
        entries = list_files(path)
    return [entry.path for entry in entries if entry.path == path or entry.path.name.endswith(".parquet")]
