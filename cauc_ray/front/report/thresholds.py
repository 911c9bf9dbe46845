"""What a policy has on a split at one threshold after another, for thousands of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.intervals import Share, share
from cauc_ray.numbers.metrics import macro_f1
from cauc_ray.numbers.types import Ints
from cauc_ray.policies.trace import Trace


@dataclass(frozen=True, slots=True)
class OnSplit:
    """What a policy has on the n examples of a split.

    macro_f1: None where it was not asked for.   cost: mean per example.   relative_cost: to the last model alone,
    None where that is free.   answered: examples, by stage.
    """

    n: int
    accuracy: Share
    macro_f1: float | None
    cost: float
    relative_cost: float | None
    answered: tuple[int, ...]


class SplitReplay:
    """A trace of labelled examples, prepared so that a threshold costs a few passes over them.

    Its figures are those of policies.trace.measure, bit for bit.
    """

    def __init__(self, trace: Trace, chain: Chain) -> None:
        """Find where each example stops.   trace: of a cascade of all of the chain's models."""
        n, self._n_stages = trace.predictions.shape
        # An example stops at the first stage whose confidence reaches the threshold: it has passed all before whose
        # running maximum does not.
        self._highest = np.maximum.accumulate(trace.confidences[:, :-1], axis=1).T.copy()
        self._starts = np.arange(n) * self._n_stages
        self._answers = trace.predictions.ravel()
        self._correct = (trace.predictions == chain.labels[:, None]).ravel()
        self._labels = chain.labels
        self._costs = np.broadcast_to(chain.costs.cumulative, trace.predictions.shape).ravel()
        self._of_last = float(chain.costs.means[-1])

    def at(self, threshold: float, *, with_f1: bool) -> OnSplit:
        """Return the figures at a threshold."""
        stops = self._stops(threshold)
        at = self._starts + stops
        n = len(at)
        cost = float(self._costs[at].mean())
        return OnSplit(
            n=n,
            accuracy=share(int(self._correct[at].sum()), n),
            macro_f1=macro_f1(self._answers[at], self._labels) if with_f1 else None,
            cost=cost,
            relative_cost=cost / self._of_last if self._of_last > 0 else None,
            answered=tuple(np.bincount(stops, minlength=self._n_stages).tolist()),
        )

    def _stops(self, threshold: float) -> Ints:
        stops = np.zeros(len(self._starts), dtype=np.int64)
        for highest in self._highest:
            stops += highest < threshold
        return stops
