"""Reading a run's input: several readers at once, each a group of blocks after the other, in a process of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from cauc_ray.cascade.parcels import Parcel, packed
from cauc_ray.data.blocks import BlockSource, InputBlock, ids_digest
from cauc_ray.execution.actors import in_group
from cauc_ray.numbers.types import Ints

# The pauses before each further try at a block that cannot be read: damage does not heal, but a file that cannot be
# opened may be there again when its storage is. Of those, every block that stays away halves the patience.
PAUSES_S = (0.2, 0.4)
LONG_PAUSES_S = (0.5, 1.0, 2.0, 4.0, 8.0, 15.0)


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What the controller needs of a block.

    chunks: rows and bytes of each.   unreadable: why it has ids and no columns.   ids: the digests of this block's ids
    and of those that the reader went over to get here, by number; unreadable blocks have none.
    """

    number: int
    n_rows: int
    chunks: tuple[tuple[int, float], ...]
    unreadable: str | None
    ids: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """Returned in place of a block after a group's last.   last: its number, -1 for none.   ids: see BlockHeader."""

    last: int
    ids: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class BlockNames:
    """What is needed of a block's rows when they are committed.   labels: as InputBlock's."""

    example_ids: pa.Array
    labels: Ints | None


class BlockReader:
    """Reads blocks in chunks of at most so many rows; goes on where it was, or begins a group anew."""

    def __init__(self, source: BlockSource, chunk_rows: int, n_chunks: int) -> None:
        self._source = source
        self._chunk_rows = chunk_rows
        self._n_chunks = n_chunks
        self._at = (-1, 0)
        self._n_away = 0
        self._last = -1
        self._ids: dict[int, str] = {}
        self._blocks: Iterator[tuple[int, InputBlock | None]] = iter(())
        self._n_seen = 0

    @in_group("watch")
    def n_seen(self) -> int:
        """Return over how many blocks it has gone: one that goes over what is done or lost before does not hang."""
        return self._n_seen

    def read(self, group: int, place: int) -> list[Any]:
        """Return a group's block at a place among those that are to be done: header, names, then every chunk.

        The header is a GroupEnd after the last block. Chunks that the block does not fill are None.
        """
        found = self._block(group, place)
        for pause_s in self._pauses(found):
            if found is None or found[1].unreadable is None:
                break
            time.sleep(pause_s)
            self._at = (-1, 0)
            found = self._block(group, place)
        self._n_away += found is not None and found[1].may_return
        ids, self._ids = self._ids, {}
        if found is None:
            return [GroupEnd(self._last, ids), *[None] * (1 + self._n_chunks)]
        number, block = found
        n, size = len(block.example_ids), self._chunk_rows
        chunks, parcels = [], []
        for start in range(0, n if block.unreadable is None else 0, size):
            rows = min(size, n - start)
            chunks.append((rows, block.n_bytes * rows / n))
            parcels.append(Parcel(packed({name: c[start : start + rows] for name, c in block.columns.items()})))
        header = BlockHeader(number, n, tuple(chunks), block.unreadable, ids)
        names = BlockNames(pa.array(block.example_ids, pa.string()), block.labels)
        return [header, names, *parcels, *[None] * (self._n_chunks - len(parcels))]

    def _pauses(self, found: tuple[int, InputBlock] | None) -> tuple[float, ...]:
        if found is None or not found[1].may_return:
            return PAUSES_S
        return LONG_PAUSES_S[: max(2, len(LONG_PAUSES_S) - self._n_away)]

    def _block(self, group: int, place: int) -> tuple[int, InputBlock] | None:
        if self._at != (group, place):
            self._blocks = self._source.blocks(group)
            self._last, self._ids = -1, {}
            for _ in range(place):
                self._next()
        self._at = (group, place + 1)
        return self._next()

    def _next(self) -> tuple[int, InputBlock] | None:
        """Return the group's next block that is to be done, and note which rows it holds."""
        for number, block in self._blocks:
            self._last, self._n_seen = number, self._n_seen + 1
            if block is not None:
                if block.unreadable is None:
                    self._ids[number] = ids_digest(block.example_ids)
                return number, block
        return None


class ReadPlan:
    """Which block each reader reads next: it goes through its group, then takes the next that nobody has."""

    def __init__(self, n_groups: int) -> None:
        self._n_begun, self._n_groups = 0, n_groups
        self._begun: dict[int, tuple[int, int]] = {}
        self._again: list[tuple[int, int]] = []

    @property
    def exhausted(self) -> bool:
        """Say whether there is nothing more to ask for."""
        return not (self._n_begun < self._n_groups or self._begun or self._again)

    def next_place(self, reader: int) -> tuple[int, int] | None:
        """Return the group and the place in it that a reader shall read now, None if others read all that is left."""
        if self._again:
            return self._again.pop(0)
        if reader not in self._begun:
            if self._n_begun == self._n_groups:
                return None
            self._begun[reader] = (self._n_begun, 0)
            self._n_begun += 1
        group, place = self._begun[reader]
        self._begun[reader] = (group, place + 1)
        return group, place

    def is_begun(self, group: int) -> bool:
        """Return whether a reader is inside a group."""
        return any(begun == group for begun, _ in self._begun.values())

    def group_ended(self, reader: int, group: int) -> None:
        """Note that a group has no further block."""
        if reader in self._begun and self._begun[reader][0] == group:
            del self._begun[reader]

    def read_again(self, places: list[tuple[int, int]]) -> None:
        """Have places read again, by whoever asks next: their reader died before it delivered them."""
        self._again += places
