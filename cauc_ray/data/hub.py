"""Datasets of the Hugging Face hub, through the datasets library."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa

from cauc_ray.data.folders import Openers
from cauc_ray.errors import ConfigError, DataError, first_line
from cauc_ray.numbers.types import Ints


def hub_partitions(
    path: str,
    config: str | None = None,
    *,
    revision: str | None = None,
    files: Mapping[str, str] | None = None,
    remedy: str = "",
) -> Openers:
    """Load a dataset by its id, ORG/NAME; of its files only those of the given partitions, if any are given.

    remedy: what the user may do where the hub cannot be reached or has no such dataset, for the error.
    Raises ConfigError without the library, DataError for whatever else goes wrong.
    """
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        library_missing = "datasets of the hub need the datasets library: pip install 'cauc-ray[datasets]'"
        raise ConfigError(f"{library_missing}{remedy and f', or {remedy}'}") from error
    try:
        loaded = library.load_dataset(path, config, revision=revision, data_files=files and dict(files))
    except Exception as error:  # the library, the network and the hub fail in many ways; all are the user's to hear
        reason = first_line(error.__cause__ or error)
        raise DataError(f"cannot load {path!r} from the hub: {reason}{remedy and f'; {remedy}'}") from error
    title = f"{path} ({config})" if config else path
    return {
        "validation" if name in ("val", "valid") else str(name): partial(HubPartition, rows, f"{title}, {name}")
        for name, rows in loaded.items()
    }


class HubPartition:
    """A split of a loaded dataset: Arrow files that the library maps into memory."""

    def __init__(self, rows: Any, source: str) -> None:
        """Take a datasets.Dataset. As Arrow tables its images stay encoded."""
        self.source = source
        self.columns: Sequence[str] = rows.column_names
        self.n_rows: int = rows.num_rows
        info = rows.info.splits[rows.split] if rows.info.splits and rows.split in rows.info.splits else None
        self.identity: list[Any] = [source, self.n_rows, info.num_bytes if info else None, sorted(self.columns)]
        self._rows = rows.with_format("arrow")

    def tables(self, columns: Sequence[str], rows: Ints, size: int) -> Iterator[pa.Table]:
        """Read the rows. Raises DataError where a cached file is damaged."""
        picked = self._rows.select_columns(list(columns))
        for start in range(0, len(rows), size):
            try:
                yield picked[rows[start : start + size].tolist()]
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.source} cannot be read: {first_line(error)}") from error

    def place(self, row: int) -> str:
        """Name the row."""
        return f"{self.source}, row {row}"
