"""Routers' choices, the controls and the Duo: what every comparison rests on."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from synthetic import chain, seeds

from cauc_ray.numbers.chain import Costs
from cauc_ray.policies.baselines.routing import routed
from cauc_ray.policies.fitting import fit_rf
from cauc_ray.policies.methods import METHODS, Fitting
from cauc_ray.policies.routers import random_numbers
from cauc_ray.policies.scored import margins
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, own_answers, trace_policy


@cache
def fitted(name, **how):
    """Return a fitted method and the test split; both are frozen, so that tests may share them."""
    splits = [Examples(chain(3, 300, shift=shift, **how)) for shift in (0, 1)]
    return METHODS[name].load()(Fitting(*splits)), Examples(chain(3, 400, shift=2, **how))


@given(seeds, st.integers(1, 5), st.booleans(), st.floats(-3, 3))
def test_a_router_takes_the_model_of_the_highest_value_less_its_price(seed, m, per_call, price):
    rng = np.random.default_rng(seed)
    own = chain(seed, 30, strengths=(1.0,) * m, per_call=per_call)
    prices = rng.permutation(own.costs.means)  # in whatever order the chain is
    values = rng.normal(size=(30, m)) * 10
    trace = routed(values, prices, own)
    answers = trace.answers(-price)
    chosen = answers.calls.argmax(axis=1)
    assert (answers.calls.sum(axis=1) == 1).all()
    assert (chosen == (values - price * prices).argmax(axis=1)).all()
    assert (answers.predictions == own_answers(own)[np.arange(30), chosen]).all()


def test_among_equal_values_the_cheaper_model_answers_whatever_its_index():
    own = chain(0, 20, strengths=(1.0, 1.0, 1.0))
    for prices in ([3.0, 1.0, 2.0], [5.0, 2.0, 2.0]):
        calls = routed(np.ones((20, 3)), np.array(prices), own).answers(0.0).calls
        assert (calls.argmax(axis=1) == int(np.argmin(prices))).all()


@given(seeds, st.integers(1, 5), st.sampled_from([1e-300, 1.0, 1e18, 1e90]), st.booleans())
def test_every_point_is_what_its_threshold_gives_where_prices_are_equal_or_gains_huge(seed, m, scale, per_call):
    rng = np.random.default_rng(seed)
    own = chain(seed, 40, strengths=(1.0,) * m)
    prices = rng.integers(0, 3, m).astype(float)  # often some are the same, and some free
    own = replace(own, costs=Costs("GFLOPs", prices * rng.uniform(0.5, 2.0, (40, m)) if per_call else prices))
    values = np.round(rng.normal(size=(40, m)), 1) * scale  # and some values, too
    trace = routed(values, prices, own)
    frontier = trace.frontier(own)
    assert np.isfinite(frontier.settings).all()
    assert (np.diff(frontier.settings) > 0).all()
    for point, threshold in enumerate(frontier.settings):
        answers = trace.answers(threshold)
        assert answers.costs(own).mean() == pytest.approx(frontier.cost[point])
        assert np.mean(answers.predictions == own.labels) == pytest.approx(frontier.quality[point])
        calls = routed(values, prices, own).answers(threshold).calls
        chosen = values[calls][:, None], np.broadcast_to(prices, (40, m))[calls][:, None]
        assert not ((values > chosen[0]) & (prices == chosen[1])).any()


def test_duo_is_rf_that_never_stops():
    duo, test = fitted("duo", strengths=(1.0, 1.6))
    calibration = chain(3, 300, strengths=(1.0, 1.6))
    rf = trace_policy(fit_rf(calibration, rule=ThresholdRule(threshold=2.0)), test.chain)
    answers = duo.answers(test, duo.default)
    assert (answers.predictions == rf.predictions[:, -1]).all()
    assert answers.calls.all()
    own = duo.cascade(test)
    assert own.confidences[:, -1] == pytest.approx(rf.confidences[:, -1], abs=1e-6)


@given(seeds)
def test_margin_sampling_is_the_gap_of_the_two_best(seed):
    test = chain(seed, 30, ragged=True)
    fitting = Fitting(Examples(chain(seed, 30, shift=1)), Examples(chain(seed, 30, shift=2)))
    trace = METHODS["margin"].load()(fitting).cascade(Examples(test))
    for j, logits in enumerate(test.logits):
        assert (trace.predictions[:, j] == logits.argmax(axis=1)).all()
        ranked = np.sort(softmax(np.float64(logits), axis=1), axis=1)
        if j + 1 < len(test.logits):
            assert trace.compared[:, j] == pytest.approx(ranked[:, -1] - ranked[:, -2], abs=1e-12)


def test_random_choices_cost_what_they_may_and_gain_nothing():
    random, test = fitted("random", strengths=(0.5, 2.5))
    costs = test.chain.costs.means
    for share in (0.25, 0.5, 0.75):
        budget = costs[0] + share * (costs[1] - costs[0])
        answers = random.answers(test, METHODS["random"].setting(random, budget))
        assert answers.costs(test.chain).mean() == pytest.approx(budget, rel=0.15)
        single = test.correct().mean(axis=0)
        expected = single[0] + answers.calls[:, 1].mean() * (single[1] - single[0])
        assert np.mean(answers.predictions == test.chain.labels) == pytest.approx(expected, abs=0.06)


def test_random_numbers_depend_on_the_example_and_the_seed_alone():
    test = Examples(chain(0, 500))
    drawn = random_numbers(test.chain.example_ids, 1)
    assert ((drawn > 0) & (drawn < 1)).all()
    assert abs(drawn.mean() - 0.5) < 0.05
    order = np.random.default_rng(0).permutation(500)
    ids = tuple(test.chain.example_ids[row] for row in order)
    assert (random_numbers(ids, 1) == drawn[order]).all()
    assert (random_numbers(test.chain.example_ids, 2) != drawn).any()


def test_the_oracle_is_right_wherever_a_model_is_and_calls_the_cheapest_such():
    oracle, test = fitted("oracle")
    answers = oracle.answers(test, oracle.default)
    correct = test.correct()
    assert ((answers.predictions == test.chain.labels) == correct.any(axis=1)).all()
    first = np.where(correct.any(axis=1), correct.argmax(axis=1), 0)
    assert (answers.calls.argmax(axis=1) == first).all()


def test_shuffled_confidences_keep_the_cascade_s_cost_and_lose_its_gain():
    shuffled, test = fitted("shuffled", strengths=(1.0, 2.5))
    rf, _ = fitted("rf", strengths=(1.0, 2.5))
    budget = float(test.chain.costs.means @ [1.0, 0.4])
    costs, accuracies = [], []
    for name, own in (("rf", rf), ("shuffled", shuffled)):
        answers = own.answers(test, METHODS[name].setting(own, budget))
        costs.append(answers.costs(test.chain).mean())
        accuracies.append(np.mean(answers.predictions == test.chain.labels))
    assert costs[1] == pytest.approx(budget, rel=0.15)
    assert accuracies[0] > accuracies[1]


def test_margins_that_round_to_one_keep_their_order():
    gaps = np.array([5.0, 20.0, 45.0, 60.0, 400.0])
    logits = np.column_stack([gaps, np.zeros(5), np.full(5, -3.0)])
    found = margins(logits)
    assert np.all(np.diff(found) > 0)
    exact = softmax(logits[:2], axis=1)
    assert found[:2] == pytest.approx(exact[:, 0] - exact[:, 1])
    assert np.isfinite(margins(np.array([[1.0, -np.inf], [2.0, 1.0]]))).all()
