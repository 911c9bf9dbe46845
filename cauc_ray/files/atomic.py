"""Files that appear whole or not at all, on any filesystem."""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa

from cauc_ray.errors import ConfigError
from cauc_ray.files.paths import AnyPath, RemotePath, path_of


def require_writable(path: AnyPath) -> None:
    """Raise ConfigError where a file cannot be written: no such folder, or the path is a folder, a device or a pipe."""
    try:
        target = path if isinstance(path, RemotePath) else path.resolve()
        if isinstance(target, Path) and not target.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
        # An object store has no folders that must be there, but a bucket.
        if isinstance(target, RemotePath) and target.root.startswith("s3://") and not path_of(target.root).is_dir():
            raise ConfigError(f"cannot write {path}: there is no bucket {target.root}")
        if target.exists() and not target.is_file():
            raise ConfigError(f"cannot write {path}: it is a folder or not a regular file")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def atomic_file(path: AnyPath) -> Iterator[Path]:
    """Yield a local path to write a file to; if the block succeeds, put that file at the given path.

    Of a local path the file lies in the same folder and is renamed; a symbolic link keeps pointing at what is then the
    new file. Of a remote path it is uploaded in one put. Raises ConfigError as require_writable does.
    """
    require_writable(path)
    if isinstance(path, RemotePath):
        with tempfile.TemporaryDirectory(prefix="cauc-") as folder:
            temporary = Path(folder, path.name)
            yield temporary
            with pa.memory_map(str(temporary)) as written:
                path.write_bytes(written.read_buffer())
        return
    try:
        target = path.resolve()
        # A name of its own: the target's may be as long as names can be.
        temporary = target.with_name(f".cauc-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            yield temporary
            # Without this a crash of the machine may leave the new name with no content, or the old content.
            _sync(temporary, os.O_RDWR)
            temporary.replace(target)
            _sync_folder(target.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _sync(path: Path, flags: int) -> None:
    """Have what is written to a file, or the names in a folder, on the disk before going on."""
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot, and then keep names in their own way
        _sync(folder, os.O_RDONLY)


def make_folder(path: AnyPath) -> None:
    """Make a folder and the ones above it, unless they are there. Raises ConfigError where that cannot be.

    An object store has no folders: the first file makes them.
    """
    if isinstance(path, RemotePath):
        return
    try:
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in new:
            _sync_folder(folder.parent)
    except OSError as error:
        raise ConfigError(f"output {path} cannot be made: {error.strerror}") from error
