"""From requests to their answers, without Ray: a scheduler for rows with deadlines.

Requests are refused, or cut short, rather than kept waiting: when a stage has too much to do, is down, or does not
answer in time. What a replica could not answer is asked of another. The rows of a call during which a replica ended or
hung are suspected: from then on each request's go in an isolated call, and one that ends a replica again is refused.
"""

from __future__ import annotations

import heapq
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from cauc_ray.cascade.request_queue import PAUSE_S, RequestLimits, RequestQueue
from cauc_ray.cascade.rows import Call, CallResult, Owner, Rows, Trouble
from cauc_ray.cascade.scheduler import Scheduler
from cauc_ray.cascade.stage_health import Verdict
from cauc_ray.numbers.types import Ints

# The most requests that were open at once are remembered for one to two of these.
OPEN_WINDOW_S = 0.5


class OpenRequests:
    """Counts open requests.

    Clients that send their next request when they have their answer come back together: waiting for
    them pays while fewer requests are open than recently, and never for a single client.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._n_open = 0
        self._most = self._most_before = 0
        self._window_ends = 0.0

    def came(self, n: int) -> None:
        """Count n requests that are open from now on."""
        self._turn_window()
        self._n_open += n
        self._most = max(self._most, self._n_open)

    def left(self, n: int) -> None:
        """Count n requests that are no longer open."""
        self._n_open -= n

    def expects_more(self) -> bool:
        """Return whether fewer requests are open than there were at once a moment ago."""
        self._turn_window()
        return self._n_open < max(self._most, self._most_before)

    def _turn_window(self) -> None:
        now = self._clock()
        if now < self._window_ends:
            return
        # A window that nobody looked into was as empty as it is now.
        lately = now < self._window_ends + OPEN_WINDOW_S
        self._most_before = self._most if lately else self._n_open
        self._most = self._n_open
        self._window_ends = now + OPEN_WINDOW_S


@dataclass(frozen=True, slots=True)
class News:
    """A new verdict on an input of a stage.

    Attributes:
        stage: The stage.
        digest: Of the input.
        verdict: The verdict.
        deadly: Whether a replica ended, not only hung.
    """

    stage: int
    digest: bytes
    verdict: Verdict
    deadly: bool


# So many replicas are asked for rows that replicas could not answer.
MOST_ATTEMPTS = 3
# The rate at which rows come is of so many seconds.
WINDOW_S = 10.0


class RequestScheduler(Scheduler):
    """All that is known of the requests in progress. Times are seconds and come from outside.

    done: requests that need nothing more, for the shell to take.
    """

    stages: Sequence[RequestQueue]  # type: ignore[assignment]

    def __init__(self, stages: Sequence[RequestLimits], expects_more: Callable[[], bool]) -> None:
        """Take the stages' limits, and the predictor of whether requests are likely to come soon."""
        super().__init__([], open_rows=0)
        self.stages = [RequestQueue(stage, limits) for stage, limits in enumerate(stages)]
        self._expects_more = expects_more
        # By time: owners that have ended are not kept until then.
        self._expiries: list[tuple[float, int, weakref.ref[Owner], int]] = []
        self._number = count()
        self._came: deque[tuple[int, Counter[int]]] = deque()  # rows by the stage that they begin at, by the second
        self._reckoned_at, self._reached = -1, [0.0] * len(self.stages)

    # Requests

    def start(
        self, owner: Owner, stages: int | Ints, source: Any, row_bytes: float, now: float, *, counts: bool = True
    ) -> None:
        """Have all rows of an owner wait, for one stage or each for its own, int8 (n,).

        source: what holds what they carry, in their order.   counts: whether replicas are to be started for such rows.
        """
        self._open.add(owner)
        self._open_rows += owner.n_left
        rows = np.arange(owner.n)
        if not self._came or self._came[-1][0] != int(now):
            self._came.append((int(now), Counter()))
        came = self._came[-1][1] if counts else None
        self._spread(Rows(owner, rows, source, rows, now, row_bytes), stages, now, sent=came)

    def needed_replicas(self, stage: int, now: float) -> float:
        """Return how many replicas of a stage, busy all the time, the requests need.

        That is the rate at which rows come, refused ones included, times the shares that other stages send there, times
        the seconds for a row; and what waits, in a window's time.
        """
        if int(now) != self._reckoned_at:
            self._reckoned_at, self._reached = int(now), self._reach(now)
        at = self.stages[stage]
        return (self._reached[stage] + at.n_waiting) / WINDOW_S * at.service_time.row_s

    def _reach(self, now: float) -> list[float]:
        """Return how many of the rows that came in the last window's time are likely to reach each stage."""
        while self._came and self._came[0][0] < now - WINDOW_S:
            self._came.popleft()
        rows = [float(sum(came[first] for _, came in self._came)) for first in range(len(self.stages))]
        for before in self.stages:
            for to, n in before.sent.items():
                rows[to] += rows[before.stage] * n / max(1, before.accepted + before.deferred)
        return rows

    def unwanted(self, now: float) -> Iterator[Call]:
        """Take back the calls whose answers are no longer waited for, for the shell to cancel."""
        for at in self.stages:
            for computed, *behind in at.take_hanging(now):
                self._suspect(computed, now, deadly=False)
                at.try_again(*(call.again(now) for call in behind))
                yield from (computed, *behind)
            for call in at.calls():
                late = at.is_late_probe(call, now)
                if late or not (call.wanted or call.probe):
                    at.take_back(call, now)
                    if late:
                        at.postpone_probe(call.replica, now + PAUSE_S)
                    yield call

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until something is due, None if nothing waits for time."""
        while self._expiries:
            _, _, owner, stage = self._expiries[0]
            if (waiting := owner()) is not None and waiting.wants(stage):
                break
            heapq.heappop(self._expiries)
        wait_s = super().wait_s(now)
        if not self._expiries:
            return wait_s
        expires_s = max(0.0, self._expiries[0][0] - now)
        return expires_s if wait_s is None else min(wait_s, expires_s)

    def _wait(self, stage: int, rows: Rows, now: float) -> None:
        owner = rows.owner
        if stage in owner.closed:  # others of its rows have waited too long there
            self._leave_out(stage, rows, "timeout", self._late(owner, stage))
            return
        expires_at = min(now + self.stages[stage].limits.timeout_s, owner.deadline)
        heapq.heappush(self._expiries, (expires_at, next(self._number), weakref.ref(owner), stage))
        super()._wait(stage, rows, now)
        at = self.stages[stage]
        for lower in at.take_surplus(owner.priority):
            self._leave_out(stage, lower, "overloaded", f"stage {at.limits.name!r} is overloaded")

    def _more_can_come(self, stage: int) -> bool:
        return self._others_at_work(stage) or (stage == 0 and self._expects_more())

    def held_back(self, stage: int) -> bool:
        """Refuse rows that a stage does not take, or cut them short."""
        return False

    # What takes too long

    def expire(self, now: float) -> None:
        """Give up the rows whose time is over."""
        late: list[tuple[Owner, int]] = []
        while self._expiries and self._expiries[0][0] <= now:
            _, _, waiting, stage = heapq.heappop(self._expiries)
            if (owner := waiting()) is not None and owner.wants(stage) and (owner.at == stage).any():
                late.append((owner, stage))
        for owner, stage in late:
            self._blame(owner, stage, now)
        for owner, stage in late:
            self._close_stage(owner, stage, "timeout", self._late(owner, stage))
        for at in self.stages:
            idle = [call for call in at.calls() if not (call.wanted or call.probe)]
            # While others are answered, a replica hangs or the stage is busy: no reason to pause its calls.
            silent = now - at.health.succeeded_at > max(at.limits.timeout_s, 2 * at.service_time.long_call_s)
            hangs = idle or (at.n_replicas and not at.n_working)
            if hangs and silent and any(stage == at.stage and not owner.hurries for owner, stage in late):
                why = f"it has not answered within {at.limits.timeout_s:g} s"
                self._failed_call(at, why, now, idle[0].rows if idle else (), for_good=True)

    def _close_stage(self, owner: Owner, stage: int, trouble: Trouble, reason: str) -> None:
        """Give up all rows of an owner that wait for a stage or are at it."""
        if not owner.wants(stage):
            return
        indices = np.flatnonzero(owner.at == stage)
        self._leave_out(stage, Rows(owner, indices, None, indices, 0.0, 0.0), trouble, reason)
        owner.closed.add(stage)
        self._drops = True

    def _late(self, owner: Owner, stage: int) -> str:
        limits = self.stages[stage].limits
        within = "the request's timeout" if owner.hurries else f"{limits.timeout_s:g} s"
        return f"stage {limits.name!r} has not answered within {within}"

    def _blame(self, owner: Owner, stage: int, now: float) -> None:
        """Refuse an input that hangs in an isolated call, and suspect the rows of a call that may hang."""
        at = self.stages[stage]
        for call in at.calls():
            rows = next((rows for rows in call.rows if rows.owner is owner), None)
            if rows is None or call.probe:
                continue
            if at.hangs(call, now) and len(call.by_owner()) == 1:
                self._convict(rows, stage, now)
            elif at.may_hang(call, now) and at.suspects.verdict(owner, now) == "clear":
                at.suspects.note(owner, "suspected", now, deadly=False)

    # What fails

    def ended(self, call: Call, result: CallResult, goes_on: Any, now: float) -> None:
        """Take a call's result."""
        at = self.stages[call.stage]
        if result.error is None:
            at.answered(call, result, now)
            if call.isolated:
                for rows in call.rows:
                    at.suspects.note(rows.owner, "clear", now)
        super().ended(call, result, goes_on, now)

    def call_failed(self, call: Call, trouble: Trouble, reason: str, now: float) -> None:
        """Take the end of a call of which nothing came, for no fault of a replica."""
        at = self.stages[call.stage]
        at.take_back(call, now)
        if call.probe:
            at.postpone_probe(call.replica, now + PAUSE_S)
            return
        for_good = trouble == "down" or self._is_costly(call, now)
        self._failed_call(at, reason, now, call.rows, for_good=for_good)
        for rows in call.by_owner():
            if trouble == "error" and call.attempt < MOST_ATTEMPTS and not at.health.paused:
                at.try_again(call.again(now, rows=rows))
            else:
                self._give_back(at, rows, trouble, f"stage {at.limits.name!r}: {reason}")

    def _unanswered(self, call: Call, result: CallResult, now: float) -> None:
        at, reason = self.stages[call.stage], result.error or ""
        at.busy_s += result.compute_s or 0.0
        known, tried = at.known_good is not None, {*call.failed_on, call.replica}
        # Another replica would ask the same server in vain.
        if result.fault == "replica" or (call.probe and known and result.fault != "stage"):
            at.broken(call, reason, now)
            # It may be the stage, and no row need wait for another replica.
            if at.limits.degrades and not at.n_working:
                self._failed_call(at, reason, now, call.rows, for_good=True)
        if call.probe:
            if at.health.paused or result.fault == "stage":
                at.postpone_probe(call.replica, now + PAUSE_S)
            return
        others = len(tried) < MOST_ATTEMPTS and at.has_other(tried)
        # With a good row, the only replica finds out whether it is broken.
        finds_out = result.fault == "unknown" and not call.failed_on and known
        at.doubt(call)
        if result.fault != "stage" and (others or finds_out) and not at.health.paused:
            at.try_again(call.again(now, failed_on=(*call.failed_on, call.replica)))
            return
        # If no replica has ever answered such rows, the inputs may be at fault.
        if (is_costly := self._is_costly(call, now)) or result.fault != "unknown":
            self._failed_call(at, reason, now, call.rows, for_good=is_costly)
        self._give_back(at, call.rows, "error", f"stage {at.limits.name!r}: {reason}")

    def _unproven(self, call: Call, reason: str, now: float) -> None:
        """Refuse rows that the model refuses, also while it has never answered any."""
        if not call.probe:
            self._give_up(call, reason)

    def _failed(self, call: Call, replica: int, reason: str, now: float) -> None:
        """Ask another replica, if there is one, for a row on which the model raised; or refuse it."""
        at = self.stages[call.stage]
        if not call.failed_on and at.n_replicas > 1:
            at.try_again(call.again(now, failed_on=(replica,)))
        else:
            self._give_up(call, reason)

    def _give_up(self, call: Call, reason: str) -> None:
        at = self.stages[call.stage]
        for rows in call.rows:
            which = f"row {rows.indices[0]}: " if rows.owner.n > 1 else ""
            self._leave_out(at.stage, rows, "refused", f"{which}{reason} (stage {at.limits.name!r})")

    def replica_lost(self, stage: int, replica: int, reason: str, now: float, *, own_fault: bool = True) -> None:
        """Forget a replica that died or was given up, for a reason, and send its calls elsewhere."""
        at = self.stages[stage]
        calls = at.calls_at(replica)
        if own_fault and calls and not (calls[0].isolated or calls[0].probe):
            self._failed_call(at, "replicas end", now, ())
        super().replica_lost(stage, replica, reason, now, own_fault=own_fault)
        self.note_replicas(stage, now)

    def note_replicas(self, stage: int, now: float, why: str | None = None) -> None:
        """Note how many replicas a stage has, and give back what waits where there are none.

        why: they may be gone for long, None where that is not known.
        """
        at = self.stages[stage]
        at.health.replicas(at.n_replicas, now, why if at.limits.degrades else None)
        if at.limits.degrades and at.health.missing(now):
            self._give_back(at, at.take_all(), "down", f"stage {at.limits.name!r} is down: {at.health.why_not(now)}")

    def _ended_replica(self, call: Call, reason: str, now: float) -> None:
        at = self.stages[call.stage]
        if not call.isolated:
            self._suspect(call, now, deadly=True)
            return
        if len(call.by_owner()) > 1:  # now each alone
            for own in call.by_owner():
                at.try_again(call.again(now, rows=own))
            return
        (rows, *_), name = call.rows, at.limits.name
        if call.began_at is not None and at.health.succeeded_at > (call.suspected_at or now):
            self._convict(rows, call.stage, now)
            self._give_back(at, call.rows, "refused", f"stage {name!r}: {reason} twice while it had this input")
        elif call.attempt > MOST_ATTEMPTS + (0 if call.began_at is not None else 2):
            self._failed_call(at, "replicas end", now, ())  # others have not been answered either: it may be the stage
            self._give_back(at, call.rows, "error", f"stage {name!r}: {reason}")
        else:
            at.try_again(call.again(now))

    def _suspect(self, call: Call, now: float, *, deadly: bool) -> None:
        """Have the rows of a call answered in isolated calls, as soon as possible.

        Most of them only shared the call with what ended the replica, if anything did: they go to all replicas but one
        at the same time, in as many calls, and each owner's alone if one of these ends its replica too.

        Args:
            call: During which a replica ended, or may hang.
            now: The time.
            deadly: Whether the replica ended.
        """
        at = self.stages[call.stage]
        owners = [rows for rows in call.by_owner() if rows[0].owner.wants(call.stage)]
        n_free = at.n_working - 1
        n_calls = min(len(owners), n_free) if n_free > 1 else len(owners)
        for first in range(n_calls):
            together = [rows for own in owners[first::n_calls] for rows in own]
            at.try_again(call.again(now, rows=together, isolated=True, suspected_at=now, deadly=deadly))
        for own, *_ in owners:
            if at.suspects.verdict(own.owner, now) == "clear":
                at.suspects.note(own.owner, "suspected", now, deadly=deadly)
                for alike in at.take_alike(own.owner.fingerprint(), "suspected"):
                    at.set_apart([alike], now)

    def _convict(self, rows: Rows, stage: int, now: float) -> None:
        """Refuse the input of rows that have ended or hung a replica in an isolated call, wherever it waits."""
        at = self.stages[stage]
        at.suspects.note(rows.owner, "guilty", now)
        self._refuse_alike(at, rows.owner.fingerprint())

    def _refuse_alike(self, at: RequestQueue, digest: bytes | None) -> None:
        reason = f"this input has ended or hung replicas of stage {at.limits.name!r}"
        self._give_back(at, at.take_alike(digest, "guilty"), "refused", reason)

    def take_news(self) -> list[News]:
        """Take the verdicts that are new here, for the routers that share the stages."""
        news = [News(at.stage, *one) for at in self.stages for one in at.suspects.news]
        for at in self.stages if news else ():
            at.suspects.news.clear()
        return news

    def learn(self, news: Sequence[News], now: float) -> None:
        """Take verdicts of another router."""
        for one in news:
            at = self.stages[one.stage]
            at.suspects.learn(one.digest, one.verdict, now, deadly=one.deadly)
            if one.verdict == "guilty":
                self._refuse_alike(at, one.digest)
            elif one.verdict == "suspected":
                for alike in at.take_alike(one.digest, "suspected"):
                    at.set_apart([alike], now)

    def _is_costly(self, call: Call, now: float) -> bool:
        """Return whether a failed call has taken so long, while no other was answered, that a probe is to go next."""
        at = self.stages[call.stage]
        return at.limits.degrades and at.health.succeeded_at < call.sent_at <= now - PAUSE_S

    def _failed_call(
        self, at: RequestQueue, reason: str, now: float, rows: Sequence[Rows], *, for_good: bool = False
    ) -> None:
        """Note a call that came to nothing; if that pauses the stage, give back all that waits.

        rows: of the call, where they may not be the cause.   for_good: this single failure is enough to pause the
        stage, and what is at its replicas comes to nothing, too.
        """
        at.health.failed(reason, for_good=for_good)
        if not at.health.paused:
            return
        if rows:
            at.note_refused(rows[0], now)
        why = f"stage {at.limits.name!r} is down: {at.health.why_paused}"
        self._give_back(at, at.take_all(), "down", why)
        if for_good:
            calls = [call for call in at.calls() if not call.probe]
            for owner in dict.fromkeys(rows.owner for call in calls for rows in call.rows):
                self._close_stage(owner, at.stage, "down", why)

    def _give_back(self, at: RequestQueue, rows: Sequence[Rows], trouble: Trouble, reason: str) -> None:
        for own in rows:
            self._leave_out(at.stage, own, trouble, reason)
