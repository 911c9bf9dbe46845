"""FrugalGPT: the search for solutions against brute force, its scorer against scikit-learn."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import problem
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from synthetic import seeds

from cauc_ray.baselines import frugalgpt
from cauc_ray.baselines.frugalgpt import distances_of, first_taken, fit_scorers, search
from cauc_ray.policies.features import option_features


def table(seed, n, m, *, levels=6, per_call=False):
    """Few distinct distances, so that ties are common."""
    rng = np.random.default_rng(seed)
    distances = rng.integers(1, levels, (n, m)) / levels
    costs = np.broadcast_to(rng.integers(0, 12, m).astype(float), (n, m))
    if per_call:
        costs = costs * rng.integers(1, 4, (n, m))
    return distances, rng.random((n, m)) < 1 - 0.8 * distances, costs


def slow_replay(order, thresholds, distances, correct, costs):
    """Return the cost and the number right of one solution, row by row."""
    cost, n_right = 0.0, 0
    for row in range(len(distances)):
        for model, threshold in zip(order, (*thresholds, np.inf), strict=True):
            cost += costs[row, model]
            if distances[row, model] < threshold:
                n_right += correct[row, model]
                break
    return cost, n_right


def all_solutions(data):
    """Yield cost and number right of all orders of at most three models, at all cuts of each model's distances."""
    m = data[0].shape[1]
    for order in permutations(range(m), min(3, m)):
        for thresholds in product(*([*np.unique(data[0][:, model]), np.inf] for model in order[:-1])):
            yield slow_replay(order, thresholds, *data)


@given(seeds, st.integers(1, 9), st.integers(1, 4), st.booleans())
def test_on_a_small_table_the_best_within_every_budget_is_that_of_brute_force(seed, n, m, per_call):
    data = table(seed, n, m, per_call=per_call)
    expected = list(all_solutions(data))
    solutions = [slow_replay(solution.order, solution.thresholds, *data) for solution in search(*data)]
    for budget in {cost for cost, _ in expected}:
        best = max(n_right for cost, n_right in expected if cost <= budget)
        assert max(n_right for cost, n_right in solutions if cost <= budget + 1e-9) == best


def test_a_distance_equal_to_the_threshold_goes_on_and_the_last_model_answers_whatever_its_distance():
    assert first_taken(np.array([[0.3], [0.2]]), (0.3,)).tolist() == [1, 0]


def features_of(part, model):
    """Return the features of queries and of a model's answers: its probabilities and which option it chose."""
    logits = part.chain.logits[model]
    chosen = logits.argmax(axis=1)[:, None] == np.arange(logits.shape[1])
    return np.column_stack([part.embeddings, option_features(logits), chosen])


def test_scores_are_the_likeliest_of_the_penalties_on_validation():
    fitting, _ = problem(5, n=200, n_test=1, embedded=True)
    distances = distances_of(fit_scorers(fitting), fitting.validation)
    for model in range(2):
        rows = [features_of(part, model) for part in (fitting.calibration, fitting.validation)]
        right = [part.correct()[:, model] for part in (fitting.calibration, fitting.validation)]
        scaler = StandardScaler().fit(np.float64(rows[0]))
        losses = []
        for c in frugalgpt.INVERSE_PENALTIES:
            fit = LogisticRegression(C=c, max_iter=1000).fit(scaler.transform(rows[0]), right[0])
            losses.append(log_loss(right[1], fit.predict_proba(scaler.transform(rows[1]))))
        assert log_loss(right[1], 1 - distances[:, model]) == pytest.approx(min(losses), abs=1e-4)
