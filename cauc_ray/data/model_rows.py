"""One model's rows of a logit table: read from files, checked, joined, and kept on local disk for a shard."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.blocks import first_duplicate
from cauc_ray.errors import DataError, first_line
from cauc_ray.files.parquet import ParquetFooter, read_row_spans, read_stored
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.arrays import check_rows, refuse_rows, require_no_probabilities
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainPart
from cauc_ray.numbers.logits import LogitKind, SumsToOne, laid_out, stacked
from cauc_ray.numbers.types import Floats, Ints

# Rows of a shard that are decoded at once.
_DECODED_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class ModelRows:
    """One model's rows: of one file in its order, or of one split in order of example_id.

    Attributes:
        files: Where they are.
        example_ids: str (N,).
        labels: int32 (N,), UNKNOWN_LABEL if unknown.
        costs: Of calls, float64 (N,), or None.
        positions: int64 (N,), of each row in the concatenation of all files.
        logits: float32 (N, K), -inf beyond a row's options; K is 0 where they were not read.
        n_options: int (N,), 0 where logits were not read.
        sums: Statistics that detect probabilities that are not declared.
    """

    files: tuple[ParquetFooter, ...]
    example_ids: pa.Array
    labels: Ints
    costs: Floats | None
    positions: Ints
    logits: Floats
    n_options: Ints
    sums: SumsToOne

    def of_rows(self, rows: Ints) -> Self:
        """Return some rows, by their indices, int64 (n,)."""
        columns: dict[str, Any] = {column.name: getattr(self, column.name) for column in fields(self)}
        arrays: dict[str, Any] = {name: values[rows] for name, values in columns.items() if hasattr(values, "dtype")}
        return replace(self, example_ids=self.example_ids.take(pa.array(rows)), **arrays)

    def without(self, example_ids: pa.Array) -> Self:
        """Return the rows without those of some examples."""
        mask = pc.is_in(self.example_ids, value_set=example_ids).to_numpy(zero_copy_only=False)
        return self.of_rows(np.flatnonzero(~mask))


def read_rows(
    files: Sequence[AnyPath], model: str, source: str, kind: LogitKind | None, *, with_logits: bool = True
) -> ModelRows:
    """Read a model's rows of some files, in order of example_id.

    Args:
        files: The files.
        model: Its name, for messages.
        source: The table and the split, for messages.
        kind: Of the stored values, None to leave them unchanged.
        with_logits: Whether logits are read.

    Raises:
        DataError: As LogitTable.read_model; names file, model and example.
    """
    columns = None if with_logits else ("example_id", "label", "cost")
    parts = [_rows_of(*read_stored(file, columns), model, kind, with_logits=with_logits) for file in files]
    sums = sum((part.sums for part in parts), SumsToOne())
    require_no_probabilities(source, sums)
    ids = pa.chunked_array([part.example_ids for part in parts], type=pa.string()).combine_chunks()
    if len(ids) == 0:
        raise DataError(f"{source}: the split is empty")
    duplicate = first_duplicate(ids)
    if duplicate is not None:
        names = [part.files[0].path.name for part in parts if pc.index(part.example_ids, duplicate).as_py() >= 0]
        raise DataError(f"{source}: example {duplicate!r} is a duplicate ({', '.join(names)})")
    costs = [part.costs for part in parts if part.costs is not None]
    if len(costs) not in (0, len(parts)):
        raise DataError(f"{source}: column 'cost' is missing from some files")
    rows = ModelRows(
        files=tuple(file for part in parts for file in part.files),
        example_ids=ids,
        labels=np.concatenate([part.labels for part in parts]),
        costs=np.concatenate(costs) if costs else None,
        positions=np.arange(len(ids)),
        logits=parts[0].logits if len(parts) == 1 else stacked([part.logits for part in parts]),
        n_options=np.concatenate([part.n_options for part in parts]),
        sums=sums,
    )
    order = pc.array_sort_indices(ids).to_numpy().astype(np.int64)
    return rows if np.array_equal(order, rows.positions) else rows.of_rows(order)


def _rows_of(
    table: pa.Table, file: ParquetFooter, model: str, kind: LogitKind | None, *, with_logits: bool = True
) -> ModelRows:
    """Check rows of a file."""
    source = f"{file.path}: model {model!r}"
    ids = typed_column(table, "example_id", pa.string(), source)
    if ids.null_count:
        raise DataError(f"{source}: row {pc.index(ids.is_null(), True).as_py()} has no example_id")
    stored_labels = typed_column(table, "label", pa.int32(), source)
    labels = stored_labels.fill_null(UNKNOWN_LABEL).to_numpy(zero_copy_only=False)
    costs = None
    if "cost" in table.column_names:
        costs = typed_column(table, "cost", pa.float64(), source).to_numpy(zero_copy_only=False)
        invalid = ~(np.isfinite(costs) & (costs >= 0))
        refuse_rows(source, ids, invalid, lambda row: "the cost must be a number of at least 0")
    positions = np.arange(len(ids))
    if not with_logits:
        unread = np.empty((len(ids), 0), np.float32), np.zeros(len(ids), np.int8), SumsToOne()
        return ModelRows((file,), ids, labels, costs, positions, *unread)
    stored, n_options = _stored_logits(table, ids, source)
    labelled = stored_labels.is_valid().to_numpy(zero_copy_only=False)
    logits, sums = check_rows(source, ids, stored, n_options, labels, labelled, kind)
    return ModelRows((file,), ids, labels, costs, positions, logits, n_options, sums)


def _stored_logits(table: pa.Table, ids: pa.Array, source: str) -> tuple[Floats, Ints]:
    """Return the logits of a file's rows as they are stored, float32 (N, K), and their numbers, int (N,)."""
    # Large lists: int32 offsets are limited to 2^31 values.
    lists = typed_column(table, "logits", pa.large_list(pa.float32()), source)
    stored = table.schema.field("logits").type
    if pa.types.is_nested(stored) and pa.types.is_boolean(getattr(stored, "value_type", pa.null())):
        raise DataError(f"{source}: column 'logits' has type {stored}, expected lists of numbers")
    values, n_options = lists.flatten(), pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    if values.null_count:
        row = int(np.searchsorted(np.cumsum(n_options), pc.index(values.is_null(), True).as_py(), side="right"))
        raise DataError(f"{source}, example {ids[row].as_py()!r}: a logit is null")
    return laid_out(values.to_numpy(zero_copy_only=False), n_options), n_options


def typed_column(table: pa.Table, name: str, kind: pa.DataType, source: str) -> pa.Array:
    """Cast a column to a type. Raises DataError, prefixed with the source, if it is missing or cannot be cast."""
    if name not in table.column_names:
        raise DataError(f"{source}: column {name!r} is missing; the file has {', '.join(table.column_names)}")
    column = table.column(name)
    try:
        return column.cast(kind).combine_chunks()
    except pa.ArrowException as error:
        fault = f"column {name!r} has type {column.type}, expected {kind}: {first_line(error)}"
        raise DataError(f"{source}: {fault}") from error


def joined_labels(source: str, models: Sequence[str], heads: Sequence[ModelRows]) -> Ints:
    """Return the labels that the models' rows agree on, int32 (N,).

    Raises:
        DataError: A model lacks an example, or two models have different labels for one.
    """
    first = heads[0]
    labels = first.labels.copy()
    for model, head in zip(models[1:], heads[1:], strict=True):
        pairs = ((first, head, models[0], model), (head, first, model, models[0]))
        for rows, reference, present, lacking in pairs if first.example_ids != head.example_ids else ():
            missing = rows.example_ids.filter(pc.invert(pc.is_in(rows.example_ids, value_set=reference.example_ids)))
            if len(missing):
                example = f"example {missing[0].as_py()!r} of model {present!r}"
                raise DataError(f"{source}: {example} is missing from model {lacking!r} ({len(missing)} in all)")
        differ = (labels != head.labels) & (labels != UNKNOWN_LABEL) & (head.labels != UNKNOWN_LABEL)
        if differ.any():
            row = int(differ.argmax())
            raise DataError(
                f"{source}: example {first.example_ids[row].as_py()!r} has label {labels[row]} for model "
                f"{models[0]!r} and {head.labels[row]} for model {model!r}"
            )
        labels = np.where(labels == UNKNOWN_LABEL, head.labels, labels)
    return labels


def unfit_row(
    models: Sequence[str], n_options: Sequence[Ints], part: ChainPart, *, gaps: bool
) -> tuple[int, str] | None:
    """Return the lowest rank of a row that cannot be used, and why; None if all can.

    Such a row has another number of options in one model than in the first, a label that none of them is, or shares no
    possible option among all models.

    Args:
        models: Their names.
        n_options: int (n,), of each model.
        part: The rows.
        gaps: Whether some row of some model has a logit of -inf.
    """
    faults: list[tuple[int, str]] = []
    first = n_options[0]
    for model, lengths in zip(models[1:], n_options[1:], strict=True):
        for row in _lowest(lengths != first, part.ranks):
            fault = f"has {first[row]} options for model {models[0]!r} and {lengths[row]} for model {model!r}"
            faults.append((part.ranks[row], fault))
    # Those of the files themselves were checked as they were read.
    for row in _lowest((part.labels < UNKNOWN_LABEL) | (part.labels >= first), part.ranks):
        fault = f"has label {part.labels[row]}, which is outside its {first[row]} options"
        faults.append((part.ranks[row], fault))
    for block in part.blocks() if gaps else ():
        labels, ranks = part.labels[block], part.ranks[block]
        shared = np.all([np.isfinite(logits[block]) for logits in part.logits], axis=0)
        possible = shared.any(axis=1)
        chosen = shared[np.arange(len(labels)), np.clip(labels, 0, shared.shape[1] - 1)]
        masked = possible & (labels >= 0) & ~chosen
        faults += [(ranks[row], "has no option that is possible for all models") for row in _lowest(~possible, ranks)]
        faults += [(ranks[row], "has a label whose logit is -inf or a mask") for row in _lowest(masked, ranks)]
    return min(faults, default=None)


def _lowest(mask: npt.NDArray[Any], ranks: Ints) -> Ints:
    """Return the row of a mask that has the lowest rank, none where the mask has no rows."""
    rows: Ints = np.flatnonzero(mask)
    return rows[np.argsort(ranks[rows])[:1]]


@dataclass(frozen=True, slots=True)
class ShardFiles:
    """Rows of a model's files, without their logits.

    Attributes:
        model: Its name.
        files: Where they are.
        positions: int64 (n,), of each row in the concatenation of all files.
        kind: Of the stored values.
    """

    model: str
    files: tuple[ParquetFooter, ...]
    positions: Ints
    kind: LogitKind = "raw"

    def read(self, positions: Ints) -> Iterator[ModelRows]:
        """Yield the rows at ascending positions in small pieces, decoding only row groups with such rows."""
        start = 0
        for file in self.files:
            first, last = np.searchsorted(positions, [start, start + file.n_rows])
            names = [name for name in ("example_id", "label", "logits") if name in file.schema.names]
            requests = [(file, positions[first:last] - start)] if first < last else []
            for span in read_row_spans(requests, names, _DECODED_ROWS):
                if span.error is not None:
                    raise span.error
                yield _rows_of(span.table, file, self.model, self.kind)
            start += file.n_rows


class SpooledLogits:
    """Logits float32 (n, K) in a temporary file that is deleted with the process; -inf beyond a row's options.

    It needs 20 bytes of memory a row, and the rows that are read: a map of the file would count as memory.

    Attributes:
        n_options: int32 (n,).
        width: K, the most options of a row until it is set to that of another model or shard.
        has_gaps: Whether some row has an option with a logit of -inf.
        sums: As in ModelRows.
        dtype: float32.
    """

    dtype = np.dtype(np.float32)

    def __init__(self, rows: ShardFiles) -> None:
        """Read the rows. Raises DataError as LogitTable.read_model does, and if files have changed."""
        self._file = tempfile.TemporaryFile(prefix="cauc-")  # noqa: SIM115
        self.has_gaps, self.sums = False, SumsToOne()
        order, lengths = np.argsort(rows.positions), [np.empty(0, dtype=np.int32)]
        for part in rows.read(rows.positions[order]):
            values = part.logits[np.arange(part.logits.shape[1]) < part.n_options[:, None]]
            self.sums += part.sums
            self.has_gaps |= bool(np.isneginf(values).any())
            values.tofile(self._file)
            lengths.append(part.n_options.astype(np.int32))
        stored_lengths = np.concatenate(lengths)
        # The file has the rows in order of their positions: each row's index there, and the offset of its options.
        self._positions = np.argsort(order)
        self._starts = np.append(0, np.cumsum(stored_lengths, dtype=np.int64))
        self.n_options = stored_lengths[self._positions]
        self.width = int(stored_lengths.max())

    def __del__(self) -> None:
        self._file.close()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (n, K)."""
        return len(self.n_options), self.width

    def __getitem__(self, rows: slice | Ints, /) -> Floats:
        """Return some rows."""
        positions = self._positions[rows]
        neighbours = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        values = [np.empty(0, np.float32)]
        for run in neighbours if len(positions) else ():
            first, last = int(self._starts[run[0]]), int(self._starts[run[-1] + 1])
            self._file.seek(4 * first)
            values.append(np.fromfile(self._file, np.float32, last - first))
        return laid_out(np.concatenate(values), self.n_options[rows], self.width)
