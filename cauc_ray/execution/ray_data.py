"""A Ray Dataset as a run's input."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from ray.data import Dataset, ExecutionResources
from ray.data.dataset import MaterializedDataset

from cauc_ray.data.blocks import InputBlock, other_rows, table_block
from cauc_ray.errors import DataError, ExecutionError
from cauc_ray.execution.cluster import store_bytes

_SOURCE = "the Ray dataset"
STORE_SHARE = 0.15


class DatasetInput:
    """A Ray Dataset as a run's input; each run executes it again.

    path: a name for people, of no file.   n_rows and row_bytes: of a materialised dataset; else None and 0, unknown.
    identity: nothing of the rows, which only an execution would tell; a resumed run compares those that are committed.
    """

    path = Path(_SOURCE)

    def __init__(self, dataset: Dataset) -> None:
        """Take a dataset with a column example_id; nothing is executed.

        Raises DataError where its columns are known and example_id is not among them, and where it has no rows.
        """
        self._dataset = dataset
        self.identity = {"ray dataset": 0}
        self.n_rows: int | None = None
        self.row_bytes = 0.0
        known = dataset.schema(fetch_if_missing=False)
        self.columns: list[str] | None = None if known is None else known.names
        if self.columns is not None:
            _require_ids(self.columns)
        if isinstance(dataset, MaterializedDataset):  # only then are these known without an execution
            self.n_rows = dataset.count()
            if self.n_rows == 0:
                raise DataError(f"{_SOURCE} has no rows")
            self.row_bytes = dataset.size_bytes() / self.n_rows

    def source(self, block_rows: int, columns: frozenset[str] | None = None) -> DatasetSource:
        """Return the dataset's rows in its own order, in blocks of so many."""
        return DatasetSource(self._dataset, block_rows, columns)


@dataclass(frozen=True, slots=True)
class DatasetSource:
    """Blocks of a Ray Dataset: one group, since one process takes the results of an execution in order.

    It is executed from the node of whoever gave it, which may take any time; Ray Data reports what fails.
    """

    dataset: Dataset
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
        """Execute the dataset and yield its blocks; seen ones are computed, too.

        Raises DataError for content that no run can take and where seen blocks are missing, ExecutionError where the
        dataset's execution fails.
        """
        with _as_an_input(self.dataset):
            number = -1
            for number, table in enumerate(self._tables()):
                _require_ids(table.column_names)
                wanted = {"example_id"} if number in seen else self.columns
                read = [name for name in table.column_names if wanted is None or name in wanted]
                yield number, table_block(table.select(read), lambda row: _SOURCE)
        missing = [other for other in seen if other > number]
        if missing:
            raise other_rows(_SOURCE, f"it ends before block {min(missing)}")

    def _tables(self) -> Iterator[pa.Table]:
        try:
            yield from self.dataset.iter_batches(batch_size=self.block_rows, batch_format="pyarrow")
        except Exception as error:  # a user's function and Ray Data's readers raise whatever they like
            text = str(error)  # for an error in a task, its traceback, where the user's own error comes first
            own = re.search(r"^[\w.]+(?:Error|Exception)\b.*", text, re.MULTILINE)
            reason = own[0] if own else f"{type(error).__name__}: {(text.splitlines() or [''])[0]}"
            raise ExecutionError(f"{_SOURCE} cannot be computed: {reason}") from error


@contextmanager
def _as_an_input(dataset: Dataset) -> Iterator[None]:
    """Execute a dataset in order, within its part of the object store, without bars; then as its owner set it.

    Its own blocks are kept small relative to that part: with Ray's usual 128 MB, a small store would spill.
    Datasets that are made of one another share their context.
    """
    context = dataset.context
    before = (context.execution_options, context.enable_progress_bars, context.target_max_block_size)
    part = int(STORE_SHARE * store_bytes())
    own = copy.deepcopy(context.execution_options)
    own.preserve_order = True
    limits: ExecutionResources = own.resource_limits
    own.resource_limits = limits.copy(object_store_memory=min(limits.object_store_memory, part))
    context.execution_options, context.enable_progress_bars = own, False
    context.target_max_block_size = min(context.target_max_block_size or part, max(1, part // 8))
    try:
        yield
    finally:
        context.execution_options, context.enable_progress_bars, context.target_max_block_size = before


def _require_ids(names: list[str]) -> None:
    if "example_id" not in names:
        raise DataError(f"{_SOURCE} has no column 'example_id'; it has {', '.join(sorted(names))}")
