"""How long rows wait, and how often they are tried: without limit in a run, until a deadline in a service."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import TypeAlias

from cauc_ray.cascade.fates import Again, CountFailure, Failure, Fate, GiveUp
from cauc_ray.cascade.rows import Call, Rows
from cauc_ray.cascade.stage import MOST_WAIT, PROBE_PAUSE_S, Stage

# One call computes and one waits in each replica, so that none idles between two of them; more wait where calls are
# so short that a result's way to the controller and back takes longer.
CALLS_PER_REPLICA = 2
SHORT_CALL_S = 0.005
SHORT_CALLS_PER_REPLICA = 5
# Where a batch takes less than this, a call has several: the way there and back costs more than a millisecond of CPU.
LONG_CALL_S = 0.02

# A row that fails by itself is tried so often, with a growing pause before each further time.
TRIES = 3
PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
# Until a stage has answered a row, it is unknown whether its rows or its replicas are at fault. Rows are then tried so
# often at least, and a replica that fails so many calls is replaced by a new one. Where so many rows fail, and so many
# calls of a new one, the stage cannot work.
EXHAUSTED = 2 * TRIES
ROWS_TO_GIVE_UP = 32
CALLS_TO_GIVE_UP = 8

# So many replicas are asked for rows of requests that replicas could not answer.
MOST_ATTEMPTS = 3
# Where calls are long, it is known better than by MOST_WAIT what is likely to come too late.
MOST_WAIT_OF_LONG = 0.9
# Of calls that compute for longer, the next one is sent so long before its replica is free; of others at once.
LONG_S, AHEAD_S = 1.0, 0.1
# Calls that take so many times what their model computes wait for more than the one before.
CROWDED = 2.5


class RunPatience:
    """A run has rows wait while queues are full, and tries again.

    Attributes:
        holds_back: A stage whose queue is full holds those before it back.
    """

    holds_back = True

    def expects_more(self) -> bool:
        """Expect nothing but what is being read."""
        return False

    def overloaded(self, at: Stage, rows: Rows, now: float) -> bool:
        """Take rows, whose number is bounded where they come from."""
        return False

    def most_calls(self, at: Stage) -> int:
        """Return how many calls a replica may have."""
        short = at.calls_done and at.busy_s * self._batches_per_call(at) < SHORT_CALL_S * at.calls_done
        return SHORT_CALLS_PER_REPLICA if short else CALLS_PER_REPLICA

    def due_at(self, at: Stage, replica: int) -> float:
        """Have a free replica wait for nothing but rows."""
        return -inf

    def batch_rows(self, at: Stage, replica: int, now: float, *, more_can_come: bool) -> int:
        """Return how many rows a batch for a replica takes now, 0 if it is better to wait."""
        full, n_rows = at.limits.batch_size, at.waiting.n_rows
        share = -(-n_rows // at.replicas.n_open)
        most = full * self._batches_per_call(at)
        if not more_can_come:
            # The last rows are shared out, so that no replica has a full batch while others idle.
            return min(most, max(share, full // 4, 1))
        if n_rows >= full:
            return min(most, max(share // full, 1) * full)
        waited = now - at.waiting.first.ready_at >= at.limits.batch_wait_s
        return full if waited or not at.has_room else 0

    def _batches_per_call(self, at: Stage) -> int:
        """Return how many batches a call may have: one where the next call is prepared while it is answered."""
        most = at.limits.batches_per_call
        if most == 1 or not at.calls_done or at.calls_at_work > 1:
            return 1
        batch_s = max(at.busy_s, 1e-9) / at.calls_done
        return max(1, min(most, int(LONG_CALL_S / batch_s)))

    def failed(
        self, at: Stage, call: Call, failure: Failure, reason: str, now: float, *, more_can_come: bool
    ) -> Iterator[Fate]:
        """Try rows again in smaller and smaller calls, and give up those that fail by themselves."""
        match failure:
            case "replica":
                yield Again(call.again(now))
            case _ if at.known_good is None:
                yield self._unproven(at, call, reason, now, more_can_come=more_can_come)
            case "named":  # the model answers others
                yield GiveUp(call.rows, "refused", reason)
            case _ if len(call) > 1:
                yield from (Again(call.again(now, rows=half)) for half in call.halves())
            case _:
                yield elsewhere(call, reason, now)

    def _unproven(self, at: Stage, call: Call, reason: str, now: float, *, more_can_come: bool) -> Fate:
        """Decide on rows that failed while the stage has never answered any: the cause is unknown.

        Each replica that only failed is replaced once. Rows are given up where all rows of the stage have failed again
        and again, on new replicas, too, and no more can come.
        """
        states = at.replicas.states
        state, n_unproven = states[call.replica], call.n_unproven + 1
        state.n_failed += 1
        at.n_failed_rows += len(call) if n_unproven == 1 else 0
        enough = at.n_failed_rows >= ROWS_TO_GIVE_UP
        at.waiting.look_elsewhere()
        # Calls that a bad replica still had under way give no new information.
        if state.is_open and all(one.n_failed for one in states.values() if one.is_open):
            often = state.n_failed >= CALLS_TO_GIVE_UP
            if not state.is_renewed and (often or n_unproven >= TRIES):
                at.is_renewed = True
                at.find_bad(call.replica, f"it failed every row: {reason}", now)
            else:
                at.gives_up = enough and often
                open_calls = (*at.again, *at.replicas.calls())
                may_succeed = at.waiting.n_rows or any(one.n_unproven < EXHAUSTED for one in open_calls)
                if n_unproven >= EXHAUSTED and not (enough or more_can_come or may_succeed):
                    for one in at.again:
                        one.due = now  # the next ones to be given up
                    return GiveUp(call.rows, "refused", reason)
        steps = n_unproven - 1 if n_unproven >= EXHAUSTED else (n_unproven - 1) % TRIES
        pause_s = min(PAUSE_S * 2 ** min(steps, 10), LONGEST_PAUSE_S)
        return Again(call.again(now + pause_s, n_unproven=n_unproven))


def elsewhere(call: Call, reason: str, now: float) -> Fate:
    """Try a row again that failed by itself, on other replicas and after a pause, or give it up."""
    failed_on = (*call.failed_on, call.replica)
    if len(failed_on) >= TRIES:
        return GiveUp(call.rows, "refused", reason)
    return Again(call.again(now + PAUSE_S * 2 ** len(call.failed_on), failed_on=failed_on))


class RequestPatience:
    """A service refuses rows, or cuts them short, rather than have them wait beyond their deadlines.

    A batch that is not full goes to a replica that is free, or just in time for one that will be, so that rows can join
    it until then. What a stage cannot answer in time is refused as it comes.

    Attributes:
        holds_back: A stage whose queue is full refuses rows.
    """

    holds_back = False

    def __init__(self, expects_more: Callable[[], bool]) -> None:
        """Take the predictor of whether requests are likely to come soon."""
        self._expects_more = expects_more

    def expects_more(self) -> bool:
        """Return whether requests are likely to come soon."""
        return self._expects_more()

    def overloaded(self, at: Stage, rows: Rows, now: float) -> bool:
        """Return whether rows find a full queue, or would be answered too late."""
        limits = at.limits
        n_rows, n_bytes, n_pieces = at.waiting.ahead_of(rows.owner.priority)
        n_again = at.n_waiting - at.waiting.n_rows
        too_many = n_rows + n_again + len(rows) > limits.queue_rows
        too_large = n_bytes > 0 and n_bytes + rows.n_bytes > limits.queue_bytes
        most_wait = MOST_WAIT_OF_LONG if at.seconds.compute_s > LONG_S else MOST_WAIT
        wait_s = _wait_s(at, len(rows), n_rows + n_again, n_pieces + len(at.again), now)
        return too_many or too_large or wait_s > most_wait * limits.timeout_s

    def most_calls(self, at: Stage) -> int:
        """Return how many calls a replica may have."""
        # Where other routers' calls wait there too, rows are better kept here, where more can join them.
        return 1 if at.seconds.call_s > CROWDED * at.seconds.compute_s > 0 else CALLS_PER_REPLICA

    def due_at(self, at: Stage, replica: int) -> float:
        """Return when a replica takes a batch that is not full, if no row can join it."""
        return max(_needed_at(at, replica), _staggered_at(at))

    def batch_rows(self, at: Stage, replica: int, now: float, *, more_can_come: bool) -> int:
        """Return how many rows a batch for a replica takes now, 0 if it is better to wait."""
        full = at.limits.batch_size
        if at.waiting.n_rows >= full and (now >= _needed_at(at, replica) or 0 < at.seconds.compute_s < LONG_S):
            return full
        if now < self.due_at(at, replica):
            return 0
        return 0 if more_can_come and now < at.waiting.first.ready_at + at.limits.batch_wait_s else full

    def failed(
        self, at: Stage, call: Call, failure: Failure, reason: str, now: float, *, more_can_come: bool
    ) -> Iterator[Fate]:
        """Ask another replica, if there is one and it may help; else give the rows up, and count against the stage."""
        costly = _is_costly(at, call, now)
        match failure:
            case "raised" if not call.failed_on and at.replicas.has_other({call.replica}):
                yield Again(call.again(now, failed_on=(call.replica,)))
            case "named" | "raised":
                for rows in call.rows:
                    prefix = f"row {rows.indices[0]}: " if rows.owner.n > 1 else ""
                    yield GiveUp([rows], "refused", f"{prefix}{reason} (stage {at.limits.name!r})")
            case "error":
                yield CountFailure(reason, call.rows, for_good=costly)
                for piece in call.by_owner():
                    if call.attempt < MOST_ATTEMPTS and not at.health.paused:
                        yield Again(call.again(now, rows=piece))
                    else:
                        yield GiveUp(piece, "error", at.because(reason))
            case _:
                tried = {*call.failed_on, call.replica}
                has_other = len(tried) < MOST_ATTEMPTS and at.replicas.has_other(tried)
                # With a good row, the only replica finds out whether it is broken.
                finds_out = failure == "unknown" and not call.failed_on and at.known_good is not None
                at.replicas.doubt(call.replica)
                # Another replica would ask the same server in vain.
                if failure != "stage" and (has_other or finds_out) and not at.health.paused:
                    yield Again(call.again(now, failed_on=(*call.failed_on, call.replica)))
                    return
                # If no replica has ever answered such rows, the inputs may be at fault.
                if costly or failure != "unknown":
                    yield CountFailure(reason, call.rows, for_good=costly)
                yield GiveUp(call.rows, "error", at.because(reason))


def _is_costly(at: Stage, call: Call, now: float) -> bool:
    """Return whether a failed call has taken so long, while no other was answered, that a probe is to go next."""
    return at.limits.degrades and at.health.succeeded_at < call.sent_at <= now - PROBE_PAUSE_S


def _wait_s(at: Stage, n: int, n_ahead: int, n_pieces: int, now: float) -> float:
    """Return in how many seconds n rows that come now are likely to be answered; 0 if at once, or not known yet.

    n_ahead: rows that go before them, in so many pieces.
    """
    replicas, batch_size = at.replicas, at.limits.batch_size
    sent_at = [replicas.states[number].calls[0].sent_at for number in replicas.busy]
    long_s = at.seconds.long_call_s
    n_replicas, n_calls = max(1, replicas.n_working), replicas.n_calls
    n_free = max(0, n_replicas - n_calls)
    # Of a longer request only so much goes before these.
    n_before = min(n_ahead, n_pieces * max(n, batch_size))
    n_batches = n_before / batch_size - n_free
    if n_free and n_batches <= 0:
        return 0.0
    if not long_s:  # a model's first call may take a hundred times as long as the next: it says nothing of these
        return now - min(sent_at, default=now)
    left_s = 0.0 if n_free or not sent_at else max(0.0, min(sent_at) + long_s - now)
    if at.seconds.compute_s > LONG_S:  # what is under way is known to end then
        return left_s + long_s * (1 + int(n_batches) / n_replicas)
    # Where more calls than replicas are under way at once, one of them ends so often.
    return left_s + long_s * (1 + n_batches / max(n_replicas, n_calls))


def _needed_at(at: Stage, replica: int) -> float:
    """Return when a replica will have use for a batch that is not full."""
    state, compute_s = at.replicas.states[replica], at.seconds.compute_s
    if not state.calls or (at.overlaps and len(state.calls) < at.calls_at_work):
        return 0.0
    # Rows that wait here can join a batch, be refused, or go to another replica.
    return state.busy_since + max(compute_s - AHEAD_S, 0.9 * compute_s) if compute_s else inf


def _staggered_at(at: Stage) -> float:
    """Return when the next batch that is not full should begin.

    Where calls are long and there are more rows than replicas, replicas begin one after the other: rows then wait
    for a share of a call, not for a whole one.
    """
    replicas, call_s = at.replicas, at.seconds.long_call_s
    n_working, n_rows = replicas.n_working, at.waiting.n_rows + at.in_flight
    if call_s < LONG_S or n_working < 2 or n_rows <= n_working or not replicas.busy:
        return 0.0
    return max(replicas.states[number].busy_since for number in replicas.busy) + call_s / n_working


# The rules of waiting and trying again.
Patience: TypeAlias = RunPatience | RequestPatience
