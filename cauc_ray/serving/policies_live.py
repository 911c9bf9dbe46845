"""The policies of a service and their shares: changed while it runs, version by version, stored for new replicas."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cauc_ray.errors import PolicyError, explain
from cauc_ray.policies.policy import Policy

# Decisions whose receipts are kept.
MOST_RECEIPTS = 50
# A log keeps this many entries that have a successor: no writer is as far behind.
_KEPT_ENTRIES = 100

# What became of policies: all requests go to one, a candidate gets a share, or another one, or ends.
Decided: TypeAlias = Literal["set", "start", "share", "promote", "rollback"]


class StoreError(Exception):
    """What keeps the values does not answer."""


class Store(ABC):
    """Small values that all replicas of a service see. Every method may block for a moment, and raises StoreError."""

    @abstractmethod
    def get(self, key: str) -> bytes | None:
        """Return a value, None where there is none."""

    @abstractmethod
    def put(self, key: str, value: bytes, *, overwrite: bool = True) -> bool:
        """Set a value; without overwrite only where there is none: of several at once one does, and returns True."""

    @abstractmethod
    def delete(self, key: str, *, by_prefix: bool = False) -> None:
        """Delete a value if it is there, or all whose keys begin so."""


class PolicyChange(BaseModel):
    """What to change: a policy (the content of its file), and a threshold or a budget for it.

    Without a policy, the threshold or budget is for the active one; with neither, the policy is used unchanged.
    share: of the requests: the policy is a candidate, and the active one has the rest; by itself it is another share
    for a candidate, which ends at 0. promote: a candidate has all requests.   rollback: it ends.
    candidate: which one, by its id; the only one without it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
    policy: dict[str, Any] | None = None
    threshold: float | None = None
    budget: float | None = None
    share: Annotated[float, Field(ge=0, lt=1)] | None = None
    promote: bool = False
    rollback: bool = False
    candidate: str | None = None

    @classmethod
    def of(cls, content: Any) -> PolicyChange:
        """Read a change. Raises PolicyError in one line."""
        try:
            change = cls.model_validate(content)
        except ValidationError as error:
            raise PolicyError(f"invalid change of policy: {explain(error)}") from error
        if change.threshold is not None and change.budget is not None:
            raise PolicyError("give a budget or a threshold, not both: a budget chooses the threshold")
        if change.gives_policy + (change.share is not None) == 0 == change.promote + change.rollback:
            raise PolicyError("give a policy, a threshold or a budget; or a share, promote or rollback for a candidate")
        alone = change.promote or change.rollback
        if alone and (change.promote == change.rollback or change.gives_policy or change.share is not None):
            raise PolicyError("promote and rollback decide on a candidate: give one of them and no other change")
        if change.candidate is not None and change.gives_policy:
            raise PolicyError("candidate names one that is there; leave it out for a new policy")
        return change

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
    for model, fitted, given in zip(policy.models, policy.logit_kinds, current.logit_kinds, strict=True):
        if None not in (fitted, given) and fitted != given:
            raise PolicyError(
                f"the policy was fitted on logits of kind {fitted!r} for {model!r}; the service's are {given!r}"
            )


@dataclass(frozen=True, slots=True)
class Member:
    """A policy that answers a share of the requests.   since: the version in which its comparison began."""

    policy: Policy
    id: str
    share: float
    since: int


@dataclass(frozen=True, slots=True)
class InForce:
    """The policies of a service, the whole state of a version: the incumbent, which has the rest, and candidates.

    receipts: of the last decisions, by rising version.
    """

    members: tuple[Member, ...]
    version: int = 0
    receipts: tuple[Mapping[str, Any], ...] = ()

    @classmethod
    def of(cls, policy: Policy, version: int = 0, candidates: Sequence[tuple[Policy, float]] = ()) -> InForce:
        """Return policies at the start, candidates with their shares. Raises PolicyError if they do not fit."""
        members = [Member(each, each.id, share, version) for each, share in ((policy, 1.0), *candidates)]
        return cls(_shared(tuple(members)), version)

    @property
    def policy(self) -> Policy:
        """Return the incumbent."""
        return self.members[0].policy

    @property
    def id(self) -> str:
        """Return the incumbent's id."""
        return self.members[0].id

    @property
    def candidates(self) -> tuple[Member, ...]:
        """Return the others."""
        return self.members[1:]

    @property
    def shares(self) -> dict[str, float]:
        """Return the policies' shares by id, the incumbent first."""
        return {member.id: member.share for member in self.members}

    def member(self, policy_id: str) -> Member | None:
        """Return a policy by its id, None if it is not active."""
        return next((member for member in self.members if member.id == policy_id), None)

    def drawn(self, at: float) -> Member:
        """Return the policy of a request.   at: in [0, 1), at random."""
        for member in self.candidates:
            if at < member.share:
                return member
            at -= member.share
        return self.members[0]

    def drawn_for(self, session: str) -> Member:
        """Return the policy of all requests of a session, as long as the candidates are the same."""
        key = ":".join([*(f"{member.since}{member.id}" for member in self.members), session])
        return self.drawn(int.from_bytes(blake2b(key.encode(), digest_size=6).digest()) / 2**48)

    def after(self, change: PolicyChange) -> tuple[InForce, Decided, Member]:
        """Return the next version, without a receipt; what was decided, and on which policy.

        A policy without a share ends all candidates. Raises PolicyError or BudgetError.
        """
        incumbent, candidates, version = self.members[0], self.candidates, self.version + 1
        if change.gives_policy:
            policy = change.applied(incumbent.policy)
            own = Member(policy, policy.id, change.share or 1.0, version)
            if change.share is None:
                return InForce((own,), version, self.receipts), "set", own
            known = self.member(own.id)
        else:
            known = self._candidate(change.candidate)
        others = tuple(member for member in candidates if known is None or member.id != known.id)
        if change.promote:
            assert known is not None
            members = (known, *(replace(member, since=version) for member in others))
            return InForce(_shared(members), version, self.receipts), "promote", known
        if change.rollback or change.share == 0:
            if known is None or known is incumbent:
                raise PolicyError("there is no such candidate to end")
            return InForce(_shared((incumbent, *others)), version, self.receipts), "rollback", known
        assert change.share is not None
        own = own if known is None else replace(known, share=change.share)
        members = _shared((incumbent, *others, own))
        return InForce(members, version, self.receipts), "start" if known is None else "share", own

    def _candidate(self, policy_id: str | None) -> Member:
        """Return a candidate by its id, the only one without it. Raises PolicyError."""
        named = [member for member in self.candidates if policy_id in (None, member.id)]
        if len(named) != 1:
            there = ", ".join(member.id for member in self.candidates) or "none"
            raise PolicyError(f"name the candidate, one of: {there}; got {policy_id or 'no id'}")
        return named[0]

    def to_bytes(self) -> bytes:
        """Return the version as it is stored."""
        members = [[member.policy.packed(), member.share, member.since] for member in self.members]
        return json.dumps({"members": members, "receipts": self.receipts}).encode()

    @classmethod
    def of_bytes(cls, version: int, raw: bytes) -> InForce:
        """Return the version that to_bytes has stored."""
        content = json.loads(raw)
        policies = [(Policy.of(policy), share, since) for policy, share, since in content["members"]]
        members = tuple(Member(policy, policy.id, share, since) for policy, share, since in policies)
        return cls(members, version, tuple(content["receipts"]))


def _shared(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return policies with the incumbent, the first, at the rest of the shares. Raises PolicyError."""
    incumbent, *candidates = members
    rest = 1.0 - sum(member.share for member in candidates)
    if not 0 < rest <= 1:
        raise PolicyError(f"candidates have {1 - rest:g} of the requests together; leave some for the active policy")
    for member in candidates:
        require_same_chain(member.policy, incumbent.policy)
    ids = [member.id for member in members]
    if (twice := next((one for one in ids if ids.count(one) > 1), None)) is not None:
        raise PolicyError(f"policy {twice} is there already: it gives the same answers")
    return (replace(incumbent, share=rest), *candidates)


class Log:
    """An append-only log that all replicas of a service read, version by version.

    A version is written once and by one writer, so that a writer who did not know of the newest one finds its position
    taken: no change is lost, whoever dies when. Of versions that have a successor an empty entry stays for a while.
    prefix: of its keys; a later life of the service has another one.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix
        # How many versions have been written, at least: where a replica that starts, or was away, begins to read.
        self._hint = f"{prefix}newest"
        self._last: tuple[int, bytes] | None = None

    def read(self) -> tuple[int, bytes] | None:
        """Return the newest version and its content, None where there is none yet. Blocks for calls to the store."""
        hint = int(self._store.get(self._hint) or 0)
        # The hint is of an entry that may itself be the newest.
        version = max(self._last[0] if self._last is not None else 0, hint - 1)
        while (raw := self._store.get(f"{self._prefix}{version + 1}")) is not None:
            version += 1
            if raw:
                self._last = version, raw
        return self._last

    def append(self, version: int, content: bytes) -> bool:
        """Write a version, the one after read()'s; return False where another writer has. Blocks like read()."""
        if not self._store.put(f"{self._prefix}{version}", content, overwrite=False):
            return False
        with suppress(StoreError):  # it is active now, even if the clean-up fails
            self._store.put(self._hint, str(version).encode())
            if version > 1:
                self._store.put(f"{self._prefix}{version - 1}", b"")
            self._store.delete(f"{self._prefix}{version - _KEPT_ENTRIES}")
        return True

    def forget(self) -> None:
        """Delete all of it: nobody reads it any more."""
        self._store.delete(self._prefix, by_prefix=True)
