"""One run with a fault in it, held against what it must give."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import cauc_ray
from cauc_ray.errors import CaucError
from jobs.faults import processes
from jobs.faults.cascade import Cascade, Comparison, compare, write_pool

# A run that takes longer hangs.
DEADLINE_S = 240.0
# A stage's calls in an undisturbed run: about so many, fewer at the deeper stages.
N_CALLS = (80, 55, 16)


class HungError(Exception):
    """A run has not ended in time."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a fault did.   struck: how often it hit a run in progress.   wall_s: of the run, or runs where one goes on.

    seen: how the rows differ from what they must be.   left_over: actors that outlived the run.
    """

    struck: int
    wall_s: float
    seen: Comparison
    left_over: int

    @property
    def is_sound(self) -> bool:
        """Say whether the fault has changed nothing."""
        return self.seen.is_sound and not self.left_over


@dataclass(slots=True)
class Trial:
    """A folder for one run, and chance.   run_s: of an undisturbed run, from the first call to the last commit."""

    cascade: Cascade
    folder: Path
    rng: random.Random
    run_s: float
    struck: int = 0
    _over: threading.Event = field(default_factory=threading.Event)

    @property
    def notes(self) -> Path:
        """Where models note what they do."""
        return self.folder / "notes"

    @property
    def out(self) -> Path:
        """Where the run goes."""
        return self.folder / "out"

    def pool(self, faults: Mapping[int, Mapping[str, Any]] | None = None, **options: Any) -> Path:
        """Write the run's pool: see cascade.write_pool."""
        return write_pool(self.folder / "pool.yaml", self.notes, faults or {}, **options)

    def run(self, pool: Path, **options: Any) -> float:
        """Run the cascade. Returns the seconds that it took. Raises CaucError as the run does."""
        started = time.perf_counter()
        options = {"input": self.cascade.input, "out": self.out} | options
        with deadline(DEADLINE_S):
            summary = cauc_ray.run(pool, self.cascade.policy, **options)
        self.run_s = self.run_s or summary["run_s"]
        return time.perf_counter() - started

    def run_badly(self, pool: Path, says: str, **options: Any) -> float:
        """Run the cascade, which must end with an error that says something. Returns the seconds until then."""
        started = time.perf_counter()
        try:
            self.run(pool, **options)
        except CaucError as error:
            if says not in str(error):
                raise
            return time.perf_counter() - started
        raise AssertionError(f"the run was to end with {says!r}, and did not")

    def outcome(self, wall_s: float, must_fail: frozenset[str] = frozenset()) -> Outcome:
        """Look at what the run left."""
        return Outcome(self.struck, wall_s, compare(self.cascade, self.out, must_fail), processes.left_over())

    def random_calls(self, place: int, n: int) -> list[int]:
        """Choose so many of a stage's calls."""
        return sorted(self.rng.sample(range(1, int(0.8 * N_CALLS[place])), n))

    def model_struck(self) -> None:
        """Count the faults of models, which note them."""
        self.struck = len(list(self.notes.glob("struck-*"))) + len(list(self.notes.glob("loading-*")))

    @contextmanager
    def striking(
        self, strike: Callable[[], bool], times: int = 1, after: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Strike at random moments of the run within, from its first call on; count what hit.

        strike: returns whether there was anything to hit.   after: strike as soon as this is true instead.
        """
        moments = [0.0] if after else sorted(self.rng.uniform(0.0, 0.7) * self.run_s for _ in range(times))
        begun = after or (self.notes / "calls-0").exists
        thread = threading.Thread(target=self._strike, args=(strike, moments, begun), daemon=True)
        self._over.clear()
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(30)

    def _strike(self, strike: Callable[[], bool], moments: list[float], begun: Callable[[], bool]) -> None:
        while not begun():
            if self._over.wait(0.01):
                return
        started = time.monotonic()
        for moment in moments:
            if self._over.wait(max(0.0, started + moment - time.monotonic())):
                return
            while not strike():
                if self._over.wait(0.01):
                    return
            self.struck += 1

    def kill(self, *kinds: str, stage: int | None = None) -> bool:
        """Kill one of the run's processes, any of a kind, or a replica of a stage. Returns whether there was one."""
        found = processes.actors(*kinds) if stage is None else processes.replicas(self.notes, stage)
        if not found:
            return False
        try:
            self.rng.choice(found).kill()
        except psutil.Error:
            return False
        return True


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise HungError in the main thread when the block takes longer."""

    def hung(signum: int, frame: object) -> None:
        raise HungError(f"no end after {seconds:g} s")

    started = time.monotonic()
    before = signal.signal(signal.SIGALRM, hung)
    others_s, _ = signal.setitimer(signal.ITIMER_REAL, seconds)  # a test's own deadline
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        left_s = max(0.1, others_s - (time.monotonic() - started)) if others_s else 0.0
        signal.setitimer(signal.ITIMER_REAL, left_s)
