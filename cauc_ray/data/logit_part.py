"""One Parquet file of a logit table, read and checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.files import read_parquet
from cauc_ray.errors import DataError
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Bools, Floats, Ints


@dataclass(frozen=True, slots=True)
class LogitPart:
    """One file of a model's rows, as ModelTable has them, in the file's order."""

    file: Path
    example_ids: pa.Array
    labels: Ints
    logits: Floats
    n_options: Ints
    costs: Floats | None


def read_part(file: Path, model: str) -> LogitPart:
    """Read one file. Raises DataError, naming file, model and example, for what LogitTable.read_model refuses in it."""
    table = read_parquet(file)
    where = f"{file}: model {model!r}"
    for column in ("example_id", "label", "logits"):
        if column not in table.column_names:
            raise DataError(f"{where}: no column {column!r}; it has {', '.join(table.column_names)}")
    ids = typed_column(table, "example_id", pa.string(), where)
    if ids.null_count:
        raise DataError(f"{where}: row {pc.index(ids.is_null(), True).as_py()} has no example_id")

    stored = table.schema.field("logits").type
    if pa.types.is_nested(stored) and pa.types.is_boolean(getattr(stored, "value_type", pa.null())):
        raise DataError(f"{where}: column 'logits' is {stored}, not numbers")
    lists = typed_column(table, "logits", pa.list_(pa.float32()), where)
    values, n_options = lists.flatten(), pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    if values.null_count:
        row = int(np.searchsorted(np.cumsum(n_options), pc.index(values.is_null(), True).as_py(), side="right"))
        raise DataError(f"{where}, example {ids[row].as_py()!r}: one of its logits is null")
    logits = _rows(values.to_numpy(zero_copy_only=False), n_options)
    labels = typed_column(table, "label", pa.int32(), where).fill_null(UNKNOWN_LABEL).to_numpy(zero_copy_only=False)

    def refuse(bad: Bools, what: str) -> None:
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise DataError(
                f"{where}, example {ids[row].as_py()!r}: {what.format(label=labels[row], n=n_options[row])}"
            )

    refuse(n_options == 0, "it has no logits")
    # Each row's largest logit is NaN or +inf if any of them is, and -inf if no option is left.
    refuse(~np.isfinite(logits.max(axis=1, initial=-np.inf)), "a logit is NaN or +inf, or all are -inf")
    nulls = table.column("label").is_null().combine_chunks().to_numpy(zero_copy_only=False)
    refuse(~nulls & ((labels < 0) | (labels >= n_options)), "label {label} is outside its {n} options")
    chosen = logits[np.arange(len(labels)), np.clip(labels, 0, n_options - 1)]
    refuse(~nulls & np.isneginf(chosen), "the logit of its label {label} is -inf")
    costs = None
    if "cost" in table.column_names:
        costs = typed_column(table, "cost", pa.float64(), where).to_numpy(zero_copy_only=False)
        refuse(~(np.isfinite(costs) & (costs >= 0)), "its cost is not a number of at least 0")
    return LogitPart(file, ids, labels, logits, n_options, costs)


def typed_column(table: pa.Table, name: str, kind: pa.DataType, where: str) -> pa.Array:
    """Return a column as a type. Raises DataError, which begins with where, if it cannot be one."""
    column = table.column(name)
    try:
        return column.cast(kind).combine_chunks()
    except pa.ArrowException as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(f"{where}: column {name!r} is {column.type}, not {kind}: {reason}") from error


def _rows(values: Floats, n_options: Ints) -> Floats:
    """Lay lists out as (N, K), padded with -inf."""
    width = int(n_options.max(initial=0))
    if len(values) == len(n_options) * width:
        return values.reshape(len(n_options), width)
    logits = np.full((len(n_options), width), -np.inf, dtype=values.dtype)
    logits[np.arange(width) < n_options[:, None]] = values
    return logits
