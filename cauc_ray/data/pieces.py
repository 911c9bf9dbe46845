"""Files cut into pieces that different processes read, and each piece into blocks, the same every time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from cauc_ray.data.blocks import InputBlock
from cauc_ray.data.columns import LABEL, ColumnPlan, read_block, read_ids, row_digests
from cauc_ray.data.sources import Source
from cauc_ray.files.parquet import RowSpan, UnopenedError
from cauc_ray.numbers.chain import UNKNOWN_LABEL
from cauc_ray.numbers.types import Bools, Ints

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
        splits: The numbers of the rows of each split, int64 (n,), ascending; a range for neighbours.
        ids: Of all rows, string (n,); None where they were not read.
    """

    source: Source
    plan: ColumnPlan
    splits: Mapping[str, Ints | range]
    ids: pa.Array = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Neighbouring rows of a part, and the number of their first block."""

    part: Part
    start: int
    end: int
    first_block: int

    def blocks(self, block_rows: int) -> dict[int, tuple[str, Ints | range]]:
        """Return the split and the row numbers of each block, by its number."""
        blocks: list[tuple[str, Ints | range]] = []
        for split, rows in self.part.splits.items():
            first, last = bisect_left(rows, self.start), bisect_left(rows, self.end)
            for start in range(first, last, block_rows):
                blocks.append((split, rows[start : min(start + block_rows, last)]))
        return dict(enumerate(blocks, self.first_block))


@dataclass(frozen=True, slots=True)
class FileBlocks:
    """Blocks of files; picklable.

    Attributes:
        name: Where the rows come from.
        pieces: What one process reads from start to end.
        block_rows: The most rows of a block.
        anywhere: Whether every node can read them.
        deadline_s: After how long without a block reading is considered hung.
        with_inputs: Whether blocks have digests of what models read.
    """

    name: str
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
        for part in parts:
            start, n_rows, ends = 0, part.source.n_rows, part.source.ends
            row_bytes = part.source.n_bytes / max(1, n_rows)
            piece_rows = max(block_rows, int(min(PIECE_ROWS, PIECE_BYTES / max(1.0, row_bytes))))
            while start < n_rows:
                end = int(ends[min(int(np.searchsorted(ends, start + piece_rows)), len(ends) - 1)])
                piece = Piece(part, start, end, first_block)
                n_blocks = len(piece.blocks(block_rows))
                if n_blocks:
                    pieces.append(piece)
                first_block, start = first_block + n_blocks, end
        anywhere = all(part.source.is_remote for part in parts)
        return cls(name, tuple(pieces), block_rows, anywhere, with_inputs)

    @property
    def n_groups(self) -> int:
        """The number of pieces."""
        return len(self.pieces)

    def blocks(self, group: int, seen: Collection[int] = ()) -> Iterator[tuple[int, InputBlock]]:
        """Read a piece once, and yield its blocks as their last rows come. Errors are those of BlockSource."""
        piece = self.pieces[group]
        blocks = {
            number: (split, np.asarray(rows, dtype=np.int64))
            for number, (split, rows) in piece.blocks(self.block_rows).items()
            if number not in seen
        }
        if not blocks:
            return
        source, plan = piece.part.source, piece.part.plan
        # Blocks of several splits are open at a time: their rows lie among one another.
        numbers = np.repeat(list(blocks), [len(rows) for _, rows in blocks.values()])
        rows = np.concatenate([rows for _, rows in blocks.values()])
        order = np.argsort(rows, kind="stable")
        spans_of: dict[int, list[RowSpan]] = {number: [] for number in blocks}
        start = 0
        for span in source.spans(plan.file_columns, rows[order], self.block_rows, plan.texts):
            span_numbers = numbers[order[start : start + span.n]]
            start += span.n
            # Those that end first come first, whatever a span holds.
            for number in sorted(np.unique(span_numbers).tolist(), key=lambda number: blocks[number][1][-1]):
                split, block_rows = blocks[number]
                spans_of[number].append(_selected(span, span_numbers == number))
                if sum(part.n for part in spans_of[number]) == len(block_rows):
                    block = _block(source, plan, block_rows, spans_of.pop(number), with_inputs=self.with_inputs)
                    yield number, replace(block, split=split)


def _selected(span: RowSpan, mask: Bools) -> RowSpan:
    """Return the rows of a span that a mask selects."""
    n, first = int(mask.sum()), int(mask.argmax())
    table = span.table
    if table is not None and n < span.n:  # neighbours are sliced, which copies nothing
        table = table.slice(first, n) if mask[first : first + n].all() else table.filter(pa.array(mask))
    return RowSpan(n, table, span.error)


def _block(source: Source, plan: ColumnPlan, rows: Ints, spans: Sequence[RowSpan], *, with_inputs: bool) -> InputBlock:
    """Return the rows of a block as they were read."""
    readable = np.repeat([span.error is None for span in spans], [span.n for span in spans])
    tables = [span.table for span in spans if span.table is not None]
    if tables:
        block = read_block(plan, pa.concat_tables(tables), rows[readable], source)
    else:
        block = InputBlock([], np.zeros(0, np.int32) if LABEL in plan.columns else None, {}, 0)
    if with_inputs:
        block = replace(block, inputs=row_digests(block.columns, len(block.example_ids)))
    if readable.all():
        return block
    # Of a row that cannot be read, an id may be known, but no more.
    positions = pa.array(np.cumsum(readable) - 1, mask=~readable)
    ids = np.empty(len(rows), dtype=object)
    ids[readable], ids[~readable] = block.example_ids, _ids_of_unreadable(source, plan, rows[~readable])
    errors = [span.error for span in spans for _ in range(span.n)]
    labels = None if block.labels is None else pa.array(block.labels).take(positions).fill_null(UNKNOWN_LABEL)
    return replace(
        block,
        example_ids=ids.tolist(),
        labels=None if labels is None else labels.to_numpy(),
        inputs=None if block.inputs is None else block.inputs.take(positions),
        unreadable={row: str(error) for row, error in enumerate(errors) if error is not None},
        may_return=any(isinstance(error, UnopenedError) for error in errors),
    )


def _ids_of_unreadable(source: Source, plan: ColumnPlan, rows: Ints) -> list[str]:
    """Return the ids of rows whose other columns cannot be read; of rows whose id cannot either, their places."""
    ids: list[str] = []
    for span in source.spans(plan.ids, rows, texts=plan.texts):
        places = [source.place_of(int(row)) for row in rows[len(ids) : len(ids) + span.n]]
        ids += places if span.table is None else plan.unique(read_ids(span.table.column(0), places.__getitem__))
    return ids
