"""One stage's side of the controller: rows that wait, calls that are tried again, and the calls of each replica."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cauc_ray.execution.messages import Call, CallResult, Rows

# One call computes and one waits in each replica, so that none idles between two of them; more wait where calls are
# so short that a result's way to the controller and back takes longer.
CALLS_PER_REPLICA = 2
SHORT_CALL_S = 0.005
SHORT_CALLS_PER_REPLICA = 5

# What may wait before a stage: so many batches for each replica that it may have, and of the stage before.
QUEUE_BATCHES = 8
FED_BATCHES = 4

# A row that fails by itself is tried so often, with a growing pause before each further time.
TRIES = 3
PAUSE_S = 0.1

# So many calls that fail, or that end the replica where they are alone, show that a stage cannot work if it never has.
HOPELESS_CALLS = 48
HOPELESS_DEATHS = 5


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
    """Rows for one call, which is due at a time; attempt, alone and strikes as in Call."""

    rows: tuple[Rows, ...]
    due: float
    attempt: int = 1
    alone: bool = False
    strikes: int = 0

    def __len__(self) -> int:
        return sum(len(rows) for rows in self.rows)


@dataclass(slots=True)
class _Replica:
    """A replica's calls, the one that computes first.   busy_since: when that one could begin."""

    calls: deque[int] = field(default_factory=deque)
    busy_since: float = 0.0
    open: bool = True
    alone: bool = False


@dataclass(slots=True)
class StageQueue:
    """What waits for a stage, what is at its replicas, and what has become of the rest.

    down: it has no replica and is left out.   Counts are of rows, calls, deaths of a call that was alone; busy_s and
    cost are of calls that ended well.
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
    calls_failed: int = 0
    deaths: int = 0
    busy_s: float = 0.0
    cost: float = 0.0
    _queue: deque[Rows] = field(default_factory=deque)
    _again: list[Batch] = field(default_factory=list)
    _replicas: dict[int, _Replica] = field(default_factory=dict)
    # The replica that takes no further calls until one that must be alone has gone there.
    _reserved: int | None = None

    # What waits

    @property
    def n_waiting(self) -> int:
        """Return the rows that wait, those that are tried again included."""
        return self.queued_rows + sum(len(batch) for batch in self._again)

    @property
    def in_work(self) -> bool:
        """Say whether any row waits or is at a replica."""
        return bool(self._queue or self._again or self.in_flight)

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
        return not self.calls_done and (self.calls_failed >= HOPELESS_CALLS or self.deaths >= HOPELESS_DEATHS)

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
        waiting = [*self._pop(self.queued_rows), *(rows for batch in self._again for rows in batch.rows)]
        self._again = []
        return waiting

    # Sending

    def next_batch(self, now: float, *, more_can_come: bool) -> tuple[Batch, int] | None:
        """Take a batch that can go out now, and the replica that it goes to.

        more_can_come: whether rows may still be added to those that wait.
        """
        for place, batch in enumerate(self._again):
            replica = None
            if batch.due <= now:
                replica = self._empty_replica() if batch.alone else self._free_replica()
            if replica is not None:
                del self._again[place]
                return batch, replica
        replica = self._free_replica()
        n = 0 if replica is None else self._batch_rows(now, more_can_come)
        return (Batch(self._pop(n), now), replica) if n and replica is not None else None

    def wait_s(self, now: float) -> float | None:
        """Return the seconds until a partial batch or one that is tried again is due, None if none waits for time."""
        due = [batch.due for batch in self._again if batch.due > now]
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
        self._replicas[replica] = _Replica()
        self.down = False

    def close_replica(self, replica: int) -> None:
        """Send a replica no further calls."""
        self._replicas[replica].open = False
        if self._reserved == replica:
            self._reserved = None

    def drop_replica(self, replica: int) -> None:
        """Forget a replica."""
        self.close_replica(replica)
        del self._replicas[replica]

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
        if self._reserved == call.replica:
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
        self.failed += len(result.failures)
        self.busy_s += result.compute_s or 0.0
        self.cost += float(result.costs.sum())

    def _free_replica(self) -> int | None:
        """Return the replica with the fewest calls that may take another."""
        short = self.calls_done and self.busy_s < SHORT_CALL_S * self.calls_done
        free, fewest = None, SHORT_CALLS_PER_REPLICA if short else CALLS_PER_REPLICA
        for number, replica in self._replicas.items():
            if len(replica.calls) < fewest and replica.open and not replica.alone and number != self._reserved:
                free, fewest = number, len(replica.calls)
        return free

    def _empty_replica(self) -> int | None:
        """Return a replica without calls; while there is none, keep one from taking more."""
        if self._reserved is None:
            own = [(len(r.calls), number) for number, r in self._replicas.items() if r.open and not r.alone]
            if not own:
                return None
            self._reserved = min(own)[1]
        return self._reserved if not self._replicas[self._reserved].calls else None


def failed_batches(call: Call, now: float) -> list[Batch]:
    """Return how a call that failed is tried again: in halves, or after a pause; nothing if that was often enough."""
    if len(call) > 1:
        return [Batch(half, now, call.attempt + 1, call.alone) for half in _halves(call.rows)]
    if call.strikes + 1 >= TRIES:
        return []
    pause_s = PAUSE_S * 2**call.strikes
    return [Batch(call.rows, now + pause_s, call.attempt + 1, call.alone, call.strikes + 1)]


def _halves(rows: Iterable[Rows]) -> tuple[tuple[Rows, ...], tuple[Rows, ...]]:
    """Cut a batch's rows into two batches of equal size, or one row more in the second."""
    parts = list(rows)
    n_first = sum(len(r) for r in parts) // 2
    first: list[Rows] = []
    while len(parts[0]) <= n_first:
        first.append(parts.pop(0))
        n_first -= len(first[-1])
    if n_first:
        head, parts[0] = parts[0].cut(n_first)
        first.append(head)
    return tuple(first), tuple(parts)
