"""The cascade that answers requests: each stage's lane, and the policy's step between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Protocol

import numpy as np

from cauc_ray.cascade.results import CallResult
from cauc_ray.cascade.worker import MOST_POLICIES
from cauc_ray.models.answers import Batch
from cauc_ray.models.pool import Pool, StageSpec
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.crowd import Crowd
from cauc_ray.serving.faults import RequestError, Trouble
from cauc_ray.serving.flight import Early, Flight, Group, Payload
from cauc_ray.serving.lane import Lane, LaneLimits, StageClient
from cauc_ray.serving.shadows import Shadows, Tell

RETRY_AFTER_S = 1.0

logger = logging.getLogger(__name__)


class Observer(Protocol):
    """Who counts what happens. Stages are numbered from 0."""

    def rows(self, stage: int, outcome: str, n: int) -> None:
        """Count rows that left a stage: accepted, deferred, capped, degraded or failed."""

    def answered(self, stage: int, confidences: Floats, costs: Floats, waits_s: Sequence[float]) -> None:
        """Note a step's confidences and costs by row, and how long each group of rows waited for it, in seconds."""

    def called(self, stage: int, n_rows: int, call_s: float) -> None:
        """Note a call of a stage."""

    def degraded(self, stage: int, trouble: Trouble, n: int) -> None:
        """Count rows that a stage should have answered."""

    def shadowed(self, stage: int, costs: Floats) -> None:
        """Note what a stage's answers cost that nobody waits for, by row."""

    def shadow_rows(self, outcome: str, n: int) -> None:
        """Count chosen early answers: compared with the whole cascade's, or dropped."""


class Cascade:
    """Answers requests by calling a chain's stages, on one event loop; made where that loop runs.

    A pool whose on_failure is "degrade" answers with the best so far where a later stage cannot; "fail" refuses
    the request.
    """

    def __init__(
        self, stages: Sequence[StageSpec], pool: Pool, clients: Sequence[StageClient], observer: Observer
    ) -> None:
        self._degrades = pool.on_failure == "degrade"
        self._observer = observer
        self._clock = asyncio.get_running_loop().time
        self._crowd = Crowd(self._clock)
        self.lanes: list[Lane] = []
        self._keys: dict[int, tuple[Policy, str]] = {}
        for stage, (spec, client) in enumerate(zip(stages, clients, strict=True)):
            limits = LaneLimits(
                batch_size=spec.serving.batch_size or spec.batch_size,
                batch_wait_s=spec.serving.batch_wait_s,
                timeout_s=spec.serving.timeout_s,
                max_queued=pool.serving.max_queued_rows,
            )
            more = self._expects_more(stage)
            degrades = self._degrades and stage > 0
            lane = Lane(stage, spec.name, limits, client, self, more, spec.replicas.min, degrades=degrades)
            self.lanes.append(lane)
        dropped = partial(observer.shadow_rows, "dropped")
        self._shadows = Shadows(pool.serving.shadow, self.lanes, self, dropped)

    async def answer(
        self, policy: Policy, columns: Batch, n: int, *, last_stage: int | None = None, wants_scores: bool = False
    ) -> Flight:
        """Answer a request of n rows; if the caller is cancelled, so is what has not begun.

        columns: each (n, ...).   last_stage: the deepest to call, by its number.   wants_scores: keep them.
        Raises RequestError: 429 or 503 where a stage that is needed cannot answer, 422 for a row that a model refuses.
        """
        last_stage = len(self.lanes) - 1 if last_stage is None else last_stage
        flight = Flight(policy, self._key(policy), columns, n, last_stage, wants_scores)
        rows = np.arange(n)
        with self._crowd.one_more():
            try:
                self._send(flight, 0, rows, Payload(columns), rows, None)
                await flight.done
            finally:
                self._withdraw(flight)
        return flight

    def _key(self, policy: Policy) -> str:
        """Return what stages know a policy by: a digest of its file, which takes too long for every request."""
        known = self._keys.get(id(policy))
        if known is None or known[0] is not policy:
            while len(self._keys) >= MOST_POLICIES:
                del self._keys[next(iter(self._keys))]
            known = self._keys[id(policy)] = policy, blake2b(policy.to_json().encode(), digest_size=12).hexdigest()
        return known[1]

    def compare(self, flight: Flight, tell: Tell) -> None:
        """Have what was chosen of an answered request's early answers compared with the whole cascade's, some time.

        tell: told the stages and whether they agree; not called for what comes to nothing.
        """

        def compared(stages: Ints, agreed: Bools) -> None:
            self._observer.shadow_rows("compared", len(stages))
            tell(stages, agreed)

        self._shadows.offer(flight, compared)

    def go_on(self, flight: Flight, stage: int, state: Floats) -> None:
        """Send all rows of a request to a stage, with the state that they bring along."""
        rows = np.arange(flight.n)
        self._send(flight, stage, rows, Payload(flight.columns), rows, state)

    def give_up(self, flight: Flight) -> None:
        """Forget what of a request still waits."""
        self._withdraw(flight)

    def called(self, stage: int, n_rows: int, call_s: float) -> None:
        """Note a call that a lane has made."""
        self._observer.called(stage, n_rows, call_s)

    def keeps(self, group: Group) -> Bools | None:
        """Return which of a group's rows shall bring back their state even if they stop, bool (m,), None for none."""
        return self._shadows.keeps(group)

    def answered(
        self, stage: int, groups: Sequence[tuple[Group, Ints]], result: CallResult, states: Floats | None
    ) -> None:
        """Take what a call answered and decided of groups, and send on what is deferred."""
        try:
            self._take(stage, groups, result, states)
        except Exception:  # whatever it is, nobody shall wait for ever
            logger.exception("answers could not be taken")
            for group, _ in groups:
                group.flight.fail(RequestError("an internal error; the service's log has it", 500))
                self._withdraw(group.flight)
        for lane in self.lanes[stage + 1 :]:
            lane.pump_soon()  # what has waited for more rows may have to wait no longer

    def _take(
        self, stage: int, groups: Sequence[tuple[Group, Ints]], result: CallResult, states: Floats | None
    ) -> None:
        now = self._clock()
        answered = [part for group, places in groups for part in self._answerable(stage, group, places, result)]
        for shadow in (False, True):
            own = [(group, places) for group, places in answered if group.flight.shadow is shadow]
            if not own:
                continue
            rows = np.concatenate([places for _, places in own])
            if shadow:
                self._observer.shadowed(stage, result.costs[rows])
            else:
                waits_s = [now - group.ready_at for group, _ in own]
                self._observer.answered(stage, result.confidences[rows], result.costs[rows], waits_s)
        assert result.carried is not None
        at = np.cumsum(result.carried) - 1  # of each carried row among the states
        for group, places in answered:
            self._move(stage, group, places, result, None if states is None else (states, at))

    def unanswered(self, stage: int, group: Group, trouble: Trouble, reason: str) -> None:
        """Let a group that a stage has not answered stop with the best so far, or refuse its request."""
        flight = group.flight
        if flight.done.done():
            return
        if flight.shadow:
            flight.fail(RequestError(reason, 503))
            return
        if stage > 0 and self._degrades:
            flight.degraded[group.rows] = True
            flight.reason = flight.reason or reason
            self._observer.rows(stage, "degraded", len(group))
            self._observer.degraded(stage, trouble, len(group))
            flight.finish(len(group))
            return
        self._observer.rows(stage, "failed", len(group))
        if trouble == "refused":
            flight.fail(RequestError(reason, 422))
        elif trouble == "overloaded" and stage == 0:
            flight.fail(RequestError(f"{reason}; try again later", 429, RETRY_AFTER_S))
        else:
            flight.fail(RequestError(reason, 503, RETRY_AFTER_S))
        self._withdraw(flight)

    def _answerable(self, stage: int, group: Group, places: Ints, answers: CallResult) -> list[tuple[Group, Ints]]:
        """Return a group without the rows that the model refuses, and where its rows stand in the call."""
        refused = np.array([int(place) in answers.failures for place in places]) if answers.failures else None
        if refused is None or not refused.any():
            return [(group, places)]
        first = int(places[refused][0])
        which = f"row {group.rows[refused][0]}: " if group.flight.n > 1 else ""
        reason = f"{which}{answers.failures[first]} (stage {self.lanes[stage].name!r})"
        self.unanswered(stage, group.part(np.flatnonzero(refused)), "refused", reason)
        kept = np.flatnonzero(~refused)
        return [(group.part(kept), places[kept])] if len(kept) else []

    def _move(
        self, stage: int, group: Group, places: Ints, result: CallResult, states: tuple[Floats, Ints] | None
    ) -> None:
        """Let a group's rows stop or go on.   states: of carried rows, and where each row of the call has its own."""
        flight = group.flight
        if flight.done.done():
            return
        flight.note(stage, group.rows, result, places, self._clock() - group.ready_at)
        # Of a shadow the last stage's word is wanted.
        goes_on: Bools = np.ones(len(places), dtype=bool) if flight.shadow else ~result.accepted[places]
        if stage == len(self.lanes) - 1:
            goes_on[:] = False
        n_on = int(goes_on.sum())
        n_stop = len(group) - n_on
        if not flight.shadow:
            self._count(stage, n_stop, n_on, flight)
            assert result.carried is not None
            early = np.flatnonzero(result.carried[places] & result.accepted[places])
            if len(early) and states is not None:
                flight.early.append(Early(stage, group.rows[early], states[0][states[1][places[early]]]))
        if stage == flight.last_stage:
            n_stop, n_on = len(group), 0
        if n_on:
            assert states is not None
            on = np.flatnonzero(goes_on)
            state = states[0][states[1][places[on]]]
            self._send(flight, stage + 1, group.rows[on], group.payload, group.places[on], state)
        flight.finish(n_stop)

    def _count(self, stage: int, n_stop: int, n_on: int, flight: Flight) -> None:
        self._observer.rows(stage, "accepted", n_stop)
        self._observer.rows(stage, "capped" if stage == flight.last_stage else "deferred", n_on)

    def _send(
        self, flight: Flight, stage: int, rows: Ints, payload: Payload, places: Ints, state: Floats | None
    ) -> None:
        lane, now = self.lanes[stage], self._clock()
        group = Group(flight, stage, rows, payload, places, state, now, now + lane.limits.timeout_s)
        flight.groups.add(group)
        lane.put(group)

    def _withdraw(self, flight: Flight) -> None:
        for group in list(flight.groups):
            self.lanes[group.stage].withdraw(group)

    def _expects_more(self, stage: int) -> Callable[[], bool]:
        """Return what tells whether rows may come that could join a batch of a stage."""
        if stage == 0:
            return self._crowd.expects_more
        return lambda: any(lane.busy for lane in self.lanes[:stage])
