"""The benchmark as a job: parts and their options from a config; a part that is measured is not measured again."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NoReturn, TypeAlias

from pydantic import Field

from cauc_ray.errors import ConfigError
from cauc_ray.files.atomic import make_folder
from cauc_ray.files.documents import read_json, write_json
from jobs.bench.part import PARTS, Part, load, measured
from jobs.job import Job, JobConfig, JobResult, JobRun

Value: TypeAlias = bool | int | float | str
PartName: TypeAlias = Literal[*PARTS]  # type: ignore[valid-type]


class BenchJob(JobConfig):
    """Parts by name, in the order in which they run.

    Each has its options as `python -m jobs.bench PART --help` lists them, without the dashes; those that are left
    out have their full size. A list gives an option several values; true gives one that takes none.
    """

    parts: dict[PartName, dict[str, Value | list[Value]]] = Field(min_length=1)


def work(config: BenchJob, run: JobRun) -> JobResult:
    """Measure the parts, one after the other."""
    asked = {name: (part := load(name), _options(name, part, given)) for name, given in config.parts.items()}
    results: dict[str, Any] = {}
    with _address(run.address):
        for place, (name, (part, options)) in enumerate(asked.items()):
            run.progress.report(place, len(asked), "parts")
            path = run.folder / "parts" / f"{name}.json"
            if not path.is_file():
                found = measured(name, part, options)
                if "failed" in found or "left_out" in found:
                    results[name] = found
                    continue
                make_folder(path.parent)
                write_json(path, found)
            results[name] = read_json(path)
    run.progress.report(len(asked), len(asked), "parts")
    failed = tuple(f"{name}: {found['failed']}" for name, found in results.items() if "failed" in found)
    return JobResult(results, lambda: None, failed)


class _Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _options(name: str, part: Part, given: dict[str, Any]) -> argparse.Namespace:
    """Return a part's options. Raises ConfigError for one that it does not have, or a value that is none of it."""
    words: list[str] = []
    for option, value in given.items():
        if value is False:
            continue
        words.append(f"--{option.replace('_', '-')}")
        if value is not True:
            words += map(str, value if isinstance(value, list) else [value])
    parser = _Parser(allow_abbrev=False)
    part.add_options(parser)
    try:
        return parser.parse_args(words)
    except ConfigError as error:
        raise ConfigError(f"parts.{name}: {error}") from error


@contextmanager
def _address(address: str | None) -> Iterator[None]:
    """Have the parts, which take a cluster from RAY_ADDRESS, take this one."""
    before = os.environ.get("RAY_ADDRESS")
    if address is not None:
        os.environ["RAY_ADDRESS"] = address
    try:
        yield
    finally:
        if before is not None:
            os.environ["RAY_ADDRESS"] = before
        elif address is not None:
            del os.environ["RAY_ADDRESS"]


JOB = Job("bench", "Measure speed against what one would run otherwise.", (BenchJob,), work)
