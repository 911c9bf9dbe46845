"""Columns of a dataset that a logit table keeps: LOGITS/columns/split=<split>/*.parquet, with example_id."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from cauc_ray.data.datasets import Dataset
from cauc_ray.data.model_rows import typed_column
from cauc_ray.data.sources import ID
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.files.documents import make_folder
from cauc_ray.files.parquet import parquet_files, read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.segments import Segments

COLUMNS = "columns"
# The segment of examples without a value.
NO_VALUE = "(none)"


def keep_columns(table: AnyPath, dataset: Dataset, splits: Mapping[str, int]) -> None:
    """Write the columns that a dataset's specification names to a logit table, in place of earlier ones.

    Raises:
        ConfigError: Some files lack a column.
    """
    names = dataset.spec.kept_columns
    for part in dataset.parts:
        for name in names:
            if name not in part.source.columns:
                raise ConfigError(f"{part.source.name}: {unknown_name('column', name, part.source.columns)}")
    for split in splits:
        folder = table / COLUMNS / f"split={split}"
        make_folder(folder)
        for number, part in enumerate(dataset.parts):
            if split in part.splits:
                rows = pa.array(part.splits[split], pa.int64())
                values = part.source.table(names).select(names).take(rows)
                write_parquet(folder / f"part-{number}.parquet", values.add_column(0, ID, part.ids.take(rows)))


def segment_name(value: object) -> str:
    """Return the name of the segment of the examples with a value; 3 and 3.0, which a file may make of it, are one."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return NO_VALUE if value is None else str(value)


def read_segments(logits: str | AnyPath, column: str, split: str) -> Segments:
    """Return the segments that a kept column divides a split into.

    Raises:
        ConfigError: The column was not kept.
        DataError: No column of the split was kept, or an id is missing.
    """
    folder = path_of(logits) / COLUMNS / f"split={split}"
    if not folder.is_dir():
        raise DataError(
            f"{folder} is missing: collect split {split!r} with --keep {column}, or write its columns there"
        )
    by_id: dict[str, str] = {}
    for file in parquet_files(folder):
        stored = read_parquet(file)
        columns = [name for name in stored.column_names if name != ID]
        if column not in columns:
            raise ConfigError(f"{file}: {unknown_name('column', column, columns)}")
        values = map(segment_name, stored.column(column).to_pylist())
        by_id |= zip(typed_column(stored, ID, pa.string(), str(file)).to_pylist(), values, strict=True)
    return Segments(column, by_id)
