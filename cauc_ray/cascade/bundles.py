"""Rows on their way to a model: their columns, what policies have made of them so far, and which of them a call has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cauc_ray.data.values import concat_column
from cauc_ray.models.answers import Batch
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import joined_states

if TYPE_CHECKING:
    import pyarrow as pa

# Only runs have columns in Arrow, and import pyarrow.
Column: TypeAlias = "npt.NDArray[Any] | pa.Array"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Columns by name, numbers as numpy arrays, bytes in Arrow; state: float64 (n, S), of the rows that carry one."""

    columns: Mapping[str, Column]
    state: Floats | None = None

    @property
    def n_rows(self) -> int:
        """Return how many rows it holds."""
        return len(next(iter(self.columns.values()))) if self.state is None else len(self.state)


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of a call, and what is asked of them.

    Attributes:
        bundle: The argument of the call that holds them.
        positions: Positions in it, int (n,).
        policy: Key of the policy that decides.
    """

    bundle: int
    positions: Ints
    policy: str = ""

    def __len__(self) -> int:
        return len(self.positions)

    def cut(self, start: int, end: int) -> Part:
        """Return some of the rows, from one position in the part to another."""
        return self if start == 0 and end >= len(self) else replace(self, positions=self.positions[start:end])


def in_batches(parts: Sequence[Part], batch_size: int) -> list[list[Part]]:
    """Return the rows of parts, in their order, in batches of a size at most."""
    batches: list[list[Part]] = []
    room = 0
    for part in parts:
        start = 0
        while start < len(part):
            if not room:
                batches.append([])
                room = batch_size
            piece = part.cut(start, start + room)
            batches[-1].append(piece)
            start += len(piece)
            room -= len(piece)
    return batches


def joined(bundles: Sequence[Bundle]) -> Bundle:
    """Return the rows of bundles, in their order, as one."""
    bundles = [bundle for bundle in bundles if bundle.columns or bundle.state is not None]
    if len(bundles) < 2:
        return bundles[0] if bundles else Bundle({})
    columns = {name: _concatenated([bundle.columns[name] for bundle in bundles]) for name in bundles[0].columns}
    return Bundle(columns, joined_states([(bundle.n_rows, bundle.state) for bundle in bundles]))


def _concatenated(columns: Sequence[Column]) -> Column:
    if any(isinstance(column, np.ndarray) for column in columns):
        return concat_column([_plain(column) for column in columns])
    import pyarrow as pa

    return pa.concat_arrays(columns)


def packed(columns: Batch) -> dict[str, Column]:
    """Return columns as they travel to workers: those of bytes, as images are, in Arrow.

    A worker maps numbers and Arrow from shared memory, but would copy every one of the block's Python objects
    for each call that takes a few of its rows.
    """
    import pyarrow as pa

    return {name: pa.array(c, pa.large_binary()) if _holds_bytes(c) else c for name, c in columns.items()}


def n_bytes(columns: Batch) -> int:
    """Return about how many bytes columns take."""
    return sum(_column_bytes(column) for column in columns.values())


def _column_bytes(column: npt.NDArray[Any]) -> int:
    if column.dtype != object:
        return int(column.nbytes)
    return sum(
        value.nbytes if isinstance(value, np.ndarray) else len(value) if value is not None else 0 for value in column
    )


def gathered(parts: Sequence[Part], bundles: Sequence[Bundle]) -> Batch:
    """Gather the parts' rows, column by column, into arrays that the model may write to."""
    return {
        name: concat_column([_plain(_take(bundles[part.bundle].columns[name], part.positions)) for part in parts])
        for name in bundles[parts[0].bundle].columns
    }


def chosen(parts: Sequence[Part], bundles: Sequence[Bundle], mask: Bools) -> dict[str, Column]:
    """Gather those of a call's rows that a mask (n,) marks, as they travel on."""
    masks = np.split(mask, np.cumsum([len(part) for part in parts])[:-1])
    pieces = [(bundles[part.bundle], part.positions[rows]) for part, rows in zip(parts, masks, strict=True)]
    return {
        name: _concatenated([_take(bundle.columns[name], rows) for bundle, rows in pieces if len(rows)])
        for name in bundles[parts[0].bundle].columns
    }


def states_of(parts: Sequence[Part], bundles: Sequence[Bundle]) -> Floats | None:
    """Gather what the parts' rows carry, padded with -inf to the widest; None where they carry nothing."""
    held = [(part, bundles[part.bundle].state) for part in parts]
    return joined_states([(len(part), None if state is None else state[part.positions]) for part, state in held])


def _holds_bytes(column: npt.NDArray[Any]) -> bool:
    return column.dtype == object and all(value is None or isinstance(value, bytes) for value in column)


def _take(column: Column, positions: Ints) -> Column:
    """Copy rows of a column: what is in shared memory cannot be written to, and would be kept there by a view."""
    return column[positions] if isinstance(column, np.ndarray) else column.take(positions)


def _plain(column: Column) -> npt.NDArray[Any]:
    if isinstance(column, np.ndarray):
        return column
    plain: npt.NDArray[Any] = column.to_numpy(zero_copy_only=False)
    return plain
