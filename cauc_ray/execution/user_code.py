"""A user's own modules, which travel to every worker: its node may never have seen their folder."""

from __future__ import annotations

import ast
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from cauc_ray.errors import ExecutionError
from cauc_ray.models.pool import StageSpec
from cauc_ray.models.python import PythonSpec


class ImportPaths(tuple[str, ...]):
    """Folders in which a process looks for a user's modules.

    Pickled, they take the modules along, and unpickled where these are missing or differ, they begin with a folder
    that has them. (Ray's runtime_env takes local modules only of who starts the session, starts a replica half a
    second later, and forgets modules once no actor has them.)
    """

    files: dict[str, bytes]

    def __reduce__(self) -> tuple[Callable[..., ImportPaths], tuple[tuple[str, ...], dict[str, bytes]]]:
        """Return what unpickles them: with their modules, for those that they are sent on to."""
        return _unpacked, (tuple(self), self.files)


def import_paths(stages: Sequence[StageSpec], factories: Iterable[str] = ()) -> ImportPaths:
    """Return where a user's modules are: next to the pool file, and in the current folder.

    Taken along are the modules that the stages' factories name, and others, "module:function", with all that they
    import from these folders: Python files, no data.
    """
    models = [stage.model for stage in stages if isinstance(stage.model, PythonSpec)]
    folders = dict.fromkeys([model.folder for model in models if model.folder is not None] + [os.getcwd()])
    found = ImportPaths(folders)
    wanted = [factory.partition(":")[0] for factory in (*(model.factory for model in models), *factories)]
    found.files = _files([Path(folder) for folder in folders], [name.partition(".")[0] for name in wanted])
    return found


def _files(folders: Sequence[Path], wanted: list[str]) -> dict[str, bytes]:
    """Return the Python files of top-level modules that lie in one of the folders, and of those that these import."""
    files: dict[str, bytes] = {}
    seen = {"", "cauc_ray"}
    while wanted:
        name = wanted.pop()
        if name in seen:
            continue
        seen.add(name)
        for folder in folders:
            own = [folder / f"{name}.py", *sorted((folder / name).rglob("*.py"))]
            sources = {str(path.relative_to(folder)): path.read_bytes() for path in own if path.is_file()}
            if sources:
                files |= sources
                wanted += [imported for source in sources.values() for imported in _imported(source)]
                break
    return files


def _imported(source: bytes) -> set[str]:
    """Return the top-level modules that a source imports; none where it has an error, which its import will show."""
    names: list[str] = []
    with suppress(SyntaxError, ValueError):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names.append(node.module)
    return {name.partition(".")[0] for name in names}


def _unpacked(folders: tuple[str, ...], files: dict[str, bytes]) -> ImportPaths:
    """Return import paths where they have arrived, with the folder of their modules if they are not there as sent."""
    there = ImportPaths(folders)
    there.files = files
    if all(any(_is(Path(folder, name), content) for folder in folders) for name, content in files.items()):
        return there
    digest = hashlib.sha256(repr(sorted(files.items())).encode()).hexdigest()[:16]
    own = Path(tempfile.gettempdir(), f"cauc-ray-{os.getuid()}")
    own.mkdir(mode=0o700, exist_ok=True)
    if own.stat().st_uid != os.getuid():
        raise ExecutionError(f"{own} belongs to another user: remove it, or set TMPDIR on the nodes")
    for name, content in files.items():
        path = own / digest / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _is(path, content):
            part = path.with_name(f"{path.name}.{os.getpid()}")
            part.write_bytes(content)
            part.replace(path)  # others may import it at this moment
    there = ImportPaths((str(own / digest), *folders))
    there.files = files
    return there


def _is(path: Path, content: bytes) -> bool:
    try:
        return path.read_bytes() == content
    except OSError:
        return False
