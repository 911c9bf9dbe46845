"""A cascade in virtual time: the scheduler of `cauc serve`, and stages that only take their seconds.

No Ray, no model, and a clock that jumps to whatever happens next. Assumed: requests of one row each arrive
independently (Poisson), each stage defers its share of rows at random, a batch takes exactly its seconds, and so does
the router, which does one thing at a time: what comes while it works waits for it. Nothing else takes any time: no
network, no proxy, no controller. Replicas are there from the start and stay. Nothing is refused.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import numpy as np

from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.patience import RequestPatience
from cauc_ray.cascade.rows import Call, CallResult, Owner
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage import StageLimits
from cauc_ray.errors import ConfigError
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.planning.stages import NO_TIME, PlannedStage, RouterSeconds, loads, reaches
from cauc_ray.serving.demand import OpenRequests

SEED = 0
# Of a simulation of arriving requests: rows that the first stage and the last one get in the window at least, and
# calls of each stage. The p99 of another seed then differs by some 3 %.
LEAST_ROWS, LEAST_LAST_ROWS, LEAST_CALLS = 10_000, 500, 150
# Before the window: calls of each stage, and times that a request can take where none waits.
WARM_CALLS, WARM_PATHS = 20, 2
# Requests go to the scheduler together that come within this share of the time of the quickest answer. It takes so many
# of these groups at most, and requests.
TOGETHER = 0.01
MOST_GROUPS, MOST_ROWS = 60_000, 10_000_000
# The queue grows if, in the window, it has grown by more than this share of what arrived, and than chance would.
GROWTH, CHANCE = 0.02, 5.0
# More rows than any queue holds here.
UNBOUNDED = 1 << 60
# The clock moves on by this at least, so that a time that was rounded down is reached all the same.
LEAST_WAIT_S = 1e-9


@dataclass(frozen=True, slots=True)
class Window:
    """When measuring begins and ends, in seconds."""

    first: float
    last: float


@dataclass(frozen=True, slots=True)
class StageUse:
    """What a stage did in a window.

    Attributes:
        calls: Calls that began in it.
        rows: Rows of these calls.
        busy: Share of its replicas' time that they computed.
        fill: Rows of its calls over those of full ones, None without a call.
        wait_s: Mean seconds that a row waited for its call to begin, None without a row.
    """

    calls: int
    rows: int
    busy: float
    fill: float | None
    wait_s: float | None


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds from a request's arrival to its answer, over n of them."""

    mean: float
    p50: float
    p99: float
    n: int

    @classmethod
    def of(cls, seconds: Floats) -> Latency | None:
        """Summarise latencies, float (n,); None where there are none."""
        if not len(seconds):
            return None
        p50, p99 = np.percentile(seconds, [50, 99])
        return cls(float(seconds.mean()), float(p50), float(p99), len(seconds))


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a simulated cascade did.

    Attributes:
        rows_per_s: Rows answered within the window, per second.
        latency: Latency of those rows; None where no row was answered.
        n_arrived: Rows that arrived, over the whole time.
        n_answered: Rows that were answered, over the whole time.
        grows: Whether the queue grows without bound: a stage's load is 1 or more, or its queue grew.
        window_s: Seconds of the window.
        stages: What each stage did.
    """

    rows_per_s: float
    latency: Latency | None
    n_arrived: int
    n_answered: int
    grows: bool
    window_s: float
    stages: tuple[StageUse, ...]

    @property
    def n_left(self) -> int:
        """Return how many rows had no answer at the end."""
        return self.n_arrived - self.n_answered


def simulate_arrivals(
    stages: Sequence[PlannedStage],
    rate: float,
    *,
    router: RouterSeconds = NO_TIME,
    seed: int = SEED,
    window: Window | None = None,
) -> Simulation:
    """Simulate a served cascade where requests arrive at a rate.

    Args:
        stages: The stages.
        rate: Requests per second.
        router: Seconds of the routers; several count as a faster one.
        seed: The random seed.
        window: What is measured (default: as long as the figures need to settle).

    Raises:
        ConfigError: That would be too many requests.
    """
    window = window or settled_window(stages, rate)
    rng = np.random.default_rng(seed)
    # A Poisson process whose number of requests is known: an exact rate leaves less to chance.
    times = np.sort(rng.random(max(1, round(rate * window.last)))) * window.last
    result = simulate_trace(stages, times, _stops(stages, len(times), rng), window, router=router, together=TOGETHER)
    most_load = max(router.load(stages, rate), *loads(stages, rate))
    return replace(result, grows=result.grows or bool(most_load >= 1))


def simulate_trace(
    stages: Sequence[PlannedStage],
    times: Floats,
    answered_by: Ints,
    window: Window,
    *,
    router: RouterSeconds = NO_TIME,
    together: float = 0.0,
) -> Simulation:
    """Simulate a served cascade, of whose requests all is known.

    Args:
        stages: The stages.
        times: When each request arrives, float (N,), rising.
        answered_by: The stage that answers it, int8 (N,).
        window: What is measured.
        router: Seconds of the routers; several count as a faster one.
        together: Requests go to the scheduler together that come within this share of the time of the quickest answer.
    """
    cascade = _Cascade(stages, router, window)
    ticks = np.floor(times / _tick_s(stages, together)) if together else np.arange(len(times))
    cuts = np.flatnonzero(np.diff(ticks)) + 1
    cascade.run(np.split(times, cuts), np.split(answered_by, cuts))
    result = cascade.result()
    n_before = int(np.searchsorted(times, window.first, "right"))
    n_within, left_before = result.n_arrived - n_before, n_before - (result.n_answered - sum(map(len, cascade.waits)))
    chance = CHANCE * math.sqrt(max(1, n_within))
    return replace(result, grows=result.n_left - left_before > max(GROWTH * n_within, chance))


def settled_window(stages: Sequence[PlannedStage], rate: float) -> Window:
    """Return a window that begins when the cascade's figures have settled and lasts as long as they need.

    Raises ConfigError where that would be too many requests.
    """
    path_s = sum(stage.batch_s + stage.batch_wait_s for stage in stages)
    call_s = max(stage.batch_s / stage.replicas for stage in stages)
    last_rate = rate * float(reaches(stages)[-1])
    warm_s = max(WARM_PATHS * path_s, WARM_CALLS * call_s)
    rows_s = max(LEAST_ROWS / rate, min(LEAST_LAST_ROWS / last_rate, 10 * LEAST_ROWS / rate) if last_rate else 0.0)
    whole_s = warm_s + max(path_s, LEAST_CALLS * call_s, rows_s)
    most_s = min(MOST_ROWS / rate, MOST_GROUPS * max(1 / rate, _tick_s(stages, TOGETHER)))
    if whole_s > most_s:
        whole_s, warm_s = most_s, most_s / 2
    if warm_s < path_s:
        raise ConfigError(
            f"{rate:g} requests a second cannot be simulated where one may take {path_s:.3g} s: more than "
            f"{rate * most_s:,.0f} would have to be followed; plan for a share of the rate"
        )
    return Window(warm_s, whole_s)


class _Arrivals(Owner):
    """Rows that come together.

    Attributes:
        times: When each arrived, float (n,).
        answered_by: The stage that answers it, int8 (n,).
    """

    def __init__(self, times: Floats, answered_by: Ints) -> None:
        super().__init__(0, len(times))
        self.times, self.answered_by = times, answered_by


class _Cascade:
    """A simulation in progress, by the clock of the router: it moves on with all that the router does.

    Attributes:
        now: The clock, in seconds.
        crowd: Open requests.
        waits: Seconds from arrival to answer of rows that are answered after the window begins, in parts.
    """

    def __init__(self, stages: Sequence[PlannedStage], router: RouterSeconds, window: Window) -> None:
        self.now = 0.0
        self.crowd = OpenRequests(lambda: self.now)
        self.waits: list[Floats] = []
        self._stages, self._router, self._window = stages, router, window
        self._n_arrived = self._n_answered = 0
        # Of each call its stage, rows, start, end, and the seconds that its rows waited.
        self._calls: list[tuple[float, ...]] = []
        self._ends: list[tuple[float, int, Call]] = []
        self._number = count()

    def run(self, times: Iterable[Floats], answered_by: Iterable[Ints]) -> None:
        """Run groups of rows to the end of the window, or until nothing is left to do.

        Args:
            times: Of each group when its rows arrive, float (n,).
            answered_by: Of each group the stages that answer its rows, int8 (n,).
        """
        limits = [StageLimits(at.batch_size, at.batch_wait_s, UNBOUNDED, math.inf, name=at.name) for at in self._stages]
        scheduler = Scheduler(limits, RequestPatience(self.crowd.expects_more), Blame("input"))
        scheduler.end_input()
        replicas = count()
        for stage, at in enumerate(self._stages):
            for _ in range(at.replicas):
                scheduler.replica_ready(stage, next(replicas), self.now)
        self._free_at = [0.0] * next(replicas)
        arrivals = map(_Arrivals, times, answered_by)
        coming = next(arrivals, None)
        while True:
            self._send(scheduler)
            wait_s = scheduler.wait_s(self.now)
            due = math.inf if wait_s is None else self.now + max(wait_s, LEAST_WAIT_S)
            ends = self._ends[0][0] if self._ends else math.inf
            now = max(self.now, min(due, ends, math.inf if coming is None else coming.times[-1]))
            if now > self._window.last or now == math.inf:
                return
            self.now = now
            while coming is not None and coming.times[-1] <= now:
                self._n_arrived += coming.n
                self.crowd.came(coming.n)
                self.now += self._router.of(coming.n / 2)
                scheduler.submit(coming, [Chunk(None, coming.n, 0.0)], self.now)
                coming = next(arrivals, None)
            while self._ends and self._ends[0][0] <= now:
                self._end(scheduler, heapq.heappop(self._ends)[-1])

    def result(self) -> Simulation:
        """Return what was done in the window."""
        window_s = self._window.last - self._window.first
        latency = Latency.of(np.concatenate([*self.waits, np.zeros(0)]))
        calls = np.array(self._calls).reshape(-1, 5)
        return Simulation(
            rows_per_s=(latency.n if latency else 0) / window_s,
            latency=latency,
            n_arrived=self._n_arrived,
            n_answered=self._n_answered,
            grows=False,
            window_s=window_s,
            stages=tuple(self._use(stage, calls[calls[:, 0] == stage].T) for stage in range(len(self._stages))),
        )

    def _use(self, stage: int, calls: Floats) -> StageUse:
        """Return what a stage did.   calls: of the stage, as they are noted, float (5, C)."""
        at, window = self._stages[stage], self._window
        window_s = window.last - window.first
        _, rows, starts, ends, waited_s = calls
        began = (window.first <= starts) & (starts <= window.last)
        n, n_rows, waits_s = int(began.sum()), int(rows[began].sum()), max(0.0, float(waited_s[began].sum()))
        busy_s = float(np.maximum(0.0, np.minimum(ends, window.last) - np.maximum(starts, window.first)).sum())
        return StageUse(
            calls=n,
            rows=n_rows,
            busy=min(1.0, busy_s / (window_s * at.replicas)),
            fill=n_rows / (n * at.batch_size) if n else None,
            wait_s=waits_s / n_rows if n_rows else None,
        )

    def _send(self, scheduler: Scheduler) -> None:
        """Send what can go now: a replica computes its calls one after the other."""
        for call in scheduler.schedule(self.now):
            n, starts = len(call), max(self.now, self._free_at[call.replica])
            ends = self._free_at[call.replica] = starts + self._stages[call.stage].seconds.of(n)
            waited_s = sum(len(rows) * (starts - rows.ready_at) for rows in call.rows)
            self._calls.append((call.stage, n, starts, ends, waited_s))
            heapq.heappush(self._ends, (ends, next(self._number), call))

    def _end(self, scheduler: Scheduler, call: Call) -> None:
        """Have a call answered, and forget owners that need nothing more."""
        rows = [(cast("_Arrivals", piece.owner), piece.indices) for piece in call.rows]
        accepted = np.concatenate([owner.answered_by[at] for owner, at in rows]) == call.stage
        n, n_answered = len(accepted), int(np.count_nonzero(accepted))
        self.now += self._router.of(0, 1)
        answered_at = self.now + self._router.of(0.5) * np.arange(1, n_answered + 1)
        if self.now >= self._window.first:
            self.waits.append(answered_at - np.concatenate([owner.times[at] for owner, at in rows])[accepted])
        result = CallResult(
            predictions=np.zeros(n, np.int32),
            confidences=np.zeros(n),
            accepted=accepted,
            costs=np.zeros(n),
            compute_s=self._stages[call.stage].seconds.of(n),
        )
        scheduler.call_ended(call, result, None, self.now)
        self._n_answered += n_answered
        self.crowd.left(n_answered)
        self.now += self._router.of(n_answered / 2)
        for owner in scheduler.done:
            owner.live = False
        scheduler.done.clear()


def _stops(stages: Sequence[PlannedStage], n: int, rng: np.random.Generator) -> Ints:
    """Draw which stage answers each of n rows, int8 (n,): of those that reach a stage, just its share goes on."""
    stops, going = np.zeros(n, dtype=np.int8), rng.permutation(n)
    for stage, at in enumerate(stages[:-1]):
        going = going[: round(at.deferral * len(going))]
        stops[going] = stage + 1
    return stops


def _tick_s(stages: Sequence[PlannedStage], together: float) -> float:
    """Return within how many seconds requests come together."""
    return together * stages[0].seconds.of(1)
