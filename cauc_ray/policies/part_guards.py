"""A guard on a chain's length: against the same policy without one of its stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from cauc_ray.numbers.chain import Chain, ChainPart, in_order
from cauc_ray.numbers.costs import Costs
from cauc_ray.numbers.signs import signs_of
from cauc_ray.numbers.sweep import most_within
from cauc_ray.numbers.types import Bools, Ints
from cauc_ray.policies.accuracy_guards import figures, told
from cauc_ray.policies.cauc_base import BasePolicy
from cauc_ray.policies.evidence import Guard
from cauc_ray.policies.policy import Policy
from cauc_ray.policies.replay import replay_part


def worse_than_part(policy: Policy, chain: Chain, cost: float, correct: Bools, split: str) -> Guard | None:
    """Say whether the policy without one of its stages costs no more and is right more often.

    cost: of the policy, mean per example.   correct: bool (n,), of the policy on the labelled examples.
    Threshold and all numbers of the other stages stay, so that nothing is fitted: what a fit of fewer models, or
    `--search`, would find can be better still. None for chains of one or two, whose parts are single models.
    """
    if len(policy.stages) < 3:
        return None
    left_out = _without_each(policy, chain)
    right = left_out.predictions[chain.labelled] == chain.labels[chain.labelled, None]
    cheap = [place for place in range(len(policy.stages)) if left_out.costs[place] <= most_within(cost)]
    if not cheap:
        return None
    # The best of those that cost no more; among equals the cheapest.
    place = min(cheap, key=lambda one: (-int(right[:, one].sum()), left_out.costs[one]))
    found, name = signs_of(correct, right[:, place]), policy.stages[place].name
    own, other = float(correct.mean()), float(right[:, place].mean())
    says = (
        f"on {split} the policy answers {100 * own:.1f} % right at {cost:.4g} {policy.cost_unit} an example, without "
        f"{name} {100 * other:.1f} % at {left_out.costs[place]:.4g} ({told(found)})"
    )
    numbers = {"accuracy": own, "part_accuracy": other, "cost": cost, "part_cost": left_out.costs[place]}
    return Guard(
        name="worse-than-part", stage=name, fired=own < other, says=says, figures={**numbers, **figures(found)}
    )


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """What a policy does without each of its stages.   predictions: int32 (N, M).   costs: M means per example."""

    predictions: Ints
    costs: list[float]


def _without_each(policy: Policy, chain: Chain) -> _LeftOut:
    parts = chain.each(partial(_replay_without_each, policy))
    ranks = [part.ranks for part in parts]
    predictions, stops = (
        in_order(ranks, values) for values in ([part.predictions for part in parts], [part.stops for part in parts])
    )
    costs = []
    for place in range(len(policy.stages)):
        others = [other for other in range(len(policy.stages)) if other != place]
        of_others = Costs(chain.costs.unit, chain.costs.per_call[..., others])
        costs.append(float(of_others.of_stops(stops[:, place]).mean()))
    return _LeftOut(predictions, costs)


@dataclass(frozen=True, slots=True)
class _PartLeftOut:
    """Of some rows, the answers without each stage.   ranks: int (n,).   predictions, stops: int (n, M)."""

    ranks: Ints
    predictions: Ints
    stops: Ints


def _replay_without_each(policy: Policy, part: ChainPart) -> _PartLeftOut:
    found = []
    for place in range(len(policy.stages)):
        logits = tuple(own for other, own in enumerate(part.logits) if other != place)
        found.append(replay_part(_without(policy, place), ChainPart(logits, part.labels, part.ranks)))
    predictions, stops = (np.stack(of, axis=1) for of in zip(*((r.predictions, r.stages) for r in found), strict=True))
    return _PartLeftOut(part.ranks, predictions, stops)


def _without(policy: Policy, place: int) -> Policy:
    """Return the policy without a stage: RF's next begins anew if there is none before it, Base's last one is fused."""
    stages = [stage for other, stage in enumerate(policy.stages) if other != place]
    if isinstance(policy, BasePolicy):
        stages[-1] = stages[-1].model_copy(update={"fused": True})
    return policy.model_copy(update={"stages": tuple(stages)})
