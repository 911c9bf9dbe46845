"""The cascade that answers requests: each stage's lane, and the policy's step between them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.execution.stage import stacked
from cauc_ray.models.answers import Answers, Batch
from cauc_ray.models.pool import Pool, StageSpec
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy, Step
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
        flight = Flight(policy, columns, n, len(self.lanes) - 1 if last_stage is None else last_stage, wants_scores)
        rows = np.arange(n)
        with self._crowd.one_more():
            try:
                self._send(flight, 0, rows, Payload(columns), rows, None)
                await flight.done
            finally:
                self._withdraw(flight)
        return flight

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

    def answered(self, stage: int, groups: Sequence[Group], answers: Answers) -> None:
        """Take a model's answers, let the policies decide, and send on what is deferred."""
        try:
            self._take(stage, groups, answers)
        except Exception:  # whatever it is, nobody shall wait for ever
            logger.exception("answers could not be taken")
            for group in groups:
                group.flight.fail(RequestError("an internal error; the service's log has it", 500))
                self._withdraw(group.flight)
        for lane in self.lanes[stage + 1 :]:
            lane.pump_soon()  # what has waited for more rows may have to wait no longer

    def _take(self, stage: int, groups: Sequence[Group], answers: Answers) -> None:
        starts = np.cumsum([0, *map(len, groups)])
        by_policy: dict[int, list[tuple[Group, Ints]]] = {}
        for group, start in zip(groups, starts[:-1], strict=True):
            places = np.arange(start, start + len(group))
            for part, own in self._answerable(stage, group, places, answers):
                by_policy.setdefault(id(part.flight.policy), []).append((part, own))
        for own_groups in by_policy.values():
            self._decide(stage, own_groups, answers)

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

    def _answerable(self, stage: int, group: Group, places: Ints, answers: Answers) -> list[tuple[Group, Ints]]:
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

    def _decide(self, stage: int, groups: Sequence[tuple[Group, Ints]], answers: Answers) -> None:
        """Take the policy's step for groups of one policy, each with its rows' places in the call, int (m,)."""
        policy = groups[0][0].flight.policy
        places = np.concatenate([own for _, own in groups])
        try:
            states = stacked([group.state for group, _ in groups if group.state is not None])
            step = policy.step(stage, answers.logits[places], states)
        except DataError as error:  # a row has options that it did not have before, or the reverse
            if len(groups) == 1:
                self.unanswered(stage, groups[0][0], "error", f"stage {self.lanes[stage].name!r}: {error}")
            else:
                for one in groups:
                    self._decide(stage, [one], answers)
            return
        if policy.costs == "per-call" and answers.costs is not None:
            costs = answers.costs[places]
        else:
            costs = np.full(len(places), policy.stages[stage].cost)
        likeliest = None if policy.reference is None else step.likeliest()
        now = self._clock()
        if groups[0][0].flight.shadow:
            self._observer.shadowed(stage, costs)
        else:
            self._observer.answered(stage, step.confidences, costs, [now - group.ready_at for group, _ in groups])
        start = 0
        for group, _ in groups:
            taken = slice(start, start + len(group))
            self._move(stage, group, step, costs[taken], None if likeliest is None else likeliest[taken], taken)
            start = taken.stop

    def _move(self, stage: int, group: Group, step: Step, costs: Floats, likeliest: Ints | None, taken: slice) -> None:
        """Let a group's rows stop or go on."""
        flight = group.flight
        if flight.done.done():
            return
        flight.note(stage, group.rows, step, taken, costs, likeliest, self._clock() - group.ready_at)
        goes_on: Bools = ~step.accepted[taken]
        n_on = int(goes_on.sum())
        n_stop = len(group) - n_on
        if not flight.shadow:
            self._count(stage, n_stop, n_on, flight)
            self._choose_early(stage, group, step, taken)
        if stage == flight.last_stage:
            n_stop, n_on = len(group), 0
        if n_on:
            on = np.flatnonzero(goes_on)
            self._send(flight, stage + 1, group.rows[on], group.payload, group.places[on], step.state[taken][on])
        flight.finish(n_stop)

    def _count(self, stage: int, n_stop: int, n_on: int, flight: Flight) -> None:
        self._observer.rows(stage, "accepted", n_stop)
        self._observer.rows(stage, "capped" if stage == flight.last_stage else "deferred", n_on)

    def _choose_early(self, stage: int, group: Group, step: Step, taken: slice) -> None:
        """Choose by lot which of the rows that stop here shall be compared with what the whole cascade answers."""
        flight = group.flight
        if self._shadows.share == 0 or stage == len(self.lanes) - 1 or flight.capped:
            return
        accepted = np.flatnonzero(step.accepted[taken])
        chosen = accepted[self._shadows.chosen(len(accepted))]
        if len(chosen):
            flight.early.append(Early(stage, group.rows[chosen], step.state[taken][chosen]))

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
