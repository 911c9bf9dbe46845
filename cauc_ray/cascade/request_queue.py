"""One stage of a service: rows of requests that wait for an answer.

Requests of one priority take turns: a batch's worth each, half of one where shorter requests wait, which the next batch
has. Those of a higher one go first, however long others wait. A batch that is not full goes to a replica that is free,
or just in time for one that will be, so that rows can join it until then. What the stage cannot answer in time is
refused as it comes; a full queue has its lowest priority make room for a higher one.

A stage that fails again and again is paused (a circuit breaker): its rows are refused as they come, so that none waits
for a timeout, while probes, whose answers nobody waits for, find out when it works again.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import chain, groupby
from math import inf

from cauc_ray.cascade.rows import Call, CallResult, Rows, Trouble
from cauc_ray.cascade.stage_health import DOWN_AFTER_S, ServiceTime, StageHealth, Suspects, Verdict
from cauc_ray.cascade.stage_queue import CALLS_PER_REPLICA, FAILURES_TO_REPLACE, StageLimits, StageQueue

# Each replica of a paused stage is probed every so many seconds, one at a time; a probe is given up after so many, or
# several times what calls usually take.
PAUSE_S = 1.0
PROBE_S = 2.0
# Rows that are likely to take more than this share of their time are refused: by then many would come too late. Where
# calls are long, it is known better.
MOST_WAIT, MOST_WAIT_OF_LONG = 0.8, 0.9
# A call that takes more than this share of its rows' time, and so many times as long as others, may hang.
OVERDUE, OVERDUE_CALLS = 0.5, 4.0
# Of calls that compute for longer, the next one is sent so long before its replica is free; of others at once.
LONG_S, AHEAD_S = 1.0, 0.1
# Calls that take so many times what their model computes wait for more than the one before.
CROWDED = 2.5
# An isolated call that has computed for less than this does not hang.
HANGS_S = 1.0
# Suspected rows wait for this share of their time where others wait for the only replica; where there are several,
# those that may hang wait until two of them work, or for so much. Those that may end the last one never go there.
HOLD, HOLD_FOR_OTHERS = 0.35, 0.75
# A bad replica is replaced only so long after the last one where no other answers: then it may be the stage.
REPLACE_PAUSE_S = 30.0


@dataclass(frozen=True, slots=True)
class RequestLimits(StageLimits):
    """Settings of a stage of a service.

    name: as people know it.   timeout_s: seconds for an answer.   degrades: whether rows have the answer of the stage
    before, where it has none.
    """

    name: str = ""
    timeout_s: float = inf
    degrades: bool = False


def _priority(rows: Rows) -> int:
    return rows.owner.priority


@dataclass(slots=True)
class RequestQueue(StageQueue):
    """What waits for a stage of a service, what is at its replicas, and whether it is well."""

    limits: RequestLimits
    health: StageHealth = field(init=False)
    suspects: Suspects = field(default_factory=Suspects)
    service_time: ServiceTime = field(default_factory=ServiceTime)
    _refused: Rows | None = None
    _replaced_at: float = -inf

    def __post_init__(self) -> None:
        # Rows that have no answer yet have nothing to lose by waiting for a replica to come back.
        limits = self.limits
        patience_s = DOWN_AFTER_S if limits.degrades else max(DOWN_AFTER_S, MOST_WAIT * limits.timeout_s)
        self.health = StageHealth(patience_s)

    # What comes

    def refuses(self, rows: Rows, now: float) -> tuple[Trouble, str] | None:
        """Return why the stage takes no rows now, None where it does."""
        name, limits = self.limits.name, self.limits
        is_probe = self.health.paused and self.probe_row is None and not self.in_work  # there is no other yet
        if (why := self.health.why_not(now)) is not None and not (is_probe and self.n_replicas):
            self.note_refused(rows, now)
            return "down", f"stage {name!r} is down: {why}"
        if self.suspects.verdict(rows.owner, now) == "guilty":
            return "refused", f"this input has ended or hung replicas of stage {name!r}"
        n_waiting, waiting_bytes, n_owners = self._ahead_of(rows.owner.priority)
        too_many = n_waiting + len(rows) > limits.queue_rows
        too_large = waiting_bytes > 0 and waiting_bytes + rows.n_bytes > limits.queue_bytes
        most_wait = MOST_WAIT_OF_LONG if self.service_time.compute_s > LONG_S else MOST_WAIT
        if too_many or too_large or self._wait_s(len(rows), n_waiting, n_owners, now) > most_wait * limits.timeout_s:
            return "overloaded", f"stage {name!r} is overloaded"
        return None

    def _ahead_of(self, priority: int) -> tuple[int, float, int]:
        """Return what is answered before rows of a priority that come now: how many rows, their bytes, and requests."""
        if not self._queue or _priority(self._queue[-1]) <= priority:
            return self.n_waiting, self.queued_bytes, len(self._queue) + len(self._again)
        ahead = [rows for rows in self._queue if _priority(rows) <= priority]
        n = self.n_waiting - self.queued_rows + sum(map(len, ahead))
        return n, sum(rows.n_bytes for rows in ahead), len(ahead) + len(self._again)

    def take_surplus(self, priority: int) -> list[Rows]:
        """Take what is too much for the queue, from the rows below a priority."""
        surplus: list[Rows] = []
        limits = self.limits
        while self._queue and _priority(self._queue[-1]) > priority:
            if self.n_waiting <= limits.queue_rows and self.queued_bytes <= limits.queue_bytes:
                break
            surplus.append(self._queue.pop())
            self.queued_rows -= len(surplus[-1])
            self.queued_bytes -= surplus[-1].n_bytes
        return surplus

    def note_refused(self, rows: Rows, now: float) -> None:
        """Keep a row to probe with, as long as none is known to be good; a suspected one if there is no other."""
        verdict = self.suspects.verdict(rows.owner, now)
        if self.known_good is None and (verdict == "clear" or (verdict == "suspected" and self._refused is None)):
            self._refused = rows.cut(1)[0]

    def push(self, rows: Rows) -> None:
        """Have rows wait; those that a replica may have ended for, for a call of their own."""
        if self.suspects.verdict(rows.owner, rows.ready_at) == "clear":
            StageQueue.push(self, rows)
            if len(self._queue) > 1 and _priority(self._queue[-2]) > _priority(rows):
                self._queue.pop()
                self._queue.insert(bisect_right(self._queue, _priority(rows), key=_priority), rows)
        else:
            self.set_apart([rows], rows.ready_at)

    def set_apart(self, rows: list[Rows], now: float) -> None:
        """Have one owner's rows wait for a call of their own."""
        known = self.suspects.of(rows[0].owner, now)
        since, deadly = (now, True) if known is None else (known.since, known.deadly)
        self.try_again(Call(self.stage, rows, now, isolated=True, suspected_at=since, deadly=deadly))

    def take_alike(self, digest: bytes | None, verdict: Verdict) -> list[Rows]:
        """Take all that waits of an input, by its digest, which has become suspected or guilty."""
        alike = []
        for rows in self._take_queue():
            if rows.owner.fingerprint() == digest is not None:
                alike.append(rows)
            else:
                StageQueue.push(self, rows)
        if verdict == "guilty":
            again, self._again = self._again, []
            for call in again:
                same = call.isolated and call.rows[0].owner.fingerprint() == digest is not None
                alike += call.rows if same else []
                self._again += [] if same else [call]
        return alike

    def _wait_s(self, n: int, n_ahead: int, n_owners: int, now: float) -> float:
        """Return in how many seconds n rows that come now are likely to be answered; 0 if at once, or not known yet.

        n_ahead: rows that go before them, of so many owners.
        """
        sent_at = [calls[0].sent_at for number in self._busy if (calls := self.calls_at(number))]
        long_s = self.service_time.long_call_s or now - min(sent_at, default=now)
        n_replicas, n_calls = max(1, self.n_working), self.n_calls
        n_free = max(0, n_replicas - n_calls)
        # Of a longer request only so much goes before these.
        n_before = min(n_ahead, n_owners * max(n, self.limits.batch_size))
        n_waiting = n_before / self.limits.batch_size - n_free
        if n_free and n_waiting <= 0:
            return 0.0
        left_s = 0.0 if n_free or not sent_at else max(0.0, min(sent_at) + long_s - now)
        if self.service_time.compute_s > LONG_S:  # what is under way is known to end then
            return left_s + long_s * (1 + int(n_waiting) / n_replicas)
        # Where more calls than replicas are under way at once, one of them ends so often.
        return left_s + long_s * (1 + n_waiting / max(n_replicas, n_calls))

    # What goes

    @property
    def may_send(self) -> bool:
        """Return whether anything could be sent to a replica now."""
        return self.health.paused or bool(self._queue or self._again or self._failing) or self._reserved is not None

    @property
    def probe_row(self) -> Rows | None:
        """Return the row that probes ask for: one that the stage has answered, else the last that it has refused."""
        return self.known_good or (self._refused if self.health.paused else None)

    def _in_doubt(self) -> list[int]:
        if not self.health.paused:
            return StageQueue._in_doubt(self)
        return [] if any(call.probe for call in self.calls()) else list(self._replicas)

    def is_late_probe(self, call: Call, now: float) -> bool:
        """Return whether a call is a probe that has not been answered in time."""
        return call.probe and now >= call.sent_at + self._probe_s

    @property
    def _probe_s(self) -> float:
        """Return how long a probe is waited for: as long as for any call while it is not known how long these take."""
        call_s, timeout_s = self.service_time.long_call_s, self.limits.timeout_s
        return min(timeout_s, max(PROBE_S, OVERDUE_CALLS * call_s)) if call_s else timeout_s

    @property
    def n_calls(self) -> int:
        """Return how many calls are under way."""
        return sum(n * len(replicas) for n, replicas in self._by_calls.items())

    @property
    def n_working(self) -> int:
        """Return how many replicas take rows: those that neither hang nor have failed on a row known to be good."""
        return self.n_replicas - len(self._failing)

    def calls(self) -> list[Call]:
        """Return the calls that are under way."""
        return [call for replica in self._replicas.values() for call in replica.calls]

    def _pop(self, n: int) -> list[Rows]:
        """Take rows of one kind, those of higher priority first."""
        kind = self._queue[0].owner.kind
        taken: list[Rows] = []
        if _priority(self._queue[0]) == _priority(self._queue[-1]):
            self._pop_level(self._queue, kind, n, taken)
            return taken
        levels = [deque(level) for _, level in groupby(self._queue, key=_priority)]
        for level in levels:
            n -= self._pop_level(level, kind, n, taken)
        self._queue = deque(chain.from_iterable(levels))
        return taken

    def _pop_level(self, queue: deque[Rows], kind: object, n: int, taken: list[Rows]) -> int:
        """Take up to n rows of one kind and priority; return how many are taken.

        Of those that would fill a batch alone, half of it where shorter ones wait, too.
        """
        longer: list[Rows] = []
        others: list[Rows] = []
        left = n
        while queue and left > (n - n // 2 if longer else 0):
            rows = queue.popleft()
            if rows.owner.kind != kind:
                others.append(rows)
            elif len(rows) > self.limits.batch_size:
                longer.append(rows)
            else:
                left -= self._take(rows, left - (n - n // 2 if longer else 0), queue, taken)
        while longer and left:
            left -= self._take(longer.pop(0), left, queue, taken)
        queue.extendleft(reversed(others + longer))
        return n - left

    def _take(self, rows: Rows, n: int, queue: deque[Rows], taken: list[Rows]) -> int:
        """Take up to n of some rows; the others wait for another turn. Returns how many are taken."""
        if len(rows) > n:
            rows, rest = rows.cut(n)
            queue.append(rest)
        taken.append(rows)
        self.queued_rows -= len(rows)
        self.queued_bytes -= rows.n_bytes
        return len(rows)

    def _batch_rows(self, replica: int, now: float, more_can_come: bool) -> int:
        full, wanted_at = self.limits.batch_size, self._wanted_at(replica)
        if self.queued_rows >= full and (now >= wanted_at or 0 < self.service_time.compute_s < LONG_S):
            return full
        if not self._queue or now < max(wanted_at, self._staggered_at()):
            return 0
        return 0 if more_can_come and now < self._queue[0].ready_at + self.limits.batch_wait_s else full

    def _wanted_at(self, replica: int) -> float:
        """Return when a replica will have use for a batch that is not full."""
        at, compute_s = self._replicas[replica], self.service_time.compute_s
        if not at.calls:
            return 0.0
        # Rows that wait here can join a batch, be refused, or go to another replica.
        return at.busy_since + max(compute_s - AHEAD_S, 0.9 * compute_s) if compute_s else inf

    def _staggered_at(self) -> float:
        """Return when the next batch that is not full should begin.

        Where calls are long and there are more rows than replicas, replicas begin one after the other: rows then wait
        for a share of a call, not for a whole one.
        """
        call_s, n_rows = self.service_time.long_call_s, self.queued_rows + self.in_flight
        if call_s < LONG_S or self.n_working < 2 or n_rows <= self.n_working or not self._busy:
            return 0.0
        return max(self._replicas[number].busy_since for number in self._busy) + call_s / self.n_working

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until something can go or a call may hang, None if nothing waits for time."""
        due = [self._replicas[number].probe_due for number in self._in_doubt()]
        due += [call.sent_at + self._probe_s for call in self.calls() if call.probe]
        for number in self._busy:
            overdue_at = self._overdue_at(number)
            if overdue_at is not None and overdue_at > now:
                due.append(overdue_at)
                break  # the others have begun later
        for call in self._again:
            due += [call.due, self._risked_at(call)] if call.isolated else [call.due]
        if self._queue and (replica := self._free_replica()) is not None:
            wanted_at = max(self._wanted_at(replica), self._staggered_at())
            due += [wanted_at, self._queue[0].ready_at + self.limits.batch_wait_s]
        soonest = min([at for at in due if at > now], default=inf)
        return soonest - now if soonest < inf else None

    @property
    def _most_calls(self) -> int:
        # Where other routers' calls wait there too, rows are better kept here, where more can join them.
        return 1 if self.service_time.call_s > CROWDED * self.service_time.compute_s > 0 else CALLS_PER_REPLICA

    def _replica_apart(self, call: Call, avoided: Set[int], now: float) -> int | None:
        n_at_risk = sum(own.isolated for own in self.calls())
        has_others = self.health.most_replicas > 1
        if self.n_working - n_at_risk >= 2:  # one is left for the others
            return StageQueue._replica_apart(self, call, avoided, now)
        if n_at_risk or (now < self._risked_at(call) and (has_others or self._queue or self.in_flight)):
            return None
        return StageQueue._replica_apart(self, call, avoided, now)

    def _risked_at(self, call: Call) -> float:
        """Return when the last replica may be risked for suspected rows."""
        if self.n_working >= 2 or call.suspected_at is None:
            return -inf
        has_others = self.health.most_replicas > 1
        if has_others and call.deadly:
            return inf
        since = max(call.suspected_at, min(rows.ready_at for rows in call.rows))
        left_s = min(rows.owner.deadline for rows in call.rows) - since
        return since + (HOLD_FOR_OTHERS if has_others else HOLD) * min(left_s, self.limits.timeout_s)

    # What comes back

    def answered(self, call: Call, result: CallResult, now: float) -> None:
        """Note a call whose model answered rows."""
        self.health.succeeded(now)
        if not (call.isolated or call.probe):
            self.service_time.note(now - call.sent_at, result.compute_s or 0.0, len(call))

    def doubt(self, call: Call) -> None:
        """Have the next call of a replica bring a good row along."""
        self._replicas[call.replica].proven = False

    # Replicas

    def add_replica(self, replica: int, now: float = 0.0) -> None:
        """Note that a replica is ready."""
        StageQueue.add_replica(self, replica)
        self.health.replicas(self.n_replicas, now)

    def broken(self, call: Call, reason: str, now: float) -> None:
        """Note that a replica failed on a row that the stage has answered before."""
        StageQueue.broken(self, call, reason, now)
        replica = self._replicas[call.replica]
        if replica.open and replica.failures >= FAILURES_TO_REPLACE:  # kept for now, but it need not be asked at once
            replica.probe_due = now + PAUSE_S

    def take_hanging(self, now: float) -> list[tuple[Call, ...]]:
        """Take the calls of each replica that has begun to hang, where others work.

        It gets probes until it answers one, which is also when the call that hangs has ended.
        """
        taken = []
        for number in list(self._busy):
            at = self._overdue_at(number)
            if at is not None and now >= at and self.n_working > 1:
                taken.append(self.calls_at(number))
                for call in taken[-1]:
                    self.take_back(call, now)
                self.leave_alone(number)
        return taken

    def _overdue_at(self, replica: int) -> float | None:
        """Return when the call that a replica computes may be taken to hang, None where that is not known."""
        at = self._replicas[replica]
        if at.calls[0].isolated or at.calls[0].probe or not self.service_time.call_s:
            return None
        return at.busy_since + self._longest_s

    @property
    def _longest_s(self) -> float:
        return max(OVERDUE * self.limits.timeout_s, OVERDUE_CALLS * self.service_time.call_s)

    def may_hang(self, call: Call, now: float) -> bool:
        """Return whether a call has taken suspiciously long."""
        return not call.isolated and now - call.sent_at >= self._longest_s

    def hangs(self, call: Call, now: float) -> bool:
        """Return whether an isolated call that has not ended in time hangs."""
        longest_s = max(HANGS_S, 10 * self.service_time.compute_s)
        return call.isolated and call.began_at is not None and now - call.began_at > longest_s

    def _find_bad(self, replica: int, reason: str, now: float) -> None:
        if self.n_replicas < 2 and now - self._replaced_at <= REPLACE_PAUSE_S:
            return
        self._replaced_at = now
        StageQueue._find_bad(self, replica, reason, now)
