"""The choice of a router among models by value and price, the controls, margins and the Duo."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import softmax
from synthetic import chain, seeds

from cauc_ray.baselines.routing import routed
from cauc_ray.numbers.chain import Costs
from cauc_ray.policies.family import cascade_of
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.scored import margins
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, own_answers, trace_policy


@cache
def fitted(name, **how):
    """Return a fitted method and the test split; both are frozen, so that tests may share them."""
    splits = [Examples(chain(3, 300, shift=shift, **how)) for shift in (0, 1)]
    return METHODS[name].family(Fitting(*splits)), Examples(chain(3, 400, shift=2, **how))


@given(seeds, st.integers(1, 5), st.booleans(), st.floats(-3, 3))
def test_a_router_takes_the_model_of_the_highest_value_less_its_price(seed, m, per_call, price):
    rng = np.random.default_rng(seed)
    data = chain(seed, 30, strengths=(1.0,) * m, per_call=per_call)
    prices = rng.permutation(data.costs.means)  # the chain may be in any order
    values = rng.normal(size=(30, m)) * 10
    answers = routed(values, prices, data).answers(-price)
    chosen = answers.calls.argmax(axis=1)
    assert (answers.calls.sum(axis=1) == 1).all()
    assert (chosen == (values - price * prices).argmax(axis=1)).all()
    assert (answers.predictions == own_answers(data)[np.arange(30), chosen]).all()
    of_equals = routed(np.ones((30, m)), prices, data).answers(0.0).calls
    assert (of_equals.argmax(axis=1) == prices.argmin()).all()  # the cheaper one, whatever its index


@given(seeds, st.integers(1, 5), st.sampled_from([1e-300, 1.0, 1e18, 1e90]), st.booleans())
def test_every_point_is_what_its_threshold_gives_where_prices_are_equal_or_gains_huge(seed, m, scale, per_call):
    rng = np.random.default_rng(seed)
    prices = rng.integers(0, 3, m).astype(float)  # often some are the same, and some free
    costs = Costs("GFLOPs", prices * rng.uniform(0.5, 2.0, (40, m)) if per_call else prices)
    data = replace(chain(seed, 40, strengths=(1.0,) * m), costs=costs)
    values = np.round(rng.normal(size=(40, m)), 1) * scale  # and some values, too
    trace = routed(values, prices, data)
    frontier = trace.frontier(data)
    assert np.isfinite(frontier.settings).all()
    assert (np.diff(frontier.settings) > 0).all()
    for point, threshold in enumerate(frontier.settings):
        answers = trace.answers(threshold)
        assert answers.costs(data).mean() == pytest.approx(frontier.cost[point])
        assert np.mean(answers.predictions == data.labels) == pytest.approx(frontier.quality[point])
        value, price = values[answers.calls][:, None], np.broadcast_to(prices, (40, m))[answers.calls][:, None]
        assert not ((values > value) & (prices == price)).any()


def test_duo_is_rf_that_never_stops():
    duo, test = fitted("duo", strengths=(1.0, 1.6))
    calibration = chain(3, 300, strengths=(1.0, 1.6))
    rf = trace_policy(fit_rf(calibration, rule=ThresholdRule(threshold=2.0)), test.chain)
    answers = duo.answers(test, duo.default)
    assert (answers.predictions == rf.predictions[:, -1]).all()
    assert answers.calls.all()
    assert cascade_of(duo.members[0])(test).confidences[:, -1] == pytest.approx(rf.confidences[:, -1], abs=1e-6)


@given(seeds)
def test_margins_are_the_gap_of_the_two_best_and_keep_their_order_where_they_round_to_one(seed):
    (logits,) = chain(seed, 30, strengths=(1.0,), ragged=True).logits
    ranked = np.sort(softmax(np.float64(logits), axis=1), axis=1)
    assert margins(logits) == pytest.approx(ranked[:, -1] - ranked[:, -2], abs=1e-12)
    gaps = np.sort(np.random.default_rng(seed).uniform(30, 500, 5))
    assert np.all(np.diff(margins(np.column_stack([gaps, np.zeros(5), np.full(5, -3.0)]))) > 0)
    assert np.isfinite(margins(np.array([[1.0, -np.inf], [2.0, 1.0]]))).all()


def test_the_oracle_is_right_wherever_a_model_is_and_calls_the_cheapest_such():
    oracle, test = fitted("oracle")
    answers = oracle.answers(test, oracle.default)
    correct = test.correct()
    assert ((answers.predictions == test.chain.labels) == correct.any(axis=1)).all()
    first = np.where(correct.any(axis=1), correct.argmax(axis=1), 0)
    assert (answers.calls.argmax(axis=1) == first).all()
