"""A folder of image files as a run's input."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cauc_ray.data.blocks import NOTHING_DONE, Done, InputBlock
from cauc_ray.errors import DataError

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
# Files cost alike wherever they lie, so groups are small: several processes share even a small input.
_GROUP_BLOCKS = 4


class ImageInput:
    """Image files as a run's input: example_id, the file's path relative to the folder, and image, its bytes.

    path: as given.   n_rows: the files.   row_bytes: a file's mean size.   identity: the number of files by a text
    that changes when a name or a size does.
    """

    def __init__(self, path: str | Path) -> None:
        """List a folder and all below it, or take one file; nothing is opened.

        Hidden files and folders and what links to folders lead to are left out.
        Raises DataError where there is no image, a folder cannot be listed or a name is not UTF-8.
        """
        self.path = Path(path)
        self._folder = self.path.parent if self.path.is_file() else self.path
        names = [self.path.name] if self.path.is_file() else _image_names(self.path)
        found = {name: size for name in names if (size := _size(self._folder / name)) is not None}
        if not found:
            raise DataError(f"there are no .parquet files and no images ({' '.join(IMAGE_SUFFIXES)}) in {self.path}")
        self._names = tuple(found)
        self.n_rows = len(found)
        self.row_bytes = sum(found.values()) / len(found)
        digest = hashlib.sha256("".join(f"{name}\0{size}\n" for name, size in found.items()).encode())
        self.identity = {f"{len(found)} images, {digest.hexdigest()[:16]}": len(found)}

    def source(self, block_rows: int, done: Done = NOTHING_DONE) -> ImageSource:
        """Return the blocks of at most so many images that are not done."""
        return ImageSource(self._folder.absolute(), self._names, block_rows, dict(done))


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Blocks of image files; plain.   names: relative to the folder."""

    folder: Path
    names: tuple[str, ...]
    block_rows: int
    done: Done

    @property
    def n_groups(self) -> int:
        """How many groups there are."""
        return -(-len(self.names) // (_GROUP_BLOCKS * self.block_rows))

    def blocks(self, group: int) -> Iterator[tuple[int, InputBlock]]:
        """Yield a group's blocks; a file that cannot be read has no bytes, which a model says of its row."""
        n_blocks = -(-len(self.names) // self.block_rows)
        for number in range(group * _GROUP_BLOCKS, min((group + 1) * _GROUP_BLOCKS, n_blocks)):
            if number not in self.done:
                yield number, self._block(self.names[number * self.block_rows : (number + 1) * self.block_rows])

    def _block(self, names: tuple[str, ...]) -> InputBlock:
        images = [read_image(self.folder / name) or b"" for name in names]
        columns = {"example_id": np.array(names, dtype=object), "image": np.array(images, dtype=object)}
        return InputBlock(list(names), None, columns, sum(map(len, images)))


def is_image(file: Path) -> bool:
    """Say whether a file is an image by its name."""
    return file.suffix.lower() in IMAGE_SUFFIXES


def _image_names(folder: Path) -> list[str]:
    """List the images in a folder and below, sorted, by their paths relative to it."""
    names: list[str] = []
    # Links to folders may lead round in a circle, or as in /proc out to the whole machine.
    for at, folders, files in os.walk(folder, onerror=_refuse_folder, followlinks=False):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(at).relative_to(folder)
        names += [(inside / name).as_posix() for name in files if not name.startswith(".") and is_image(Path(name))]
    for name in names:
        try:
            name.encode()
        except UnicodeEncodeError as error:  # it is the row's id
            raise DataError(f"{folder}: the name {name!r} is not valid UTF-8; rename it") from error
    return sorted(names)


def _refuse_folder(error: OSError) -> None:
    """Raise DataError for a folder that cannot be listed: its images would be left out in silence."""
    if not isinstance(error, FileNotFoundError | ProcessLookupError):  # it has gone since
        raise DataError(f"{error.filename} cannot be read: {error.strerror}") from error


def _size(file: Path) -> int | None:
    """Return a file's size, 0 where a link leads nowhere, and None for what is no file and might block who reads it."""
    try:
        found = file.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def read_image(file: Path) -> bytes | None:
    """Return a file's bytes, None where it cannot be read."""
    try:
        return file.read_bytes()
    except OSError:
        return None
