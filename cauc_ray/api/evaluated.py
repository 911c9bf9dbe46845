"""What a policy's answers on saved logits are worth: figures, tables, the accuracy-cost curve, JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from cauc_ray.api.plots import BLUE, GREY, VERMILION, accuracy_over_cost, plot_model, plot_point
from cauc_ray.api.segmented import SegmentResult, results_grid
from cauc_ray.api.worth import SingleModel, Verdict, judge, models_alone
from cauc_ray.display import (
    Grid,
    Sheet,
    Shown,
    cost_with_interval,
    gain_text,
    number,
    percent,
    share_text,
    with_interval,
)
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.guarantees import StageGuarantees
from cauc_ray.numbers.intervals import Difference, Mean, Share, share
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.checks import as_expected
from cauc_ray.policies.evidence import Guard, Measures, OfflineAccuracy
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.predictions import OptionNames, Predictions
from cauc_ray.policies.trace import (
    Answered,
    measure,
    measure_guarantees,
    measure_offline,
    replay,
    trace_policy,
)

# What is promised of a stage's answers, by its key in a stage's guarantees.
_PROMISED: Mapping[str, str] = {
    "accepted_accuracy_bound": "at least",
    "epsilon": "ε",
    "epsilon_by_chance": "by chance",
    "threshold_regret": "regret",
    "threshold_regret_bound": "at most",
}


@dataclass(frozen=True, slots=True, repr=False)
class Evaluation(Shown):
    """A policy's answers on a split of a logit table, or on arrays, and what they are worth.

    Attributes:
        policy: The policy.
        chain: The examples.
        replay: Its answers, in the order of the chain.
        measures: Accuracy, macro-F1, cost and the stages.
        models: Each model by itself on the same examples.
        guarantees: Of each stage, what its threshold promises there; None for the last.
        guards: Checks of the costs against the expected ones.
        offline: Results of the first stages alone; empty without labels.
        order: Int (N,), order of the examples in predictions; None for the chain's own.
        names: Names of the options, or texts by keys of answers; None if unknown.
        segments: Results of each segment; empty without a column that makes them.
    """

    policy: Policy
    chain: Chain
    replay: Answered
    measures: Measures
    models: tuple[SingleModel, ...]
    guarantees: tuple[StageGuarantees | None, ...]
    guards: tuple[Guard, ...]
    offline: tuple[OfflineAccuracy, ...]
    order: Ints | None = None
    names: OptionNames | None = None
    segments: tuple[SegmentResult, ...] = ()

    @classmethod
    def of(
        cls, policy: Policy, chain: Chain, order: Ints | None = None, names: OptionNames | None = None
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
        models = models_alone(policy, chain, answers)
        return cls(policy, chain, answers, measures, models, guarantees, guards, offline, order, names)

    @property
    def verdict(self) -> Verdict | None:
        """Return whether the policy is worth it on these examples; None without labels."""
        return judge(self.measures, self.models, self.policy.cost_unit)

    @property
    def expected_accuracy(self) -> Share | None:
        """Return the accuracy that the policy's file expects, with its 95 % prediction interval for these examples."""
        n = self.measures.n_labelled
        return self.policy.expected_accuracy(n) if n else None

    @property
    def predictions(self) -> Predictions:
        """Return the answers, one for each example."""
        answers = replace(Predictions.of(self.replay, self.chain, self.policy.cost_unit), names=self.names)
        return answers if self.order is None else answers.of_rows(self.order)

    def to_arrow(self) -> pa.Table:
        """Return the answers as a predictions file has them, with labels where they are known."""
        return self.predictions.to_arrow()

    def to_pandas(self) -> Any:
        """Return to_arrow() as a pandas DataFrame. Raises ConfigError where pandas is missing."""
        return self.predictions.to_pandas()

    def plot(self, axes: Any = None) -> Any:
        """Draw accuracy over cost: every threshold, each model by itself, and the policy where it stands.

        Args:
            axes: Of matplotlib, to draw on; without them a new figure's.

        Returns:
            The axes.

        Raises:
            ConfigError: Matplotlib is missing.
            DataError: An example has no label.
        """
        axes = accuracy_over_cost(self.policy.cost_unit, [model.cost for model in self.models], axes)
        chain, measures = self.chain, self.measures
        chain.require_labels("a curve")
        # A curve of one point, without its models, has no width that an axis could have.
        axes.update_datalim([(model.cost, 100 * model.accuracy.value) for model in self.models if model.accuracy])
        curve = trace_policy(self.policy, chain).frontier(chain)
        axes.step(curve.cost, 100 * curve.quality, where="post", color=BLUE, label="every threshold")
        assert measures.accuracy is not None
        share = measures.accuracy
        look = {"fmt": "D", "color": VERMILION, "label": "this policy, 95 %", "zorder": 3}
        plot_point(axes, measures.cost, share.value, (share.low, share.high), **look)
        if self.policy.budget is not None:
            axes.axvline(self.policy.budget, color=GREY, linestyle=":", label="budget")
        for model in self.models:
            assert model.accuracy is not None
            plot_model(axes, model.name, model.cost, model.accuracy.value)
        axes.legend(loc="lower right", frameon=False)
        return axes

    def as_json(self) -> dict[str, Any]:
        """Return what `cauc evaluate --json` prints."""
        policy, measures, verdict, expected = self.policy, self.measures, self.verdict, self.expected_accuracy
        return {
            "method": policy.method,
            "policy_id": policy.id,
            "source": self.chain.source,
            "n": measures.n,
            "n_labelled": measures.n_labelled,
            **estimate("accuracy", measures.accuracy),
            "expected_accuracy": None if expected is None else expected.value,
            "expected_interval": None if expected is None else [expected.low, expected.high],
            "macro_f1": measures.macro_f1,
            "cost": measures.cost,
            "cost_interval": list(measures.cost_interval),
            "cost_unit": policy.cost_unit,
            "relative_cost": measures.relative_cost,
            "threshold": policy.threshold,
            "worth": None if verdict is None else {"tone": verdict.tone, "answer": verdict.answer},
            "models": [
                {
                    "name": model.name,
                    "cost": model.cost,
                    **estimate("accuracy", model.accuracy),
                    **estimate("gain", model.gain),
                }
                for model in self.models
            ],
            "last_stage_avoided": 1 - measures.stages[-1].reached / measures.n,
            "stages": [
                {
                    "name": stage.name,
                    "reached": stage.reached,
                    "answered": stage.answered,
                    **estimate("accepted_accuracy", stage.accepted_accuracy),
                    "guarantees": None if guarantees is None else guarantees.as_json(),
                }
                for stage, guarantees in zip(measures.stages, self.guarantees, strict=True)
            ],
            "early": self._early(),
            "offline": [
                {
                    "stages": part.stages,
                    "accuracy": part.accuracy.value,
                    "degraded": part.degraded,
                    "expected_accuracy": None if expected is None else expected.accuracy.value,
                    "expected_interval": None if expected is None else [expected.accuracy.low, expected.accuracy.high],
                }
                for part, expected in zip(
                    self.offline, policy.offline or [None] * (len(policy.stages) - 1), strict=False
                )
            ],
            "segments": [segment.as_json() for segment in self.segments],
            "guards": [guard.model_dump() for guard in self.guards],
        }

    def _early(self) -> dict[str, Any]:
        """Return how often answers given before the last stage are wrong, and what was certified of that, if it was."""
        inner = [early for stage in self.measures.stages[:-1] if (early := stage.accepted_accuracy)]
        n = sum(answers.n for answers in inner)
        right = share(sum(round(answers.n * answers.value) for answers in inner), n)
        certificate = self.policy.threshold_choice.certificate
        return {
            "n": n,
            "coverage": n / self.measures.n_labelled if self.measures.n_labelled else None,
            "risk": 1 - right.value if n else None,
            "risk_interval": [1 - right.high, 1 - right.low] if n else None,
            "certified_risk": None if certificate is None else certificate.risk,
            "certified_confidence": None if certificate is None else certificate.confidence,
        }

    def sheet(self) -> Sheet:
        """Return the verdict, the policy next to its models, and what each stage answered."""
        measures, unit, verdict = self.measures, self.policy.cost_unit, self.verdict
        title = f"{self.policy.method} on {self.chain.source}: {measures.n:,} examples, policy {self.policy.id}"
        lines = [verdict.answer] if verdict is not None else ["No labels: the accuracy is unknown."]
        if 0 < measures.n_labelled < measures.n:
            lines.append(f"accuracies are over the {measures.n_labelled:,} labelled examples")
        details: list[str | Grid] = [self._stages()]
        details += self._early_lines()
        details += [
            f"offline, {', '.join(self.policy.models[: part.stages])} alone: accuracy {percent(part.accuracy.value)}"
            for part in self.offline
        ]
        tables = [self._models(unit), *([results_grid(self.segments, unit)] if self.segments else [])]
        return Sheet(title, [*lines, *tables], details)

    def _early_lines(self) -> Iterator[str]:
        """Yield what is known of answers before the last stage, and the macro-F1."""
        early, certified = self._early(), ""
        if early["certified_risk"] is not None:
            risk, confidence = percent(early["certified_risk"]), 100 * early["certified_confidence"]
            certified = f", certified at most {risk} ({confidence:g} % sure)"
        if early["n"]:
            wrong = with_interval(early["risk"], early["risk_interval"])
            yield f"answered before the last stage: {percent(early['coverage'])}; wrong of these: {wrong}{certified}"
        if (expected := self.expected_accuracy) is not None and self.policy.expected is not None:
            yield (
                f"accuracy expected from {self.policy.expected.split}: {share_text(expected)}, the 95 % prediction "
                f"interval for {self.measures.n_labelled:,} examples"
            )
        if self.measures.macro_f1 is not None:
            yield f"macro-F1 {percent(self.measures.macro_f1)}"

    def _models(self, unit: str) -> Grid:
        """Return a table of each model by itself, and of the cascade."""
        measures = self.measures
        rows = [
            (model.name, share_text(model.accuracy), gain_text(model.gain), number(model.cost)) for model in self.models
        ]
        rows.append(
            ("cascade", share_text(measures.accuracy), "", cost_with_interval(measures.cost, measures.cost_interval))
        )
        headings = ("alone", "accuracy (95 %)", "cascade's gain (points)", f"cost ({unit})")
        return Grid("", headings, tuple(rows))

    def _stages(self) -> Grid:
        """Return a table of what each stage answered, and what its threshold promises."""
        rows = []
        for stage, guarantees in zip(self.measures.stages, self.guarantees, strict=True):
            row: dict[str, Any] = {"name": stage.name, "reached": stage.reached, "answered": stage.answered}
            row |= dict.fromkeys(_PROMISED) | ({} if guarantees is None else guarantees.as_json())
            row["accuracy"] = share_text(stage.accepted_accuracy)
            if (bound := row["accepted_accuracy_bound"]) is not None:
                row["accepted_accuracy_bound"] = max(0.0, bound)  # no accuracy is less
            rows.append(row)
        columns = [
            ("stage", "text", "name"),
            ("reached", "count", "reached"),
            ("answered", "count", "answered"),
            ("accuracy", "text", "accuracy"),
        ]
        if not any(self.guarantees):
            return Grid.of("", rows, columns)
        note = (
            "at least: threshold less ε / coverage (proposition 1); regret: at most ε plus the fallback's variation (2)"
        )
        columns += [(heading, "percent", key) for key, heading in _PROMISED.items()]
        return Grid.of("", rows, columns, notes=[note])


def estimate(name: str, of: Share | Difference | None) -> dict[str, Any]:
    """Return an estimate and its interval as JSON has them, None where it is unknown."""
    return {name: of.value if of else None, f"{name}_interval": [of.low, of.high] if of else None}
