"""A cascade in virtual time: the scheduler of `cauc serve` or `cauc run`, and stages that only take their seconds.

No Ray, no model, and a clock that jumps to whatever happens next. Assumed: requests of one row each arrive
independently (Poisson), each stage defers its share of rows at random, a batch takes exactly its seconds, and so does
the router, which does one thing at a time: what comes while it works waits for it. Nothing else takes any time: no
network, no proxy, no controller. Replicas are there from the start and stay. Nothing is refused.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import numpy as np

from cauc_ray.cascade.blame import Blame
from cauc_ray.cascade.events import CallEnded, ReplicaReady
from cauc_ray.cascade.patience import RequestPatience, RunPatience
from cauc_ray.cascade.rows import Call, CallResult, Owner
from cauc_ray.cascade.scheduler import Chunk, Scheduler
from cauc_ray.cascade.stage import StageLimits
from cauc_ray.errors import ConfigError
from cauc_ray.numbers.types import Floats, Ints
from cauc_ray.planning.stages import PlannedStage, RouterSeconds, loads, reaches
from cauc_ray.serving.demand import OpenRequests

SEED = 0
NO_TIME = RouterSeconds()
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

    @property
    def seconds(self) -> float:
        """Return how long it is."""
        return self.last - self.first


@dataclass(slots=True)
class StageFigures:
    """What a stage did in a window.

    Attributes:
        stage: The stage.
        window: The window.
        calls: Calls that began in it.
        rows: Rows of these calls.
        busy_s: Seconds that replicas computed.
        waited_s: Seconds from when rows reached the stage to when their calls began.
        most_queued: The most rows in its queue at once.
    """

    stage: PlannedStage
    window: Window
    calls: int = 0
    rows: int = 0
    busy_s: float = 0.0
    waited_s: float = 0.0
    most_queued: int = 0

    def started(self, n: int, starts: float, ends: float, waited_s: float) -> None:
        """Count a call of n rows that begins to be computed."""
        first, last = self.window.first, self.window.last
        self.busy_s += max(0.0, min(ends, last) - max(starts, first))
        if first <= starts <= last:
            self.calls, self.rows, self.waited_s = self.calls + 1, self.rows + n, self.waited_s + waited_s

    # Sums of floats may exceed what they sum up to by a rounding.

    @property
    def busy(self) -> float:
        """Return the share of its replicas' time that they computed."""
        return min(1.0, self.busy_s / (self.window.seconds * self.stage.replicas)) if self.window.seconds else 0.0

    @property
    def fill(self) -> float | None:
        """Return the rows of its calls over what full ones hold, None without a call."""
        return self.rows / (self.calls * self.stage.batch_size) if self.calls else None

    @property
    def wait_s(self) -> float | None:
        """Return the mean seconds that a row waited, None without a row."""
        return max(0.0, self.waited_s / self.rows) if self.rows else None

    @property
    def waiting_rows(self) -> float:
        """Return how many rows waited on average."""
        return max(0.0, self.waited_s / self.window.seconds) if self.window.seconds else 0.0


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
        latency: Latency of those rows; None for a backlog, or where no row was answered.
        n_arrived: Rows that arrived, over the whole time.
        n_answered: Rows that were answered, over the whole time.
        n_left: Rows without an answer at the end.
        grows: Whether the queue grows without bound: a stage's load is 1 or more, or its queue grew.
        window_s: Seconds of the window; of a backlog, from the first call to the end of the last.
        stages: What each stage did.
    """

    rows_per_s: float
    latency: Latency | None
    n_arrived: int
    n_answered: int
    n_left: int
    grows: bool
    window_s: float
    stages: tuple[StageFigures, ...]


def simulate_arrivals(
    stages: Sequence[PlannedStage],
    rate: float,
    *,
    router: RouterSeconds = NO_TIME,
    seed: int = SEED,
    window: Window | None = None,
) -> Simulation:
    """Simulate a cascade that is served where requests arrive at a rate (1/s).

    router: what it takes; several count as a faster one.   window: what is measured (default: as long as the figures
    need to settle).
    Raises ConfigError where that would be too many requests.
    """
    window = window or settled_window(stages, rate)
    rng = np.random.default_rng(seed)
    # A Poisson process of which the number of requests is known: that the rate is just this leaves less to chance.
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
    """Simulate a cascade that is served, of whose requests all is known.

    times: when each arrives, float (N,), rising.   answered_by: at which stage, int8 (N,).   router: as for
    simulate_arrivals.   together: requests go to the scheduler together that come within this share of the time of the
    quickest answer.
    """
    cascade = _Cascade(stages, window, router)
    scheduler = Scheduler(
        [StageLimits(at.batch_size, at.batch_wait_s, UNBOUNDED, math.inf, name=at.name) for at in stages],
        RequestPatience(cascade.crowd.expects_more),
        Blame("input"),
    )
    scheduler.end_input()
    ticks = np.floor(times / _tick_s(stages, together)) if together else np.arange(len(times))
    cuts = np.flatnonzero(np.diff(ticks)) + 1
    groups = map(_Arrivals, np.split(times, cuts), np.split(answered_by, cuts))
    cascade.run(scheduler, groups, lambda group: scheduler.submit(group, [Chunk(None, group.n, 0.0)], cascade.now))
    latencies = np.concatenate([*cascade.latencies, np.zeros(0)])
    n_answered = sum(at.accepted for at in scheduler.stages)
    n_left = sum(at.n_waiting + at.in_flight for at in scheduler.stages)
    n_before = int(np.searchsorted(times, window.first, "right"))
    n_within, left_before = cascade.n_arrived - n_before, n_before - (n_answered - len(latencies))
    return Simulation(
        rows_per_s=len(latencies) / window.seconds,
        latency=Latency.of(latencies),
        n_arrived=cascade.n_arrived,
        n_answered=n_answered,
        n_left=n_left,
        grows=n_left - left_before > max(GROWTH * n_within, CHANCE * math.sqrt(max(1, n_within))),
        window_s=window.seconds,
        stages=cascade.figures,
    )


def simulate_backlog(stages: Sequence[PlannedStage], n_rows: int, *, seed: int = SEED) -> Simulation:
    """Simulate a run over n rows that are all there, to its end."""
    cascade = _Cascade(stages, Window(0.0, math.inf), NO_TIME)
    scheduler = Scheduler(
        [StageLimits(at.batch_size, at.batch_wait_s, at.queue_rows or UNBOUNDED, math.inf) for at in stages],
        RunPatience(),
        Blame("row"),
    )
    scheduler.end_input()
    rows = _Arrivals(np.zeros(n_rows), _stops(stages, n_rows, np.random.default_rng(seed)))
    cascade.run(scheduler, iter([rows]), lambda rows: scheduler.submit(rows, [Chunk(None, rows.n, 0.0)], cascade.now))
    for figures in cascade.figures:
        figures.window = Window(0.0, cascade.now)
    return Simulation(
        rows_per_s=n_rows / cascade.now if cascade.now else math.inf,
        latency=None,
        n_arrived=n_rows,
        n_answered=sum(at.accepted for at in scheduler.stages),
        n_left=rows.n_left,
        grows=False,
        window_s=cascade.now,
        stages=cascade.figures,
    )


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
    """Rows that come together.   times: when each arrived, float (n,).   answered_by: at which stage, int8 (n,)."""

    def __init__(self, times: Floats, answered_by: Ints) -> None:
        super().__init__(0, len(times))
        self.times, self.answered_by = times, answered_by
        self.all_there_at = float(times[-1])


class _Cascade:
    """A simulation in progress, by the clock of the router: it moves on with all that the router does.

    Attributes:
        now: The clock, in seconds.
        crowd: Open requests.
        n_arrived: Rows that have arrived.
        latencies: Latencies of rows answered within the window, in parts.
        figures: What each stage did.
    """

    def __init__(self, stages: Sequence[PlannedStage], window: Window, router: RouterSeconds) -> None:
        self.now = 0.0
        self.crowd = OpenRequests(lambda: self.now)
        self.n_arrived = 0
        self.latencies: list[Floats] = []
        self._stages, self._window, self._router = stages, window, router
        self.figures = tuple(StageFigures(stage, window) for stage in stages)
        self._ends: list[tuple[float, int, Call]] = []
        self._number = count()

    def run(self, scheduler: Scheduler, arrivals: Iterator[_Arrivals], start: Callable[[_Arrivals], None]) -> None:
        """Run to the end of the window, or until nothing is left to happen.   start: gives rows to the scheduler."""
        replicas = count()
        for stage, at in enumerate(self._stages):
            for _ in range(at.replicas):
                scheduler.update(ReplicaReady(stage, next(replicas)), self.now)
        self._free_at = [0.0] * next(replicas)
        coming = next(arrivals, None)
        while True:
            self._send(scheduler)
            wait_s = scheduler.wait_s(self.now)
            due = math.inf if wait_s is None else self.now + max(wait_s, LEAST_WAIT_S)
            ends = self._ends[0][0] if self._ends else math.inf
            now = max(self.now, min(due, ends, math.inf if coming is None else coming.all_there_at))
            if now > self._window.last or now == math.inf:
                return
            self.now = now
            while coming is not None and coming.all_there_at <= now:
                self.n_arrived += coming.n
                self.crowd.came(coming.n)
                self.now += self._router.of(coming.n / 2)
                start(coming)
                coming = next(arrivals, None)
            while self._ends and self._ends[0][0] <= now:
                self._end(scheduler, heapq.heappop(self._ends)[-1])

    def _send(self, scheduler: Scheduler) -> None:
        """Send what can go now: a replica computes its calls one after the other."""
        for figures, at in zip(self.figures, scheduler.stages, strict=True):
            figures.most_queued = max(figures.most_queued, at.waiting.n_rows)
        for call in scheduler.schedule(self.now):
            n, starts = len(call), max(self.now, self._free_at[call.replica])
            ends = self._free_at[call.replica] = starts + self._stages[call.stage].seconds.of(n)
            waited_s = sum(len(rows) * (starts - rows.ready_at) for rows in call.rows)
            self.figures[call.stage].started(n, starts, ends, waited_s)
            heapq.heappush(self._ends, (ends, next(self._number), call))

    def _end(self, scheduler: Scheduler, call: Call) -> None:
        """Have a call answered, and forget whoever needs nothing more."""
        rows = [(cast("_Arrivals", piece.owner), piece.indices) for piece in call.rows]
        accepted = np.concatenate([owner.answered_by[at] for owner, at in rows]) == call.stage
        n, n_answered = len(accepted), int(np.count_nonzero(accepted))
        self.now += self._router.of(0, 1)
        answered_at = self.now + self._router.of(0.5) * np.arange(1, n_answered + 1)
        if self.now >= self._window.first:
            self.latencies.append(answered_at - np.concatenate([owner.times[at] for owner, at in rows])[accepted])
        result = CallResult(
            predictions=np.zeros(n, np.int32),
            confidences=np.zeros(n),
            accepted=accepted,
            costs=np.zeros(n),
            started_at=self.now,
            compute_s=self._stages[call.stage].seconds.of(n),
            policy_s=0.0,
            device_s=None,
            node="",
        )
        scheduler.update(CallEnded(call, result, None), self.now)
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
