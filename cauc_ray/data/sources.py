"""Files as numbered rows that can be read in any process: tables of every format, and images."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.streams import FORMATS, format_of, narrowest, stem_of, stream_tables, wider
from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import (
    ParquetFooter,
    RowSpan,
    UnopenedError,
    UnreadableError,
    cast_table,
    changed_file,
    picked_rows,
    read_footer,
    read_row_spans,
)
from cauc_ray.files.paths import AnyPath, FileEntry, RemotePath, file_entry, list_files, readable, side_by_side
from cauc_ray.numbers.types import Ints

ID = "example_id"
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Remote Parquet files up to this size in all are fetched once, and travel to the readers.
CONTENT_BYTES = 64 << 20
# Rows of remote tables up to this size, uncompressed, that a collection's models read are fetched once.
SNAPSHOT_BYTES = 256 << 20
# Footers up to this size in all travel to the readers; those of more files are read again.
FOOTER_BYTES = 32 << 20
# The most rows that a reader decodes at once.
SPAN_ROWS = 65_536
PARTITIONS = {"train", "validation", "val", "valid", "test", "dev", "calibration"}
SHARD = re.compile(r"(?P<name>.+?)-(?P<number>\d{5})-of-(?P<total>\d{5})(-[0-9a-f]+)?")
# What the folders of lakehouse tables have, whose files are not their rows.
_LAKES = {"Delta": re.compile(r"(.*/)?_delta_log/.*"), "Iceberg": re.compile(r"(.*/)?metadata/.*\.metadata\.json")}
_NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True, slots=True)
class _TableFile:
    """A table's file as it was when it was first opened.

    Attributes:
        entry: Its path, size and time.
        schema: Its columns, without those in the names of folders.
        group_rows: The rows of each piece that can be read independently.
        n_bytes: The size of all rows, uncompressed.
        digest: Changes if the file is rewritten with other rows.
        footer: The footer of a Parquet file.
    """

    entry: FileEntry
    schema: pa.Schema
    group_rows: tuple[int, ...]
    n_bytes: int
    digest: str
    footer: ParquetFooter | None = None


@dataclass(frozen=True, eq=False)
class Source:
    """Numbered rows of files; picklable, so that any process can read them.

    Attributes:
        name: For messages.
        root: The folder that the files are in.
        columns: The names of the columns, among them one of ids.
        ends: The numbers of rows after which another process may begin to read, int64 (G,).
        n_bytes: The size of all rows, uncompressed.
        identity: JSON values that change with the content, not with the place.
        files: The files of a table, in order; none for images.
        starts: The number of each file's first row, and of all rows, int64 (F + 1,).
        computed: Columns that the files do not have, a value for each file.
        rows: Rows of some columns in memory, or what returns them.
    """

    name: str
    root: AnyPath
    columns: Sequence[str]
    ends: Ints
    n_bytes: int
    identity: list[Any]
    files: Sequence[_TableFile] = ()
    starts: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))
    computed: Mapping[str, pa.Array] = field(default_factory=dict)
    rows: pa.Table | Callable[[], pa.Table] | None = None

    @property
    def n_rows(self) -> int:
        """The number of rows."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def is_remote(self) -> bool:
        """Whether every machine can read it."""
        return isinstance(self.root, RemotePath)

    def place_of(self, row: int) -> str:
        """Return where a row is, for messages: its file and its number there."""
        if not self.files:
            return str(self.root / self._table_in_memory()[ID][row].as_py())
        (number,) = self._file_numbers([row])
        return f"{self.files[number].entry.path}, row {row - self.starts[number]}"

    def folder_of(self, row: int) -> AnyPath:
        """Return the folder that paths in a row are relative to."""
        if not self.files:
            return self.root
        folder: AnyPath = self.files[self._file_numbers([row])[0]].entry.path.parent
        return folder

    def table(self, columns: Sequence[str], texts: Collection[str] = ()) -> pa.Table:
        """Read all rows as one table. Raises UnreadableError if one cannot be read, and as spans does."""
        tables = []
        for span in self.spans(columns, np.arange(self.n_rows), texts=texts):
            if span.error is not None:
                raise span.error
            tables.append(span.table)
        return pa.concat_tables(tables)

    def snapshot(self, columns: Sequence[str], texts: Collection[str]) -> Source:
        """Return a remote table with some columns in memory, for all who read them later, where memory allows."""
        if not self.files or not self.is_remote or self.n_bytes > SNAPSHOT_BYTES:
            return self
        try:
            return replace(self, rows=self.table(columns, texts).combine_chunks())
        except UnreadableError:  # readers then name the rows
            return self

    def spans(
        self, columns: Sequence[str], rows: Ints, size: int = SPAN_ROWS, texts: Collection[str] = ()
    ) -> Iterator[RowSpan]:
        """Read rows in order.

        Args:
            columns: Their names.
            rows: The rows' numbers, int64 (n,), ascending.
            size: The most rows of a span.
            texts: Columns whose cells stay as they are written, where the format is text.

        Raises:
            DataError: A file has changed since it was opened.
        """
        memory = self._table_in_memory()
        if {*columns} <= {*memory.column_names}:
            for first in range(0, len(rows), size):
                table = memory.select(columns).take(pa.array(rows[first : first + size]))
                yield RowSpan(len(table), table)
            return
        schema = self.schema(columns, texts)
        stored_schema = pa.schema([field for field in schema if field.name not in self.computed])
        start = 0
        for span in self._stored_spans(stored_schema, rows, size):
            numbers = rows[start : start + span.n]
            start += span.n
            if span.table is None:
                yield span
                continue
            try:
                table = cast_table(span.table.select(stored_schema.names), stored_schema)
            except pa.ArrowException as error:
                path = self.files[self._file_numbers(numbers[:1])[0]].entry.path
                raise DataError(f"{path} does not fit the other files: {first_line(error)}") from error
            arrays = [
                self._computed(name, numbers) if name in self.computed else table.column(name) for name in schema.names
            ]
            yield RowSpan(span.n, pa.table(arrays, schema))

    def _table_in_memory(self) -> pa.Table:
        if callable(self.rows):
            return self.rows()
        return pa.table({}) if self.rows is None else self.rows

    def _stored_spans(self, schema: pa.Schema, rows: Ints, size: int) -> Iterator[RowSpan]:
        """Read columns of the files themselves; no span has rows of two files."""
        requests = []
        for number in np.unique(self._file_numbers(rows)).tolist():
            first, last = np.searchsorted(rows, self.starts[number : number + 2])
            requests.append((self.files[number], rows[first:last] - self.starts[number]))
        if not schema.names:
            yield from (RowSpan(len(numbers), schema.empty_table()) for _, numbers in requests)
        elif self.files[0].footer is not None:
            yield from read_row_spans([(file.footer, numbers) for file, numbers in requests], schema.names, size)
        else:
            for file, numbers in requests:
                yield from _stream_spans(file.entry, numbers, schema)

    def _computed(self, name: str, rows: Ints) -> pa.Array:
        """Return a column that the files do not have, of some rows: ids, or values in the names of folders."""
        numbers = self._file_numbers(rows)
        values = self.computed[name].take(pa.array(numbers))
        if name != ID:
            return values
        # Rows are numbered over all shards of a file, which have one name.
        row_numbers = pc.add(values.field("first"), pa.array(rows - self.starts[numbers]))
        return pc.binary_join_element_wise(values.field("name"), row_numbers.cast(pa.string()), "-")

    def _file_numbers(self, rows: Ints | Sequence[int]) -> Ints:
        return np.searchsorted(self.starts, rows, side="right") - 1

    def schema(self, columns: Sequence[str], texts: Collection[str] = ()) -> pa.Schema:
        """Return columns with types that fit all files. Raises DataError if there are none."""
        kinds = {name: pa.string() if name == ID else values.type for name, values in self.computed.items()}
        fitting = pa.schema(list(kinds.items()))
        as_text = {*texts} if format_of(self.files[0].entry.path) == "CSV" else set[str]()
        paths: dict[pa.Schema, AnyPath] = {}
        for file in self.files:
            paths.setdefault(file.schema, file.entry.path)
        for schema, path in paths.items():
            fields = [field.with_type(pa.string()) if field.name in as_text else field for field in schema]
            stored = pa.schema([field for field in fields if field.name in columns and field.name not in kinds])
            try:
                fitting = pa.unify_schemas([fitting, stored], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(f"{path} does not fit the files before it: {first_line(error)}") from error
        return pa.schema([fitting.field(name) for name in columns])


def table_files(entries: Sequence[FileEntry], root: AnyPath, name: str = "", prefix: str = "") -> Source:
    """Open the files of one table, which have the same columns.

    `key=value` folders above them are columns, too, and so are ids where the files have none: a row's file and number.

    Args:
        entries: The files.
        root: The folder that names of rows are relative to.
        name: For messages; by default the file or the folder.
        prefix: What begins the names of all rows; by default the name of each row's file.

    Raises:
        DataError: A file is unreadable, or has other columns than the first or incompatible types.
    """
    formats = {format_of(entry.path): entry.path for entry in entries}
    if len(formats) > 1:
        first, second = list(formats.values())[:2]
        raise DataError(f"{first} and {second} have different formats; give files of one format")
    remote = isinstance(root, RemotePath)
    small = remote and sum(entry.size for entry in entries) <= CONTENT_BYTES
    look = partial(_look_parquet, whole=small) if formats.keys() & {"Parquet", None} else _look_stream
    files = list(side_by_side(look, entries, remote=remote))
    if sum(file.footer.n_bytes for file in files if file.footer) > FOOTER_BYTES:
        files = [replace(file, footer=file.footer and replace(file.footer, stored=None)) for file in files]
    names = files[0].schema.names
    for file in files:
        if sorted(file.schema.names) != sorted(names):
            columns = f"columns {', '.join(file.schema.names)}, but {files[0].entry.path} has {', '.join(names)}"
            raise DataError(f"{file.entry.path} has the {columns}")
    relative = [_relative(entry.path, root) for entry in entries]
    lengths = [sum(file.group_rows) for file in files]
    computed = _hive_columns(relative, names)
    if not {ID, "id"} & {*names, *computed}:
        counts = Counter[str]()
        shards = []
        for path, n in zip(relative, lengths, strict=True):
            shard = prefix or str(path.with_name(partition_name(stem_of(path))))
            shards.append({"name": shard, "first": counts[shard]})
            counts[shard] += n
        computed[ID] = pa.array(shards)
    source = Source(
        name=name or str(entries[0].path if len(entries) == 1 else root),
        root=root,
        columns=[*names, *computed],
        ends=np.cumsum([n for file in files for n in file.group_rows], dtype=np.int64),
        n_bytes=sum(file.n_bytes for file in files),
        identity=[[file.entry.path.name, file.digest, n] for file, n in zip(files, lengths, strict=True)],
        files=files,
        starts=np.cumsum([0, *lengths], dtype=np.int64),
        computed=computed,
    )
    source.schema(source.columns)
    return source


def _look_parquet(entry: FileEntry, *, whole: bool) -> _TableFile:
    try:
        footer = read_footer(entry.path, whole=whole)
    except UnopenedError as error:
        if format_of(entry.path) is not None or not Path(str(entry.path)).suffix:
            raise
        raise DataError(f"{entry.path} is not a table; expected a name that ends in {', '.join(FORMATS)}") from error
    groups = footer.groups
    n_bytes = sum(group.total_byte_size for group in groups)
    return _TableFile(entry, footer.schema, tuple(group.num_rows for group in groups), n_bytes, footer.digest, footer)


def _look_stream(entry: FileEntry) -> _TableFile:
    """Read a file once, to count its rows and to find types that fit all values of each column."""
    kinds: dict[str, pa.DataType] = {}
    n_rows = n_bytes = 0
    kind, digest = format_of(entry.path), hashlib.blake2b(digest_size=16)
    for table in stream_tables(entry):
        for content in _stored_bytes(table) if kind in ("CSV", "JSON") else ():
            digest.update(content)
        for name in table.column_names:
            column = table.column(name)
            before = kinds.get(name, pa.null())
            kinds[name] = wider(before, narrowest(column) if kind == "CSV" and before != pa.string() else column.type)
        n_rows, n_bytes = n_rows + len(table), n_bytes + table.nbytes
    version = f"{entry.size} {digest.hexdigest()}"
    return _TableFile(entry, pa.schema(list(kinds.items())), (n_rows,), n_bytes, version)


def _stored_bytes(table: pa.Table) -> Iterator[Any]:
    """Yield the bytes of a table: the names and types of its columns, then their values."""
    yield str(table.schema).encode()
    for column in table.columns:
        for chunk in column.chunks:
            yield from filter(None, chunk.buffers())


def _stream_spans(entry: FileEntry, rows: Ints, schema: pa.Schema) -> Iterator[RowSpan]:
    """Yield some rows of a file that is read from its start; those that are not reached are unreadable."""
    done = start = 0
    try:
        if file_entry(entry.path) not in ([], [entry]):
            raise changed_file(entry.path)
        for table in stream_tables(entry, schema):
            picked = picked_rows(table, rows[done:] - start)
            if len(picked):
                yield RowSpan(len(picked), picked)
            done, start = done + len(picked), start + len(table)
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
        columns[name] = pa.array(texts, pa.string()).cast(pa.int64() if whole else pa.string())
    return columns


def image_files(
    folder: AnyPath, entries: Sequence[FileEntry], labels: Sequence[int] | None = None, name: str = ""
) -> Source:
    """Return image files as rows: example_id (the path relative to the folder), image (its file) and label, if known.

    The files are taken as they are listed, without reading them.

    Raises:
        DataError: A name is not UTF-8.
    """
    names = [str(_relative(entry.path, folder)) for entry in entries]
    sizes = [entry.size for entry in entries]
    rows = sorted(zip(names, sizes, *([] if labels is None else [labels]), strict=True))
    try:
        paths = pa.array([row[0] for row in rows], pa.string())
    except UnicodeEncodeError as error:
        raise DataError(f"{folder}: the name {error.object!r} is not valid UTF-8; rename it") from error
    files = pa.StructArray.from_arrays([pa.nulls(len(paths), pa.binary()), paths], ["bytes", "path"])
    columns = {ID: paths, "image": files}
    if labels is not None:
        columns["label"] = pa.array([row[2] for row in rows], pa.int32())
    content = "".join("\0".join(map(str, row)) + "\n" for row in rows)
    return Source(
        name=name or str(folder),
        root=folder,
        columns=list(columns),
        ends=np.arange(1, len(rows) + 1),  # reading files costs the same in any order
        n_bytes=sum(max(size, 0) for size in sizes),
        identity=[len(rows), hashlib.sha256(content.encode()).hexdigest()],
        rows=pa.table(columns),
    )


def open_folder(location: AnyPath, entries: Sequence[FileEntry] | None = None) -> Source:
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
    tables = table_entries(entries, images=bool(images)) or (entries if alone and not images else [])
    if not tables and not images:
        kinds = f"no tables ({' '.join(FORMATS)}) and no images ({' '.join(IMAGE_SUFFIXES)})"
        raise DataError(f"there are {kinds} in {location}")
    source = table_files(tables, root) if tables else image_files(root, images)
    if source.n_rows == 0:
        raise DataError(f"{location} has no rows")
    return source


def open_rows(location: AnyPath) -> list[dict[str, Any]]:
    """Read all rows of a table, such as examples of a prompt. Raises as open_folder does."""
    source = open_folder(location)
    columns = [name for name in source.columns if name != ID]
    rows: list[dict[str, Any]] = source.table(columns, columns).to_pylist()
    return rows


def table_entries(entries: Iterable[FileEntry], *, images: bool = False) -> list[FileEntry]:
    """Return those files that are tables: of columnar formats if there are any, else of text formats.

    Args:
        entries: The files.
        images: Whether there are images, next to which text files are notes.
    """
    tables = [entry for entry in entries if format_of(entry.path)]
    for kind in ("Parquet", "Arrow", "ORC"):
        columnar = [entry for entry in tables if format_of(entry.path) == kind]
        if columnar:
            return columnar
    return [] if images else tables


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
            raise DataError(f"{location} does not exist")
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


def _relative(path: AnyPath, folder: AnyPath) -> PurePath:
    """Return a path relative to a folder that contains it; a file's name where it is the folder itself."""
    parts = path.parts[len(folder.parts) :]
    return PurePath(*parts) if parts else PurePath(path.name)
