"""The active policy: changed while a service runs, version by version, and stored for new replicas."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cauc_ray.errors import PolicyError, explain
from cauc_ray.policies.policy import Policy


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
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
    policy: dict[str, Any] | None = None
    threshold: float | None = None
    budget: float | None = None

    @classmethod
    def of(cls, content: Any) -> PolicyChange:
        """Read a change. Raises PolicyError in one line."""
        try:
            change = cls.model_validate(content)
        except ValidationError as error:
            raise PolicyError(f"invalid change of policy: {explain(error)}") from error
        if change.threshold is not None and change.budget is not None:
            raise PolicyError("give a budget or a threshold, not both: a budget chooses the threshold")
        if not change.model_fields_set:
            raise PolicyError("give a policy, a threshold or a budget")
        return change

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
class InForce:
    """An active policy and its id, which takes too long to compute for every request.

    version: how many changes there were before it in this service's life; 0 for the policy that it began with.
    """

    policy: Policy
    id: str
    version: int = 0

    @classmethod
    def of(cls, policy: Policy, version: int = 0) -> InForce:
        """Return a policy with its id."""
        return cls(policy, policy.id, version)


class PolicyLog:
    """The policies of one service's life, version by version: an append-only log that all of its replicas read.

    A version is written once and by one writer, so that a writer who did not know of the newest one finds its position
    taken: no change is lost, whoever dies when. Of versions that have a successor an empty entry stays.
    life: of the service; a later one starts empty.
    """

    def __init__(self, store: Store, life: str) -> None:
        self._store, self._prefix = store, f"policy:{life}:"
        # How many versions have been written, at least: where a replica that starts begins to read.
        self._hint = f"{self._prefix}newest"
        self._last: InForce | None = None

    def read(self) -> InForce | None:
        """Return the newest version, None where nothing was set yet. Blocks for a call to the store."""
        version = self._last.version if self._last is not None else int(self._store.get(self._hint) or 0)
        if self._last is None and version:  # the hint is of an entry that may itself be the newest
            version -= 1
        while (raw := self._store.get(f"{self._prefix}{version + 1}")) is not None:
            version += 1
            if raw:
                self._last = InForce.of(Policy.of(json.loads(raw)), version)
        return self._last

    def append(self, change: InForce) -> bool:
        """Keep a policy as its version; return False where that has been written before. Blocks like read()."""
        content = change.policy.to_json().encode()
        if not self._store.put(f"{self._prefix}{change.version}", content, overwrite=False):
            return False
        with suppress(StoreError):  # it is active now, even if the clean-up fails
            self._store.put(self._hint, str(change.version).encode())
            if change.version > 1:
                self._store.put(f"{self._prefix}{change.version - 1}", b"")
        return True
