"""A router's monitoring of its answers: stored at once, evaluated at intervals, reported as metrics and on request."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.monitor import Evidence, Watch, Watched, verdict, watch_report
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import Answered
from cauc_ray.serving.documents import WatchReport
from cauc_ray.serving.metrics import ServingMetrics
from cauc_ray.serving.request_state import RequestState
from cauc_ray.serving.store import Store

# Rows that are kept between two computations; those after them are not watched. A row takes about 10 us, and this
# many are enough.
MOST_KEPT = 2000

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WatchedHere:
    """What one router has seen of a policy's answers; None where there is nothing to compare them with."""

    policy_id: str
    watched: Watched | None


@dataclass(slots=True)
class _Kept:
    """The watch of one policy, and what came since it last computed.   held: whether it did then.

    digest: of the policy with its reference.
    """

    policy_id: str
    digest: str
    watch: Watch | None
    answers: deque[Answered] = field(default_factory=deque)
    outcomes: deque[tuple[Ints, Floats, Bools]] = field(default_factory=deque)
    agreements: deque[tuple[Ints, Bools]] = field(default_factory=deque)
    n_rows: int = 0
    held: bool = True


class Watching:
    """Watches the active policy. Rows arrive on the event loop; begin() and settle() may run in threads."""

    def __init__(
        self, policy: Policy, policy_id: str, metrics: ServingMetrics, n_routers: int, alarms: Store | None = None
    ) -> None:
        """Begin.

        n_routers: the most that there may be, which share the rate of false alarms.   alarms: where it is kept what
        speaks against the policy, for all routers and those to come.
        """
        self._metrics, self._n_routers, self._alarms = metrics, n_routers, alarms
        self._settling = threading.Lock()
        self.begin(policy, policy_id)

    def begin(self, policy: Policy, policy_id: str) -> None:
        """Watch another policy, from no row on."""
        watch = None if policy.reference is None else Watch(policy, self._n_routers)
        self._kept = _Kept(policy_id, _digest(policy), watch)

    def answered(self, request: RequestState, policy_id: str) -> None:
        """Keep a request's answers, unless they are another policy's, or not those that it would have given."""
        kept = self._of(policy_id)
        if kept is None or kept.n_rows >= MOST_KEPT or request.capped:
            return
        if request.policy.reference is None:  # it came before the same policy was given one, and lacks what is compared
            return
        answered = Answered(request.predictions, request.confidences, request.stages, request.costs, request.likeliest)
        kept.answers.append(answered.of_rows(~request.degraded) if np.count_nonzero(request.degraded) else answered)
        kept.n_rows += request.n

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
        """Evaluate all stored rows, report the result and return it."""
        with self._settling:
            kept = self._kept
            if kept.watch is None:
                self._latched(kept, {})
                return WatchedHere(kept.policy_id, None)
            answers = _taken(kept.answers)
            kept.n_rows = 0
            if answers:
                kept.watch.add(Answered.joined(answers))
            for outcomes in _taken(kept.outcomes):
                kept.watch.add_outcomes(*outcomes)
            for agreements in _taken(kept.agreements):
                kept.watch.add_agreements(*agreements)
            watched = kept.watch.watched()
            watched = Watched(watched.stages, self._latched(kept, watched.evidence))
            self._metrics.watched(watched)
            if kept.held and not watched.holds:
                logger.warning(f"policy {kept.policy_id} {verdict(watched)}")
            kept.held = watched.holds
            return WatchedHere(kept.policy_id, watched)

    def _latched(self, kept: _Kept, evidence: Mapping[str, Evidence]) -> Mapping[str, Evidence]:
        """Return evidence with what has ever spoken against the policy in any router, and keep what is new of that.

        What is kept of another policy is dropped: it has been replaced.
        """
        if self._alarms is None:
            return evidence
        content = json.loads(self._alarms.get("of") or b"null")
        known = content["evidence"] if content is not None and content["policy"] == kept.digest else {}
        ours = {name: asdict(one) for name, one in evidence.items() if not one.holds and name not in known}
        if ours:
            self._alarms.put("of", json.dumps({"policy": kept.digest, "evidence": {**known, **ours}}).encode())
        elif content is not None and not known:
            self._alarms.delete("of")
        return {name: _with(one, known[name]) if name in known else one for name, one in evidence.items()}

    def _of(self, policy_id: str) -> _Kept | None:
        """Return the watch of a policy, None where there is none."""
        kept = self._kept
        return kept if kept.watch is not None and kept.policy_id == policy_id else None


def _with(evidence: Evidence, kept: Mapping[str, Any]) -> Evidence:
    """Return evidence with a known alarm: its time and strength."""
    if not evidence.holds:
        return evidence
    return replace(evidence, log10=max(evidence.log10, kept["log10"]), at=kept["at"], since=kept["since"])


def report_of(policy: Policy, policy_id: str, routers: Sequence[WatchedHere]) -> WatchReport:
    """Return the routers' monitoring of the active policy as JSON; holds is null without a reference."""
    seen = [one.watched for one in routers if one.policy_id == policy_id and one.watched is not None]
    if policy.reference is None or not seen:
        says = "is not watched: at this threshold or budget it has no reference to compare answers with"
        return WatchReport(policy_id=policy_id, holds=None, says=says, routers=0)
    report: WatchReport = {**watch_report(policy, Watched.merged(seen)), "routers": len(seen)}  # type: ignore[typeddict-item]
    return report


def _digest(policy: Policy) -> str:
    """Return a digest of a policy, its reference included."""
    content = json.dumps(policy.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _taken(kept: deque[Any]) -> list[Any]:
    """Take out what is there now; more may come meanwhile."""
    return [kept.popleft() for _ in range(len(kept))]
