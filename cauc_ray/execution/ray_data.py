"""A Ray Dataset as a run's input."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from ray.data import Dataset, ExecutionResources
from ray.data.dataset import MaterializedDataset

from cauc_ray.data.blocks import InputBlock, other_rows
from cauc_ray.data.columns import ColumnPlan, Task, plan_columns, read_block
from cauc_ray.data.sources import ID
from cauc_ray.errors import DataError
from cauc_ray.execution.cluster import store_bytes
from cauc_ray.files.paths import AnyPath

_SOURCE = "the Ray dataset"
STORE_SHARE = 0.15


class DatasetInput:
    """A Ray Dataset as a run's input; each run executes it again.

    Attributes:
        path: A name for people, of no file.
        columns: The columns that models get, None until they are known.
        n_rows: The rows of a materialised dataset, None for others.
        row_bytes: Their mean size, 0 where it is unknown.
        identity: Nothing of the rows, which only an execution would tell; a resumed run compares those that are
            committed.
    """

    path = Path(_SOURCE)

    def __init__(
        self,
        dataset: Dataset,
        task: Task,
        columns: Mapping[str, str] | None = None,
        labels: tuple[str, ...] | None = None,
        model_columns: frozenset[str] | None = None,
        rule: str | None = None,
    ) -> None:
        """Take a dataset with a column of ids; nothing is executed.

        Args:
            dataset: The dataset.
            task: What the rows are.
            columns: Canonical name to the dataset's own name.
            labels: The names of the options.
            model_columns: The columns that models read, None for all.
            rule: By which labels in words are the same as answers; None where labels are options.

        Raises:
            DataError: The columns are known and have no ids, or it is empty.
        """
        self._dataset = dataset
        self._planned = partial(
            _planned, task=task, renamed=columns or {}, labels=labels, model_columns=model_columns, rule=rule
        )
        self.identity = {"ray dataset": 0}
        self.n_rows: int | None = None
        self.row_bytes = 0.0
        schema = dataset.schema(fetch_if_missing=False)
        self.columns = None if schema is None else [*self._planned(schema.names).columns]
        if isinstance(dataset, MaterializedDataset):  # only then are these known without an execution
            self.n_rows = dataset.count()
            if self.n_rows == 0:
                raise DataError(f"{_SOURCE} has no rows")
            self.row_bytes = dataset.size_bytes() / self.n_rows

    def blocks(self, block_rows: int, columns: frozenset[str] | None = None) -> DatasetBlocks:
        """Return the dataset's rows in its own order, in blocks of so many."""
        return DatasetBlocks(self._dataset, self._planned, block_rows, columns)


def _planned(names: Sequence[str], **settings: Any) -> ColumnPlan:
    """Return how the columns of a dataset are read. Raises DataError if it has no ids."""
    plan = plan_columns(names, _SOURCE, **settings)
    if not plan.ids:
        raise DataError(f"{_SOURCE} has no column 'example_id'; it has {', '.join(sorted(names))}")
    return plan


@dataclass(frozen=True, slots=True)
class DatasetBlocks:
    """Blocks of a Ray Dataset: one group, since one process takes the results of an execution in order.

    It is executed from the node of whoever gave it, which may take any time; Ray Data reports what fails.
    """

    dataset: Dataset
    planned: Callable[[Sequence[str]], ColumnPlan]
    block_rows: int
    columns: frozenset[str] | None
    name: str = _SOURCE
    anywhere: bool = False
    deadline_s: float | None = None

    @property
    def n_groups(self) -> int:
        """One."""
        return 1

    def blocks(self, group: int, seen: Collection[int] = ()) -> Iterator[tuple[int, InputBlock]]:
        """Execute the dataset and yield its blocks, seen ones with their ids only.

        Raises:
            DataError: No run can take the content, or seen blocks are missing.
            ExecutionError: The dataset's execution fails.
        """
        with _as_an_input(self.dataset):
            number, first_row = -1, 0
            for number, table in enumerate(self._tables()):
                plan = self.planned(table.column_names)
                plan = replace(plan, columns={ID: plan.ids}) if number in seen else plan.restricted(self.columns)
                rows = np.arange(first_row, first_row + len(table))
                yield number, read_block(plan, table.select(plan.file_columns), rows, self)
                first_row += len(table)
        missing = [block for block in seen if block > number]
        if missing:
            raise other_rows(_SOURCE, f"it ends before block {min(missing)}")

    def place_of(self, row: int) -> str:
        """Return where a row is, for messages."""
        return f"{_SOURCE}, row {row}"

    def folder_of(self, row: int) -> AnyPath:
        """Return that paths of images are absolute."""
        return Path("/")

    def _tables(self) -> Iterator[pa.Table]:
        try:
            yield from self.dataset.iter_batches(batch_size=self.block_rows, batch_format="pyarrow")
        except Exception as error:  # a user's function and Ray Data's readers raise whatever they like
            text = str(error)  # for an error in a task, its traceback, where the user's own error comes first
            match = re.search(r"^[\w.]+(?:Error|Exception)\b.*", text, re.MULTILINE)
            reason = match[0] if match else f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"
            raise DataError(f"{_SOURCE} cannot be computed: {reason}") from error


@contextmanager
def _as_an_input(dataset: Dataset) -> Iterator[None]:
    """Execute a dataset in order, within its part of the object store, without bars; then as its owner set it.

    Its own blocks are kept small relative to that part: with Ray's usual 128 MB, a small store would spill.
    Datasets that are made of one another share their context.
    """
    context = dataset.context
    before = (context.execution_options, context.enable_progress_bars, context.target_max_block_size)
    part = int(STORE_SHARE * store_bytes())
    ordered = copy.deepcopy(context.execution_options)
    ordered.preserve_order = True
    limits: ExecutionResources = ordered.resource_limits
    ordered.resource_limits = limits.copy(object_store_memory=min(limits.object_store_memory, part))
    context.execution_options, context.enable_progress_bars = ordered, False
    context.target_max_block_size = min(context.target_max_block_size or part, max(1, part // 8))
    try:
        yield
    finally:
        context.execution_options, context.enable_progress_bars, context.target_max_block_size = before
