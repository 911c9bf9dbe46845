"""Tasks of a comparison, whose values a folder keeps as they end."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa

import cauc_ray
from cauc_ray.errors import CaucError, ConfigError, DataError, warn
from cauc_ray.execution.outcomes import Outcome, Task
from cauc_ray.files.documents import make_folder, read_json, require_new, write_json
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath

# In an output folder: its kind, and the values of its tasks.
RECORD, TASKS = "tasks.json", "tasks"
KIND = {"kind": "comparison"}


class MethodError(CaucError):
    """A method could not be fitted or measured, on data on which others can."""


@dataclass(frozen=True, slots=True)
class Written:
    """A task's value, as files hold it.

    Attributes:
        content: For JSON.
        table: For Parquet, if anything.
    """

    content: Any
    table: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class StoredOutcomes:
    """A folder of tasks' values, which are Written: KEY.json for each, and KEY.parquet where one has a table.

    The JSON is written last and whole; its key is made from the task, what its value depends on, and the version of the
    package that measured it.
    """

    folder: AnyPath

    def get(self, task: Task) -> Outcome | None:
        """Return the outcome of a task, None where none is stored, or none that can be read."""
        try:
            stored = read_json(self._path(task))
            table = read_parquet(self._path(task, "parquet")) if stored["has_table"] else None
            value = Written(stored["content"], table)
        except (DataError, LookupError, TypeError):
            return None
        return Outcome(task, value, None, tuple(stored["warnings"]), stored["seconds"], stored["attempts"])

    def put(self, outcome: Outcome) -> Outcome:
        """Store the outcome of a task, unless it failed. Returns it as get() will."""
        if outcome.error is not None:
            return outcome
        make_folder(self.folder)
        written: Written = outcome.value
        if written.table is not None:
            write_parquet(self._path(outcome.task, "parquet"), written.table)
        content = {
            "part": outcome.task.part,
            "name": outcome.task.name,
            "seconds": outcome.seconds,
            "attempts": outcome.attempts,
            "warnings": list(outcome.warnings),
            "has_table": written.table is not None,
            "content": written.content,
        }
        write_json(self._path(outcome.task), content)
        # What a run that goes on will read, in place of what it was made from: both runs have the same.
        return replace(outcome, value=Written(json.loads(json.dumps(written.content)), written.table))

    def _path(self, task: Task, form: str = "json") -> AnyPath:
        key = json.dumps([task.part, task.name, task.identity, cauc_ray.__version__])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.{form}"


def run_stored(
    folder: AnyPath | None,
    tasks: Sequence[Task],
    *,
    on_ray: bool,
    deadline_s: float,
    address: str | None,
    on_outcome: Callable[[Outcome, int, int], None],
) -> list[Outcome]:
    """Run tasks, whose values are Written; those that a folder has already are not run again.

    Args:
        folder: The output, with values in tasks/; None to store nothing.
        tasks: The tasks, which may run at the same time.
        on_ray: Whether they run on Ray, or in this process, where only a MethodError is an outcome.
        deadline_s: Of each task on Ray.
        address: Of a Ray cluster, as ray_session() takes it.
        on_outcome: Called with each outcome, its number and how many there are.

    Returns:
        Outcomes in the order of the tasks; what tasks warned of is a CaucWarning.

    Raises:
        ExecutionError: Ray cannot be reached.
        ConfigError: Another process writes into the folder, or it holds anything else.
    """
    outcomes: dict[Task, Outcome] = {}
    with ExitStack() as stack:
        stored = None if folder is None else stack.enter_context(_opened(folder))
        run = stack.enter_context(_on_ray(address, deadline_s)) if on_ray else _run_here
        finished = [outcome for task in tasks if stored is not None and (outcome := stored.get(task)) is not None]
        left = [task for task in tasks if task not in {outcome.task for outcome in finished}]
        new = run(left) if left else iter(())
        for outcome in chain(finished, new if stored is None else map(stored.put, new)):
            for warning in outcome.warnings:
                warn(f"{outcome.task.part}: {warning}")
            outcomes[outcome.task] = outcome
            on_outcome(outcome, len(outcomes), len(tasks))
    return [outcomes[task] for task in tasks]


def _run_here(tasks: Sequence[Task]) -> Iterator[Outcome]:
    for task in tasks:
        started = time.perf_counter()
        try:
            value, error = task.measure(), None
        except MethodError as failure:
            value, error = None, str(failure)
        yield Outcome(task, value, error, seconds=time.perf_counter() - started)


@contextmanager
def _on_ray(address: str | None, deadline_s: float) -> Iterator[Callable[[Sequence[Task]], Iterator[Outcome]]]:
    from cauc_ray.execution.session import ray_session
    from cauc_ray.execution.tasks import N_CPUS, run_tasks

    with ray_session(address, N_CPUS):
        yield lambda tasks: run_tasks(tasks, deadline_s)


@contextmanager
def _opened(folder: AnyPath) -> Iterator[StoredOutcomes]:
    """Make an output folder, held for this process where it is local, and yield what it stores."""
    require_comparison_folder(folder)
    make_folder(folder)
    with _held(folder):
        write_json(folder / RECORD, KIND)
        yield StoredOutcomes(folder / TASKS)


def require_comparison_folder(folder: AnyPath) -> None:
    """Raise ConfigError where a folder holds anything but stored tasks of a comparison."""
    if not (folder / RECORD).is_file():
        require_new(folder)
    elif read_json(folder / RECORD) != KIND:
        raise ConfigError(f"output {folder} is not the folder of a comparison; choose another path or remove it")


@contextmanager
def _held(folder: AnyPath) -> Iterator[None]:
    """Hold a folder for this process, where it is local. Raises ConfigError where another process holds it."""
    if not isinstance(folder, Path):
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)  # the lock ends with the process, however that ends
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"output {folder} is being written by another run; wait for it, or choose another") from error
    except OSError:
        pass  # a file system that has no locks
    try:
        yield
    finally:
        os.close(descriptor)
