"""One stage: rows that wait, calls that are tried again, its replicas, and what has become of the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf

from cauc_ray.cascade.replica_set import ReplicaSet, Standing
from cauc_ray.cascade.rows import Call, CallResult, Rows
from cauc_ray.cascade.stage_health import DOWN_AFTER_S, CallSeconds, ServiceTime, StageHealth
from cauc_ray.cascade.suspects import Suspects, Verdict
from cauc_ray.cascade.waiting import WaitingRows
from cauc_ray.models.answers import ModelFacts

# What may wait before a stage: so many batches for each replica that it may have, and of the stage before.
QUEUE_BATCHES = 8
FED_BATCHES = 4
# Rows that are likely to take more than this share of their time are refused: by then many would come too late.
MOST_WAIT = 0.8
# So often in a row must a replica fail on a row that others answer before it counts as bad: a fault that passes costs
# no restart.
FAILURES_TO_REPLACE = 2
# A stage cannot work that has never answered a row after so many isolated calls that ended their replica.
DEATHS_TO_GIVE_UP = 5
# A stage that is paused, or a bad replica that is not replaced, is probed every so many seconds.
PROBE_PAUSE_S = 1.0
# Different reasons of failures that are counted.
MOST_REASONS = 1000


@dataclass(frozen=True, slots=True)
class StageLimits:
    """How a stage takes its rows.

    Attributes:
        batch_size: Rows in a full batch.
        batch_wait_s: Seconds that a row waits for one.
        queue_rows: Rows that may wait before the stage ahead is held back, or others are refused.
        queue_bytes: The same in bytes.
        batches_per_call: Batches that a call may have where they take next to no time.
        name: As those know it who read why a row was not answered; empty where they know it anyway.
        timeout_s: Seconds for an answer. A stage without such a limit is never paused.
        degrades: Whether rows have the answer of the stage before, where this one has none.
    """

    batch_size: int
    batch_wait_s: float
    queue_rows: int
    queue_bytes: float
    batches_per_call: int = 1
    name: str = ""
    timeout_s: float = inf
    degrades: bool = False


def queue_rows(batch_size: int, most_replicas: int, fed_by: int) -> int:
    """Return how many rows may wait for a stage.   fed_by: those that come at once from what is before it."""
    return max(QUEUE_BATCHES * batch_size * most_replicas, fed_by)


def fed_rows(batch_size: int) -> int:
    """Return the rows that come at once from a stage with batches of a size: a few of them."""
    return FED_BATCHES * batch_size


@dataclass(slots=True)
class Stage:
    """What waits for a stage, what is at its replicas, and counts of what has become of the rest.

    Attributes:
        number: Its number.
        limits: Its limits.
        calls_at_work: Calls of a replica that may have caused its end.
        overlaps: Whether a replica takes the next call while it waits for the answers of one.
        again: Calls that are tried again.
        known_good: A row that it has answered, None before the first.
        refused: A row to probe a paused stage with, as long as none is known to be good.
        in_flight: Rows at replicas.
        accepted: Rows that stopped here.
        deferred: Rows that went on.
        failed: Rows that ended here without an answer.
        degraded: Rows that ended with the answer of an earlier stage.
        calls_done: Batches that were answered.
        deaths: Ends of replicas that had an isolated call.
        quarantined: Replicas found bad.
        busy_s: Seconds of answered calls.
        cost: Cost of answered calls.
        lost_in_row: Replicas that were lost for their own fault since the stage last answered.
        failing_since: Time of the first of them.
        reasons: Why rows failed.
        sent: Rows that went on from here, by the stage that they went to.
        bad: Replicas that are to be replaced, and why.
        replaced_at: When the last one was found bad.
        is_renewed: Whether replicas are started in place of those that only failed.
        gives_up: Whether the last failures, before any answer, leave no hope.
        n_failed_rows: Rows that failed before the first answer.
    """

    number: int
    limits: StageLimits
    calls_at_work: int = 1
    overlaps: bool = False
    again: list[Call] = field(default_factory=list)
    known_good: Rows | None = None
    refused: Rows | None = None
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
    lost_in_row: int = 0
    failing_since: float | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    sent: Counter[int] = field(default_factory=Counter)
    bad: dict[int, str] = field(default_factory=dict)
    replaced_at: float = -inf
    is_renewed: bool = False
    gives_up: bool = False
    n_failed_rows: int = 0
    replicas: ReplicaSet = field(default_factory=ReplicaSet)
    suspects: Suspects = field(default_factory=Suspects)
    service_time: ServiceTime = field(default_factory=ServiceTime)
    waiting: WaitingRows = field(init=False)
    health: StageHealth = field(init=False)

    def __post_init__(self) -> None:
        limits = self.limits
        self.waiting = WaitingRows(limits.batch_size)
        # Rows that have no answer yet have nothing to lose by waiting for a replica to come back.
        patience_s = DOWN_AFTER_S if limits.degrades else max(DOWN_AFTER_S, MOST_WAIT * limits.timeout_s)
        self.health = StageHealth(patience_s, pauses=limits.timeout_s < inf)

    # What waits

    @property
    def n_waiting(self) -> int:
        """Return the rows that wait, those that are tried again included."""
        return self.waiting.n_rows + sum(map(len, self.again)) if self.again else self.waiting.n_rows

    @property
    def n_open(self) -> int:
        """Return the rows that wait or are at replicas."""
        return self.waiting.n_rows + sum(map(len, self.again)) + self.in_flight

    @property
    def in_work(self) -> bool:
        """Return whether any row waits or is at a replica."""
        return bool(self.waiting.n_rows or self.again or self.in_flight)

    @property
    def has_room(self) -> bool:
        """Return whether the previous stage may send more rows."""
        waiting, limits = self.waiting, self.limits
        return self.health.is_down or (waiting.n_rows < limits.queue_rows and waiting.n_bytes < limits.queue_bytes)

    @property
    def pressed(self) -> bool:
        """Return whether the queue is at least half full."""
        waiting, limits = self.waiting, self.limits
        return max(waiting.n_rows / limits.queue_rows, waiting.n_bytes / limits.queue_bytes) >= 0.5

    @property
    def backlog_s(self) -> float | None:
        """Return the seconds of one replica's work that wait, None before any row has been answered.

        Rows at replicas count as half done.
        """
        n_done = self.accepted + self.deferred
        return (self.n_waiting + self.in_flight / 2) * self.busy_s / n_done if n_done else None

    @property
    def never_succeeds(self) -> bool:
        """Return whether the stage has failed many times and never succeeded: its model is at fault, not the rows."""
        return self.known_good is None and (self.gives_up or self.deaths >= DEATHS_TO_GIVE_UP)

    def because(self, reason: str, is_down: str = "") -> str:
        """Return a reason with the stage's name.   is_down: what to put between them."""
        return f"stage {self.limits.name!r}{is_down}: {reason}" if self.limits.name else reason

    def set_apart(self, rows: Rows, now: float) -> None:
        """Have one owner's rows wait for a call of their own."""
        record = self.suspects.of(rows.owner, now)
        since, deadly = (now, True) if record is None else (record.since, record.deadly)
        self.try_again(Call(self.number, [rows], now, isolated=True, suspected_at=since, deadly=deadly))

    def try_again(self, *calls: Call) -> None:
        """Send calls unchanged when they are due, without rows that are no longer wanted."""
        pairs = ((call, [rows for rows in call.rows if rows.owner.wants(self.number)]) for call in calls)
        self.again += [replace(call, rows=rows) for call, rows in pairs if rows]

    def overflows(self) -> bool:
        """Return whether more waits than the queue has room for."""
        return self.n_waiting > self.limits.queue_rows or self.waiting.n_bytes > self.limits.queue_bytes

    def take_all(self) -> list[Rows]:
        """Take everything that waits."""
        rows = [*self.waiting.take_all(), *(rows for call in self.again for rows in call.rows)]
        self.again = []
        self.replicas.reserved = None
        return rows

    def drop_ended(self) -> None:
        """Drop waiting rows of owners whose answers are no longer wanted."""
        for rows in self.waiting.take_all():
            if rows.owner.wants(self.number):
                self.waiting.push(rows)
        again, self.again = self.again, []
        self.replicas.reserved = None  # for a call that may have gone
        self.try_again(*again)

    def take_alike(self, digest: bytes | None, verdict: Verdict) -> list[Rows]:
        """Take all that waits of an input, by its digest, which has become suspected or guilty."""
        if digest is None:
            return []
        taken = []
        for rows in self.waiting.take_all():
            if rows.owner.fingerprint() == digest:
                taken.append(rows)
            else:
                self.waiting.push(rows)
        if verdict == "guilty":
            same = [call for call in self.again if call.isolated and call.rows[0].owner.fingerprint() == digest]
            self.again = [call for call in self.again if call not in same]
            taken += chain.from_iterable(call.rows for call in same)
        return taken

    # Calls

    @property
    def seconds(self) -> CallSeconds:
        """Return how long the last calls have taken."""
        return self.service_time.seconds

    def send(self, call: Call, now: float) -> None:
        """Give a call to its replica."""
        self.in_flight += len(call)
        call.sent_at = now
        if not call.probe and self.replicas.states[call.replica].standing is not Standing.PROVEN:
            call.good_row = self.known_good
        self.replicas.send(call, now)

    def take_back(self, call: Call, now: float) -> None:
        """Note that a call is at its replica no more."""
        self.in_flight -= len(call)
        self.replicas.take_back(call, now)

    def answered(self, call: Call, result: CallResult, now: float) -> None:
        """Note a call whose model answered, if only to refuse its rows."""
        self.health.succeeded(now)
        if not (call.isolated or call.probe):
            # Or sent before the first was answered: it has waited for that one.
            is_first = call.good_row is not None or self.replicas.states[call.replica].standing is Standing.NEW
            self.service_time.note(now - call.sent_at, result.compute_s or 0.0, len(call), is_first=is_first)
        if call.isolated:
            for rows in call.rows:
                self.suspects.note(rows.owner, "clear", now)

    def count(self, result: CallResult) -> None:
        """Count a call whose model answered."""
        self.calls_done += result.n_batches
        self.accepted += int(result.accepted.sum())
        self.deferred += result.n_deferred
        self.busy_s += result.compute_s or 0.0
        self.cost += float(result.costs.sum())

    def note_failed(self, reasons: Iterable[str]) -> None:
        """Count rows that end without an answer, one for each reason."""
        for reason in reasons:
            self.failed += 1
            if len(self.reasons) < MOST_REASONS or reason in self.reasons:
                self.reasons[reason] += 1

    # Replicas

    def take_facts(self, facts: ModelFacts) -> None:
        """Note whether a replica is at two calls at a time: it prepares one, or waits for its answers."""
        self.overlaps = facts.overlaps
        self.calls_at_work = 2 if facts.prepares or facts.overlaps else 1

    def add_replica(self, replica: int, now: float) -> None:
        """Take a replica that is ready."""
        self.replicas.add(replica, is_renewed=self.is_renewed)
        self.health.is_down = False
        self.health.replicas(self.replicas.n_open, now)

    def take_bad(self) -> dict[int, str]:
        """Return the replicas that were found bad since the last time, and why; they are to be replaced."""
        bad, self.bad = self.bad, {}
        return bad

    def lost_by_own_fault(self, now: float) -> None:
        """Count a replica that died or hung over a call, or was found bad."""
        self.lost_in_row += 1
        self.failing_since = now if self.failing_since is None else self.failing_since

    def works(self, call: Call, good_row: Rows | None) -> None:
        """Note that a replica works.   good_row: that the call has answered, None if only its own rows failed."""
        self.replicas.succeeded(call.replica)
        self.lost_in_row, self.failing_since = 0, None
        if self.known_good is None and good_row is not None:
            self.known_good = good_row
            self.is_renewed = self.gives_up = False
            self.n_failed_rows = 0
            self.again = [replace(call, n_unproven=0) for call in self.again]
            for state in self.replicas.states.values():
                state.n_failed = 0

    def find_bad(self, replica: int, reason: str, now: float) -> None:
        """Have a replica replaced."""
        self.replaced_at = now
        self.replicas.close(replica)
        self.bad[replica] = reason
        self.quarantined += 1
        self.lost_by_own_fault(now)

    def forget_good_row(self) -> None:
        """Forget the row to probe with, whose data is lost; replicas that waited for it take rows again."""
        self.known_good = None
        self.replicas.forgive()

    # Probes

    @property
    def probe_row(self) -> Rows | None:
        """Return the row that probes ask for: one that the stage has answered, else the last that it has refused."""
        return self.known_good or (self.refused if self.health.paused else None)

    @property
    def has_doubts(self) -> bool:
        """Return whether any replica may have to answer a probe."""
        return self.health.paused or bool(self.replicas.failing) or self.replicas.reserved is not None

    def in_doubt(self) -> list[int]:
        """Return the replicas that are probed: where the stage is paused, all of them, one at a time."""
        if not self.health.paused:
            return self.replicas.in_doubt()
        return [] if any(call.probe for call in self.replicas.calls()) else list(self.replicas.states)

    def postpone_probe(self, replica: int, due: float) -> None:
        """Have a replica's next probe wait until a time."""
        self.replicas.states[replica].probe_due = due

    def note_refused(self, rows: Rows, now: float) -> None:
        """Keep a row to probe with, as long as none is known to be good; a suspected one only if it is the first."""
        verdict = self.suspects.verdict(rows.owner, now)
        if self.known_good is None and (verdict == "clear" or (verdict == "suspected" and self.refused is None)):
            self.refused = rows.cut(1)[0]
