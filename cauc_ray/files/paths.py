"""Paths: local ones, and URIs such as s3://bucket/folder; the visible files of a folder, and digests of content.

URIs go through the filesystems of pyarrow and fsspec, which are imported when the first URI is used. Endpoints and
credentials come from each filesystem's usual environment variables, such as AWS_ENDPOINT_URL_S3, AWS_REGION and
AWS_ACCESS_KEY_ID.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar, cast

from cauc_ray.errors import ConfigError, DataError, first_line

if TYPE_CHECKING:
    import pyarrow as pa

_URI = re.compile(r"([a-z][a-z0-9+.-]+)://([^/]*)/*(.*)", re.DOTALL)
# Environment variables that locate a filesystem and give access to it.
_SETTINGS = ("AWS_", "AZURE_", "GOOGLE_", "GCS_", "HF_")
_NO_ACCESS = re.compile("ACCESS_DENIED|FORBIDDEN|Unauthorized|credential|InvalidAccessKeyId|40[13] ", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class RemotePath:
    """A file or folder at a URI, with the methods of pathlib.Path that readers of files need.

    Methods raise DataError, in one line, if the filesystem cannot be reached or refuses access; ConfigError if a
    package for it is missing.

    Attributes:
        root: Scheme and authority, such as "s3://bucket".
        key: The path below it.
    """

    root: str
    key: PurePosixPath

    def __str__(self) -> str:
        return self.root if self.key == PurePosixPath() else f"{self.root}/{self.key}"

    def __truediv__(self, name: str) -> RemotePath:
        return replace(self, key=self.key / name)

    @property
    def name(self) -> str:
        """Return the last component."""
        return self.key.name

    @property
    def stem(self) -> str:
        """Return the last component without its suffix."""
        return self.key.stem

    @property
    def suffix(self) -> str:
        """Return the last component's suffix, from its last dot."""
        return self.key.suffix

    @property
    def parent(self) -> RemotePath:
        """Return the folder above."""
        return replace(self, key=self.key.parent)

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the components, the root first."""
        return (self.root, *self.key.parts)

    def exists(self) -> bool:
        """Return whether a file or a folder exists here."""
        return bool(self.info().type.name != "NotFound")

    def is_file(self) -> bool:
        """Return whether a file exists here."""
        return bool(self.info().type.name == "File")

    def is_dir(self) -> bool:
        """Return whether a folder exists here; on object stores, whether some object has this prefix."""
        return bool(self.info().type.name == "Directory")

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield the folder's entries, sorted."""
        return (path for path, _ in self.listing(recursive=False))

    def listing(self, *, recursive: bool) -> list[tuple[RemotePath, Any]]:
        """Return the paths below with what the filesystem reports of them, sorted; none where no folder is here."""
        with self._reached("read") as (filesystem, path):
            from pyarrow.fs import FileSelector

            infos = filesystem.get_file_info(FileSelector(path, allow_not_found=True, recursive=recursive))
        below = {PurePosixPath(info.path.lstrip("/")).relative_to(path): info for info in infos}
        return [(replace(self, key=self.key / name), below[name]) for name in sorted(below)]

    def info(self) -> Any:
        """Return what the filesystem reports of this path: its type, size and time."""
        with self._reached("read") as (filesystem, path):
            return filesystem.get_file_info(path)

    def open_input(self) -> Any:
        """Open the file for reading at any position. Raises FileNotFoundError if it does not exist."""
        with self._reached("read") as (filesystem, path):
            return filesystem.open_input_file(path)

    def read_bytes(self) -> bytes:
        """Return the file's content. Raises FileNotFoundError if it does not exist."""
        with self._reached("read") as (filesystem, path), filesystem.open_input_file(path) as opened:
            content: bytes = opened.read()
            return content

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return the file's text. Raises FileNotFoundError, or UnicodeDecodeError if it is not UTF-8."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, content: bytes | pa.Buffer) -> None:
        """Write a file atomically: readers see the old content or the new."""
        with self._reached("written", ConfigError) as (filesystem, path):
            stream = filesystem.open_output_stream(path)
            # One write: closing a stream, even after an error between two writes, would publish a partial file.
            stream.write(content)
            stream.close()

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the file."""
        if missing_ok and not self.is_file():
            return
        with self._reached("deleted", ConfigError) as (filesystem, path):
            filesystem.delete_file(path)

    @contextmanager
    def _reached(self, done: str, kind: type[ConfigError | DataError] = DataError) -> Iterator[tuple[Any, str]]:
        """Yield the filesystem and the path on it; errors of that kind say that it cannot be `done`."""
        settings = tuple(sorted(item for item in os.environ.items() if item[0].startswith(_SETTINGS)))
        try:
            filesystem, base = _filesystem(self.root, settings)
            yield filesystem, "/".join(part for part in (base, *self.key.parts) if part)
        except (FileNotFoundError, ConfigError, DataError):
            raise
        except Exception as error:  # filesystem libraries and the network raise errors of many types
            reason = first_line(error)
            remedy = "; set credentials that allow it" if _NO_ACCESS.search(reason) else ""
            raise kind(f"{self} cannot be {done}: {reason}{remedy}") from error


AnyPath: TypeAlias = Path | RemotePath
SomePath = TypeVar("SomePath", bound=AnyPath)
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FileEntry:
    """A file as a listing reports it.

    Attributes:
        path: Its path.
        size: Its size in bytes, -1 for a broken link.
        modified_ns: The time of its last change, in nanoseconds since the epoch.
    """

    path: Any
    size: int
    modified_ns: int


def path_of(location: str | AnyPath) -> AnyPath:
    """Return the path that a string names: a local path or a URI.

    >>> path_of("s3://bucket/LOGITS") / "pool.json"
    RemotePath(root='s3://bucket', key=PurePosixPath('LOGITS/pool.json'))
    >>> path_of("file:///data/LOGITS") == path_of("/data/LOGITS")
    True
    """
    uri = _URI.fullmatch(location) if isinstance(location, str) else None
    if isinstance(location, RemotePath) or uri is None:
        return location if isinstance(location, RemotePath) else Path(location)
    scheme, authority, key = uri.groups()
    return Path("/", key) if scheme == "file" else RemotePath(f"{scheme}://{authority}", PurePosixPath(key))


def absolute(location: str | AnyPath) -> AnyPath:
    """Return the absolute path that a string names. Raises ConfigError for an empty string."""
    if not str(location):
        raise ConfigError("a path is empty; give a local path or a URI")
    path = path_of(location)
    return path if isinstance(path, RemotePath) else path.absolute()


def path_from(folder: AnyPath, location: str | Path) -> AnyPath:
    """Return the path that a string in a file names; relative paths are relative to the file's folder.

    >>> str(path_from(path_of("s3://bucket/pools"), "LOGITS"))
    's3://bucket/pools/LOGITS'
    """
    path = path_of(str(location))
    if isinstance(path, RemotePath) or path.is_absolute():
        return path
    joined = folder / str(location)
    return joined if isinstance(joined, RemotePath) else joined.resolve()


def path_inside(path: AnyPath, folder: AnyPath) -> str:
    """Return a path relative to a folder that contains it, with slashes.

    >>> path_inside(path_of("s3://bucket/LOGITS/pool.json"), path_of("s3://bucket"))
    'LOGITS/pool.json'
    """
    return "/".join(path.parts[len(folder.parts) :])


@contextmanager
def readable(source: object) -> Iterator[None]:
    """Turn an OSError in the block into a DataError in one line that names the file, or the source."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or source} cannot be read: {error.strerror or error}") from error


@lru_cache(maxsize=32)
def _filesystem(root: str, settings: tuple[tuple[str, str], ...]) -> tuple[Any, str]:
    """Return the filesystem of a root, configured by environment variables, and the root's path there."""
    try:
        import pyarrow as pa
        from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem
    except ImportError as error:
        raise ConfigError(f"{root} needs a package that is not installed: pip install pyarrow") from error
    try:
        filesystem, base = FileSystem.from_uri(root)
        return filesystem, base.strip("/")
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ImportError):  # pyarrow has no filesystem for this scheme
        scheme, _, authority = root.partition("://")
    try:
        from fsspec import filesystem as fsspec_filesystem

        handler = FSSpecHandler(fsspec_filesystem(scheme))
    except ImportError as error:
        package = {"hf": "huggingface_hub", "abfs": "adlfs", "gs": "gcsfs"}.get(scheme, "")
        missing = f"{scheme}:// needs a package that is not installed ({first_line(error)})"
        raise ConfigError(f"{missing}: pip install fsspec {package}".rstrip()) from error
    except ValueError as error:
        remedy = "use a local path, s3://, gs://, abfs:// or hf://"
        raise ConfigError(f"{root}: no filesystem supports {scheme}://; {remedy}") from error
    return PyFileSystem(handler), authority


# Names that belong to other programs, such as partial writes, manifests and logs of transactions.
HIDDEN = (".", "_")


def visible(folder: SomePath) -> list[SomePath]:
    """List a folder sorted by name, without hidden names."""
    return sorted(
        (cast("SomePath", path) for path in folder.iterdir() if not path.name.startswith(HIDDEN)),
        key=lambda path: path.name,
    )


def hive_values(folder: AnyPath, key: str) -> list[str]:
    """Return the sorted values of a folder's partitions by a key: those of its subfolders <key>=<value>."""
    return [
        name.partition("=")[2]
        for path in visible(folder)
        if (name := path.name).startswith(f"{key}=") and path.is_dir()
    ]


def list_files(location: AnyPath, *, follow_links: bool = False, hidden: tuple[str, ...] = HIDDEN) -> list[FileEntry]:
    """List the files in a folder and its subfolders, or a file, by a single listing.

    Args:
        location: The folder or file.
        follow_links: Also enter folders behind links, each folder once.
        hidden: What the names of files and folders that are left out begin with.

    Returns:
        The files, sorted by the components of their paths; none where nothing is there.
    """
    if isinstance(location, Path):
        return list(_walked(location, follow_links, hidden, set())) if location.is_dir() else file_entry(location)
    below = [
        FileEntry(path, info.size, info.mtime_ns or 0)
        for path, info in location.listing(recursive=True)
        if info.type.name == "File" and not any(part.startswith(hidden) for part in path.parts[len(location.parts) :])
    ]
    return below or file_entry(location)


def file_entry(path: AnyPath) -> list[FileEntry]:
    """Return a file's entry, none where it is not a regular file."""
    if isinstance(path, Path):
        status = path.stat() if path.is_file() else None
        return [] if status is None else [FileEntry(path, status.st_size, status.st_mtime_ns)]
    info = path.info()
    return [FileEntry(path, info.size, info.mtime_ns or 0)] if info.type.name == "File" else []


def _walked(folder: Path, follow_links: bool, hidden: tuple[str, ...], seen: set[str]) -> Iterator[FileEntry]:
    if (real := os.path.realpath(folder)) in seen:
        return
    seen.add(real)
    with os.scandir(folder) as listing:
        entries = sorted((entry for entry in listing if not entry.name.startswith(hidden)), key=lambda e: e.name)
    for entry in entries:
        path = Path(entry.path)
        if not entry.is_dir():
            yield from file_entry(path) or ([] if path.exists() else [FileEntry(path, -1, 0)])
        elif follow_links or not entry.is_symlink():
            yield from _walked(path, follow_links, hidden, seen)


# Remote requests at a time, and the bytes that they may be ahead of who takes their results.
THREADS = 32
AHEAD_BYTES = 64 << 20


def side_by_side(
    work: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    remote: bool,
    n_bytes: Callable[[Item], int] = lambda item: AHEAD_BYTES // (2 * THREADS),
) -> Iterator[Result]:
    """Yield results in order; remote work goes on ahead in threads, local work would only take longer in them.

    Args:
        work: What is done with each item.
        items: The items.
        remote: Whether the work waits for a store.
        n_bytes: The size of an item's result.
    """
    if not remote:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(max(1, min(THREADS, len(items)))) as pool:
        ahead: deque[tuple[Future[Result], int]] = deque()
        for item in items:
            ahead.append((pool.submit(work, item), n_bytes(item)))
            while len(ahead) > 1 and sum(size for _, size in ahead) > AHEAD_BYTES:
                yield ahead.popleft()[0].result()
        for future, _ in ahead:
            yield future.result()


def content_digest(path: AnyPath, sample_bytes: int | None = None) -> str | None:
    """Return a digest of a file's bytes, or of the names and bytes of all files in a folder; None if neither exists.

    Hidden files, dates and the path's own name are ignored.

    Args:
        path: The file or folder.
        sample_bytes: How many bytes are read at the start, in the middle and at the end of each file, whose size then
            counts, too. None for all bytes: a file that is replaced by one of the same size then has another digest.

    Raises:
        DataError: A file cannot be read.
    """
    with readable(path):
        if path.is_file():
            with (
                BufferedReader(path.open_input(), 1 << 20) if isinstance(path, RemotePath) else path.open("rb") as file
            ):
                if sample_bytes is None:
                    return hashlib.file_digest(file, "sha256").hexdigest()
                return hashlib.sha256(b"".join(_sampled(file, sample_bytes))).hexdigest()
        if not path.is_dir():
            return None
        files = [entry.path for entry in list_files(path, follow_links=True, hidden=(".",))]
        names = {path_inside(file, path): content_digest(file, sample_bytes) for file in files}
    return hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()


def _sampled(file: BinaryIO, sample_bytes: int) -> Iterator[bytes]:
    """Yield a file's size, and its bytes at the start, in the middle and at the end."""
    n_bytes = file.seek(0, os.SEEK_END)
    yield f"{n_bytes}\n".encode()
    for start in sorted({0, max(0, (n_bytes - sample_bytes) // 2), max(0, n_bytes - sample_bytes)}):
        file.seek(start)
        yield file.read(sample_bytes)
