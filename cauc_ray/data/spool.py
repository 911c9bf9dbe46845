"""Logits of some rows on local disk, read back a block at a time: what a shard of a large table holds."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cauc_ray.data.files import first_line, open_parquet
from cauc_ray.data.logit_part import LogitPart, laid_out, part_of
from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Floats, Ints

# What is decoded of a Parquet file at once.
_DECODED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows of a model's files, without their logits.

    model: its name.   files: paths.   places: int64 (n,), where each row stands among those of all files, one after
    the other.
    """

    model: str
    files: tuple[Path, ...]
    places: Ints


class SpooledLogits:
    """Logits float32 (n, K) in a file of the process's own, which vanishes with it; -inf beyond a row's options.

    It holds 12 bytes a row in memory, 20 where rows stand in another order, and what it is asked for.
    """

    def __init__(self, wanted: WantedRows) -> None:
        """Read the wanted rows. Raises DataError as LogitTable.read_model does, or where rows are gone."""
        self._file = tempfile.TemporaryFile(prefix="cauc-")  # noqa: SIM115
        self.n_options = np.empty(len(wanted.places), dtype=np.int32)
        # Whether some row has an option that its model leaves impossible.
        self.has_gaps = False
        order = np.argsort(wanted.places)
        try:
            self._write(wanted, order)
        except BaseException:
            self.close()
            raise
        self.width = int(self.n_options.max())
        # Rows stand in the file in the order of their places; where that is not the order of the shard, say where.
        ordered = bool((np.diff(order) > 0).all())
        self._starts = np.concatenate([[0], np.cumsum(self.n_options[order], dtype=np.int64)])
        self._rows = None if ordered else np.argsort(order)

    def _write(self, wanted: WantedRows, order: Ints) -> None:
        n = 0
        for part in _parts(wanted, wanted.places[order]):
            here = part.n_options
            real = part.logits if len(here) * part.logits.shape[1] == here.sum() else _real(part)
            self.has_gaps |= bool(np.isneginf(real).any())
            self._file.write(np.ascontiguousarray(real, dtype=np.float32).data)
            self.n_options[order[n : n + len(here)]] = here
            n += len(here)
        if n < len(wanted.places):
            raise DataError(f"model {wanted.model!r}: {len(wanted.places) - n} rows are not in its files any more")
        self._file.flush()

    def close(self) -> None:
        """Give the file back."""
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
        if self._rows is None and isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self.n_options))
            values = self._read(start, stop)
        else:
            places = np.arange(len(self.n_options))[rows] if self._rows is None else self._rows[rows]
            values = np.concatenate([self._read(a, b) for a, b in _runs(places)])
        return laid_out(values, self.n_options[rows], self.width)

    def _read(self, start: int, stop: int) -> Floats:
        """Return the options of rows that stand side by side, end to end."""
        first, last = int(self._starts[start]), int(self._starts[stop])
        values = np.empty(last - first, dtype=np.float32)
        view, at = values.data.cast("B"), 4 * first
        while view:
            n = os.preadv(self._file.fileno(), [view], at)
            if not n:
                raise OSError("the file of spooled logits ends too early")
            view, at = view[n:], at + n
        return values


def _real(part: LogitPart) -> Floats:
    return part.logits[np.arange(part.logits.shape[1]) < part.n_options[:, None]]


def _runs(places: Ints) -> list[tuple[int, int]]:
    """Return the ranges that places follow, in their order."""
    ends = np.flatnonzero(np.diff(places) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(places, ends) if len(run)]


def _parts(wanted: WantedRows, places: Ints) -> Iterator[LogitPart]:
    """Yield the rows at rising places, decoding little at a time and only row groups that hold some."""
    start = 0
    for file in wanted.files:
        with open_parquet(file, streamed=True) as opened:
            for group in range(opened.metadata.num_row_groups):
                n = opened.metadata.row_group(group).num_rows
                first, last = np.searchsorted(places, [start, start + n])
                if first < last:
                    yield from _group(opened, file, group, wanted.model, places[first:last] - start)
                start += n


def _group(opened: pq.ParquetFile, file: Path, group: int, model: str, places: Ints) -> Iterator[LogitPart]:
    about = opened.metadata.row_group(group)
    size = int(max(1, min(65536, _DECODED_BYTES // max(1, about.total_byte_size // about.num_rows))))
    start = 0
    names = [name for name in ("example_id", "label", "logits") if name in opened.schema_arrow.names]
    try:
        for batch in opened.iter_batches(batch_size=size, row_groups=[group], columns=names, use_threads=False):
            first, last = np.searchsorted(places, [start, start + len(batch)])
            if first < last:
                rows = pa.Table.from_batches([batch]).take(pa.array(places[first:last] - start))
                yield part_of(rows, file, model)
            start += len(batch)
            if last == len(places):
                return
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read: {first_line(error)}") from error


def row_groups(files: Sequence[Path]) -> Ints:
    """Return where files' row groups end, counted in rows over all of them, int64 (G,)."""
    sizes = []
    for file in files:
        with open_parquet(file) as opened:
            sizes += [opened.metadata.row_group(group).num_rows for group in range(opened.metadata.num_row_groups)]
    return np.cumsum(sizes, dtype=np.int64)
