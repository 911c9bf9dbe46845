"""Routers by neighbouring queries, and RouteLLM's two, against slow loops and independent fits."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planted import changed, problem, scores, values_of
from scipy.optimize import minimize_scalar
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import cosine_similarity
from synthetic import seeds

from cauc_ray.baselines.benchmark_routing import SHARPNESSES, near_shares, sizes_to_try
from cauc_ray.policies.method import METHODS


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
