"""One model's rows of a logit table: read from files, checked, joined, and kept on local disk for a shard."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.errors import DataError
from cauc_ray.files.parquet import ParquetFooter, read_row_spans, read_stored
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.arrays import check_rows, refuse_rows
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainPart
from cauc_ray.numbers.logits import LogitKind, SumsToOne
from cauc_ray.numbers.types import Bools, Floats, Ints

# Bytes of a Parquet file that are decoded at once.
_DECODED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ModelHead:
    """One model's rows without logits: of one file in its order, or of one split in order of example_id.

    example_ids: str (N,).   labels: int32 (N,), UNKNOWN_LABEL if unknown.   costs: float64 (N,) or None.
    positions: int64 (N,), of each row in the concatenation of all files.
    """

    files: tuple[ParquetFooter, ...]
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
    return part_of(*read_stored(file), model, kind)


def head_of(table: pa.Table, file: ParquetFooter, model: str) -> ModelHead:
    """Check rows of a file without reading logits. Raises DataError as read_part does."""
    where = f"{file.path}: model {model!r}"
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


def part_of(table: pa.Table, file: ParquetFooter, model: str, kind: LogitKind | None) -> ModelRows:
    """Check rows of a file with their logits. Arguments and errors as for read_part."""
    where = f"{file.path}: model {model!r}"
    head = head_of(table, file, model)
    ids, labels = head.example_ids, head.labels
    # Large lists: int32 offsets are limited to 2^31 values.
    lists = typed_column(table, "logits", pa.large_list(pa.float32()), where)
    stored = table.schema.field("logits").type
    if pa.types.is_nested(stored) and pa.types.is_boolean(getattr(stored, "value_type", pa.null())):
        raise DataError(f"{where}: column 'logits' has type {stored}, expected lists of numbers")
    values, n_options = lists.flatten(), pc.list_value_length(lists).fill_null(0).to_numpy(zero_copy_only=False)
    if values.null_count:
        row = int(np.searchsorted(np.cumsum(n_options), pc.index(values.is_null(), True).as_py(), side="right"))
        raise DataError(f"{where}, example {ids[row].as_py()!r}: a logit is null")
    logits = laid_out(values.to_numpy(zero_copy_only=False), n_options)

    known = ~table.column("label").is_null().combine_chunks().to_numpy(zero_copy_only=False)
    logits, sums = check_rows(where, ids, logits, n_options, labels, known, kind)
    return head.with_logits(logits, n_options, sums)


def typed_column(table: pa.Table, name: str, kind: pa.DataType, where: str) -> pa.Array:
    """Cast a column to a type. Raises DataError, prefixed with where, if it is missing or cannot be cast."""
    if name not in table.column_names:
        raise DataError(f"{where}: column {name!r} is missing; the file has {', '.join(table.column_names)}")
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


def read_head(files: Sequence[AnyPath], model: str, where: str) -> ModelHead:
    """Read all columns but the logits of a model's files. Raises DataError, which may be prefixed with where."""
    heads = [head_of(*read_stored(file, ("example_id", "label", "cost")), model) for file in files]
    return joined_head(heads, where)


def joined_head(heads: Sequence[ModelHead], where: str) -> ModelHead:
    """Return the rows of several files in order of example_id.

    Raises DataError, prefixed with where, for an empty split, a duplicate id, or costs in only some of the files.
    """
    ids = pa.chunked_array([head.example_ids for head in heads], type=pa.string()).combine_chunks()
    if len(ids) == 0:
        raise DataError(f"{where}: the split is empty")
    order = pc.array_sort_indices(ids)
    ids = ids.take(order)
    doubled = pc.equal(ids[1:], ids[:-1])
    if pc.any(doubled).as_py():
        example = ids[pc.index(doubled, True).as_py()].as_py()
        files = [h.files[0].path.name for h in heads if pc.is_in(pa.scalar(example), value_set=h.example_ids).as_py()]
        raise DataError(f"{where}: example {example!r} is a duplicate ({', '.join(files)})")
    if len({head.costs is None for head in heads}) > 1:
        raise DataError(f"{where}: column 'cost' is missing from some files")
    positions = order.to_numpy(zero_copy_only=False).astype(np.int64)
    costs = [head.costs for head in heads if head.costs is not None]
    return ModelHead(
        files=tuple(file for head in heads for file in head.files),
        example_ids=ids,
        labels=np.concatenate([head.labels for head in heads])[positions],
        costs=np.concatenate(costs)[positions] if costs else None,
        positions=positions,
    )


def joined_labels(source: str, models: Sequence[str], rows: Sequence[ModelHead]) -> Ints:
    """Return the labels that the models' rows agree on, int32 (N,).

    Raises DataError naming an example that a model lacks, or for which two models have different labels.
    """
    first = rows[0]
    labels = first.labels.copy()
    for model, own in zip(models[1:], rows[1:], strict=True):
        _require_same_ids(source, models[0], first, model, own)
        differ = (labels != own.labels) & (labels != UNKNOWN_LABEL) & (own.labels != UNKNOWN_LABEL)
        if differ.any():
            row = int(differ.argmax())
            raise DataError(
                f"{source}: example {first.example_ids[row].as_py()!r} has label {labels[row]} for model "
                f"{models[0]!r} and {own.labels[row]} for model {model!r}"
            )
        labels = np.where(labels == UNKNOWN_LABEL, own.labels, labels)
    return labels


def _require_same_ids(source: str, first: str, expected: ModelHead, model: str, rows: ModelHead) -> None:
    if expected.example_ids.equals(rows.example_ids):
        return
    for a, b, has, lacks in (
        (expected.example_ids, rows.example_ids, first, model),
        (rows.example_ids, expected.example_ids, model, first),
    ):
        missing = pc.invert(pc.is_in(a, value_set=b))
        if pc.any(missing).as_py():
            example = a[pc.index(missing, True).as_py()].as_py()
            raise DataError(
                f"{source}: example {example!r} of model {has!r} is missing from model {lacks!r} "
                f"({pc.sum(missing).as_py()} in all)"
            )


def unfit_row(
    models: Sequence[str], n_options: Sequence[Ints], part: ChainPart, *, gaps: bool
) -> tuple[int, str] | None:
    """Return the lowest rank of a row that cannot be used, and why; None if there is none.

    Such a row has another number of options in one model than in the first, a label that none of them is, or shares no
    possible option among all models.   n_options: int (n,), of each model.   gaps: whether some row of some model has a
    logit of -inf.
    """
    found, first = [], n_options[0]
    for model, own in zip(models[1:], n_options[1:], strict=True):
        differ = np.flatnonzero(own != first)
        if len(differ):
            row = differ[part.ranks[differ].argmin()]
            why = f"has {first[row]} options for model {models[0]!r} and {own[row]} for model {model!r}"
            found.append((int(part.ranks[row]), why))
    # Those of the files themselves were checked as they were read.
    outside = np.flatnonzero((part.labels < UNKNOWN_LABEL) | (part.labels >= first))
    if len(outside):
        row = outside[part.ranks[outside].argmin()]
        found.append((int(part.ranks[row]), f"has label {part.labels[row]}, which is outside its {first[row]} options"))
    for block in part.blocks() if gaps else ():
        logits, labels = [own[block] for own in part.logits], part.labels[block]
        shared: Bools = np.logical_and.reduce([np.isfinite(own) for own in logits])
        possible = shared.any(axis=1)
        if not possible.all():
            found.append((int(part.ranks[block][~possible].min()), "has no option that is possible for all models"))
        chosen = shared[np.arange(len(labels)), np.clip(labels, 0, shared.shape[1] - 1)]
        masked = possible & (labels >= 0) & ~chosen
        if masked.any():
            found.append((int(part.ranks[block][masked].min()), "has a label whose logit is -inf or a mask"))
    return min(found, default=None)


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows of a model's files, without their logits.

    model: its name.   positions: int64 (n,), of each row in the concatenation of all files.   kind: of the stored
    values.
    """

    model: str
    files: tuple[ParquetFooter, ...]
    positions: Ints
    kind: LogitKind = "raw"


class SpooledLogits:
    """Logits float32 (n, K) in a temporary file that is deleted with the process; -inf beyond a row's options.

    It needs 20 bytes of memory a row, and the rows that are read.
    n_options: int32 (n,).   width: K, the most options of a row until it is set to that of another model or shard.
    has_gaps: whether some row has an option with a logit of -inf.   sums: as in ModelRows.
    """

    def __init__(self, wanted: WantedRows) -> None:
        """Read the wanted rows. Raises DataError as LogitTable.read_model does, and if files have changed."""
        self._file = tempfile.TemporaryFile(prefix="cauc-")  # noqa: SIM115
        self.has_gaps, self.sums = False, SumsToOne()
        order, lengths = np.argsort(wanted.positions), [np.empty(0, dtype=np.int32)]
        for part in _parts(wanted, wanted.positions[order]):
            values = part.values
            self.sums += part.sums
            self.has_gaps |= bool(np.isneginf(values).any())
            self._file.write(np.ascontiguousarray(values, dtype=np.float32).data)
            lengths.append(part.n_options.astype(np.int32))
        self._file.flush()
        in_file = np.concatenate(lengths)
        # The file has the rows in order of their positions: each row's index there, and the offset of its options.
        self._positions = np.argsort(order)
        self._starts = np.append(0, np.cumsum(in_file, dtype=np.int64))
        self.n_options = in_file[self._positions]
        self.width = int(in_file.max())

    def __del__(self) -> None:
        self._file.close()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return (n, K)."""
        return len(self.n_options), self.width

    @property
    def dtype(self) -> np.dtype[np.float32]:
        """Return float32."""
        return np.dtype(np.float32)

    def __getitem__(self, rows: slice | Ints, /) -> Floats:
        """Return some rows."""
        positions = self._positions[rows]
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        values = [self._read(run) for run in runs]
        return laid_out(values[0] if len(runs) == 1 else np.concatenate(values), self.n_options[rows], self.width)

    def _read(self, run: Ints) -> Floats:
        """Return the options of neighbouring rows, or of none, concatenated."""
        if not len(run):
            return np.empty(0, np.float32)
        first, last = int(self._starts[run[0]]), int(self._starts[run[-1] + 1])
        self._file.seek(4 * first)
        values = np.fromfile(self._file, np.float32, last - first)
        if len(values) < last - first:
            raise OSError("the file of spooled logits ends too early")
        return values


def _parts(wanted: WantedRows, positions: Ints) -> Iterator[ModelRows]:
    """Yield the rows at ascending positions in small pieces, decoding only row groups with such rows."""
    start = 0
    for file in wanted.files:
        end = start + file.n_rows
        first, last = np.searchsorted(positions, [start, end])
        if first < last:
            names = [name for name in ("example_id", "label", "logits") if name in file.schema.names]
            requests = [(file, positions[first:last] - start)]
            for span in read_row_spans(requests, names, 65_536, _DECODED_BYTES):
                if span.error is not None:
                    raise span.error
                yield part_of(span.table, file, wanted.model, wanted.kind)
        start = end
