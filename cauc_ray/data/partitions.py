"""The partitions of a dataset as published (train, validation, test): rows of tables or images, read as needed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from cauc_ray.data.image_input import read_image
from cauc_ray.data.text_files import read_csv, read_jsonl
from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import open_parquet, read_rows
from cauc_ray.numbers.types import Ints


class Partition(Protocol):
    """Numbered rows with named columns.

    source: the file or folder, for errors.   columns: the names that the rows have there.
    """

    source: str
    columns: Sequence[str]
    n_rows: int

    @property
    def identity(self) -> list[Any]:
        """Values of JSON that change when the content does: names, sizes, row counts."""

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Yield these columns of the given rows, which rise, in tables of `size` rows; the last may be shorter."""

    def place(self, row: int) -> str:
        """Name a row's file and its number there."""


class _Files:
    """Files that follow one another, and which rows lie in which."""

    def __init__(self, files: Sequence[Path], n_rows: Sequence[int]) -> None:
        self.files = list(files)
        self.source = str(files[0] if len(files) == 1 else files[0].parent)
        self.starts = np.concatenate([[0], np.cumsum(n_rows)]).astype(np.int64)
        self.n_rows = int(self.starts[-1])

    @property
    def identity(self) -> list[Any]:
        sizes = [file.stat().st_size for file in self.files]
        names = [file.name for file in self.files]
        return [list(each) for each in zip(names, sizes, np.diff(self.starts).tolist(), strict=True)]

    def place(self, row: int) -> str:
        file = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"{self.files[file]}, row {row - self.starts[file]}"


class ParquetPartition(_Files):
    """Parquet files, of which only row groups are read that hold wanted rows."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the footers. Raises DataError when a file is unreadable or the files differ in their columns."""
        counts: list[int] = []
        self.columns: Sequence[str] = []
        for file in files:
            with open_parquet(file) as opened:
                names = opened.schema_arrow.names
                counts.append(opened.metadata.num_rows)
            if self.columns and sorted(names) != sorted(self.columns):
                raise DataError(f"{file} has the columns {', '.join(names)}, but {files[0]} {', '.join(self.columns)}")
            self.columns = self.columns or names
        super().__init__(files, counts)

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the wanted rows' row groups, a batch at a time. Raises DataError naming a damaged file."""
        held: list[pa.Table] = []
        n = 0
        for piece in self._pieces(columns, rows, size):
            held.append(piece)
            n += len(piece)
            if n >= size:
                joined = join_tables(held, self.source)
                yield joined.slice(0, size)
                held, n = [joined.slice(size)], n - size
        if n:
            yield join_tables(held, self.source)

    def _pieces(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Yield the rows in tables of at most `size`."""
        for file, start, end in zip(self.files, self.starts, self.starts[1:], strict=False):
            first, last = np.searchsorted(rows, [start, end])
            if first < last:
                with open_parquet(file) as opened:
                    yield from read_rows(opened, file, rows[first:last] - start, columns, size)


def join_tables(tables: Sequence[pa.Table], source: str) -> pa.Table:
    """Put tables one after another; a column may be null or narrower in some. Raises DataError if types clash."""
    try:
        return tables[0] if len(tables) == 1 else pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"{source}: the files differ in a column's type: {first_line(error)}") from error


class TextPartition(_Files):
    """JSONL or CSV files, read whole."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Read the files. Raises DataError naming file and line when one is malformed."""
        tables = [(read_csv if file.suffix.lower() == ".csv" else read_jsonl)(file) for file in files]
        super().__init__(files, [len(table) for table in tables])
        self._table = join_tables(tables, self.source)
        self.columns: Sequence[str] = self._table.column_names

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Yield the rows from memory."""
        picked = self._table.select(list(columns))
        for start in range(0, len(rows), size):
            yield picked.take(rows[start : start + size])


class ImagePartition:
    """Image files with a label each: example_id (the file's relative path), image (its bytes) and label."""

    def __init__(self, folder: Path, names: Sequence[str], labels: Sequence[int], source: str) -> None:
        """Take the files' relative paths as they are; nothing is read."""
        self.folder = folder
        self.names = list(names)
        self.labels = np.asarray(labels, dtype=np.int32)
        self.source = source
        self.n_rows = len(self.names)
        self.columns: Sequence[str] = ("example_id", "image", "label")

    @cached_property
    def identity(self) -> list[Any]:
        """Return a hash of all files' names, labels and sizes, -1 for a file that is not there."""
        digest = hashlib.sha256()
        for name, label in zip(self.names, self.labels, strict=True):
            try:
                size = (self.folder / name).stat().st_size
            except OSError:
                size = -1
            digest.update(f"{name}\0{label}\0{size}\n".encode(errors="surrogateescape"))
        return [self.n_rows, digest.hexdigest()]

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the wanted files' bytes if `image` is among the columns; null where a file cannot be read."""
        for start in range(0, len(rows), size):
            here = rows[start : start + size]
            names = [self.names[row] for row in here]
            made = {"example_id": pa.array(names, pa.string()), "label": pa.array(self.labels[here])}
            if "image" in columns:
                made["image"] = pa.array([read_image(self.folder / name) for name in names], pa.large_binary())
            yield pa.table({column: made[column] for column in columns})

    def place(self, row: int) -> str:
        """Name the row's file."""
        return str(self.folder / self.names[row])
