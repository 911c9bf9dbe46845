"""The datasets that models' logits are collected on: the paper's nine by name, and anybody's own by path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow.compute as pc

from cauc_ray.data.benchmarks import FoundDataset, find_dataset
from cauc_ray.data.blocks import InputBlock, ids_digest
from cauc_ray.data.columns import Reading, find_columns, find_features, read_block, read_ids
from cauc_ray.data.folders import typed
from cauc_ray.data.rows import Rows
from cauc_ray.data.splits import (
    RULE_PARTITIONS,
    Rule,
    SplitRows,
    choose_rule,
    describe_rule,
    split_by_rule,
)
from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.files.paths import readable


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """What a dataset is opened from; plain, so that any process can.

    dataset: "NAME" of one of the paper's nine, "NAME=PATH" for its files at a path, "PATH" of anybody's own, or
    "hub:ORG/NAME" or "hub:ORG/NAME:CONFIG".   columns: canonical name -> the file's own, several for choices joined
    with "+".   seed: of the splits.   tabular: models read all columns by their own names, but for ids and labels.
    names: of the options, by which a column of labels may call them.
    """

    dataset: str
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    tabular: bool = False
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """Labelled examples in splits, read a block of rows at a time; plain, so that any process can read it.

    source: opens the same dataset in another folder, too.   name: for people.
    rule: how its splits came about, in one phrase.   ids: a digest of all rows' ids, in their order.
    parts, readings: its partitions, and how each is read.   splits: the rows of each.   only: the partition that is
    the only one, if one is.
    """

    source: DatasetSource
    name: str
    rule: str
    ids: str
    parts: Mapping[str, Rows]
    readings: Mapping[str, Reading]
    splits: Mapping[str, SplitRows]
    only: str | None

    @property
    def task(self) -> str:
        """Return "image-classification", "multiple-choice" or "classification"."""
        return next(iter(self.readings.values())).task

    @property
    def is_remote(self) -> bool:
        """Return whether its files have a URI, so that every machine can read them."""
        return "://" in self.source.dataset

    @property
    def streamed(self) -> bool:
        """Return whether some partition is read from its first row on, whichever are wanted."""
        return any(part.streamed for part in self.parts.values())

    @property
    def split_sizes(self) -> dict[str, int]:
        """Return the rows of each split."""
        return {split: len(picked.rows) for split, picked in self.splits.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes when files, their sizes or row counts, columns, seed or rule do; not with their path."""
        parts = {name: part.identity for name, part in self.parts.items()}
        readings = {name: [reading.benchmark, dict(reading.own)] for name, reading in self.readings.items()}
        names = [list(self.source.names)] if self.source.names else []
        content = json.dumps([self.rule, self.source.seed, parts, readings, *names], sort_keys=True)
        return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:16]

    def blocks(self, split: str, rows: int, done: Container[int] = frozenset()) -> Iterator[tuple[int, InputBlock]]:
        """Yield a split's rows in the order of the files, in numbered blocks of at most so many, the same every time.

        A block whose number is in `done` is left out, and what only it needs is not read. The split `all` is every
        row of a dataset that has one partition.
        Raises ConfigError for an unknown split; DataError naming file and row where something cannot be read.
        """
        whole = {} if self.only is None else {"all": SplitRows(self.only, np.arange(self.parts[self.only].n_rows))}
        splits = {**self.splits, **whole}
        if split not in splits:
            raise ConfigError(f"{self.name}: {unknown_name('split', split, splits)}")
        return self._blocks(splits[split], rows, done)

    def _blocks(self, picked: SplitRows, rows: int, done: Container[int]) -> Iterator[tuple[int, InputBlock]]:
        part, reading = self.parts[picked.partition], self.readings[picked.partition]
        numbered = ((n, picked.rows[start : start + rows]) for n, start in enumerate(range(0, len(picked.rows), rows)))
        wanted = [(n, block) for n, block in numbered if n not in done]
        if wanted:
            tables = part.tables(reading.columns, np.concatenate([block for _, block in wanted]), rows)
            for (n, block), table in zip(wanted, tables, strict=True):
                yield n, read_block(reading, table, block, part, picked.partition)


def open_dataset(source: DatasetSource) -> Dataset:
    """Open a dataset: find its partitions, split them by the paper's rule or by what there is, check the ids.

    Raises DataError, in one line, for what is unreadable, missing or contradictory in the files; ConfigError for
    an unknown name or column and where a library is missing.
    """
    with readable(source.dataset):
        return _opened(source, find_dataset(source.dataset))


def _opened(source: DatasetSource, found: FoundDataset) -> Dataset:
    rule, names = _rule(found)
    parts = {name: (typed(found.openers[name]) if source.tabular else found.openers[name])() for name in names}
    for part in parts.values():
        if part.n_rows == 0:
            raise DataError(f"{part.source} holds no rows")
    benchmark = found.benchmark
    readings = {
        name: find_features(part, source.columns, source.names)
        if source.tabular
        else find_columns(part, source.columns, benchmark.published, benchmark.name, source.names)
        for name, part in parts.items()
    }
    if len({reading.task for reading in readings.values()}) > 1:
        raise DataError(f"{found.name}: the partitions {' and '.join(names)} are of different tasks")
    return Dataset(
        replace(source, dataset=found.dataset),
        name=found.name,
        rule=describe_rule(rule, names, source.seed),
        ids=ids_digest([_unique_ids(part, readings[name]) for name, part in parts.items()]),
        parts=parts,
        readings=readings,
        splits=split_by_rule(rule, {name: part.n_rows for name, part in parts.items()}, source.seed, found.name),
        only=names[0] if len(found.openers) == 1 else None,
    )


def _rule(found: FoundDataset) -> tuple[Rule, tuple[str, ...]]:
    """Return the rule and the partitions that it takes rows from."""
    there, benchmark = tuple(found.openers), found.benchmark
    alone = len(there) == 1
    rule = benchmark.rule
    if rule is None or (benchmark.unsplit and alone):
        rule = choose_rule(there, found.where)
    if rule == "three-way" and alone:
        return rule, there
    needed = tuple(each for name in RULE_PARTITIONS[rule] for each in (benchmark.tests if name == "test" else (name,)))
    missing = next((name for name in needed if name not in there), None)
    if missing is None:
        return rule, needed
    remedy = f"give {found.name}=PATH, a folder that has all of them"
    if "=" in found.dataset:
        remedy = f"add it, or give the path alone for {'a 25/25/50 cut' if alone else 'what there is'}"
    raise DataError(
        f"{found.name} is split from its partitions {' and '.join(needed)}, and {found.where} has no {missing} "
        f"(it has {', '.join(there) or 'none'}); {remedy}"
    )


def _unique_ids(part: Rows, reading: Reading) -> str:
    """Return the digest of a partition's ids. Raises DataError where one is null or is a duplicate."""
    if "example_id" not in reading.own:
        return ids_digest([])
    own = reading.own["example_id"]
    (table,) = part.tables(own, np.arange(part.n_rows), part.n_rows)
    ids = read_ids(table.column(own[0]), part)
    counts = pc.value_counts(ids)
    if len(counts) < len(ids):
        example = counts.field(0)[pc.index(pc.greater(counts.field(1), 1), True).as_py()]
        first, second = np.flatnonzero(pc.equal(ids, example).to_numpy())[:2]
        raise DataError(
            f"{part.name_of(int(second))}: example id {example.as_py()!r} is a duplicate of that at "
            f"{part.name_of(int(first))}; leave one, or name a column of other ids with --columns example_id=NAME"
        )
    return ids_digest(ids.to_pylist())
