"""What a chain and its threshold, chosen on one half of the examples, are worth on the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cauc_ray.numbers.chain import ChainLogits
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.metrics import accuracy, macro_f1
from cauc_ray.numbers.sweep import sweep
from cauc_ray.numbers.types import Bools
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Trace


@dataclass(frozen=True, slots=True)
class Half:
    """Two halves of the examples, bool (N,) each: one to choose on, the rest to measure on."""

    chosen_on: Bools

    @property
    def measured_on(self) -> Bools:
        """Return the examples that have no part in choosing."""
        return ~self.chosen_on


def halves(n: int, n_halvings: int, seed: int = 0) -> list[Half]:
    """Cut n examples in two, so often by lot; each cut gives two halves to choose on. One example has no halves."""
    rng = np.random.default_rng(seed)
    cut = []
    for _ in range(n_halvings if n > 1 else 0):
        first = np.zeros(n, dtype=bool)
        first[rng.permutation(n)[: n // 2]] = True
        cut += [Half(first), Half(~first)]
    return cut


def measure_held_out(
    trace: Trace, chain: ChainLogits, half: Half, rule: ThresholdRule, given: float | None
) -> tuple[float, float]:
    """Choose a chain's threshold on a half, unless it is given, and return quality and mean cost on the rest."""
    threshold = _chosen_on(trace, chain, half.chosen_on, rule) if given is None else given
    rows = half.measured_on
    stops, labels = trace.stops(threshold), chain.labels[rows]
    predictions = trace.answers(threshold).predictions[rows]
    quality = accuracy if rule.objective == "accuracy" else macro_f1
    return quality(predictions, labels), float(chain.costs.of_stops(stops)[rows].mean())


def _chosen_on(trace: Trace, chain: ChainLogits, rows: Bools, rule: ThresholdRule) -> float:
    per_call = chain.costs.per_call
    costs = Costs(chain.costs.unit, per_call if per_call.ndim == 1 else per_call[rows])
    inner = trace.confidences[rows, :-1]
    return sweep(inner, trace.predictions[rows], chain.labels[rows], costs, rule.objective).best(rule.budget).threshold
