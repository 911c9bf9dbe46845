"""Logits of some rows on local disk, read back in blocks: the storage of a shard of a large table."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cauc_ray.data.logit_part import ModelRows, laid_out, part_of
from cauc_ray.errors import DataError
from cauc_ray.files.parquet import SeenFile, footer_digest, open_parquet, read_rows
from cauc_ray.numbers.logits import LogitKind, SumsToOne
from cauc_ray.numbers.types import Floats, Ints

# Bytes of a Parquet file that are decoded at once.
_DECODED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class WantedRows:
    """Rows of a model's files, without their logits.

    model: its name.   positions: int64 (n,), of each row in the concatenation of all files.   kind: of the stored
    values.
    """

    model: str
    files: tuple[SeenFile, ...]
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
            with open_parquet(file.path, streamed=True) as opened:
                if footer_digest(opened) != file.digest:
                    raise DataError(f"{file.path} has changed since its example ids were read; start the command again")
                names = [name for name in ("example_id", "label", "logits") if name in opened.schema_arrow.names]
                for rows in read_rows(opened, file.path, positions[first:last] - start, names, 65_536, _DECODED_BYTES):
                    yield part_of(rows, file, wanted.model, wanted.kind)
        start = end
