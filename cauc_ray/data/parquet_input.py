"""Parquet files as a run's input: what their footers say, cut into groups of blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from cauc_ray.data.files import first_line, open_parquet, parquet_files
from cauc_ray.data.parquet_source import ParquetSource, RowGroup
from cauc_ray.errors import DataError

# A group is cut after so many blocks, so that most blocks do not end before their time at a group's end.
_GROUP_BLOCKS = 8


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
                _refuse_null_ids(file, opened.metadata)
                n_rows = 0
                for group in range(opened.metadata.num_row_groups):
                    row_group = opened.metadata.row_group(group)
                    self._row_groups.append(RowGroup(number, group, n_rows, row_group.num_rows))
                    n_rows += row_group.num_rows
                    n_bytes += row_group.total_byte_size
            self.identity[file.name if self.path.is_file() else file.relative_to(self.path).as_posix()] = n_rows
        self.n_rows = sum(self.identity.values())
        if self.n_rows == 0:
            raise DataError(f"{self.path} holds no rows")
        self.row_bytes = n_bytes / self.n_rows

    def source(self, block_rows: int, done: frozenset[int] = frozenset()) -> ParquetSource:
        """Return the blocks of at most so many rows that are not done; files are opened again where it is read."""
        groups: list[tuple[RowGroup, ...]] = []
        firsts = [0]
        held: list[RowGroup] = []
        n_held = 0
        for place, row_group in enumerate(self._row_groups):
            held.append(row_group)
            n_held += row_group.n_rows
            if n_held >= _GROUP_BLOCKS * block_rows or (n_held and place == len(self._row_groups) - 1):
                groups.append(tuple(held))
                firsts.append(firsts[-1] - (-n_held // block_rows))
                held, n_held = [], 0
        return ParquetSource(
            files=tuple(file.absolute() for file in self._files),
            names=tuple(self.identity),
            schema=self._schema,
            groups=tuple(groups),
            firsts=tuple(firsts),
            block_rows=block_rows,
            done=done,
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


def _refuse_null_ids(file: Path, metadata: Any) -> None:
    """Raise DataError where the file's statistics count null ids: better now than in the middle of a run."""
    paths = [metadata.schema.column(column).path for column in range(metadata.num_columns)]
    column = paths.index("example_id")
    for group in range(metadata.num_row_groups):
        statistics = metadata.row_group(group).column(column).statistics
        if statistics is not None and statistics.null_count:
            raise DataError(f"{file}: a row has no example_id")
