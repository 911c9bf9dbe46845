"""The visible files of a folder, and digests of their content."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from cauc_ray.files.paths import AnyPath, RemotePath, SomePath, open_bytes, path_inside, readable


def visible(folder: SomePath) -> list[SomePath]:
    """List a folder sorted by name, without hidden files, which belong to other programs (such as partial writes)."""
    return sorted(
        (cast("SomePath", path) for path in folder.iterdir() if not path.name.startswith(".")),
        key=lambda path: path.name,
    )


def hive_values(folder: AnyPath, key: str) -> list[str]:
    """Return the sorted values of a folder's partitions by a key: those of its subfolders <key>=<value>."""
    return [
        name.partition("=")[2]
        for path in visible(folder)
        if (name := path.name).startswith(f"{key}=") and path.is_dir()
    ]


def files_below(folder: SomePath, *, follow_links: bool = False) -> Iterator[SomePath]:
    """Yield the visible files in a folder and its subfolders, sorted by the components of their paths.

    follow_links: also enter folders behind links, each folder once.
    """
    found: Iterator[AnyPath] = (
        (file for file in folder.files_below() if "/." not in f"/{path_inside(file, folder)}")
        if isinstance(folder, RemotePath)
        else _walked(str(folder), follow_links, set())
    )
    return cast("Iterator[SomePath]", found)


def _walked(folder: str, follow_links: bool, seen: set[str]) -> Iterator[Path]:
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    with os.scandir(folder) as found:
        entries = sorted((entry for entry in found if not entry.name.startswith(".")), key=lambda entry: entry.name)
    for entry in entries:
        if entry.is_dir():
            if follow_links or not entry.is_symlink():
                yield from _walked(entry.path, follow_links, seen)
        elif entry.is_file() or not os.path.exists(entry.path):  # not a pipe or a device, but broken links count
            yield Path(entry.path)


def content_digest(path: AnyPath) -> str | None:
    """Return a digest of a file's bytes, or of the names and bytes of all files in a folder; None if neither exists.

    Hidden files, dates and the path's own name are ignored. All bytes are read, so a file that is replaced by one of
    the same size and date has another digest. Raises DataError if a file cannot be read.
    """
    with readable(path):
        if path.is_file():
            with open_bytes(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        if not path.is_dir():
            return None
        below = files_below(path, follow_links=True)
        names = {path_inside(file, path): content_digest(file) for file in below}
    return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()
