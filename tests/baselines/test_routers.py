"""Routers: the choice by value and price, neighbouring queries, RouteLLM's two, CARROT; the controls and the Duo."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import changed, problem, scores, values_of
from scipy.optimize import minimize_scalar
from scipy.special import softmax
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.neighbors import KNeighborsRegressor
from synthetic import chain, seeds

from cauc_ray.baselines.benchmark_routing import SHARPNESSES, near_shares, sizes_to_try
from cauc_ray.baselines.routing import routed
from cauc_ray.numbers.chain import Costs
from cauc_ray.policies.family import cascade_of
from cauc_ray.policies.fitting import Fitting
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.scored import margins
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import Examples, own_answers, trace_policy


def fitted(name, **how):
    """Return a fitted method and the test split."""
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


def slow_estimates(neighbours, correct, vectors, k, sharpness):
    """Return g by a loop over queries and models."""
    estimates = np.zeros((len(vectors), correct.shape[1]))
    for row, cosines in enumerate(cosine_similarity(np.float64(vectors), np.float64(neighbours))):
        near = np.argsort(-cosines)[:k]
        weights = np.exp(sharpness * (cosines[near] - 1))
        estimates[row] = [np.average(right, weights=weights) for right in correct[near].T]
    return estimates


@given(seeds, st.integers(1, 40), st.sampled_from(SHARPNESSES), st.integers(2, 4))
def test_estimates_are_those_of_a_slow_loop(seed, k, sharpness, m):
    fitting, test = problem(seed, n=40, n_test=20, m=m)
    of_calibration = fitting.calibration.embeddings, fitting.calibration.correct()
    shares = near_shares(test.embeddings, *of_calibration, (k,), (sharpness,))[0, 0]
    np.testing.assert_allclose(shares, slow_estimates(*of_calibration, test.embeddings, k, sharpness), atol=1e-5)


@given(seeds)
@settings(max_examples=10)
def test_no_other_size_and_weight_are_better_on_validation(seed):
    fitting, _ = problem(seed, n=60, n_test=1)
    calibration, validation = fitting.calibration, fitting.validation
    chosen = METHODS["benchmark-routing"].family(fitting).members[0]

    def loss(k, sharpness):
        estimates = slow_estimates(calibration.embeddings, calibration.correct(), validation.embeddings, k, sharpness)
        return np.mean((estimates - validation.correct()) ** 2)

    tried = [(k, sharpness) for k in sizes_to_try(60) for sharpness in SHARPNESSES]
    assert loss(chosen.k, chosen.sharpness) <= min(loss(*pair) for pair in [*tried, (60, 0.0)]) + 1e-6


@pytest.mark.parametrize("method", ["benchmark-routing", "carrot", "routellm-sw"])
def test_a_policy_with_other_queries_does_not_answer_by_those_before(method):
    fitting, test = problem(3, n=40, n_test=30)
    policy = METHODS[method].family(fitting).members[0]
    before = policy.values(test.embeddings)
    turned = policy.with_arrays({**policy.arrays, "known": -policy.arrays["known"]})
    assert not np.array_equal(turned.values(test.embeddings), before)


def test_of_queries_that_are_as_near_the_first_count():
    queries = np.float32([[1, 0], [0, 1], [1, 0], [1, 0]])
    correct = np.array([[1], [0], [0], [1]])
    shares = near_shares(np.float32([[1, 0]]), queries, correct, (1, 2, 3), (0.0,))[0, :, 0, 0]
    np.testing.assert_allclose(shares, [1, 1 / 2, 2 / 3])


def with_copies(split):
    """Return examples of two models that give the same outputs."""
    return replace(split, chain=replace(split.chain, logits=(split.chain.logits[0],) * 2))


@pytest.mark.parametrize("method", ["routellm-mf", "routellm-sw"])
def test_models_that_never_disagree_have_even_odds(method):
    fitting, test = problem(5, n=60, n_test=40)
    equal = changed(fitting, with_copies)
    fitted = METHODS[method].family(equal)
    assert (scores(fitted, test)[:, 0] == 0.5).all()
    assert fitted.answers(equal.validation, fitted.default).costs(equal.validation.chain).max() == 1.0


def test_matrix_factorisation_ranks_as_a_logistic_regression_on_the_disagreements():
    fitting, test = problem(8)
    right = fitting.calibration.correct()
    disagreed = right[:, 0] != right[:, 1]
    oracle = LogisticRegression(fit_intercept=False).fit(fitting.calibration.embeddings[disagreed], right[disagreed, 1])
    wins = values_of(METHODS["routellm-mf"].family(fitting), test)
    assert spearmanr(wins, oracle.decision_function(test.embeddings)).statistic > 0.9


def test_similarity_weighting_is_the_bradley_terry_regression_of_each_query():
    fitting, test = problem(10, n=50, n_test=8)
    wins = values_of(METHODS["routellm-sw"].family(fitting), test)
    right = fitting.calibration.correct().astype(float)
    last_wins = np.select([right[:, 1] > right[:, 0], right[:, 1] < right[:, 0]], [1.0, 0.0], 0.5)
    for query, probability in zip(test.embeddings.astype(float), wins, strict=True):
        similarity = fitting.calibration.embeddings @ query
        weights = 10 * 10 ** (similarity / similarity.max())

        def loss(ratings_apart, weights=weights):
            """The NLL of all battles, ties counted as half a win for each."""
            odds = np.log(10) * ratings_apart / 400
            return np.sum(weights * (last_wins * np.logaddexp(0, -odds) + (1 - last_wins) * np.logaddexp(0, odds)))

        ratings_apart = minimize_scalar(loss, bounds=(-2000, 2000), method="bounded", options={"xatol": 1e-9}).x
        assert probability == pytest.approx(1 - 1 / (1 + 10 ** (ratings_apart / 400)), abs=1e-5)


def test_carrot_takes_the_best_of_estimated_accuracies_less_the_price_of_estimated_costs():
    fitting, test = problem(1, n=300, n_test=200, m=3, per_call=True)
    fitted = METHODS["carrot"].family(fitting)
    numbers, queries, new = fitted.members[0], fitting.calibration.embeddings, test.embeddings
    correct, costs = fitting.calibration.correct().astype(float), fitting.calibration.chain.costs.per_call
    estimates = [
        KNeighborsRegressor(n_neighbors=k, metric="cosine").fit(queries, target).predict(new)
        for k, target in ((numbers.k, correct), (numbers.k_costs, costs))
    ]
    for price in (0.0, 0.003, 0.01, 0.03, 1.0):
        chosen = fitted.answers(test.without_labels(), -price).calls.argmax(axis=1)
        utility = estimates[0] - price * np.maximum.accumulate(estimates[1], axis=1)
        assert utility[np.arange(200), chosen] == pytest.approx(utility.max(axis=1), abs=1e-6)
