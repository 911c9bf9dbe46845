"""Finding datasets: the paper's nine by name, others by path or hub id, and the partitions in their folders."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from cauc_ray.data.columns import Published
from cauc_ray.data.rows import TABLES, HubRows, ImageRows, Rows, is_image, open_tables, require_one_format
from cauc_ray.data.splits import Rule
from cauc_ray.data.text_files import text_tables
from cauc_ray.errors import ConfigError, DataError, first_line, unknown_name
from cauc_ray.files.paths import AnyPath, RemotePath, absolute, files_below, path_of, readable, visible

# Partitions are opened one by one, when a rule needs them: a train set may be large.
Openers: TypeAlias = dict[str, Callable[[], Rows]]

_PARTITIONS = {"train", "validation", "val", "valid", "test", "dev", "calibration"}
_SHARD = re.compile(r"(?P<name>.+?)-(?P<number>\d{5})-of-(?P<total>\d{5})(-[0-9a-f]+)?")

# The hub's own conversion to Parquet, for datasets whose repository has a loading script.
_CONVERTED = "refs/convert/parquet"


def find_partitions(path: AnyPath) -> Openers:
    """Find the partitions at a path: one file; a folder of tables; a folder of images, a subfolder for each class.

    In a folder of tables, each file's stem or subfolder names a partition; with images, the folder above the class
    folders does. A single subfolder whose name is not a partition is searched. Raises DataError if nothing matches or
    the match is ambiguous.
    """
    with readable(path):
        if not path.is_file():
            return _in_folder(path)
        if path.suffix.lower() not in TABLES:
            raise DataError(f"{path} is not a Parquet (.parquet), JSONL (.jsonl, .ndjson, .json) or CSV (.csv) file")
        return {_stem(path): partial(open_tables, [path])}


def wilds_partitions(path: AnyPath) -> Openers:
    """Find the partitions of a WILDS folder of images: metadata.csv (split, filename, y) and train/ with all images.

    Of its five splits, `val` is validation, `id_test` test-id and `test` test-ood. A folder without metadata.csv is
    read as find_partitions does.
    """
    folders = [path, *(_visible_folders(path) if path.is_dir() else [])]
    folder = next((folder for folder in folders if (folder / "metadata.csv").is_file()), None)
    if folder is None:
        return find_partitions(path)
    file = folder / "metadata.csv"
    table = pa.concat_tables(text_tables(file))
    missing = [name for name in ("split", "filename", "y") if name not in table.column_names]
    if missing:
        raise DataError(f"{file} has no column {missing[0]!r}; it has {', '.join(table.column_names)}")
    columns = (table.column(name).to_pylist() for name in ("split", "filename", "y"))
    found: Openers = {}
    rows = list(enumerate(zip(*columns, strict=True)))
    for theirs, ours in (("val", "validation"), ("id_test", "test-id"), ("test", "test-ood")):
        own = [(number, name, label) for number, (split, name, label) in rows if split == theirs]
        for number, name, label in own:
            if not name or not label or not label.isdecimal():
                named = f"filename {name!r} and y {label!r}"
                raise DataError(f"{file}, row {number}: {named} are not an image's path and a class")
        if own:
            names, labels = [name for _, name, _ in own], [int(label) for _, _, label in own]
            found[ours] = partial(ImageRows, folder / "train", names, labels, f"{file} ({theirs})")
    return found


def _in_folder(folder: AnyPath) -> Openers:
    files = [entry for entry in visible(folder) if entry.is_file()]
    tables = _tables(files)
    here = _real(folder)
    kinds = {sub: _kind(sub, {here}) for sub in _visible_folders(folder)}
    table_folders = [sub for sub, kind in kinds.items() if kind == "tables"]
    classes = [sub for sub, kind in kinds.items() if kind == "images"]
    above_classes = [sub for sub, kind in kinds.items() if kind == "deeper images"]

    if any(is_image(file) for file in files) or (classes and all(sub.name.lower() in _PARTITIONS for sub in classes)):
        where = folder if not classes else classes[0]
        raise DataError(f"{where} contains images directly; put each into a folder named after its class")
    sorts = [found[0] for found in (tables + table_folders, classes, above_classes) if found]
    if not sorts:
        raise DataError(f"{folder} has no .parquet, .jsonl or .csv files and no folders of images")
    if len(sorts) > 1:
        raise DataError(
            f"{folder} is mixed: {sorts[0].name} and {sorts[1].name} have different kinds of data; give one of them"
        )
    if classes:
        name = (folder if isinstance(folder, RemotePath) else folder.resolve()).name
        return _of_images({_canonical(name) if name.lower() in _PARTITIONS else "all": folder})
    subfolders = table_folders + above_classes
    if not tables and len(subfolders) == 1 and subfolders[0].name.lower() not in _PARTITIONS:
        return _in_folder(subfolders[0])
    if above_classes:
        return _of_images({name: folders[0] for name, folders in _by_name(above_classes).items()})
    return _of_tables(tables, table_folders)


def _tables(files: Iterable[AnyPath]) -> list[AnyPath]:
    return [file for file in files if file.suffix.lower() in TABLES]


def _of_tables(tables: Sequence[AnyPath], folders: Sequence[AnyPath]) -> Openers:
    inside = {path: [path] for path in tables}
    inside |= {folder: _tables(files_below(folder, follow_links=True)) for folder in folders}
    require_one_format(file for files in inside.values() for file in files)
    return {
        name: partial(open_tables, [file for path in paths for file in inside[path]])
        for name, paths in _by_name(inside).items()
    }


def typed(opener: Callable[[], Rows]) -> Callable[[], Rows]:
    """Return an opener by which cells of CSV are of the type that all of their column fit, and not text."""
    if isinstance(opener, partial) and opener.func is open_tables:
        return partial(opener, ids="example_id")
    return opener


def _by_name(paths: Iterable[AnyPath]) -> dict[str, list[AnyPath]]:
    """Group files and folders by partition: one file or folder of each name, or all shards of a file."""
    named: dict[str, list[AnyPath]] = {}
    for path in paths:
        named.setdefault(_stem(path), []).append(path)
    for name, group in named.items():
        shards = [match for match in (_SHARD.fullmatch(path.stem) for path in group) if match]
        if len(group) > max(len(shards), 1):
            raise DataError(f"{group[0]} and {group[1].name} are both named as partition {name!r}; remove one of them")
        if shards and len(group) != int(shards[0]["total"]):
            raise DataError(f"{group[0].parent} has {len(group)} of the {int(shards[0]['total'])} files of {name!r}")
    return named


def _of_images(folders: dict[str, AnyPath]) -> Openers:
    # Classes have the same numbers in all partitions, even in those without images of a class.
    classes = sorted({sub.name for folder in folders.values() for sub in _visible_folders(folder)})
    numbers = {name: number for number, name in enumerate(classes)}
    return {name: partial(_open_images, folder, numbers) for name, folder in folders.items()}


def _open_images(folder: AnyPath, numbers: dict[str, int]) -> Rows:
    found = [(sub.name, file.name) for sub in _visible_folders(folder) for file in visible(sub) if is_image(file)]
    return ImageRows(folder, [f"{name}/{image}" for name, image in found], [numbers[name] for name, _ in found])


def _kind(folder: AnyPath, seen: set[str]) -> str | None:
    """Return the kind of a folder: "images", "tables", or "deeper images" if its subfolders have images.

    seen: real paths of the folders visited so far, which this function adds to, so that links form no cycles.
    """
    if (real := _real(folder)) in seen:
        return None
    seen.add(real)
    entries = list(visible(folder))
    if any(is_image(entry) for entry in entries):
        return "images"
    if any(entry.is_file() for entry in _tables(entries)):
        return "tables"
    kind = next((kind for kind in (_kind(sub, seen) for sub in entries if sub.is_dir()) if kind), None)
    return "deeper images" if kind == "images" else kind


def _real(folder: AnyPath) -> str:
    """Return a folder's real path, with links resolved."""
    return str(folder) if isinstance(folder, RemotePath) else os.path.realpath(folder)


def _visible_folders(folder: AnyPath) -> list[AnyPath]:
    return [entry for entry in visible(folder) if entry.is_dir()]


def _stem(path: AnyPath) -> str:
    return partition_name(path.name if path.is_dir() else path.stem)


def partition_name(stem: str) -> str:
    """Return the partition that a file or folder is named after.

    >>> partition_name("val-00000-of-00002")
    'validation'
    """
    shard = _SHARD.fullmatch(stem)
    return _canonical(shard["name"] if shard else stem)


def _canonical(name: str) -> str:
    name = name.lower() if name.lower() in _PARTITIONS else name
    return "validation" if name in ("val", "valid") else name


@dataclass(frozen=True, slots=True)
class Benchmark:
    """One dataset of the paper, or any other dataset of the hub.

    hub, config, revision: what the datasets library loads; hub is "" for a dataset that is not on the hub.
    files: the files to load, if other partitions are large and not needed.   tests: its test partitions, one split
    each.   find: finds its partitions in a folder.   rule: the paper's split rule, if it has one.
    without_test: the rule where its test partition is missing, as it is on the hub.
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
    without_test: Rule | None = None
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
        # Those with several right options are not counted: 2,816 of the 4,183 rows of validation remain.
        published=Published(
            {"choices": "opa+opb+opc+opd", "label": "cop", "subject": "subject_name"}, kept=("choice_type", "single")
        ),
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
        # The paper's test set, 2,224 rows, is not on the hub: with a folder that has it, validation is halved.
        without_test="sample-train",
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
