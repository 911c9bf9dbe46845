"""Blocks of input rows, and what every input of a run or a collection offers: its blocks in groups."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Bools, Ints

# Blocks that were read before, by number, with the digests of their ids; "" if the ids could not be read.
Seen: TypeAlias = Mapping[int, str]


@dataclass(frozen=True, slots=True)
class InputBlock:
    """Some rows of the input.

    Attributes:
        example_ids: Of all rows, str (n,).
        labels: Of all rows, int32 (n,), UNKNOWN_LABEL if unknown, or None without such a column.
        columns: The columns that models read, of the rows that could be read.
        n_bytes: Their size in memory.
        unreadable: Why a row could not be read, by position.
        may_return: Whether rows could not be read because a file cannot be opened, which may be available again later.
        split: The split that the rows are of.
        inputs: A digest of what models read of each row, binary (n,), null where it could not be read; None where it
            is not asked for.
    """

    example_ids: list[str]
    labels: Ints | None
    columns: dict[str, npt.NDArray[Any]]
    n_bytes: int
    unreadable: Mapping[int, str] = field(default_factory=dict)
    may_return: bool = False
    split: str = ""
    inputs: pa.Array | None = None

    @property
    def readable(self) -> Bools:
        """The rows that could be read, bool (n,)."""
        readable = np.ones(len(self.example_ids), dtype=bool)
        readable[list(self.unreadable)] = False
        return readable

    def select(self, mask: Bools) -> InputBlock:
        """Return the rows selected by a mask (n,)."""
        positions = np.flatnonzero(mask).tolist()
        return replace(
            self,
            example_ids=[self.example_ids[position] for position in positions],
            labels=None if self.labels is None else self.labels[mask],
            columns={name: column[mask[self.readable]] for name, column in self.columns.items()},
            n_bytes=int(self.n_bytes * mask.mean()),
            inputs=None if self.inputs is None else self.inputs.filter(pa.array(mask)),
            unreadable={
                number: self.unreadable[position]
                for number, position in enumerate(positions)
                if position in self.unreadable
            },
        )


class BlockSource(Protocol):
    """The blocks of an input in groups; picklable, so that any process can read from it.

    One process reads a group from start to end; several groups are read in parallel.
    """

    @property
    def name(self) -> str:
        """A name for messages."""

    @property
    def anywhere(self) -> bool:
        """Return whether every node can read it, not only the node on which the run was started."""

    @property
    def deadline_s(self) -> float | None:
        """Return after how long without a block it is considered hung, in seconds; None for no limit."""

    @property
    def n_groups(self) -> int:
        """The number of groups."""

    def blocks(self, group: int, seen: Collection[int] = ()) -> Iterator[tuple[int, InputBlock]]:
        """Yield a group's blocks with their numbers; order, numbers and rows are the same every time.

        Args:
            group: Its number.
            seen: Blocks of which nothing is needed; they are left out, or yielded with no more than their ids.

        Raises:
            DataError: The content is invalid (a null id, an unknown label, a column that no model can read), or has
                changed since the input was opened.
        """


def other_rows(name: str, why: str) -> DataError:
    """Return the error for an input that has changed since it was first read."""
    return DataError(
        f"{name} returned other rows than before: {why}. An input must return the same rows in the same order every "
        "time: do not change its files; seed and sort a Ray Dataset, or write it to files first. Resume with the "
        "original input, or start a new run in another folder"
    )


def ids_digest(example_ids: Sequence[str | None]) -> str:
    """Return a hash of rows' ids in order, with which a block is compared when it is read again."""
    return hashlib.blake2b(json.dumps(list(example_ids)).encode(), digest_size=16).hexdigest()


def first_duplicate(ids: pa.Array | pa.ChunkedArray) -> str | None:
    """Return the first id that comes twice, None if all are unique."""
    counts = pc.value_counts(ids)
    counts = counts.combine_chunks() if isinstance(counts, pa.ChunkedArray) else counts
    row = pc.index(pc.greater(counts.field("counts"), 1), True).as_py()
    duplicate: str | None = counts.field("values")[row].as_py() if row >= 0 else None
    return duplicate
