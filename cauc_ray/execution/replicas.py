"""The replicas of a run's stages on Ray: how many, placed, loaded, replaced when they die, let go without work."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import ray
from ray.exceptions import RayError

from cauc_ray.cascade.scheduler import Scheduler
from cauc_ray.errors import ConfigError
from cauc_ray.execution.actors import explained, kind_of, worker_class
from cauc_ray.execution.cluster import autoscales, hardest_first, in_the_way, live_nodes
from cauc_ray.models.answers import ModelFacts
from cauc_ray.models.pool import StageSpec
from cauc_ray.policies.policy import Policy

# Another replica is started where each one has more than ENOUGH_S seconds of work waiting, and one is let go where all
# have had none for IDLE_S.
ENOUGH_S = 2.0
IDLE_S = 20.0
# A replica moves to another stage that has so many times as much waiting for each of its own.
MORE = 4.0
# A replica that takes longer than its process takes to start waits for a place on the cluster.
BOOT_S = 4.0
# A replica beyond the least number that finds no place within PLACE_S is given up, and asked for again after REFUSED_S.
PLACE_S = 20.0
REFUSED_S = 30.0
# All these are longer by what a node may take to start where an autoscaler starts nodes for what waits.
NODE_S = 300.0
# After a replica has moved from one stage to another: so long, and four times what the slowest took to load.
MOVE_PAUSE_S = 5.0
# The pause before another replica is started after one was lost without having answered: it grows to the longest,
# which is longer where others work: the new one may well get the same bad device.
FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 10.0
LONGEST_PAUSE_BESIDE_OTHERS_S = 300.0
# Seconds in which a replica that ends may close its model.
CLOSE_S = 5.0
# A stage that has never been live is given up when so many more than its least number have died while they loaded.
DEATHS_LOADING = 4


@dataclass(frozen=True, slots=True)
class StageLoad:
    """A stage's replicas and what waits for them.

    Attributes:
        live: Replicas that work.
        starting: Replicas that are being placed or are loading their model.
        least: The least number, of the pool file.
        most: The greatest number, of the pool file.
        backlog_s: Seconds of one replica's work that wait, None while unknown.
        idle_s: For how long nothing has waited.
        pressed: Its queue, whose length is bounded, is half full or more, so that more may wait behind it.
        held_back: It may send nothing on, whatever waits.
        refused: A replica that could not be placed was lately given up.
    """

    live: int
    starting: int
    least: int
    most: int
    backlog_s: float | None
    idle_s: float
    pressed: bool = False
    held_back: bool = False
    refused: bool = False

    @property
    def n(self) -> int:
        """Return the replicas, those that are being started included."""
        return self.live + self.starting

    @property
    def each_s(self) -> float:
        """Return the seconds of work that wait for each replica and could be done."""
        return 0.0 if self.held_back else (self.backlog_s or 0.0) / max(1, self.n)

    @property
    def needy(self) -> bool:
        """Return whether one more replica would help."""
        return self.least <= self.n < self.most and (
            self.each_s > ENOUGH_S or (self.pressed and not self.held_back and self.backlog_s is not None)
        )


@dataclass(frozen=True, slots=True)
class Change:
    """Stages that get a replica more, and stages that let one go."""

    start: tuple[int, ...] = ()
    stop: tuple[int, ...] = ()


def scale(loads: Sequence[StageLoad], *, n_unplaced: int, may_move: bool = True) -> Change:
    """Return which stages get a replica and which let one go.

    n_unplaced: replicas that wait for a place on the cluster. While one beyond the stages' least numbers waits, no
    other is asked for: instead the stage with the least to do, if it has much less to do than the neediest, lets
    one go, whose place the waiting one then takes.   may_move: no replica has moved so just now.
    """
    start = [stage for stage, load in enumerate(loads) for _ in range(load.least - load.n)]
    needy = [stage for stage, load in enumerate(loads) if load.needy]
    neediest = max(needy, key=lambda stage: loads[stage].each_s, default=None)
    if n_unplaced or start:
        waiting = [stage for stage, load in enumerate(loads) if load.starting]
        for_whom = max(waiting, key=lambda stage: loads[stage].each_s, default=neediest)
        donor = _donor(loads, for_whom) if n_unplaced and may_move and for_whom is not None else None
        return Change(tuple(start), () if donor is None else (donor,))
    willing = [stage for stage in needy if not loads[stage].refused]
    if willing:
        return Change(start=(max(willing, key=lambda stage: loads[stage].each_s),))
    idle = [stage for stage, load in enumerate(loads) if load.live > load.least and load.idle_s >= IDLE_S]
    return Change(stop=tuple(idle[:1]))


def _donor(loads: Sequence[StageLoad], needy: int) -> int | None:
    """Return the stage with the least work for each of its spare replicas, if that is little compared with a needy one.

    Its others must be able to take over what it has to do.
    """
    spare = [
        (load.each_s, stage)
        for stage, load in enumerate(loads)
        if stage != needy and load.live > load.least and not load.starting and load.backlog_s is not None
    ]
    if not spare:
        return None
    each_s, stage = min(spare)
    return stage if max(each_s, 0.1) * MORE < max(loads[needy].each_s, ENOUGH_S) else None


@dataclass(slots=True)
class Replica:
    """One copy of a stage's model.

    Attributes:
        number: Its number, which no two share.
        stage: Its stage.
        handle: The actor.
        answer: Its method for calls.
        phase: What it does.
        ref: What it has not answered yet of placing and loading.
        loaded: What it answers once it has loaded its model.
        since: When it began to be placed, or to load.
        node: Where it is.
        has_answered: Whether it has answered a row.
    """

    number: int
    stage: int
    handle: Any
    answer: Any
    phase: Literal["placing", "loading", "live", "closing"]
    ref: Any
    loaded: Any
    since: float
    node: str = ""
    has_answered: bool = False


@dataclass(slots=True)
class _Stage:
    """A stage's replicas in the past.

    Attributes:
        without_since: Since when it has had no live replica, None while it has.
        was_live: Whether it has ever had one.
        failed_loads: Replicas whose model could not be loaded before any was live.
        deaths_in_row: Replicas in a row that died without an answer.
        not_before: When the next one may start.
        refused_until: Until when none beyond the least number is asked for.
        busy_at: When it last had work.
        why: What the last one died of.
    """

    without_since: float | None
    was_live: bool = False
    failed_loads: int = 0
    deaths_in_row: int = 0
    not_before: float = 0.0
    refused_until: float = 0.0
    busy_at: float = 0.0
    why: str = ""


class Replicas:
    """All replicas that a controller has on Ray."""

    def __init__(self, specs: Sequence[StageSpec], policy: Policy | None, now: float) -> None:
        """Start every stage's least number."""
        self._specs, self._policy = specs, policy
        self._stages = [_Stage(without_since=now, busy_at=now) for _ in specs]
        self._classes = [worker_class(spec) for spec in specs]
        self._longest_load_s = self._no_move_before = self._look_for_way_at = 0.0
        self._next = 0
        self.by_number: dict[int, Replica] = {}
        self.by_ref: dict[Any, Replica] = {}
        self._closing: dict[
            Any, tuple[Any, float]
        ] = {}  # actors that close their models, by reference, with a deadline
        for stage in hardest_first([spec.resources for spec in specs]):
            for _ in range(specs[stage].replicas.min):
                self._start(stage, now)

    def counts(self) -> list[tuple[int, int]]:
        """Return each stage's live replicas and those that are being started."""
        counts = [[0, 0] for _ in self._stages]
        for replica in self.by_number.values():
            if replica.phase != "closing":
                counts[replica.stage][replica.phase != "live"] += 1
        return [(live, starting) for live, starting in counts]

    def take(self, ref: Any, now: float) -> tuple[Replica, ModelFacts] | None:
        """Take a replica's answer to being placed or loaded. Returns it once it is live.

        Raises the model's error when a stage that has never had a live replica cannot load it.
        """
        replica = self.by_ref.pop(ref)
        try:
            answer = ray.get(ref)
        except RayError as error:
            fault = explained(error, f"stage {self._specs[replica.stage].name!r}")
            at, least = self._stages[replica.stage], self._specs[replica.stage].replicas.min
            if kind_of(error) == "raised" and not at.was_live:
                at.failed_loads += 1
                # One node's device may be at fault: as many others are tried as the stage needs.
                if isinstance(fault, ConfigError) or at.failed_loads >= least:
                    raise fault from error
            self.lost(replica, str(fault), now)
            return None
        if replica.phase == "placing":
            replica.phase, replica.node, replica.since, replica.ref = "loading", answer, now, replica.loaded
            self.by_ref[replica.ref] = replica
            return None
        self._longest_load_s = max(self._longest_load_s, now - replica.since)
        replica.phase, at = "live", self._stages[replica.stage]
        at.was_live, at.without_since = True, None
        return replica, answer

    def lost(self, replica: Replica, why: str, now: float) -> None:
        """Give a replica up that died, hangs or fails. Another takes its place, after a pause if it never worked."""
        at = self._stages[replica.stage]
        at.why = why
        if replica.has_answered:
            at.deaths_in_row = 0
        elif not replica.node or replica.node in live_nodes():  # a node that dies is nothing of its replicas
            at.deaths_in_row += 1
        pause_s = FIRST_PAUSE_S * 2 ** min(at.deaths_in_row - 1, 20) if at.deaths_in_row else 0.0
        self.let_go(replica, now)
        others_work = any(r.stage == replica.stage and r.has_answered for r in self.by_number.values())
        at.not_before = now + min(pause_s, LONGEST_PAUSE_BESIDE_OTHERS_S if others_work else LONGEST_PAUSE_S)

    def let_go(self, replica: Replica, now: float) -> None:
        """End a replica; one that has no more calls closes its model first."""
        del self.by_number[replica.number]
        self.by_ref.pop(replica.ref, None)
        if replica.phase == "closing":
            self._closing[replica.handle.close.remote()] = (replica.handle, now + CLOSE_S)
        else:
            ray.kill(replica.handle)
        at = self._stages[replica.stage]
        if at.without_since is None and not self.counts()[replica.stage][0]:
            at.without_since = now

    def close(self) -> None:
        """End all replicas, those that work once they have closed their models."""
        now = time.monotonic()
        for replica in list(self.by_number.values()):
            if replica.phase == "live":
                replica.phase = "closing"
            self.let_go(replica, now)
        self._end_closed(math.inf, wait_s=CLOSE_S)

    def _end_closed(self, now: float, wait_s: float = 0.0) -> None:
        """End the actors that have closed their models, or have taken too long."""
        if not self._closing:
            return
        closed, _ = ray.wait(list(self._closing), num_returns=len(self._closing), timeout=wait_s)
        for ref, (handle, deadline) in list(self._closing.items()):
            if ref in closed or now > deadline:
                del self._closing[ref]
                ray.kill(handle)

    def down_for(self, stage: int, now: float) -> tuple[float, str]:
        """Return for how many seconds a stage has had no live replica, and what is known of why."""
        at, why = self._stages[stage], self._stages[stage].why
        placing = [r for r in self.by_number.values() if r.stage == stage and r.phase == "placing"]
        if any(now - replica.since > BOOT_S for replica in placing):
            unplaced = f"no replica is on a node yet; each needs {self._specs[stage].resources}"
            why = unplaced + (f"; before: {why}" if why else "")
        return (0.0 if at.without_since is None else now - at.without_since), why

    def dies_loading(self, stage: int) -> str | None:
        """Return what the replicas of a stage die of that has never had a live one, once that has been often enough."""
        at = self._stages[stage]
        often = at.deaths_in_row >= DEATHS_LOADING + self._specs[stage].replicas.min
        return at.why if often and not at.was_live else None

    def rescale(self, scheduler: Scheduler, now: float) -> list[Replica]:
        """Start what is missing or wanted by what the scheduler knows of the work that waits.

        Returns the replicas that are to be let go, once they have no call.
        """
        loads, n_unplaced, stuck = [], 0, None
        self._end_closed(now)
        for replica in list(self.by_number.values()):
            waited_s = now - replica.since
            if replica.phase == "placing" and waited_s > BOOT_S and waited_s > self._node_s:
                if waited_s > PLACE_S + self._node_s and self._is_spare(replica.stage):
                    self._stages[replica.stage].refused_until = now + REFUSED_S + self._node_s
                    self.let_go(replica, now)
                else:
                    n_unplaced += 1
                    stuck = stuck if self._is_spare(replica.stage) else replica
            limit_s = self._specs[replica.stage].down_after_s
            if replica.phase == "loading" and now - replica.since > limit_s:
                self.lost(replica, f"its model was not loaded within {limit_s:g} s", now)
        for stage, ((live, starting), queue) in enumerate(zip(self.counts(), scheduler.stages, strict=True)):
            at, replicas = self._stages[stage], self._specs[stage].replicas
            if queue.in_work:
                at.busy_at = now
            loads.append(
                StageLoad(
                    live=live,
                    starting=starting,
                    least=replicas.min,
                    most=replicas.max,
                    backlog_s=queue.backlog_s,
                    idle_s=now - at.busy_at,
                    pressed=queue.pressed,
                    held_back=scheduler.held_back(stage),
                    refused=now < at.refused_until,
                )
            )
        change = scale(loads, n_unplaced=n_unplaced, may_move=now >= self._no_move_before)
        if change.stop:
            self._no_move_before = now + MOVE_PAUSE_S + 4 * self._longest_load_s
        for stage in change.start:
            if now >= self._stages[stage].not_before:
                self._start(stage, now)
        goes = [self._newest(stage) for stage in change.stop]
        if not goes and stuck is not None and now >= self._look_for_way_at:
            self._look_for_way_at = now + BOOT_S
            goes = [self._in_the_way_of(stuck)]
        return [replica for replica in goes if replica is not None]

    @cached_property
    def _node_s(self) -> float:
        """Return what a node takes to start that an autoscaler starts, 0 where none does."""
        return NODE_S if autoscales() else 0.0

    def _newest(self, stage: int) -> Replica | None:
        """Return a stage's live replica that was started last."""
        live = [r for r in self.by_number.values() if r.stage == stage and r.phase == "live"]
        return live[-1] if live else None

    def _in_the_way_of(self, stuck: Replica) -> Replica | None:
        """Return a live replica that can move to another node, and has the place of one that finds no other."""
        live = [r for r in self.by_number.values() if r.stage != stuck.stage and r.phase == "live"]
        needs = [spec.resources for spec in self._specs]
        number = in_the_way(needs[stuck.stage], [(needs[r.stage], r.node) for r in live])
        return None if number is None else live[number]

    def _is_spare(self, stage: int) -> bool:
        return sum(self.counts()[stage]) > self._specs[stage].replicas.min

    def _start(self, stage: int, now: float) -> None:
        handle = self._classes[stage].remote(self._specs[stage], stage, self._policy)
        # A new one of these for every call would cost more than the call's sending.
        if self._policy is None:
            answer = handle.collect.options(num_returns=2)
        elif stage == len(self._specs) - 1 and self._policy.in_turn:
            answer = handle.decide_last.options(num_returns=1)
        else:
            answer = handle.decide.options(num_returns=2)
        placed, loaded = handle.place.remote(), handle.load.remote()  # it loads also while nobody looks
        replica = Replica(self._next, stage, handle, answer, "placing", placed, loaded, now)
        self._next += 1
        self.by_number[replica.number] = self.by_ref[placed] = replica
