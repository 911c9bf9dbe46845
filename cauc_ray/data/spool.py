"""Logits of some rows on local disk, read back a block at a time: what a shard of a large table holds."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cauc_ray.data.logit_part import LogitPart, laid_out, part_of
from cauc_ray.errors import DataError
from cauc_ray.files.parquet import open_parquet, read_rows
from cauc_ray.files.paths import AnyPath
from cauc_ray.numbers.logits import LogitKind, SumsToOne
from cauc_ray.numbers.types import Floats, Ints

# What is decoded of a Parquet file at once.
_DECODED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows of a model's files, without their logits.

    model: its name.   files: paths.   places: int64 (n,), where each row stands among those of all files, one after
    the other.   kind: of what is stored.
    """

    model: str
    files: tuple[AnyPath, ...]
    places: Ints
    kind: LogitKind = "raw"


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
        self.sums = SumsToOne()
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
            self.sums += part.sums
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
        self._file.seek(4 * first)
        values = np.fromfile(self._file, np.float32, last - first)
        if len(values) < last - first:
            raise OSError("the file of spooled logits ends too early")
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
            end = start + opened.metadata.num_rows
            first, last = np.searchsorted(places, [start, end])
            names = [name for name in ("example_id", "label", "logits") if name in opened.schema_arrow.names]
            for rows in read_rows(opened, file, places[first:last] - start, names, 65_536, _DECODED_BYTES):
                yield part_of(rows, file, wanted.model, wanted.kind)
            start = end
