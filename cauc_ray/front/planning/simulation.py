"""A discrete-event simulation of a cascade: arrivals, batches, replicas, deferral. No Ray, no model, no clock.

An event is the end of a call, or a time at which a batch has to be looked at again; there is none for a single
request. Rows travel as arrays of when they arrived, so that latencies are those of every request all the same.
What is assumed: requests of one row each arrive independently of each other (Poisson), every row is deferred
independently with its stage's rate, a batch takes exactly its seconds, and nothing else takes any time: no network,
no router, no controller. Replicas neither come, go nor die.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.front.planning.gathering import Gathering, RunGathering, ServeGathering, Station
from cauc_ray.front.planning.lots import Chance, Lots, Shuffled
from cauc_ray.front.planning.measures import Latency, Simulation, StageMeter
from cauc_ray.front.planning.queues import NEVER, Arrivals, Parcels, WaitingRows
from cauc_ray.front.planning.replicas import SimulatedCall, SimulatedReplicas, Started
from cauc_ray.front.planning.stages import PlannedStage, loads, reaches
from cauc_ray.numbers.types import Floats

SEED = 0
# Of a simulation of arriving requests: rows that the first stage and the last one get in the window at least, calls
# of each stage, and rows in all at most.
LEAST_ROWS, LEAST_LAST_ROWS, LEAST_CALLS = 20_000, 1_000, 300
MOST_ROWS = 10_000_000
# Before the window: calls of each stage, and times that a request can take where none waits.
WARM_CALLS, WARM_PATHS = 40, 3
# The queue grows if, in the window, it has grown by more than this share of what arrived, and than chance would.
GROWTH, CHANCE = 0.02, 5.0


@dataclass(frozen=True, slots=True)
class Window:
    """When measuring begins and ends, in seconds."""

    first: float
    last: float


def simulate_arrivals(
    stages: Sequence[PlannedStage],
    rate: float,
    *,
    seed: int = SEED,
    window: Window | None = None,
    calls_each: int = 2,
) -> Simulation:
    """Simulate a cascade that is served: requests arrive at a rate (1/s), batches go by the rules of `cauc serve`.

    window: what is measured (default: as long as the figures need to settle).   calls_each: most calls at a replica.
    Raises ConfigError where that would be more rows than fit in memory.
    """
    window = window or settled_window(stages, rate)
    rng = np.random.default_rng(seed)
    arrivals = Arrivals(_poisson(rng, rate, window.last))
    cascade = _Cascade(stages, arrivals, Chance(stages, rng), window, calls_each)
    cascade.run(ServeGathering(cascade.stations, arrivals))
    n_arrived = arrivals.arrived(window.last)
    grown = (n_arrived - cascade.n_answered) - (arrivals.arrived(window.first) - cascade.n_answered_before)
    n_within = n_arrived - arrivals.arrived(window.first)
    latencies = np.concatenate([*cascade.latencies, np.zeros(0)])
    window_s = window.last - window.first
    return Simulation(
        rows_per_s=len(latencies) / window_s,
        latency=Latency.of(latencies),
        n_arrived=n_arrived,
        n_answered=cascade.n_answered,
        n_left=cascade.rows_left(window.last),
        grows=bool((loads(stages, rate) >= 1).any())
        or grown > max(GROWTH * n_within, CHANCE * math.sqrt(max(1, n_within))),
        window_s=window_s,
        stages=tuple(meter.figures(window_s) for meter in cascade.meters),
    )


def simulate_backlog(stages: Sequence[PlannedStage], n_rows: int, *, seed: int = SEED) -> Simulation:
    """Simulate a run over n rows that are all there, by the rules of `cauc run`, to its end.

    Of each stage's rows just its share is deferred: how much there is to compute is not left to chance.
    """
    arrivals = Arrivals(np.zeros(n_rows))
    lots = Shuffled(stages, n_rows, np.random.default_rng(seed))
    cascade = _Cascade(stages, arrivals, lots, Window(0.0, NEVER), calls_each=2)
    ended = cascade.run(RunGathering(cascade.stations))
    return Simulation(
        rows_per_s=n_rows / ended if ended else NEVER,
        latency=None,
        n_arrived=n_rows,
        n_answered=cascade.n_answered,
        n_left=cascade.rows_left(NEVER),
        grows=False,
        window_s=ended,
        stages=tuple(meter.figures(ended) for meter in cascade.meters),
    )


def settled_window(stages: Sequence[PlannedStage], rate: float) -> Window:
    """Return a window that begins when the cascade's figures have settled and lasts as long as they need.

    Raises ConfigError where so many rows would not fit in memory.
    """
    path_s = sum(stage.batch_s + stage.batch_wait_s for stage in stages)
    call_s = max(stage.batch_s / stage.replicas for stage in stages)
    last_rate = rate * float(reaches(stages)[-1])
    warm_s = max(WARM_PATHS * path_s, WARM_CALLS * call_s)
    rows_s = max(LEAST_ROWS / rate, min(LEAST_LAST_ROWS / last_rate, 10 * LEAST_ROWS / rate) if last_rate else 0.0)
    whole_s = warm_s + max(warm_s, LEAST_CALLS * call_s, rows_s)
    if rate * whole_s > MOST_ROWS:
        whole_s = MOST_ROWS / rate
        warm_s = whole_s / 2
    if warm_s < path_s:
        raise ConfigError(
            f"{rate:g} requests a second cannot be simulated where one may take {path_s:.3g} s: more than "
            f"{MOST_ROWS:,} would have to be followed; plan for a share of the rate"
        )
    return Window(warm_s, whole_s)


class _Cascade:
    """A simulation in progress.

    n_answered_before: rows answered before the window.   latencies: of those answered within, in parts.
    """

    def __init__(
        self,
        stages: Sequence[PlannedStage],
        arrivals: Arrivals,
        lots: Lots,
        window: Window,
        calls_each: int,
    ) -> None:
        self._parcels = [Parcels() for _ in stages[1:]]
        waiting: list[WaitingRows] = [arrivals, *self._parcels]
        self.stations = [
            Station(stage, own, SimulatedReplicas(stage.replicas, stage.seconds, calls_each))
            for stage, own in zip(stages, waiting, strict=True)
        ]
        self.meters = [StageMeter(stage, window.first, window.last) for stage in stages]
        self.latencies: list[Floats] = []
        self.n_answered = self.n_answered_before = 0
        self._window = window
        self._lots = lots
        self._n_events = 0
        # (time, number, stage, replica); a replica of -1 where a stage has to be looked at again.
        self._events: list[tuple[float, int, int, int]] = []
        self._looks_at = [NEVER] * len(stages)

    def run(self, rules: Gathering) -> float:
        """Run to the end of the window, or to the end of all events. Returns when the last call has ended."""
        now = ended = 0.0
        self._send_all(rules, now)
        while self._events and self._events[0][0] <= self._window.last:
            now, _, place, replica = heapq.heappop(self._events)
            if replica >= 0:
                rules.note(now, self.n_answered)
                self._end(place, replica, now)
                ended = now
            elif self._looks_at[place] == now:
                self._looks_at[place] = NEVER
            else:
                continue  # an earlier look has been taken since
            self._send_all(rules, now)
        return ended

    def rows_left(self, now: float) -> int:
        """Return the rows that wait or are at a replica."""
        return sum(at.waiting.count(now) + at.replicas.rows() for at in self.stations)

    def _send_all(self, rules: Gathering, now: float) -> None:
        """Send what can go now, the deepest stage's first, and note when to look again."""
        for place in range(len(self.stations) - 1, -1, -1):
            at = self.stations[place]
            if at.waiting.oldest_ready == NEVER:
                continue
            while n := rules.batch_rows(place, now, self.n_answered):
                self.meters[place].queued(at.waiting.count(now))
                self._started(place, at.replicas.send(SimulatedCall(*at.waiting.take(n)), now))
            look_at = rules.look_again_at(place, now, self.n_answered)
            if look_at < self._looks_at[place]:
                self._looks_at[place] = look_at
                self._event(look_at, place, -1)

    def _end(self, place: int, replica: int, now: float) -> None:
        """Take a call's rows back: answer them, or have them wait for the next stage."""
        at = self.stations[place]
        call, following = at.replicas.ended(replica, now)
        self._started(place, following)
        rows = call.rows
        if at.stage.deferral and place + 1 < len(self.stations):
            deferred = self._lots.deferred(place, len(rows))
            going, rows = rows[deferred], rows[~deferred]
            if len(going):
                self._parcels[place].push(going, now)
                self.meters[place + 1].queued(self._parcels[place].count(now))
        self.n_answered += len(rows)
        if now >= self._window.first:
            self.latencies.append(now - rows)
        else:
            self.n_answered_before += len(rows)

    def _started(self, place: int, started: Started | None) -> None:
        if started is not None:
            self.meters[place].started(started)
            self._event(started.ends, place, started.replica)

    def _event(self, time: float, place: int, replica: int) -> None:
        self._n_events += 1
        heapq.heappush(self._events, (time, self._n_events, place, replica))


def _poisson(rng: np.random.Generator, rate: float, until: float) -> Floats:
    """Return when requests arrive, float (N,), rising: up to the first after the end."""
    parts, last = [], 0.0
    while last <= until:
        n = int(rate * (until - last) + 4 * math.sqrt(rate * (until - last)) + 8)
        parts.append(last + np.cumsum(rng.exponential(1 / rate, n)))
        last = float(parts[-1][-1])
    return np.concatenate(parts)
