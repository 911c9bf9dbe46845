"""The fewest replicas that sustain a rate: what the stages' seconds ask for at least, held against the simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.numbers.types import Floats
from cauc_ray.planning.simulation import NO_TIME, Latency, Simulation, simulate_arrivals
from cauc_ray.planning.stages import PlannedStage, RouterSeconds, loads, reaches, with_replicas

# A plan leaves a fifth of every stage's capacity for what no average tells.
MOST_LOAD = 0.8
# With so little to do no request waits for a replica: what is slow then stays slow with any number of them.
SPARE_LOAD = 0.05
# To meet a latency goal a stage is raised by a tenth at a time, and what was too much is taken back afterwards.
STEP = 0.1
MOST_REPLICAS = 1_000_000
# What exceeds a whole number by a rounding alone asks for no further replica.
ROUNDED = 1 - 1e-12
# Rows of a simulated run: so many full batches for each replica of every stage, within reason.
RUN_BATCHES = 50
MOST_RUN_ROWS = 3_000_000


@dataclass(frozen=True, slots=True)
class Sizing:
    """Replicas of each stage, and what the simulation does with them.

    out_of_reach: why no number of replicas meets the latency goal, None where one does.
    """

    stages: tuple[PlannedStage, ...]
    simulation: Simulation
    out_of_reach: str | None = None

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the replicas of each stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def latency(self) -> Latency | None:
        """Return the latency, None where queues grow without end."""
        return None if self.simulation.grows else self.simulation.latency

    @property
    def p99_s(self) -> float:
        """Return the 99th percentile of the latency, in seconds; without end where queues are."""
        return math.inf if self.latency is None else self.latency.p99

    def holds(self, slo_p99_s: float | None) -> bool:
        """Say whether these replicas sustain the rate, within the goal if there is one."""
        return not self.simulation.grows and (slo_p99_s is None or self.p99_s <= slo_p99_s)


class Trials:
    """Simulations of a chain at a rate (1/s), by its replicas, with as many routers as it needs; each is done once."""

    def __init__(self, stages: Sequence[PlannedStage], rate: float, router: RouterSeconds = NO_TIME) -> None:
        self.stages, self.rate = tuple(stages), rate
        one = replace(router, replicas=1)
        self.router = replace(one, replicas=max(1, math.ceil(one.load(stages, rate) / MOST_LOAD * ROUNDED)))
        self._done: dict[tuple[int, ...], Sizing] = {}

    def of(self, counts: Sequence[int]) -> Sizing:
        """Return what so many replicas of each stage do."""
        key = tuple(counts)
        if key not in self._done:
            stages = with_replicas(self.stages, key)
            self._done[key] = Sizing(stages, simulate_arrivals(stages, self.rate, router=self.router))
        return self._done[key]


def least_counts(stages: Sequence[PlannedStage], rate: float) -> list[int]:
    """Return the replicas with which no stage has more than the most load at a rate.

    Raises ConfigError where that is beyond all reason.
    """
    needed = _needed(stages, rate, MOST_LOAD)
    most = int(np.argmax(needed))
    if needed[most] > MOST_REPLICAS:
        raise ConfigError(
            f"{rate:g} requests a second need {needed[most]:.3g} replicas of stage {stages[most].name!r}, more than "
            f"{MOST_REPLICAS:,}; plan for a share of the rate"
        )
    return [int(n) for n in needed]


def sized(trials: Trials, slo_p99_s: float | None) -> Sizing:
    """Return the fewest replicas that sustain the rate, and keep p99 within a goal if there is one.

    Where no number meets the goal, those that sustain the rate, and why.
    """
    stages, rate = trials.stages, trials.rate
    least = trials.of(least_counts(stages, rate))
    if slo_p99_s is None or least.p99_s <= slo_p99_s:
        return least
    spare = [int(n) for n in np.clip(_needed(stages, rate, SPARE_LOAD), least.counts, MOST_REPLICAS)]
    best = trials.of(spare)
    if best.p99_s > slo_p99_s:
        return Sizing(least.stages, least.simulation, _out_of_reach(stages, best, slo_p99_s))
    return _trimmed(trials, _raised(trials, least, best, slo_p99_s), least.counts, slo_p99_s)


def most_rate(stages: Sequence[PlannedStage], most_load: float = MOST_LOAD) -> tuple[float, int]:
    """Return the highest rate that stages sustain with the replicas they have, and which of them is the bottleneck."""
    at_one = loads(stages, 1.0)
    bottleneck = int(np.argmax(at_one))
    return most_load / float(at_one[bottleneck]), bottleneck


def run_rows(stages: Sequence[PlannedStage]) -> int:
    """Return the rows of a run whose first and last calls take a small share of its time."""
    reached = np.maximum(reaches(stages), 1e-3)
    batches = np.array([stage.batch_size * stage.replicas for stage in stages])
    return int(min(MOST_RUN_ROWS, RUN_BATCHES * (batches / reached).max()))


def _needed(stages: Sequence[PlannedStage], rate: float, load: float) -> Floats:
    """Return the whole replicas with which no stage has more than a load, float (M,)."""
    one_each = loads(with_replicas(stages, [1] * len(stages)), rate)
    needed: Floats = np.maximum(1.0, np.ceil(one_each / load * ROUNDED))
    return needed


def _raised(trials: Trials, least: Sizing, most: Sizing, slo_p99_s: float) -> Sizing:
    """Raise the stage by which p99 falls most, again and again, until it is within the goal."""
    at = least
    while at.p99_s > slo_p99_s:
        raised = []
        for place, (n, limit) in enumerate(zip(at.counts, most.counts, strict=True)):
            if n < limit:
                more = min(limit, n + max(1, int(STEP * n)))
                raised.append(trials.of([*at.counts[:place], more, *at.counts[place + 1 :]]))
        if not raised:
            return most
        at = min(raised, key=lambda trial: trial.p99_s)
    return at


def _trimmed(trials: Trials, at: Sizing, least: Sequence[int], slo_p99_s: float) -> Sizing:
    """Take back replicas that the goal does not need, those of the most expensive stage first."""
    for place in range(len(least) - 1, -1, -1):
        low, high = least[place], at.counts[place]
        while low < high:
            middle = (low + high) // 2
            trial = trials.of([*at.counts[:place], middle, *at.counts[place + 1 :]])
            if trial.p99_s <= slo_p99_s:
                at, high = trial, middle
            else:
                low = middle + 1
    return at


def _out_of_reach(stages: Sequence[PlannedStage], best: Sizing, slo_p99_s: float) -> str:
    figures = best.simulation.stages
    batches_s = [
        stage.seconds.of(round(stage.batch_size * (of.fill or 0))) for stage, of in zip(stages, figures, strict=True)
    ]
    slowest = int(np.argmax(batches_s))
    takes = ", ".join(f"{stage.name} {seconds:.3g} s" for stage, seconds in zip(stages, batches_s, strict=True))
    return (
        f"no number of replicas keeps p99 within {slo_p99_s:g} s: with replicas to spare it is {best.p99_s:.3g} s, "
        f"since a batch alone takes {takes}; lower the batch_size of {stages[slowest].name!r}, or raise the goal"
    )
