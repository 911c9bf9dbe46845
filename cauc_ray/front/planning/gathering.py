"""When a simulated stage sends a batch: by the rules of `cauc serve`, and by those of `cauc run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cauc_ray.front.planning.queues import NEVER, Arrivals, WaitingRows
from cauc_ray.front.planning.replicas import SimulatedReplicas
from cauc_ray.front.planning.stages import PlannedStage
from cauc_ray.serving.crowd import WINDOW_S


@dataclass(frozen=True, slots=True)
class Station:
    """A stage of a simulation: its settings, what waits, its replicas."""

    stage: PlannedStage
    waiting: WaitingRows
    replicas: SimulatedReplicas

    @property
    def in_work(self) -> bool:
        """Say whether a row waits or is at a replica, of rows that a stage before has sent."""
        return self.replicas.n_calls > 0 or self.waiting.oldest_ready < NEVER

    @property
    def is_full(self) -> bool:
        """Say whether the queue holds all that it may, so that the stage ahead is held back."""
        limit = self.stage.queue_rows
        return limit is not None and self.waiting.count(NEVER) >= limit


class Gathering(Protocol):
    """Rules for when a batch goes."""

    def note(self, now: float, n_answered: int) -> None:
        """Note how many rows had been answered up to an event, before it changes that."""

    def batch_rows(self, place: int, now: float, n_answered: int) -> int:
        """Return how many rows a stage sends now, 0 if none."""

    def look_again_at(self, place: int, now: float, n_answered: int) -> float:
        """Return when a stage that sends nothing now may have to, if nothing else happens until then."""


class ServeGathering:
    """A batch goes when it is full, or when it has waited long enough or no row is likely to join it.

    One that is not full goes just in time for the next replica that can be expected to be idle. At the first stage
    others are likely while fewer requests are open than there have been at once a moment ago.
    """

    def __init__(self, stations: Sequence[Station], arrivals: Arrivals) -> None:
        self._stations, self._arrivals = stations, arrivals
        self._most = self._most_before = 0
        self._window_ends = WINDOW_S

    def note(self, now: float, n_answered: int) -> None:
        """Remember how many requests are open: until something ends, their number only rises."""
        n_open = self._arrivals.arrived(now) - n_answered
        if now >= self._window_ends:
            lately = now < self._window_ends + WINDOW_S
            self._most_before = self._most if lately else n_open
            self._most = n_open
            self._window_ends = now + WINDOW_S
        self._most = max(self._most, n_open)

    def batch_rows(self, place: int, now: float, n_answered: int) -> int:
        """Return how many rows a stage sends now, 0 if none."""
        at = self._stations[place]
        if not at.replicas.has_room or now < at.waiting.oldest_ready:
            return 0
        n, full = at.waiting.count(now), at.stage.batch_size
        if n >= full:
            return full
        is_due = now >= at.waiting.oldest_ready + at.stage.batch_wait_s
        if now >= self._wanted_at(at) and (is_due or not self._expects_more(place, now, n_answered)):
            return n
        return 0

    def look_again_at(self, place: int, now: float, n_answered: int) -> float:
        """Return when a batch will be full, due and wanted, or without others to be expected."""
        at = self._stations[place]
        if not at.replicas.has_room:
            return NEVER
        wanted = max(now, self._wanted_at(at))
        times = [at.waiting.ready_at(at.stage.batch_size)]
        if now < at.waiting.oldest_ready:
            times.append(max(wanted, at.waiting.oldest_ready))
        else:
            times.append(max(wanted, at.waiting.oldest_ready + at.stage.batch_wait_s))
        if place == 0:  # the arrival by which as many are open as ever
            most = n_answered + max(self._most, self._most_before)
            times.append(self._arrivals.time_of(max(most - 1, self._arrivals.arrived(wanted))))
        return min((time for time in times if time > now), default=NEVER)

    def _wanted_at(self, at: Station) -> float:
        """Return when a replica will have use for a batch that is not full."""
        return 0.0 if at.replicas.has_idle else at.replicas.expected_idle_at()

    def _expects_more(self, place: int, now: float, n_answered: int) -> bool:
        if place:
            return any(
                before.replicas.n_calls or before.waiting.oldest_ready <= now for before in self._stations[:place]
            )
        return self._arrivals.arrived(now) - n_answered < max(self._most, self._most_before)


class RunGathering:
    """A batch goes when it is full, has waited long enough, or nothing is left that could join it.

    The last rows are shared out among the replicas, in batches of a quarter at least. A stage whose rows would find
    the next queue full waits.
    """

    def __init__(self, stations: Sequence[Station]) -> None:
        self._stations = stations

    def note(self, now: float, n_answered: int) -> None:
        """Need nothing."""

    def batch_rows(self, place: int, now: float, n_answered: int) -> int:
        """Return how many rows a stage sends now, 0 if none."""
        at = self._stations[place]
        n, full = at.waiting.count(now), at.stage.batch_size
        if not n or not at.replicas.has_room or self._held_back(place):
            return 0
        if not any(before.in_work for before in self._stations[:place]):
            return min(n, full, max(-(-n // at.replicas.n), full // 4, 1))
        if n >= full:
            return full
        return n if now >= at.waiting.oldest_ready + at.stage.batch_wait_s else 0

    def look_again_at(self, place: int, now: float, n_answered: int) -> float:
        """Return when a batch will be due."""
        at = self._stations[place]
        if not at.replicas.has_room or self._held_back(place):
            return NEVER
        due = at.waiting.oldest_ready + at.stage.batch_wait_s
        return due if due > now else NEVER

    def _held_back(self, place: int) -> bool:
        return place + 1 < len(self._stations) and self._stations[place + 1].is_full
