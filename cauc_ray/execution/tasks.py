"""Tasks on Ray: spread over its CPUs, each with a deadline, tried again where that may help."""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from cauc_ray.errors import CaucError, own_warnings, printable
from cauc_ray.execution.actors import START_DEADLINE_S, told

# Ray tells the libraries of a task (OMP_NUM_THREADS) to start as many threads, unless the cluster has its own number.
N_CPUS = 1
# A task is begun so often at most: its worker or node may die, its files may be out of reach for a while.
ATTEMPTS = 4
# Before an attempt, times the number of those before it.
PAUSE_S = 0.5
# So many are Ray's to place at a time; more would only make each look at them longer.
MOST_PENDING = 500


@dataclass(frozen=True, slots=True)
class Task:
    """Something to measure.   part: what it is for, such as a table.   name: of its entry there.

    identity: all that its value depends on, in one text, so that a kept value is known to be that of the same task.
    """

    part: str
    name: str
    measure: Callable[[], Any]
    identity: str = ""

    def __str__(self) -> str:
        return f"{self.part}: {self.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a task: its value, or in one line why there is none; and what it warned of.

    attempts: how often it was begun.   seconds: that the last of them took.
    """

    task: Task
    value: Any = None
    error: str | None = None
    warnings: tuple[str, ...] = ()
    seconds: float = 0.0
    attempts: int = 1


def run_tasks(tasks: Sequence[Task], deadline_s: float) -> Iterator[Outcome]:
    """Run tasks on the current Ray session and yield each one's outcome as it ends.

    deadline_s: for each, from where it has begun; one that takes longer is ended, and its outcome says so.
    A task whose worker or node dies, or that meets an error of the system's (a file out of reach, no memory), is
    begun again after a pause, up to four times in all; an error of its own, such as bad input, is not tried again.
    Where no task can begin for ten minutes, those that are left are given up.
    """
    runner = _Runner(deque((task, 1) for task in tasks), deadline_s)
    try:
        while runner.busy:
            yield from runner.step()
    finally:
        runner.cancel()


@dataclass(slots=True)
class _Attempt:
    """An attempt that Ray has.   begun_at: by the monotonic clock; None while it waits for a CPU."""

    task: Task
    number: int
    begun_at: float | None = None


@dataclass(slots=True)
class _Runner:
    """Which tasks Ray has, which are still to be given to it, and which pause before their next attempt."""

    ready: deque[tuple[Task, int]]
    deadline_s: float
    running: dict[Any, _Attempt] = field(default_factory=dict)
    paused: list[tuple[float, int, Task, int]] = field(default_factory=list)
    heard_at: float = field(default_factory=time.monotonic)
    _order: Iterator[int] = field(default_factory=count)
    _remote: Any = None

    def __post_init__(self) -> None:
        # Attempts are counted here: Ray's own retries would not start their deadline anew.
        self._remote = ray.remote(num_cpus=N_CPUS, max_retries=0, num_returns="streaming")(_measure)

    @property
    def busy(self) -> bool:
        return bool(self.ready or self.running or self.paused)

    def step(self) -> Iterator[Outcome]:
        """Give Ray what is due, wait for the next news, and yield what has ended."""
        now = time.monotonic()
        while self.paused and self.paused[0][0] <= now:
            _, _, task, number = heapq.heappop(self.paused)
            self.ready.append((task, number))
        while self.ready and len(self.running) < MOST_PENDING:
            task, number = self.ready.popleft()
            self.running[self._remote.remote(task)] = _Attempt(task, number)
        if not self.running:
            time.sleep(max(0.0, self.paused[0][0] - now))
            return
        news, _ = ray.wait(list(self.running), num_returns=1, timeout=max(0.0, self._next_look() - now))
        for stream in news:
            self.heard_at = time.monotonic()
            yield from self._hear(stream)
        yield from self._late()

    def cancel(self) -> None:
        """End what Ray still has."""
        for stream in self.running:
            ray.cancel(stream, force=True)
        self.running.clear()

    def _next_look(self) -> float:
        """Return when something is due if nothing is heard: a deadline, the end of a pause, giving up."""
        begun = [each.begun_at + self.deadline_s for each in self.running.values() if each.begun_at is not None]
        return min(*begun, *(pause[0] for pause in self.paused[:1]), self.heard_at + START_DEADLINE_S, float("inf"))

    def _hear(self, stream: Any) -> Iterator[Outcome]:
        """Take the next thing that an attempt says: that it has begun, what came of it, or that it is dead."""
        attempt = self.running[stream]
        try:
            said: _Done | _Trouble | None = ray.get(next(stream))
        except RayError as error:
            said = _Trouble(str(told(error, "the task")), may_pass=not isinstance(error, RayTaskError))
        if said is None:
            attempt.begun_at = time.monotonic()
            return
        del self.running[stream]
        if isinstance(said, _Done):
            yield Outcome(attempt.task, said.value, None, said.warnings, said.seconds, attempt.number)
        elif said.may_pass and attempt.number < ATTEMPTS:
            due = time.monotonic() + PAUSE_S * attempt.number
            heapq.heappush(self.paused, (due, next(self._order), attempt.task, attempt.number + 1))
        else:
            tried = f" ({attempt.number} attempts)" if said.may_pass else ""
            yield Outcome(attempt.task, error=f"{said.error}{tried}", attempts=attempt.number)

    def _late(self) -> Iterator[Outcome]:
        now = time.monotonic()
        idle = all(each.begun_at is None for each in self.running.values())
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


@dataclass(frozen=True, slots=True)
class _Done:
    """What an attempt brought."""

    value: Any
    warnings: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Trouble:
    """Why an attempt failed, and whether another may not."""

    error: str
    may_pass: bool


def _measure(task: Task) -> Iterator[_Done | _Trouble | None]:
    yield None  # it has begun
    started = time.perf_counter()
    warned: list[str] = []
    with own_warnings(warned.append):
        try:
            value = task.measure()
        except CaucError as error:
            yield _Trouble(str(error), _may_pass(error))
            return
        except Exception as error:
            said = printable(f"{type(error).__name__}: {' '.join(str(error).split())}")
            yield _Trouble(f"the task failed: {said}", _may_pass(error))
            return
    yield _Done(value, tuple(dict.fromkeys(warned)), time.perf_counter() - started)


def _may_pass(error: BaseException | None) -> bool:
    """Say whether an error, or one that it came from, is the system's for the moment, not the input's."""
    for_good = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
    while error is not None:
        if isinstance(error, MemoryError | ConnectionError | TimeoutError):
            return True
        # Without a number it is a library's word for content that it cannot read.
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, for_good):
            return True
        error = error.__cause__
    return False
