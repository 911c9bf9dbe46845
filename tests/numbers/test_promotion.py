"""A candidate against the incumbent, in simulated services: how often decisions are wrong, and how soon they come."""

import math
from collections import Counter
from statistics import median

import numpy as np
import pytest
from scipy.stats import binom

from cauc_ray.numbers.promotion import Comparison, PolicySums, PromotionEvidence, Rule, decision

RULE = Rule()
# Costs of a row that the first stage answers, and of one that is deferred.
CHEAP, EXPENSIVE = 1.0, 11.0


class Policy:
    """A policy in a simulation.   deferred: the share of deferred rows."""

    def __init__(self, accuracy, deferred=0.3):
        self.accuracy, self.deferred = accuracy, deferred

    def right(self, rng, n):
        return rng.random(n) < self.accuracy

    def costs(self, rng, n):
        return np.where(rng.random(n) < self.deferred, EXPENSIVE, CHEAP)


INCUMBENT = Policy(0.8)


def drawn(rng, candidate, n, share=0.2, n_routers=1):
    """Return the evidence of n rows, each answered by one of the two policies and labelled, at some routers."""
    total = PromotionEvidence()
    for _ in range(n_routers):
        rows = Comparison(RULE, CHEAP + EXPENSIVE)
        n_candidate = rng.binomial(n // n_routers, share)
        for policy, size in ((candidate, n_candidate), (INCUMBENT, n // n_routers - n_candidate)):
            rows.outcomes(policy.right(rng, size), of_candidate=policy is candidate)
            rows.costs(policy.costs(rng, size), of_candidate=policy is candidate)
        total += rows.take()
    return total


def paired(rng, candidate, n, differ=0.06):
    """Return the evidence of n rows that both policies answer; a share of differ has one right answer."""
    gain = candidate.accuracy - INCUMBENT.accuracy
    right = np.repeat(INCUMBENT.right(rng, n)[:, None], 2, axis=1)
    at, only = rng.random(n) < differ, rng.random(n) < 0.5 + gain / differ / 2
    right[at] = np.stack([only, ~only], axis=1)[at]
    rows = Comparison(RULE, CHEAP + EXPENSIVE)
    rows.pairs(right, np.repeat(INCUMBENT.costs(rng, n)[:, None], 2, axis=1))
    return rows.take()


def decided(seed, candidate, rows=drawn, *, batch=250, most=5_000, **options):
    """Run a service until there is a decision, looked at after every batch; return it, and the rows that it took."""
    rng, total, n = np.random.default_rng([4, seed]), PromotionEvidence(), 0
    while n < most:
        total += rows(rng, candidate, batch, **options)
        n += batch
        if (verdict := decision(total, RULE)) is not None:
            return verdict[0], n
    return "open", n


def tally(n_runs, candidate, *args, **options):
    return Counter(decided(seed, candidate, *args, **options)[0] for seed in range(n_runs))


# As bad as a candidate can be without being within the margins: of one kind each, everything else speaks for it.
WORST = {
    "accuracy": Policy(INCUMBENT.accuracy - RULE.accuracy_margin, deferred=0.1),
    "cost": Policy(0.95, ((1 + RULE.cost_margin) * 4 - 1) / 10),
}


@pytest.mark.parametrize("n_runs", [60, pytest.param(1000, marks=pytest.mark.soak("full"))])
@pytest.mark.parametrize(
    ("candidate", "rows", "options"),
    [
        (WORST["accuracy"], drawn, {"n_routers": 3, "most": 10_000}),
        (WORST["cost"], drawn, {"most": 10_000}),
        (WORST["accuracy"], paired, {"batch": 100}),
    ],
)
def test_wrong_decisions_are_as_rare_as_stated_however_rows_are_compared(n_runs, candidate, rows, options):
    """At the margin both decisions are wrong, by the smallest amount."""
    decisions = tally(n_runs, candidate, rows, **options)
    # A true rate as stated would show more than this in one of a thousand such tests.
    most = n_runs * RULE.error_rate if n_runs == 1000 else binom.ppf(0.999, n_runs, RULE.error_rate)
    assert decisions["promote"] <= most, decisions
    assert decisions["rollback"] <= most, decisions


@pytest.mark.parametrize(
    ("candidate", "rows", "expected", "within"),
    [
        (Policy(0.85, 0.25), drawn, "promote", 5_000),
        (Policy(0.65), drawn, "rollback", 2_500),
        (Policy(0.8, 0.6), drawn, "rollback", 2_500),
        (Policy(0.83), paired, "promote", 1_000),
        (Policy(0.77), paired, "rollback", 5_000),
    ],
)
def test_a_clearly_better_or_worse_candidate_is_decided_on_soon(candidate, rows, expected, within):
    decisions = [decided(seed, candidate, rows, most=15_000) for seed in range(20)]
    assert Counter(verdict for verdict, _ in decisions)[expected] >= 19, decisions
    assert median(n for _, n in decisions) <= within


def test_rows_of_one_policy_wait_for_rows_of_the_other():
    rows = Comparison(RULE, 10.0)
    rows.outcomes(np.ones(5, bool), of_candidate=True)
    rows.costs(np.full(3, 2.0), of_candidate=False)
    assert rows.take().candidate == PolicySums()
    rows.outcomes(np.array([True, False]), of_candidate=False)
    rows.costs(np.full(1, 30.0), of_candidate=True)  # counts as the highest cost
    evidence = rows.take()
    assert evidence.candidate == PolicySums(n=1, cost=10.0, n_known=5, n_right=5)
    assert evidence.incumbent == PolicySums(n=3, cost=6.0, n_known=2, n_right=1)
    assert rows.take().candidate == PolicySums()


def test_a_promotion_needs_rows_and_both_criteria_and_nothing_can_cost_too_much_where_nothing_costs():
    n = 2_000
    for rule, highest, expected in (
        (Rule(), 0.0, "promote"),
        (Rule(min_rows=n + 1), 0.0, None),
        (Rule(), 10.0, None),  # no cost was seen
    ):
        rows = Comparison(rule, highest)
        right = np.random.default_rng(0).random((n, 2)) < (0.9, 0.8)
        for of_candidate in (True, False):
            rows.outcomes(right[:, 1 - of_candidate], of_candidate=of_candidate)
            if not highest:
                rows.costs(np.zeros(n), of_candidate=of_candidate)
        verdict = decision(rows.take(), rule)
        assert (verdict and verdict[0]) == expected
    needed = PromotionEvidence().as_json(Rule(error_rate=0.1))["log10_needed"]
    assert needed == {"promote": 1.0, "rollback": round(math.log10(20), 3)}
