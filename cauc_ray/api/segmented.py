"""Results and checks of a policy in each segment of the examples; what is claimed of all of them holds together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.display import Grid, cost_with_interval, percent, share_text
from cauc_ray.numbers.betting import mean_interval
from cauc_ray.numbers.chain import Chain, ChainLogits
from cauc_ray.numbers.intervals import ERROR_RATE, Share, exact_share
from cauc_ray.numbers.segments import Segments
from cauc_ray.policies.monitor import Watch, Watched, reference_of, verdict, watch_report
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.trace import Answered, trace_policy


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """A policy's results on a segment of S; each kind of interval holds in all of them together with 95 %.

    Attributes:
        column: Column that makes the segments.
        name: Its value.
        n: Examples.
        accuracy: Accuracy over the labelled examples; None without any.
        cost: Mean cost per example.
        cost_interval: Interval of the mean cost.
        early: Share of the examples answered before the last stage.
        risk: Share of wrong answers among labelled ones of these; None without any.
    """

    column: str
    name: str
    n: int
    accuracy: Share | None
    cost: float
    cost_interval: tuple[float, float]
    early: float
    risk: Share | None

    def as_json(self) -> dict[str, Any]:
        """Return the results by name."""
        shares = {"accuracy": self.accuracy, "risk": self.risk}
        return {
            "name": self.name,
            "n": self.n,
            **{key: None if of is None else of.value for key, of in shares.items()},
            **{f"{key}_interval": None if of is None else [of.low, of.high] for key, of in shares.items()},
            "cost": self.cost,
            "cost_interval": list(self.cost_interval),
            "early": self.early,
        }


def segment_results(answers: Answered, chain: Chain, segments: Segments) -> tuple[SegmentResult, ...]:
    """Measure answers to a chain's examples in each segment."""
    by_name = segments.rows(chain.example_ids)
    error_rate = ERROR_RATE / len(by_name)  # Bonferroni: they hold together
    last, lowest, highest = len(chain.models) - 1, float(chain.costs.per_call.min()), _highest_cost(answers, chain)
    results = []
    for name, rows in by_name.items():
        costs, early_mask, labelled = answers.costs[rows], answers.stages[rows] < last, chain.labelled[rows]
        right = answers.predictions[rows] == chain.labels[rows]
        of_early = labelled & early_mask
        results.append(
            SegmentResult(
                column=segments.column,
                name=name,
                n=len(rows),
                accuracy=_share(int((right & labelled).sum()), int(labelled.sum()), error_rate),
                cost=float(costs.mean()),
                cost_interval=mean_interval(costs, lowest, highest, error_rate),
                early=float(early_mask.mean()),
                risk=_share(int((~right & of_early).sum()), int(of_early.sum()), error_rate),
            )
        )
    return tuple(results)


def _share(n_hits: int, n: int, error_rate: float) -> Share | None:
    return exact_share(n_hits, n, error_rate) if n else None


def _highest_cost(answers: Answered, chain: Chain) -> float:
    """Return the most that an example may cost: all calls, or what was called besides."""
    return max(float(chain.costs.per_call.sum(axis=-1).max()), float(answers.costs.max()))


def results_grid(results: Sequence[SegmentResult], unit: str) -> Grid:
    """Return the results as a table."""
    rows = [
        (
            *(of.name, f"{of.n:,}", share_text(of.accuracy), cost_with_interval(of.cost, of.cost_interval)),
            *(percent(of.early), share_text(of.risk)),
        )
        for of in results
    ]
    headings = (results[0].column, "examples", "accuracy", f"cost ({unit})", "early", "wrong of these")
    note = f"intervals of a column hold in all {len(results)} segments together with 95 %"
    return Grid("", headings, tuple(rows), (note,))


@dataclass(frozen=True, slots=True)
class SegmentCheck:
    """A check of a policy in a segment.

    Attributes:
        name: Value of the column.
        n: Examples.
        policy: The policy, with the segment's own reference; None for a segment that validation does not have.
        watched: Counts and evidence.
    """

    name: str
    n: int
    policy: Policy | None = None
    watched: Watched | None = None

    @property
    def valid(self) -> bool | None:
        """Return whether nothing speaks against the policy in the segment; None where it cannot be checked."""
        return None if self.watched is None else self.watched.valid

    @property
    def verdict(self) -> str:
        """Return in one line whether the policy holds in the segment."""
        return "cannot be checked: validation has none of it" if self.watched is None else verdict(self.watched)

    def as_json(self) -> dict[str, Any]:
        """Return all figures, as those of a whole split."""
        figures = {} if self.policy is None or self.watched is None else watch_report(self.policy, self.watched)
        return {"n": self.n, "valid": self.valid, "verdict": self.verdict, **figures, "name": self.name}


def watched_chain(policy: Policy, chain: ChainLogits, n_watches: int = 1) -> Watched:
    """Compare a policy's answers to a chain with its reference, in random order: a table's means nothing.

    Args:
        policy: Policy with a reference.
        chain: Examples, with or without labels.
        n_watches: Number of comparisons that share the rate of false alarms.

    Raises:
        PolicyError: The policy has no reference, or another chain.
    """
    watch = Watch(policy, n_watches)
    policy.check_chain(chain)
    trace = trace_policy(policy, chain, likeliest=True)
    order = np.random.default_rng(0).permutation(len(chain))
    answered = trace.at(policy.threshold, chain).of_rows(order)
    watch.add(answered)
    labelled = chain.labelled[order]
    correct = answered.predictions == chain.labels[order]
    watch.add_outcomes(answered.stages[labelled], answered.confidences[labelled], correct[labelled])
    early = answered.stages < len(policy.stages) - 1
    agreed = answered.predictions == trace.predictions[order, -1]
    watch.add_agreements(answered.stages[early], agreed[early])
    return watch.watched()


def check_segments(
    policy: Policy, chain: ChainLogits, validation: ChainLogits, segments: tuple[Segments, Segments]
) -> tuple[SegmentCheck, ...]:
    """Compare a policy's answers in each segment with those to the same segment of validation.

    Args:
        policy: Policy with a reference.
        chain: Examples to check.
        validation: Examples that the policy was chosen on.
        segments: Those of the examples and of validation.
    """
    by_name, by_validation = segments[0].rows(chain.example_ids), segments[1].rows(validation.example_ids)
    checks = []
    for name, rows in by_name.items():
        if name not in by_validation:
            checks.append(SegmentCheck(name, len(rows)))
            continue
        part = validation.of_rows(by_validation[name])
        trace = trace_policy(policy, part, likeliest=True)
        reference = reference_of(trace.at(policy.threshold, part), trace, part, validation.source)
        of_segment = policy.model_copy(update={"reference": reference})
        watched = watched_chain(of_segment, chain.of_rows(rows), len(by_name) + 1)
        checks.append(SegmentCheck(name, len(rows), of_segment, watched))
    return tuple(checks)
