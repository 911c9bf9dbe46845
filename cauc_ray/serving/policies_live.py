"""The policies of a service and their shares: changed while it runs, version by version, stored for new replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from cauc_ray.errors import CaucError, PolicyError, explain
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.stored import StoreError

# The version of the service as a whole, as other servers number their only one; the others are its policies.
WHOLE = "1"
# Decisions whose receipts are kept.
MOST_RECEIPTS = 50

# What became of policies: all requests go to one, a candidate begins, gets another share, wins or ends.
Decided: TypeAlias = Literal["set", "start", "share", "promote", "rollback"]


class PolicyChange(BaseModel):
    """What to change: a policy (the content of its file), and a threshold or a budget for it.

    Without a policy, the threshold or budget is for the active one; with neither, the policy is used unchanged.

    Attributes:
        policy: Content of a policy file.
        threshold: A threshold for the policy.
        budget: A budget that chooses the policy's threshold.
        share: Share of the requests: the policy is the candidate, and the active one has the rest. By itself it is
            another share for the candidate, which ends at 0.
        promote: The candidate has all requests.
        rollback: The candidate ends.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
    policy: dict[str, Any] | None = None
    threshold: float | None = None
    budget: float | None = None
    share: Annotated[float, Field(ge=0, lt=1)] | None = None
    promote: bool = False
    rollback: bool = False

    @classmethod
    def of(cls, content: Any) -> PolicyChange:
        """Read a change. Raises PolicyError in one line."""
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            raise PolicyError(f"invalid change of policy: {explain(error)}") from error

    @model_validator(mode="after")
    def _require_one(self) -> Self:
        if self.threshold is not None and self.budget is not None:
            raise ValueError("give a budget or a threshold, not both: a budget chooses the threshold")
        changes = (self.gives_policy or self.share is not None, self.promote, self.rollback)
        if sum(changes) != 1:
            raise ValueError(
                "give one change: a policy, a threshold or a budget, each with a share for a candidate; or a share, "
                "promote or rollback for the candidate"
            )
        return self

    @property
    def gives_policy(self) -> bool:
        """Return whether the change is to another policy, not only of a candidate that is there."""
        return not (self.policy is None and self.threshold is None and self.budget is None)

    def applied(self, current: Policy) -> Policy:
        """Return the policy after the change. Raises PolicyError or BudgetError."""
        policy = current if self.policy is None else Policy.of(self.policy)
        require_same_chain(policy, current)
        if self.threshold is not None:
            return policy.with_threshold(self.threshold)
        return policy if self.budget is None else policy.with_budget(self.budget)


def require_same_chain(policy: Policy, current: Policy) -> None:
    """Raise PolicyError unless a policy is for the very chain that runs."""
    if policy.models != current.models:
        raise PolicyError(f"the policy is for {', '.join(policy.models)}; the service runs {', '.join(current.models)}")
    if policy.cost_unit != current.cost_unit:
        raise PolicyError(f"the policy has costs in {policy.cost_unit}; the service has costs in {current.cost_unit}")
    for model, fitted, served in zip(policy.models, policy.logit_kinds, current.logit_kinds, strict=True):
        if fitted != served:
            raise PolicyError(
                f"the policy was fitted on logits of kind {fitted!r} for {model!r}; the service's are {served!r}"
            )


@dataclass(frozen=True, slots=True)
class Member:
    """A policy that answers requests, and its id."""

    policy: Policy
    id: str

    @classmethod
    def of(cls, policy: Policy) -> Member:
        """Return a policy with its id."""
        return cls(policy, policy.id)


@dataclass(frozen=True, slots=True)
class InForce:
    """The policies of a service, the whole state of a version.

    Attributes:
        incumbent: The policy that has the requests which the candidate has not.
        candidate: The policy that is compared with it.
        share: The candidate's share of the requests.
        since: The version in which the comparison began.
        version: The number of changes so far.
        receipts: Receipts of the last decisions, by rising version.
    """

    incumbent: Member
    candidate: Member | None = None
    share: float = 0.0
    since: int = 0
    version: int = 0
    receipts: tuple[Mapping[str, Any], ...] = ()

    @property
    def policy(self) -> Policy:
        """Return the incumbent's policy."""
        return self.incumbent.policy

    @property
    def id(self) -> str:
        """Return the incumbent's id."""
        return self.incumbent.id

    @property
    def shares(self) -> dict[str, float]:
        """Return the policies' shares by id, the incumbent first."""
        rest = {} if self.candidate is None else {self.candidate.id: self.share}
        return {self.id: 1.0 - self.share, **rest}

    def member(self, policy_id: str) -> Member | None:
        """Return a policy by its id, None if it is not active."""
        members = (self.incumbent, self.candidate)
        return next((member for member in members if member is not None and member.id == policy_id), None)

    def drawn(self, at: float) -> Member:
        """Return the policy of a request by a random number in [0, 1)."""
        return self.incumbent if self.candidate is None or at >= self.share else self.candidate

    def drawn_for(self, session: str) -> Member:
        """Return the policy of all requests of a session, as long as the candidate is the same."""
        key = f"{self.since}:{session}"
        return self.drawn(int.from_bytes(blake2b(key.encode(), digest_size=6).digest()) / 2**48)

    def with_candidate(self, policy: Policy, share: float) -> InForce:
        """Return the policies with a candidate in place of any earlier one. Raises PolicyError if it does not fit."""
        require_same_chain(policy, self.policy)
        candidate = Member.of(policy)
        if candidate.id == self.id:
            raise PolicyError(f"policy {candidate.id} is in force already: the candidate gives the same answers")
        since = self.since if self.candidate is not None and candidate.id == self.candidate.id else self.version
        return replace(self, candidate=candidate, share=share, since=since)

    def after(self, change: PolicyChange) -> tuple[InForce, Decided, Member]:
        """Return the next version, without a receipt; what was decided, and on which policy.

        Raises PolicyError or BudgetError.
        """
        following = replace(self, version=self.version + 1)
        alone = replace(following, candidate=None, share=0.0)
        if change.gives_policy and change.share is None:
            member = Member.of(change.applied(self.policy))
            return replace(alone, incumbent=member), "set", member
        if change.gives_policy and change.share:
            following = following.with_candidate(change.applied(self.policy), change.share)
            assert following.candidate is not None
            return following, "start" if following.since == following.version else "share", following.candidate
        if change.gives_policy or self.candidate is None:
            raise PolicyError("there is no such candidate: start one with a policy, threshold or budget and a share")
        if change.promote:
            return replace(alone, incumbent=self.candidate), "promote", self.candidate
        if change.share:
            return replace(following, share=change.share), "share", self.candidate
        return alone, "rollback", self.candidate

    def as_json(self) -> dict[str, Any]:
        """Return the version as it is stored."""
        candidate = None if self.candidate is None else self.candidate.policy.packed()
        content = {"incumbent": self.policy.packed(), "candidate": candidate, "share": self.share, "since": self.since}
        return {**content, "receipts": self.receipts}

    @classmethod
    def of_json(cls, version: int, content: Any) -> InForce:
        """Return the version that was stored as as_json has it. Raises StoreError for a damaged one."""
        try:
            candidate = None if content["candidate"] is None else Member.of(Policy.of(content["candidate"]))
            incumbent, receipts = Member.of(Policy.of(content["incumbent"])), tuple(content["receipts"])
            return cls(incumbent, candidate, content["share"], content["since"], version, receipts)
        except (KeyError, TypeError, CaucError) as error:
            raise StoreError(f"version {version} of the policies is damaged: {error}") from error
