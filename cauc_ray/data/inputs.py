"""The input of a run: Parquet rows with an example_id and the columns that the models read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cauc_ray.data.files import open_parquet, parquet_files
from cauc_ray.errors import DataError
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Ints


@dataclass(frozen=True, slots=True)
class InputBlock:
    """Some rows of the input.

    example_ids: str (n,).   labels: int32 (n,), UNKNOWN_LABEL where there is none, or None without such a column.
    columns: all of the input's columns as models read them.   n_bytes: what these take in memory.
    """

    example_ids: list[str]
    labels: Ints | None
    columns: dict[str, npt.NDArray[Any]]
    n_bytes: int


class RunInput:
    """Parquet files with one schema, read a block of rows at a time."""

    def __init__(self, path: str | Path) -> None:
        """Open every file's footer. Raises DataError when one is unreadable, without example_id or unlike the first."""
        self.path = Path(path)
        self.files = parquet_files(self.path)
        self.rows_by_file: dict[str, int] = {}
        columns: list[str] | None = None
        for file in self.files:
            with open_parquet(file) as opened:
                names = sorted(opened.schema_arrow.names)
                self.rows_by_file[file.name if self.path.is_file() else str(file.relative_to(self.path))] = (
                    opened.metadata.num_rows
                )
            if "example_id" not in names:
                raise DataError(f"{file} has no column 'example_id'; it has {', '.join(names)}")
            if columns is not None and names != columns:
                raise DataError(
                    f"{file} has the columns {', '.join(names)}, but {self.files[0]} has {', '.join(columns)}"
                )
            columns = names
            _refuse_null_ids(file)
        self.n_rows = sum(self.rows_by_file.values())
        if self.n_rows == 0:
            raise DataError(f"{self.path} holds no rows")

    def blocks(self, rows: int) -> Iterator[InputBlock]:
        """Yield blocks of at most so many rows, in the order of the files. Raises DataError naming a bad file."""
        for file in self.files:
            with open_parquet(file) as opened:
                yield from _file_blocks(file, opened, rows)


def _refuse_null_ids(file: Path) -> None:
    """Raise DataError where the file's statistics count null ids: better now than in the middle of a run."""
    with open_parquet(file) as opened:
        for group in range(opened.metadata.num_row_groups):
            columns = opened.metadata.row_group(group)
            column = next(
                c for c in map(columns.column, range(columns.num_columns)) if c.path_in_schema == "example_id"
            )
            if column.statistics is not None and column.statistics.null_count:
                raise DataError(f"{file}: a row has no example_id")


def _file_blocks(file: Path, opened: pq.ParquetFile, rows: int) -> Iterator[InputBlock]:
    try:
        for batch in opened.iter_batches(batch_size=rows):
            yield _block(file, pa.Table.from_batches([batch]))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {(str(error).splitlines() or ['damaged'])[0]}") from error


def _block(file: Path, table: pa.Table) -> InputBlock:
    ids = table.column("example_id")
    if ids.null_count:
        raise DataError(f"{file}: a row has no example_id")
    labels = None
    if "label" in table.column_names:
        column = table.column("label")
        try:
            known = column.cast(pa.int32())
        except pa.ArrowException as error:
            raise DataError(f"{file}: column 'label' ({column.type}) does not hold numbers of options") from error
        if pc.any(pc.less(known, 0)).as_py():
            raise DataError(f"{file}: column 'label' holds negative numbers; leave unknown labels null")
        labels = known.fill_null(UNKNOWN_LABEL).to_numpy()
    example_ids = [str(example) for example in ids.to_pylist()]
    columns = {}
    for name in table.column_names:
        try:
            columns[name] = column_to_numpy(table.column(name))
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise DataError(f"{file}: column {name!r} cannot be given to a model: {error}") from error
    columns["example_id"] = np.array(example_ids, dtype=object)
    return InputBlock(example_ids, labels, columns, table.nbytes)


def column_to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column as models read it: (n,), (n, d) for lists of one length, else an array of objects.

    >>> column_to_numpy(pa.chunked_array([[[1, 2], [3, 4]]])).shape
    (2, 2)
    """
    array = column.combine_chunks()
    kind = array.type
    if isinstance(kind, pa.FixedShapeTensorType):
        tensors: npt.NDArray[Any] = array.to_numpy_ndarray()
        return tensors
    if pa.types.is_fixed_size_list(kind):
        values: npt.NDArray[Any] = array.flatten().to_numpy(zero_copy_only=False)
        return values.reshape(len(array), kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        rows = [np.asarray(row) for row in array.to_numpy(zero_copy_only=False)]
        return as_column(rows)
    plain: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return plain


def as_column(rows: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Stack rows of one shape; keep rows of several as an array of objects."""
    if rows and all(row.shape == rows[0].shape and row.dtype != object for row in rows):
        return np.stack(rows)
    column = np.empty(len(rows), dtype=object)
    for place, row in enumerate(rows):
        column[place] = row
    return column


def concat_column(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Join one column's values from several blocks, which may differ in whether their lists had one length."""
    if len(parts) == 1:
        return parts[0]
    if len({(part.shape[1:], part.dtype == object) for part in parts}) == 1:
        return np.concatenate(parts)
    return as_column([row for part in parts for row in part])
