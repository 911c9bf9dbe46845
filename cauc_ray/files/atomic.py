"""Atomic writes: a file appears complete or not at all, on any filesystem."""

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
    """Raise ConfigError if a file cannot be written: no such folder, or the path is a folder, a device or a pipe."""
    try:
        target = path if isinstance(path, RemotePath) else path.resolve()
        if isinstance(target, Path) and not target.parent.is_dir():
            raise ConfigError(f"cannot write {path}: there is no folder {path.parent}")
        _require_bucket(target)
        if target.exists() and not target.is_file():
            raise ConfigError(f"cannot write {path}: it is a folder or not a regular file")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _require_bucket(path: AnyPath) -> None:
    """Raise ConfigError if a path's bucket does not exist; object stores need no other folders."""
    if isinstance(path, RemotePath) and path.root.startswith("s3://") and not path_of(path.root).is_dir():
        raise ConfigError(f"cannot write {path}: there is no bucket {path.root}")


def require_new(path: AnyPath) -> None:
    """Raise ConfigError if a new folder's path exists and is not an empty folder, or its bucket does not exist."""
    try:
        _require_bucket(path)
        taken = path.exists() and (not path.is_dir() or any(True for _ in path.iterdir()))
    except OSError as error:
        raise ConfigError(f"output {path} cannot be created: {error.strerror}") from error
    if taken:
        raise ConfigError(f"output {path} exists and is not an empty folder; choose another path or remove it")


def require_folder(path: AnyPath) -> None:
    """Raise ConfigError unless a path is a folder that can be written to, or one can be created there."""
    try:
        _require_bucket(path)
        if isinstance(path, RemotePath):
            return
        there = next(folder for folder in (path, *path.parents) if folder.exists())
    except OSError as error:
        raise ConfigError(f"output {path} cannot be created: {error.strerror}") from error
    if not there.is_dir():
        raise ConfigError(f"output {path} cannot be created: {there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK) or there.is_relative_to("/proc"):
        raise ConfigError(f"output {path} cannot be created: {there} is not writable")


@contextmanager
def new_folder(path: AnyPath) -> Iterator[None]:
    """Create a folder and its parents for the block; if the block fails, remove those that are still empty.

    Raises ConfigError if the folder exists and is not empty, or cannot be created.
    """
    require_new(path)
    if isinstance(path, RemotePath):
        yield
        return
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    make_folder(path)
    try:
        yield
    except BaseException:
        # Deepest first; a folder that is not empty stays, and so do its parents.
        below = sorted((p for p in path.rglob("*") if p.is_dir()), reverse=True)
        with suppress(OSError):
            for folder in (*below, *made):
                folder.rmdir()
        raise


@contextmanager
def atomic_file(path: AnyPath) -> Iterator[Path]:
    """Yield a local path to write a file to; if the block succeeds, move that file to the given path.

    For a local path, the file is written in the same folder and renamed; a symbolic link then points at the new file.
    For a remote path, it is uploaded in one put. Raises ConfigError as require_writable does.
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
        # A name of its own: the target's name may already have the maximum length.
        temporary = target.with_name(f".cauc-{os.getpid()}-{uuid.uuid4().hex[:8]}.part")
        try:
            yield temporary
            # Without this, a crash of the machine may leave the new name with no content, or with the old content.
            _sync(temporary, os.O_RDWR)
            temporary.replace(target)
            _sync_folder(target.parent)
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def _sync(path: Path, flags: int) -> None:
    """Flush a file's content, or a folder's names, to disk."""
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _sync_folder(folder: Path) -> None:
    with suppress(OSError):  # some file systems cannot
        _sync(folder, os.O_RDONLY)


def make_folder(path: AnyPath) -> None:
    """Create a folder and its parents where they do not exist. Raises ConfigError if that fails.

    An object store has no folders: the first file creates them.
    """
    if isinstance(path, RemotePath):
        return
    try:
        new = [folder for folder in (path, *path.parents) if not folder.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for folder in new:
            _sync_folder(folder.parent)
    except OSError as error:
        raise ConfigError(f"output {path} cannot be created: {error.strerror}") from error
