"""Blocks of rows read from Parquet files, whatever state these are in by then."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.data.blocks import InputBlock, read_labels, table_block
from cauc_ray.data.files import first_line, open_parquet
from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Ints


class RowGroup(NamedTuple):
    """A Parquet row group.   file: the number of its file.   start: its first row's number there."""

    file: int
    number: int
    start: int
    n_rows: int


@dataclass(frozen=True, slots=True)
class _Rows:
    """Neighbouring rows of one file.

    name: of the file, in ids of rows whose own cannot be read.   start: the first row's number in the file.
    table: the rows; where unreadable says why not, those columns of them that could be read, or None.
    gone: the file could not be opened.
    """

    file: Path
    name: str
    start: int
    n: int
    table: pa.Table | None = None
    unreadable: str | None = None
    gone: bool = False

    def slice(self, start: int, n: int) -> _Rows:
        table = None if self.table is None else self.table.slice(start, n)
        return replace(self, start=self.start + start, n=n, table=table)


@dataclass(frozen=True, slots=True)
class ParquetSource:
    """Blocks of Parquet files; plain.

    groups: consecutive row groups, over file ends where files are small.   firsts: the number of each group's first
    block, and after the last group's the number of all blocks.   schema: the types that all files' columns widen to.
    """

    files: tuple[Path, ...]
    names: tuple[str, ...]
    schema: pa.Schema
    groups: tuple[tuple[RowGroup, ...], ...]
    firsts: tuple[int, ...]
    block_rows: int
    done: frozenset[int]

    @property
    def n_groups(self) -> int:
        """How many groups there are."""
        return len(self.groups)

    def blocks(self, group: int) -> Iterator[tuple[int, InputBlock]]:
        """Yield a group's blocks; row groups that only done ones need are not read, the others are as a stream."""
        number, end = self.firsts[group], self.firsts[group + 1]
        wanted = [block for block in range(number, end) if block not in self.done]
        if not wanted:
            return
        n_left = sum(row_group.n_rows for row_group in self.groups[group])
        held: list[_Rows] = []
        missing = min(self.block_rows, n_left)
        for rows in self._rows(group):
            taken = 0
            while taken < rows.n:
                held.append(rows.slice(taken, min(missing, rows.n - taken)))
                taken += held[-1].n
                missing -= held[-1].n
                if missing == 0:
                    if number not in self.done:
                        yield number, _block(held)
                    if number == wanted[-1]:
                        return
                    n_left -= self.block_rows
                    number, held, missing = number + 1, [], min(self.block_rows, n_left)

    def _rows(self, group: int) -> Iterator[_Rows]:
        """Yield all of a group's rows in order; those that only done blocks need without their content."""
        start = 0
        needed: list[bool] = []
        for row_group in self.groups[group]:
            first = self.firsts[group] + start // self.block_rows
            start += row_group.n_rows
            last = self.firsts[group] + (start - 1) // self.block_rows
            needed.append(row_group.n_rows > 0 and any(block not in self.done for block in range(first, last + 1)))
        of_files = groupby(zip(self.groups[group], needed, strict=True), lambda pair: pair[0].file)
        for file, pairs in of_files:
            yield from self._of_file(file, list(pairs))

    def _of_file(self, file: int, row_groups: Sequence[tuple[RowGroup, bool]]) -> Iterator[_Rows]:
        path = self.files[file]
        parts = [_Rows(path, self.names[file], row_group.start, row_group.n_rows) for row_group, _ in row_groups]
        if not any(needed for _, needed in row_groups):
            yield from parts
            return
        try:
            opened = open_parquet(path, streamed=True)
        except DataError as error:
            yield from (replace(part, unreadable=str(error), gone=True) for part in parts)
            return
        with opened:
            for part, (row_group, needed) in zip(parts, row_groups, strict=True):
                if needed:
                    yield from self._read(opened, row_group, part)
                else:
                    yield part

    def _read(self, opened: pq.ParquetFile, row_group: RowGroup, whole: _Rows) -> Iterator[_Rows]:
        """Yield a row group's rows as they are decoded; from where that fails on, what can be read of them."""
        if not _is_there(row_group, opened, self.schema):
            yield replace(whole, unreadable=f"{whole.file} has changed since the run opened it")
            return
        n_read = 0
        reason = "it ends too early"
        try:
            for batch in opened.iter_batches(batch_size=self.block_rows, row_groups=[row_group.number]):
                table = _conformed(pa.Table.from_batches([batch]), self.schema, whole.file)
                yield replace(whole.slice(n_read, len(table)), table=table)
                n_read += len(table)
        except (pa.ArrowException, OSError) as error:
            reason = first_line(error)
        if n_read < whole.n:
            reason = f"{whole.file} cannot be read in row group {row_group.number}: {reason}"
            rest = whole.slice(n_read, whole.n - n_read)
            yield replace(rest, table=_names_only(opened, row_group, n_read), unreadable=reason)


def _is_there(row_group: RowGroup, opened: pq.ParquetFile, schema: pa.Schema) -> bool:
    """Say whether a file that is opened again has a row group as before; it may have been written anew."""
    metadata = opened.metadata
    if metadata.num_row_groups <= row_group.number or sorted(opened.schema_arrow.names) != sorted(schema.names):
        return False
    return bool(metadata.row_group(row_group.number).num_rows == row_group.n_rows)


def _block(held: Sequence[_Rows]) -> InputBlock:
    """Return rows of one or several files as a block. Raises DataError naming the file of bad content."""
    if not any(rows.unreadable for rows in held):
        try:
            return table_block(pa.concat_tables([rows.table for rows in held]), str(held[0].file))
        except DataError:
            held = [_validated(rows) for rows in held]
            for rows in held:
                if not rows.unreadable:
                    table_block(rows.table, str(rows.file))
            if not any(rows.unreadable for rows in held):
                raise
    reason = next(rows.unreadable for rows in held if rows.unreadable)
    labels = [_labels_if_readable(rows) for rows in held]
    return InputBlock(
        example_ids=[example for rows in held for example in _ids_or_places(rows)],
        labels=None if any(part is None for part in labels) else np.concatenate([p for p in labels if p is not None]),
        columns={},
        n_bytes=0,
        unreadable=reason,
        may_return=any(rows.gone for rows in held),
    )


def _validated(rows: _Rows) -> _Rows:
    """Mark rows as unreadable whose content is not what its type says: damage may decode to anything."""
    try:
        if rows.table is not None:
            rows.table.validate(full=True)
        return rows
    except pa.ArrowException as error:
        return replace(rows, unreadable=f"{rows.file} cannot be read: {first_line(error)}")


def _ids_or_places(rows: _Rows) -> list[str]:
    places = [f"{rows.name}:row {row}" for row in range(rows.start, rows.start + rows.n)]
    if rows.table is None:
        return places
    try:
        ids = rows.table.column("example_id").to_pylist()
    except (UnicodeDecodeError, pa.ArrowException):
        return places
    return [place if example is None else str(example) for example, place in zip(ids, places, strict=True)]


def _labels_if_readable(rows: _Rows) -> Ints | None:
    if rows.table is None or "label" not in rows.table.column_names:
        return None
    try:
        return read_labels(rows.table.column("label"), rows.name)
    except DataError:
        return None


def _names_only(opened: pq.ParquetFile, row_group: RowGroup, start: int) -> pa.Table | None:
    """Return a damaged row group's example_id and label from a row on, only example_id or None where unreadable."""
    for names in (["example_id", "label"], ["example_id"]):
        try:
            # Parquet also gives a column "a.b" to who asks for "a".
            table = opened.read_row_group(row_group.number, columns=names).select(names)
        except (pa.ArrowException, OSError, KeyError):
            continue
        if len(table) == row_group.n_rows:
            return table.slice(start)
    return None


def _conformed(table: pa.Table, schema: pa.Schema, file: Path) -> pa.Table:
    """Return a file's rows in the types of all files. Raises DataError where a value has no place in these."""
    if table.schema.equals(schema):
        return table
    try:
        return table.select(schema.names).cast(schema)
    except pa.ArrowException as error:
        table.validate(full=True)  # raises another ArrowException where the value is none at all: damage
        raise DataError(f"{file} does not fit the other files: {first_line(error)}") from error
