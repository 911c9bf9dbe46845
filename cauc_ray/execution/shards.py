"""Shards of a logit table: which rows each has, and the actor that holds them on its node's disk."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.data.heads import ModelHead
from cauc_ray.data.spool import SpooledLogits, WantedRows
from cauc_ray.numbers.chain import ChainPart
from cauc_ray.numbers.logits import LogitKind, SumsToOne
from cauc_ray.numbers.types import Bools, Ints


@dataclass(frozen=True, slots=True)
class ShardRows:
    """Rows of a shard, in the order in which the first model's files have them.

    ranks: int64 (n,), positions among all rows in order of example_id.   labels: int32 (n,).   wanted: of each model.
    """

    ranks: Ints
    labels: Ints
    wanted: tuple[WantedRows, ...]


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """What is known of a shard's rows once they are read.

    width: most options that a row has.   sums: how near each model's rows are to probabilities.   refused: the row of
    lowest rank that cannot be used, and why; None where all can.
    """

    width: int
    sums: tuple[SumsToOne, ...]
    refused: tuple[int, str] | None


def cut_rows(
    heads: Sequence[ModelHead], labels: Ints, models: Sequence[str], kinds: Sequence[LogitKind], n_shards: int
) -> list[ShardRows]:
    """Cut a chain's rows into shards of about equal size, none empty, along the first model's files.

    heads, models, kinds: of each model.   labels: int32 (N,), of all rows in order of example_id.
    """
    order = np.argsort(heads[0].places)
    return [
        ShardRows(
            ranks=ranks,
            labels=labels[ranks],
            wanted=tuple(
                WantedRows(model, head.files, head.places[ranks], kind)
                for model, kind, head in zip(models, kinds, heads, strict=True)
            ),
        )
        for ranks in np.array_split(order, min(n_shards, len(order)))
    ]


class ShardActor:
    """Holds shards of some chains, each read when it is first asked for. Rows come with every call.

    It may come to hold other shards' rows next to its own, when these lose their actors.
    """

    def __init__(self) -> None:
        self._parts: dict[tuple[int, int], ChainPart] = {}

    def ask(
        self, key: tuple[int, int], rows: ShardRows, question: Callable[[ChainPart], Any], width: int = 0
    ) -> tuple[Any, int]:
        """Answer a question about the rows of a chain and a shard, by number.

        width: of the logits, the most options of all shards. Returns the answer, and the most memory that this process
        has had, in bytes. Raises DataError where the rows are unfit.
        """
        if key not in self._parts:
            spools = tuple(SpooledLogits(wanted) for wanted in rows.wanted)
            # Copies, so that no block of the object store is held between calls.
            self._parts[key] = ChainPart(spools, rows.labels.copy(), rows.ranks.copy())
        part = self._parts[key]
        width = max(width, *(logits.shape[1] for logits in part.logits))
        for logits in part.logits:
            assert isinstance(logits, SpooledLogits)
            logits.width = width
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return question(part), peak if sys.platform == "darwin" else 1024 * peak


def node_of(part: ChainPart) -> str:
    """Return the id of the node where a shard is."""
    import ray

    node: str = ray.get_runtime_context().get_node_id()
    return node


def facts_of(models: Sequence[str], part: ChainPart) -> ShardFacts:
    """Return what is known of a shard's rows.   models: names."""
    spools = [logits for logits in part.logits if isinstance(logits, SpooledLogits)]
    return ShardFacts(spools[0].width, tuple(spool.sums for spool in spools), _refused(models, part, spools))


def _refused(models: Sequence[str], part: ChainPart, spools: Sequence[SpooledLogits]) -> tuple[int, str] | None:
    """Return a row with other options in one model than in the first, or without one that all leave possible."""
    first = spools[0].n_options
    for name, own in zip(models[1:], spools[1:], strict=True):
        differ = np.flatnonzero(own.n_options != first)
        if len(differ):
            row = int(differ[part.ranks[differ].argmin()])
            counts = f"{first[row]} options for model {models[0]!r} and {own.n_options[row]} for model {name!r}"
            return int(part.ranks[row]), f"has {counts}"
    if not any(spool.has_gaps for spool in spools):
        return None
    refused: list[int] = []
    for block in part.blocks():
        shared: Bools = np.logical_and.reduce([np.isfinite(logits[block]) for logits in part.logits])
        refused += part.ranks[block][~shared.any(axis=1)].tolist()
    return (min(refused), "has no option that all models leave possible") if refused else None
