"""Files as numbered rows that can be read in any process: tables of every format, images, and splits of the hub."""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path, PurePath
from typing import Any, TypeVar
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.streams import FORMATS, format_of, narrowest, stem_of, stream_tables, wider
from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import (
    THREADS,
    ParquetFooter,
    RowSpan,
    UnopenedError,
    UnreadableError,
    cast_table,
    changed_file,
    read_footer,
    read_row_spans,
)
from cauc_ray.files.paths import AnyPath, FileEntry, RemotePath, list_files, readable
from cauc_ray.numbers.types import Ints

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Remote Parquet files up to this size in all are fetched once, and travel to the readers.
CONTENT_BYTES = 64 << 20
# Footers up to this size in all travel to the readers; those of more files are read again.
FOOTER_BYTES = 32 << 20
PARTITIONS = {"train", "validation", "val", "valid", "test", "dev", "calibration"}
SHARD = re.compile(r"(?P<name>.+?)-(?P<number>\d{5})-of-(?P<total>\d{5})(-[0-9a-f]+)?")
# What the folders of lakehouse tables have, whose files are not their rows.
_LAKES = {"Delta": re.compile(r"(.*/)?_delta_log/.*"), "Iceberg": re.compile(r"(.*/)?metadata/.*\.metadata\.json")}
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Source(ABC):
    """Numbered rows; picklable, so that any process can read them.

    Attributes:
        name: For messages.
        columns: The names of the columns.
        n_rows: The number of rows.
        n_bytes: The size of all rows, uncompressed.
        ends: The numbers of rows after which another process may begin to read, int64 (G,).
        identity: JSON values that change with the content, not with the place.
        is_remote: Whether every machine can read it.
    """

    name: str
    columns: Sequence[str]
    n_rows: int
    n_bytes: int
    ends: Ints
    identity: list[Any]
    is_remote: bool

    @abstractmethod
    def spans(self, columns: Sequence[str], rows: Ints, size: int, texts: Collection[str] = ()) -> Iterator[RowSpan]:
        """Read rows in order.

        Args:
            columns: Their names.
            rows: The rows' numbers, int64 (n,), ascending.
            size: The most rows of a span.
            texts: Columns whose cells stay as they are written, where the format is text.

        Raises:
            DataError: A file has changed since it was opened.
        """

    @abstractmethod
    def place_of(self, row: int) -> str:
        """Return where a row is, for messages."""

    @abstractmethod
    def row_names(self, rows: Ints) -> pa.Array:
        """Return names for rows without ids, string (n,)."""

    def folder_of(self, row: int) -> AnyPath | None:
        """Return the folder that paths in a row are relative to, None where there is none."""
        return None

    def table(self, columns: Sequence[str], rows: Ints, texts: Collection[str] = ()) -> pa.Table:
        """Read rows as one table. Raises UnreadableError if one cannot be read, and as spans does."""
        tables = []
        for span in self.spans(columns, rows, 65_536, texts):
            if span.error is not None:
                raise span.error
            tables.append(span.table)
        return pa.concat_tables(tables)


@dataclass(frozen=True, slots=True)
class _TableFile:
    """A table's file as it was when it was first opened.

    Attributes:
        entry: Its path, size and time.
        schema: Its columns, without those in the names of folders.
        group_rows: The rows of each piece that can be read independently.
        n_bytes: The size of all rows, uncompressed.
        digest: Changes if the file is rewritten with other rows.
        stored: The footer of a Parquet file.
    """

    entry: FileEntry
    schema: pa.Schema
    group_rows: tuple[int, ...]
    n_bytes: int
    digest: str
    stored: ParquetFooter | None = None


class TableFiles(Source):
    """The files of one table, which have the same columns; `key=value` folders above them are columns, too."""

    def __init__(self, entries: Sequence[FileEntry], root: AnyPath) -> None:
        """Open the files.

        Args:
            entries: The files.
            root: The folder that names of rows are relative to.

        Raises:
            DataError: A file is unreadable, or has other columns than the first or incompatible types.
        """
        formats = {format_of(entry.path): entry.path for entry in entries}
        if len(formats) > 1:
            first, second = list(formats.values())[:2]
            raise DataError(f"{first} and {second} have different formats; give files of one format")
        self.is_remote = isinstance(root, RemotePath)
        look = _look_parquet if formats.keys() & {"Parquet", None} else _look_stream
        if self.is_remote and look is _look_parquet and sum(entry.size for entry in entries) <= CONTENT_BYTES:
            look = partial(_look_parquet, whole=True)
        self._files = list(_side_by_side(look, entries, self.is_remote))
        if sum(len(file.stored.footer) for file in self._files if file.stored) > FOOTER_BYTES:
            self._files = [replace(f, stored=f.stored and f.stored.without_footer()) for f in self._files]
        self._keys = _hive_columns([_relative(entry.path, root) for entry in entries], self._files[0].schema.names)
        self._schemas: dict[pa.Schema, AnyPath] = {}
        names = self._files[0].schema.names
        for file in self._files:
            if sorted(file.schema.names) != sorted(names):
                raise DataError(
                    f"{file.entry.path} has the columns {', '.join(file.schema.names)}, but "
                    f"{self._files[0].entry.path} has {', '.join(names)}"
                )
            self._schemas.setdefault(file.schema, file.entry.path)
        self.name = str(entries[0].path if len(entries) == 1 else root)
        self.columns: Sequence[str] = [*names, *self._keys]
        lengths = [sum(file.group_rows) for file in self._files]
        self._starts = np.cumsum([0, *lengths], dtype=np.int64)
        self.n_rows = int(self._starts[-1])
        self.n_bytes = sum(file.n_bytes for file in self._files)
        self.ends = np.cumsum([n for file in self._files for n in file.group_rows], dtype=np.int64)
        self._prefixes: list[tuple[str, int]] = []
        counts = Counter[str]()
        for entry, n in zip(entries, lengths, strict=True):
            prefix = str(_relative(entry.path, root).with_name(partition_name(stem_of(entry.path))))
            self._prefixes.append((prefix, counts[prefix]))
            counts[prefix] += n
        self._schema(self.columns)
        self.identity = [
            [entry.path.name, file.digest, n] for entry, file, n in zip(entries, self._files, lengths, strict=True)
        ]

    def place_of(self, row: int) -> str:
        """Return the row's file and its number there."""
        file = self._file_of(row)
        return f"{self._files[file].entry.path}, row {row - self._starts[file]}"

    def folder_of(self, row: int) -> AnyPath | None:
        """Return the folder of the row's file."""
        folder: AnyPath = self._files[self._file_of(row)].entry.path.parent
        return folder

    def row_names(self, rows: Ints) -> pa.Array:
        """Return the names of the rows' files and their numbers there, over all shards of a file."""
        files = np.searchsorted(self._starts, rows, side="right") - 1
        first = np.array([start for _, start in self._prefixes]) - self._starts[:-1]
        prefixes = pa.array([prefix for prefix, _ in self._prefixes]).take(pa.array(files))
        return pc.binary_join_element_wise(prefixes, pc.cast(pa.array(rows + first[files]), pa.string()), "-")

    def spans(self, columns: Sequence[str], rows: Ints, size: int, texts: Collection[str] = ()) -> Iterator[RowSpan]:
        """Read rows in order. Arguments and errors are those of Source.spans."""
        schema = self._schema(columns, texts)
        stored_names = [name for name in schema.names if name not in self._keys]
        stored_schema = pa.schema([schema.field(name) for name in stored_names])
        for numbers, spans in self._by_format(stored_schema, rows, size):
            left, number = 0, -1
            for span in spans:
                while not left:
                    number, left = next(numbers)
                left -= span.n
                if span.table is None:
                    yield span
                    continue
                path = self._files[number].entry.path
                try:
                    table = cast_table(span.table.select(stored_names), stored_schema)
                except pa.ArrowException as error:
                    raise DataError(f"{path} does not fit the other files: {first_line(error)}") from error
                for name in schema.names:
                    if name in self._keys:
                        value = pa.scalar(self._keys[name][number].as_py(), schema.field(name).type)
                        table = table.append_column(schema.field(name), pa.repeat(value, span.n))
                yield RowSpan(span.n, table.select(schema.names))

    def _by_format(
        self, schema: pa.Schema, rows: Ints, size: int
    ) -> Iterator[tuple[Iterator[tuple[int, int]], Iterator[RowSpan]]]:
        """Yield spans of rows, and the files that they are of: their numbers, and the requested rows of each."""
        requests = []
        for number in np.unique(np.searchsorted(self._starts, rows, side="right") - 1).tolist():
            first, last = np.searchsorted(rows, self._starts[number : number + 2])
            requests.append((number, rows[first:last] - self._starts[number]))
        counts = iter([(number, len(local)) for number, local in requests])
        if not schema.names:
            yield counts, iter([RowSpan(len(local), pa.table({"": pa.nulls(len(local))})) for _, local in requests])
            return
        stored = [(self._files[number].stored, local) for number, local in requests]
        parquet = [(footer, local) for footer, local in stored if footer is not None]
        if parquet:
            yield counts, read_row_spans(parquet, schema.names, size)
        else:
            yield counts, (span for n, local in requests for span in _stream_spans(self._files[n], local, schema))

    def _file_of(self, row: int) -> int:
        return int(np.searchsorted(self._starts, row, side="right")) - 1

    def _schema(self, columns: Sequence[str], texts: Collection[str] = ()) -> pa.Schema:
        """Return columns with types that fit all files. Raises DataError if there are none."""
        fitting = pa.schema([])
        written = format_of(self._files[0].entry.path) == "CSV"
        for schema, path in self._schemas.items():
            fields = [schema.field(name) for name in columns if name not in self._keys]
            local = pa.schema(
                [field.with_type(pa.string()) if written and field.name in texts else field for field in fields]
            )
            try:
                fitting = pa.unify_schemas([fitting, local], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(f"{path} does not fit the files before it: {first_line(error)}") from error
        keys = {name: pa.field(name, self._keys[name].type) for name in columns if name in self._keys}
        return pa.schema([keys.get(name) or fitting.field(name) for name in columns])


def _look_parquet(entry: FileEntry, *, whole: bool = False) -> _TableFile:
    try:
        stored = read_footer(entry.path, whole=whole)
    except UnopenedError as error:
        if format_of(entry.path) is not None or not Path(str(entry.path)).suffix:
            raise
        raise DataError(f"{entry.path} is not a table; expected a name that ends in {', '.join(FORMATS)}") from error
    return _TableFile(entry, stored.schema, tuple(stored.group_rows), stored.n_bytes, stored.digest, stored)


def _look_stream(entry: FileEntry) -> _TableFile:
    """Read a file once, to count its rows and to find types that fit all values of each column."""
    kinds: dict[str, pa.DataType] = {}
    n_rows = n_bytes = 0
    written, digest = format_of(entry.path) == "CSV", hashlib.blake2b(digest_size=16)
    for table in stream_tables(entry, digest=digest):
        for name in table.column_names:
            column = table.column(name)
            before = kinds.get(name, pa.null())
            kind = narrowest(column) if written and before != pa.string() else column.type
            kinds[name] = wider(before, kind)
        n_rows, n_bytes = n_rows + len(table), n_bytes + table.nbytes
    content = f"{entry.size} {digest.hexdigest()}"
    return _TableFile(entry, pa.schema(list(kinds.items())), (n_rows,), n_bytes, content)


def _stream_spans(file: _TableFile, rows: Ints, schema: pa.Schema) -> Iterator[RowSpan]:
    """Yield some rows of a file that is read from its start; those that are not reached are unreadable."""
    entry, done, start = file.entry, 0, 0
    try:
        now = list_files(entry.path) if isinstance(entry.path, Path) else entry.path.entry()
        if now and (now[0].size, now[0].modified_ns) != (entry.size, entry.modified_ns):
            raise changed_file(entry.path)
        for table in stream_tables(entry, schema):
            upto = int(np.searchsorted(rows, start + len(table)))
            if done < upto:
                whole = upto - done == len(table)
                yield RowSpan(upto - done, table if whole else table.take(rows[done:upto] - start))
            done, start = upto, start + len(table)
            if done == len(rows):
                return
    except UnreadableError as error:
        yield RowSpan(len(rows) - done, error=error)
        return
    raise changed_file(entry.path)


def _hive_columns(relative: Sequence[PurePath], stored: Collection[str]) -> dict[str, pa.Array]:
    """Return the columns that are in the names of folders, a value for each file; a file's own column comes first."""
    pairs = [dict(part.partition("=")[::2] for part in path.parts[:-1] if "=" in part) for path in relative]
    columns = {}
    for name in dict.fromkeys(name for keys in pairs for name in keys if name not in stored):
        texts = [unquote(keys[name]) if keys.get(name, _NULL_PARTITION) != _NULL_PARTITION else None for keys in pairs]
        whole = all(text is None or re.fullmatch(r"-?\d{1,18}", text) for text in texts)
        columns[name] = pa.array(texts, pa.string()).cast(pa.int64()) if whole else pa.array(texts, pa.string())
    return columns


class ImageFiles(Source):
    """Image files as rows: example_id (the path relative to the folder), image (the bytes) and label, if known."""

    def __init__(
        self, folder: AnyPath, entries: Sequence[FileEntry], labels: Sequence[int] | None = None, name: str = ""
    ) -> None:
        """Take the files as they are listed, without reading them. Raises DataError for a name that is not UTF-8."""
        names = [str(_relative(entry.path, folder)) for entry in entries]
        order = sorted(range(len(names)), key=lambda number: names[number])
        try:
            self._names = pa.array([names[number] for number in order], pa.string())
        except UnicodeEncodeError as error:
            raise DataError(f"{folder}: the name {error.object!r} is not valid UTF-8; rename it") from error
        self._folder = folder
        self._sizes = np.array([entries[number].size for number in order], dtype=np.int64)
        self._labels = None if labels is None else np.array([labels[number] for number in order], dtype=np.int32)
        self.is_remote = isinstance(folder, RemotePath)
        self.name = name or str(folder)
        self.n_rows = len(names)
        self.n_bytes = int(np.maximum(self._sizes, 0).sum())
        # Reading files costs the same in any order.
        self.ends = np.arange(1, self.n_rows + 1)
        self.columns: Sequence[str] = ("example_id", "image", *(() if labels is None else ("label",)))

    @cached_property
    def identity(self) -> list[Any]:  # type: ignore[override]
        """A hash of all files' names, labels and sizes."""
        values = [self._names.to_pylist(), self._sizes.tolist()]
        values += [] if self._labels is None else [self._labels.tolist()]
        lines = ("\0".join(map(str, row)) + "\n" for row in zip(*values, strict=True))
        return [self.n_rows, hashlib.sha256("".join(lines).encode()).hexdigest()]

    def place_of(self, row: int) -> str:
        """Return the row's file."""
        return str(self._folder / self._names[row].as_py())

    def row_names(self, rows: Ints) -> pa.Array:
        """Return the files' paths relative to the folder."""
        return self._names.take(pa.array(rows))

    def spans(self, columns: Sequence[str], rows: Ints, size: int, texts: Collection[str] = ()) -> Iterator[RowSpan]:
        """Read the files' bytes if `image` is among the columns, no bytes for a file that cannot be read."""
        files = [self._folder / name for name in self._names.take(pa.array(rows)).to_pylist()]
        images = read_side_by_side(files if "image" in columns else [])
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            made = {"example_id": self.row_names(part)}
            if "image" in columns:
                made["image"] = pa.array([next(images) or b"" for _ in part], pa.large_binary())
            if self._labels is not None:
                made["label"] = pa.array(self._labels[part])
            yield RowSpan(len(part), pa.table({column: made[column] for column in columns}))


class HubRows(Source):
    """A split of a loaded dataset: Arrow files that the library maps into memory."""

    is_remote = False

    def __init__(self, rows: Any, name: str, partition: str) -> None:
        """Take a datasets.Dataset; as Arrow tables, images stay encoded."""
        self.name, self._partition = name, partition
        self.columns: Sequence[str] = rows.column_names
        self.n_rows: int = rows.num_rows
        info = rows.info.splits[rows.split] if rows.info.splits and rows.split in rows.info.splits else None
        self.n_bytes = (info.num_bytes or 0) if info else 0
        self.ends = np.arange(1, self.n_rows + 1)
        self.identity = [name, self.n_rows, info.num_bytes if info else None, sorted(self.columns)]
        self._rows = rows.with_format("arrow")

    def place_of(self, row: int) -> str:
        """Return the split and the row's number."""
        return f"{self.name}, row {row}"

    def row_names(self, rows: Ints) -> pa.Array:
        """Return the partition and the rows' numbers."""
        return pc.binary_join_element_wise(self._partition, pc.cast(pa.array(rows), pa.string()), "-")

    def spans(self, columns: Sequence[str], rows: Ints, size: int, texts: Collection[str] = ()) -> Iterator[RowSpan]:
        """Read rows in order. Raises DataError if a cached file is damaged."""
        picked = self._rows.select_columns(list(columns))
        for start in range(0, len(rows), size):
            try:
                table = picked[rows[start : start + size].tolist()]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.name} cannot be read: {first_line(error)}") from error
            yield RowSpan(len(table), table)


def open_folder(location: AnyPath, entries: Sequence[FileEntry] | None = None) -> TableFiles | ImageFiles:
    """Open all rows of a file, or of the files of one kind in a folder and its subfolders.

    In a folder these are Parquet, Arrow or ORC files if there are any, else images, else text files.

    Args:
        location: The file or folder.
        entries: Its files, None to list them.

    Raises:
        DataError: Nothing is there that can be read, or the files are inconsistent.
    """
    entries = listed(location) if entries is None else entries
    alone = len(entries) == 1 and entries[0].path == location
    root = location.parent if alone else location
    images = [entry for entry in entries if is_image(entry.path)]
    tables = table_entries(entries, images=bool(images))
    if tables or (alone and not images):
        source: TableFiles | ImageFiles = TableFiles(tables or entries, root)
    elif images:
        source = ImageFiles(root, images)
    else:
        kinds = f"no tables ({' '.join(FORMATS)}) and no images ({' '.join(IMAGE_SUFFIXES)})"
        raise DataError(f"there are {kinds} in {location}")
    if source.n_rows == 0:
        raise DataError(f"{location} has no rows")
    return source


def open_rows(location: AnyPath) -> list[dict[str, Any]]:
    """Read all rows of a table, such as examples of a prompt. Raises as open_folder does."""
    source = open_folder(location)
    rows: list[dict[str, Any]] = source.table(source.columns, np.arange(source.n_rows), source.columns).to_pylist()
    return rows


def table_entries(entries: Iterable[FileEntry], *, images: bool = False) -> list[FileEntry]:
    """Return those files that are tables: of columnar formats if there are any, else of text formats.

    Args:
        entries: The files.
        images: Whether there are images, next to which text files are notes.
    """
    by_format: dict[str, list[FileEntry]] = {}
    for entry in entries:
        if kind := format_of(entry.path):
            by_format.setdefault(kind, []).append(entry)
    columnar = next((by_format[kind] for kind in ("Parquet", "Arrow", "ORC") if kind in by_format), None)
    if columnar is not None or images:
        return columnar or []
    return [entry for entries in by_format.values() for entry in entries]


def listed(location: AnyPath) -> list[FileEntry]:
    """List a location's files by a single listing.

    Raises:
        DataError: Nothing is there, or it is a folder of a lakehouse table, whose files are not its rows.
    """
    if isinstance(location, RemotePath) and location.root.startswith(("http://", "https://")):
        raise DataError(f"{location} is a web address; download the file, or give s3://, gs://, abfs:// or hf://")
    with readable(location):
        entries = list_files(location, follow_links=True, hidden=(".",))
        if not entries and not (isinstance(location, Path) and location.is_dir()):
            raise DataError(f"there is no file or folder {location}")
    parts = {entry.path: _relative(entry.path, location).as_posix() for entry in entries}
    for lake, mark in _LAKES.items():
        if any(map(mark.fullmatch, parts.values())):
            raise DataError(
                f"{location} is a {lake} table, whose folder also holds removed rows; export it to Parquet, or read it "
                "by ray.data and give the dataset from Python"
            )
    return [entry for entry in entries if not any(part.startswith("_") for part in parts[entry.path].split("/"))]


def partition_name(stem: str) -> str:
    """Return the partition that a file or folder is named after.

    >>> partition_name("val-00000-of-00002")
    'validation'
    """
    shard = SHARD.fullmatch(stem)
    name = shard["name"] if shard else stem
    name = name.lower() if name.lower() in PARTITIONS else name
    return "validation" if name in ("val", "valid") else name


def is_image(file: AnyPath) -> bool:
    """Return whether a file's name is that of an image."""
    return file.name.lower().endswith(IMAGE_SUFFIXES)


def read_side_by_side(files: Sequence[AnyPath]) -> Iterator[bytes | None]:
    """Yield files' bytes in order, remote ones read side by side; None for a file that cannot be read."""
    return _side_by_side(_content, files, bool(files) and isinstance(files[0], RemotePath))


def _content(path: AnyPath) -> bytes | None:
    try:
        if isinstance(path, RemotePath):
            return path.read_bytes()
        return path.read_bytes() if path.is_file() else None  # reading a pipe would block
    except (OSError, ValueError, DataError):
        return None


def _side_by_side(work: Callable[[_Item], _Result], items: Sequence[_Item], remote: bool) -> Iterator[_Result]:
    """Yield results in order; remote work goes on ahead in threads, local work would only take longer in them."""
    if not remote:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max(1, min(THREADS, len(items)))) as pool:
        ahead: deque[Future[_Result]] = deque()
        for item in items:
            ahead.append(pool.submit(work, item))
            if len(ahead) > 2 * THREADS:
                yield ahead.popleft().result()
        for future in ahead:
            yield future.result()


def _relative(path: AnyPath, folder: AnyPath) -> PurePath:
    """Return a path relative to a folder that contains it; a file's name where it is the folder itself."""
    parts = path.parts[len(folder.parts) :]
    return PurePath(*parts) if parts else PurePath(path.name)
