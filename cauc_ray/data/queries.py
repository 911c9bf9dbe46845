"""Data on the queries themselves: their embeddings in a logit table, their texts in a separate file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.logit_part import typed_column
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.files.listing import hive_values
from cauc_ray.files.parquet import parquet_files, read_parquet
from cauc_ray.files.paths import AnyPath, path_of
from cauc_ray.numbers.types import Floats


def encoders(logits: AnyPath) -> list[str]:
    """Return the names of the encoders with embeddings in a logit table."""
    return hive_values(logits, "embedding")


def read_embeddings(logits: AnyPath, encoder: str, split: str, example_ids: Sequence[str]) -> Floats:
    """Return the embeddings of examples of a split, float32 (N, d), in the order of their ids.

    Raises ConfigError for an encoder that the table does not have; DataError, naming the encoder and the example,
    if one is missing, duplicate, of another length than the others, or not finite.
    """
    known = encoders(logits)
    if encoder not in known:
        remedy = "compute embeddings with cauc collect --embedding"
        raise ConfigError(f"{logits}: {unknown_name('encoder', encoder, known)}; {remedy}")
    folder = logits / f"embedding={encoder}" / f"split={split}"
    where = f"{logits}: encoder {encoder!r}, split {split!r}"
    if not folder.is_dir():
        raise DataError(f"{where}: there is no such split; collect the encoder's embeddings of it")
    ids, lists = _read_column(parquet_files(folder), "embedding", pa.large_list(pa.float32()))
    vectors = lists.take(_positions(ids, example_ids, where)).combine_chunks()
    lengths = pc.list_value_length(vectors).fill_null(0).to_numpy(zero_copy_only=False)
    other = np.flatnonzero((lengths != lengths[0]) | (lengths == 0))
    if len(other):
        odd = int(other[0])
        raise DataError(
            f"{where}: example {example_ids[odd]!r} has {lengths[odd]} numbers, {example_ids[0]!r} {lengths[0]}"
        )
    values: Floats = vectors.flatten().to_numpy(zero_copy_only=False).reshape(len(vectors), lengths[0])
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if len(bad):
        raise DataError(f"{where}: the embedding of example {example_ids[bad[0]]!r} is not finite")
    return values


class Texts:
    """The texts of queries by example_id, from a Parquet file or folder."""

    def __init__(self, path: str | AnyPath, column: str) -> None:
        """Read them. Raises DataError if the file, its column example_id or its column of texts is missing."""
        self._where = f"{path}, column {column!r}"
        self._ids, self._texts = _read_column(parquet_files(path_of(path)), column, pa.string())

    def of(self, example_ids: Sequence[str]) -> tuple[str, ...]:
        """Return the texts of examples. Raises DataError naming one without a text, or with several."""
        found = self._texts.take(_positions(self._ids, example_ids, self._where))
        if found.null_count:
            example = example_ids[pc.index(found.is_null(), True).as_py()]
            raise DataError(f"{self._where}: example {example!r} has no text")
        return tuple(found.to_pylist())


def _read_column(files: Iterable[AnyPath], name: str, kind: pa.DataType) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
    """Return the ids and one column of files. Raises DataError if a column is missing or has another type."""
    ids, values = [], []
    for file in files:
        table = read_parquet(file)
        missing = next((each for each in ("example_id", name) if each not in table.column_names), None)
        if missing is not None:
            raise DataError(f"{file}: column {missing!r} is missing; the file has {', '.join(table.column_names)}")
        ids.append(typed_column(table, "example_id", pa.string(), str(file)))
        values.append(typed_column(table, name, kind, str(file)))
    return pa.chunked_array(ids, pa.string()), pa.chunked_array(values, kind)


def _positions(ids: pa.ChunkedArray, wanted: Sequence[str], where: str) -> pa.Array:
    """Return the positions of the wanted ids. Raises DataError naming one that is missing or a duplicate."""
    asked = pa.array(wanted, pa.string())
    positions = pc.index_in(asked, value_set=ids)
    if positions.null_count:
        example = wanted[pc.index(positions.is_null(), True).as_py()]
        raise DataError(f"{where}: example {example!r} is missing ({positions.null_count:,} in all)")
    rows = ids.filter(pc.is_in(ids, value_set=asked))
    if len(rows) > len(asked):
        counts = pc.value_counts(rows.combine_chunks())
        double = next(count["values"].as_py() for count in counts if count["counts"].as_py() > 1)
        raise DataError(f"{where}: example {double!r} is a duplicate")
    return positions
