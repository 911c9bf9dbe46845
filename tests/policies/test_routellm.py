from dataclasses import replace

import numpy as np
import pytest
import torch
from planted import alike, examples, gain_over_lot, problem
from scipy.optimize import minimize_scalar
from scipy.stats import spearmanr
from sklearn.linear_model import LogisticRegression

from cauc_ray.policies.baselines import routellm
from cauc_ray.policies.baselines.routellm import MatrixFactorisation, battles, fit_routellm_mf, fit_routellm_sw
from cauc_ray.policies.baselines.training import linear

both = pytest.mark.parametrize("fit", [fit_routellm_mf, fit_routellm_sw])


@both
def test_it_beats_lots_at_equal_cost_where_the_embedding_says_who_is_right(fit):
    fitting, test = problem(1)
    assert gain_over_lot(fit(fitting), test) > 0.06


@both
def test_it_gains_nothing_where_the_embedding_says_nothing(fit):
    fitting, test = problem(2, strength=0.0)
    assert abs(gain_over_lot(fit(fitting), test)) < 0.03


@both
def test_the_first_models_outputs_do_where_there_are_no_embeddings(fit):
    fitting, test = problem(4, embedded=False)
    fitted = fit(fitting)
    assert gain_over_lot(fitted, test) > 0.06
    assert fitted.note == "features: the first model's outputs, its call paid"
    assert fitted.answers(test, fitted.default).calls[:, 0].all()


@both
@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_it_asks_the_first_or_the_last_model_of_a_chain_of_any_length(fit, m):
    fitting, test = problem(3, n=80, n_test=50, m=m, ragged=True)
    fitted = fit(fitting)
    first, last = (test.chain.logits[place].argmax(axis=1) for place in (0, -1))
    wins = 1 - fitted.cascade.trace(test).confidences[:, 0]
    middle = 1 - np.median(wins)
    answers = fitted.answers(test.without_labels(), middle)
    asked = wins > np.median(wins) if m > 1 else np.zeros(50, bool)
    assert (answers.predictions == np.where(asked, last, first)).all()
    expected = np.zeros((50, m), bool)
    expected[np.arange(50), np.where(asked, m - 1, 0)] = True
    assert (answers.calls == expected).all()
    assert fitted.note == ("first and last model only" if m > 2 else "")


@both
def test_models_that_never_disagree_have_even_odds(fit):
    fitting, test = problem(5, n=60, n_test=40)
    same = replace(fitting, calibration=alike(fitting.calibration), validation=alike(fitting.validation))
    fitted = fit(same)
    assert (fitted.cascade.trace(test).confidences[:, 0] == 0.5).all()
    assert fitted.answers(same.validation, fitted.default).costs(same.validation.chain).max() == 1.0


@both
def test_the_same_seed_gives_the_same_numbers(fit):
    fitting, test = problem(6, n=100, n_test=50)
    before = torch.get_rng_state()
    wins = fit(fitting).cascade.wins(test)
    assert (wins == fit(fitting).cascade.wins(test)).all()
    assert torch.equal(torch.get_rng_state(), before)


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
    models, queries = torch.randn((3, 7), generator=generator), torch.randn((4, 5), generator=generator)
    network = MatrixFactorisation(
        None, models, linear(5, 7, generator, bias=False), linear(7, 1, generator, bias=False)
    )
    winners, losers = torch.tensor([0, 1, 2, 0]), torch.tensor([1, 2, 0, 2])
    logits = network.logits(queries, winners, losers)
    for i in range(4):
        projected = network.projection.weight @ queries[i]
        own, other = (
            network.classifier.weight[0] @ (models[j[i]] / models[j[i]].norm() * projected) for j in (winners, losers)
        )
        torch.testing.assert_close(logits[i], own - other)
    torch.testing.assert_close(network.logits(queries, losers, winners), -logits)


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
