"""A job's output folder: whose work it holds, that one job at a time works there, and how it ended."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cauc_ray.errors import ConfigError
from cauc_ray.files.atomic import make_folder
from cauc_ray.files.documents import read_json, write_json
from cauc_ray.files.paths import AnyPath, RemotePath

RECORD, RESULT, LOCK = "job.json", "result.json", ".lock"
FORMAT = "cauc-job/2"


@dataclass(frozen=True, slots=True)
class Origin:
    """What work came from, beside its config.

    version: of the package.   inputs: digests of what files and folders hold, by path; None where there is none.
    """

    version: str
    inputs: dict[str, str | None]

    def change_since(self, before: Origin) -> str | None:
        """Return in words what has changed, None where nothing has."""
        if self.version != before.version:
            return f"the version of cauc-ray has changed from {before.version} to {self.version}"
        paths = {**self.inputs, **before.inputs}
        changed = next((path for path in paths if self.inputs.get(path) != before.inputs.get(path)), None)
        return None if changed is None else f"{changed} has changed"


@contextmanager
def job_folder(path: AnyPath, job: str, config: Mapping[str, Any], origin: Origin) -> Iterator[None]:
    """Hold an output folder for the length of the block: a new one, or one with work of the same job and config.

    config: as JSON has it, noted in job.json.   origin: what must be the same for work to go on. Where the block fails
    before it has written anything, the folder is taken back. Raises ConfigError where the folder holds something else
    or cannot be made, or another job is at work.
    """
    record = {"format": FORMAT, "job": job, "config": json.loads(json.dumps(config)), "origin": asdict(origin)}
    _require_same(path, record)
    made = [] if isinstance(path, RemotePath) else [at for at in (path, *path.parents) if not at.exists()]
    make_folder(path)
    try:
        with _alone(path):
            _require_same(path, record)  # another job may have begun meanwhile
            if isinstance(path, Path):
                for part in path.rglob(".cauc-*.part"):  # what an attempt that was killed had half written
                    part.unlink(missing_ok=True)
            if not (path / RECORD).exists():
                write_json(path / RECORD, record)
            yield
    except BaseException:
        _take_back(path, made)
        raise


def read_result(path: AnyPath) -> dict[str, Any] | None:
    """Return how the job in a folder ended, None where it has not."""
    return read_json(path / RESULT) if (path / RESULT).is_file() else None


def write_result(path: AnyPath, result: Mapping[str, Any]) -> None:
    """Note how the job in a folder ended."""
    write_json(path / RESULT, dict(result))


def remove_result(path: AnyPath) -> None:
    """Forget how the job in a folder ended."""
    (path / RESULT).unlink()


def _require_same(path: AnyPath, record: Mapping[str, Any]) -> None:
    """Raise ConfigError where a folder holds anything but work of the same record."""
    if not (path / RECORD).is_file():
        # A job that was killed as it began may have left these.
        if path.exists() and (not path.is_dir() or any(not _is_ours(each.name) for each in path.iterdir())):
            raise ConfigError(f"output {path} exists and is not an empty folder; choose another or remove it")
        return
    there = read_json(path / RECORD)
    if not isinstance(there, dict) or there.get("format") != FORMAT:
        raise ConfigError(f"output {path} is of another version of this program; choose another")
    if there.get("job") != record["job"]:
        raise ConfigError(f"output {path} is of a job {there.get('job')!r}; choose another")
    of_config = there.get("config", {})
    other = next((k for k in {**record["config"], **of_config} if record["config"].get(k) != of_config.get(k)), None)
    if other is not None:
        raise ConfigError(f"output {path} is of another config, whose {other!r} differs; choose another")
    change = Origin(**record["origin"]).change_since(Origin(**there["origin"]))
    if change is not None:
        raise ConfigError(
            f"{change} since work began in output {path}, which would mix the two; choose another output, or remove "
            "that folder to begin anew"
        )


def _is_ours(name: str) -> bool:
    """Say whether a file is of a folder that holds no work yet."""
    return name == LOCK or (name.startswith(".cauc-") and name.endswith(".part"))


@contextmanager
def _alone(path: AnyPath) -> Iterator[None]:
    """Keep other jobs out of a folder as long as this process lives, however it ends; object stores have no locks."""
    if isinstance(path, RemotePath):
        yield
        return
    with (path / LOCK).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another job is at work in {path}; wait for its end or stop it") from error
        except OSError:  # a file system that has no locks
            pass
        yield


def _take_back(path: AnyPath, made: list[Path]) -> None:
    """Remove the record of a folder that holds nothing else, and the folder and those above it if they were made."""
    if isinstance(path, RemotePath):
        if [file.name for file in path.files_below()] == [RECORD]:
            (path / RECORD).unlink()
        return
    files = {each.name for each in path.rglob("*") if not each.is_dir()}
    if not files <= {RECORD, LOCK}:
        return
    with suppress(OSError):
        for name in (RECORD, LOCK):
            (path / name).unlink(missing_ok=True)
        below = sorted((each for each in path.rglob("*") if each.is_dir()), reverse=True)
        for folder in (*below, *made):
            folder.rmdir()
