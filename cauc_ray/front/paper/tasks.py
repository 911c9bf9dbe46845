"""Tasks of a run on Ray: spread over its CPUs, each with a deadline, each with what it warned of."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from cauc_ray.errors import CaucWarning
from cauc_ray.execution.actors import told

# Ray tells the libraries of a task (OMP_NUM_THREADS) to start as many threads, unless the cluster has its own number.
N_CPUS = 1


@dataclass(frozen=True, slots=True)
class Task:
    """Something to measure.   part: the table or figure that it is for.   name: of its entry."""

    part: str
    name: str
    measure: Callable[[], Any]

    def __str__(self) -> str:
        return f"{self.part}: {self.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a task: its value, or in one line why there is none; and what it warned of."""

    task: Task
    value: Any = None
    error: str | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0


def run_tasks(tasks: Sequence[Task], deadline_s: float) -> Iterator[Outcome]:
    """Run tasks on the current Ray session and yield each one's outcome as it ends.

    deadline_s: for all of them together. What has not ended by then is cancelled, and its outcome says so.
    """
    # max_retries: for workers that die; an error of the task's own is not tried again.
    run = ray.remote(num_cpus=N_CPUS, max_retries=2)(_measure)
    pending = {run.remote(task): task for task in tasks}
    ends = time.monotonic() + deadline_s
    try:
        while pending:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=max(0.0, ends - time.monotonic()))
            if not done:
                break
            yield _outcome(pending.pop(done[0]), done[0])
        for task in pending.values():
            yield Outcome(task, error=f"not done after {deadline_s:g} s; a longer deadline_s or more CPUs may help")
    finally:
        for ref in pending:
            ray.cancel(ref, force=True)


def _measure(task: Task) -> Outcome:
    started = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaucWarning)
        value = task.measure()
    said = dict.fromkeys(str(each.message) for each in caught if issubclass(each.category, CaucWarning))
    return Outcome(task, value, warnings=tuple(said), seconds=time.perf_counter() - started)


def _outcome(task: Task, ref: Any) -> Outcome:
    try:
        outcome: Outcome = ray.get(ref)
    except RayError as error:
        return Outcome(task, error=str(told(error, "the task")))
    return outcome
