"""Parquet files as a run's input: their row groups cut into groups of blocks, and read in whatever state they are."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.data.blocks import NOTHING_DONE, Done, InputBlock, id_texts, ids_digest, table_block
from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import open_parquet, parquet_files
from cauc_ray.files.paths import path_inside

# A group is cut after so many blocks, so that most blocks do not end before their time at a group's end.
_GROUP_BLOCKS = 8


class RowGroup(NamedTuple):
    """A Parquet row group.   file: its file's number.   start: its first row's number there.   facts: see _facts."""

    file: int
    number: int
    start: int
    n_rows: int
    facts: str


class ParquetInput:
    """Parquet files with the same columns, a file or all those of a folder, as a run's input.

    path: as given.   n_rows: of all files.   row_bytes: a row's mean size, uncompressed, as the footers state it.
    identity: rows by file, named relative to the folder.
    """

    def __init__(self, path: str | Path) -> None:
        """Read every file's footer. Raises DataError for one without example_id, unlike the others, or unreadable."""
        self.path = Path(path)
        self.identity: dict[str, int] = {}
        self._files = parquet_files(self.path)
        self._row_groups: list[RowGroup] = []
        self._schema: pa.Schema | None = None
        n_bytes = 0
        for number, file in enumerate(self._files):
            with open_parquet(file) as opened:
                self._add_columns(file, opened.schema_arrow)
                n_rows = 0
                for group in range(opened.metadata.num_row_groups):
                    row_group = opened.metadata.row_group(group)
                    statistics = _id_chunk(row_group).statistics
                    if statistics is not None and statistics.null_count:
                        raise DataError(f"{file}: a row has no example_id")
                    self._row_groups.append(RowGroup(number, group, n_rows, row_group.num_rows, _facts(row_group)))
                    n_rows += row_group.num_rows
                    n_bytes += row_group.total_byte_size
            self.identity[path_inside(file, self.path) or file.name] = n_rows
        self.n_rows = sum(self.identity.values())
        if self.n_rows == 0:
            raise DataError(f"{self.path} holds no rows")
        self.row_bytes = n_bytes / self.n_rows

    def source(self, block_rows: int, done: Done = NOTHING_DONE) -> ParquetSource:
        """Return the blocks of at most so many rows that are not done; files are opened again where it is read."""
        groups: list[list[RowGroup]] = [[]]
        for row_group in self._row_groups:
            if sum(held.n_rows for held in groups[-1]) >= _GROUP_BLOCKS * block_rows:
                groups.append([])
            groups[-1].append(row_group)
        firsts = [0]
        for group in groups:
            firsts.append(firsts[-1] - (-sum(held.n_rows for held in group) // block_rows))
        return ParquetSource(
            files=tuple(file.absolute() for file in self._files),
            names=tuple(self.identity),
            schema=self._schema,
            groups=tuple(map(tuple, groups)),
            firsts=tuple(firsts),
            block_rows=block_rows,
            done=dict(done),
        )

    def _add_columns(self, file: Path, schema: pa.Schema) -> None:
        """Widen the schema to a file's types; a block may hold rows of several files."""
        names = sorted(schema.names)
        if "example_id" not in names:
            raise DataError(f"{file} has no column 'example_id'; it has {', '.join(names)}")
        schema = pa.schema([pa.field(field.name, _plain(field.type)) for field in schema])
        if pa.types.is_nested(schema.field("example_id").type):
            raise DataError(f"{file}: column 'example_id' ({schema.field('example_id').type}) holds no ids")
        if self._schema is None:
            self._schema = schema
        elif names != sorted(self._schema.names):
            raise DataError(
                f"{file} has the columns {', '.join(names)}, "
                f"but {self._files[0]} has {', '.join(sorted(self._schema.names))}"
            )
        elif not schema.equals(self._schema):
            try:
                self._schema = pa.unify_schemas([self._schema, schema], promote_options="permissive")
            except pa.ArrowException as error:
                raise DataError(f"{file} does not fit the files before it: {first_line(error)}") from error


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type without how its values are laid out, in which files of one kind differ."""
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_list(kind):
        return pa.list_(_plain(kind.value_type))
    return {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}.get(kind, kind)


def _id_chunk(row_group: Any) -> Any:
    """Return what a footer states of the ids of a row group."""
    columns = (row_group.column(number) for number in range(row_group.num_columns))
    return next(column for column in columns if column.path_in_schema == "example_id")


def _facts(row_group: Any) -> str:
    """Return what a footer states of a row group: its rows and size, and where its ids are and between which values.

    It differs where a file was written anew, unless the new rows have the same sizes in bytes.
    """
    ids, bounds = _id_chunk(row_group), None
    if ids.statistics is not None and ids.statistics.has_min_max:
        bounds = (ids.statistics.min_raw, ids.statistics.max_raw)
    facts = (row_group.num_rows, row_group.total_byte_size, ids.data_page_offset, ids.total_compressed_size, bounds)
    return hashlib.blake2b(repr(facts).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class _Rows:
    """Neighbouring rows of one file.

    name: of the file, in ids of rows that are not read.   start: the first row's number in the file.
    table: the rows, None where they are not read.   unreadable: why they cannot be.   gone: the file cannot be opened.
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

    @property
    def ids(self) -> list[str]:
        if self.table is None:
            return [f"{self.name}:row {row}" for row in range(self.start, self.start + self.n)]
        ids: list[str] = id_texts(self.table.column("example_id")).tolist()
        return ids


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
    done: Done

    @property
    def n_groups(self) -> int:
        """How many groups there are."""
        return len(self.groups)

    def blocks(self, group: int) -> Iterator[tuple[int, InputBlock]]:
        """Yield a group's blocks, read as a stream; of row groups that only done blocks need, no more than the ids."""
        numbers = range(self.firsts[group], self.firsts[group + 1])
        last = max((number for number in numbers if self._columns(number)), default=-1)
        if last < 0:
            return
        for number, held in zip(numbers, _cut(self._rows(group), self.block_rows), strict=False):
            if number in self.done:
                self._require_committed(number, held)
            else:
                yield number, _block(held)
            if number == last:
                return

    def _columns(self, block: int) -> list[str]:
        """Return the columns that are read for a block: all of one that is not done, else its ids to compare them."""
        if block not in self.done:
            return list(self.schema.names)
        return [] if self.done[block] is None else ["example_id"]

    def _require_committed(self, number: int, held: Sequence[_Rows]) -> None:
        """Raise DataError where a done block's ids are not those that were committed.

        Rows that cannot be read now are passed over: nothing is known of them.
        """
        if self.done[number] is None or any(rows.unreadable for rows in held):
            return
        if ids_digest([example for rows in held for example in rows.ids]) != self.done[number]:
            raise DataError(
                f"{held[0].file}, row {held[0].start} and on: these are not the rows of block {number} that the run "
                "has committed; resume it with the input as it was, or start a new run elsewhere"
            )

    def _rows(self, group: int) -> Iterator[_Rows]:
        """Yield all of a group's rows in order, with those columns that their blocks need."""
        start = 0
        needed: list[tuple[RowGroup, list[str]]] = []
        for row_group in self.groups[group]:
            end = start + row_group.n_rows
            blocks = range(start // self.block_rows, -(-end // self.block_rows)) if row_group.n_rows else range(0)
            columns = max((self._columns(self.firsts[group] + block) for block in blocks), key=len, default=[])
            needed.append((row_group, columns))
            start = end
        for file, pairs in groupby(needed, lambda pair: pair[0].file):
            yield from self._of_file(self.files[file], self.names[file], list(pairs))

    def _of_file(self, file: Path, name: str, row_groups: Sequence[tuple[RowGroup, list[str]]]) -> Iterator[_Rows]:
        unread = [_Rows(file, name, row_group.start, row_group.n_rows) for row_group, _ in row_groups]
        if not any(columns for _, columns in row_groups):
            yield from unread
            return
        try:
            opened = open_parquet(file, streamed=True)
        except DataError as error:
            yield from (replace(rows, unreadable=str(error), gone=True) for rows in unread)
            return
        with opened:
            for rows, (row_group, columns) in zip(unread, row_groups, strict=True):
                if columns:
                    self._require_unchanged(opened, row_group)
                    yield from self._read(opened, row_group.number, rows, columns)
                else:
                    yield rows

    def _read(self, opened: pq.ParquetFile, number: int, rows: _Rows, columns: list[str]) -> Iterator[_Rows]:
        """Yield a row group's rows as they are decoded; from where that fails on, they are unreadable."""
        n_read = 0
        reason = "it ends too early"
        schema = pa.schema([self.schema.field(name) for name in columns])
        try:
            for batch in opened.iter_batches(self.block_rows, row_groups=[number], columns=columns):
                table = pa.Table.from_batches([batch])
                table.validate(full=True)  # damage may decode to anything
                yield replace(rows.slice(n_read, len(table)), table=_conformed(table, schema, rows.file))
                n_read += len(table)
        except (pa.ArrowException, OSError) as error:
            reason = first_line(error)
        if n_read < rows.n:
            reason = f"{rows.file} cannot be read in row group {number}: {reason}"
            yield replace(rows.slice(n_read, rows.n - n_read), unreadable=reason)

    def _require_unchanged(self, opened: pq.ParquetFile, row_group: RowGroup) -> None:
        """Raise DataError where a file that is opened again was written anew: its rows may be others, or elsewhere."""
        if (
            opened.metadata.num_row_groups <= row_group.number
            or sorted(opened.schema_arrow.names) != sorted(self.schema.names)
            or _facts(opened.metadata.row_group(row_group.number)) != row_group.facts
        ):
            raise DataError(
                f"{self.files[row_group.file]} has changed since the run opened it; restore it and go on with "
                "--resume, or start a new run"
            )


def _cut(pieces: Iterable[_Rows], size: int) -> Iterator[list[_Rows]]:
    """Cut rows so that each list has `size` of them; the last may have fewer."""
    held: list[_Rows] = []
    missing = size
    for rows in pieces:
        while rows.n >= missing:
            yield [*held, rows.slice(0, missing)]
            rows, held, missing = rows.slice(missing, rows.n - missing), [], size
        if rows.n:
            held.append(rows)
            missing -= rows.n
    if held:
        yield held


def _block(held: Sequence[_Rows]) -> InputBlock:
    """Return rows of one or several files as a block. Raises DataError naming the file of bad content."""
    reason = next((rows.unreadable for rows in held if rows.unreadable), None)
    if reason is not None:
        ids = [example for rows in held for example in rows.ids]
        return InputBlock(ids, None, {}, 0, reason, may_return=any(rows.gone for rows in held))
    try:
        return table_block(pa.concat_tables([rows.table for rows in held]), str(held[0].file))
    except DataError:
        for rows in held:
            table_block(rows.table, str(rows.file))
        raise


def _conformed(table: pa.Table, schema: pa.Schema, file: Path) -> pa.Table:
    """Return a file's rows in the types of all files. Raises DataError where a value does not fit these."""
    try:
        return table.select(schema.names).cast(schema)
    except pa.ArrowException as error:
        raise DataError(f"{file} does not fit the other files: {first_line(error)}") from error
