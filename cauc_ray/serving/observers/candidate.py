"""What a service learns of its candidate: the evidence of all routers added up, and the receipts of decisions."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cauc_ray.models.pool import CanarySpec
from cauc_ray.numbers.promotion import Comparison, Decision, PromotionEvidence, Rule, decision
from cauc_ray.serving.feedback import Feedback
from cauc_ray.serving.observer import Observer
from cauc_ray.serving.observers.shadow_sample import ShadowSample
from cauc_ray.serving.policies_live import Decided, InForce, Member
from cauc_ray.serving.request_state import RequestState
from cauc_ray.serving.stored import Log, OvertakenError, Store, StoreError

# Where each call has a cost of its own, a row's counts up to this many times the chain's.
COST_SPREAD = 4.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Compared:
    """A candidate's comparison with the incumbent.

    Attributes:
        rows: Turns rows into evidence.
        log: Evidence of all routers.
        unsent: Evidence of this router that is not in the log yet.
    """

    rows: Comparison
    log: Log
    unsent: PromotionEvidence = field(default_factory=PromotionEvidence)


class Canary(Observer):
    """Compares the candidate with the incumbent, and has it promoted or rolled back.

    Args:
        spec: The rule.
        store: Where all routers add to one log of evidence for each comparison.
        life: Id of the service's life.
        shadows: Has rows answered by both policies.
        in_force: Returns the policies.
        decide: Promotes or rolls back for a reason, if these policies are still active.
    """

    def __init__(
        self,
        spec: CanarySpec,
        store: Store,
        life: str,
        shadows: ShadowSample,
        in_force: Callable[[], InForce],
        decide: Callable[[Decision, str, InForce], Awaitable[object]],
    ) -> None:
        self.rule = Rule(spec.error_rate, spec.accuracy_margin, spec.cost_margin, spec.min_rows)
        self._decides, self._is_paired = spec.decide == "auto", spec.evidence == "shadow"
        self._store, self._prefix = store, f"canary:{life}:"
        self._shadows, self._in_force, self._decide = shadows, in_force, decide
        self._compared: dict[int, _Compared] = {}  # by the version in which the comparison began
        self._lock = threading.Lock()

    def on_answer(self, request: RequestState) -> None:
        """Take the costs of an answer whose policy was drawn, or have shadow answers of both policies compared."""
        question = request.question
        if question is None or not question.drawn or not request.is_answered:
            return
        in_force, candidate = question.in_force, question.in_force.candidate
        if not self._is_paired:
            self._of(in_force).rows.costs(request.costs, of_candidate=question.member.id != in_force.id)
        elif candidate is not None:
            key = self._shadows.cascade.key
            pair = {key(policy): policy for policy in (candidate.policy, in_force.policy)}
            self._shadows.pair(pair, request, self._of(in_force).rows.pairs)

    def on_feedback(self, rows: Feedback, in_force: InForce) -> int | None:
        """Take which answers were right whose policy was drawn, also those that a fault cut short."""
        if in_force.candidate is None or not rows.was_drawn or in_force.member(rows.policy_id) is None:
            return None
        if not self._is_paired:
            self._of(in_force).rows.outcomes(rows.correct, of_candidate=rows.policy_id != in_force.id)
        return len(rows)

    async def settle(self) -> None:
        """Add up the evidence; promote the candidate or roll it back where that decides and the pool lets it."""
        in_force = self._in_force()
        try:
            evidence = await asyncio.to_thread(self.evidence, in_force)
        except StoreError as error:
            logger.warning(f"the evidence on the candidate cannot be stored: {error}")
            return
        decided = None if evidence is None else decision(evidence, self.rule)
        if decided is not None and self._decides:
            await self._decide(*decided, in_force)

    def evidence(self, in_force: InForce) -> PromotionEvidence | None:
        """Add what is new of the candidate, and return what all routers have, None without one. Raises StoreError."""
        with self._lock:
            current = None if in_force.candidate is None else in_force.since
            for since in [since for since in list(self._compared) if since != current]:
                self._compared.pop(since).log.forget()
            return None if current is None else self._added(self._of(in_force))

    def receipt(
        self, decided: Decided, member: Member, before: InForce, after: InForce, why: str | None
    ) -> dict[str, Any]:
        """Return the receipt of a decision; why is the rule, None for a manual change. Raises StoreError."""
        compared = self.evidence(before) if before.candidate is not None and before.candidate.id == member.id else None
        return {
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "version": after.version,
            "decision": decided,
            "policy_id": member.id,
            "incumbent": before.id,
            "shares": after.shares,
            "by": "hand" if why is None else "rule",
            "rule": why,
            "evidence": None if compared is None else self.shown(compared),
        }

    def shown(self, evidence: PromotionEvidence) -> Mapping[str, Any]:
        """Return evidence in readable form."""
        return {"accuracy_of": "agreement" if self._is_paired else "feedback", **evidence.as_json(self.rule)}

    def _of(self, in_force: InForce) -> _Compared:
        if (compared := self._compared.get(in_force.since)) is None:
            assert in_force.candidate is not None
            policies = (in_force.policy, in_force.candidate.policy)
            highest = max(sum(stage.cost for stage in policy.stages) for policy in policies)
            if any(policy.costs == "per-call" for policy in policies):
                highest *= COST_SPREAD
            compared = _Compared(Comparison(self.rule, highest), Log(self._store, f"{self._prefix}{in_force.since}:"))
            compared = self._compared.setdefault(in_force.since, compared)
        return compared

    def _added(self, compared: _Compared) -> PromotionEvidence:
        compared.unsent += compared.rows.take()
        addition = compared.unsent

        def added(version: int, content: Any) -> list[Any] | None:
            if not addition.candidate.n + addition.candidate.n_known:
                return None
            # If it is unknown whether this was written, the rows are lost rather than counted twice.
            compared.unsent = PromotionEvidence()
            return (_evidence_of(content) + addition).to_list()

        try:
            total = compared.log.update(added)
        except OvertakenError:
            compared.unsent = addition
            raise
        return _evidence_of(total)


def _evidence_of(content: Any) -> PromotionEvidence:
    return PromotionEvidence() if content is None else PromotionEvidence.of_list(content)
