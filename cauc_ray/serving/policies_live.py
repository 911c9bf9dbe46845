"""The policy in force: taken from what a service was given, kept for replicas to come, changed while it runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cauc_ray.errors import PolicyError, explain
from cauc_ray.policies.policy import Policy

# Of Ray's own store of small values, which outlives every replica.
NAMESPACE = b"cauc_ray"


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
    if policy.logit_kind != current.logit_kind:
        raise PolicyError(
            f"the policy was fitted on logits of the kind {policy.logit_kind!r}; what runs gives {current.logit_kind!r}"
        )


@dataclass(frozen=True, slots=True)
class KeptPolicy:
    """What is kept: the policy in force, and a digest of the configuration that it came from or came after.

    refused: why that configuration was not taken, None where it was.
    """

    policy: Policy
    config: str
    refused: str | None = None


class PolicyStore:
    """The policy in force of one deployed application, where all replicas of its router read it.

    Ray's Serve hands every new replica the configuration that was deployed; a policy that was set later would be
    forgotten with the replica that took it.   key: of this deployment alone, so that a later one begins anew.
    """

    def __init__(self, key: str) -> None:
        self._key = f"policy:{key}".encode()
        self._last: tuple[bytes, KeptPolicy] | None = None

    def read(self) -> KeptPolicy | None:
        """Return what is kept, None where nothing was set yet. Blocks for a call to Ray's head."""
        from ray.experimental.internal_kv import _internal_kv_get

        raw = _internal_kv_get(self._key, namespace=NAMESPACE)
        if raw is None:
            return None
        if self._last is None or self._last[0] != raw:  # it is looked for four times a second, and seldom another
            content = json.loads(raw)
            self._last = raw, KeptPolicy(policy_of(content["policy"]), content["config"], content["refused"])
        return self._last[1]

    def write(self, kept: KeptPolicy) -> None:
        """Keep a policy. Blocks for a call to Ray's head."""
        from ray.experimental.internal_kv import _internal_kv_put

        content = {"policy": kept.policy.model_dump(mode="json"), "config": kept.config, "refused": kept.refused}
        _internal_kv_put(self._key, json.dumps(content).encode(), overwrite=True, namespace=NAMESPACE)


def digest(config: Any) -> str:
    """Return what tells two configurations apart."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]
