"""Datasets of collections and runs: files or a split of the hub, how their columns are read, and their splits."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cauc_ray.data.benchmarks import Benchmark
from cauc_ray.data.blocks import BlockSource
from cauc_ray.data.columns import (
    ID,
    LABEL,
    ColumnPlan,
    Layout,
    Task,
    describe_unknown,
    plan_columns,
    read_ids,
    read_labels,
    unknown_labels,
)
from cauc_ray.data.partitions import Located, locate
from cauc_ray.data.pieces import FileBlocks, Part
from cauc_ray.data.sources import Source, TableFiles
from cauc_ray.data.splits import RULE_PARTITIONS, Rule, choose_rule, describe_rule, split_by_rule
from cauc_ray.errors import CaucWarning, ConfigError, DataError, unknown_name
from cauc_ray.files.paths import AnyPath, path_of, readable
from cauc_ray.numbers.chain import UNKNOWN_LABEL
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
    """

    dataset: str
    task: Task
    columns: Mapping[str, str] = field(default_factory=dict)
    seed: int = 0
    labels: tuple[str, ...] | None = None
    model_columns: frozenset[str] | None = None
    skip_unknown_labels: bool = False


@dataclass(frozen=True)
class Dataset:
    """Rows of files, in splits, or all of them as the input of a run.

    Attributes:
        spec: Opens the same dataset from any working folder.
        name: For display.
        rule: How its splits were made, in one phrase.
        parts: Its files, and the rows of each split.
        example_ids: Of all rows of each part, where splits were made.
    """

    spec: DatasetSpec
    name: str
    rule: str
    parts: tuple[Part, ...]
    example_ids: tuple[pa.Array, ...] = ()

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
            sizes.update({split: part.n_rows_of(split) for split in part.splits})
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
        rows: Mapping[str, Bools] | None = None,
        *,
        with_inputs: bool = False,
    ) -> FileBlocks:
        """Return the rows in blocks.

        Args:
            block_rows: The most rows of a block.
            columns: Those that models read, None for all.
            rows: The splits to read, and which of their rows, bool (n,); None for all.
            with_inputs: Give blocks digests of what models read.
        """
        parts = []
        starts = Counter[str]()
        for part in self.parts:
            splits = dict(part.splits)
            for split in part.splits:
                if rows is None:
                    continue
                n = part.n_rows_of(split)
                mask = rows.get(split, np.zeros(0, bool))[starts[split] : starts[split] + n]
                splits[split] = part.rows_of(split)[mask if len(mask) else slice(0)]
                starts[split] += n
            parts.append(Part(part.source, part.plan.restricted(columns), splits))
        return FileBlocks.cut(self.spec.dataset, parts, block_rows, with_inputs=with_inputs)

    def ids_of(self, split: str) -> pa.Array:
        """Return the ids of a split's rows, string (n,)."""
        rows = [
            ids.take(pa.array(part.rows_of(split)))
            for part, ids in zip(self.parts, self.example_ids, strict=True)
            if split in part.splits
        ]
        return pa.concat_arrays(rows)

    def require_split(self, split: str) -> None:
        """Raise ConfigError for an unknown split."""
        if split not in self.split_sizes:
            raise ConfigError(f"{self.name}: {unknown_name('split', split, self.split_sizes)}")


def open_input(spec: DatasetSpec) -> Dataset:
    """Open all rows of a dataset as the input of a run; of a benchmark, those of the partitions that it is split from.

    Raises:
        DataError: Files are unreadable, missing or inconsistent, in one line.
        ConfigError: A name or a column is unknown, or a library is missing.
    """
    with readable(spec.dataset):
        located = locate(spec.dataset, spec.labels)
        if located.benchmark.name or located.rows is None:
            partitions = located.find()
            sources = [partitions[name]() for name in _choose_rule(located, partitions)[1]]
        else:
            sources = [located.rows()]
        parts = []
        for source in sources:
            plan = _plan(source, spec, located.benchmark, complete=False)
            rows = _rows_that_count(source, located.benchmark)
            parts.append(Part(source, plan, {ALL: rows}))
    return Dataset(replace(spec, dataset=located.dataset), located.name, "all rows", tuple(parts))


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
        if split == ALL and located.rows is not None and isinstance(source := located.rows(), TableFiles):
            sources: dict[str, Source] = {ALL: source}
        elif split == ALL:
            sources = {name: opener() for name, opener in located.find().items()}
        else:
            partitions = located.find()
            rule, names = _choose_rule(located, partitions)
            sources = {name: partitions[name]() for name in names}
        dataset = _split(spec, located, rule, sources)
    if split is not None:
        dataset.require_split(split)
    return dataset


def _split(spec: DatasetSpec, located: Located, rule: Rule | None, sources: Mapping[str, Source]) -> Dataset:
    for source in sources.values():
        if source.n_rows == 0:
            raise DataError(f"{source.name} has no rows")
    plans = {name: _plan(source, spec, located.benchmark, complete=True) for name, source in sources.items()}
    columns = {name: _ids_and_labels(source, plans[name], spec) for name, source in sources.items()}
    plans, ids = _unique_ids(located.name, sources, plans, {name: column[0] for name, column in columns.items()})
    counting: dict[str, Ints | None] = {}
    for name, source in sources.items():
        counted, fits = _rows_that_count(source, located.benchmark), columns[name][2]
        counting[name] = counted if fits is None else np.intersect1d(_numbers(counted, source), np.flatnonzero(fits))
    sizes = {name: len(_numbers(counting[name], source)) for name, source in sources.items()}
    splits: dict[str, dict[str, Ints | None]] = {name: {} for name in sources}
    if rule is None:
        splits = {name: {ALL: rows} for name, rows in counting.items()}
        phrase = "all rows in one piece"
    else:
        for split, picked in split_by_rule(rule, sizes, spec.seed, located.name).items():
            rows = counting[picked.partition]
            splits[picked.partition][split] = picked.rows if rows is None else rows[picked.rows]
        phrase = describe_rule(rule, tuple(sources), spec.seed)
    if located.benchmark.rows and any(rows is not None for rows in counting.values()):
        phrase += "".join(f", of rows whose {name} is {value}" for name, value in located.benchmark.rows.items())
    _warn_without_labels(located.name, plans, {name: column[1] for name, column in columns.items()})
    parts = tuple(Part(source, plans[name], splits[name]) for name, source in sources.items())
    return Dataset(replace(spec, dataset=located.dataset), located.name, phrase, parts, tuple(ids.values()))


def _choose_rule(located: Located, partitions: Collection[str]) -> tuple[Rule, tuple[str, ...]]:
    """Return the split rule and the partitions that it uses."""
    available, benchmark = tuple(partitions), located.benchmark
    alone = len(available) == 1
    rule = benchmark.split
    if benchmark.split_without_test is not None and "test" not in available and "train" in available:
        rule = benchmark.split_without_test
    if rule is None or (benchmark.unsplit and alone):
        rule = choose_rule(available, located.where)
    if rule == "three-way" and alone:
        return rule, available
    needed = tuple(
        partition for name in RULE_PARTITIONS[rule] for partition in (benchmark.tests if name == "test" else (name,))
    )
    missing = next((name for name in needed if name not in available), None)
    if missing is None:
        return rule, needed
    remedy = f"give {located.name}=PATH, a folder that has all of them"
    if "=" in located.dataset:
        remedy = f"add it, or give only the path for {'a 25/25/50 cut' if alone else 'the partitions that exist'}"
    raise DataError(
        f"{located.name} is split from its partitions {' and '.join(needed)}, and {located.where} has no {missing} "
        f"(it has {', '.join(available) or 'none'}); {remedy}"
    )


def _plan(source: Source, spec: DatasetSpec, benchmark: Benchmark, *, complete: bool) -> ColumnPlan:
    layout = Layout(benchmark.columns, benchmark.first_label, benchmark.choices_pattern)
    return plan_columns(
        source.columns,
        source.name,
        spec.task,
        spec.columns,
        spec.labels,
        layout if benchmark.name and benchmark.metadata is None else None,
        model_columns=spec.model_columns,
        complete=complete,
    )


def _rows_that_count(source: Source, benchmark: Benchmark) -> Ints | None:
    """Return the numbers of a benchmark's rows that count, ascending; None for all."""
    rows = None
    for column, value in benchmark.rows.items():
        if column in source.columns:
            table = source.table([column], np.arange(source.n_rows))
            rows = np.flatnonzero(pc.equal(table.column(column), value).fill_null(False).to_numpy())
    return rows


def _numbers(rows: Ints | None, source: Source) -> Ints:
    return np.arange(source.n_rows) if rows is None else rows


def _ids_and_labels(source: Source, plan: ColumnPlan, spec: DatasetSpec) -> tuple[pa.Array, Ints | None, Bools | None]:
    """Read ids and labels by one pass over the files.

    Returns:
        Ids, labels (None where there are none), and the rows that do not have an unknown label where these are left
        out (None otherwise).
    """
    rows = np.arange(source.n_rows)
    label = plan.columns.get(LABEL, ())
    names = list(dict.fromkeys((*plan.ids, *label)))
    table = source.table(names, rows, plan.texts) if names else None
    if not plan.ids or table is None:
        ids = source.row_names(rows)
    else:
        ids = pa.array(read_ids(table.column(plan.ids[0]), source.place_of), pa.string())
    if not label or table is None:
        return ids, None, None
    column = table.column(label[0])
    counts, unknown = unknown_labels(plan, column, source.name)
    if counts and not spec.skip_unknown_labels:
        first = source.place_of(int(np.flatnonzero(unknown)[0]))
        remedy = "correct them, or leave these rows out with --skip-unknown-labels"
        raise DataError(f"{describe_unknown(plan, counts, source.name)}; the first is {first}; {remedy}")
    if counts:
        warnings.warn(f"{describe_unknown(plan, counts, source.name)}; they are left out", CaucWarning, stacklevel=6)
        column = pc.if_else(pa.chunked_array([pa.array(unknown)]), pa.scalar(None, column.type), column)
    return ids, read_labels(plan, column, source.place_of), ~unknown if counts else None


def _unique_ids(
    name: str, sources: Mapping[str, Source], plans: Mapping[str, ColumnPlan], ids: Mapping[str, pa.Array]
) -> tuple[dict[str, ColumnPlan], dict[str, pa.Array]]:
    """Return plans and ids that are unique over all partitions, which then precede them.

    Raises:
        DataError: An id is a duplicate within a partition.
    """
    for partition, stored in ids.items():
        counts = pc.value_counts(stored)
        if len(counts) < len(stored):
            example = counts.field(0)[pc.index(pc.greater(counts.field(1), 1), True).as_py()]
            first, second = map(
                sources[partition].place_of, np.flatnonzero(pc.equal(stored, example).to_numpy(False))[:2]
            )
            raise DataError(
                f"{second}: example id {example.as_py()!r} is a duplicate of {first}; remove one, or name a column "
                "with unique ids with --columns example_id=NAME"
            )
    everything = pa.chunked_array(list(ids.values()))
    if pc.count_distinct(everything).as_py() == len(everything):
        return dict(plans), dict(ids)
    warnings.warn(
        f"{name}: partitions {' and '.join(ids)} have example ids in common, so an id begins with its partition's name",
        CaucWarning,
        stacklevel=6,
    )
    return (
        {partition: replace(plan, id_prefix=f"{partition}-") for partition, plan in plans.items()},
        {partition: pc.binary_join_element_wise(partition, stored, "-") for partition, stored in ids.items()},
    )


def _warn_without_labels(name: str, plans: Mapping[str, ColumnPlan], labels: Mapping[str, Ints | None]) -> None:
    """Warn at once that no row has a label, before a model is paid for."""
    if any(stored is not None and (stored != UNKNOWN_LABEL).any() for stored in labels.values()):
        return
    columns = ", ".join(dict.fromkeys(stored for plan in plans.values() for stored in plan.file_columns))
    warnings.warn(
        f"{name}: no row has a label, so no policy can be fitted on its logits; it has the columns {columns}. Name the "
        "column of labels with --columns label=NAME",
        CaucWarning,
        stacklevel=6,
    )
