"""Random access to numbered rows: tables in Parquet, JSONL and CSV, images, and splits of the hub.

Rows are picklable, so that any process can read them. All have the names of their columns, n_rows, a source for
messages, name_of a row, and streamed: whether rows can only be read from the first one on. `tables` yields columns of
the given rows, in ascending order, in tables of `size` rows, the last of which may be shorter; types are plain: no
dictionaries, no views. `identity` is JSON values that change with the content: names, sizes, numbers of rows.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.text_files import is_csv, text_tables
from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import cast_table, footer_digest, open_parquet, plain_schema, read_rows
from cauc_ray.files.paths import AnyPath, RemotePath
from cauc_ray.numbers.types import Ints

# Of remote files.
_OPENED_AT_ONCE = 16
TABLES = {".parquet": "Parquet", ".csv": "CSV", ".jsonl": "JSONL", ".ndjson": "JSONL", ".json": "JSONL"}
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


@dataclass(frozen=True, slots=True)
class _About:
    """The state of a table's file when it was first opened.

    group_rows: rows of each piece that can be read independently.   n_bytes: of all rows, uncompressed.
    digest: changes if the file is rewritten.
    """

    schema: pa.Schema
    group_rows: Sequence[int]
    n_bytes: int
    digest: str


class TableRows(ABC):
    """The files of one table, which have the same columns.

    ends: int64 (G,), the number of rows up to the end of each piece that can be read independently.   n_bytes: of all
    rows, uncompressed.
    """

    streamed = False

    def __init__(self, files: Sequence[AnyPath], ids: str | None = None) -> None:
        """Open the files and check their columns.   ids: the column of ids, if it exists; None keeps CSV cells as text.

        Raises DataError if a file is unreadable, or has other columns than the first file or incompatible types.
        """
        lengths: list[int] = []
        ends: list[int] = []
        self.n_bytes = 0
        self._schemas: dict[pa.Schema, AnyPath] = {}
        self._digests: list[str] = []
        with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
            # Opening a remote file is mostly waiting; local files would take twice as long in threads.
            each = pool.map if isinstance(files[0], RemotePath) else map
            for file, about in zip(files, each(partial(self._look, ids=ids), files), strict=True):
                names = about.schema.names
                first = next(iter(self._schemas), about.schema).names
                if ids in names and pa.types.is_nested(about.schema.field(ids).type):
                    raise DataError(f"{file}: column {ids!r} ({about.schema.field(ids).type}) cannot hold ids")
                if sorted(names) != sorted(first):
                    raise DataError(f"{file} has the columns {', '.join(names)}, but {files[0]} has {', '.join(first)}")
                self._schemas.setdefault(about.schema, file)
                self._digests.append(about.digest)
                lengths.append(sum(about.group_rows))
                ends += about.group_rows
                self.n_bytes += about.n_bytes
        self.files = list(files)
        self.source = str(files[0] if len(files) == 1 else files[0].parent)
        self.starts = np.cumsum([0, *lengths], dtype=np.int64)
        self.n_rows = int(self.starts[-1])
        self.columns: Sequence[str] = next(iter(self._schemas)).names
        self.ends = np.cumsum(ends, dtype=np.int64)

    @property
    def identity(self) -> list[Any]:
        """Return the files' names, sizes and numbers of rows."""
        sizes = [_size(file) for file in self.files]
        names = [file.name for file in self.files]
        return [list(each) for each in zip(names, sizes, np.diff(self.starts).tolist(), strict=True)]

    def locate(self, row: int) -> tuple[int, int]:
        """Return the index of a row's file, and the row's number there."""
        file = int(np.searchsorted(self.starts, row, side="right")) - 1
        return file, row - int(self.starts[file])

    def name_of(self, row: int) -> str:
        """Return a name for a row: its file and its number there."""
        file, own = self.locate(row)
        return f"{self.files[file]}, row {own}"

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """Return columns with types that fit all files. Raises DataError if there are none."""
        fitting = pa.schema([])
        for schema, file in self._schemas.items():
            own = pa.schema([schema.field(name) for name in columns])
            try:
                fitting = pa.unify_schemas([fitting, own], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(f"{file} does not fit the files before it: {first_line(error)}") from error
        return fitting

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the wanted rows in small pieces, each from the nearest preceding position that can be read directly.

        Raises UnreadableError if a file cannot be opened or decoded, DataError if it was rewritten since it was opened.
        """
        held: list[pa.Table] = []
        n = 0
        for piece in self._pieces(self.schema(columns), rows, size):
            held.append(piece)
            n += len(piece)
            while n >= size:
                joined = pa.concat_tables(held)
                yield joined.slice(0, size)
                held, n = [joined.slice(size)], n - size
        if n:
            yield pa.concat_tables(held)

    def _pieces(self, schema: pa.Schema, rows: Ints, size: int) -> Iterator[pa.Table]:
        for number in np.unique(np.searchsorted(self.starts, rows, side="right") - 1):
            file, start, end = self.files[number], self.starts[number], self.starts[number + 1]
            first, last = np.searchsorted(rows, [start, end])
            for table in self._read(file, self._digests[number], rows[first:last] - start, schema, size):
                try:
                    fitted = cast_table(table, schema)
                except pa.ArrowException as error:
                    raise DataError(f"{file} does not fit the other files: {first_line(error)}") from error
                yield fitted

    @staticmethod
    @abstractmethod
    def _look(file: AnyPath, ids: str | None) -> _About:
        """Return a file's state. Raises DataError if it is unreadable, or some row's id is known to be null."""

    @staticmethod
    @abstractmethod
    def _read(file: AnyPath, digest: str, rows: Ints, schema: pa.Schema, size: int) -> Iterator[pa.Table]:
        """Yield some rows of a file, given by their ascending numbers there, as tables of any length."""


class ParquetRows(TableRows):
    """Parquet files; only row groups with wanted rows are read."""

    @staticmethod
    def _look(file: AnyPath, ids: str | None) -> _About:
        with open_parquet(file) as opened:
            schema, meta = plain_schema(opened.schema_arrow), opened.metadata
            row_groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
            digest = footer_digest(opened)
        for row_group in row_groups:
            columns = (row_group.column(number) for number in range(row_group.num_columns))
            statistics = next((column.statistics for column in columns if column.path_in_schema == ids), None)
            if statistics is not None and statistics.null_count:
                raise DataError(f"{file}: a row has no {ids}")
        n_bytes = sum(row_group.total_byte_size for row_group in row_groups)
        return _About(schema, [row_group.num_rows for row_group in row_groups], n_bytes, digest)

    @staticmethod
    def _read(file: AnyPath, digest: str, rows: Ints, schema: pa.Schema, size: int) -> Iterator[pa.Table]:
        with open_parquet(file, streamed=True) as opened:
            if footer_digest(opened) != digest:
                raise _changed(file)
            yield from read_rows(opened, file, rows, schema.names, size)


class StreamedRows(TableRows):
    """CSV and JSONL files, each read from its start.

    A column's type fits all values of a file: for JSON their own type, or text if they have several; for CSV integers,
    numbers or text if `ids` is given (ids are text). Without `ids`, all CSV cells are text, to be parsed by the caller.
    """

    streamed = True

    @staticmethod
    def _look(file: AnyPath, ids: str | None) -> _About:
        digest, n_rows, n_bytes, kinds = str(_size(file)), 0, 0, dict[str, pa.DataType]()
        for table in text_tables(file):
            if ids in table.column_names and (null := pc.index(table.column(ids).is_null(), True).as_py()) >= 0:
                raise DataError(f"{file}, row {n_rows + null}: the row has no {ids}")
            named_by = ids if ids in table.column_names else "id"  # which is text, too: "007" is not 7
            for name in table.column_names:
                own = table.column(name)
                typed = ids is None or name == named_by or not is_csv(file)
                kind = own.type if typed else narrowest(own, kinds.get(name))
                kinds[name] = wider(kinds.get(name, pa.null()), kind)
            n_rows, n_bytes = n_rows + len(table), n_bytes + table.nbytes
        return _About(pa.schema(list(kinds.items())), [n_rows], n_bytes, digest)

    @staticmethod
    def _read(file: AnyPath, digest: str, rows: Ints, schema: pa.Schema, size: int) -> Iterator[pa.Table]:
        first = start = 0
        if str(_size(file)) not in (digest, "-1"):
            raise _changed(file)
        for table in text_tables(file, schema):
            end = start + len(table)
            upto = int(np.searchsorted(rows, end))
            if first < upto:
                yield table if upto - first == len(table) else table.take(rows[first:upto] - start)
            first, start = upto, end
            if first == len(rows):
                return
        raise _changed(file)


def _changed(file: AnyPath) -> DataError:
    return DataError(
        f"{file} has changed since it was first opened; restore it and continue with --resume, or start a new run"
    )


def narrowest(texts: pa.ChunkedArray, at_least: pa.DataType | None = None) -> pa.DataType:
    """Return the narrowest type of all texts, one of null, int64, double, string.   at_least: the narrowest to try.

    >>> [str(narrowest(pa.chunked_array([texts]))) for texts in (["1", None], ["1", "2.5"], ["1", "A"])]
    ['int64', 'double', 'string']
    """
    kinds = [pa.null(), pa.int64(), pa.float64(), pa.string()]
    for kind in kinds[0 if at_least is None else kinds.index(at_least) :]:
        with suppress(pa.ArrowException):  # texts cannot be cast to null
            if texts.null_count < len(texts):
                texts.cast(kind)
            return kind
    raise AssertionError


def wider(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """Return a type that fits values of both types; string if there is no other.

    >>> [str(wider(pa.int64(), other)) for other in (pa.null(), pa.float64(), pa.bool_())]
    ['int64', 'double', 'string']
    """
    try:
        both = pa.unify_schemas([pa.schema([("", one)]), pa.schema([("", other)])], promote_options="permissive")
    except pa.ArrowException:
        return pa.string()
    return both.field(0).type


def open_tables(files: Sequence[AnyPath], ids: str | None = None) -> TableRows:
    """Open files of tables by their suffixes: CSV, JSONL, else Parquet. Raises DataError as TableRows does."""
    return (StreamedRows if TABLES.get(files[0].suffix.lower(), "Parquet") != "Parquet" else ParquetRows)(files, ids)


def require_one_format(files: Iterable[AnyPath]) -> None:
    """Raise DataError if the suffixes of a table's files are of different formats."""
    formats = {TABLES.get(file.suffix.lower()): file for file in files}
    if len(formats) > 1:
        one, other = list(formats.values())[:2]
        raise DataError(f"{one} and {other} have different formats; give files of one format")


class ImageRows:
    """Image files as rows: example_id (the path relative to the folder), image (the bytes) and label, if known."""

    streamed = False

    def __init__(
        self, folder: AnyPath, names: Sequence[str], labels: Sequence[int] | None = None, source: str = ""
    ) -> None:
        """Take the files' relative paths without reading them. Raises DataError for one that is not valid UTF-8."""
        try:
            self.names = pa.array(names, pa.string())
        except UnicodeEncodeError as error:
            raise DataError(f"{folder}: the name {error.object!r} is not valid UTF-8; rename it") from error
        self.folder = folder
        self.labels = None if labels is None else np.asarray(labels, dtype=np.int32)
        self.source = source or str(folder)
        self.n_rows = len(names)
        self.columns: Sequence[str] = ("example_id", "image", *(() if labels is None else ("label",)))

    @cached_property
    def sizes(self) -> list[int]:
        """Return all files' sizes in bytes, -1 for a missing file."""
        return [_size(self.folder / name) for name in self.names.to_pylist()]

    @cached_property
    def identity(self) -> list[Any]:
        """Return a hash of all files' names, labels and sizes."""
        values = [self.names.to_pylist(), *([] if self.labels is None else [self.labels.tolist()]), self.sizes]
        lines = ("\0".join(map(str, each)) + "\n" for each in zip(*values, strict=True))
        return [self.n_rows, hashlib.sha256("".join(lines).encode()).hexdigest()]

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the wanted files' bytes if `image` is among the columns; null if a file cannot be read."""
        for start in range(0, len(rows), size):
            here = rows[start : start + size]
            made = {"example_id": self.names.take(here)}
            if "image" in columns:
                images = [read_image(self.folder / name) or b"" for name in made["example_id"].to_pylist()]
                made["image"] = pa.array(images, pa.large_binary())
            if self.labels is not None:
                made["label"] = pa.array(self.labels[here])
            yield pa.table({column: made[column] for column in columns})

    def name_of(self, row: int) -> str:
        """Return the row's file."""
        return str(self.folder / self.names[row].as_py())


class HubRows:
    """A split of a loaded dataset: Arrow files that the library maps into memory."""

    streamed = False

    def __init__(self, rows: Any, source: str) -> None:
        """Take a datasets.Dataset; as Arrow tables, images stay encoded."""
        self.source = source
        self.columns: Sequence[str] = rows.column_names
        self.n_rows: int = rows.num_rows
        info = rows.info.splits[rows.split] if rows.info.splits and rows.split in rows.info.splits else None
        self.identity: list[Any] = [source, self.n_rows, info.num_bytes if info else None, sorted(self.columns)]
        self._rows = rows.with_format("arrow")

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the rows. Raises DataError if a cached file is damaged."""
        picked = self._rows.select_columns(list(columns))
        for start in range(0, len(rows), size):
            try:
                yield picked[rows[start : start + size].tolist()]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.source} cannot be read: {first_line(error)}") from error

    def name_of(self, row: int) -> str:
        """Return a name for a row."""
        return f"{self.source}, row {row}"


Rows: TypeAlias = TableRows | ImageRows | HubRows


def is_image(file: AnyPath) -> bool:
    """Return whether a file's name is that of an image."""
    return file.name.lower().endswith(IMAGE_SUFFIXES)


def read_image(file: AnyPath) -> bytes | None:
    """Return a file's bytes, None if it cannot be read."""
    try:
        return file.read_bytes() if file.is_file() else None  # reading a pipe would block
    except (OSError, DataError):
        return None


def _size(file: AnyPath) -> int:
    try:
        return file.size() if isinstance(file, RemotePath) else file.stat().st_size
    except OSError:
        return -1
