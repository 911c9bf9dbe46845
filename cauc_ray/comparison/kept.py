"""Tasks on Ray whose values are kept in a folder as they end, so that a run that was ended early goes on from there."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

import cauc_ray
from cauc_ray.errors import CaucWarning, ConfigError, DataError
from cauc_ray.execution.session import ray_session
from cauc_ray.execution.tasks import N_CPUS, Outcome, Task, run_tasks
from cauc_ray.files.atomic import make_folder, require_new
from cauc_ray.files.documents import read_json, write_json
from cauc_ray.files.parquet import read_parquet, write_parquet
from cauc_ray.files.paths import AnyPath

# In an output folder: whose it is, and the values of its tasks.
RECORD, TASKS = "tasks.json", "tasks"


@dataclass(frozen=True, slots=True)
class Written:
    """A task's value, as files hold it.   content: for JSON.   table: what is kept as Parquet, if anything."""

    content: Any
    table: pa.Table | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """A folder of tasks' values, which are Written: KEY.json for each, and KEY.parquet where one has a table.

    The JSON is written last and whole; its key is made from the task, what its value depends on, and the version of the
    package that measured it.
    """

    folder: AnyPath

    def get(self, task: Task) -> Outcome | None:
        """Return what came of a task, None where nothing is kept, or nothing that can be read."""
        path = self._path(task)
        try:
            said = read_json(path)
            table = read_parquet(self._path(task, "parquet")) if said["has_table"] else None
            value = Written(said["content"], table)
        except (DataError, LookupError, TypeError):
            return None
        return Outcome(task, value, None, tuple(said["warnings"]), said["seconds"], said["attempts"])

    def put(self, outcome: Outcome) -> Outcome:
        """Keep what came of a task, unless it failed. Returns it as get() will."""
        if outcome.error is not None:
            return outcome
        path = self._path(outcome.task)
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
        write_json(path, content)
        # What a run that goes on will read, in place of what it was made from: both runs have the same.
        return replace(outcome, value=Written(json.loads(json.dumps(written.content)), written.table))

    def _path(self, task: Task, form: str = "json") -> AnyPath:
        key = json.dumps([task.part, task.name, task.identity, cauc_ray.__version__])
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.{form}"

    def run(self, tasks: Sequence[Task], deadline_s: float) -> Iterator[Outcome]:
        """Yield the outcome of each task: those that are kept first, then the others as run_tasks() ends them.

        What a task warned of is a CaucWarning here, when its outcome is there.
        """
        for outcome in self._outcomes(tasks, deadline_s):
            for warning in outcome.warnings:
                warnings.warn(f"{outcome.task}: {warning}", CaucWarning, stacklevel=2)
            yield outcome

    def _outcomes(self, tasks: Sequence[Task], deadline_s: float) -> Iterator[Outcome]:
        found = {task: self.get(task) for task in tasks}
        yield from (outcome for outcome in found.values() if outcome is not None)
        left = [task for task in tasks if found[task] is None]
        for outcome in run_tasks(left, deadline_s) if left else ():
            yield self.put(outcome)


def require_own(folder: AnyPath, kind: str) -> None:
    """Raise ConfigError where a folder holds anything but kept tasks of a kind.   kind: such as "sweep"."""
    if not (folder / RECORD).is_file():
        require_new(folder)
    elif read_json(folder / RECORD) != {"kind": kind}:
        raise ConfigError(f"output {folder} is not the folder of a {kind}; choose another path or remove it")


def run_kept(
    folder: AnyPath,
    kind: str,
    rounds: Sequence[Sequence[Task]],
    *,
    deadline_s: float,
    address: str | None,
    on_outcome: Callable[[Outcome, int, int], None],
) -> list[Outcome]:
    """Run tasks on Ray, and keep their values, which are Written; those that the folder has are not measured again.

    folder: the output; values are in tasks/ there.   kind: as require_own() takes it.
    rounds: tasks that may run at the same time, one round after the other.   deadline_s: of each task.   address: of a
    Ray cluster, as ray_session() takes it.   on_outcome: called with what came of each task, its number and how many
    there are. Returns outcomes in the order of the tasks. Raises ExecutionError where Ray cannot be reached.
    """
    require_own(folder, kind)
    kept, outcomes = Kept(folder / TASKS), dict[Task, Outcome]()
    tasks = [task for of_round in rounds for task in of_round]
    with ray_session(address, N_CPUS):
        make_folder(folder)
        write_json(folder / RECORD, {"kind": kind})
        for of_round in rounds:
            for outcome in kept.run(of_round, deadline_s):
                outcomes[outcome.task] = outcome
                on_outcome(outcome, len(outcomes), len(tasks))
    return [outcomes[task] for task in tasks]
