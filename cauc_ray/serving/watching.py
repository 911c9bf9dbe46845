"""What a router watches of its answers: kept at once, computed with now and then, told as metrics and on request."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.reference import Answered
from cauc_ray.policies.watch import Watch, Watched
from cauc_ray.policies.watch_report import verdict, watch_report
from cauc_ray.serving.flight import Flight

# Rows that are kept between two computations; those after them are not watched. A row takes about 10 us, and so many
# say as much as all.
MOST_KEPT = 2000

logger = logging.getLogger("ray.serve")


class WatchObserver(Protocol):
    """Who is told what has been watched."""

    def watched(self, watched: Watched) -> None:
        """Take what has been seen since the policy came into force."""


@dataclass(frozen=True, slots=True)
class WatchedHere:
    """What one router has seen of a policy's answers; None where there is nothing to compare them with."""

    policy_id: str
    watched: Watched | None


@dataclass(slots=True)
class _Kept:
    """The watch of one policy, and what came since it last computed.   held: whether it did then."""

    policy_id: str
    watch: Watch | None
    answers: deque[Answered] = field(default_factory=deque)
    outcomes: deque[tuple[Ints, Floats, Bools]] = field(default_factory=deque)
    agreements: deque[tuple[Ints, Bools]] = field(default_factory=deque)
    n_rows: int = 0
    held: bool = True


class Watching:
    """Watches the policy in force. What comes, comes on the loop; begin() and settle() may run in threads."""

    def __init__(self, policy: Policy, policy_id: str, observer: WatchObserver, n_routers: int) -> None:
        """Begin.   n_routers: the most that there may be, which share the rate of false alarms."""
        self._observer, self._n_routers = observer, n_routers
        self._settling = threading.Lock()
        self.begin(policy, policy_id)

    def begin(self, policy: Policy, policy_id: str) -> None:
        """Watch another policy, from no row on."""
        watch = None if policy.reference is None else Watch(policy, self._n_routers)
        self._kept = _Kept(policy_id, watch)

    def answered(self, flight: Flight, policy_id: str) -> None:
        """Keep a request's answers, unless they are another policy's, or not those that it would have given."""
        kept = self._of(policy_id)
        if kept is None or kept.n_rows >= MOST_KEPT or flight.capped:
            return
        if flight.policy.reference is None:  # it came before the same policy was given one, and lacks what is compared
            return
        answered = Answered(flight.stages, flight.predictions, flight.likeliest, flight.confidences, flight.costs)
        kept.answers.append(answered.at(~flight.degraded) if flight.degraded.any() else answered)
        kept.n_rows += flight.n

    def outcomes(self, policy_id: str, stages: Ints, confidences: Floats, correct: Bools) -> None:
        """Keep what became known of answers, as Watch.add_outcomes takes it."""
        kept = self._of(policy_id)
        if kept is not None:
            kept.outcomes.append((stages, confidences, correct))

    def agreements(self, policy_id: str, stages: Ints, agreed: Bools) -> None:
        """Keep whether answers were the whole cascade's, as Watch.add_agreements takes it."""
        kept = self._of(policy_id)
        if kept is not None:
            kept.agreements.append((stages, agreed))

    def settle(self) -> WatchedHere:
        """Compute with all that was kept, tell what is found, and return it."""
        with self._settling:
            kept = self._kept
            if kept.watch is None:
                return WatchedHere(kept.policy_id, None)
            answers = _taken(kept.answers)
            kept.n_rows = 0
            if answers:
                kept.watch.add(_joined(answers))
            for outcomes in _taken(kept.outcomes):
                kept.watch.add_outcomes(*outcomes)
            for agreements in _taken(kept.agreements):
                kept.watch.add_agreements(*agreements)
            watched = kept.watch.watched()
            self._observer.watched(watched)
            if kept.held and not watched.holds:
                logger.warning(f"policy {kept.policy_id} {verdict(watched)}")
            kept.held = watched.holds
            return WatchedHere(kept.policy_id, watched)

    def _of(self, policy_id: str) -> _Kept | None:
        """Return the watch of a policy, None where there is none."""
        kept = self._kept
        return kept if kept.watch is not None and kept.policy_id == policy_id else None


def report_of(policy: Policy, policy_id: str, routers: Sequence[WatchedHere]) -> dict[str, Any]:
    """Return as JSON has it what routers have seen of the policy in force; holds is null where it has no reference."""
    seen = [one.watched for one in routers if one.policy_id == policy_id and one.watched is not None]
    if policy.reference is None or not seen:
        says = "is not watched: at this threshold or budget there is nothing to compare answers with"
        return {"policy_id": policy_id, "holds": None, "says": says, "routers": 0}
    return {**watch_report(policy, Watched.merged(seen)), "routers": len(seen)}


def _taken(kept: deque[Any]) -> list[Any]:
    """Take out what is there now; more may come meanwhile."""
    return [kept.popleft() for _ in range(len(kept))]


def _joined(parts: Sequence[Answered]) -> Answered:
    def whole(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    return Answered(whole("stages"), whole("predictions"), whole("likeliest"), whole("confidences"), whole("costs"))
