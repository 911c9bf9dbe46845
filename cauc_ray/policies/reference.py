"""What a policy's answers were like on validation, as counts that later answers are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.metrics import calibration_error, equal_width_bins
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.evidence import N_BINS, N_GROUPS, N_LIKELIEST, Reference, StageReference
from cauc_ray.policies.trace import Trace


@dataclass(frozen=True, slots=True)
class Answered:
    """Answers of a cascade as they are watched; all arrays (n,), in the order in which they were given.

    stages: int, which gave them.   predictions: int.   likeliest: int, their likeliest options, as Step.likeliest has
    them.   confidences, costs: float64.
    """

    stages: Ints
    predictions: Ints
    likeliest: Ints
    confidences: Floats
    costs: Floats

    def __len__(self) -> int:
        return len(self.stages)

    @classmethod
    def of_trace(cls, trace: Trace, threshold: float, chain: Chain) -> Answered:
        """Return what a policy answers at a threshold, from all of its steps; the trace has likeliest options."""
        assert trace.likeliest is not None
        stops = trace.stops(threshold)
        at = np.arange(len(stops)), stops
        return cls(
            stops, trace.predictions[at], trace.likeliest[at], trace.confidences[at], chain.costs.of_stops(stops)
        )

    def at(self, rows: Ints | Bools | slice) -> Answered:
        """Return some of the answers."""
        return Answered(
            self.stages[rows], self.predictions[rows], self.likeliest[rows], self.confidences[rows], self.costs[rows]
        )


def bins_of(confidences: Floats) -> Ints:
    """Return the bin in which a reference counts each confidence, int (n,)."""
    return equal_width_bins(confidences, N_BINS)


def counts_of_likeliest(stage: StageReference) -> Ints:
    """Return how many answers of a stage had each code of likeliest options, int (N_GROUPS ** N_LIKELIEST,)."""
    counts = np.zeros(N_GROUPS**N_LIKELIEST, dtype=np.int64)
    for digits, count in stage.likeliest.items():
        counts[int(digits, N_GROUPS)] = count
    return counts


def reference_of(trace: Trace, threshold: float, chain: Chain, split: str) -> Reference:
    """Count a policy's answers at a threshold on labelled examples.   split: their name."""
    answered = Answered.of_trace(trace, threshold, chain)
    correct = answered.predictions == chain.labels
    agreed = answered.predictions == trace.predictions[:, -1]
    stages = []
    for place, name in enumerate(chain.models):
        here = answered.stages == place
        bins = bins_of(answered.confidences[here])
        codes, counts = np.unique(answered.likeliest[here], return_counts=True)
        stages.append(
            StageReference(
                name=name,
                confidences=tuple(np.bincount(bins, minlength=N_BINS).tolist()),
                right=tuple(np.bincount(bins[correct[here]], minlength=N_BINS).tolist()),
                likeliest={
                    np.base_repr(code, N_GROUPS).zfill(N_LIKELIEST): int(count)
                    for code, count in zip(codes, counts, strict=True)
                },
                agreed=int(agreed[here].sum()),
                cost=float(answered.costs[here].mean()) if here.any() else None,
                calibration_error=(
                    calibration_error(answered.confidences[here], correct[here]) if here.any() else None
                ),
            )
        )
    return Reference(split=split, n=len(chain), stages=tuple(stages))
