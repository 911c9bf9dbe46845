"""The input of a run: rows with an example_id and the columns that the models read, in numbered blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import PurePosixPath
from typing import Protocol

import numpy as np
import pyarrow as pa

from cauc_ray.data.benchmarks import partition_name
from cauc_ray.data.blocks import BlockSource, InputBlock, id_texts, table_block
from cauc_ray.data.rows import IMAGE_SUFFIXES, TABLES, ImageRows, TableRows, is_image, open_tables, require_one_format
from cauc_ray.errors import DataError
from cauc_ray.files.parquet import UnopenedError, UnreadableError, is_parquet, parquet_files
from cauc_ray.files.paths import AnyPath, RemotePath, absolute, files_below, path_inside, path_of, readable
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Ints

# The column that names rows.
ID = "example_id"
# Reading is considered hung if a block takes longer.
DEADLINE_S = 600.0


class RunInput(Protocol):
    """The input of a run."""

    @property
    def path(self) -> AnyPath:
        """Where the rows come from, for display."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns; None if they are unknown until they are read."""

    @property
    def n_rows(self) -> int | None:
        """The number of rows; None if it is unknown until they are read."""

    @property
    def row_bytes(self) -> float:
        """A row's mean size in bytes, uncompressed; 0 if unknown."""

    @property
    def identity(self) -> dict[str, int]:
        """Numbers of rows by a text that changes with the content; a resumed run compares it."""

    def source(self, block_rows: int, columns: frozenset[str] | None = None) -> BlockSource:
        """Return blocks of at most `block_rows` rows.   columns: those to read if they exist, None for all."""


def open_input(path: str | AnyPath, names: Sequence[str] | None = None) -> RunInput:
    """Open a run's input by its path or URI: one file, or all files of one kind in a folder and its subfolders.

    names: of the options, which the column of labels may use.

    In a folder these are Parquet files if there are any, else images, else CSV or JSONL files. The identity of tables
    is the number of rows by file, named relative to the folder; that of images is all names and sizes. CSV and JSONL
    files are read once to count rows and to find types. Raises DataError, in one line, if no such file exists, and for
    files that are unreadable or inconsistent.

    >>> open_input("absent.parquet")
    Traceback (most recent call last):
    cauc_ray.errors.DataError: there is no file absent.parquet
    """
    path = path_of(path)
    with readable(path):
        if not path.is_dir():
            alone = path.is_file() and is_image(path)
            return _images(path, path.parent, [path]) if alone else _tables(path, parquet_files(path), names)
        # Links to folders are not followed: they may form cycles, or, as in /proc, lead to all of the machine.
        files = list(files_below(path))
        images = list(filter(is_image, files))
        texts = [] if images else [file for file in files if file.suffix.lower() in TABLES]
        if tables := list(filter(is_parquet, files)) or texts:
            return _tables(path, tables, names)
        if not images:
            raise DataError(
                f"there are no tables ({' '.join(TABLES)}) and no images ({' '.join(IMAGE_SUFFIXES)}) in {path}"
            )
        return _images(path, path, images)


def _tables(path: AnyPath, files: Sequence[AnyPath], labels: Sequence[str] | None) -> FileInput:
    require_one_format(files)
    rows = open_tables(list(map(absolute, files)), ID)
    rows.schema(rows.columns)  # raises if the files' columns are inconsistent
    if rows.n_rows == 0:
        raise DataError(f"{path} has no rows")
    names = [path_inside(file, path) or file.name for file in files]
    identity = dict(zip(names, np.diff(rows.starts).tolist(), strict=True))
    # A group ends after at least this many blocks, since the last block of a group may be short.
    row_bytes = rows.n_bytes / rows.n_rows
    return FileInput(path, rows.n_rows, row_bytes, identity, rows, rows.ends, 8, labels, _row_names(identity))


def _row_names(lengths: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return what the ids of each file's rows begin with, and the number of its first row, as a dataset's rows have.

    lengths: numbers of rows by file.
    """
    found: list[tuple[str, int]] = []
    rows = Counter[str]()
    for file, length in lengths.items():
        path = PurePosixPath(file)
        name = str(path.with_name(partition_name(path.stem)))
        found.append((name, rows[name]))
        rows[name] += length
    return found


def _images(path: AnyPath, folder: AnyPath, files: Iterable[AnyPath]) -> FileInput:
    rows = ImageRows(absolute(folder), sorted(path_inside(file, folder) for file in files))
    n, digest = rows.identity
    row_bytes = sum(size for size in rows.sizes if size > 0) / n
    # Reading files costs the same in any order, so groups are small and several processes share even a small input.
    return FileInput(path, n, row_bytes, {f"{n} images, {digest[:16]}": n}, rows, np.arange(1, n + 1), 4)


@dataclass(frozen=True, slots=True)
class FileInput:
    """Files as a run's input.

    ends: int64, the numbers of rows after which a group may end.   group_blocks: the least blocks in a group.
    labels: names of the options, by which a column of labels may call them.   row_names: of tables, what the ids of
    each file's rows begin with if they have none of their own, and the number of its first row.
    """

    path: AnyPath
    n_rows: int
    row_bytes: float
    identity: dict[str, int]
    rows: TableRows | ImageRows
    ends: Ints
    group_blocks: int
    labels: Sequence[str] | None = None
    row_names: Sequence[tuple[str, int]] = ()

    @property
    def columns(self) -> Sequence[str]:
        """The columns."""
        return self.rows.columns

    @property
    def ids(self) -> str | None:
        """The column of example ids, None if rows are named by their numbers."""
        return next((name for name in (ID, "id") if name in self.columns), None)

    def source(self, block_rows: int, columns: frozenset[str] | None = None) -> FileBlocks:
        """Return blocks of at most `block_rows` rows; the process that reads them opens the files again."""
        starts, firsts = [0], [0]
        while starts[-1] < self.n_rows:
            end = int(np.searchsorted(self.ends, starts[-1] + self.group_blocks * block_rows))
            starts.append(int(self.ends[min(end, len(self.ends) - 1)]))
            firsts.append(firsts[-1] - (starts[-2] - starts[-1]) // block_rows)
        read = tuple(name for name in self.columns if columns is None or name in (*columns, self.ids))
        return FileBlocks(self, read, tuple(starts), tuple(firsts), block_rows, DEADLINE_S)


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """Blocks of files; picklable.

    columns: those to read.   starts: each group's first row, then the number of all rows.   firsts: the number of each
    group's first block, then the number of all blocks.
    """

    files: FileInput
    columns: tuple[str, ...]
    starts: tuple[int, ...]
    firsts: tuple[int, ...]
    block_rows: int
    deadline_s: float | None

    @property
    def name(self) -> str:
        """The path."""
        return str(self.files.path)

    @property
    def anywhere(self) -> bool:
        """Whether the path is a URI."""
        return isinstance(self.files.path, RemotePath)

    @property
    def rows(self) -> TableRows | ImageRows:
        """The files' rows."""
        return self.files.rows

    @property
    def n_groups(self) -> int:
        """The number of groups."""
        return len(self.starts) - 1

    def blocks(self, group: int, seen: Collection[int] = ()) -> Iterator[tuple[int, InputBlock]]:
        """Yield a group's blocks, read as a stream; for seen blocks at its start and end, only the ids are read."""
        numbers = range(self.firsts[group], self.firsts[group + 1])
        wanted = [number for number in numbers if number not in seen]

        def columns(number: int) -> tuple[str, ...]:
            # A streamed file would be read twice if the blocks before were read with fewer columns.
            among = bool(wanted) and (self.rows.streamed or wanted[0] <= number <= wanted[-1])
            return self.columns if among else () if self.files.ids is None else (self.files.ids,)

        for names, run in groupby(numbers, columns):
            yield from self._read(group, list(run), names)

    def _read(self, group: int, numbers: list[int], columns: tuple[str, ...]) -> Iterator[tuple[int, InputBlock]]:
        """Read neighbouring blocks."""

        def span(number: int) -> tuple[int, int]:
            start = self.starts[group] + (number - self.firsts[group]) * self.block_rows
            return start, min(start + self.block_rows, self.starts[group + 1])

        tables: Iterator[pa.Table] | None = None
        for number in numbers:
            start, end = span(number)
            if not columns:  # rows without ids of their own are named by their numbers
                yield number, InputBlock(self._names(start, end), None, {}, 0)
                continue
            if tables is None:
                tables = self.rows.tables(columns, np.arange(start, span(numbers[-1])[1]), self.block_rows)
            try:
                table = next(tables)
            except UnreadableError as error:
                tables = None
                yield number, self._unreadable(start, end, error)
            else:
                if ID not in columns:
                    table = table.append_column(ID, self._ids(table, start, end))
                yield number, table_block(table, self.rows.name_of, start, self.files.labels)

    def _ids(self, table: pa.Table, start: int, end: int) -> pa.ChunkedArray:
        """Return the ids of a table's rows from start to end."""
        if self.files.ids is not None:
            return table.column(self.files.ids)
        return pa.chunked_array([self._names(start, end)], pa.string())

    def _names(self, start: int, end: int) -> list[str]:
        """Return ids for rows without ids: the file's name and the row's number, as in a dataset."""
        assert isinstance(self.rows, TableRows)
        located = map(self.rows.locate, range(start, end))
        named = ((*self.files.row_names[file], row) for file, row in located)
        return [f"{name}-{first + row}" for name, first, row in named]

    def _unreadable(self, start: int, end: int, error: UnreadableError) -> InputBlock:
        """Return a block that cannot be read, with its ids if these can be read, else named by file and row."""
        assert isinstance(self.rows, TableRows)
        ids: list[str] = []
        names = list(self.files.identity)
        may_return = isinstance(error, UnopenedError)
        ends = self.rows.ends
        for first, last in pairwise([start, *ends[(ends > start) & (ends < end)].tolist(), end]):
            try:
                for table in self.rows.tables(self.columns, np.arange(first, last), self.block_rows):
                    ids += id_texts(self._ids(table, first, last)).tolist()
            except UnreadableError as other:
                may_return |= isinstance(other, UnopenedError)
                located = map(self.rows.locate, range(first, last))
                ids += [f"{names[file]}:row {row}" for file, row in located]
        labels = np.full(len(ids), UNKNOWN_LABEL, np.int32) if "label" in self.rows.columns else None
        return InputBlock(ids, labels, {}, 0, str(error), may_return=may_return)
