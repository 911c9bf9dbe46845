"""Files cut into pieces that different processes read, and each piece into blocks, the same every time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from cauc_ray.data.blocks import InputBlock
from cauc_ray.data.columns import LABEL, ColumnPlan, read_block, read_ids, row_digests
from cauc_ray.data.sources import Source
from cauc_ray.files.parquet import RowSpan, UnopenedError, UnreadableError
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Ints

# A piece ends once it has so many bytes, uncompressed, or so many rows.
PIECE_BYTES = 64 << 20
PIECE_ROWS = 65_536
# Reading is considered hung if a block takes longer.
DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class Part:
    """Files that are read alike.

    Attributes:
        source: The rows.
        plan: How their columns are read.
        splits: The numbers of the rows of each split, int64 (n,), ascending; None for all rows.
    """

    source: Source
    plan: ColumnPlan
    splits: Mapping[str, Ints | None]

    def rows_of(self, split: str) -> Ints:
        """Return the numbers of a split's rows."""
        rows = self.splits[split]
        return np.arange(self.source.n_rows) if rows is None else rows

    def n_rows_of(self, split: str) -> int:
        """Return the number of a split's rows."""
        rows = self.splits[split]
        return self.source.n_rows if rows is None else len(rows)

    def between(self, start: int, end: int) -> dict[str, Ints]:
        """Return the numbers of each split's rows from one row on to another."""
        return {
            split: np.arange(start, end) if rows is None else rows[slice(*np.searchsorted(rows, [start, end]))]
            for split, rows in self.splits.items()
        }


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring rows of a part, and the number of their first block."""

    part: int
    start: int
    end: int
    first_block: int


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """Blocks of files; picklable.

    Attributes:
        name: Where the rows come from.
        parts: The files.
        pieces: What one process reads from start to end.
        block_rows: The most rows of a block.
        anywhere: Whether every node can read them.
        deadline_s: After how long without a block reading is considered hung.
        with_inputs: Whether blocks have digests of what models read.
    """

    name: str
    parts: tuple[Part, ...]
    pieces: tuple[Piece, ...]
    block_rows: int
    anywhere: bool
    with_inputs: bool = False
    deadline_s: float | None = DEADLINE_S

    @classmethod
    def cut(cls, name: str, parts: Sequence[Part], block_rows: int, *, with_inputs: bool = False) -> FileBlocks:
        """Cut files into pieces by their size, many small ones into one piece."""
        pieces: list[Piece] = []
        first_block = 0
        for number, part in enumerate(parts):
            start, n_rows = 0, part.source.n_rows
            row_bytes = part.source.n_bytes / max(1, n_rows)
            piece_rows = max(block_rows, int(min(PIECE_ROWS, PIECE_BYTES / max(1.0, row_bytes))))
            while start < n_rows:
                index = int(np.searchsorted(part.source.ends, start + piece_rows))
                end = int(part.source.ends[min(index, len(part.source.ends) - 1)])
                n_blocks = sum(-(-len(rows) // block_rows) for rows in part.between(start, end).values())
                if n_blocks:
                    pieces.append(Piece(number, start, end, first_block))
                first_block, start = first_block + n_blocks, end
        anywhere = all(part.source.is_remote for part in parts)
        return cls(name, tuple(parts), tuple(pieces), block_rows, anywhere, with_inputs)

    @property
    def n_groups(self) -> int:
        """The number of pieces."""
        return len(self.pieces)

    def blocks(self, group: int, seen: Collection[int] = ()) -> Iterator[tuple[int, InputBlock]]:
        """Read a piece once, and yield its blocks as their last rows come. Errors are those of BlockSource."""
        piece = self.pieces[group]
        part = self.parts[piece.part]
        blocks: dict[int, tuple[str, Ints]] = {}
        number = piece.first_block
        for split, rows in part.between(piece.start, piece.end).items():
            for start in range(0, len(rows), self.block_rows):
                blocks[number] = split, rows[start : start + self.block_rows]
                number += 1
        blocks = {number: block for number, block in blocks.items() if number not in seen}
        if not blocks:
            return
        numbers = np.repeat(list(blocks), [len(rows) for _, rows in blocks.values()])
        rows = np.concatenate([rows for _, rows in blocks.values()])
        order = np.argsort(rows, kind="stable")
        open_blocks: dict[int, list[RowSpan]] = {number: [] for number in blocks}
        left = {number: len(block_rows) for number, (_, block_rows) in blocks.items()}
        start = 0
        for span in part.source.spans(part.plan.file_columns, rows[order], self.block_rows, part.plan.texts):
            at = numbers[order[start : start + span.n]]
            start += span.n
            for number in np.unique(at).tolist():
                mask = at == number
                n, first = int(mask.sum()), int(mask.argmax())
                table = span.table
                if table is not None and n < span.n:  # neighbours are sliced, which copies nothing
                    table = table.slice(first, n) if mask[first : first + n].all() else table.filter(pa.array(mask))
                open_blocks[number].append(RowSpan(n, table, span.error))
                left[number] -= n
                if not left[number]:
                    split, block_rows = blocks[number]
                    block = _block(part, split, block_rows, open_blocks.pop(number))
                    yield number, replace(block, inputs=_inputs(block)) if self.with_inputs else block


def _block(part: Part, split: str, rows: Ints, spans: Sequence[RowSpan]) -> InputBlock:
    """Return the rows of a block as they were read."""
    errors: dict[int, UnreadableError] = {}
    start = 0
    for span in spans:
        if span.error is not None:
            errors |= dict.fromkeys(range(start, start + span.n), span.error)
        start += span.n
    readable = np.ones(len(rows), dtype=bool)
    readable[list(errors)] = False
    tables = [span.table for span in spans if span.table is not None]
    block = (
        read_block(part.plan, pa.concat_tables(tables), rows[readable], part.source)
        if tables
        else InputBlock([], np.zeros(0, np.int32) if LABEL in part.plan.columns else None, {}, 0)
    )
    ids = iter(block.example_ids)
    lost = iter(_ids_of_unreadable(part, rows[~readable]) if errors else ())
    labels = None
    if block.labels is not None:
        labels = np.full(len(rows), UNKNOWN_LABEL, np.int32)
        labels[readable] = block.labels
    return InputBlock(
        [next(ids) if ok else next(lost) for ok in readable.tolist()],
        labels,
        block.columns,
        block.n_bytes,
        {position: str(error) for position, error in errors.items()},
        any(isinstance(error, UnopenedError) for error in errors.values()),
        split,
    )


def _inputs(block: InputBlock) -> pa.Array:
    """Return a digest of what models read of each row, null where it could not be read."""
    readable = block.readable
    digests = row_digests(block.columns, int(readable.sum()))
    positions = np.where(readable, np.cumsum(readable) - 1, -1)
    return digests.take(pa.array(positions, mask=~readable))


def _ids_of_unreadable(part: Part, rows: Ints) -> list[str]:
    """Return the ids of rows whose other columns cannot be read; of rows whose id cannot either, their places."""
    source, plan = part.source, part.plan
    if not plan.ids:
        names: list[str] = source.row_names(rows).to_pylist()
        return names
    ids: list[str] = []
    for span in source.spans(plan.ids, rows, len(rows), plan.texts):
        start = len(ids)
        places = [source.place_of(int(row)) for row in rows[start : start + span.n]]
        ids += places if span.table is None else plan.unique(read_ids(span.table.column(0), places.__getitem__))
    return ids
