"""The policy in force: taken from what a service was given, kept for replicas to come, changed while it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from ray.exceptions import RayError

from cauc_ray.errors import PolicyError, explain
from cauc_ray.policies.policy import Policy
from cauc_ray.serving.store import Store


class PolicyChange(BaseModel):
    """What to change: a policy (the path of its file, or its content), and a threshold or a budget for it.

    Without a policy the threshold or budget is for the one in force; with neither it is taken as it is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)
    policy: str | dict[str, Any] | None = None
    threshold: float | None = None
    budget: float | None = None

    @classmethod
    def of(cls, content: Any) -> PolicyChange:
        """Read a change. Raises PolicyError in one line."""
        try:
            change = cls.model_validate(content)
        except ValidationError as error:
            raise PolicyError(f"no change of policy: {explain(error)}") from error
        if change.threshold is not None and change.budget is not None:
            raise PolicyError("give a budget or a threshold, not both: a budget chooses the threshold")
        if not change.model_fields_set:
            raise PolicyError("a change names a policy, a threshold or a budget")
        return change

    def applied(self, current: Policy) -> Policy:
        """Return the policy after the change. Raises PolicyError or BudgetError."""
        policy = current if self.policy is None else policy_of(self.policy)
        require_same_chain(policy, current)
        if self.threshold is not None:
            return policy.with_threshold(self.threshold)
        return policy if self.budget is None else policy.with_budget(self.budget)


def policy_of(source: str | Path | Mapping[str, Any]) -> Policy:
    """Return a policy from the path of its file, or from its content. Raises PolicyError."""
    return Policy.of(source) if isinstance(source, Mapping) else Policy.load(source)


def require_same_chain(policy: Policy, current: Policy) -> None:
    """Raise PolicyError unless a policy is for the very chain that runs."""
    if policy.models != current.models:
        raise PolicyError(f"the policy is for {', '.join(policy.models)}; what runs is {', '.join(current.models)}")
    if policy.cost_unit != current.cost_unit:
        raise PolicyError(f"the policy counts costs in {policy.cost_unit}; what runs counts {current.cost_unit}")
    for model, fitted, given in zip(policy.models, policy.logit_kinds, current.logit_kinds, strict=True):
        if None not in (fitted, given) and fitted != given:
            raise PolicyError(
                f"the policy was fitted on logits of {model!r} of the kind {fitted!r}; what runs gives {given!r}"
            )


@dataclass(frozen=True, slots=True)
class KeptPolicy:
    """What is kept: the policy in force, and a digest of the configuration that it came from or came after.

    refused: why that configuration was not taken, None where it was.   version: how many changes there were before
    it in this deployment's life; 0 for the policy that the deployment began with, which is not kept.
    """

    policy: Policy
    config: str
    refused: str | None = None
    version: int = 0


class PolicyStore:
    """The policies of one deployment, version by version: an append-only log that all replicas read.

    A version is written once and by one writer, so that a writer who did not know of the newest one finds its place
    taken: no change is lost, whoever dies when. Of versions that have a successor an empty entry stays.
    key: of this deployment's life alone, so that a later one begins anew.
    """

    # How many versions have been written, at least: where a replica that starts begins to read.
    _HINT = "newest"

    def __init__(self, key: str) -> None:
        self._store = Store(f"policy:{key}")
        self._last: KeptPolicy | None = None

    def read(self) -> KeptPolicy | None:
        """Return the newest version, None where nothing was set yet. Blocks for a call to Ray's head."""
        version = self._last.version if self._last is not None else int(self._store.get(self._HINT) or 0)
        if self._last is None and version:  # the hint is of an entry that may itself be the newest
            version -= 1
        while (raw := self._store.get(str(version + 1))) is not None:
            version += 1
            if raw:
                content = json.loads(raw)
                policy = policy_of(content["policy"])
                self._last = KeptPolicy(policy, content["config"], content["refused"], version)
        return self._last

    def append(self, kept: KeptPolicy) -> bool:
        """Keep a policy as its version; return False where that has been written before. Blocks like read()."""
        content = {"policy": kept.policy.model_dump(mode="json"), "config": kept.config, "refused": kept.refused}
        if not self._store.add(str(kept.version), json.dumps(content).encode()):
            return False
        with suppress(RayError):  # it is in force now, whatever becomes of the tidying
            self._store.put(self._HINT, str(kept.version).encode())
            if kept.version > 1:
                self._store.put(str(kept.version - 1), b"")
        return True


def digest(config: Any) -> str:
    """Return what tells two configurations apart."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
