"""Tasks on Ray: spread over its CPUs, each with a deadline, tried again where that may help."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cauc_ray.errors import CaucError, own_warnings, printable
from cauc_ray.execution.actors import START_DEADLINE_S, explained
from cauc_ray.execution.outcomes import Outcome, Task

# Ray sets this number of threads for a task's libraries (OMP_NUM_THREADS), unless the cluster sets its own.
N_CPUS = 1
# The most attempts at a task: its worker or node may die, its files may be out of reach for a while.
ATTEMPTS = 4
# Before an attempt, times the number of those before it.
PAUSE_S = 0.5
# The most that Ray has to place at a time; more would only make each look at them longer.
MOST_PENDING = 500


def run_tasks(tasks: Sequence[Task], deadline_s: float) -> Iterator[Outcome]:
    """Run tasks on the current Ray session and yield each one's outcome as it ends.

    deadline_s: for each, from where it has begun; one that takes longer is ended, and its outcome is an error.
    A task whose worker or node dies, or that meets an error of the system's (a file out of reach, no memory), is
    begun again after a pause, up to four times in all; an error of its own, such as bad input, is not tried again.
    Where no task can begin for ten minutes, those that are left are given up.
    """
    runner = _Runner(deque(_Attempt(task, 1) for task in tasks), deadline_s)
    try:
        while runner.ready or runner.running:
            yield from runner.step()
    finally:
        runner.cancel()


@dataclass(slots=True)
class _Attempt:
    """An attempt at a task.   begun_at: by the monotonic clock; None while it waits for a CPU."""

    task: Task
    number: int
    begun_at: float | None = None


@dataclass(slots=True)
class _Runner:
    """Which attempts Ray has, and which are still to be given to it."""

    ready: deque[_Attempt]
    deadline_s: float
    running: dict[Any, _Attempt] = field(default_factory=dict)
    heard_at: float = field(default_factory=time.monotonic)

    def step(self) -> Iterator[Outcome]:
        """Give Ray what is due, wait for the next news, and yield what has ended."""
        # Attempts are counted here: Ray's own retries would not restart the deadline.
        remote = ray.remote(num_cpus=N_CPUS, max_retries=0, num_returns="streaming")(_measure)
        while self.ready and len(self.running) < MOST_PENDING:
            attempt = self.ready.popleft()
            self.running[remote.remote(attempt.task.measure, attempt.number)] = attempt
        begun = [task.begun_at + self.deadline_s for task in self.running.values() if task.begun_at is not None]
        next_look = min(*begun, self.heard_at + START_DEADLINE_S, math.inf)
        news, _ = ray.wait(list(self.running), num_returns=1, timeout=max(0.0, next_look - time.monotonic()))
        for stream in news:
            self.heard_at = time.monotonic()
            yield from self._hear(stream)
        yield from self._late()

    def cancel(self) -> None:
        """End what Ray still has."""
        for stream in self.running:
            ray.cancel(stream, force=True)

    def _hear(self, stream: Any) -> Iterator[Outcome]:
        """Take the next thing that an attempt reports: that it has begun, or its outcome."""
        attempt = self.running[stream]
        try:
            ended: Callable[[Task], Outcome] | None = ray.get(next(stream))
        except RayError as error:
            why, died = str(explained(error, "the task")), not isinstance(error, RayTaskError)
            ended = partial(Outcome, error=why, attempts=attempt.number, may_pass=died)
        if ended is None:
            attempt.begun_at = time.monotonic()
            return
        outcome = ended(attempt.task)
        del self.running[stream]
        if outcome.may_pass and attempt.number < ATTEMPTS:
            self.ready.append(_Attempt(attempt.task, attempt.number + 1))
            return
        error_text = f"{outcome.error} ({attempt.number} attempts)" if outcome.may_pass else outcome.error
        yield replace(outcome, error=error_text)

    def _late(self) -> Iterator[Outcome]:
        now = time.monotonic()
        idle = all(attempt.begun_at is None for attempt in self.running.values())
        given_up = idle and now > self.heard_at + START_DEADLINE_S
        for stream, attempt in list(self.running.items()):
            if attempt.begun_at is not None and now >= attempt.begun_at + self.deadline_s:
                why = f"not done after {self.deadline_s:g} s; a longer deadline_s may help"
            elif given_up:
                why = f"no CPU was free for it for {START_DEADLINE_S:g} s"
            else:
                continue
            del self.running[stream]
            ray.cancel(stream, force=True)
            yield Outcome(attempt.task, error=why, attempts=attempt.number)


def _measure(measure: Callable[[], Any], attempt: int) -> Iterator[Callable[[Task], Outcome] | None]:
    """Do a task in a process of Ray's: yields None when it has begun, then its outcome, without the task.

    What is measured by may hold tables by then, which must not travel.
    """
    time.sleep(PAUSE_S * (attempt - 1))
    yield None
    started = time.perf_counter()
    warned: list[str] = []
    with own_warnings(warned.append):
        try:
            value = measure()
        except Exception as error:
            in_one_line = printable(f"{type(error).__name__}: {' '.join(str(error).split())}")
            why = str(error) if isinstance(error, CaucError) else f"the task failed: {in_one_line}"
            yield partial(Outcome, error=why, attempts=attempt, may_pass=_may_pass(error))
            return
    warnings = tuple(dict.fromkeys(warned))
    seconds = time.perf_counter() - started
    yield partial(Outcome, value=value, warnings=warnings, seconds=seconds, attempts=attempt)


def _may_pass(error: BaseException | None) -> bool:
    """Return whether an error, or its cause, is a temporary one of the system, not of the input."""
    for_good = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    while error is not None:
        if isinstance(error, MemoryError | ConnectionError | TimeoutError):
            return True
        # Without a number it is a library's word for content that it cannot read.
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, for_good):
            return True
        error = error.__cause__
    return False
