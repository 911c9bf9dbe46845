"""Guards on what a policy costs: against always calling the largest model, and on other rows than it was chosen on."""

from __future__ import annotations

import math

import numpy as np

from cauc_ray.numbers.means import Mean, mean_difference
from cauc_ray.numbers.sweep import most_within
from cauc_ray.numbers.types import Floats
from cauc_ray.policies.evidence import Expectation, Guard

# How often costs of the same distribution are taken for others.
COST_LEVEL = 0.01


def against_largest(cost: float, of_largest: float, unit: str, split: str) -> Guard:
    """Say whether a policy's mean cost lies above that of calling its last model alone on every example."""
    relative = cost / of_largest if of_largest > 0 else math.inf
    fired = cost > most_within(of_largest)
    times = f", {relative:.2f} times as much" if of_largest > 0 else ""
    word = "more" if fired else "no more"
    says = (
        f"the policy costs {word} than always calling the largest model: on {split} {cost:.4g} {unit} an example "
        f"against {of_largest:.4g}{times}"
    )
    figures = {"cost": cost, "largest_cost": of_largest}
    return Guard(name="cost-above-largest", stage=None, fired=fired, says=says, figures=figures)


def as_expected(
    expected: Expectation | None, costs: Floats, split: str, budget: float | None, unit: str
) -> Guard | None:
    """Say whether examples cost what was expected, by the two-sample z test at COST_LEVEL.

    costs: float (N,), of each example of the split. None where no cost, or not its deviation, was expected.
    """
    if expected is None or expected.cost_deviation is None:
        return None
    cost, deviation = float(costs.mean()), float(np.std(costs))
    foretold = Mean(expected.cost, expected.cost_deviation, expected.n)
    found = mean_difference(Mean(cost, deviation, len(costs)), foretold)
    fired = found.p_value <= COST_LEVEL
    within = "no budget" if budget is None else f"a budget of {budget:.4g}"
    word = "which sampling does not explain" if fired else "within what sampling explains"
    says = (
        f"an example costs {cost:.4g} {unit} on {split} where {expected.cost:.4g} on {expected.split} was expected, "
        f"with {within}: {word} (p = {found.p_value:.2g})"
    )
    figures = {
        "cost": cost,
        "cost_deviation": deviation,
        "n": float(len(costs)),
        "expected_cost": expected.cost,
        "expected_cost_deviation": expected.cost_deviation,
        "expected_n": float(expected.n),
        "p_value": found.p_value,
    }
    return Guard(name="cost-shift", stage=None, fired=fired, says=says, figures=figures)
