"""The fewest replicas that sustain a rate: what the stages' seconds ask for at least, held against the simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.planning.simulation import Latency, Simulation, simulate_arrivals
from cauc_ray.planning.stages import NO_TIME, PlannedStage, RouterSeconds, loads, with_replicas

# A plan leaves a fifth of every stage's capacity for what no average tells.
MOST_LOAD = 0.8
# With so little to do no request waits for a replica: what is slow then stays slow with any number of them.
SPARE_LOAD = 0.05
# Loads are lowered by this ratio until a latency goal is met; what was too much is taken back afterwards.
STEP = 1.25
MOST_REPLICAS = 1_000_000
# What exceeds a whole number by a rounding alone asks for no further replica.
ROUNDED = 1 - 1e-12


@dataclass(frozen=True, slots=True)
class Sizing:
    """Replicas of each stage, and what the simulation does with them.

    Attributes:
        stages: The stages with their replicas.
        simulation: What they do.
        out_of_reach: Why no number of replicas meets the latency goal, None where one does.
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
        """Return the latency, None where queues grow without bound."""
        return None if self.simulation.grows else self.simulation.latency

    def meets(self, slo_p99_s: float | None) -> bool:
        """Return whether these replicas sustain the rate, within the goal if there is one."""
        p99_s = math.inf if self.latency is None else self.latency.p99
        return not self.simulation.grows and (slo_p99_s is None or p99_s <= slo_p99_s)


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

    def at_load(self, load: float) -> Sizing:
        """Return what the fewest replicas do with which no stage has more than a load."""
        return self.of(least_counts(self.stages, self.rate, load))


def least_counts(stages: Sequence[PlannedStage], rate: float, load: float = MOST_LOAD) -> list[int]:
    """Return the fewest replicas with which no stage has more than a load at a rate.

    Raises ConfigError where that is beyond all reason.
    """
    one_each = loads(with_replicas(stages, [1] * len(stages)), rate)
    most = int(np.argmax(one_each))
    if (n := one_each[most] / MOST_LOAD) > MOST_REPLICAS:
        raise ConfigError(
            f"{rate:g} requests a second need {n:.3g} replicas of stage {stages[most].name!r}, more than "
            f"{MOST_REPLICAS:,}; plan for a share of the rate"
        )
    return [int(n) for n in np.clip(np.ceil(one_each / load * ROUNDED), 1, MOST_REPLICAS)]


def sized(trials: Trials, slo_p99_s: float | None) -> Sizing:
    """Return the fewest replicas that sustain the rate, and keep p99 within a goal if there is one.

    Where no number meets the goal, those that sustain the rate, and why.
    """
    sizing = least = trials.at_load(MOST_LOAD)
    if slo_p99_s is None or least.meets(slo_p99_s):
        return least
    if not (spare := trials.at_load(SPARE_LOAD)).meets(slo_p99_s):
        return replace(least, out_of_reach=_out_of_reach(spare, slo_p99_s))
    load = MOST_LOAD
    while not sizing.meets(slo_p99_s):
        load = max(SPARE_LOAD, load / STEP)
        sizing = trials.at_load(load)
    return _trimmed(trials, sizing, least.counts, slo_p99_s)


def most_rate(stages: Sequence[PlannedStage]) -> tuple[float, int]:
    """Return the rate at which one of the stages is at a load of 1, and which of them that is."""
    at_one = loads(stages, 1.0)
    bottleneck = int(np.argmax(at_one))
    return 1 / float(at_one[bottleneck]), bottleneck


def _trimmed(trials: Trials, sizing: Sizing, least: Sequence[int], slo_p99_s: float) -> Sizing:
    """Take back replicas that the goal does not need, those of the most expensive stage first."""
    for place in reversed(range(len(least))):
        low, high = least[place], sizing.counts[place]
        while low < high:
            middle = (low + high) // 2
            trial = trials.of([*sizing.counts[:place], middle, *sizing.counts[place + 1 :]])
            if trial.meets(slo_p99_s):
                sizing, high = trial, middle
            else:
                low = middle + 1
    return sizing


def _out_of_reach(best: Sizing, slo_p99_s: float) -> str:
    """Return why no number of replicas meets a goal.   best: with replicas to spare."""
    n_rows = {
        stage.name: round(stage.batch_size * (use.fill or 0))
        for stage, use in zip(best.stages, best.simulation.stages, strict=True)
    }
    batch_s = {stage.name: stage.seconds.of(n_rows[stage.name]) for stage in best.stages}
    slowest = max(batch_s, key=lambda name: batch_s[name])
    remedy = f"lower the batch_size of {slowest!r}, or raise the goal" if n_rows[slowest] > 1 else "raise the goal"
    p99 = "growing" if best.latency is None else f"{best.latency.p99:.3g} s"
    return (
        f"no number of replicas keeps p99 within {slo_p99_s:g} s: with replicas to spare it is {p99}, since a batch "
        f"alone takes {', '.join(f'{name} {seconds:.3g} s' for name, seconds in batch_s.items())}; {remedy}"
    )
