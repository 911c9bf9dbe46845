"""A router's monitoring of the active policy by its answers and feedback on them, evaluated at intervals."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from cauc_ray.numbers.types import Bools, Ints
from cauc_ray.policies.monitor import DriftEvidence, Watch, Watched, verdict, watch_report
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import Answered
from cauc_ray.serving.feedback import Feedback
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.observers.service_metrics import ServingMetrics
from cauc_ray.serving.policies_live import InForce
from cauc_ray.serving.request_state import RequestState
from cauc_ray.serving.stored import Log

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
class _Asked:
    """A request that is watched.

    Attributes:
        n: Number of rows.
        answers: The answers, and which rows were cut short, bool (n,); None before they have arrived.
        is_over: Whether the request has ended.
    """

    n: int
    answers: tuple[Answered, Bools] | None = None
    is_over: bool = False


@dataclass(slots=True)
class _PolicyWatch:
    """The watch of one policy, and the answers and labels since it last computed.

    Attributes:
        policy_id: Id of the policy.
        digest: Digest of the policy with its reference.
        watch: The watch; None without a reference.
        asked: Requests in their order.
        open: Those that have not ended, by their number.
        more: Calls of the watch's methods that are due, with their arguments.
        n_asked: Rows that have arrived; one thread counts them.
        n_taken: Rows that were taken from `asked`; another thread counts them.
        held: Whether the policy was valid when the watch last computed.
    """

    policy_id: str
    digest: str
    watch: Watch | None
    asked: deque[_Asked] = field(default_factory=deque)
    open: dict[int, _Asked] = field(default_factory=dict)
    more: deque[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=deque)
    n_asked: int = 0
    n_taken: int = 0
    held: bool = True

    def take(self) -> list[tuple[Answered, Bools]]:
        """Take the answers to the requests before the first one that is not answered yet."""
        taken = []
        while self.asked and self.asked[0].is_over:
            one = self.asked.popleft()
            self.n_taken += one.n
            if one.answers is not None:
                taken.append(one.answers)
        return taken


class DriftWatch(Observer):
    """Watches the active policy. on_policies() and evaluate() may run in threads.

    Args:
        in_force: The policies.
        metrics: Metrics of the service.
        n_routers: The most that there may be, which share the rate of false alarms.
        alarms: What has raised an alarm about the policy, for all routers and those to come.
    """

    def __init__(self, in_force: InForce, metrics: ServingMetrics, n_routers: int, alarms: Log) -> None:
        self._metrics, self._n_routers, self._alarms = metrics, n_routers, alarms
        self._settling = threading.Lock()
        self._watch = _PolicyWatch("", "", None)
        self.on_policies(in_force)

    def on_policies(self, in_force: InForce) -> None:
        """Watch another policy, from no row on; go on with the same one."""
        content = json.dumps(in_force.policy.model_dump(mode="json"), sort_keys=True)
        digest = hashlib.sha256(content.encode()).hexdigest()[:16]
        if digest != self._watch.digest:
            watch = None if in_force.policy.reference is None else Watch(in_force.policy, self._n_routers)
            self._watch = _PolicyWatch(in_force.id, digest, watch)

    def on_request(self, request: RequestState) -> None:
        """Take a request's place in the order.

        Answers are compared in the order in which they were asked for: while a stage hangs, those of the stages before
        it come first, and would look like a drift.
        """
        monitored = None if request.question is None else self._of(request.question.member.id)
        if monitored is not None and monitored.n_asked - monitored.n_taken < MOST_KEPT:
            asked = monitored.open[request.number] = _Asked(request.n)
            monitored.asked.append(asked)
            monitored.n_asked += request.n

    def on_answer(self, request: RequestState) -> None:
        """Keep a request's answers if the policy was to give them, and has what they are compared with."""
        if (asked := self._watch.open.pop(request.number, None)) is None:
            return
        if request.is_answered and not request.capped:
            answers = Answered(
                request.predictions, request.confidences, request.stages, request.costs, request.likeliest
            )
            asked.answers = answers, request.degraded
        asked.is_over = True

    def on_feedback(self, rows: Feedback, in_force: InForce) -> int | None:
        """Keep what became known of answers that the policy gave by itself."""
        monitored = self._of(rows.policy_id)
        if monitored is None or rows.policy_id != in_force.id:
            return None
        counted = rows.given_by(in_force.policy)
        monitored.more.append((Watch.add_outcomes, (counted.stages, counted.confidences, counted.correct)))
        return len(counted)

    def agreements(self, policy_id: str, stages: Ints, agreed: Bools) -> None:
        """Keep whether answers were the whole cascade's, as Watch.add_agreements takes it."""
        if (monitored := self._of(policy_id)) is not None:
            monitored.more.append((Watch.add_agreements, (stages, agreed)))

    async def settle(self) -> None:
        """Evaluate in a thread."""
        await asyncio.to_thread(self.evaluate)

    def evaluate(self) -> WatchedHere:
        """Evaluate all stored rows, report the result and return it."""
        with self._settling:
            monitored = self._watch
            if monitored.watch is None:
                self._latched(monitored, {})
                return WatchedHere(monitored.policy_id, None)
            if answers := monitored.take():
                answered, cut_short = zip(*answers, strict=True)
                monitored.watch.add(Answered.joined(answered), np.concatenate(cut_short))
            for _ in range(len(monitored.more)):  # more may come meanwhile
                add, arguments = monitored.more.popleft()
                add(monitored.watch, *arguments)
            watched = monitored.watch.watched()
            watched = Watched(watched.stages, self._latched(monitored, watched.evidence))
            self._metrics.watched(watched)
            if monitored.held and not watched.valid:
                logger.warning(f"policy {monitored.policy_id} {verdict(watched)}")
            monitored.held = watched.valid
            return WatchedHere(monitored.policy_id, watched)

    def _latched(self, monitored: _PolicyWatch, evidence: Mapping[str, DriftEvidence]) -> Mapping[str, DriftEvidence]:
        """Return evidence with what has ever spoken against the policy in any router, and keep what is new of that.

        What is kept of another policy is dropped: it has been replaced.
        """

        def latched_of(content: Any) -> dict[str, Any]:
            of_policy = content is not None and content["policy"] == monitored.digest
            return content["evidence"] if of_policy else {}

        def changed(version: int, content: Any) -> dict[str, Any] | None:
            before = latched_of(content)
            new = {name: asdict(one) for name, one in evidence.items() if not (one.valid or name in before)}
            is_replaced = content is not None and content["policy"] != monitored.digest
            return {"policy": monitored.digest, "evidence": before | new} if new or is_replaced else None

        latched = latched_of(self._alarms.update(changed))
        return {
            name: replace(one, log10=max(one.log10, of["log10"]), at=of["at"], since=of["since"])
            if one.valid and (of := latched.get(name)) is not None
            else one
            for name, one in evidence.items()
        }

    def _of(self, policy_id: str) -> _PolicyWatch | None:
        """Return the watch of a policy, None where there is none."""
        monitored = self._watch
        return monitored if monitored.watch is not None and monitored.policy_id == policy_id else None


def report_of(policy: Policy, policy_id: str, routers: Sequence[WatchedHere]) -> dict[str, Any]:
    """Return the routers' monitoring of the active policy as JSON; holds is null without a reference."""
    seen = [one.watched for one in routers if one.policy_id == policy_id and one.watched is not None]
    if policy.reference is None or not seen:
        verdict_text = "is not watched: at this threshold or budget it has no reference to compare answers with"
        return {"policy_id": policy_id, "valid": None, "verdict": verdict_text, "routers": 0}
    return {**watch_report(policy, Watched.merged(seen)), "routers": len(seen)}
