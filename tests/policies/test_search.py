"""The search for the best sub-chain of a pool, against fits of all of them."""

import warnings
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from synthetic import splits

from cauc_ray.errors import BudgetError, CaucWarning
from cauc_ray.numbers.metrics import macro_f1
from cauc_ray.policies.by_method import fit_policy
from cauc_ray.policies.search import search_chains, with_search
from cauc_ray.policies.threshold import ThresholdRule, random_halves
from cauc_ray.policies.trace import Examples, replay

NAMES = ("calibration", "validation")
POOL = (0.6, 1.0, 1.5, 2.0)


def pool(seed=3, n=150, strengths=POOL, **how):
    return splits(seed, n, k=4, strengths=strengths, **how)


def named(chain, models):
    return chain.of_models([chain.models.index(model) for model in models])


def sub_chains(m):
    return [places for size in range(1, m + 1) for places in combinations(range(m), size)]


def by_brute_force(method, calibration, validation, rule):
    """Fit every sub-chain as `cauc fit` would, and measure it by a replay: quality and cost by models."""
    measured = {}
    for places in sub_chains(len(calibration.models)):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CaucWarning)  # few examples may say nothing of a model
                policy = fit_policy(method, calibration.of_models(places), validation.of_models(places), rule, NAMES)
        except BudgetError:
            continue
        answers = replay(policy, validation.of_models(places))
        right = answers.predictions == validation.labels
        quality = right.mean() if rule.objective == "accuracy" else macro_f1(answers.predictions, validation.labels)
        measured[policy.models] = float(quality), float(answers.costs.mean())
    return measured


def ranking(measured):
    """Return models from the best chain to the worst."""
    return sorted(
        measured, key=lambda models: (-round(measured[models][0], 9), round(measured[models][1], 9), len(models))
    )


RULES = st.one_of(
    st.builds(ThresholdRule, budget=st.floats(1.5, 60), objective=st.sampled_from(["accuracy", "macro-f1"])),
    st.builds(ThresholdRule, threshold=st.floats(0, 1)),
    st.just(ThresholdRule()),
)


@settings(max_examples=12)
@given(
    m=st.integers(1, len(POOL)),
    method=st.sampled_from(["base", "rf"]),
    rule=RULES,
    seed=st.integers(0, 10**6),
    n=st.integers(20, 150),
    ragged=st.booleans(),
    per_call=st.booleans(),
)
@example(4, "rf", ThresholdRule(budget=2.0), 0, 120, False, False)
@example(3, "base", ThresholdRule(budget=3.0, objective="macro-f1"), 1, 60, True, True)
def test_a_search_finds_what_fitting_every_sub_chain_finds(m, method, rule, seed, n, ragged, per_call):
    calibration, validation = pool(seed, n, POOL[:m], ragged=ragged, per_call=per_call)
    order = np.random.default_rng(seed).permutation(m)  # a pool may be given in any
    splits_in_order = [Examples(data.of_models(order)) for data in (calibration, validation)]
    measured = by_brute_force(method, calibration, validation, rule)
    if not measured:
        with pytest.raises(BudgetError):
            search_chains(method, *splits_in_order, rule, "validation")
        return
    search = search_chains(method, *splits_in_order, rule, "validation")
    order = ranking(measured)
    ranked = [search.chosen, *search.runners_up]
    assert len(ranked) == min(6, len(order))
    for chain, expected in zip(ranked, order, strict=False):
        # Chains of equal quality, cost and length may come in any order.
        assert (chain.quality, chain.cost) == pytest.approx(measured[expected])
        assert (chain.quality, chain.cost) == pytest.approx(measured[chain.models])
        assert len(chain.models) == len(expected)
    assert (search.pair is None) == (m == 1)
    for chain, size in ((search.single, 1), (search.full, m), (search.pair, 2)):
        best = next((models for models in order if len(models) == size), None)
        if chain is not None and best is None:
            assert (chain.quality, chain.cost) == (None, None)
        elif chain is not None:
            assert (chain.quality, chain.cost) == pytest.approx(measured[best])
    assert search.n_chains == search.n_measured == 2**m - 1


def test_a_search_of_a_large_table_finds_the_same():
    calibration, validation = splits(3, 4_096, k=1_000, strengths=(1.0, 1.5, 2.0))
    rule = ThresholdRule(budget=10.0)
    measured = by_brute_force("rf", calibration, validation, rule)
    search = search_chains("rf", Examples(calibration), Examples(validation), rule, "validation")
    assert search.chosen.models == ranking(measured)[0]
    for chain in (search.chosen, *search.runners_up):
        assert (chain.quality, chain.cost) == pytest.approx(measured[chain.models], abs=2 / len(validation))


def test_held_out_figures_are_a_chain_s_own_where_nothing_is_chosen():
    calibration, validation = pool()
    rule = ThresholdRule(threshold=0.7)
    full = search_chains("rf", Examples(calibration), Examples(validation), rule, "validation").full
    # Every example is held out equally often, in halves of equal size.
    assert (full.holdout_quality, full.holdout_cost) == pytest.approx((full.quality, full.cost))


@pytest.mark.parametrize("objective", ["accuracy", "macro-f1"])
def test_expected_accuracy_is_of_the_chain_and_threshold_that_the_other_half_chooses(objective):
    calibration, validation = pool(5, 80)
    rule = ThresholdRule(budget=20.0, objective=objective)
    search = search_chains("rf", Examples(calibration), Examples(validation), rule, "validation")
    policy = fit_policy("rf", *(named(split, search.chosen.models) for split in (calibration, validation)), rule, NAMES)
    right = 0
    halves = random_halves(len(validation))
    for rows, rest in zip(halves, halves[::-1], strict=True):
        half, later = validation.of_rows(rows), validation.of_rows(rest)
        best = search_chains("rf", Examples(calibration), Examples(half), rule, "validation").chosen.models
        on_half = fit_policy("rf", *(named(split, best) for split in (calibration, half)), rule, NAMES)
        right += int((replay(on_half, named(later, best)).predictions == later.labels).sum())
    published = with_search(policy, search)
    assert published.expected.accuracy.value == pytest.approx(right / len(validation))
    assert published.on_selection == policy.on_selection
