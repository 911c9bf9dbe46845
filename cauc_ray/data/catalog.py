"""Where a dataset is: one of the paper's by its name, anybody's at a path or on the Hugging Face hub."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from cauc_ray.data.benchmarks import BENCHMARKS, Benchmark
from cauc_ray.data.folders import Openers, find_partitions
from cauc_ray.errors import ConfigError, DataError, first_line, unknown_name
from cauc_ray.numbers.types import Ints


@dataclass(frozen=True, slots=True)
class FoundDataset:
    """A dataset's partitions, unopened.

    dataset: names it, whatever the working folder.   name: for people.   place: where it was found, for errors.
    benchmark: which of the paper's it is, if it is one.
    """

    dataset: str
    name: str
    place: str
    openers: Openers
    benchmark: Benchmark | None = None


def find_dataset(text: str) -> FoundDataset:
    """Find NAME (in the folder $CAUC_DATA, else on the hub), NAME=PATH, PATH, hub:ORG/NAME or hub:ORG/NAME:CONFIG.

    Raises ConfigError where it is none of these, DataError where nothing is there or nothing that can be read.
    """
    if text.startswith("hub:"):
        hub, _, config = text.removeprefix("hub:").partition(":")
        if not hub or ".." in hub.split("/"):
            raise ConfigError(f"{text!r} names no dataset: give hub:ORG/NAME or hub:ORG/NAME:CONFIG")
        return FoundDataset(
            text, hub, hub, _hub_partitions(Benchmark(hub, config or None), "give the path of its files")
        )
    if text in BENCHMARKS:
        folder = os.environ.get("CAUC_DATA")
        local = Path(folder or "", text)
        return _at_path(local, text) if folder and local.exists() else _on_hub(text)
    name, is_named, path = text.partition("=")
    if is_named and name in BENCHMARKS:
        if not path:
            raise ConfigError(f"{text!r} has no path: give {name}=PATH")
        return _at_path(Path(path).expanduser(), name)
    if text and os.path.exists(text):
        return _at_path(Path(text))
    raise ConfigError(
        f"{unknown_name('dataset', name, BENCHMARKS)}; or give the path of a file or folder that is there, "
        "NAME=PATH, or hub:ORG/NAME"
    )


def _at_path(path: Path, name: str = "") -> FoundDataset:
    if not os.path.exists(path):  # Path.exists raises where a name is too long
        raise DataError(f"there is no file or folder {path}")
    path = path.absolute()
    if not name:
        return FoundDataset(str(path), path.name or str(path), str(path), find_partitions(path))
    benchmark = BENCHMARKS[name]
    openers = benchmark.find(path) if benchmark.find else None
    return FoundDataset(f"{name}={path}", name, str(path), openers or find_partitions(path), benchmark)


def _on_hub(name: str) -> FoundDataset:
    benchmark = BENCHMARKS[name]
    remedy = f"give {name}=PATH, its files"
    if not benchmark.hub:
        raise DataError(f"{name} is not on the hub: {remedy}")
    return FoundDataset(name, name, f"{benchmark.hub} on the hub", _hub_partitions(benchmark, remedy), benchmark)


def _hub_partitions(benchmark: Benchmark, remedy: str) -> Openers:
    """Load a dataset of the hub.   remedy: what the user may do where that fails, for the error."""
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        library_missing = "datasets of the hub need the datasets library: pip install 'cauc-ray[datasets]'"
        raise ConfigError(f"{library_missing}, or {remedy}") from error
    path, config = benchmark.hub, benchmark.config
    files = benchmark.files and dict(benchmark.files)
    try:
        loaded = library.load_dataset(path, config, revision=benchmark.revision, data_files=files)
    except Exception as error:  # the library, the network and the hub fail in many ways; all are the user's to hear
        reason = first_line(error.__cause__ or error)
        raise DataError(f"cannot load {path!r} from the hub: {reason}; {remedy}") from error
    title = f"{path} ({config})" if config else path
    return {
        "validation" if name in ("val", "valid") else str(name): partial(HubRows, rows, f"{title}, {name}")
        for name, rows in loaded.items()
    }


class HubRows:
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
