import warnings
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from synthetic import splits

from cauc_ray.errors import BudgetError, CaucWarning, ConfigError, DataError
from cauc_ray.numbers.metrics import macro_f1
from cauc_ray.policies.fitting import fit_policy
from cauc_ray.policies.search import search_chains, sub_chains_of_base, sub_chains_of_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay, trace_policy

NAMES = ("calibration", "validation")
POOL = (0.6, 1.0, 1.5, 2.0)
methods = pytest.mark.parametrize("method", ["base", "rf"])


def pool(seed=3, n=150, strengths=POOL, **how):
    return splits(seed, n, k=4, strengths=strengths, **how)


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


@pytest.mark.slow
@settings(max_examples=25)
@given(
    method=st.sampled_from(["base", "rf"]),
    rule=RULES,
    seed=st.integers(0, 10**6),
    n=st.integers(20, 150),
    ragged=st.booleans(),
    per_call=st.booleans(),
)
@example("rf", ThresholdRule(budget=2.0), 0, 120, False, False)
@example("base", ThresholdRule(budget=3.0, objective="macro-f1"), 1, 60, True, True)
def test_a_search_finds_what_fitting_every_sub_chain_finds(method, rule, seed, n, ragged, per_call):
    calibration, validation = pool(seed, n, ragged=ragged, per_call=per_call)
    measured = by_brute_force(method, calibration, validation, rule)
    if not measured:
        with pytest.raises(BudgetError):
            search_chains(method, calibration, validation, rule, "validation")
        return
    found = search_chains(method, calibration, validation, rule, "validation")
    order = ranking(measured)
    named = [found.chosen, *found.runners_up]
    assert len(named) == min(6, len(order))
    for chain_found, expected in zip(named, order, strict=False):
        # Chains of equal quality, cost and length may stand in any order.
        assert chain_found.quality == pytest.approx(measured[expected][0])
        assert chain_found.cost == pytest.approx(measured[expected][1])
        assert len(chain_found.models) == len(expected)
    for one, size in ((found.single, 1), (found.pair, 2), (found.full, len(POOL)), *((c, None) for c in named)):
        best = one.models if size is None else next((models for models in order if len(models) == size), None)
        if best is None:
            assert one.quality is None
            assert one.cost is None
        else:
            assert (one.quality, one.cost) == pytest.approx(measured[best])
    assert found.n_chains == 2 ** len(POOL) - 1
    assert found.n_measured == found.n_chains


@methods
@pytest.mark.parametrize("ragged", [False, True])
def test_every_chain_has_the_trace_of_its_own_fit_to_the_bit(method, ragged):
    calibration, validation = pool(8, 130, ragged=ragged)
    chains_of = {"base": sub_chains_of_base, "rf": sub_chains_of_rf}[method]
    seen = []
    for found in chains_of(calibration, validation, "temperature"):
        places = found.indices
        policy = fit_policy(method, calibration.of_models(places), None, ThresholdRule(threshold=0.5), NAMES)
        expected = trace_policy(policy, validation.of_models(places))
        for stage, (predictions, confidences) in enumerate(found.steps):
            np.testing.assert_array_equal(predictions, expected.predictions[:, stage])
            np.testing.assert_array_equal(confidences, expected.confidences[:, stage])
        seen.append(places)
    assert sorted(seen) == sorted(sub_chains(len(POOL)))


def test_the_order_in_which_a_pool_is_given_does_not_matter():
    calibration, validation = pool()
    shuffled = [2, 0, 3, 1]
    rule = ThresholdRule(budget=9.0)
    assert search_chains("rf", calibration, validation, rule, "v") == search_chains(
        "rf", calibration.of_models(shuffled), validation.of_models(shuffled), rule, "v"
    )


def test_held_out_figures_say_what_the_choice_is_worth_where_models_know_nothing():
    # Models that guess at random: whatever chain is chosen, on other examples it is right at random.
    rng = np.random.default_rng(0)
    calibration, validation = (
        replace(data, labels=rng.integers(0, 4, len(data)).astype(np.int32)) for data in pool(4, 400)
    )
    found = search_chains("rf", calibration, validation, ThresholdRule(), "validation")
    assert found.chosen.quality > found.chosen.holdout_quality
    assert found.chosen.holdout_quality == pytest.approx(0.25, abs=4 * np.sqrt(0.25 * 0.75 / 400))


def test_held_out_figures_are_a_chain_s_own_where_nothing_is_chosen():
    calibration, validation = pool()
    given_ = ThresholdRule(threshold=0.7)
    found = search_chains("rf", calibration, validation, given_, "validation")
    # Every example is held out equally often, in halves of equal size.
    assert found.full.holdout_quality == pytest.approx(found.full.quality)
    assert found.full.holdout_cost == pytest.approx(found.full.cost)


def test_a_pool_of_one_model_is_its_own_chain():
    calibration, validation = pool(strengths=(1.0,))
    found = search_chains("rf", calibration, validation, ThresholdRule(), "validation")
    assert found.chosen.models == ("m0",)
    assert found.pair is None
    assert (found.n_chains, found.runners_up) == (1, ())


@methods
def test_a_search_finds_the_chain_that_is_best_with_offsets(method):
    bias = np.array([1.5, -1.0, 0.0, -0.5], dtype=np.float32)
    data = [replace(own, logits=tuple(z + bias / (j + 1) for j, z in enumerate(own.logits))) for own in pool(7, 250)]
    rule = ThresholdRule(budget=9.0)
    found = search_chains(method, *data, rule, "validation", calibrator="offsets").chosen
    places = [data[0].models.index(name) for name in found.models]
    own = fit_policy(method, *(split.of_models(places) for split in data), rule, NAMES, calibrator="offsets").expected
    assert (own.accuracy.value, own.cost) == (found.quality, pytest.approx(found.cost))


@pytest.mark.parametrize(
    ("error", "says", "asked"),
    [
        (BudgetError, r"budget 0.5 GFLOPs is below .* cheapest chain, 1 GFLOPs \('m0'", {"rule": {"budget": 0.5}}),
        (ConfigError, "validation split", {"validation": lambda data: None}),
        (ConfigError, "only with a budget", {"method": "base", "rule": {"objective": "macro-f1"}}),
        (ConfigError, "'fr'", {"method": "fr"}),
        (ConfigError, "up to 12 models, got 13", {"calibration": lambda data: data.of_models([0] * 13)}),
        (DataError, "a chain needs labels", {"validation": lambda data: replace(data, labels=np.full(150, -1))}),
        (ConfigError, "isotonic is for method base with one or two", {"method": "base", "calibrator": "isotonic"}),
    ],
)
def test_what_cannot_be_searched_is_refused(error, says, asked):
    calibration, validation = (
        asked.get(name, lambda data: data)(data) for name, data in zip(NAMES, pool(), strict=True)
    )
    rule, how = ThresholdRule(**asked.get("rule", {})), {"calibrator": asked.get("calibrator", "temperature")}
    with pytest.raises(error, match=says):
        search_chains(asked.get("method", "rf"), calibration, validation, rule, "v", **how)
