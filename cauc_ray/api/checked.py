"""Whether a policy is still valid on later examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cauc_ray.api.segmented import SegmentCheck
from cauc_ray.display import Grid, Sheet, Shown, number, percent, with_interval
from cauc_ray.policies.monitor import Watched, verdict, watch_report
from cauc_ray.policies.policy import Policy


@dataclass(frozen=True, slots=True, repr=False)
class Check(Shown):
    """The result of a check of a policy on a split of a logit table, or on arrays.

    Attributes:
        policy: The policy.
        source: Source of the logits.
        watched: Counts and evidence.
        segments: Checks of the segments, which share the rate of false alarms with that of all examples.
    """

    policy: Policy
    source: str
    watched: Watched
    segments: tuple[SegmentCheck, ...] = ()

    @property
    def valid(self) -> bool:
        """Return whether nothing speaks against the policy."""
        return self.watched.valid and all(segment.valid is not False for segment in self.segments)

    @property
    def verdict(self) -> str:
        """Return in one line whether it holds, and else what spoke against it first."""
        drifted = next((segment for segment in self.segments if segment.valid is False), None)
        text = verdict(self.watched)
        if drifted is not None and self.watched.valid:
            text = f"in segment {drifted.name!r} {drifted.verdict}"
        n_new = sum(segment.valid is None for segment in self.segments)
        return text + (f"; {n_new} of {len(self.segments)} segments cannot be checked" if n_new else "")

    def as_json(self) -> dict[str, Any]:
        """Return all figures, as `cauc check --json` prints them."""
        report = {"source": self.source, **watch_report(self.policy, self.watched)}
        segments = [segment.as_json() for segment in self.segments]
        return {**report, "valid": self.valid, "verdict": self.verdict, "segments": segments}

    def sheet(self) -> Sheet:
        """Return the verdict, each figure next to that of validation, and the evidence of a change."""
        report = self.as_json()
        cost, low, high = report["cost"]
        lines = [
            f"the policy {self.verdict}",
            f"{report['n']:,} examples, {report['n_labelled']:,} labelled; cost {number(cost)} ({number(low)} – "
            f"{number(high)}) {report['cost_unit']}, {number(report['reference_cost'])} on validation",
        ]
        stages = [
            {
                "stage": stage["name"],
                "answered": f"{percent(stage['answered'])} [{percent(stage['reference_answered'])}]",
                "cost": f"{number((stage['cost'] or [None])[0])} [{number(stage['reference_cost'])}]",
                "accuracy": f"{_share(stage['accepted_accuracy'])} [{percent(stage['reference_accepted_accuracy'])}]",
                "ECE": f"{number(stage['calibration_error'])} [{number(stage['reference_calibration_error'])}]",
                "by chance": number(stage["calibration_error_by_chance"]),
                "z": number(stage["z"]),
                "agreement": f"{_share(stage['agreement'])} [{percent(stage['reference_agreement'])}]",
            }
            for stage in report["stages"]
        ]
        columns = [(f"cost ({report['cost_unit']})" if key == "cost" else key, "text", key) for key in stages[0]]
        evidence = Grid.of(
            f"evidence of a change, in powers of ten: {report['needed']:.1f} is needed",
            report["features"],
            [("", "text", "name"), ("rows", "count", "n"), ("most", "number", "evidence")],
        )
        lines += [f"segment {segment.name!r} ({segment.n:,} examples): {segment.verdict}" for segment in self.segments]
        title = f"policy {self.policy.id} on {self.source}"
        return Sheet(title, [*lines, Grid.of("in brackets: on validation", stages, columns)], [evidence])


def _share(share: Sequence[float] | None) -> str:
    return "–" if share is None else with_interval(share[0], share[1:])
