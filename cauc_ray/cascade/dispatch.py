"""Which call of a stage goes out next, to which replica, and when something is due if none can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import replace
from math import inf

from cauc_ray.cascade.blame import OVERDUE_CALLS, Blame
from cauc_ray.cascade.patience import Patience
from cauc_ray.cascade.rows import Call
from cauc_ray.cascade.stage import Stage

# A probe is given up after so many seconds, or several times what calls usually take.
PROBE_S = 2.0


class Dispatch:
    """Forms the calls of stages by the rules of waiting and of blame."""

    def __init__(self, patience: Patience, blame: Blame, more_can_come: Callable[[int], bool]) -> None:
        """Take the rules, and what tells whether rows may still be added to those that wait for a stage."""
        self._patience, self._blame, self._more_can_come = patience, blame, more_can_come

    def next_call(self, at: Stage, now: float) -> Call | None:
        """Return a call that can go out now, or None."""
        call = self._again(at, now, first=True) if at.again else None
        if call is None and at.has_doubts:
            call = self._probe(at, now)
        if call is None and at.waiting.n_rows and (replica := self.free_replica(at)) is not None:
            n = self._patience.batch_rows(at, replica, now, more_can_come=self._more_can_come(at.number))
            call = Call(at.number, at.waiting.take(n), now, replica=replica) if n else None
        if call is None and at.again:
            call = self._again(at, now, first=False)
        if call is not None:
            at.send(call, now)
        return call

    def free_replica(self, at: Stage, avoided: Set[int] = frozenset()) -> int | None:
        """Return the replica with the fewest calls that may take another."""
        return at.replicas.free(self._patience.most_calls(at), avoided)

    def is_late_probe(self, at: Stage, call: Call, now: float) -> bool:
        """Return whether a call is a probe that has not been answered in time."""
        return call.probe and now >= call.sent_at + _probe_s(at)

    def wait_s(self, at: Stage, now: float) -> float | None:
        """Return the seconds until something can go or a call may hang, None if nothing waits for time."""
        soonest = min((due for due in self._due(at, now) if due > now), default=inf)
        return soonest - now if soonest < inf else None

    def _due(self, at: Stage, now: float) -> Iterator[float]:
        """Yield the times at which something may change."""
        if at.has_doubts:
            yield from (at.replicas.states[number].probe_due for number in at.in_doubt())
        for call in at.again:
            yield call.due
            if call.isolated:
                yield self._blame.risked_at(at, call)
        if at.waiting.n_rows and (replica := self.free_replica(at)) is not None:
            yield self._patience.due_at(at, replica)
            yield at.waiting.first.ready_at + at.limits.batch_wait_s
        if at.limits.timeout_s < inf:
            yield from (call.sent_at + _probe_s(at) for call in at.replicas.calls() if call.probe)
            for number in at.replicas.busy:
                overdue_at = self._blame.overdue_at(at, number)
                if overdue_at is not None and overdue_at > now:
                    yield overdue_at
                    break  # the others have begun later

    def _again(self, at: Stage, now: float, *, first: bool) -> Call | None:
        """Take a call that is tried again.   first: one that goes before rows which were never tried.

        While the stage has never answered any, those that failed go last: rows from elsewhere are more informative than
        others of the same kind.
        """
        for position, call in enumerate(at.again):
            is_first = at.known_good is not None or not call.n_unproven
            if call.due > now or is_first is not first:
                continue
            avoided = _avoided(at, call)
            if not call.isolated:
                replica = self.free_replica(at, avoided)
            elif self._blame.may_risk(at, call, now):
                replica = at.replicas.apart(avoided, unproven=at.known_good is None)
            else:
                continue
            if replica is not None:
                del at.again[position]
                call.replica = replica
                return call
        return None

    def _probe(self, at: Stage, now: float) -> Call | None:
        """Return a probe for an idle replica in doubt."""
        if (row := at.probe_row) is None:
            return None
        for number in at.in_doubt():
            state = at.replicas.states[number]
            if state.is_open and not state.calls and state.probe_due <= now:
                return Call(at.number, [replace(row, ready_at=now)], now, probe=True, replica=number)
        return None


def _avoided(at: Stage, call: Call) -> Set[int]:
    """Return the replicas on which a call already failed, unless no other is there."""
    if not call.failed_on and not call.n_unproven:
        return frozenset()
    failed_on = set(call.failed_on)
    if call.n_unproven:
        failed_on |= {number for number, state in at.replicas.states.items() if state.n_failed}
    return failed_on if at.replicas.has_other(failed_on) else frozenset()


def _probe_s(at: Stage) -> float:
    """Return how long a probe is waited for: as long as for any call while it is not known how long these take."""
    call_s, timeout_s = at.seconds.long_call_s, at.limits.timeout_s
    return min(timeout_s, max(PROBE_S, OVERDUE_CALLS * call_s)) if call_s else timeout_s
