"""What a service learns of its candidate: the evidence of all routers added up, and the receipts of decisions."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from cauc_ray.models.pool import CanarySpec
from cauc_ray.numbers.types import Bools, Floats
from cauc_ray.policies.canary import Comparison, Evidence, Rule
from cauc_ray.serving.policies_live import Decided, InForce, Log, Member, Store

# Number of attempts to add evidence before the next period.
MOST_TRIES = 20
# Where each call has a cost of its own, a row's counts up to this many times the chain's.
COST_SPREAD = 4.0

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Compared:
    """A candidate's comparison with the incumbent.   unsent: evidence of this router that is not in the log yet."""

    rows: Comparison
    log: Log
    unsent: Evidence = field(default_factory=Evidence)


class Canary:
    """Compares the candidate with the incumbent. Rows arrive on the event loop; the rest may run in threads.

    life: of the service. There is one log of evidence for each comparison, so that all routers add to one sum.
    """

    def __init__(self, spec: CanarySpec, store: Store, life: str) -> None:
        self.rule = Rule(spec.error_rate, spec.accuracy_margin, spec.cost_margin, spec.min_rows)
        self.decides, self.is_paired = spec.decide == "auto", spec.evidence == "shadow"
        self._store, self._prefix = store, f"canary:{life}:"
        self._compared: dict[int, _Compared] = {}  # by the version in which the comparison began
        self._lock = threading.Lock()

    def answered(self, in_force: InForce, member: Member, costs: Floats) -> None:
        """Take the costs of answers, float (n,), whose policy was drawn."""
        if not self.is_paired:
            self._of(in_force).rows.costs(costs, of_candidate=member.id != in_force.id)

    def outcomes(self, in_force: InForce, policy_id: str, right: Bools) -> None:
        """Take which answers were right, bool (n,), whose policy was drawn."""
        if not self.is_paired:
            self._of(in_force).rows.outcomes(right, of_candidate=policy_id != in_force.id)

    def paired(self, in_force: InForce, right: Bools, costs: Floats) -> None:
        """Take answers of the candidate and the incumbent to the same rows, as Comparison.pairs does."""
        self._of(in_force).rows.pairs(right, costs)

    def settle(self, in_force: InForce) -> Evidence | None:
        """Add what is new of the candidate, and return what all routers have, None without one. Raises StoreError."""
        with self._lock:
            current = None if in_force.candidate is None else in_force.since
            for since in [since for since in list(self._compared) if since != current]:
                self._compared.pop(since).log.forget()
            return None if current is None else self._added(self._of(in_force))

    def receipt(
        self, decided: Decided, member: Member, before: InForce, after: InForce, why: str | None
    ) -> dict[str, Any]:
        """Return the receipt of a decision.   why: the rule, None for a change by hand. Raises StoreError."""
        compared = self.settle(before) if before.candidate is not None and before.candidate.id == member.id else None
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

    def shown(self, evidence: Evidence) -> Mapping[str, Any]:
        """Return evidence as people read it."""
        return {"accuracy_of": "agreement" if self.is_paired else "feedback", **evidence.as_json(self.rule)}

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

    def _added(self, compared: _Compared) -> Evidence:
        compared.unsent += compared.rows.take()
        total = Evidence()
        for _ in range(MOST_TRIES):
            version, content = compared.log.read() or (0, b"")
            total = Evidence.of_list(json.loads(content)) if content else Evidence()
            addition = compared.unsent
            if not addition.candidate.n + addition.candidate.n_known:
                break
            # If it is unknown whether this was written, the rows are lost rather than counted twice.
            compared.unsent = Evidence()
            if compared.log.append(version + 1, json.dumps((total + addition).to_list()).encode()):
                return total + addition
            compared.unsent = addition
        return total
