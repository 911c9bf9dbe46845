"""What a policy's answers were like on validation, as counts that later answers are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.metrics import calibration_error, equal_width_bins
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import N_BINS, N_GROUPS, Reference, StageReference
from cauc_ray.policies.trace import Trace


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers of a cascade as they are watched; all arrays (n,), in the order in which they were given.

    stages: int, which gave them.   predictions: int.   before: int, what the stage before answered, -1 at the first.
    confidences, costs: float64.
    """

    stages: Ints
    predictions: Ints
    before: Ints
    confidences: Floats
    costs: Floats

    def __len__(self) -> int:
        return len(self.stages)

    @classmethod
    def of_trace(cls, trace: Trace, threshold: float, chain: Chain) -> Answered:
        """Return what a policy answers at a threshold, from all of its steps."""
        stops, rows = trace.stops(threshold), np.arange(len(trace.predictions))
        before = np.where(stops > 0, trace.predictions[rows, np.maximum(stops - 1, 0)], -1)
        predictions, confidences = trace.predictions[rows, stops], trace.confidences[rows, stops]
        return cls(stops, predictions, before, confidences, chain.costs.of_stops(stops))

    def at(self, rows: Ints | Bools | slice) -> Answered:
        """Return some of the answers."""
        return Answered(
            self.stages[rows], self.predictions[rows], self.before[rows], self.confidences[rows], self.costs[rows]
        )


def bins_of(confidences: Floats) -> Ints:
    """Return the bin in which a reference counts each confidence, int (n,)."""
    return equal_width_bins(confidences, N_BINS)


def option_group(options: Ints) -> Ints:
    """Return as which option a reference counts each: a few, however many there are, -1 as the first."""
    return np.where(options < 0, 0, options % N_GROUPS)


def reference_of(trace: Trace, threshold: float, chain: Chain, split: str) -> Reference:
    """Count a policy's answers at a threshold on labelled examples.   split: their name."""
    answered = Answered.of_trace(trace, threshold, chain)
    correct = answered.predictions == chain.labels
    agreed = answered.predictions == trace.predictions[:, -1]
    stages = []
    for place, name in enumerate(chain.models):
        here = answered.stages == place
        bins = bins_of(answered.confidences[here])
        answers = np.zeros((N_GROUPS if place else 1, N_GROUPS), dtype=int)
        np.add.at(answers, (option_group(answered.before[here]), option_group(answered.predictions[here])), 1)
        stages.append(
            StageReference(
                name=name,
                confidences=tuple(np.bincount(bins, minlength=N_BINS).tolist()),
                right=tuple(np.bincount(bins[correct[here]], minlength=N_BINS).tolist()),
                answers=tuple(tuple(row) for row in answers.tolist()),
                agreed=int(agreed[here].sum()),
                cost=float(answered.costs[here].mean()) if here.any() else None,
                calibration_error=(
                    calibration_error(answered.confidences[here], correct[here]) if here.any() else None
                ),
            )
        )
    return Reference(split=split, n=len(chain), stages=tuple(stages))
