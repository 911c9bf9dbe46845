"""Where a dataset is: one of the paper's by its name, anybody's at a path or on the hub."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cauc_ray.data.benchmarks import BENCHMARKS, Benchmark
from cauc_ray.data.folders import Openers, find_partitions
from cauc_ray.data.hub import hub_partitions
from cauc_ray.errors import ConfigError, DataError, unknown_name


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
        return FoundDataset(text, hub, hub, hub_partitions(hub, config or None, remedy="give the path of its files"))
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
    openers = hub_partitions(
        benchmark.hub, benchmark.config, revision=benchmark.revision, files=benchmark.files, remedy=remedy
    )
    return FoundDataset(name, name, f"{benchmark.hub} on the hub", openers, benchmark)
