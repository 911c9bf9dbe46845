"""The paper's propositions for each stage of a policy, measured on labelled examples of a split."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.guarantees import AcceptedAccuracy, ThresholdRegret, accepted_accuracy, threshold_regret
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import trace_policy


@dataclass(frozen=True, slots=True)
class StageGuarantees:
    """What a stage's threshold promises of the inputs that reach it, beside what came.

    Its confidence is that of the answer which it would give: RF's is of the scores fused so far. Its fallback is the
    rest of the cascade, which may stop at any later stage and costs what it then calls.
    """

    accuracy: AcceptedAccuracy
    regret: ThresholdRegret

    def as_json(self) -> dict[str, float | None]:
        """Return the figures by name; None where nothing was accepted that they could be of."""
        accuracy, regret = self.accuracy, self.regret
        return {
            "n": accuracy.n,
            "epsilon": accuracy.epsilon,
            "epsilon_by_chance": accuracy.epsilon_by_chance,
            "coverage": accuracy.coverage,
            "accepted_accuracy": None if math.isnan(accuracy.accuracy) else accuracy.accuracy,
            "accepted_accuracy_bound": None if math.isnan(accuracy.bound) else accuracy.bound,
            "threshold_regret": regret.regret,
            "threshold_regret_bound": regret.bound,
            "fallback_variation": regret.fallback_variation,
            "fallback_loss": regret.fallback_loss,
            "reference_loss": regret.reference_loss,
            "cost_weight": regret.cost_weight,
        }


def measure_guarantees(policy: Policy, chain: Chain) -> tuple[StageGuarantees | None, ...]:
    """Measure the propositions at every stage, over the labelled examples that reach it.

    What the rest of a cascade does with an example that stops is known here too, from all of its logits.
    None for the last stage, which has no threshold, and where no labelled example comes.
    """
    trace = trace_policy(policy, chain)
    last = len(policy.stages) - 1
    stops = trace.stops(policy.threshold)
    accepted = trace.confidences >= policy.threshold
    accepted[:, last] = True
    correct = trace.predictions == chain.labels[:, None]
    found: list[StageGuarantees | None] = []
    for stage in range(last):
        rows = np.flatnonzero(chain.labelled & (stops >= stage))
        if not len(rows):
            found.append(None)
            continue
        onward = accepted[:, stage + 1 :].argmax(axis=1) + stage + 1
        extra = chain.costs.of_stops(onward) - chain.costs.of_stops(np.full(len(chain), stage))
        confidences, right = trace.confidences[rows, stage], correct[rows, stage]
        found.append(
            StageGuarantees(
                accepted_accuracy(confidences, right, policy.threshold),
                threshold_regret(confidences, right, correct[rows, onward[rows]], extra[rows], policy.threshold),
            )
        )
    return (*found, None)
