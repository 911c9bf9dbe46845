"""One stage: rows that wait, calls that are tried again, and the calls of each replica.

A worker finds out by itself which rows of a call fail and whether it is their fault, by a row that the stage has
answered before. A replica that fails on such a row gets no others, but that row, until it answers; if it fails again,
it is bad: it is to be replaced. When a replica ends or hangs, its rows may be the cause: they are tried again in
isolated calls.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from itertools import chain

from cauc_ray.cascade.rows import Call, CallResult, Rows, Trouble
from cauc_ray.models.answers import ModelFacts

# One call computes and one waits in each replica, so that none idles between two of them; more wait where calls are
# so short that a result's way to the controller and back takes longer.
CALLS_PER_REPLICA = 2
SHORT_CALL_S = 0.005
SHORT_CALLS_PER_REPLICA = 5
# Where a batch takes less than this, a call has several: the way there and back costs more than a millisecond of CPU.
LONG_CALL_S = 0.02

# What may wait before a stage: so many batches for each replica that it may have, and of the stage before.
QUEUE_BATCHES = 8
FED_BATCHES = 4

# A row that fails by itself is tried so often, with a growing pause before each further time.
TRIES = 3
PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

# So often in a row must a replica fail on a row that others answer before it counts as bad: a fault that passes costs
# no restart.
FAILURES_TO_REPLACE = 2

# Until a stage has answered a row, it is unknown whether its rows or its replicas are at fault. Rows are then tried so
# often at least, and a replica that fails so many calls is replaced by a new one. Where so many rows fail, and so many
# calls of a new one, the stage cannot work; nor can it after so many isolated calls that end their replica.
EXHAUSTED = 2 * TRIES
ROWS_TO_GIVE_UP = 32
CALLS_TO_GIVE_UP = 8
DEATHS_TO_GIVE_UP = 5

# Different reasons of failures that are counted.
MOST_REASONS = 1000


@dataclass(frozen=True, slots=True)
class StageLimits:
    """How a stage takes its rows.

    batch_size: rows in a full batch.   batch_wait_s: seconds that a row waits for one.   queue_rows, queue_bytes:
    what may wait before the stage ahead is held back.
    """

    batch_size: int
    batch_wait_s: float
    queue_rows: int
    queue_bytes: float
    batches_per_call: int = 1


def queue_rows(batch_size: int, most_replicas: int, fed_by: int) -> int:
    """Return how many rows may wait for a stage.   fed_by: those that come at once from what is before it."""
    return max(QUEUE_BATCHES * batch_size * most_replicas, fed_by)


def fed_rows(batch_size: int) -> int:
    """Return the rows that come at once from a stage with batches of a size: a few of them."""
    return FED_BATCHES * batch_size


@dataclass(slots=True)
class _Replica:
    """A replica's calls, the one that computes first.   busy_since: when that one could begin.

    proven: its latest call showed that it works.   failures: calls in a row that showed that it does not.
    probe_due: when the next probe may go out.   n_failed: calls that it failed while the stage had answered no row.
    is_renewed: it was started in place of one that only failed.
    """

    calls: deque[Call] = field(default_factory=deque)
    busy_since: float = 0.0
    open: bool = True
    proven: bool = False
    failures: int = 0
    probe_due: float = 0.0
    n_failed: int = 0
    is_renewed: bool = False

    @property
    def takes_rows(self) -> bool:
        return self.open and not self.failures and not (self.calls and self.calls[0].isolated)


@dataclass(slots=True)
class StageQueue:
    """What waits for a stage, what is at its replicas, and counts of what has become of the rest.

    down: it has no replica and is left out.   calls_at_work: so many of a replica's calls may be what it dies of.
    known_good: a row that it has answered, None before the first.   n_replicas: that take calls.
    Counts are of rows, calls, ends of replicas that had an isolated call, replicas found bad; busy_s and cost are of
    calls that ended well.   lost_in_row: replicas that were lost for their own fault since the stage last answered, and
    failing_since the time of the first.   reasons: why rows failed.
    """

    stage: int
    limits: StageLimits
    down: bool = False
    calls_at_work: int = 1
    queued_rows: int = 0
    queued_bytes: float = 0.0
    in_flight: int = 0
    n_replicas: int = 0
    accepted: int = 0
    deferred: int = 0
    failed: int = 0
    degraded: int = 0
    calls_done: int = 0
    deaths: int = 0
    quarantined: int = 0
    busy_s: float = 0.0
    cost: float = 0.0
    known_good: Rows | None = None
    lost_in_row: int = 0
    failing_since: float | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    _queue: deque[Rows] = field(default_factory=deque)
    _again: list[Call] = field(default_factory=list)
    _replicas: dict[int, _Replica] = field(default_factory=dict)
    # So that a call costs the same however many replicas there are: which of them have so many calls, in their order;
    # which have any, the one that computes the longest first; which have failed.
    _by_calls: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _busy: dict[int, None] = field(default_factory=dict)
    _failing: dict[int, None] = field(default_factory=dict)
    # The replica that takes no further calls until an isolated one has gone there.
    _reserved: int | None = None
    _bad: dict[int, str] = field(default_factory=dict)
    _is_renewed: bool = False
    _gives_up: bool = False
    _n_failed_rows: int = 0

    # What waits

    @property
    def n_waiting(self) -> int:
        """Return the rows that wait, those that are tried again included."""
        return self.queued_rows + sum(map(len, self._again)) if self._again else self.queued_rows

    @property
    def in_work(self) -> bool:
        """Return whether any row waits or is at a replica."""
        return bool(self._queue or self._again or self.in_flight)

    @property
    def may_send(self) -> bool:
        """Return whether anything could be sent to a replica now."""
        return bool(self._queue or self._again or self._failing) or self._reserved is not None

    @property
    def has_room(self) -> bool:
        """Return whether the previous stage may send more rows."""
        return self.down or (self.queued_rows < self.limits.queue_rows and self.queued_bytes < self.limits.queue_bytes)

    @property
    def pressed(self) -> bool:
        """Return whether the queue is at least half full."""
        rows, n_bytes = self.queued_rows / self.limits.queue_rows, self.queued_bytes / self.limits.queue_bytes
        return max(rows, n_bytes) >= 0.5

    @property
    def starved(self) -> bool:
        """Return whether a replica is free and no rows wait."""
        return not self._queue and self._free_replica() is not None

    @property
    def never_succeeds(self) -> bool:
        """Return whether the stage has failed many times and never succeeded: its model is at fault, not the rows."""
        return self.known_good is None and (self._gives_up or self.deaths >= DEATHS_TO_GIVE_UP)

    @property
    def backlog_s(self) -> float | None:
        """Return the seconds of one replica's work that wait, None before any row has been answered.

        Rows at replicas count as half done.
        """
        n_done = self.accepted + self.deferred
        return (self.n_waiting + self.in_flight / 2) * self.busy_s / n_done if n_done else None

    def refuses(self, rows: Rows, now: float) -> tuple[Trouble, str] | None:
        """Return why the stage takes no rows now, None where it does."""
        return ("down", "it is down") if self.down else None

    def push(self, rows: Rows) -> None:
        """Have rows wait."""
        self._queue.append(rows)
        self.queued_rows += len(rows)
        self.queued_bytes += rows.n_bytes

    def try_again(self, *calls: Call) -> None:
        """Send calls unchanged when they are due, without rows that are no longer wanted."""
        wanted = ((call, [rows for rows in call.rows if rows.owner.wants(self.stage)]) for call in calls)
        self._again += [replace(call, rows=rows) for call, rows in wanted if rows]

    def take_all(self) -> list[Rows]:
        """Take everything that waits."""
        waiting = [*self._take_queue(), *(rows for call in self._again for rows in call.rows)]
        self._again = []
        self._reserved = None
        return waiting

    def drop_ended(self) -> None:
        """Drop waiting rows of owners whose answers are no longer wanted."""
        waiting = self._take_queue()
        for rows in waiting:
            if rows.owner.wants(self.stage):
                self.push(rows)
        again, self._again = self._again, []
        self._reserved = None  # for a call that may have gone
        self.try_again(*again)

    def _take_queue(self) -> list[Rows]:
        waiting = list(self._queue)
        self._queue.clear()
        self.queued_rows, self.queued_bytes = 0, 0.0
        return waiting

    # Sending

    def next_call(self, now: float, *, more_can_come: bool) -> Call | None:
        """Return a call that can go out now, None if there is none.

        more_can_come: whether rows may still be added to those that wait.
        """
        call = self._next_again(now, first=True) if self._again else None
        row = self.probe_row
        if call is None and row is not None and (replica := self._replica_in_doubt(now)) is not None:
            call = Call(self.stage, [replace(row, ready_at=now)], now, probe=True, replica=replica)
        if (
            call is None
            and (replica := self._free_replica()) is not None
            and (n := self._batch_rows(replica, now, more_can_come))
        ):
            call = Call(self.stage, self._pop(n), now, replica=replica)
        if call is None and self._again:
            call = self._next_again(now, first=False)
        if call is not None:
            self._send(call, now)
        return call

    def _send(self, call: Call, now: float) -> None:
        replica = self._replicas[call.replica]
        self.in_flight += len(call)
        call.sent_at = now
        if not replica.calls:
            replica.busy_since = now
            self._busy[call.replica] = None
        if not replica.proven and not call.probe:
            call.good_row = self.known_good
        replica.calls.append(call)
        self._change_calls(call.replica, len(replica.calls) - 1, len(replica.calls))
        if self._reserved == call.replica and not call.probe:
            self._reserved = None

    def _next_again(self, now: float, *, first: bool) -> Call | None:
        """Take a call that is tried again.   first: one that goes before rows which were never tried.

        While the stage has never answered any, those that failed go last: rows from elsewhere are more informative than
        others of the same kind.
        """
        for position, call in enumerate(self._again):
            is_first = self.known_good is not None or not call.n_unproven
            if call.due > now or is_first is not first:
                continue
            avoided = self._avoided(call)
            replica = self._replica_apart(call, avoided, now) if call.isolated else self._free_replica(avoided)
            if replica is not None:
                del self._again[position]
                call.replica = replica
                return call
        return None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a partial batch or one that is tried again is due, None if none waits for time."""
        due = [call.due for call in self._again if call.due > now]
        due += [at for number in self._in_doubt() if (at := self._replicas[number].probe_due) > now]
        if self._queue and self._free_replica() is not None:
            due.append(self._queue[0].ready_at + self.limits.batch_wait_s)
        return max(0.0, min(due) - now) if due else None

    def _batch_rows(self, replica: int, now: float, more_can_come: bool) -> int:
        """Return how many rows a batch for a replica takes now, 0 if it is better to wait."""
        full = self.limits.batch_size
        if not self._queue:
            return 0
        share = -(-self.queued_rows // self.n_replicas)
        most = full * self._batches_per_call
        if not more_can_come:
            # The last rows are shared out, so that no replica has a full batch while others idle.
            return min(most, max(share, full // 4, 1))
        if self.queued_rows >= full:
            return min(most, max(share // full, 1) * full)
        waited = now - self._queue[0].ready_at >= self.limits.batch_wait_s
        return full if waited or not self.has_room else 0

    def _pop(self, n: int) -> list[Rows]:
        taken = []
        while n and self._queue:
            rows = self._queue.popleft()
            if len(rows) > n:
                rows, rest = rows.cut(n)
                self._queue.appendleft(rest)
            taken.append(rows)
            n -= len(rows)
            self.queued_rows -= len(rows)
            self.queued_bytes -= rows.n_bytes
        return taken

    # Replicas

    def take_facts(self, facts: ModelFacts) -> None:
        """Note whether a replica is at two calls at a time: it prepares one, or waits for its answers."""
        self.calls_at_work = 2 if facts.prepares or facts.overlaps else 1

    def add_replica(self, replica: int) -> None:
        """Note that a replica is ready."""
        self._replicas[replica] = _Replica(is_renewed=self._is_renewed)
        insort(self._by_calls[0], replica)
        self.n_replicas += 1
        self.down = False

    def close_replica(self, replica: int) -> None:
        """Send a replica no further calls."""
        self.n_replicas -= self._replicas[replica].open
        self._replicas[replica].open = False
        self._failing.pop(replica, None)
        if self._reserved == replica:
            self._reserved = None

    def drop_replica(self, replica: int) -> None:
        """Forget a replica."""
        self.close_replica(replica)
        self._change_calls(replica, len(self._replicas.pop(replica).calls), None)
        self._busy.pop(replica, None)
        self._bad.pop(replica, None)

    def calls_at(self, replica: int) -> tuple[Call, ...]:
        """Return the calls that a replica has, the one that it must be computing first."""
        return tuple(self._replicas[replica].calls)

    def overdue(self, timeout_s: float, now: float) -> list[int]:
        """Return the replicas that have computed one call for longer than that."""
        return [number for number in self._busy if now - self._replicas[number].busy_since > timeout_s]

    def take_back(self, call: Call, now: float) -> None:
        """Note that a call is at its replica no more."""
        replica = self._replicas[call.replica]
        self.in_flight -= len(call)
        replica.calls.remove(call)
        replica.busy_since = now
        del self._busy[call.replica]
        if replica.calls:
            self._busy[call.replica] = None
        self._change_calls(call.replica, len(replica.calls) + 1, len(replica.calls))

    def _change_calls(self, replica: int, n_before: int, n_after: int | None) -> None:
        """Note how many calls a replica has; None for one that is gone."""
        with_before = self._by_calls[n_before]
        del with_before[bisect_left(with_before, replica)]
        if n_after is not None:
            insort(self._by_calls[n_after], replica)

    def count(self, result: CallResult) -> None:
        """Count a call whose model answered."""
        n_accepted = int(result.accepted.sum())
        self.calls_done += result.n_batches
        self.accepted += n_accepted
        self.deferred += result.n_deferred
        self.busy_s += result.compute_s or 0.0
        self.cost += float(result.costs.sum())

    def note_failed(self, reasons: Iterable[str]) -> None:
        """Count rows that end without an answer, one for each reason."""
        for reason in reasons:
            self.failed += 1
            if len(self.reasons) < MOST_REASONS or reason in self.reasons:
                self.reasons[reason] += 1

    # Whose fault it is

    def works(self, call: Call, good_row: Rows | None) -> None:
        """Note that a replica works.   good_row: that the call has answered, None if only its own rows failed."""
        replica = self._replicas[call.replica]
        replica.proven, replica.failures = True, 0
        self._failing.pop(call.replica, None)
        self.lost_in_row, self.failing_since = 0, None
        if self.known_good is None and good_row is not None:
            self.known_good = good_row
            self._is_renewed = self._gives_up = False
            self._n_failed_rows = 0
            self._again = [replace(call, n_unproven=0) for call in self._again]
            for other in self._replicas.values():
                other.n_failed = 0

    def broken(self, call: Call, reason: str, now: float) -> None:
        """Note that a replica failed on a row that the stage has answered before."""
        replica = self._replicas[call.replica]
        self.leave_alone(call.replica)
        if replica.failures >= FAILURES_TO_REPLACE and replica.open:
            self._find_bad(call.replica, f"it failed a row that others answered: {reason}", now)

    def leave_alone(self, replica: int) -> None:
        """Send a replica nothing but probes until it has answered one."""
        at = self._replicas[replica]
        at.proven = False
        at.failures += 1
        self._failing[replica] = None

    def postpone_probe(self, replica: int, due: float) -> None:
        """Have a replica's next probe wait until a time."""
        self._replicas[replica].probe_due = due

    def forget_good_row(self) -> None:
        """Forget the row to probe with, whose data is lost; replicas that waited for it take rows again."""
        self.known_good = None
        for number in self._failing:
            self._replicas[number].failures = 0
        self._failing.clear()

    def take_bad(self) -> dict[int, str]:
        """Return the replicas that were found bad since the last time, and why; they are to be replaced."""
        bad, self._bad = self._bad, {}
        return bad

    def lost_by_own_fault(self, now: float) -> None:
        """Count a replica that died or hung over a call, or was found bad."""
        self.lost_in_row += 1
        self.failing_since = now if self.failing_since is None else self.failing_since

    def try_unproven(self, call: Call, reason: str, now: float, *, more_can_come: bool) -> bool:
        """Have rows tried again that failed while the stage has never answered any: the cause is unknown.

        Each replica that only failed is replaced once. Returns False if the rows are to be given up: all rows of the
        stage have failed again and again, on new replicas, too, and no more can come.
        """
        replica, n_unproven = self._replicas[call.replica], call.n_unproven + 1
        replica.n_failed += 1
        self._n_failed_rows += len(call) if n_unproven == 1 else 0
        many = self._n_failed_rows >= ROWS_TO_GIVE_UP
        self._look_elsewhere()
        # Calls that a bad replica still had under way give no new information.
        if replica.open and all(other.n_failed for other in self._replicas.values() if other.open):
            often = replica.n_failed >= CALLS_TO_GIVE_UP
            if not replica.is_renewed and (often or n_unproven >= TRIES):
                self._is_renewed = True
                self._find_bad(call.replica, f"it failed every row: {reason}", now)
            else:
                self._gives_up = many and often
                under_way = (own for other in self._replicas.values() for own in other.calls)
                waiting = self._queue or any(own.n_unproven < EXHAUSTED for own in chain(self._again, under_way))
                if n_unproven >= EXHAUSTED and not (many or more_can_come or waiting):
                    for own in self._again:
                        own.due = now  # the next ones to be given up
                    return False
        steps = n_unproven - 1 if n_unproven >= EXHAUSTED else (n_unproven - 1) % TRIES
        pause_s = min(PAUSE_S * 2 ** min(steps, 10), LONGEST_PAUSE_S)
        self.try_again(call.again(now + pause_s, n_unproven=n_unproven))
        return True

    def _look_elsewhere(self) -> None:
        """Have the next rows come from the middle of what waits: neighbours may all fail for the same reason."""
        longest = max(self._queue, key=len, default=None)
        if longest is not None and len(longest) > 1:
            self._queue.remove(longest)
            first, rest = longest.cut(len(longest) // 2)
            self._queue.append(first)
            self._queue.appendleft(rest)

    def _find_bad(self, replica: int, reason: str, now: float) -> None:
        self.close_replica(replica)
        self._bad[replica] = reason
        self.quarantined += 1
        self.lost_by_own_fault(now)

    # Which replica takes what

    @property
    def probe_row(self) -> Rows | None:
        """Return the row that probes ask for: one that the stage has answered."""
        return self.known_good

    def _avoided(self, call: Call) -> Set[int]:
        """Return the replicas on which a call already failed, unless there is no other."""
        if not call.failed_on and not call.n_unproven:
            return frozenset()
        failed_on = set(call.failed_on)
        if call.n_unproven:
            failed_on |= {number for number, replica in self._replicas.items() if replica.n_failed}
        return failed_on if self.has_other(failed_on) else frozenset()

    def has_other(self, numbers: Set[int]) -> bool:
        """Return whether there are other replicas than these that are not being replaced."""
        return any(replica.open and number not in numbers for number, replica in self._replicas.items())

    def _in_doubt(self) -> list[int]:
        """Return the replicas that must answer a probe: they have failed, or are to take an isolated call."""
        reserved = self._reserved
        if reserved is None or reserved in self._failing or self._replicas[reserved].proven:
            return list(self._failing)
        return [*self._failing, reserved]

    def _replica_in_doubt(self, now: float) -> int | None:
        """Return an idle one of them."""
        for number in self._in_doubt():
            replica = self._replicas[number]
            if replica.open and not replica.calls and replica.probe_due <= now:
                return number
        return None

    @property
    def _most_calls(self) -> int:
        """Return how many calls a replica may have."""
        short = self.calls_done and self.busy_s * self._batches_per_call < SHORT_CALL_S * self.calls_done
        return SHORT_CALLS_PER_REPLICA if short else CALLS_PER_REPLICA

    @property
    def _batches_per_call(self) -> int:
        """Return how many batches a call may have: one where the next call is prepared while it is answered."""
        most = self.limits.batches_per_call
        if most == 1 or not self.calls_done or self.calls_at_work > 1:
            return 1
        batch_s = max(self.busy_s, 1e-9) / self.calls_done
        return max(1, min(most, int(LONG_CALL_S / batch_s)))

    def _free_replica(self, avoided: Set[int] = frozenset()) -> int | None:
        """Return the replica with the fewest calls that may take another."""
        for n in range(self._most_calls):
            for number in self._by_calls[n]:
                if self._replicas[number].takes_rows and number != self._reserved and number not in avoided:
                    return number
        return None

    def _replica_apart(self, call: Call, avoided: Set[int], now: float) -> int | None:
        """Return a replica without calls that is known to work; while there is none, keep one from taking more.

        call: an isolated one.
        """
        if self._reserved is None or self._reserved in avoided or not self._replicas[self._reserved].takes_rows:
            own = [
                (len(replica.calls), number)
                for number, replica in self._replicas.items()
                if replica.takes_rows and number not in avoided
            ]
            self._reserved = min(own)[1] if own else None
        if self._reserved is None:
            return None
        replica = self._replicas[self._reserved]
        ready = replica.proven or self.known_good is None
        return self._reserved if ready and not replica.calls else None
