"""Whose fault it is that a replica ends or hangs.

The rows of a call during which one ended are suspected: from then on they go in isolated calls, until they are
answered, or have ended a replica again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import Literal, TypeAlias

from cauc_ray.cascade.fates import Again, CountFailure, Fate, GiveUp
from cauc_ray.cascade.patience import MOST_ATTEMPTS, elsewhere
from cauc_ray.cascade.rows import Call, Owner, Rows
from cauc_ray.cascade.stage import FAILURES_TO_REPLACE, PROBE_PAUSE_S, Stage
from cauc_ray.cascade.suspects import VerdictReached

# Who may be at fault: a row, so that the other rows of its block are answered, or an owner's whole input.
Unit: TypeAlias = Literal["row", "input"]

# A call that takes more than this share of its rows' time, and so many times as long as others, may hang.
OVERDUE, OVERDUE_CALLS = 0.5, 4.0
# An isolated call that has computed for less than this does not hang.
HANGS_S = 1.0
# Suspected rows wait for this share of their time where others wait for the only replica; where there are several,
# those that may hang wait until two of them work, or for so much. Those that may end the last one never go there.
HOLD, HOLD_FOR_OTHERS = 0.35, 0.75
# A bad replica is replaced only so long after the last one where no other answers: then it may be the stage.
REPLACE_PAUSE_S = 30.0


class Blame:
    """The rules of blame. A run looks for rows, and risks any replica for them; a service for inputs.

    An input is convicted by its digest. In a stage of several replicas it is never risked on the last one that works.
    """

    def __init__(self, unit: Unit) -> None:
        """Take who may be at fault."""
        self._unit = unit

    # Replicas

    def broken(self, at: Stage, call: Call, reason: str, now: float) -> None:
        """Note that a replica failed on a row that the stage has answered before; replace it if it does so again."""
        state = at.replicas.states[call.replica]
        at.replicas.failed(call.replica)
        if state.failures < FAILURES_TO_REPLACE or not state.is_open:
            return
        if self._unit == "input" and at.replicas.n_open < 2 and now - at.replaced_at <= REPLACE_PAUSE_S:
            state.probe_due = now + PROBE_PAUSE_S  # kept for now, but it need not be asked at once
        else:
            at.find_bad(call.replica, f"it failed a row that others answered: {reason}", now)

    def overdue_at(self, at: Stage, replica: int) -> float | None:
        """Return when the call that a replica computes may be taken to hang, None where that is not known."""
        state = at.replicas.states[replica]
        if state.calls[0].isolated or state.calls[0].probe or not at.seconds.call_s:
            return None
        return state.busy_since + _longest_s(at)

    def hanging(self, at: Stage, now: float) -> Iterator[int]:
        """Yield the replicas that have begun to hang, where others work."""
        for number in list(at.replicas.busy):
            overdue_at = self.overdue_at(at, number)
            if overdue_at is not None and now >= overdue_at and at.replicas.n_working > 1:
                yield number

    # Risks

    def may_risk(self, at: Stage, call: Call, now: float) -> bool:
        """Return whether a replica may have an isolated call now."""
        if self._unit == "row":
            return True
        n_at_risk = sum(one.isolated for one in at.replicas.calls())
        if at.replicas.n_working - n_at_risk >= 2:  # one is left for the others
            return True
        others_wait = at.health.most_replicas > 1 or at.waiting.n_rows or at.in_flight
        return not (n_at_risk or (now < self.risked_at(at, call) and others_wait))

    def risked_at(self, at: Stage, call: Call) -> float:
        """Return when the last replica may be risked for suspected rows."""
        if self._unit == "row" or at.replicas.n_working >= 2 or call.suspected_at is None:
            return -inf
        has_others = at.health.most_replicas > 1
        if has_others and call.deadly:
            return inf
        since = max(call.suspected_at, min(rows.ready_at for rows in call.rows))
        left_s = min(rows.owner.deadline for rows in call.rows) - since
        return since + (HOLD_FOR_OTHERS if has_others else HOLD) * min(left_s, at.limits.timeout_s)

    # Rows

    def ended(self, at: Stage, call: Call, reason: str, now: float) -> Iterator[Fate]:
        """Decide on a call that a replica computed when it ended or was given up: that may be its rows' doing."""
        if not call.isolated:
            yield from self.suspected(at, call, now, deadly=True)
            return
        at.deaths += 1  # many may be killed at once for no fault of a call
        owners, began = call.by_owner(), call.began_at is not None
        if self._unit == "row" and len(call) == 1:
            yield elsewhere(call, reason, now)
        elif self._unit == "row":
            yield from (Again(call.again(now, rows=half)) for half in call.halves())
        elif len(owners) > 1:  # now each alone
            yield from (Again(call.again(now, rows=rows)) for rows in owners)
        elif began and at.health.succeeded_at > (call.suspected_at or now):
            yield self._convicted(at, call.rows[0], now)
            yield GiveUp(call.rows, "refused", at.because(f"{reason} twice while it had this input"))
        elif call.attempt > MOST_ATTEMPTS + (0 if began else 2):
            yield CountFailure("replicas end")  # others have not been answered either: it may be the stage
            yield GiveUp(call.rows, "error", at.because(reason))
        else:
            yield Again(call.again(now))

    def suspected(self, at: Stage, call: Call, now: float, *, deadly: bool) -> Iterator[Fate]:
        """Have the rows of a call answered in isolated calls, as soon as possible.

        Most inputs only shared the call with what ended the replica, if anything did: they go to all replicas but one
        at the same time, in as many calls, and each owner's alone if one of these ends its replica too.

        Args:
            at: The stage.
            call: During which a replica ended, or may hang.
            now: The time.
            deadly: Whether the replica ended.
        """
        if self._unit == "row":
            yield Again(call.again(now, isolated=True))
            return
        owners = [rows for rows in call.by_owner() if rows[0].owner.wants(at.number)]
        n_free = at.replicas.n_working - 1
        n_calls = min(len(owners), n_free) if n_free > 1 else len(owners)
        for first in range(n_calls):
            together = [rows for pieces in owners[first::n_calls] for rows in pieces]
            yield Again(call.again(now, rows=together, isolated=True, suspected_at=now, deadly=deadly))
        for rows, *_ in owners:
            if at.suspects.verdict(rows.owner, now) == "clear":
                at.suspects.note(rows.owner, "suspected", now, deadly=deadly)
                self._set_apart(at, rows.owner.fingerprint(), now)

    def late(self, at: Stage, owner: Owner, now: float) -> Iterator[Fate]:
        """Refuse an input that hangs in an isolated call, and suspect the rows of a call that may hang."""
        for call in at.replicas.calls():
            rows = next((rows for rows in call.rows if rows.owner is owner), None)
            if rows is None or call.probe:
                continue
            longest_s = max(HANGS_S, 10 * at.seconds.compute_s)
            hangs = call.isolated and call.began_at is not None and now - call.began_at > longest_s
            if hangs and len(call.by_owner()) == 1:
                yield self._convicted(at, rows, now)
            may_hang = not call.isolated and now - call.sent_at >= _longest_s(at)
            if may_hang and at.suspects.verdict(owner, now) == "clear":
                at.suspects.note(owner, "suspected", now, deadly=False)

    def learn(self, at: Stage, news: VerdictReached, now: float) -> Iterator[Fate]:
        """Take a verdict of another router."""
        at.suspects.learn(news.digest, news.verdict, now, deadly=news.deadly)
        if news.verdict == "guilty":
            yield self._refusal(at, at.take_alike(news.digest, "guilty"))
        elif news.verdict == "suspected":
            self._set_apart(at, news.digest, now)

    def _convicted(self, at: Stage, rows: Rows, now: float) -> Fate:
        """Refuse the input of rows that have ended or hung a replica in an isolated call, wherever it waits."""
        at.suspects.note(rows.owner, "guilty", now)
        return self._refusal(at, at.take_alike(rows.owner.fingerprint(), "guilty"))

    def _refusal(self, at: Stage, rows: Sequence[Rows]) -> Fate:
        return GiveUp(rows, "refused", guilty(at))

    def _set_apart(self, at: Stage, digest: bytes | None, now: float) -> None:
        for rows in at.take_alike(digest, "suspected"):
            at.set_apart(rows, now)


def guilty(at: Stage) -> str:
    """Return why a stage refuses an input that is guilty."""
    return f"this input has ended or hung replicas of stage {at.limits.name!r}"


def _longest_s(at: Stage) -> float:
    return max(OVERDUE * at.limits.timeout_s, OVERDUE_CALLS * at.seconds.call_s)
