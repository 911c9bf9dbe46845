"""What is looked at in every fitted policy because it makes policies disappoint (docs/guards.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cauc_ray.errors import GuardError
from cauc_ray.numbers.chain import Chain
from cauc_ray.numbers.sweep import most_within
from cauc_ray.numbers.types import Bools, Floats, Ints
from cauc_ray.policies.accuracy_guards import below_single, fusion_guards
from cauc_ray.policies.calibration_guards import few_examples, informative, temperature_guards
from cauc_ray.policies.cost_guards import against_largest, as_expected
from cauc_ray.policies.evidence import Expectation, Guard
from cauc_ray.policies.part_guards import worse_than_part
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.replay import replay
from cauc_ray.policies.trace import Trace, answers_alone


@dataclass(frozen=True, slots=True)
class Measured:
    """The split on which a policy is measured: its examples, all steps there, and its threshold's stops, int (N,)."""

    chain: Chain
    trace: Trace
    stops: Ints


def look(policy: Policy, expected: Expectation, on: Measured, calibration: Chain) -> tuple[Guard, ...]:
    """Look at a policy whose threshold is set.

    expected: what was measured of it there.   calibration: what it was fitted on, which is also replayed for its cost
    unless it is what was measured on.
    """
    return tuple(_guards(policy, expected, on, calibration))


def _guards(policy: Policy, expected: Expectation, on: Measured, calibration: Chain) -> Iterator[Guard]:
    chain, split, n_models = on.chain, expected.split, len(policy.stages)
    rows = np.flatnonzero(chain.labelled)
    labels, stops = chain.labels[rows, None], on.stops[rows]
    stepwise: Bools = on.trace.predictions[rows] == labels
    if n_models > 1:
        alone: Bools = answers_alone(policy, chain)[rows] == labels
        of_each = chain.costs.means
        yield against_largest(expected.cost, float(of_each[-1]), policy.cost_unit, split)
        affordable = [place for place in range(n_models) if of_each[place] <= most_within(expected.cost)]
        correct: Bools = stepwise[np.arange(len(rows)), stops]
        yield from _some(below_single(policy.models, affordable, correct, alone, split))
        yield from _some(worse_than_part(policy, chain, expected.cost, correct, split))
        yield from fusion_guards(policy, stepwise, alone, stops, split)
    yield few_examples(policy.calibration)
    for stage in policy.stages:
        yield from temperature_guards(stage)
    for place, stage in enumerate(policy.stages[:-1]):
        confidences: Floats = on.trace.confidences[rows, place]
        yield from _some(informative(stage.name, confidences, stepwise[:, place], split))
    if calibration is not chain and n_models > 1:
        costs = replay(policy, calibration).costs
        name = policy.calibration.split
        yield from _some(as_expected(expected, costs, name, policy.budget, policy.cost_unit))


def _some(guard: Guard | None) -> Iterator[Guard]:
    if guard is not None:
        yield guard


def require_quiet(guards: Sequence[Guard]) -> None:
    """Raise GuardError naming all guards that have fired."""
    fired = [guard for guard in guards if guard.fired]
    if not fired:
        return
    first, *others = fired
    more = ""
    if others:
        names = (guard.name if guard.stage is None else f"{guard.name} ({guard.stage})" for guard in others)
        more = f"; and {', '.join(names)}"
    raise GuardError(f"{first.name}: {first.says}{more}", tuple(fired))
