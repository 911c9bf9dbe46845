"""Numbered rows, of which only some are read: tables in Parquet, JSONL and CSV, images, and splits of the hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from cauc_ray.data.text_files import read_csv, read_jsonl
from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import cast_table, footer_digest, open_parquet, plain_schema, read_rows
from cauc_ray.files.paths import AnyPath, RemotePath
from cauc_ray.numbers.types import Ints

# Of remote files.
_OPENED_AT_ONCE = 16
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")


class Rows(Protocol):
    """Numbered rows with named columns; plain, so that any process can read them.

    source: the file or folder, for errors.   columns: the names that the rows have there.
    """

    source: str
    columns: Sequence[str]
    n_rows: int

    @property
    def identity(self) -> list[Any]:
        """Values of JSON that change when the content does: names, sizes, row counts."""

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Yield these columns of the given rows, which rise, in tables of `size` rows; the last may be shorter.

        Their types are plain: no dictionaries, no views. Raises DataError naming a file that cannot be read.
        """

    def name_of(self, row: int) -> str:
        """Name a row's file and its number there."""


class _Files:
    """Files that follow one another, and which rows are in which."""

    def __init__(self, files: Sequence[AnyPath], n_rows: Sequence[int]) -> None:
        self.files = list(files)
        self.source = str(files[0] if len(files) == 1 else files[0].parent)
        self.starts = np.cumsum([0, *n_rows], dtype=np.int64)
        self.n_rows = int(self.starts[-1])

    @property
    def identity(self) -> list[Any]:
        sizes = [_size(file) for file in self.files]
        names = [file.name for file in self.files]
        return [list(each) for each in zip(names, sizes, np.diff(self.starts).tolist(), strict=True)]

    def locate(self, row: int) -> tuple[int, int]:
        """Return the number of a row's file, and the row's number there."""
        file = int(np.searchsorted(self.starts, row, side="right")) - 1
        return file, row - int(self.starts[file])

    def name_of(self, row: int) -> str:
        file, own = self.locate(row)
        return f"{self.files[file]}, row {own}"


class ParquetRows(_Files):
    """Parquet files, of which only row groups are read that hold wanted rows.

    row_group_ends: int64 (G,), rows up to the end of each row group.   n_bytes: of all rows, uncompressed, as the
    footers state it.
    """

    def __init__(self, files: Sequence[AnyPath], ids: str | None = None) -> None:
        """Read the footers.   ids: a column that names every row.

        Raises DataError when a file is unreadable, lacks ids or has other columns than the first.
        """
        lengths, ends = [], []
        self.n_bytes = 0
        self._schemas: dict[pa.Schema, AnyPath] = {}
        self._digests: list[str] = []
        with ThreadPoolExecutor(_OPENED_AT_ONCE) as pool:
            # Opening a remote file is waiting; local ones would take twice as long in threads.
            each = pool.map if isinstance(files[0], RemotePath) else map
            footers = each(partial(_read_footer, ids=ids), files)
            for file, (schema, group_rows, n_bytes, digest) in zip(files, footers, strict=True):
                first = next(iter(self._schemas), schema)
                if sorted(schema.names) != sorted(first.names):
                    raise DataError(
                        f"{file} has the columns {', '.join(schema.names)}, but {files[0]} has {', '.join(first.names)}"
                    )
                self._schemas.setdefault(schema, file)
                self._digests.append(digest)
                lengths.append(sum(group_rows))
                ends += group_rows
                self.n_bytes += n_bytes
        super().__init__(files, lengths)
        self.columns: Sequence[str] = next(iter(self._schemas)).names
        self.row_group_ends = np.cumsum(ends, dtype=np.int64)

    def schema(self, columns: Sequence[str]) -> pa.Schema:
        """Return columns with the types that those of all files widen to. Raises DataError where there are none."""
        fitting = pa.schema([])
        for schema, file in self._schemas.items():
            own = pa.schema([schema.field(name) for name in columns])
            try:
                fitting = pa.unify_schemas([fitting, own], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(f"{file} does not fit the files before it: {first_line(error)}") from error
        return fitting

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the wanted rows' row groups, a batch at a time.

        Raises UnreadableError where a file cannot be opened or decoded, DataError where it was rewritten since.
        """
        held: list[pa.Table] = []
        n = 0
        for piece in self._pieces(self.schema(columns), rows, size):
            held.append(piece)
            n += len(piece)
            if n >= size:
                joined = pa.concat_tables(held)
                yield joined.slice(0, size)
                held, n = [joined.slice(size)], n - size
        if n:
            yield pa.concat_tables(held)

    def _pieces(self, schema: pa.Schema, rows: Ints, size: int) -> Iterator[pa.Table]:
        """Yield the rows in tables of at most `size`."""
        for number in np.unique(np.searchsorted(self.starts, rows, side="right") - 1):
            file, start, end = self.files[number], self.starts[number], self.starts[number + 1]
            first, last = np.searchsorted(rows, [start, end])
            with open_parquet(file, streamed=True) as opened:
                if footer_digest(opened) != self._digests[number]:
                    raise DataError(
                        f"{file} has changed since it was first opened; restore it and go on with --resume, or start "
                        "a new run"
                    )
                for table in read_rows(opened, file, rows[first:last] - start, schema.names, size):
                    try:
                        fitted = cast_table(table, schema)
                    except pa.ArrowException as error:
                        raise DataError(f"{file} does not fit the other files: {first_line(error)}") from error
                    yield fitted


def _read_footer(file: AnyPath, ids: str | None) -> tuple[pa.Schema, list[int], int, str]:
    """Return a file's plain schema, the rows of each row group, the bytes of all, and a digest of the footer.

    Raises DataError where the file is unreadable, or lacks the column ids for some row.
    """
    with open_parquet(file) as opened:
        schema, meta = plain_schema(opened.schema_arrow), opened.metadata
        row_groups = [meta.row_group(number) for number in range(meta.num_row_groups)]
        digest = footer_digest(opened)
    if ids is not None:
        if ids not in schema.names:
            raise DataError(f"{file} has no column {ids!r}; it has {', '.join(sorted(schema.names))}")
        if pa.types.is_nested(schema.field(ids).type):
            raise DataError(f"{file}: column {ids!r} ({schema.field(ids).type}) holds no ids")
        for row_group in row_groups:
            columns = (row_group.column(number) for number in range(row_group.num_columns))
            statistics = next(column for column in columns if column.path_in_schema == ids).statistics
            if statistics is not None and statistics.null_count:
                raise DataError(f"{file}: a row has no {ids}")
    n_bytes = sum(row_group.total_byte_size for row_group in row_groups)
    return schema, [row_group.num_rows for row_group in row_groups], n_bytes, digest


class TextRows(_Files):
    """JSONL or CSV files, read whole."""

    def __init__(self, files: Sequence[AnyPath]) -> None:
        """Read the files. Raises DataError naming file and line when one is malformed."""
        tables = [(read_csv if file.suffix.lower() == ".csv" else read_jsonl)(file) for file in files]
        super().__init__(files, [len(table) for table in tables])
        try:
            self._table = pa.concat_tables(tables, promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(f"{self.source}: the files differ in a column's type: {first_line(error)}") from error
        self.columns: Sequence[str] = self._table.column_names

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Yield the rows from memory."""
        picked = self._table.select(list(columns))
        for start in range(0, len(rows), size):
            yield picked.take(rows[start : start + size])


class ImageRows:
    """Image files: example_id (the file's path relative to the folder), image (its bytes) and label, where known."""

    def __init__(
        self, folder: AnyPath, names: Sequence[str], labels: Sequence[int] | None = None, source: str = ""
    ) -> None:
        """Take the files' relative paths as they are; nothing is read. Raises DataError for one that is not UTF-8."""
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
        """Return all files' sizes in bytes, -1 for a file that is not there."""
        return [_size(self.folder / name) for name in self.names.to_pylist()]

    @cached_property
    def identity(self) -> list[Any]:
        """Return a hash of all files' names, labels and sizes."""
        values = [self.names.to_pylist(), *([] if self.labels is None else [self.labels.tolist()]), self.sizes]
        lines = ("\0".join(map(str, each)) + "\n" for each in zip(*values, strict=True))
        return [self.n_rows, hashlib.sha256("".join(lines).encode()).hexdigest()]

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the wanted files' bytes if `image` is among the columns; none where a file cannot be read."""
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
        """Name the row's file."""
        return str(self.folder / self.names[row].as_py())


class HubRows:
    """A split of a loaded dataset: Arrow files that the library maps into memory."""

    def __init__(self, rows: Any, source: str) -> None:
        """Take a datasets.Dataset. As Arrow tables its images stay encoded."""
        self.source = source
        self.columns: Sequence[str] = rows.column_names
        self.n_rows: int = rows.num_rows
        info = rows.info.splits[rows.split] if rows.info.splits and rows.split in rows.info.splits else None
        self.identity: list[Any] = [source, self.n_rows, info.num_bytes if info else None, sorted(self.columns)]
        self._rows = rows.with_format("arrow")

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the rows. Raises DataError where a cached file is damaged."""
        picked = self._rows.select_columns(list(columns))
        for start in range(0, len(rows), size):
            try:
                yield picked[rows[start : start + size].tolist()]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.source} cannot be read: {first_line(error)}") from error

    def name_of(self, row: int) -> str:
        """Name the row."""
        return f"{self.source}, row {row}"


def is_image(file: AnyPath) -> bool:
    """Return whether a file is an image by its name."""
    return file.name.lower().endswith(IMAGE_SUFFIXES)


def read_image(file: AnyPath) -> bytes | None:
    """Return a file's bytes, None where it cannot be read."""
    try:
        return file.read_bytes() if file.is_file() else None  # a pipe would be waited for
    except (OSError, DataError):
        return None


def _size(file: AnyPath) -> int:
    try:
        return file.size() if isinstance(file, RemotePath) else file.stat().st_size
    except OSError:
        return -1
