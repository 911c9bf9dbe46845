"""One Parquet file of a logit table, read and checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.errors import DataError
from cauc_ray.files.parquet import SeenFile, read_seen
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.arrays import check_rows, refuse_rows
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.logits import LogitKind, SumsToOne
from cauc_ray.numbers.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class ModelHead:
    """One model's rows without logits: of one file in its order, or of one split in order of example_id.

    example_ids: str (N,).   labels: int32 (N,), UNKNOWN_LABEL if unknown.   costs: float64 (N,) or None.
    positions: int64 (N,), of each row in the concatenation of all files.
    """

    files: tuple[SeenFile, ...]
    example_ids: pa.Array
    labels: Ints
    costs: Floats | None
    positions: Ints

    def without(self, example_ids: pa.Array) -> Self:
        """Return the rows without those of some examples."""
        kept: Bools = pc.invert(pc.is_in(self.example_ids, value_set=example_ids)).to_numpy(zero_copy_only=False)
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        arrays: dict[str, Any] = {name: values[kept] for name, values in own.items() if isinstance(values, np.ndarray)}
        return replace(self, example_ids=self.example_ids.filter(pa.array(kept)), **arrays)

    def with_logits(self, logits: Floats, n_options: Ints, sums: SumsToOne) -> ModelRows:
        """Return the same rows with their logits."""
        own = (self.files, self.example_ids, self.labels, self.costs, self.positions)
        return ModelRows(*own, logits, n_options, sums)


@dataclass(frozen=True, slots=True)
class ModelRows(ModelHead):
    """One model's rows.

    logits: float32 (N, K), -inf beyond a row's options.   n_options: int (N,).   sums: statistics that detect
    probabilities that are not declared.
    """

    logits: Floats
    n_options: Ints
    sums: SumsToOne

    @property
    def values(self) -> Floats:
        """Return the rows' options concatenated, float32 (sum of n_options,)."""
        if self.logits.size == self.n_options.sum():
            return self.logits.ravel()
        return self.logits[np.arange(self.logits.shape[1]) < self.n_options[:, None]]


def read_part(file: AnyPath, model: str, kind: LogitKind | None) -> ModelRows:
    """Read one file. Raises DataError, naming file, model and example, as LogitTable.read_model does.

    kind: of the stored values, None to leave them unchanged.
    """
    return part_of(*read_seen(file), model, kind)


def head_of(table: pa.Table, file: SeenFile, model: str) -> ModelHead:
    """Check rows of a file without reading logits. Raises DataError as read_part does."""
    where = f"{file.path}: model {model!r}"
    for column in ("example_id", "label"):
        if column not in table.column_names:
            raise DataError(f"{where}: column {column!r} is missing; the file has {', '.join(table.column_names)}")
    ids = typed_column(table, "example_id", pa.string(), where)
    if ids.null_count:
        raise DataError(f"{where}: row {pc.index(ids.is_null(), True).as_py()} has no example_id")
    labels = typed_column(table, "label", pa.int32(), where).fill_null(UNKNOWN_LABEL).to_numpy(zero_copy_only=False)
    costs = None
    if "cost" in table.column_names:
        costs = typed_column(table, "cost", pa.float64(), where).to_numpy(zero_copy_only=False)
        refuse_rows(
            where, ids, ~(np.isfinite(costs) & (costs >= 0)), lambda row: "the cost must be a number of at least 0"
        )
    return ModelHead((file,), ids, labels, costs, np.arange(len(ids)))


def part_of(table: pa.Table, file: SeenFile, model: str, kind: LogitKind | None) -> ModelRows:
    """Check rows of a file with their logits. Arguments and errors as for read_part."""
    where = f"{file.path}: model {model!r}"
    if "logits" not in table.column_names:
        raise DataError(f"{where}: column 'logits' is missing; the file has {', '.join(table.column_names)}")
    head = head_of(table, file, model)
    ids, labels = head.example_ids, head.labels
    stored = table.schema.field("logits").type
    if pa.types.is_nested(stored) and pa.types.is_boolean(getattr(stored, "value_type", pa.null())):
        raise DataError(f"{where}: column 'logits' has type {stored}, expected lists of numbers")
    # Large lists: int32 offsets are limited to 2^31 values.
    lists = typed_column(table, "logits", pa.large_list(pa.float32()), where)
    values, n_options = lists.flatten(), pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    if values.null_count:
        row = int(np.searchsorted(np.cumsum(n_options), pc.index(values.is_null(), True).as_py(), side="right"))
        raise DataError(f"{where}, example {ids[row].as_py()!r}: a logit is null")
    logits = laid_out(values.to_numpy(zero_copy_only=False), n_options)

    known = ~table.column("label").is_null().combine_chunks().to_numpy(zero_copy_only=False)
    logits, sums = check_rows(where, ids, logits, n_options, labels, known, kind)
    return head.with_logits(logits, n_options, sums)


def typed_column(table: pa.Table, name: str, kind: pa.DataType, where: str) -> pa.Array:
    """Cast a column to a type. Raises DataError, prefixed with where, if it cannot be cast."""
    column = table.column(name)
    try:
        return column.cast(kind).combine_chunks()
    except pa.ArrowException as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{where}: column {name!r} has type {column.type}, expected {kind}: {reason}") from error


def laid_out(values: Floats, n_options: Ints, width: int = 0) -> Floats:
    """Return lists as (N, K), padded with -inf to the longest list, or to a larger width."""
    width = max(width, int(n_options.max(initial=0)))
    if len(values) == len(n_options) * width:
        return values.reshape(len(n_options), width)
    logits = np.full((len(n_options), width), -np.inf, dtype=values.dtype)
    logits[np.arange(width) < n_options[:, None]] = values
    return logits


def widened(logits: Floats, width: int) -> Floats:
    """Return logits (N, K) padded with -inf to a width."""
    missing = width - logits.shape[1]
    return np.pad(logits, ((0, 0), (0, missing)), constant_values=-np.inf) if missing else logits


def joined_logits(parts: Sequence[Floats]) -> Floats:
    """Concatenate the rows of several parts, padded to the widest."""
    width = max(part.shape[1] for part in parts)
    return parts[0] if len(parts) == 1 else np.concatenate([widened(part, width) for part in parts])
