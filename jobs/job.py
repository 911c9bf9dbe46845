"""What every job is: a config in YAML, one output folder, progress, a last line of JSON, an exit code.

0: all is done.   1: something of it failed or is missing; the rest is written, and running it again tries that anew.
2: bad input.   130, 143: it was stopped, by Ctrl-C or as `ray job stop` does; running it again goes on.
"""

from __future__ import annotations

import argparse
import io
import json
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import cauc_ray
from cauc_ray.api.config import Location, read_config
from cauc_ray.cli.warned import warnings_on_stderr
from cauc_ray.errors import CaucError, CaucWarning, ConfigError
from cauc_ray.files.listing import content_digest
from cauc_ray.files.paths import AnyPath, RemotePath
from cauc_ray.models.pool import load_pool
from cauc_ray.models.service import Section
from jobs.folder import Origin, job_folder, read_result, remove_result, write_result
from jobs.progress import Progress

# The folder into which Ray unpacks the working directory of a job.
_PACKAGE = "_ray_pkg_"


class JobConfig(Section):
    """What every job's config has.   output: the folder of all that it writes, new or of the same config.

    A result is of a config, of what its inputs hold, and of a version of the package: where any of these is another, it
    is not shown again. An attempt that was ended goes on in its folder only where they are the same, too.
    """

    # Whether work() itself tells by content and version what it may take from an earlier attempt, and does the rest
    # anew: then inputs may change between attempts.
    BY_CONTENT: ClassVar[bool] = False

    output: Location

    def inputs(self) -> set[AnyPath]:
        """Return the files and folders that work() reads: here all that keys of paths name."""
        return set(_paths(self.model_dump(exclude={"output"})))

    def fixed(self) -> set[AnyPath]:
        """Return those of the inputs that must not change between attempts."""
        return set() if self.BY_CONTENT else self.inputs()


Config = TypeVar("Config", bound=JobConfig)


@dataclass(frozen=True, slots=True)
class JobRun:
    """Where a job works.   folder: its output.   address: of a Ray cluster, as ray_session() takes it."""

    folder: AnyPath
    address: str | None
    progress: Progress


@dataclass(frozen=True, slots=True)
class JobResult:
    """What came of a job.

    results: for machines, as JSON has it.   show: prints them for people.   failed: what failed or is missing, in
    a line each.
    """

    results: Mapping[str, Any]
    show: Callable[[], None]
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job(Generic[Config]):
    """A job by its name.

    about: what it does, in a line.   forms: of its config; where there are several, its keys say which one it has.
    work: does it, going on with what is in the folder. Raises CaucError where the input is bad.
    """

    name: str
    about: str
    forms: tuple[type[Config], ...]
    work: Callable[[Config, JobRun], JobResult]


def main(job: Job[Any], argv: Sequence[str]) -> int:
    """Run a job as its command line says, and return its exit code."""
    options = _parser(job).parse_args(argv)
    try:
        with _stopped_by_sigterm(), warnings_on_stderr(f"jobs.{job.name}"):
            return run(job, options.config, options.address)
    except CaucError as error:
        print(f"jobs.{job.name}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        return _stopped(job, signal.SIGINT)
    except SystemExit as end:
        if end.code != signal.SIGTERM:
            raise
        return _stopped(job, signal.SIGTERM)


def run(job: Job[Any], path: str | Path, address: str | None) -> int:
    """Run a job with a config's file: do what is left of it, print what came of it, and say so by the exit code."""
    config: JobConfig = read_config(path, job.forms)
    folder, package = config.output, _package(Path(path))
    if package is not None and isinstance(folder, Path) and folder.is_relative_to(package):
        raise ConfigError(
            f"output {folder.relative_to(package)} lies in the copy of the working directory that Ray makes for a "
            "job, and removes after it; give it as an absolute path"
        )
    digests = {path: content_digest(path) for path in sorted(config.inputs() | config.fixed(), key=str)}
    whole = _origin(digests, package)
    begun = Origin("", {}) if config.BY_CONTENT else _origin({path: digests[path] for path in config.fixed()}, package)
    with job_folder(folder, job.name, _portable(config.model_dump(mode="json"), package), begun):
        ended = read_result(folder)
        if ended is not None and (change := whole.change_since(Origin(**ended["origin"]))) is not None:
            warnings.warn(
                f"{change} since the result in {folder}; what depends on that is done anew", CaucWarning, stacklevel=2
            )
            remove_result(folder)  # the files beside it will not be of it
            ended = None
        if ended is None or ended["results"]["failed"]:
            result = job.work(config, JobRun(folder, address, Progress(job.name)))
            results = {**result.results, "output": str(folder), "failed": list(result.failed)}
            ended = {"results": results, "said": _printed(result.show), "origin": asdict(whole)}
            write_result(folder, ended)
    print(ended["said"], end="")
    for failure in ended["results"]["failed"]:
        print(f"failed: {failure}")
    print(json.dumps(ended["results"], allow_nan=False), flush=True)
    return 1 if ended["results"]["failed"] else 0


def pool_files(path: AnyPath) -> set[AnyPath]:
    """Return a pool's file, and the files and folders that its models' settings name; it alone where it is no pool."""
    try:
        pool = load_pool(path)
    except CaucError:  # work() says so
        return {path}
    return {path, *(file for stage in pool.stages for file in stage.model.files)}


def _parser(job: Job[Any]) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m jobs.{job.name}", description=job.about, allow_abbrev=False)
    made.add_argument("--config", metavar="FILE", required=True, help=f"YAML, such as jobs/{job.name}.yaml")
    made.add_argument("--address", help="of a Ray cluster (default: RAY_ADDRESS, else one started for this)")
    return made


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """End the block as Ray itself has it, which takes SIGTERM over when it starts: by SystemExit with its number."""

    def stop(number: int, frame: object) -> None:
        sys.exit(number)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stopped(job: Job[Any], number: signal.Signals) -> int:
    print(f"jobs.{job.name}: stopped; the same command goes on from here", file=sys.stderr, flush=True)
    return 128 + number


def _printed(show: Callable[[], None]) -> str:
    with redirect_stdout(io.StringIO()) as text:
        show()
    return text.getvalue()


def _origin(digests: Mapping[AnyPath, str | None], package: Path | None) -> Origin:
    return Origin(cauc_ray.__version__, {_portable(str(path), package): digest for path, digest in digests.items()})


def _paths(value: Any) -> Iterator[AnyPath]:
    """Yield all paths in the content of a config."""
    if isinstance(value, Path | RemotePath):
        yield value
    elif isinstance(value, Mapping):
        yield from _paths(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _paths(each)


def _package(path: Path) -> Path | None:
    """Return the copy of a working directory that a file lies in, None where it lies in none."""
    path = path.resolve()
    return next((folder for folder in path.parents if folder.name.startswith(_PACKAGE)), None)


def _portable(value: Any, package: Path | None) -> Any:
    """Return a config with paths in a job's copy of the working directory as in any other copy of it."""
    if isinstance(value, dict):
        return {name: _portable(each, package) for name, each in value.items()}
    if isinstance(value, list):
        return [_portable(each, package) for each in value]
    if isinstance(value, str) and package is not None and value.startswith(f"{package}/"):
        return f"WORKING_DIR{value.removeprefix(str(package))}"
    return value
