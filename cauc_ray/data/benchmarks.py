"""Finding datasets: the paper's nine by name, with the names of their columns, and any other by path or hub id."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cauc_ray.data.columns import Published
from cauc_ray.data.folders import Openers, find_partitions, wilds_partitions
from cauc_ray.data.rows import HubRows
from cauc_ray.data.splits import Rule
from cauc_ray.errors import ConfigError, DataError, first_line, unknown_name
from cauc_ray.files.paths import AnyPath, RemotePath, absolute, path_of

# The hub's own conversion to Parquet, for datasets whose repository has a loading script.
_CONVERTED = "refs/convert/parquet"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One dataset of the paper, or any other dataset of the hub.

    hub, config, revision: what the datasets library loads; hub is "" for a dataset that is not on the hub.
    files: the files to load, if other partitions are large and not needed.   tests: its test partitions, one split
    each.   find: finds its partitions in a folder.   rule: the paper's split rule, if it has one.
    unsplit: published without partitions; cut 25/25/50.
    """

    name: str = ""
    hub: str = ""
    config: str | None = None
    revision: str | None = None
    files: Mapping[str, str] | None = None
    published: Published = field(default_factory=Published)
    tests: tuple[str, ...] = ("test",)
    find: Callable[[AnyPath], Openers] = find_partitions
    rule: Rule | None = "halve-validation"
    unsplit: bool = False


def mathqa_choices(text: str) -> list[str] | None:
    """Split MathQA's text of five options; None if there are not exactly five.

    >>> mathqa_choices("a ) 38 , b ) 27.675 , c ) rs . 1 , 200 , d ) 5 , e ) none of these")
    ['38', '27.675', 'rs . 1 , 200', '5', 'none of these']
    """
    found = re.fullmatch(r"\s*a \)(.*?),\s*b \)(.*?),\s*c \)(.*?),\s*d \)(.*?),\s*e \)(.*)", text, re.DOTALL)
    return [option.strip() for option in found.groups()] if found else None


_PAPER = (
    Benchmark("mmlu", "cais/mmlu", "all", published=Published({"label": "answer"})),
    Benchmark(
        "logiqa",
        "lucasmccabe/logiqa",
        revision=_CONVERTED,
        published=Published({"question": "query", "choices": "options", "label": "correct_option"}),
    ),
    Benchmark(
        "mathqa",
        "allenai/math_qa",
        revision=_CONVERTED,
        published=Published(
            {"question": "Problem", "choices": "options", "label": "correct"}, split_choices=mathqa_choices
        ),
    ),
    Benchmark(
        "medmcqa",
        "openlifescienceai/medmcqa",
        published=Published({"choices": "opa+opb+opc+opd", "label": "cop", "subject": "subject_name"}),
        rule="sample-train",
    ),
    Benchmark(
        "piqa",
        "ybisk/piqa",
        revision=_CONVERTED,
        published=Published({"question": "goal", "choices": "sol1+sol2"}),
        rule="sample-train",
    ),
    Benchmark(
        "socialiqa",
        "allenai/social_i_qa",
        revision=_CONVERTED,
        published=Published({"choices": "answerA+answerB+answerC"}, first_label=1),
    ),
    # All 257 folders of 256_ObjectCategories are classes, including 257.clutter.
    Benchmark("caltech256", "ilee0022/Caltech-256", unsplit=True),
    Benchmark("iwildcam", "", tests=("test-id", "test-ood"), find=wilds_partitions),
    Benchmark("imagenet", "ILSVRC/imagenet-1k", files={"validation": "data/validation-*"}, rule="three-way"),
)
BENCHMARKS: Mapping[str, Benchmark] = {benchmark.name: benchmark for benchmark in _PAPER}


@dataclass(frozen=True, slots=True)
class FoundDataset:
    """A dataset's partitions, not opened yet.

    dataset: identifies it, independent of the working folder.   name: for display.   where: where it was found, for
    messages.   benchmark: the paper's dataset, or a general one.
    """

    dataset: str
    name: str
    where: str
    openers: Openers
    benchmark: Benchmark


def find_dataset(text: str) -> FoundDataset:
    """Find NAME (in the folder $CAUC_DATA, else on the hub), NAME=PATH, PATH, hub:ORG/NAME or hub:ORG/NAME:CONFIG.

    A path may be a URI.
    Raises ConfigError if it is none of these, DataError if nothing is there or nothing there can be read.
    """
    if text.startswith("hub:"):
        hub, _, config = text.removeprefix("hub:").partition(":")
        if not hub or ".." in hub.split("/"):
            raise ConfigError(f"{text!r} does not name a dataset: give hub:ORG/NAME or hub:ORG/NAME:CONFIG")
        return _on_hub(text, Benchmark(hub=hub, config=config or None, rule=None))
    name, is_named, path = text.partition("=")
    if name in BENCHMARKS:
        if not is_named:
            folder = os.environ.get("CAUC_DATA")
            if folder and (path_of(folder) / name).exists():
                return _at_path(path_of(folder) / name, BENCHMARKS[name])
            return _on_hub(name, BENCHMARKS[name])
        if not path:
            raise ConfigError(f"{text!r} has no path: give {name}=PATH")
        return _at_path(path_of(os.path.expanduser(path)), BENCHMARKS[name])
    location = path_of(text)
    if isinstance(location, RemotePath) or (text and os.path.exists(location)):
        return _at_path(location, Benchmark(rule=None))
    raise ConfigError(
        f"{unknown_name('dataset', name, BENCHMARKS)}; or give the path of an existing file or folder, "
        "NAME=PATH, or hub:ORG/NAME"
    )


def _at_path(path: AnyPath, benchmark: Benchmark) -> FoundDataset:
    # Path.exists raises if a name is too long.
    if not (path.exists() if isinstance(path, RemotePath) else os.path.exists(path)):
        raise DataError(f"there is no file or folder {path}")
    path = absolute(path)
    name, dataset = benchmark.name or path.name or str(path), str(path)
    if benchmark.name:
        dataset = f"{name}={path}"
    return FoundDataset(dataset, name, str(path), benchmark.find(path), benchmark)


def _on_hub(text: str, benchmark: Benchmark) -> FoundDataset:
    """Load a dataset from the hub.   text: as the user named it."""
    name, hub, config = benchmark.name, benchmark.hub, benchmark.config
    remedy = f"give the path of its files as {name}=PATH" if name else "give the path of its files"
    if not hub:
        raise DataError(f"{name} is not on the hub: {remedy}")
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        library_missing = "loading from the hub needs the datasets library: pip install 'cauc-ray[datasets]'"
        raise ConfigError(f"{library_missing}, or {remedy}") from error
    files = benchmark.files and dict(benchmark.files)
    try:
        loaded = library.load_dataset(hub, config, revision=benchmark.revision, data_files=files)
    except Exception as error:  # the library, the network and the hub raise errors of many types
        reason = first_line(error.__cause__ or error)
        raise DataError(f"cannot load {hub!r} from the hub: {reason}; {remedy}") from error
    title = f"{hub} ({config})" if config else hub
    openers: Openers = {
        "validation" if split in ("val", "valid") else str(split): partial(HubRows, rows, f"{title}, {split}")
        for split, rows in loaded.items()
    }
    return FoundDataset(text, name or hub, f"{hub} on the hub", openers, benchmark)
