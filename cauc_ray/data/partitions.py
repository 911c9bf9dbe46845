"""Finding datasets: the paper's nine by name, others by path or hub id, and the partitions of their files."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from cauc_ray.data.benchmarks import BENCHMARKS, Benchmark, Metadata
from cauc_ray.data.sources import (
    PARTITIONS,
    SHARD,
    Source,
    image_files,
    is_image,
    listed,
    open_folder,
    partition_name,
    table_entries,
    table_files,
)
from cauc_ray.data.streams import stem_of, stream_tables
from cauc_ray.errors import ConfigError, DataError, first_line, unknown_name
from cauc_ray.files.paths import AnyPath, FileEntry, RemotePath, absolute, file_entry, path_of

# Partitions are opened one by one, when a rule needs them: a train set may be large.
Openers: TypeAlias = Mapping[str, Callable[[], Source]]
# The relative path of a file, as its parts.
_Parts: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Located:
    """A dataset's partitions, not opened yet.

    Attributes:
        dataset: Identifies it, independent of the working folder.
        name: For display.
        location: Where it is, for messages.
        find: Finds the partitions, which are opened one by one.
        rows: Opens all rows as they are; None where they are found by partitions only.
        benchmark: The paper's dataset, or a general one.
    """

    dataset: str
    name: str
    location: str
    find: Callable[[], Openers]
    rows: Callable[[], Source] | None
    benchmark: Benchmark


def locate(text: str, labels: Sequence[str] | None = None) -> Located:
    """Find NAME (in the folder $CAUC_DATA, else on the hub), NAME=PATH, PATH, hub:ORG/NAME or hub:ORG/NAME:CONFIG.

    Args:
        text: What names the dataset; a path may be a URI.
        labels: The names of the options, in whose order folders of images are numbered that have these names.

    Raises:
        ConfigError: It is none of these.
        DataError: Nothing is there, or nothing there can be read.
    """
    if text.startswith("hub:"):
        hub, _, config = text.removeprefix("hub:").partition(":")
        if not hub or ".." in hub.split("/"):
            raise ConfigError(f"{text!r} does not name a dataset: give hub:ORG/NAME or hub:ORG/NAME:CONFIG")
        return _on_hub(text, Benchmark(hub=hub, config=config or None))
    name, is_named, named_path = text.partition("=")
    if name in BENCHMARKS:
        folder = os.environ.get("CAUC_DATA")
        if is_named and not named_path:
            raise ConfigError(f"{text!r} has no path: give {name}=PATH")
        if is_named:
            return _at_path(path_of(os.path.expanduser(named_path)), BENCHMARKS[name], labels)
        if folder and (path_of(folder) / name).exists():
            return _at_path(path_of(folder) / name, BENCHMARKS[name], labels)
        return _on_hub(name, BENCHMARKS[name])
    path = path_of(text)
    # Path.exists raises if a name is too long.
    if isinstance(path, RemotePath) or (text and os.path.exists(path)) or os.sep in name:
        return _at_path(path, Benchmark(), labels)
    raise ConfigError(
        f"{unknown_name('dataset', name, BENCHMARKS)}; or give the path of an existing file or folder, "
        "NAME=PATH, or hub:ORG/NAME"
    )


def _at_path(path: AnyPath, benchmark: Benchmark, labels: Sequence[str] | None) -> Located:
    if not (isinstance(path, RemotePath) or os.path.exists(path)):
        raise DataError(f"{path} does not exist")
    path = absolute(path)
    entries = listed(path)
    name = benchmark.name or path.name or str(path)
    dataset = f"{benchmark.name}={path}" if benchmark.name else str(path)

    def find() -> Openers:
        if benchmark.metadata is not None:
            table = next((entry for entry in entries if entry.path.name == benchmark.metadata.file), None)
            if table is not None:
                return _in_metadata(table, entries, benchmark.metadata)
        files = {entry.path.parts[len(path.parts) :]: entry for entry in entries}
        if () not in files:
            return _in_folder(path, path, files, labels)
        if is_image(path):
            raise DataError(f"{path} is an image; give the folder above the folders of classes")
        return {partition_name(stem_of(path)): partial(table_files, entries, path.parent)}

    return Located(dataset, name, str(path), find, partial(open_folder, path, entries), benchmark)


def _in_metadata(table_entry: FileEntry, entries: Sequence[FileEntry], metadata: Metadata) -> Openers:
    """Return the partitions that a table of images lists."""
    table = pa.concat_tables(stream_tables(table_entry))
    names = (metadata.partition, "filename", "y")
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise DataError(f"{table_entry.path} has no column {missing[0]!r}; it has {', '.join(table.column_names)}")
    folder = table_entry.path.parent / metadata.images
    by_path = {entry.path: entry for entry in entries}
    images: dict[str, list[FileEntry]] = {}
    labels: dict[str, list[int]] = {}
    for number, row in enumerate(table.to_pylist()):
        value, image, label = (row[name] for name in names)
        if value not in metadata.partitions:
            continue
        if not image or not label or not label.isdecimal():
            fault = f"filename {image!r} and y {label!r} are not an image's path and a class"
            raise DataError(f"{table_entry.path}, row {number}: {fault}")
        images.setdefault(value, []).append(by_path.get(folder / image, FileEntry(folder / image, -1, 0)))
        labels.setdefault(value, []).append(int(label))
    return {
        partition: partial(image_files, folder, images[value], labels[value], f"{table_entry.path} ({value})")
        for value, partition in metadata.partitions.items()
        if value in images
    }


def _in_folder(
    path: AnyPath, folder: AnyPath, files: Mapping[_Parts, FileEntry], labels: Sequence[str] | None
) -> Openers:
    """Return the partitions of a folder of tables, or of images in a subfolder for each class.

    Each table's stem or subfolder names a partition; with images, the folder above the class folders does. A single
    subfolder whose name is not a partition is searched. Without names of partitions, all tables are one partition.

    Args:
        path: The dataset's folder, for names of rows.
        folder: The folder, which is in it.
        files: Its files by their relative paths.
        labels: As locate's.

    Raises:
        DataError: Nothing matches, or the match is ambiguous.
    """
    images = {parts: entry for parts, entry in files.items() if is_image(entry.path)}
    columnar = {entry.path for entry in table_entries(files.values(), images=bool(images))}
    tables = {parts: entry for parts, entry in files.items() if entry.path in columnar}
    classes = sorted({parts[0] for parts in images if len(parts) == 2})
    above = sorted({parts[0] for parts in images if len(parts) > 2} - {*classes})
    direct = next((entry.path.parent for parts, entry in images.items() if len(parts) == 1), None)
    if classes and all(name.lower() in PARTITIONS for name in classes):
        direct = folder / classes[0]
    if direct is not None:
        raise DataError(f"{direct} contains images directly; put each into a folder named after its class")
    if not images and not tables:
        raise DataError(f"{folder} has no .parquet, .jsonl or .csv files and no folders of images")
    first = [next(iter(names)) for names in ([parts[0] for parts in tables], classes, above) if names]
    if len(first) > 1:
        raise DataError(f"{folder} is mixed: {first[0]} and {first[1]} have different kinds of data; give one of them")
    top = {parts[0] for parts in (tables or images)}
    (only,) = top if len(top) == 1 else ("",)
    inside = {parts[1:]: entry for parts, entry in files.items() if parts[0] == only and len(parts) > 1}
    if inside and not classes and only.lower() not in PARTITIONS and "=" not in only:
        return _in_folder(path, folder / only, inside, labels)
    if tables:
        return _of_tables(path, folder, tables)
    if classes:
        name = (folder if isinstance(folder, RemotePath) else folder.resolve()).name
        return _of_images(path, {partition_name(name) if name.lower() in PARTITIONS else "all": folder}, images, labels)
    folders = _by_name(folder, above)
    return _of_images(path, {name: folder / names[0] for name, names in folders.items()}, images, labels)


def _of_tables(path: AnyPath, folder: AnyPath, tables: Mapping[_Parts, FileEntry]) -> Openers:
    # key=value folders are columns, and name no partition.
    tops = {parts: next(part for part in parts if "=" not in part or part == parts[-1]) for parts in tables}
    names = _by_name(folder, list(dict.fromkeys(tops.values())))
    if not names.keys() & PARTITIONS and len(names) > 1:
        return {folder.name: partial(table_files, list(tables.values()), path)}
    return {
        name: partial(table_files, [entry for parts, entry in tables.items() if tops[parts] in members], path)
        for name, members in names.items()
    }


def _by_name(folder: AnyPath, names: Iterable[str]) -> dict[str, list[str]]:
    """Group files and folders by partition: one file or folder of each name, or all shards of a file."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(partition_name(stem_of(Path(name))), []).append(name)
    for partition, members in groups.items():
        shards = [match for match in (SHARD.fullmatch(stem_of(Path(name))) for name in members) if match]
        if len(members) > max(len(shards), 1):
            both = f"{folder / members[0]} and {members[1]} are both named as partition {partition!r}"
            raise DataError(f"{both}; remove one of them")
        if shards and len(members) != int(shards[0]["total"]):
            raise DataError(f"{folder} has {len(members)} of the {int(shards[0]['total'])} files of {partition!r}")
    return groups


def _of_images(
    root: AnyPath,
    partitions: Mapping[str, AnyPath],
    images: Mapping[_Parts, FileEntry],
    labels: Sequence[str] | None,
) -> Openers:
    """Return partitions of class folders. Classes have the same numbers in all, even without images of a class."""
    inside = {
        name: [entry for entry in images.values() if entry.path.parent.parent == above]
        for name, above in partitions.items()
    }
    classes = sorted({entry.path.parent.name for entries in inside.values() for entry in entries})
    order = list(labels) if labels and {*classes} <= {*labels} else classes
    return {
        name: partial(image_files, root, entries, [order.index(entry.path.parent.name) for entry in entries])
        for name, entries in inside.items()
    }


def _on_hub(text: str, benchmark: Benchmark) -> Located:
    """Load a dataset from the hub, which the user named by a text."""
    name, hub, config = benchmark.name, benchmark.hub, benchmark.config
    remedy = f"give the path of its files as {name}=PATH" if name else "give the path of its files"
    if not hub:
        raise DataError(f"{name} is not on the hub: {remedy}")
    try:
        library: Any = importlib.import_module("datasets")
    except ImportError as error:
        library_missing = "loading from the hub needs the datasets library: pip install 'cauc-ray[datasets]'"
        raise ConfigError(f"{library_missing}, or {remedy}") from error
    try:
        loaded = library.load_dataset(hub, config, revision=benchmark.revision, data_files=benchmark.files)
    except Exception as error:  # the library, the network and the hub raise errors of many types
        reason = first_line(error.__cause__ or error)
        raise DataError(f"cannot load {hub!r} from the hub: {reason}; {remedy}") from error
    title = f"{hub} ({config})" if config else hub
    partitions: dict[str, Callable[[], Source]] = {}
    for split, rows in loaded.items():
        partition = "validation" if split in ("val", "valid") else str(split)
        # Arrow files that the library keeps, in which images are as they were published.
        files = [entry for file in rows.cache_files for entry in file_entry(Path(file["filename"]))]
        partitions[partition] = partial(table_files, files, Path(), f"{title}, {split}", partition)
    return Located(text, name or hub, f"{hub} on the hub", lambda: partitions, None, benchmark)
