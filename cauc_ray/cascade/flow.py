"""The way of rows: which owners are open, the stages that their rows wait for, and their ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from cauc_ray.cascade.allowance import Allowance
from cauc_ray.cascade.blame import guilty
from cauc_ray.cascade.deadlines import Deadlines
from cauc_ray.cascade.patience import Patience
from cauc_ray.cascade.rows import Call, CallResult, Ended, Owner, Positions, Rows, Trouble
from cauc_ray.cascade.stage import Stage
from cauc_ray.cascade.suspects import Verdict
from cauc_ray.numbers.types import Bools, Ints

# The most restarts of an owner whose objects are lost with their nodes.
RESTARTS = 5
LIMITED = "the pool's limits of deferral or money are reached"


class RowFlow:
    """The rows in progress, which wait for stages, go on to others, and end. It forms no calls.

    Attributes:
        done: Owners whose last row is done.
        lost: Owners that must be read again.
        open: Owners with rows in progress.
        n_open: Rows in progress.
        has_leavers: Whether owners have left whose rows may still wait.
        deadlines: Of the owners at their stages.
    """

    def __init__(self, stages: list[Stage], patience: Patience, allowance: Allowance | None = None) -> None:
        """Take the stages, the rules of when one has too much to do, and the limits of deferral, None without any."""
        self.done: list[Owner] = []
        self.lost: list[Owner] = []
        self.open: set[Owner] = set()
        self.n_open = 0
        self.has_leavers = False
        self.deadlines = Deadlines()
        self._stages, self._patience, self._allowance = stages, patience, allowance

    # Owners

    def add(self, owner: Owner) -> None:
        """Take an owner, none of whose rows waits yet."""
        self.open.add(owner)
        self.n_open += owner.n

    def cancel(self, owner: Owner) -> None:
        """Forget an owner whose answers are no longer wanted."""
        owner.live = False
        if owner in self.open:
            self.has_leavers = True
            self._close(owner)

    def restart(self, at: Stage, owner: Owner, reason: str) -> None:
        """Have an owner read again whose rows are lost at a stage; fail what is left of it after too many times."""
        self.cancel(owner)
        if owner.restarts < RESTARTS:
            self.lost.append(owner)
            return
        # Whatever waits of it may be lost too, and what was answered stays.
        left = np.flatnonzero(owner.at >= 0)
        owner.left_out(left, at.number, "error", reason)
        at.note_failed([reason] * len(left))
        self.done.append(owner)

    def end(self, owner: Owner, n: int) -> None:
        """Count rows of an owner that need nothing more."""
        owner.n_left -= n
        self.n_open -= n
        if not owner.n_left and owner in self.open:
            self._close(owner)
            self.done.append(owner)

    def _close(self, owner: Owner) -> None:
        self.open.discard(owner)
        self.n_open -= owner.n_left
        owner.n_left = 0

    # Waiting and deferral

    def spread(self, rows: Rows, stages: int | Ints, now: float, sender: Stage | None = None) -> None:
        """Have rows wait, each for its stage, or all for one.   sender: the stage that they come from."""
        rows.owner.at[rows.indices] = stages
        pieces = {stages: rows} if isinstance(stages, int) else _by_stage(rows, stages)
        for stage, piece in pieces.items():
            if sender is not None:
                piece = self._within_limits(self._stages[stage], piece)
                sender.sent[stage] += len(piece)
            if len(piece):
                self._wait(self._stages[stage], piece, now)

    def _within_limits(self, at: Stage, rows: Rows) -> Rows:
        """Return those of a stage's deferred rows that may go to another; the others end here."""
        if self._allowance is None:
            return rows
        admitted = self._allowance.admitted(rows, at.number, self._stages)
        if admitted.all():
            return rows
        self.leave_out(at, [rows.part(~admitted)], self._allowance.trouble, LIMITED)
        return rows.part(admitted)

    def advance(self, call: Call, result: CallResult, answered: Bools, goes_on: Any, now: float) -> None:
        """Note the answers of a call, and have deferred rows wait for the next stage.   answered: bool (n,)."""
        carried = answered & ~result.accepted if result.carried is None else result.carried
        held_at = np.cumsum(carried) - 1  # where goes_on has each row that it holds
        ended, is_whole = Ended(call.stage, result, goes_on, held_at, now), bool(answered.all())
        positions: Positions
        for rows, positions in call.pieces():
            if not rows.owner.wants(call.stage):
                continue
            if not is_whole:
                mask = answered[positions]
                rows, positions = rows.part(mask), np.flatnonzero(mask) + positions.start
            if self._allowance is not None:
                n_first = int(np.count_nonzero(rows.owner.visited[rows.indices] == 0))
                self._allowance.note(n_first, self._stages)
            on = rows.owner.note(ended, rows, positions)
            n_on = int(np.count_nonzero(on))
            rows.owner.at[rows.indices[~on]] = -1
            self.end(rows.owner, len(rows) - n_on)
            if n_on:
                row_bytes = rows.row_bytes - rows.state_bytes + result.state_bytes
                at = held_at[positions][on]
                onward = Rows(rows.owner, rows.indices[on], goes_on, at, now, row_bytes, result.state_bytes)
                to = call.stage + 1 if result.next is None else result.next[positions][on]
                self.spread(onward, to, now, sender=self._stages[call.stage])

    def _wait(self, at: Stage, rows: Rows, now: float) -> None:
        """Have rows wait for a stage that takes them, at most until they expire."""
        owner = rows.owner
        if at.number in owner.closed:  # others of its rows have waited too long there
            self.leave_out(at, [rows], "timeout", late(at, owner))
            return
        self.deadlines.add(owner, at.number, min(now + at.limits.timeout_s, owner.deadline))
        verdict = at.suspects.verdict(owner, now)
        if (refusal := self._refusal(at, rows, verdict, now)) is not None:
            self.leave_out(at, [rows], *refusal)
            return
        if verdict == "clear":
            at.waiting.push(rows)
        else:
            at.set_apart(rows, now)
        if at.overflows():
            surplus = at.waiting.take_surplus(owner.priority, at.overflows)
            self.leave_out(at, surplus, "overloaded", _overloaded(at))

    def _refusal(self, at: Stage, rows: Rows, verdict: Verdict, now: float) -> tuple[Trouble, str] | None:
        """Return why a stage takes no rows now, None where it does."""
        if (why := at.health.why_not(now)) is not None:
            is_probe = at.health.paused and at.probe_row is None and not at.in_work  # the first one
            if not (is_probe and at.replicas.n_open):
                if not at.health.is_down:
                    at.note_refused(rows, now)
                return "down", at.because(why, " is down")
        if verdict == "guilty":
            return "refused", guilty(at)
        return ("overloaded", _overloaded(at)) if self._patience.overloaded(at, rows, now) else None

    # Rows that end without an answer

    def leave_out(self, at: Stage, pieces: Iterable[Rows], trouble: Trouble, reason: str) -> None:
        """Note rows that a stage will not answer, but those that were left out before, while they were at a replica."""
        for rows in pieces:
            owner, live, mask = rows.owner, rows.owner.live, rows.owner.at[rows.indices] == at.number
            if not (live and mask.any()):
                continue
            indices = rows.indices[mask]
            n_degraded = owner.left_out(indices, at.number, trouble, reason)
            at.degraded += n_degraded
            at.note_failed([reason] * (len(indices) - n_degraded))
            if owner.live:
                self.end(owner, len(indices))
            else:  # all of it is refused
                self.cancel(owner)

    def leave_stage(self, at: Stage, owner: Owner, trouble: Trouble, reason: str) -> None:
        """Give up all rows of an owner that wait for a stage or are at it."""
        if not owner.wants(at.number):
            return
        indices = np.flatnonzero(owner.at == at.number)
        self.leave_out(at, [Rows(owner, indices, None, indices, 0.0, 0.0)], trouble, reason)
        owner.closed.add(at.number)
        self.has_leavers = True

    def drop_leavers(self) -> None:
        """Drop what waits of all owners that have left since the last time."""
        if self.has_leavers:
            self.has_leavers = False
            for at in self._stages:
                at.drop_ended()


def late(at: Stage, owner: Owner) -> str:
    """Return why rows are given up that have waited too long for a stage."""
    within = "the request's timeout" if owner.hurries else f"{at.limits.timeout_s:g} s"
    return f"stage {at.limits.name!r} has not answered within {within}"


def _overloaded(at: Stage) -> str:
    return f"stage {at.limits.name!r} is overloaded"


def _by_stage(rows: Rows, stages: Ints) -> dict[int, Rows]:
    return {stage: rows.part(stages == stage) for stage in np.unique(stages).tolist()}
