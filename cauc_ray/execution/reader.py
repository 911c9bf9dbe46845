"""What a task that reads a run's input does: a group of blocks, one after the other, in chunks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from cauc_ray.cascade.bundles import Bundle, packed
from cauc_ray.data.blocks import BlockSource, InputBlock, Seen, ids_digest, other_rows
from cauc_ray.errors import DataError
from cauc_ray.execution.manifest import FailedBlock
from cauc_ray.numbers.types import Ints

# The pauses before each further try at a block that cannot be read: damage does not heal, but a file that cannot be
# opened may be there again when its storage is. Of those, every block that stays away halves the patience.
PAUSES_S = (0.2, 0.4)
LONG_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What is needed of a block in addition to the columns that models read.

    group, number: where it is in the input.   chunks: rows and bytes of each.   digest: of the ids, "" where it cannot
    be read.   labels, unreadable, may_return: as InputBlock's.
    """

    group: int
    number: int
    example_ids: pa.Array
    labels: Ints | None
    chunks: tuple[tuple[int, float], ...]
    digest: str
    unreadable: str | None
    may_return: bool


@dataclass(frozen=True, slots=True)
class Work:
    """What is read of an input: its blocks but those that are done, and rows that failed of some that are."""

    source: BlockSource
    done: Seen
    again: Mapping[int, FailedBlock]


@dataclass(frozen=True, slots=True)
class Piece:
    """What a task reads of a group.

    seen: blocks that have come already.   only: the one block that is wanted, None for all others.
    """

    group: int
    seen: Seen
    only: int | None = None


def read_blocks(work: Work, piece: Piece, n_away: int, chunk_rows: int) -> Iterator[Any]:
    """Yield, for each block: its header, its rows in chunks of at most so many, and None for its end.

    n_away: blocks that could not be opened so far.
    """
    for number, block, digest in _settled(work, piece, n_away):
        n = len(block.example_ids) if block.unreadable is None else 0
        starts = range(0, n, chunk_rows)
        rows = [min(chunk_rows, n - start) for start in starts]
        sizes = tuple((each, block.n_bytes * each / n) for each in rows)
        ids = pa.array(block.example_ids, pa.string())
        yield BlockHeader(piece.group, number, ids, block.labels, sizes, digest, block.unreadable, block.may_return)
        for start in starts:  # Ray cannot take "yield from"
            yield Bundle(packed({name: c[start : start + chunk_rows] for name, c in block.columns.items()}))
        yield None


def _settled(work: Work, piece: Piece, n_away: int) -> Iterator[tuple[int, InputBlock, str]]:
    """Yield a piece's blocks and the digests of all their ids, once they could be read or are given up.

    Raises DataError where a block that was read before holds other rows than then.
    """
    source, again = work.source, {number: failed.ids for number, failed in work.again.items()}
    seen = {number: digest for number, digest in work.done.items() if number not in again} | dict(piece.seen)
    first = {**work.done, **seen}
    n_tries = 0
    blocks = source.blocks(piece.group, seen)
    while (found := next(blocks, None)) is not None:
        number, block = found
        digest = ids_digest(block.example_ids) if block.unreadable is None else ""
        if digest and first.get(number) and digest != first[number] and again.get(number, "") is not None:
            raise other_rows(source.name, f"its block {number} has other rows")
        if number in seen or piece.only not in (None, number):
            continue
        pauses = LONG_PAUSES_S[: max(2, len(LONG_PAUSES_S) - n_away)] if block.may_return else PAUSES_S
        if block.unreadable is not None and n_tries < len(pauses):
            time.sleep(pauses[n_tries])
            n_tries += 1
            blocks = source.blocks(piece.group, seen)
            continue
        n_away, n_tries = n_away + block.may_return, 0
        seen[number] = digest
        ids = again.get(number)
        yield number, block if ids is None else _failed_rows(source.name, number, block, ids), digest
        if number == piece.only:
            return


def _failed_rows(name: str, number: int, block: InputBlock, ids: frozenset[str]) -> InputBlock:
    """Return the rows of a block that failed."""
    failed = np.array([example in ids for example in block.example_ids])
    if block.unreadable is not None or failed.sum() != len(ids):
        why = block.unreadable or "an example_id is a duplicate"
        raise DataError(f"{name}: failed rows of block {number} cannot be tried again: {why}")
    return block.where(failed)
