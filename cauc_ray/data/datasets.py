"""The datasets that models' logits are collected on: the paper's nine by name, and anybody's own by path."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.blocks import InputBlock, ids_digest
from cauc_ray.data.catalog import FoundDataset, find_dataset
from cauc_ray.data.columns import Reading, find_columns, read_block, read_ids
from cauc_ray.data.partitions import Partition
from cauc_ray.data.splits import (
    PAPER_RULES,
    RULE_PARTITIONS,
    Rule,
    SplitRows,
    choose_rule,
    describe_rule,
    split_by_rule,
)
from cauc_ray.errors import ConfigError, DataError, unknown_name

_IDS_AT_ONCE = 65_536


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """What a dataset is opened from; plain, so that any process can.

    dataset: "NAME" of one of the paper's nine, "NAME=PATH" for its files at a path, "PATH" of anybody's own, or
    "hub:ORG/NAME" or "hub:ORG/NAME:CONFIG".   columns: canonical name -> the file's own, several for choices joined
    with "+".   seed: of the splits.
    """

    dataset: str
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0


class Dataset:
    """Labelled examples in splits, read a block of rows at a time; open_dataset returns it.

    source: opens the same dataset in a process that runs elsewhere, in another folder.   name: for people.
    task: "image-classification" or "multiple-choice".   rule: how its splits came about, in one phrase.
    split_sizes: rows of each split.   ids: a digest of all rows' ids, in their order.
    """

    def __init__(
        self,
        source: DatasetSource,
        *,
        name: str,
        rule: str,
        parts: Mapping[str, Partition],
        readings: Mapping[str, Reading],
        splits: Mapping[str, SplitRows],
        only: str | None,
        ids: str,
    ) -> None:
        """Take what open_dataset found.   only: the partition that is the only one, if one is."""
        self.source = source
        self.name = name
        self.rule = rule
        self.task = next(iter(readings.values())).task
        self.split_sizes = {split: len(picked.rows) for split, picked in splits.items()}
        self.ids = ids
        self._parts, self._readings, self._splits, self._only = parts, readings, splits, only

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes when files, their sizes or row counts, columns, seed or rule do; not with their path."""
        try:
            parts = {name: part.identity for name, part in self._parts.items()}
        except OSError as error:
            raise DataError(f"{self.name} cannot be read: {error}") from error
        readings = {name: [reading.benchmark, dict(reading.own)] for name, reading in self._readings.items()}
        content = json.dumps([self.rule, self.source.seed, parts, readings], sort_keys=True)
        return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:16]

    def blocks(self, split: str, rows: int, done: Container[int] = frozenset()) -> Iterator[tuple[int, InputBlock]]:
        """Yield a split's rows in the order of the files, in numbered blocks of at most so many, the same every time.

        A block whose number is in `done` is left out, and what only it needs is not read. The split `all` is every
        row of a dataset that has one partition.
        Raises ConfigError for an unknown split; DataError naming file and row where something cannot be read.
        """
        splits = dict(self._splits)
        if self._only is not None:
            splits["all"] = SplitRows(self._only, np.arange(self._parts[self._only].n_rows))
        if split not in splits:
            raise ConfigError(f"{self.name}: {unknown_name('split', split, splits)}")
        return self._blocks(splits[split], rows, done)

    def _blocks(self, picked: SplitRows, rows: int, done: Container[int]) -> Iterator[tuple[int, InputBlock]]:
        part, reading = self._parts[picked.partition], self._readings[picked.partition]
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
    try:
        return _opened(source, find_dataset(source.dataset))
    except OSError as error:
        raise DataError(f"{source.dataset} cannot be read: {error}") from error
    except UnicodeEncodeError as error:  # a file's name, which is its example's id
        raise DataError(f"{source.dataset}: the name {error.object!r} is not valid UTF-8; rename it") from error


def _opened(source: DatasetSource, found: FoundDataset) -> Dataset:
    rule, names = _rule(found)
    parts = {name: found.openers[name]() for name in names}
    empty = next((part.source for part in parts.values() if part.n_rows == 0), None)
    if empty is not None:
        raise DataError(f"{empty} holds no rows")
    published, benchmark = (found.benchmark.published, found.name) if found.benchmark else (None, "")
    readings = {name: find_columns(part, source.columns, published, benchmark) for name, part in parts.items()}
    tasks = {reading.task: name for name, reading in readings.items()}
    if len(tasks) > 1:
        raise DataError(f"{found.name}: the partitions {' and '.join(tasks.values())} are of different tasks")
    ids = [_unique_ids(part, readings[name]) for name, part in parts.items()]
    return Dataset(
        replace(source, dataset=found.dataset),
        name=found.name,
        rule=describe_rule(rule, list(parts), source.seed),
        parts=parts,
        readings=readings,
        splits=_splits(found, rule, {name: part.n_rows for name, part in parts.items()}, source.seed),
        only=names[0] if len(found.openers) == 1 else None,
        ids=ids_digest(ids),
    )


def _rule(found: FoundDataset) -> tuple[Rule, tuple[str, ...]]:
    """Return the rule and the partitions that it takes rows from."""
    there = tuple(found.openers)
    benchmark = found.benchmark
    if benchmark is None or (benchmark.unsplit and len(there) == 1):
        try:
            rule = choose_rule(there)
        except DataError as error:
            raise DataError(f"{found.place}: {error}") from error
    else:
        rule = PAPER_RULES[found.name]
    if rule == "three-way" and len(there) == 1:
        return rule, there
    needed = RULE_PARTITIONS[rule]
    if benchmark is not None:
        needed = tuple(name for name in needed if name != "test") + (benchmark.tests if "test" in needed else ())
    missing = [name for name in needed if name not in there]
    if missing:
        remedy = f"give {found.name}=PATH, a folder that has all of them"
        if "=" in found.dataset:
            remedy = f"add it, or give the path alone for {'a 25/25/50 cut' if len(there) == 1 else 'what there is'}"
        raise DataError(
            f"{found.name} is split from its partitions {' and '.join(needed)}, and {found.place} has no "
            f"{missing[0]} (it has {', '.join(there) or 'none'}); {remedy}"
        )
    return rule, needed


def _splits(found: FoundDataset, rule: Rule, sizes: Mapping[str, int], seed: int) -> dict[str, SplitRows]:
    """Return the splits by name: calibration, validation, and test or each of a benchmark's test partitions."""
    tests = found.benchmark.tests if found.benchmark else ("test",)
    try:
        splits = split_by_rule(rule, {**sizes, "test": sizes[tests[0]]} if tests[0] in sizes else sizes, seed)
    except DataError as error:
        raise DataError(f"{found.name}: {error}") from error
    if tests == ("test",):
        return splits
    tested = {test: SplitRows(test, np.arange(sizes[test])) for test in tests}
    return {name: split for name, split in splits.items() if name != "test"} | tested


def _unique_ids(part: Partition, reading: Reading) -> str:
    """Return the digest of a partition's ids. Raises DataError where one is null or is a duplicate."""
    if "example_id" not in reading.own:
        return ids_digest([])
    own = reading.own["example_id"][0]
    texts: list[pa.ChunkedArray] = []
    for start, table in zip(count(0, _IDS_AT_ONCE), part.tables([own], np.arange(part.n_rows), _IDS_AT_ONCE)):
        texts.append(read_ids(table.column(own), part, start))
    ids = pa.chunked_array([chunk for text in texts for chunk in text.chunks], pa.string())
    counts = pc.value_counts(ids)
    if len(counts) < len(ids):
        example = counts.field(0)[pc.index(pc.greater(counts.field(1), 1), True).as_py()]
        first, second = np.flatnonzero(pc.equal(ids, example).to_numpy())[:2]
        raise DataError(
            f"{part.place(int(second))}: example id {example.as_py()!r} is a duplicate of that at "
            f"{part.place(int(first))}; leave one, or name a column of other ids with --columns example_id=NAME"
        )
    return ids_digest(ids.to_pylist())
