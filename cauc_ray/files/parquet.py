"""Parquet files: finding, reading whole or by rows, and writing atomically."""

from __future__ import annotations

import hashlib
import mmap
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.errors import DataError, first_line
from cauc_ray.files.documents import atomic_file
from cauc_ray.files.paths import AnyPath, FileEntry, RemotePath, SomePath, list_files, readable

# Bytes of neighbouring row groups that are fetched together, and the size above which a row group is streamed.
FETCH_BYTES = 32 << 20
# A gap up to this size between two columns is fetched, too: another request takes as long as a megabyte.
GAP_BYTES = 1 << 20
# Remote reads at a time, and the bytes that they may be ahead of decoding.
THREADS = 32
AHEAD_BYTES = 64 << 20
_STREAM_BYTES = 1 << 20
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


@dataclass(frozen=True)
class ParquetFooter:
    """A Parquet file as it was when its footer was read; picklable, so that no reader asks for the footer again.

    Attributes:
        path: The file.
        size: Its size in bytes.
        footer: Its last bytes, from the start of the metadata; empty to read them again when they are needed.
        digest: A digest of the footer, which changes when the file is rewritten with other rows.
        content: All of the file, where that was read at once.
        version: What a store calls this version of the file, "" where it does not.
    """

    path: AnyPath
    size: int
    footer: bytes
    digest: str
    content: pa.Buffer | None = None
    version: str = ""

    @cached_property
    def metadata(self) -> pq.FileMetaData:
        """The file's metadata. Raises DataError if it is read again and the file has changed."""
        footer = self.footer
        if not footer:
            stored = read_footer(self.path)
            if stored.digest != self.digest:
                raise changed_file(self.path)
            footer = stored.footer
        return pq.read_metadata(pa.BufferReader(footer))

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        n: int = self.metadata.num_rows
        return n

    @cached_property
    def schema(self) -> pa.Schema:
        """The columns, with plain types (see plain_schema)."""
        return plain_schema(self.metadata.schema.to_arrow_schema())

    @cached_property
    def group_rows(self) -> list[int]:
        """The rows of each row group."""
        return [self.metadata.row_group(number).num_rows for number in range(self.metadata.num_row_groups)]

    @cached_property
    def n_bytes(self) -> int:
        """The size of all rows, uncompressed."""
        return sum(self.metadata.row_group(n).total_byte_size for n in range(self.metadata.num_row_groups))

    def without_footer(self) -> ParquetFooter:
        """Return the same file without the footer, which readers then read again."""
        return ParquetFooter(self.path, self.size, b"", self.digest)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("path", "size", "footer", "digest", "content", "version")}

    def leaves(self, columns: Collection[str]) -> list[int]:
        """Return the numbers of the stored columns that some columns consist of."""
        names = [self.metadata.schema.column(number).path for number in range(self.metadata.num_columns)]
        parts = [name.split(".") for name in names]
        return [
            number
            for number, (name, path) in enumerate(zip(names, parts, strict=True))
            if name in columns or path[0] in columns
        ]


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
        with _opened(path) as source:
            size = source.size()
            n_tail = size if whole else min(size, _TAIL_BYTES)
            tail: bytes = source.read_at(n_tail, size - n_tail)
            length = int.from_bytes(tail[-8:-4], "little") + 8 if tail.endswith(b"PAR1") else 0
            if len(tail) < length <= size:
                tail = source.read_at(length, size - length)
            version = _version(source)
        footer = tail[-length:] if length else tail
        digest = hashlib.blake2b(footer, digest_size=16).hexdigest()
        stored = ParquetFooter(path, size, footer, digest, pa.py_buffer(tail) if whole else None, version)
        names = stored.schema.names
    except (pa.ArrowException, OSError, UnicodeDecodeError, DataError) as error:
        if isinstance(error, FileNotFoundError):
            raise UnopenedError(f"there is no file {path}") from error
        reason = f"{path} is not a readable Parquet file: {first_line(error)}"
        raise UnopenedError(str(error) if isinstance(error, DataError) else reason) from error
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise DataError(f"{path} has two columns named {duplicate!r}")
    return stored


@contextmanager
def _opened(path: AnyPath) -> Iterator[Any]:
    """Open a file for reading at any position; what the filesystem raises is named by the path."""
    if isinstance(path, Path) and not path.is_file():  # opening a pipe would block
        raise FileNotFoundError(path)
    with path.open_input() if isinstance(path, RemotePath) else pa.OSFile(str(path)) as source:
        yield source


def _version(source: Any) -> str:
    """Return what a store calls the version of an open file, which it has reported when the file was opened."""
    try:
        tag: bytes = (source.metadata() or {}).get(b"ETag", b"")
    except (NotImplementedError, AttributeError, OSError):
        return ""
    return tag.decode()


def read_parquet(path: AnyPath, columns: Collection[str] | None = None) -> pa.Table:
    """Read one Parquet file, or those of the given columns that it has.

    Raises:
        UnreadableError: The file is missing, truncated or not Parquet.
    """
    return read_stored(path, columns)[0]


def read_stored(path: AnyPath, columns: Collection[str] | None = None) -> tuple[pa.Table, ParquetFooter]:
    """Read a file as read_parquet does, and return it with the file's footer."""
    stored = read_footer(path)
    names = None if columns is None else [name for name in stored.schema.names if name in columns]
    try:
        with _opened(path) as source:
            return pq.ParquetFile(source, metadata=stored.metadata, pre_buffer=True).read(names), stored
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


@dataclass(slots=True)
class _Fetch:
    """Row groups of a file that are read together.

    Attributes:
        stored: The file.
        groups: Numbers of row groups, each with the number of its first row and the requested rows in it.
        spans: The bytes that hold the requested columns.
        n_bytes: The bytes of the spans.
        content: The file's content where it was fetched, None where it is streamed.
    """

    stored: ParquetFooter
    groups: list[tuple[int, int, RowNumbers]]
    spans: list[tuple[int, int]]
    n_bytes: int = 0
    content: Any = None

    def load(self) -> _Fetch:
        """Fetch the bytes. Raises as read_footer does, and DataError if the file has changed."""
        stored, length = self.stored, len(self.stored.footer)
        if stored.content is not None:
            self.content = stored.content
            return self
        streamed = self.n_bytes > 2 * FETCH_BYTES
        spans = [] if streamed else self.spans
        if not stored.version:
            spans = _merged([*spans, (stored.size - length, stored.size)])
        content = mmap.mmap(-1, stored.size)  # only what is written takes memory
        try:
            with _opened(stored.path) as source:
                if source.size() != stored.size or _version(source) != stored.version:
                    raise changed_file(stored.path)
                for start, end in spans:
                    part = source.read_at(end - start, start)
                    if len(part) < end - start:
                        raise changed_file(stored.path)
                    content[start:end] = part
        except FileNotFoundError as error:
            raise UnopenedError(f"there is no file {stored.path}") from error
        except (pa.ArrowException, OSError) as error:
            raise UnopenedError(f"{stored.path} cannot be read: {first_line(error)}") from error
        if length and not stored.version and content[stored.size - length :] != stored.footer:
            raise changed_file(stored.path)
        self.content = None if streamed else content
        return self

    def decode(self, columns: Sequence[str], batch_rows: int, batch_bytes: int) -> Iterator[RowSpan]:
        """Yield the requested rows; those of a row group that are not reached are unreadable."""
        stored, schema = self.stored, self.stored.schema
        schema = pa.schema([schema.field(name) for name in columns])
        with self._source() as source:
            opened = pq.ParquetFile(
                source,
                metadata=stored.metadata,
                buffer_size=0 if self.content is not None else _STREAM_BYTES,
                pre_buffer=False,
                page_checksum_verification=True,
            )
            for number, first_row, rows in self.groups:
                about = stored.metadata.row_group(number)
                n = max(1, min(batch_rows, batch_bytes * about.num_rows // max(1, about.total_byte_size)))
                done, start, reason = 0, first_row, "it ends too early"
                try:
                    for batch in opened.iter_batches(n, [number], columns, use_threads=False):
                        batch.validate(full=True)  # damaged files may decode to invalid values
                        upto = int(np.searchsorted(rows, start + len(batch)))
                        if done < upto:
                            # Parquet also returns a column "a.b" for "a". Arrow cannot take rows of view types.
                            table = cast_table(pa.Table.from_batches([batch]).select(columns), schema)
                            whole = upto - done == len(table)
                            yield RowSpan(upto - done, table if whole else table.take(rows[done:upto] - start))
                        done, start = upto, start + len(batch)
                        if done == len(rows):
                            break
                except (pa.ArrowException, OSError) as error:
                    reason = first_line(error)
                if done < len(rows):
                    damage = UnreadableError(f"{stored.path} cannot be read in row group {number}: {reason}")
                    yield RowSpan(len(rows) - done, error=damage)

    @contextmanager
    def _source(self) -> Iterator[Any]:
        if self.content is not None:
            yield pa.BufferReader(pa.py_buffer(self.content))
            return
        with _opened(self.stored.path) as source:
            yield source


def read_row_spans(
    requests: Sequence[tuple[ParquetFooter, RowNumbers]],
    columns: Sequence[str],
    batch_rows: int,
    batch_bytes: int = 1 << 62,
) -> Iterator[RowSpan]:
    """Read some rows of some files. Only row groups with such rows are fetched, neighbouring ones together.

    Args:
        requests: Files with the numbers of the rows, int64 (n,), ascending.
        columns: Their names.
        batch_rows: The most rows that are decoded at once.
        batch_bytes: The most bytes that are decoded at once.

    Yields:
        The rows in order, with plain types (see plain_schema); rows that cannot be read are spans with an error.

    Raises:
        DataError: A file has changed since its footer was read.
    """
    fetches = deque(fetch for stored, rows in requests for fetch in _fetches(stored, rows, columns))
    remote = any(isinstance(fetch.stored.path, RemotePath) for fetch in fetches)
    with ThreadPoolExecutor(min(THREADS, len(fetches)) if remote else 1) as pool:
        ahead: deque[tuple[_Fetch, Future[_Fetch] | None]] = deque()
        while fetches or ahead:
            while remote and fetches and sum(f.n_bytes for f, _ in ahead) < AHEAD_BYTES and len(ahead) < 2 * THREADS:
                fetch = fetches.popleft()
                ahead.append((fetch, pool.submit(fetch.load)))
            fetch, loading = ahead.popleft() if ahead else (fetches.popleft(), None)
            try:
                loaded = fetch.load() if loading is None else loading.result()
            except UnreadableError as error:
                yield RowSpan(sum(len(rows) for _, _, rows in fetch.groups), error=error)
            else:
                yield from loaded.decode(columns, batch_rows, batch_bytes)


def _fetches(stored: ParquetFooter, rows: RowNumbers, columns: Collection[str]) -> Iterator[_Fetch]:
    """Yield the row groups that hold some rows, by what is fetched together."""
    metadata, leaves = stored.metadata, stored.leaves(columns)
    fetch, start = _Fetch(stored, [], []), 0
    for number, n_rows in enumerate(stored.group_rows):
        first, last = np.searchsorted(rows, [start, start + n_rows])
        if first < last:
            group = metadata.row_group(number)
            spans = sorted(_span(group.column(leaf)) for leaf in leaves)
            n_bytes = sum(end - begin for begin, end in spans)
            if fetch.groups and fetch.n_bytes + n_bytes > FETCH_BYTES:
                yield fetch
                fetch = _Fetch(stored, [], [])
            fetch.groups.append((number, start, rows[first:last]))
            fetch.n_bytes += n_bytes
            fetch.spans = _merged([*fetch.spans, *spans])
            if n_bytes > FETCH_BYTES:
                yield fetch
                fetch = _Fetch(stored, [], [])
        start += n_rows
    if fetch.groups:
        yield fetch


def _span(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    dictionary = column.dictionary_page_offset
    start: int = column.data_page_offset if not dictionary else min(dictionary, column.data_page_offset)
    return start, start + column.total_compressed_size


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return spans of bytes, those with small gaps between them as one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= GAP_BYTES:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def open_parquet(path: AnyPath) -> pq.ParquetFile:
    """Open a Parquet file. Raises as read_footer does."""
    stored = read_footer(path)
    source = path.open_input() if isinstance(path, RemotePath) else path
    return pq.ParquetFile(source, metadata=stored.metadata)


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
    entries = _listed(path)
    if not entries and not path.is_dir():
        raise DataError(f"there is no file {path}")
    if len(entries) == 1 and entries[0].path == path:
        return [path]
    files: list[SomePath] = [entry.path for entry in entries if is_parquet(entry.path)]
    if not files:
        raise DataError(f"there are no .parquet files in {path}")
    return files


def parquet_below(folder: SomePath) -> list[SomePath]:
    """Return the visible Parquet files in a folder and its subfolders, sorted; possibly none."""
    return [entry.path for entry in _listed(folder) if is_parquet(entry.path)]


def _listed(folder: AnyPath) -> list[FileEntry]:
    with readable(folder):
        return list_files(folder)


def is_parquet(file: AnyPath) -> bool:
    """Return whether a file's name is that of a Parquet file."""
    return file.name.endswith(".parquet")
