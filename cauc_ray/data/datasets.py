"""Datasets of collections and runs: files or a split of the hub, how their columns are read, and their splits."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.benchmarks import Benchmark
from cauc_ray.data.blocks import BlockSource, first_duplicate
from cauc_ray.data.columns import (
    LABEL,
    NOT_AN_OPTION,
    Task,
    describe_options,
    label_numbers,
    plan_columns,
    read_ids,
)
from cauc_ray.data.partitions import Located, locate
from cauc_ray.data.pieces import FileBlocks, Part
from cauc_ray.data.sources import ID, Source
from cauc_ray.data.splits import RULE_PARTITIONS, Rule, choose_rule, describe_rule, split_by_rule
from cauc_ray.errors import ConfigError, DataError, unknown_name, warn
from cauc_ray.files.paths import AnyPath, path_of, readable
from cauc_ray.numbers.types import Bools, Ints

# The split that has every row.
ALL = "all"


class RunInput(Protocol):
    """The input of a run."""

    @property
    def path(self) -> AnyPath:
        """Where the rows come from, for display."""

    @property
    def columns(self) -> Sequence[str] | None:
        """The columns; None if they are unknown until they are read."""

    @property
    def n_rows(self) -> int | None:
        """The number of rows; None if it is unknown until they are read."""

    @property
    def row_bytes(self) -> float:
        """A row's mean size in bytes, uncompressed; 0 if unknown."""

    @property
    def identity(self) -> dict[str, int]:
        """Numbers of rows by a text that changes with the content; a resumed run compares it."""

    def blocks(self, block_rows: int, columns: frozenset[str] | None = None) -> BlockSource:
        """Return blocks of at most `block_rows` rows.   columns: those to read if they exist, None for all."""


@dataclass(frozen=True, slots=True)
class DatasetSpec:
    """What names a dataset and says how it is read.

    Attributes:
        dataset: "NAME" of one of the paper's nine, "NAME=PATH" for its files at a path, "PATH" of any other dataset, or
            "hub:ORG/NAME" or "hub:ORG/NAME:CONFIG".
        task: What the rows are.
        columns: Canonical name to the file's own name, for choices several joined with "+".
        seed: Of the splits.
        labels: The names of the options, which the column of labels may use.
        model_columns: The columns that models read, None for all.
        skip_unknown_labels: Leave out rows whose label is none of the options.
        kept_columns: Columns that a logit table keeps.
        rule: By which labels in words are the same as answers; None where labels are options.
    """

    dataset: str
    task: Task
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    labels: tuple[str, ...] | None = None
    model_columns: frozenset[str] | None = None
    skip_unknown_labels: bool = False
    kept_columns: tuple[str, ...] = ()
    rule: str | None = None


@dataclass(frozen=True)
class Dataset:
    """Rows of files, in splits, or all of them as the input of a run.

    Attributes:
        spec: Opens the same dataset from any working folder.
        name: For display.
        rule: How its splits were made, in one phrase.
        parts: Its files, and the rows of each split.
    """

    spec: DatasetSpec
    name: str
    rule: str
    parts: tuple[Part, ...]

    @property
    def path(self) -> AnyPath:
        """Where the rows come from, for display."""
        return path_of(self.spec.dataset)

    @property
    def columns(self) -> list[str]:
        """The columns that models get of every row."""
        common = frozenset.intersection(*(frozenset(part.plan.columns) for part in self.parts))
        return [ID, *(name for name in self.parts[0].plan.columns if name in common - {ID})]

    @property
    def n_rows(self) -> int:
        """The rows of all splits."""
        return sum(self.split_sizes.values())

    @property
    def row_bytes(self) -> float:
        """A row's mean size in bytes, uncompressed; 0 if unknown."""
        return sum(part.source.n_bytes for part in self.parts) / max(1, sum(part.source.n_rows for part in self.parts))

    @property
    def split_sizes(self) -> dict[str, int]:
        """The rows of each split."""
        sizes = Counter[str]()
        for part in self.parts:
            sizes.update({split: len(rows) for split, rows in part.splits.items()})
        return dict(sizes)

    @property
    def identity(self) -> dict[str, int]:
        """The number of rows, by a text that changes with the content of the files and with how they are read."""
        return {f"rows of content {self.fingerprint}": self.n_rows}

    @property
    def fingerprint(self) -> str:
        """A hash that changes with the files' content, names, columns, seed or rule; not with their path."""
        parts = [[part.source.identity, sorted(part.plan.columns.items()), part.plan.labels] for part in self.parts]
        content = json.dumps([self.rule, parts, self.spec.skip_unknown_labels], sort_keys=True)
        return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()[:16]

    def blocks(
        self,
        block_rows: int,
        columns: frozenset[str] | None = None,
        masks: Mapping[str, Bools] | None = None,
        *,
        with_inputs: bool = False,
    ) -> FileBlocks:
        """Return the rows in blocks.

        Args:
            block_rows: The most rows of a block.
            columns: Those that models read, None for all.
            masks: Which rows of each split to read, bool (n,); None for all rows of all splits.
            with_inputs: Give blocks digests of what models read.
        """
        parts = []
        starts = Counter[str]()
        for part in self.parts:
            splits = part.splits
            if masks is not None:
                splits = {
                    split: np.asarray(rows)[masks[split][starts[split] : starts[split] + len(rows)]]
                    for split, rows in splits.items()
                    if split in masks
                }
            parts.append(Part(part.source, part.plan.restricted(columns), splits))
            starts.update({split: len(rows) for split, rows in part.splits.items()})
        return FileBlocks.cut(self.spec.dataset, parts, block_rows, with_inputs=with_inputs)

    def ids_of(self, split: str) -> pa.Array:
        """Return the ids of a split's rows, string (n,)."""
        parts = [part for part in self.parts if split in part.splits]
        return pa.concat_arrays([part.ids.take(pa.array(part.splits[split])) for part in parts])


def open_input(spec: DatasetSpec) -> Dataset:
    """Open all rows of a dataset as the input of a run; of a benchmark, those of the partitions that it is split from.

    Raises:
        DataError: Files are unreadable, missing or inconsistent, in one line.
        ConfigError: A name or a column is unknown, or a library is missing.
    """
    with readable(spec.dataset):
        located = locate(spec.dataset, spec.labels)
        whole = None if located.benchmark.name else located.rows
        sources = [*_by_rule(located)[1].values()] if whole is None else [whole()]
        parts = tuple(_part(source, spec, located.benchmark, complete=False) for source in sources)
    return Dataset(replace(spec, dataset=located.dataset), located.name, "all rows", parts)


def open_dataset(spec: DatasetSpec, split: str | None = None) -> Dataset:
    """Open a labelled dataset: find its partitions, split them by the paper's or a general rule, check ids and labels.

    Args:
        spec: The dataset.
        split: The split that is read, "all" for every row of every file; None for all splits by the rule.

    Raises:
        DataError: Files are unreadable, missing or inconsistent, in one line.
        ConfigError: A name or a column is unknown, or a library is missing.
    """
    with readable(spec.dataset):
        located = locate(spec.dataset, spec.labels)
        rule: Rule | None = None
        if split == ALL and located.rows is not None and (source := located.rows()).files:
            sources: dict[str, Source] = {ALL: source}
        elif split == ALL:
            sources = {name: opener() for name, opener in located.find().items()}
        else:
            rule, sources = _by_rule(located)
        dataset = _split(spec, located, rule, sources)
    if split is not None and split not in dataset.split_sizes:
        raise ConfigError(f"{dataset.name}: {unknown_name('split', split, dataset.split_sizes)}")
    return dataset


def _split(spec: DatasetSpec, located: Located, rule: Rule | None, sources: Mapping[str, Source]) -> Dataset:
    checked = {
        name: _checked(_part(source, spec, located.benchmark, complete=True), spec) for name, source in sources.items()
    }
    parts = _with_unique_ids(located.name, {name: part for name, (part, _) in checked.items()})
    rows = {name: part.splits[ALL] for name, part in parts.items()}
    phrase = "all rows in one piece"
    if rule is not None:
        splits: dict[str, dict[str, Ints | range]] = {name: {} for name in parts}
        sizes = {name: len(numbers) for name, numbers in rows.items()}
        for split, picked in split_by_rule(rule, sizes, spec.seed, located.name).items():
            splits[picked.partition][split] = np.asarray(rows[picked.partition])[picked.rows]
        parts = {name: replace(part, splits=splits[name]) for name, part in parts.items()}
        phrase = describe_rule(rule, tuple(sources), spec.seed)
    counted = [f"{column} is {value}" for column, value in located.benchmark.rows.items()]
    if any(len(rows[name]) < part.source.n_rows for name, part in parts.items()):
        phrase += "".join(f", of rows whose {condition}" for condition in counted)
    if not any(has_labels for _, has_labels in checked.values()):
        columns = dict.fromkeys(name for part in parts.values() for name in part.plan.file_columns)
        warn(
            f"{located.name}: no row has a label, so no policy can be fitted on its logits; it has the columns "
            f"{', '.join(columns)}. Name the column of labels with --columns label=NAME"
        )
    return Dataset(replace(spec, dataset=located.dataset), located.name, phrase, tuple(parts.values()))


def _part(source: Source, spec: DatasetSpec, benchmark: Benchmark, *, complete: bool) -> Part:
    """Return all rows of a partition that count, and how their columns are read.

    Args:
        source: The rows.
        spec: The dataset.
        benchmark: Its benchmark, which may count some rows only.
        complete: Whether the columns that the task needs must be there; the rows of a remote table are then fetched.

    Raises:
        DataError: A column is missing, or the files have no row.
    """
    if complete and source.n_rows == 0:
        raise DataError(f"{source.name} has no rows")
    plan = plan_columns(
        source.columns,
        source.name,
        spec.task,
        spec.columns,
        spec.labels,
        benchmark if benchmark.metadata is None else None,
        model_columns=spec.model_columns,
        complete=complete,
        rule=spec.rule,
    )
    conditions = {column: value for column, value in benchmark.rows.items() if column in source.columns}
    if complete:
        extra_columns = [name for name in spec.kept_columns if name in source.columns]
        source = source.snapshot(
            [*plan.restricted(spec.model_columns).file_columns, *conditions, *extra_columns], plan.texts
        )
    rows: Ints | range = range(source.n_rows)
    for column, value in conditions.items():
        rows = np.flatnonzero(pc.equal(source.table([column]).column(column), value).fill_null(False).to_numpy())
    return Part(source, plan, {ALL: rows})


def _checked(part: Part, spec: DatasetSpec) -> tuple[Part, bool]:
    """Read a partition's ids and labels by one pass over its files.

    Returns:
        The partition with its ids, and whether some row has a label.

    Raises:
        DataError: A label is none of the options where such rows are not left out.
    """
    source, plan = part.source, part.plan
    label = plan.columns.get(LABEL, ())
    table = source.table([*dict.fromkeys((*plan.ids, *label))], plan.texts)
    part = replace(part, ids=pa.array(read_ids(table.column(plan.ids[0]), source.place_of), pa.string()))
    if not label:
        return part, False
    column = table.column(label[0])
    numbers = label_numbers(plan, column, source.name)
    unknown = numbers == NOT_AN_OPTION
    if unknown.any():
        counts = Counter(map(repr, column.filter(pa.array(unknown)).to_pylist()))
        examples = ", ".join(f"{name} ({n:,})" for name, n in counts.most_common(20))
        more = f" and {len(counts) - 20:,} others" if len(counts) > 20 else ""
        fault = f"{source.name}: {unknown.sum():,} rows have a label that is {describe_options(plan)}: {examples}{more}"
        if not spec.skip_unknown_labels:
            remedy = "correct them, or leave these rows out with --skip-unknown-labels"
            raise DataError(f"{fault}; the first is {source.place_of(int(unknown.argmax()))}; {remedy}")
        warn(f"{fault}; they are left out")
        labelled = np.setdiff1d(np.asarray(part.splits[ALL]), np.flatnonzero(unknown))
        part = replace(part, splits={ALL: labelled})
    return part, bool((numbers >= 0).any())


def _with_unique_ids(name: str, partitions: Mapping[str, Part]) -> dict[str, Part]:
    """Return partitions whose ids are unique over all of them: the partition's name then precedes them.

    Raises:
        DataError: An id is a duplicate within a partition.
    """
    for partition in partitions.values():
        example = first_duplicate(partition.ids)
        if example is not None:
            rows = np.flatnonzero(pc.equal(partition.ids, example).to_numpy(zero_copy_only=False))[:2]
            first, second = map(partition.source.place_of, rows)
            raise DataError(
                f"{second}: example id {example!r} is a duplicate of {first}; remove one, or name a column "
                "with unique ids with --columns example_id=NAME"
            )
    ids = pa.chunked_array([partition.ids for partition in partitions.values()])
    if pc.count_distinct(ids).as_py() == len(ids):
        return dict(partitions)
    warn(
        f"{name}: partitions {' and '.join(partitions)} have example ids in common, so an id begins with its "
        "partition's name"
    )
    return {
        name: replace(
            partition,
            plan=replace(partition.plan, id_prefix=f"{name}-"),
            ids=pc.binary_join_element_wise(name, partition.ids, "-"),
        )
        for name, partition in partitions.items()
    }


def _by_rule(located: Located) -> tuple[Rule, dict[str, Source]]:
    """Return the split rule, and open the partitions that it uses."""
    partitions, benchmark = located.find(), located.benchmark
    available = tuple(partitions)
    alone = len(available) == 1
    rule = benchmark.split
    if benchmark.split_without_test is not None and "test" not in available and "train" in available:
        rule = benchmark.split_without_test
    if rule is None or (benchmark.unsplit and alone):
        rule = choose_rule(available, located.location)
    if rule == "three-way" and alone:
        return rule, {name: partitions[name]() for name in available}
    needed = tuple(
        partition for name in RULE_PARTITIONS[rule] for partition in (benchmark.tests if name == "test" else (name,))
    )
    missing = next((name for name in needed if name not in available), None)
    if missing is None:
        return rule, {name: partitions[name]() for name in needed}
    remedy = f"give {located.name}=PATH, a folder that has all of them"
    if "=" in located.dataset:
        remedy = f"add it, or give only the path for {'a 25/25/50 cut' if alone else 'the partitions that exist'}"
    raise DataError(
        f"{located.name} is split from its partitions {' and '.join(needed)}, and {located.location} has no {missing} "
        f"(it has {', '.join(available) or 'none'}); {remedy}"
    )
