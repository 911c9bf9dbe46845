"""Blocks of input rows, and the conversion of Arrow columns to what models read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.values import as_column, objects
from cauc_ray.errors import DataError
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Bools, Ints

# Blocks that were read before, by number, with the digests of their ids; "" if the ids could not be read.
Seen: TypeAlias = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class InputBlock:
    """Some rows of the input.

    example_ids: str (n,).   labels: int32 (n,), UNKNOWN_LABEL if unknown, or None without such a column.
    columns: all of the input's columns as models read them.   n_bytes: their size in memory.
    unreadable: why the columns could not be read, in one line; columns is then {}, and example_ids still has every row.
    may_return: the file could not be opened, but may be available again later.
    """

    example_ids: list[str]
    labels: Ints | None
    columns: dict[str, npt.NDArray[Any]]
    n_bytes: int
    unreadable: str | None = None
    may_return: bool = False

    def where(self, mask: Bools) -> InputBlock:
        """Return the rows selected by a mask (n,)."""
        return replace(
            self,
            example_ids=[example for example, wanted in zip(self.example_ids, mask, strict=True) if wanted],
            labels=None if self.labels is None else self.labels[mask],
            columns={name: column[mask] for name, column in self.columns.items()},
            n_bytes=int(self.n_bytes * mask.mean()),
        )


class BlockSource(Protocol):
    """The blocks of an input in groups; picklable, so that any process can read from it.

    One process reads a group from start to end; several groups are read in parallel.
    """

    @property
    def name(self) -> str:
        """A name for messages."""

    @property
    def anywhere(self) -> bool:
        """Return whether every node can read it, not only the node on which the run was started."""

    @property
    def deadline_s(self) -> float | None:
        """Return after how long without a block it is considered hung, in seconds; None for no limit."""

    @property
    def n_groups(self) -> int:
        """The number of groups."""

    def blocks(self, group: int, seen: Collection[int] = ()) -> Iterator[tuple[int, InputBlock]]:
        """Yield a group's blocks with their numbers, which rise and are the same every time.

        seen: blocks of which only the ids are needed; they may be yielded without columns, or left out if the source
        cannot have changed. Numbers count all blocks of the input from 0. Rows that cannot be read are yielded as
        unreadable blocks. Raises DataError for invalid content (a null id, a negative label, a column that no model can
        read).
        """


def other_rows(where: str, why: str) -> DataError:
    """Return the error for an input that has changed since it was first read."""
    return DataError(
        f"{where} returned other rows than before: {why}. An input must return the same rows in the same order every "
        "time: do not change its files; seed and sort a Ray Dataset, or write it to files first. Resume with the "
        "original input, or start a new run in another folder"
    )


def table_block(
    table: pa.Table, name_of: Callable[[int], str], start: int = 0, names: Sequence[str] | None = None
) -> InputBlock:
    """Return a table's rows as a block.   name_of: names a row by its number.   start: the first row's number.

    names: of the options, which the column of labels may use.

    Raises DataError for invalid content, naming a row, or the block's first row if a column is invalid.
    """
    ids = table.column("example_id")
    if ids.null_count:
        raise DataError(f"{name_of(start + pc.index(ids.is_null(), True).as_py())}: the row has no example_id")
    labels = _labels(table.column("label"), name_of, start, names) if "label" in table.column_names else None
    columns = {name: model_column(table.column(name), name, name_of(start)) for name in table.column_names}
    return InputBlock(columns["example_id"].tolist(), labels, columns, table.nbytes)


def model_column(column: pa.ChunkedArray, name: str, where: str) -> npt.NDArray[Any]:
    """Return a column as models read it, or ids as str. Raises DataError, prefixed with where, if that fails."""
    try:
        return id_texts(column) if name == "example_id" else column_to_numpy(column)
    except (ValueError, TypeError, pa.ArrowException) as error:
        raise DataError(f"{where}: column {name!r} ({column.type}) cannot be converted for a model: {error}") from error


def _labels(
    column: pa.ChunkedArray, name_of: Callable[[int], str], start: int, names: Sequence[str] | None = None
) -> Ints:
    """Return labels, int32 (n,), UNKNOWN_LABEL for null.   names: of the options, which may stand for their numbers."""
    if names is not None and (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        numbers = pc.cast(pc.index_in(column, value_set=pa.array(names, column.type)), pa.string())
        column = pc.coalesce(numbers, column)
    try:
        known = column.cast(pa.int32())
    except pa.ArrowException as error:
        row = next((row for row in range(len(column)) if not _is_int32(column[row])), 0)
        raise DataError(f"{name_of(start + row)}: column 'label' ({column.type}) is not an integer column") from error
    negative = pc.index(pc.less(known, 0), True).as_py()
    if negative >= 0:
        raise DataError(
            f"{name_of(start + negative)}: column 'label' has negative numbers; use null for unknown labels"
        )
    labels: Ints = known.fill_null(UNKNOWN_LABEL).to_numpy()
    return labels


def _is_int32(value: pa.Scalar) -> bool:
    try:
        value.cast(pa.int32())
    except pa.ArrowException:
        return False
    return True


def ids_digest(example_ids: Sequence[str | None]) -> str:
    """Return a hash of rows' ids in order, with which a block is compared when it is read again."""
    return hashlib.blake2b(json.dumps(list(example_ids)).encode(), digest_size=16).hexdigest()


def id_texts(ids: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return ids as str, an array of objects (n,). Raises ArrowException if bytes are not UTF-8."""
    if pa.types.is_string(ids.type) or pa.types.is_large_string(ids.type):
        return column_to_numpy(ids)
    if pa.types.is_binary(ids.type) or pa.types.is_large_binary(ids.type) or pa.types.is_fixed_size_binary(ids.type):
        return column_to_numpy(ids.cast(pa.binary()).cast(pa.string()))  # an ArrowException if they are not UTF-8
    return np.array([None if example is None else str(example) for example in ids.to_pylist()], dtype=object)


def column_to_numpy(column: pa.ChunkedArray) -> npt.NDArray[Any]:
    """Return a column as models read it: (n,), (n, d) for lists of one length, else an array of objects.

    A null becomes NaN or NaT if its type has one, NaN among integers, whose values keep their type, and else None.

    >>> column_to_numpy(pa.chunked_array([[[1, 2], [3, 4]]])).shape
    (2, 2)
    """
    array = column.combine_chunks()
    kind = array.type
    fixed = pa.types.is_fixed_size_list(kind)
    values: npt.NDArray[Any]
    if isinstance(kind, pa.FixedShapeTensorType):
        values = array.to_numpy_ndarray()
        return values
    if array.null_count and (pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        # Arrow would change the type of all rows, including those that reach a model without the null.
        return nulls_between(
            array, column_to_numpy(column.drop_null()), np.float64(np.nan) if pa.types.is_integer(kind) else None
        )
    if not (fixed or pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        values = array.to_numpy(zero_copy_only=False)
        return values
    if (fixed or len(array)) and not array.null_count:
        whole = array.flatten()
        numbers = pa.types.is_integer(kind.value_type) or pa.types.is_floating(kind.value_type)
        width = kind.list_size if fixed else len(whole) // len(array)
        if fixed or (numbers and not whole.null_count and pc.all(pc.equal(array.value_lengths(), width)).as_py()):
            # At once: row by row takes several times as long.
            values = whole.to_numpy(zero_copy_only=False)
            return values.reshape(len(array), width)
    return as_column([row if row is None else np.asarray(row) for row in array.to_numpy(zero_copy_only=False)])


def nulls_between(column: pa.Array | pa.ChunkedArray, known: Iterable[Any], null: Any = None) -> npt.NDArray[Any]:
    """Return a column's values with a replacement for each null, an array of objects (n,)."""
    values = iter(known)
    return objects([next(values) if valid else null for valid in column.is_valid().to_pylist()])
