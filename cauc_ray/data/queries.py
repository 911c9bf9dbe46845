"""What is known of the queries themselves: their embeddings in a logit table, their texts in a file beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.files import parquet_files, read_parquet
from cauc_ray.data.logit_part import typed_column
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.numbers.types import Floats


def encoders(logits: Path) -> list[str]:
    """Return the names of the encoders whose embeddings a logit table has."""
    return sorted(path.name.partition("=")[2] for path in logits.glob("embedding=*") if path.is_dir())


def read_embeddings(logits: Path, encoder: str, split: str, example_ids: Sequence[str]) -> Floats:
    """Return the embeddings of examples of a split, float32 (N, d), in the order of their ids.

    Raises ConfigError for an encoder that the table does not have; DataError, naming the encoder and the example,
    where one is missing, stands twice, is of another length than the others, or holds a number that is not finite.
    """
    known = encoders(logits)
    if encoder not in known:
        raise ConfigError(f"{logits}: {unknown_name('encoder', encoder, known)}; cauc collect --embedding makes them")
    folder = logits / f"embedding={encoder}" / f"split={split}"
    where = f"{logits}: encoder {encoder!r}, split {split!r}"
    if not folder.is_dir():
        raise DataError(f"{where}: there is no such split; collect the encoder's embeddings of it, too")
    ids, lists = [], []
    for file in parquet_files(folder):
        table = _with_columns(file, ("example_id", "embedding"))
        ids.append(typed_column(table, "example_id", pa.string(), str(file)))
        lists.append(typed_column(table, "embedding", pa.list_(pa.float32()), str(file)))
    places = _places(pa.chunked_array(ids, pa.string()), example_ids, where)
    vectors = pa.chunked_array(lists, pa.list_(pa.float32())).take(places).combine_chunks()
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
        raise DataError(f"{where}: example {example_ids[bad[0]]!r} has a number that is not finite")
    return values


class Texts:
    """The texts of queries by example_id, from a Parquet file or folder."""

    def __init__(self, path: str | Path, column: str) -> None:
        """Read them. Raises DataError where the file, or a column example_id or that of the texts, is missing."""
        self._where = f"{path}, column {column!r}"
        ids, texts = [], []
        for file in parquet_files(Path(path)):
            table = _with_columns(file, ("example_id", column))
            ids.append(typed_column(table, "example_id", pa.string(), str(file)))
            texts.append(typed_column(table, column, pa.string(), str(file)))
        self._ids = pa.chunked_array(ids, pa.string())
        self._texts = pa.chunked_array(texts, pa.string())

    def of(self, example_ids: Sequence[str]) -> tuple[str, ...]:
        """Return the texts of examples. Raises DataError naming one that has none, or several."""
        found = self._texts.take(_places(self._ids, example_ids, self._where))
        if found.null_count:
            example = example_ids[pc.index(found.is_null(), True).as_py()]
            raise DataError(f"{self._where}: example {example!r} has no text")
        return tuple(found.to_pylist())


def _with_columns(file: Path, names: Sequence[str]) -> pa.Table:
    table = read_parquet(file)
    for name in names:
        if name not in table.column_names:
            raise DataError(f"{file}: no column {name!r}; it has {', '.join(table.column_names)}")
    return table


def _places(ids: pa.ChunkedArray, wanted: Sequence[str], where: str) -> pa.Array:
    """Return where the wanted ids stand. Raises DataError naming one that is missing or stands twice."""
    asked = pa.array(wanted, pa.string())
    places = pc.index_in(asked, value_set=ids)
    if places.null_count:
        example = wanted[pc.index(places.is_null(), True).as_py()]
        raise DataError(f"{where}: example {example!r} is missing ({places.null_count:,} such)")
    rows = ids.filter(pc.is_in(ids, value_set=asked))
    if len(rows) > len(asked):
        counts = pc.value_counts(rows.combine_chunks())
        double = next(count["values"].as_py() for count in counts if count["counts"].as_py() > 1)
        raise DataError(f"{where}: example {double!r} stands twice")
    return places
