"""Check whether a policy still holds on saved logits: the Python side of `cauc check`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.front.offline import read_policy_chain
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.reference import Answered
from cauc_ray.policies.trace import trace_policy
from cauc_ray.policies.watch import Watch, Watched
from cauc_ray.policies.watch_report import verdict, watch_report


@dataclass(frozen=True, slots=True)
class Check:
    """What was seen of a policy on a split of a logit table.   source: of the logits."""

    policy: Policy
    source: str
    watched: Watched

    @property
    def holds(self) -> bool:
        """Return whether nothing speaks against the policy."""
        return self.watched.holds

    @property
    def says(self) -> str:
        """Return in one line whether it holds, and else what spoke against it first."""
        return verdict(self.watched)

    def as_json(self) -> dict[str, Any]:
        """Return all figures, as `cauc check --json` prints them."""
        return {"source": self.source, **watch_report(self.policy, self.watched)}


def check(logits: str | Path, policy: Policy, *, split: str = "test", seed: int = 0) -> Check:
    """Watch a policy answer a split of a logit table, and say whether it still holds.

    seed: of the order in which examples come; the order in which a table stores them means nothing.
    Of examples without a label all is watched that needs none. All models have answered all of them, so that each early
    answer is compared with the whole cascade's.
    Raises PolicyError where the policy has no reference, DataError where the table does not serve, ConfigError for a
    seed below 0.
    """
    if seed < 0:
        raise ConfigError(f"seed {seed} is below 0")
    watch = Watch(policy)
    chain = read_policy_chain(logits, policy, split)
    policy.check_chain(chain)
    trace = trace_policy(policy, chain, likeliest=True)
    order = np.random.default_rng(seed).permutation(len(chain))
    answered = Answered.of_trace(trace, policy.threshold, chain).at(order)
    watch.add(answered)
    known = chain.labelled[order]
    correct = answered.predictions == chain.labels[order]
    watch.add_outcomes(answered.stages[known], answered.confidences[known], correct[known])
    early = answered.stages < len(policy.stages) - 1
    agreed = answered.predictions == trace.predictions[order, -1]
    watch.add_agreements(answered.stages[early], agreed[early])
    return Check(policy, chain.source, watch.watched())
