"""One stage's side of the controller: rows that wait, calls that are tried again, and the calls of each replica.

A failed call may be the fault of its rows or of its replica. So a replica that fails a call gets no further rows until
it has answered again; when it has nothing else to compute it is sent a probe, a row that the stage has answered
before. If it answers, the rows are to blame: they are split, and a row that fails by itself is tried on other replicas.
If it fails the probes too, the replica is bad: it is replaced, and its rows are tried elsewhere as if never sent to it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field, replace

from cauc_ray.cascade.results import CallResult
from cauc_ray.execution.messages import Call, Rows

# One call computes and one waits in each replica, so that none idles between two of them; more wait where calls are
# so short that a result's way to the controller and back takes longer.
CALLS_PER_REPLICA = 2
SHORT_CALL_S = 0.005
SHORT_CALLS_PER_REPLICA = 5

# What may wait before a stage: so many batches for each replica that it may have, and of the stage before.
QUEUE_BATCHES = 8
FED_BATCHES = 4

# A row that fails by itself is tried so often, with a growing pause before each further time. Rows that the model
# itself names as ones it cannot answer need no isolation; where it names all of a call, they are tried once more.
TRIES = 3
STATED_TRIES = 2
PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0

# So many probes must fail in a row before a replica counts as bad: a fault that passes costs no restart.
PROBES = 2

# Until a stage has answered a row, there is nothing to probe a replica with. Its rows are then tried one by one, so
# often at least, and one replica is replaced by a new one. Where so many rows fail, and so many of them on the new
# replica, too, the stage cannot work; nor can it after so many calls that end their replica where they are isolated.
EXHAUSTED = 2 * TRIES
HOPELESS_ROWS = 32
HOPELESS_RENEWED = 8
HOPELESS_DEATHS = 5

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


def queue_rows(batch_size: int, most_replicas: int, fed_by: int) -> int:
    """Return how many rows may wait for a stage.   fed_by: those that come at once from what is before it."""
    return max(QUEUE_BATCHES * batch_size * most_replicas, fed_by)


def fed_rows(batch_size: int) -> int:
    """Return the rows that come at once from a stage with batches of a size: a few of them."""
    return FED_BATCHES * batch_size


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows for one call, which is due at a time; attempt and what follows as in Call."""

    rows: tuple[Rows, ...]
    due: float
    attempt: int = 1
    alone: bool = False
    failed_on: tuple[int, ...] = ()
    n_unproven: int = 0
    probe: bool = False

    @classmethod
    def again(cls, call: Call, due: float) -> Batch:
        """Return a call's rows as they were, to be tried again."""
        return cls(call.rows, due, call.attempt + 1, call.alone, call.failed_on, call.n_unproven)

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.rows)


@dataclass(frozen=True, slots=True)
class Failure:
    """Rows that have no answer from a call.   reasons: of each row.   stated: the model named these very rows."""

    call: Call
    reasons: tuple[str, ...]
    stated: bool = False


@dataclass(slots=True)
class _Replica:
    """A replica's calls, the one that computes first.   busy_since: when that one could begin.

    proven: its latest answer was a good one.   failures: what it has failed since, which its next answer will decide.
    probes_failed: of those sent since.   probe_due: when the next one may go out.   n_failed: single rows that it
    failed while the stage had never answered any.   is_renewed: it was started in place of one that only failed.
    """

    calls: deque[int] = field(default_factory=deque)
    busy_since: float = 0.0
    open: bool = True
    alone: bool = False
    proven: bool = False
    failures: list[Failure] = field(default_factory=list)
    probes_failed: int = 0
    probe_due: float = 0.0
    n_failed: int = 0
    is_renewed: bool = False


@dataclass(slots=True)
class StageQueue:
    """What waits for a stage, what is at its replicas, and what has become of the rest.

    down: it has no replica and is left out.   known_good: a row that it has answered, None before the first.
    Counts are of rows, calls, deaths of a call that was alone, replicas found bad; busy_s and cost are of calls that
    ended well.   lost_in_row: replicas that were lost for their own fault since the stage last answered, and
    failing_since the time of the first.   reasons: why rows failed.
    """

    limits: StageLimits
    down: bool = False
    queued_rows: int = 0
    queued_bytes: float = 0.0
    in_flight: int = 0
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
    _queue: deque[Rows] = field(default_factory=deque)
    _again: list[Batch] = field(default_factory=list)
    _replicas: dict[int, _Replica] = field(default_factory=dict)
    # The replica that takes no further calls until one that must be alone has gone there.
    _reserved: int | None = None
    _bad: dict[int, str] = field(default_factory=dict)
    _is_renewed: bool = False
    _is_hopeless: bool = False
    _n_failed_rows: int = 0

    # What waits

    @property
    def n_waiting(self) -> int:
        """Return the rows that wait, those that are tried again included."""
        in_doubt = sum(len(failure.call) for replica in self._replicas.values() for failure in replica.failures)
        return self.queued_rows + sum(len(batch) for batch in self._again) + in_doubt

    @property
    def in_work(self) -> bool:
        """Say whether any row waits or is at a replica."""
        in_doubt = any(replica.failures for replica in self._replicas.values())
        return bool(self._queue or self._again or self.in_flight or in_doubt)

    @property
    def has_room(self) -> bool:
        """Say whether the stage ahead may send more."""
        return self.down or (self.queued_rows < self.limits.queue_rows and self.queued_bytes < self.limits.queue_bytes)

    @property
    def pressed(self) -> bool:
        """Say whether the queue is half full or more."""
        rows, n_bytes = self.queued_rows / self.limits.queue_rows, self.queued_bytes / self.limits.queue_bytes
        return max(rows, n_bytes) >= 0.5

    @property
    def starved(self) -> bool:
        """Say whether a replica could take a batch and there is no row for it."""
        return not self._queue and self._free_replica() is not None

    @property
    def hopeless(self) -> bool:
        """Say whether the stage has failed many times and never succeeded: its model is at fault, not the rows."""
        return self.known_good is None and (self._is_hopeless or self.deaths >= HOPELESS_DEATHS)

    @property
    def backlog_s(self) -> float | None:
        """Return the seconds of one replica's work that wait, None before any row has been answered.

        Rows at replicas count as half done.
        """
        n_done = self.accepted + self.deferred
        return (self.n_waiting + self.in_flight / 2) * self.busy_s / n_done if n_done else None

    def push(self, rows: Rows) -> None:
        """Have rows wait."""
        self._queue.append(rows)
        self.queued_rows += len(rows)
        self.queued_bytes += rows.n_bytes

    def try_again(self, *batches: Batch) -> None:
        """Have batches go out as they are, when they are due."""
        self._again += batches

    def take_all(self) -> list[Rows]:
        """Take everything that waits."""
        for replica in self._replicas.values():
            self._again += [Batch.again(failure.call, 0.0) for failure in replica.failures]
            replica.failures = []
        waiting = [*self._pop(self.queued_rows), *(rows for batch in self._again for rows in batch.rows)]
        self._again = []
        self._reserved = None
        return waiting

    # Sending

    def next_batch(self, now: float, *, more_can_come: bool) -> tuple[Batch, int] | None:
        """Take a batch that can go out now, and the replica that it goes to.

        more_can_come: whether rows may still be added to those that wait.
        """
        found = self._next_again(now, first=True)
        if found is not None:
            return found
        if self.known_good is not None and (replica := self._replica_in_doubt(now)) is not None:
            probe = replace(self.known_good, ready_at=now)
            return Batch((probe,), now, alone=True, probe=True), replica
        replica = self._free_replica()
        n = 0 if replica is None else self._batch_rows(now, more_can_come)
        if n and replica is not None:
            return Batch(self._pop(n), now), replica
        return self._next_again(now, first=False)

    def _next_again(self, now: float, *, first: bool) -> tuple[Batch, int] | None:
        """Take a batch that is tried again.   first: one that goes before rows which were never tried.

        While the stage has never answered any, only single rows of batches that failed do: rows from elsewhere say
        more than others of the same kind.
        """
        for place, batch in enumerate(self._again):
            is_first = self.known_good is not None or (len(batch) == 1 and not batch.n_unproven)
            if batch.due > now or is_first is not first:
                continue
            avoided = self._avoided(batch)
            replica = self._empty_replica(avoided) if batch.alone else self._free_replica(avoided)
            if replica is not None:
                del self._again[place]
                return batch, replica
        return None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a partial batch or one that is tried again is due, None if none waits for time."""
        due = [batch.due for batch in self._again if batch.due > now]
        due += [r.probe_due for r in self._replicas.values() if r.probe_due > now]
        if self._queue and self._free_replica() is not None:
            due.append(self._queue[0].ready_at + self.limits.batch_wait_s)
        return max(0.0, min(due) - now) if due else None

    def _batch_rows(self, now: float, more_can_come: bool) -> int:
        """Return how many rows a batch takes now, 0 if it is better to wait."""
        full = self.limits.batch_size
        if not self._queue:
            return 0
        if not more_can_come:
            # The last rows are shared out, so that no replica has a full batch while others idle.
            share = -(-self.queued_rows // sum(replica.open for replica in self._replicas.values()))
            return min(full, max(share, full // 4, 1))
        if self.queued_rows >= full:
            return full
        waited = now - self._queue[0].ready_at >= self.limits.batch_wait_s
        return full if waited or not self.has_room else 0

    def _pop(self, n: int) -> tuple[Rows, ...]:
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
        return tuple(taken)

    # Replicas

    def add_replica(self, replica: int) -> None:
        """Note that a replica is ready."""
        self._replicas[replica] = _Replica(is_renewed=self._is_renewed)
        self.down = False

    def close_replica(self, replica: int) -> None:
        """Send a replica no further calls."""
        self._replicas[replica].open = False
        if self._reserved == replica:
            self._reserved = None

    def drop_replica(self, replica: int) -> None:
        """Forget a replica. What it failed and nothing has decided is tried elsewhere."""
        self.close_replica(replica)
        self._again += [Batch.again(failure.call, 0.0) for failure in self._replicas.pop(replica).failures]
        self._bad.pop(replica, None)

    def calls_at(self, replica: int) -> tuple[int, ...]:
        """Return the calls that a replica has, the one that it must be computing first."""
        return tuple(self._replicas[replica].calls)

    def overdue(self, timeout_s: float, now: float) -> list[int]:
        """Return the replicas that have computed one call for longer than that."""
        own = self._replicas.items()
        return [number for number, replica in own if replica.calls and now - replica.busy_since > timeout_s]

    def sent(self, call: Call, now: float) -> None:
        """Note that a call is at its replica."""
        replica = self._replicas[call.replica]
        self.in_flight += len(call)
        if not replica.calls:
            replica.busy_since = now
        replica.calls.append(call.id)
        replica.alone = call.alone
        if self._reserved == call.replica and not call.probe:
            self._reserved = None

    def back(self, call: Call, now: float) -> None:
        """Note that a call is at its replica no more."""
        replica = self._replicas[call.replica]
        self.in_flight -= len(call)
        replica.calls.remove(call.id)
        replica.busy_since = now
        replica.alone = False

    def ended_well(self, result: CallResult) -> None:
        """Count a call whose model answered."""
        n_accepted = int(result.accepted.sum())
        self.calls_done += 1
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

    def hold(self, failure: Failure) -> None:
        """Keep what a replica failed until its next answer, or a probe, tells whose fault that is."""
        replica = self._replicas[failure.call.replica]
        replica.proven = False
        replica.failures.append(failure)

    def answered(self, call: Call) -> list[Failure]:
        """Note that a replica answered a call. Returns what it had failed before: the fault of the rows."""
        replica = self._replicas[call.replica]
        decided = [failure for failure in replica.failures if failure.call.id < call.id]
        replica.failures = [failure for failure in replica.failures if failure.call.id > call.id]
        replica.proven = not replica.failures
        replica.probes_failed = 0
        self.lost_in_row, self.failing_since = 0, None
        return decided

    def probe_failed(self, call: Call, reason: str, now: float) -> None:
        """Note that a replica failed a probe; after a few of them it is bad."""
        replica = self._replicas[call.replica]
        replica.proven = False
        replica.probes_failed += 1
        if replica.probes_failed >= PROBES:
            self._find_bad(call.replica, f"it failed a row that others answered: {reason}", now)

    def postpone_probe(self, replica: int, due: float) -> None:
        """Have a replica's next probe wait until a time."""
        self._replicas[replica].probe_due = due

    def take_bad(self) -> dict[int, str]:
        """Return the replicas that were found bad since the last time, and why; they are to be replaced."""
        bad, self._bad = self._bad, {}
        return bad

    def start_knowing(self, row: Rows) -> None:
        """Take an answered row as the one to probe replicas with. The stage works: earlier failures count no more."""
        self.known_good = row
        self._is_renewed = self._is_hopeless = False
        self._n_failed_rows = 0
        self._again = [replace(batch, n_unproven=0) for batch in self._again]
        for replica in self._replicas.values():
            replica.n_failed = 0

    def stop_knowing(self) -> list[Failure]:
        """Forget the row to probe with, whose data is lost. Returns what was to be decided by it."""
        self.known_good = None
        undecided = [failure for replica in self._replicas.values() for failure in replica.failures]
        for replica in self._replicas.values():
            replica.failures = []
        return undecided

    def lost_by_own_fault(self, now: float) -> None:
        """Count a replica that died or hung over a call, or was found bad."""
        self.lost_in_row += 1
        self.failing_since = now if self.failing_since is None else self.failing_since

    def try_unproven(self, failure: Failure, now: float, *, more_can_come: bool) -> bool:
        """Have a failure tried again while the stage has never answered a row, and nothing says whose fault it is.

        One replica that only failed is replaced. Returns False if the rows are to be given up: all rows of the stage
        have failed again and again, on the new replica, too, and no more can come.
        """
        call = failure.call
        if len(call) > 1 and not failure.stated:
            # Single rows show soonest whether the replica can answer any.
            singles: list[tuple[Rows, ...]] = []
            rest = call.rows
            while len(singles) < HOPELESS_RENEWED and sum(map(len, rest)) > 1:
                one, rest = _cut(rest, 1)
                singles.append(one)
            self.try_again(*(Batch(rows, now, call.attempt + 1, call.alone) for rows in (*singles, rest)))
            self._queue.rotate()  # the next ones from elsewhere in the input
            return True
        replica, n_unproven = self._replicas[call.replica], call.n_unproven + 1
        replica.n_failed += 1
        self._n_failed_rows += len(call) if n_unproven == 1 else 0
        many = self._n_failed_rows >= HOPELESS_ROWS
        if all(other.n_failed for other in self._replicas.values() if other.open):
            if not self._is_renewed and (many or n_unproven >= TRIES):
                self._is_renewed = True
                self._find_bad(call.replica, f"it failed every row: {failure.reasons[0]}", now)
            elif replica.is_renewed or n_unproven >= 2 * EXHAUSTED:
                self._is_hopeless = many and replica.n_failed >= HOPELESS_RENEWED
                waiting = self._queue or self.in_flight or any(b.n_unproven < EXHAUSTED for b in self._again)
                if n_unproven >= EXHAUSTED and not (many or more_can_come or waiting):
                    self._again = [replace(batch, due=now) for batch in self._again]  # the next ones to be given up
                    return False
        steps = n_unproven - 1 if n_unproven >= EXHAUSTED else (n_unproven - 1) % TRIES
        pause_s = min(PAUSE_S * 2 ** min(steps, 10), LONGEST_PAUSE_S)
        self.try_again(replace(Batch.again(call, now + pause_s), n_unproven=n_unproven))
        return True

    def _find_bad(self, replica: int, reason: str, now: float) -> None:
        self.close_replica(replica)
        self._bad[replica] = reason
        self.quarantined += 1
        self.lost_by_own_fault(now)

    # Which replica takes what

    def _avoided(self, batch: Batch) -> Set[int]:
        """Return the replicas that say nothing new of a batch, unless there is no other."""
        if not batch.failed_on and not batch.n_unproven:
            return frozenset()
        failed_on = set(batch.failed_on)
        if batch.n_unproven:
            failed_on |= {number for number, replica in self._replicas.items() if replica.n_failed}
        others = any(replica.open and number not in failed_on for number, replica in self._replicas.items())
        return failed_on if others else frozenset()

    def _replica_in_doubt(self, now: float) -> int | None:
        """Return an idle replica that must answer a probe: it has failed, or is to take what must be alone."""
        for number, replica in self._replicas.items():
            asked = bool(replica.failures) or (number == self._reserved and not replica.proven)
            if asked and replica.open and not replica.calls and replica.probe_due <= now:
                return number
        return None

    def _free_replica(self, avoided: Set[int] = frozenset()) -> int | None:
        """Return the replica with the fewest calls that may take another."""
        short = self.calls_done and self.busy_s < SHORT_CALL_S * self.calls_done
        free, fewest = None, SHORT_CALLS_PER_REPLICA if short else CALLS_PER_REPLICA
        for number, replica in self._replicas.items():
            takes = replica.open and not replica.alone and not replica.failures and number != self._reserved
            if takes and len(replica.calls) < fewest and number not in avoided:
                free, fewest = number, len(replica.calls)
        return free

    def _empty_replica(self, avoided: Set[int]) -> int | None:
        """Return a replica without calls that has answered before; while there is none, keep one from taking more."""
        if self._reserved is None or self._reserved in avoided:
            self._reserved = None
            own = [
                (len(replica.calls), number)
                for number, replica in self._replicas.items()
                if replica.open and not replica.alone and not replica.failures and number not in avoided
            ]
            if not own:
                return None
            self._reserved = min(own)[1]
        replica = self._replicas[self._reserved]
        ready = replica.proven or self.known_good is None
        return self._reserved if ready and not replica.calls else None


def failed_batches(failure: Failure, now: float) -> list[Batch]:
    """Return how rows that are to blame for a failure are tried again; nothing if that was often enough.

    They go out in halves, or after a pause; those that the model itself named at once.
    """
    call = failure.call
    failed_on = (*call.failed_on, call.replica)
    if failure.stated:
        again = replace(Batch.again(call, now), failed_on=failed_on)
        return [again] if len(failed_on) < STATED_TRIES else []
    if len(call) > 1:
        halves = _cut(call.rows, len(call) // 2)
        return [Batch(half, now, call.attempt + 1, call.alone, call.failed_on) for half in halves]
    if len(failed_on) >= TRIES:
        return []
    return [replace(Batch.again(call, now + PAUSE_S * 2 ** len(call.failed_on)), failed_on=failed_on)]


def _cut(rows: Sequence[Rows], n_first: int) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """Cut a batch's rows into the first so many, less than all, and the others."""
    parts = list(rows)
    first: list[Rows] = []
    while len(parts[0]) <= n_first:
        first.append(parts.pop(0))
        n_first -= len(first[-1])
    if n_first:
        head, parts[0] = parts[0].cut(n_first)
        first.append(head)
    return tuple(first), tuple(parts)
