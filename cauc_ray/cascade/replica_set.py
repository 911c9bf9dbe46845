"""The replicas of a stage: the calls that each has, whether it works, and which of them takes the next call."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict, deque
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum, auto

from cauc_ray.cascade.rows import Call


class Standing(Enum):
    """What a replica's last calls have shown.

    Attributes:
        NEW: Nothing yet: its next call brings a row along that the stage has answered before.
        PROVEN: It works.
        FAILING: It failed where others did not. It takes nothing but probes until it has answered one.
        CLOSED: It takes no further calls.
    """

    NEW = auto()
    PROVEN = auto()
    FAILING = auto()
    CLOSED = auto()


@dataclass(slots=True)
class ReplicaState:
    """A replica's calls and its standing.

    Attributes:
        calls: Its calls, the one that computes first.
        busy_since: When that one could begin.
        standing: Its standing.
        failures: Calls in a row that showed that it does not work.
        probe_due: When the next probe may go out.
        n_failed: Calls that it failed while the stage had answered no row.
        is_renewed: Whether it was started in place of one that only failed.
    """

    is_renewed: bool = False
    calls: deque[Call] = field(default_factory=deque)
    busy_since: float = 0.0
    standing: Standing = Standing.NEW
    failures: int = 0
    probe_due: float = 0.0
    n_failed: int = 0

    @property
    def is_open(self) -> bool:
        """Return whether it may take further calls."""
        return self.standing is not Standing.CLOSED

    @property
    def takes_rows(self) -> bool:
        """Return whether it may take rows; an isolated call has it alone."""
        works = self.standing is Standing.NEW or self.standing is Standing.PROVEN
        return works and not (self.calls and self.calls[0].isolated)


class ReplicaSet:
    """The replicas of a stage by their numbers.

    A call costs the same however many there are: which of them have so many calls, which have any, and which have
    failed is kept, not searched for.

    Attributes:
        states: Their states.
        n_open: Replicas that take further calls.
        busy: Those that compute, the one that computes the longest first.
        failing: Those whose standing is FAILING, in the order in which they failed.
        reserved: The replica that takes no further calls until an isolated one has gone there.
    """

    def __init__(self) -> None:
        self.states: dict[int, ReplicaState] = {}
        self.n_open = 0
        self.busy: dict[int, None] = {}
        self.failing: dict[int, None] = {}
        self.reserved: int | None = None
        self._by_calls: defaultdict[int, list[int]] = defaultdict(list)

    @property
    def n_working(self) -> int:
        """Return how many take rows: those that neither hang nor have failed on a row known to be good."""
        return self.n_open - len(self.failing)

    @property
    def n_calls(self) -> int:
        """Return how many calls are under way."""
        return sum(n * len(replicas) for n, replicas in self._by_calls.items())

    def calls(self) -> list[Call]:
        """Return the calls that are under way."""
        return [call for state in self.states.values() for call in state.calls]

    def calls_at(self, replica: int) -> tuple[Call, ...]:
        """Return the calls that a replica has, the one that it must be computing first."""
        return tuple(self.states[replica].calls)

    def overdue(self, timeout_s: float, now: float) -> list[int]:
        """Return the replicas that have computed one call for longer than that."""
        return [number for number in self.busy if now - self.states[number].busy_since > timeout_s]

    # Which there are

    def add(self, replica: int, *, is_renewed: bool) -> None:
        """Take a replica that is ready."""
        self.states[replica] = ReplicaState(is_renewed)
        insort(self._by_calls[0], replica)
        self.n_open += 1

    def close(self, replica: int) -> None:
        """Send a replica no further calls."""
        self.n_open -= self.states[replica].is_open
        self._stand(replica, Standing.CLOSED)
        if self.reserved == replica:
            self.reserved = None

    def drop(self, replica: int) -> None:
        """Forget a replica."""
        self.close(replica)
        self._change_calls(replica, len(self.states.pop(replica).calls), None)
        self.busy.pop(replica, None)

    # Whether they work

    def succeeded(self, replica: int) -> None:
        """Note that a replica works."""
        self.states[replica].failures = 0
        self._stand(replica, Standing.PROVEN)

    def failed(self, replica: int) -> None:
        """Send a replica nothing but probes until it has answered one."""
        self.states[replica].failures += 1
        self._stand(replica, Standing.FAILING)

    def doubt(self, replica: int) -> None:
        """Have the next call of a replica that works bring a good row along."""
        if self.states[replica].standing is Standing.PROVEN:
            self._stand(replica, Standing.NEW)

    def forgive(self) -> None:
        """Have those that wait for a probe take rows again."""
        for replica in list(self.failing):
            self.states[replica].failures = 0
            self._stand(replica, Standing.NEW)

    def _stand(self, replica: int, standing: Standing) -> None:
        state = self.states[replica]
        if state.is_open:
            state.standing = standing
            if standing is Standing.FAILING:
                self.failing[replica] = None
            else:
                self.failing.pop(replica, None)

    # Their calls

    def send(self, call: Call, now: float) -> None:
        """Give a call to its replica."""
        state = self.states[call.replica]
        if not state.calls:
            state.busy_since = now
            self.busy[call.replica] = None
        state.calls.append(call)
        self._change_calls(call.replica, len(state.calls) - 1, len(state.calls))
        if self.reserved == call.replica and not call.probe:
            self.reserved = None

    def take_back(self, call: Call, now: float) -> None:
        """Note that a call is at its replica no more."""
        state = self.states[call.replica]
        state.calls.remove(call)
        state.busy_since = now
        del self.busy[call.replica]
        if state.calls:
            self.busy[call.replica] = None
        self._change_calls(call.replica, len(state.calls) + 1, len(state.calls))

    def _change_calls(self, replica: int, n_before: int, n_after: int | None) -> None:
        """Note how many calls a replica has; None for one that is gone."""
        with_before = self._by_calls[n_before]
        del with_before[bisect_left(with_before, replica)]
        if n_after is not None:
            insort(self._by_calls[n_after], replica)

    # Which takes what

    def has_other(self, replicas: Set[int]) -> bool:
        """Return whether there are other replicas than these that are not being replaced."""
        return any(state.is_open and number not in replicas for number, state in self.states.items())

    def in_doubt(self) -> list[int]:
        """Return the replicas that must answer a probe: they have failed, or are to take an isolated call."""
        reserved = self.reserved
        if reserved is None or self.states[reserved].standing is not Standing.NEW:
            return list(self.failing)
        return [*self.failing, reserved]

    def free(self, most_calls: int, avoided: Set[int] = frozenset()) -> int | None:
        """Return the replica with the fewest calls that may take another."""
        for n in range(most_calls):
            for number in self._by_calls[n]:
                if self.states[number].takes_rows and number != self.reserved and number not in avoided:
                    return number
        return None

    def apart(self, avoided: Set[int], *, unproven: bool) -> int | None:
        """Return a replica without calls for an isolated one; while there is none, keep one from taking more.

        unproven: whether it need not be known to work.
        """
        if self.reserved is None or self.reserved in avoided or not self.states[self.reserved].takes_rows:
            candidates = [
                (len(state.calls), number)
                for number, state in self.states.items()
                if state.takes_rows and number not in avoided
            ]
            self.reserved = min(candidates)[1] if candidates else None
        if self.reserved is None:
            return None
        state = self.states[self.reserved]
        ready = unproven or state.standing is Standing.PROVEN
        return self.reserved if ready and not state.calls else None
