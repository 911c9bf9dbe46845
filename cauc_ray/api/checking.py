"""Check whether a policy still holds on saved logits: the Python side of `cauc check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.api.offline import policy_of
from cauc_ray.api.options import CheckOptions
from cauc_ray.api.sources import Logits, read_policy_chain
from cauc_ray.data.logits import LogitKinds
from cauc_ray.files.paths import AnyPath
from cauc_ray.policies.monitor import Watch, Watched, verdict, watch_report
from cauc_ray.policies.notebook import Shown, SmallTable
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import trace_policy


@dataclass(frozen=True, slots=True, repr=False)
class Check(Shown):
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

    def small_table(self) -> SmallTable:
        """Return the verdict, as people see it."""
        return SmallTable(f"Policy {self.policy.id} on {self.source}: {self.says}", [], [])

    def as_json(self) -> dict[str, Any]:
        """Return all figures, as `cauc check --json` prints them."""
        return {"source": self.source, **watch_report(self.policy, self.watched)}


def check(
    logits: Logits,
    policy: str | AnyPath | Policy,
    *,
    labels: Any = None,
    example_ids: Any = None,
    split: str = "test",
    seed: int = 0,
    logit_kind: LogitKinds = None,
) -> Check:
    """Check whether a policy is still valid on a split of a logit table, or on arrays.

    All models have answered all examples, so each early answer is compared with the whole cascade's. Examples without a
    label count where no label is needed.

    Args:
        logits: a table or arrays, as for fit().
        policy: a policy, or its file.
        labels: as for evaluate(), like example_ids.
        example_ids: of arrays.
        split: of a table.
        seed: of the order in which examples come; the order in which a table stores them means nothing.
        logit_kind: as for evaluate().

    Returns:
        What was seen, and the verdict.

    Raises:
        CaucError: PolicyError where the policy has no reference or its file cannot be read, DataError for the logits,
            ConfigError for the arguments.
    """
    options, policy = CheckOptions.of(locals()), policy_of(policy)
    watch = Watch(policy)
    chain = read_policy_chain(logits, policy, options.split, logit_kind, labels, example_ids)
    policy.check_chain(chain)
    trace = trace_policy(policy, chain, likeliest=True)
    order = np.random.default_rng(options.seed).permutation(len(chain))
    answered = trace.at(policy.threshold, chain).of_rows(order)
    watch.add(answered)
    known = chain.labelled[order]
    correct = answered.predictions == chain.labels[order]
    watch.add_outcomes(answered.stages[known], answered.confidences[known], correct[known])
    early = answered.stages < len(policy.stages) - 1
    agreed = answered.predictions == trace.predictions[order, -1]
    watch.add_agreements(answered.stages[early], agreed[early])
    return Check(policy, chain.source, watch.watched())
