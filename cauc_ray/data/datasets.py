"""The datasets on which logits are collected: the paper's nine by name, any other by path or hub id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow.compute as pc

from cauc_ray.data.benchmarks import FoundDataset, find_dataset, typed
from cauc_ray.data.blocks import InputBlock, ids_digest
from cauc_ray.data.columns import Published, Reading, find_columns, read_block, read_ids, require_known_labels
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
from cauc_ray.numbers.types import Ints


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """The arguments to open a dataset; picklable, so that any process can open it.

    dataset: "NAME" of one of the paper's nine, "NAME=PATH" for its files at a path, "PATH" of any other dataset, or
    "hub:ORG/NAME" or "hub:ORG/NAME:CONFIG".   columns: canonical name -> the file's own name, for choices several
    joined with "+".   seed: of the splits.   tabular: models read all columns by their own names, except ids and
    labels. names: of the options, which the column of labels may use.
    """

    dataset: str
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    tabular: bool = False
    names: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Dataset:
    """Labelled examples in splits, read in blocks of rows; picklable, so that any process can read it.

    source: opens the same dataset from any working folder.   name: for display.
    rule: how its splits were made, in one phrase.   ids: a digest of all rows' ids, in order.
    parts, readings: its partitions, and how each is read.   splits: the rows of each.   only: the name of the only
    partition, None if there are several.
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
    def columns(self) -> frozenset[str]:
        """Return the columns that models get of every row."""
        return frozenset.intersection(*(frozenset(reading.own) for reading in self.readings.values())) | {"example_id"}

    @property
    def is_remote(self) -> bool:
        """Return whether its files are at a URI, so that every machine can read them."""
        return "://" in self.source.dataset

    @property
    def streamed(self) -> bool:
        """Return whether some partition can only be read from its first row on."""
        return any(part.streamed for part in self.parts.values())

    @property
    def split_sizes(self) -> dict[str, int]:
        """Return the rows of each split."""
        return {split: len(picked.rows) for split, picked in self.splits.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A hash that changes with the files' names, sizes or rows, columns, seed or rule; not with their path."""
        parts = {name: part.identity for name, part in self.parts.items()}
        readings = {name: [reading.benchmark, dict(reading.own)] for name, reading in self.readings.items()}
        names = [list(self.source.names)] if self.source.names else []
        content = json.dumps([self.rule, self.source.seed, parts, readings, *names], sort_keys=True)
        return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:16]

    def blocks(self, split: str, rows: int, done: Container[int] = frozenset()) -> Iterator[tuple[int, InputBlock]]:
        """Yield a split's rows in the order of the files, in numbered blocks of at most `rows` rows, always the same.

        Blocks whose numbers are in `done` are left out and, where possible, not read. The split `all` has all rows
        of a dataset with a single partition.
        Raises ConfigError for an unknown split; DataError naming file and row if something cannot be read.
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
    """Open a dataset: find its partitions, split them by the paper's or a general rule, check the ids.

    Raises DataError, in one line, if files are unreadable, missing or inconsistent; ConfigError for an unknown name or
    column and for a missing library.
    """
    with readable(source.dataset):
        return _opened(source, find_dataset(source.dataset))


def _opened(source: DatasetSource, found: FoundDataset) -> Dataset:
    rule, names = _rule(found)
    parts = {name: (typed(found.openers[name]) if source.tabular else found.openers[name])() for name in names}
    for part in parts.values():
        if part.n_rows == 0:
            raise DataError(f"{part.source} has no rows")
    benchmark = found.benchmark
    readings = {
        name: find_columns(
            part, source.columns, benchmark.published, benchmark.name, source.names, tabular=source.tabular
        )
        for name, part in parts.items()
    }
    for name, part in parts.items():
        require_known_labels(readings[name], part)
    kept, of_kept = _kept(parts, benchmark.published)
    picked = split_by_rule(rule, {name: len(rows) for name, rows in kept.items()}, source.seed, found.name)
    if len({reading.task for reading in readings.values()}) > 1:
        raise DataError(f"{found.name}: the partitions {' and '.join(names)} have different tasks")
    return Dataset(
        replace(source, dataset=found.dataset),
        name=found.name,
        rule=describe_rule(rule, names, source.seed) + of_kept,
        ids=ids_digest([_unique_ids(part, readings[name]) for name, part in parts.items()]),
        parts=parts,
        readings=readings,
        splits={split: replace(own, rows=kept[own.partition][own.rows]) for split, own in picked.items()},
        only=names[0] if len(found.openers) == 1 else None,
    )


def _rule(found: FoundDataset) -> tuple[Rule, tuple[str, ...]]:
    """Return the split rule and the partitions that it uses."""
    there, benchmark = tuple(found.openers), found.benchmark
    alone = len(there) == 1
    rule = benchmark.rule
    if benchmark.without_test is not None and "test" not in there and "train" in there:
        rule = benchmark.without_test
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
        remedy = f"add it, or give only the path for {'a 25/25/50 cut' if alone else 'the partitions that exist'}"
    raise DataError(
        f"{found.name} is split from its partitions {' and '.join(needed)}, and {found.where} has no {missing} "
        f"(it has {', '.join(there) or 'none'}); {remedy}"
    )


def _kept(parts: Mapping[str, Rows], published: Published) -> tuple[dict[str, Ints], str]:
    """Return by partition the numbers of the rows that count, ascending, and a phrase on those that do not."""
    kept: dict[str, Ints] = {name: np.arange(part.n_rows) for name, part in parts.items()}
    phrase = ""
    for name, part in parts.items():
        column, value = published.kept or ("", "")
        if column in part.columns:
            (table,) = part.tables([column], kept[name], part.n_rows)
            kept[name] = np.flatnonzero(pc.equal(table.column(column), value).fill_null(False).to_numpy())
            phrase = f", of rows whose {column} is {value}"
    return kept, phrase


def _unique_ids(part: Rows, reading: Reading) -> str:
    """Return the digest of a partition's ids. Raises DataError if one is null or a duplicate."""
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
            f"{part.name_of(int(second))}: example id {example.as_py()!r} is a duplicate of "
            f"{part.name_of(int(first))}; remove one, or name a column with unique ids with --columns example_id=NAME"
        )
    return ids_digest(ids.to_pylist())
