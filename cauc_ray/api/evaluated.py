"""What a policy's answers on saved logits are worth: figures, tables, the accuracy-cost curve, JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from cauc_ray.api.plots import BLUE, GREY, VERMILION, accuracy_over_cost, plot_model, plot_point
from cauc_ray.api.tables import cost_with_interval
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.guarantees import StageGuarantees
from cauc_ray.numbers.intervals import Mean, Share, share
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.checks import as_expected
from cauc_ray.policies.evidence import Guard, Measures, OfflineAccuracy
from cauc_ray.policies.notebook import Shown, SmallTable, share_text
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.predictions import Predictions
from cauc_ray.policies.trace import (
    Answered,
    answers_alone,
    measure,
    measure_guarantees,
    measure_offline,
    replay,
    trace_policy,
)


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation(Shown):
    """A policy's answers on a split of a logit table, or on arrays, and what they are worth.

    measures: accuracy, macro_f1, cost and more.   guarantees: of each stage, what its threshold promises there; None
    for the last.   guards: of what was realised there against what was expected.
    offline: what the first stages alone answer, as the policy's file has it; empty without labels.   order: int (N,),
    of the chain's examples in predictions; None for the chain's own.   names: of the options, where the table has them.
    """

    policy: Policy
    chain: Chain
    replay: Answered
    measures: Measures
    guarantees: tuple[StageGuarantees | None, ...]
    guards: tuple[Guard, ...]
    offline: tuple[OfflineAccuracy, ...]
    order: Ints | None = None
    names: tuple[str, ...] | None = None

    @classmethod
    def of(
        cls, policy: Policy, chain: Chain, order: Ints | None = None, names: tuple[str, ...] | None = None
    ) -> Evaluation:
        """Evaluate a policy on a chain."""
        policy.check_chain(chain)
        # Where a confidence decides, the propositions need all steps of all rows, of which an answer is one.
        trace = None if policy.scored else trace_policy(policy, chain)
        answers = replay(policy, chain) if trace is None else trace.at(policy.threshold, chain)
        measures = measure(answers, chain, chain.source)
        on_cost = as_expected(policy.expected, Mean.of(answers.costs), chain.source, policy.budget, policy.cost_unit)
        guards = () if on_cost is None else (on_cost,)
        offline: tuple[OfflineAccuracy, ...] = ()
        if policy.in_turn and chain.labelled.any():  # now: the shards of a chain may be gone later
            offline = measure_offline(trace or trace_policy(policy, chain), policy.threshold, chain)
        guarantees = measure_guarantees(policy, chain, trace)
        return cls(policy, chain, answers, measures, guarantees, guards, offline, order, names)

    @property
    def predictions(self) -> Predictions:
        """Return the answers, one for each example."""
        found = replace(Predictions.of(self.replay, self.chain, self.policy.cost_unit), names=self.names)
        return found if self.order is None else found.of_rows(self.order)

    def to_arrow(self) -> pa.Table:
        """Return the answers as a predictions file has them, with labels where they are known."""
        return self.predictions.to_arrow()

    def to_pandas(self) -> Any:
        """Return to_arrow() as a pandas DataFrame. Raises ConfigError where pandas is missing."""
        return self.predictions.to_pandas()

    def plot(self, axes: Any = None) -> Any:
        """Draw accuracy over cost: every threshold, each model by itself, and the policy where it stands.

        axes: of matplotlib, to draw on; without them a new figure's.   Returns the axes.
        Raises ConfigError where matplotlib is missing, DataError where an example has no label.
        """
        axes = accuracy_over_cost(self.policy.cost_unit, axes)
        chain, measures = self.chain, self.measures
        chain.require_labels("a curve")
        curve = trace_policy(self.policy, chain).frontier(chain)
        axes.step(curve.cost, 100 * curve.quality, where="post", color=BLUE, label="every threshold")
        assert measures.accuracy is not None
        share = measures.accuracy
        look = {"fmt": "D", "color": VERMILION, "label": "this policy, 95 %", "zorder": 3}
        plot_point(axes, measures.cost, share.value, (share.low, share.high), **look)
        if self.policy.budget is not None:
            axes.axvline(self.policy.budget, color=GREY, linestyle=":", label="budget")
        alone = answers_alone(self.policy, chain) == chain.labels[:, None]
        for model, cost, accuracy in zip(chain.models, chain.costs.means, alone.mean(axis=0), strict=True):
            plot_model(axes, model, cost, accuracy)
        axes.legend(loc="lower right", frameon=False)
        return axes

    def small_table(self) -> SmallTable:
        """Return accuracy and cost, and what each stage answered, as people see it."""
        measures, unit = self.measures, self.policy.cost_unit
        relative = "" if measures.relative_cost is None else f", {measures.relative_cost:.2f} of the last model's"
        accuracy = None if measures.accuracy is None else measures.accuracy.value
        rows = [
            [
                stage.name,
                f"{stage.reached:,}",
                f"{stage.answered:,}",
                share_text(stage.accepted_accuracy.value if stage.accepted_accuracy else None),
            ]
            for stage in measures.stages
        ]
        caption = (
            f"{self.policy.method} on {measures.n:,} examples: {share_text(accuracy)} accuracy at "
            f"{cost_with_interval(measures.cost, measures.cost_interval)} {unit} each{relative}"
        )
        return SmallTable(caption, ["stage", "reached", "answered", "accuracy"], rows)


def evaluation_summary(evaluation: Evaluation) -> dict[str, Any]:
    """Return an evaluation as `cauc evaluate --json` prints it."""
    policy, measures = evaluation.policy, evaluation.measures
    return {
        "method": policy.method,
        "policy_id": policy.id,
        "source": evaluation.chain.source,
        "n": measures.n,
        "n_labelled": measures.n_labelled,
        "accuracy": measures.accuracy.value if measures.accuracy else None,
        "accuracy_interval": _interval(measures.accuracy),
        "macro_f1": measures.macro_f1,
        "cost": measures.cost,
        "cost_interval": list(measures.cost_interval),
        "cost_unit": policy.cost_unit,
        "relative_cost": measures.relative_cost,
        "threshold": policy.threshold,
        "last_stage_avoided": 1 - measures.stages[-1].reached / measures.n,
        "stages": [
            {
                "name": stage.name,
                "reached": stage.reached,
                "answered": stage.answered,
                "accepted_accuracy": stage.accepted_accuracy.value if stage.accepted_accuracy else None,
                "accepted_accuracy_interval": _interval(stage.accepted_accuracy),
                "guarantees": None if guarantees is None else guarantees.as_json(),
            }
            for stage, guarantees in zip(measures.stages, evaluation.guarantees, strict=True)
        ],
        "early": _early(evaluation),
        "offline": [
            {
                "stages": found.stages,
                "accuracy": found.accuracy.value,
                "degraded": found.degraded,
                "expected_accuracy": None if expected is None else expected.accuracy.value,
                "expected_interval": None if expected is None else _interval(expected.accuracy),
            }
            for found, expected in zip(
                evaluation.offline, policy.offline or [None] * (len(policy.stages) - 1), strict=False
            )
        ],
        "guards": [guard.model_dump() for guard in evaluation.guards],
    }


def _early(evaluation: Evaluation) -> dict[str, Any]:
    """Return how often answers given before the last stage are wrong, and what was certified of that, if it was."""
    inner = [early for stage in evaluation.measures.stages[:-1] if (early := stage.accepted_accuracy)]
    n = sum(answers.n for answers in inner)
    right = share(sum(round(answers.n * answers.value) for answers in inner), n)
    certificate = evaluation.policy.threshold_choice.certificate
    return {
        "n": n,
        "coverage": n / evaluation.measures.n_labelled if evaluation.measures.n_labelled else None,
        "risk": 1 - right.value if n else None,
        "risk_interval": [1 - right.high, 1 - right.low] if n else None,
        "certified_risk": None if certificate is None else certificate.risk,
        "certified_confidence": None if certificate is None else certificate.confidence,
    }


def _interval(share: Share | None) -> list[float] | None:
    return [share.low, share.high] if share else None
