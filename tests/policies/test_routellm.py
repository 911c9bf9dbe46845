from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import alike, changed, examples, problem
from scipy.optimize import minimize_scalar
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression

from cauc_ray.policies.baselines import routellm
from cauc_ray.policies.baselines.routellm import MatrixFactorisation, battles, fit_routellm_mf, fit_routellm_sw

both = pytest.mark.parametrize("fit", [fit_routellm_mf, fit_routellm_sw])


@both
@pytest.mark.parametrize("m", [2, 4])
def test_it_calls_the_last_model_where_its_win_is_likelier_than_the_threshold(fit, m):
    fitting, test = problem(3, n=80, n_test=50, m=m, ragged=True)
    cascade = fit(fitting).cascade
    wins = cascade.wins(test)
    calls_last = wins > np.median(wins)
    answers = cascade(test).answers(1 - np.median(wins))
    assert (answers.calls == np.eye(m, dtype=bool)[np.where(calls_last, m - 1, 0)]).all()


@both
def test_models_that_never_disagree_have_even_odds(fit):
    fitting, test = problem(5, n=60, n_test=40)
    same = changed(fitting, alike)
    fitted = fit(same)
    assert (fitted.cascade(test).confidences[:, 0] == 0.5).all()
    assert fitted.answers(same.validation, fitted.default).costs(same.validation.chain).max() == 1.0


def test_battles_are_those_of_a_loop():
    split = examples(7, 0, n=60, m=4)
    right = split.correct()
    expected = {
        (i, winner, loser)
        for i in range(60)
        for winner in range(4)
        for loser in range(4)
        if right[i, winner] > right[i, loser]
    }
    found = battles(split)
    assert {tuple(battle) for battle in found.tolist()} == expected
    assert len(found) == len(expected)


def test_matrix_factorisation_ranks_as_a_logistic_regression_on_the_disagreements():
    fitting, test = problem(8)
    right = fitting.calibration.correct()
    apart = right[:, 0] != right[:, 1]
    oracle = LogisticRegression(fit_intercept=False).fit(fitting.calibration.embeddings[apart], right[apart, 1])
    wins = fit_routellm_mf(fitting).cascade.wins(test)
    assert spearmanr(wins, oracle.decision_function(test.embeddings)).statistic > 0.9


def test_logits_are_those_of_the_papers_formula():
    generator = torch.Generator().manual_seed(0)
    network = MatrixFactorisation(5, 3, generator)
    queries, models = torch.randn((4, 5), generator=generator), network.models
    winners, losers = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 2, 0, 2])
    logits = network(queries, winners, losers)
    for i in range(4):
        projected = network.projection.weight @ queries[i]
        own, other = (
            network.classifier.weight[0] @ (models[j[i]] / models[j[i]].norm() * projected) for j in (winners, losers)
        )
        torch.testing.assert_close(logits[i], own - other)
    torch.testing.assert_close(network(queries, losers, winners), -logits)


def test_a_validation_split_without_battles_stops_nothing():
    fitting, test = problem(9, n=200)
    wins = fit_routellm_mf(replace(fitting, validation=alike(fitting.validation))).cascade.wins(test)
    right = test.correct().astype(int)
    assert np.corrcoef(wins, right[:, 1] - right[:, 0])[0, 1] > 0.2


def test_similarity_weighting_is_the_bradley_terry_regression_of_each_query():
    fitting, test = problem(10, n=50, n_test=8)
    wins = fit_routellm_sw(fitting).cascade.wins(test)
    right = fitting.calibration.correct().astype(float)
    last_wins = np.select([right[:, 1] > right[:, 0], right[:, 1] < right[:, 0]], [1.0, 0.0], 0.5)
    for query, found in zip(test.embeddings.astype(float), wins, strict=True):
        similarity = fitting.calibration.embeddings @ query
        weights = 10 * 10 ** (similarity / similarity.max())

        def loss(ratings_apart, weights=weights):
            """The NLL of all battles, ties counted as half a win for each."""
            odds = np.log(10) * ratings_apart / 400
            return np.sum(weights * (last_wins * np.logaddexp(0, -odds) + (1 - last_wins) * np.logaddexp(0, odds)))

        ratings_apart = minimize_scalar(loss, bounds=(-2000, 2000), method="bounded", options={"xatol": 1e-9}).x
        assert found == pytest.approx(1 - 1 / (1 + 10 ** (ratings_apart / 400)), abs=1e-5)


def test_similarities_are_the_same_block_by_block(monkeypatch):
    fitting, test = problem(11, n=70, n_test=33)
    router = fit_routellm_sw(fitting).cascade
    whole = router.wins(test)
    monkeypatch.setattr(routellm, "BLOCK", 200)
    np.testing.assert_allclose(router.wins(test), whole, rtol=1e-5)
    monkeypatch.setattr(routellm, "BLOCK", 1)
    np.testing.assert_allclose(router.wins(test), whole, rtol=1e-5)


def test_a_query_that_resembles_none_has_the_share_of_all():
    fitting, test = problem(12, n=40, n_test=5)
    ahead = np.abs(fitting.calibration.embeddings)
    behind = replace(test, embeddings=-np.abs(test.embeddings))
    fitted = fit_routellm_sw(replace(fitting, calibration=replace(fitting.calibration, embeddings=ahead)))
    right = fitting.calibration.correct().astype(float)
    np.testing.assert_allclose(fitted.cascade.wins(behind), np.mean(1 + right[:, 1] - right[:, 0]) / 2, rtol=1e-5)
