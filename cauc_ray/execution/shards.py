"""Shards of a logit table: which rows each has, and the actor that holds them on its node's disk."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.data.heads import ModelHead
from cauc_ray.data.spool import SpooledLogits, WantedRows, row_groups
from cauc_ray.numbers.chain import ChainPart
from cauc_ray.numbers.types import Bools, Ints


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows of a shard, in the order in which the first model's files have them.

    ranks: int64 (n,), places among all rows in order of example_id.   labels: int32 (n,).   wanted: of each model.
    """

    ranks: Ints
    labels: Ints
    wanted: tuple[WantedRows, ...]


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What a shard says of its rows.

    width: most options that a row has.   refused: a row that cannot be used, by its rank, and why; None where all can.
    """

    width: int
    refused: tuple[int, str] | None


@dataclass(frozen=True, slots=True)
class ShardAnswer:
    """An answer, and the most memory that the shard's process has had, in bytes."""

    value: Any
    peak_bytes: int


def cut_rows(heads: Sequence[ModelHead], labels: Ints, models: Sequence[str], n_shards: int) -> list[ShardRows]:
    """Cut a chain's rows into shards of about equal size, none empty, along the first model's files.

    heads: of each model.   labels: int32 (N,), of all rows in order of example_id.
    A cut moves to the next row group's end where one is near, so that few are decoded twice.
    """
    first = heads[0]
    order = np.argsort(first.places)
    n = len(order)
    n_shards = min(n_shards, n)
    cuts = np.arange(1, n_shards) * n // n_shards
    ends = np.searchsorted(first.places[order], row_groups(first.files))
    if len(ends):
        near = ends[np.abs(ends[None, :] - cuts[:, None]).argmin(axis=1)]
        cuts = np.where(np.abs(near - cuts) <= n // (4 * n_shards), near, cuts)
    return [
        ShardRows(
            ranks=ranks,
            labels=labels[ranks],
            wanted=tuple(
                WantedRows(model, head.files, head.places[ranks]) for model, head in zip(models, heads, strict=True)
            ),
        )
        for ranks in np.split(order, cuts)
    ]


class ShardActor:
    """Holds shards of some chains, each read when it is first asked for. Rows come with every call.

    It may come to hold other shards' rows beside its own, when these lose their actors.
    """

    def __init__(self) -> None:
        self._opened: dict[tuple[int, int], _Opened] = {}

    def node(self) -> ShardAnswer:
        """Return the id of the node where the shard stands."""
        import ray

        return _answer(ray.get_runtime_context().get_node_id())

    def open(self, key: tuple[int, int], rows: ShardRows) -> ShardAnswer:
        """Read rows of a chain and a shard, by number. Returns ShardFacts. Raises DataError where they are unfit."""
        opened = self._shard(key, rows)
        width = max(spool.width for spool in opened.spools)
        return _answer(ShardFacts(width, _refused(rows, opened.spools, opened.at(width))))

    def ask(
        self, key: tuple[int, int], rows: ShardRows, question: Callable[[ChainPart], Any], width: int
    ) -> ShardAnswer:
        """Answer a question about rows.   width: of the logits, the most options of all shards."""
        return _answer(question(self._shard(key, rows).at(width)))

    def _shard(self, key: tuple[int, int], rows: ShardRows) -> _Opened:
        if key not in self._opened:
            spools = tuple(SpooledLogits(wanted) for wanted in rows.wanted)
            # Copies, so that no block of the object store is held between calls.
            self._opened[key] = _Opened(spools, ChainPart(spools, rows.labels.copy(), rows.ranks.copy()))
        return self._opened[key]


@dataclass(frozen=True, slots=True)
class _Opened:
    """Rows that have been read."""

    spools: tuple[SpooledLogits, ...]
    part: ChainPart

    def at(self, width: int) -> ChainPart:
        """Return the rows with logits of a width."""
        for spool in self.spools:
            spool.width = width
        return self.part


def _refused(rows: ShardRows, spools: Sequence[SpooledLogits], part: ChainPart) -> tuple[int, str] | None:
    """Return a row with other options in one model than in the first, or without one that all leave possible."""
    names = [wanted.model for wanted in rows.wanted]
    for name, own in zip(names[1:], spools[1:], strict=True):
        differ = np.flatnonzero(own.n_options != spools[0].n_options)
        if len(differ):
            row = int(differ[0])
            counts = spools[0].n_options[row], own.n_options[row]
            why = f"has {counts[0]} options for model {names[0]!r} and {counts[1]} for model {name!r}"
            return int(rows.ranks[row]), why
    if not any(spool.has_gaps for spool in spools):
        return None
    for block in part.blocks():
        shared: Bools = np.logical_and.reduce([np.isfinite(logits[block]) for logits in part.logits])
        none = np.flatnonzero(~shared.any(axis=1))
        if len(none):
            return int(rows.ranks[block][none[0]]), "has no option that all models leave possible"
    return None


def _answer(value: Any) -> ShardAnswer:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return ShardAnswer(value, peak if sys.platform == "darwin" else 1024 * peak)
