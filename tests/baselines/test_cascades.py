"""Cascades that are compared with ours: each against its definition, written again slowly or by another library."""

import math
from dataclasses import replace
from itertools import combinations, permutations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import problem
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.preprocessing import StandardScaler
from synthetic import seeds, softmax

from cauc_ray.baselines import frugalgpt
from cauc_ray.baselines.frugalgpt import distances_of, first_taken, fit_scorers, search
from cauc_ray.errors import ConfigError
from cauc_ray.policies.family import chain_of
from cauc_ray.policies.features import option_features
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import replay, trace_policy


def table(seed, n, m, *, per_call):
    """Few distinct distances, so that ties are common."""
    rng = np.random.default_rng(seed)
    distances = rng.integers(1, 6, (n, m)) / 6
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


def by_definition(policy, row_logits, query_features):
    """Return a row's answer, the stages called, and what it cost, in plain numbers."""
    costs, called = [stage.cost for stage in policy.answering], ()
    while True:
        logs = [row_logits[model] - np.logaddexp.reduce(row_logits[model]) for model in called]
        features = list(query_features)
        for log in logs:
            features += [math.exp(log.max()), -sum(math.exp(x) * x for x in log if np.isfinite(x))]
        for first, second in combinations(logs, 2):
            p, q = np.exp(first), np.exp(second)
            mean = (p + q) / 2
            parts = [a[a > 0] @ np.log2(a[a > 0] / mean[a > 0]) for a in (p, q)]
            features += [first.argmax() == second.argmax(), sum(parts) * math.log(2) / 2]
        weights = policy.arrays["after/" + ",".join(map(str, called))]
        q = [1 / (1 + math.exp(-(w[:-1] @ np.array(features, dtype=float) + w[-1]))) for w in weights]
        best = max((q[model] for model in called), default=-math.inf)
        later = range(called[-1] + 1 if called else 0, len(costs))
        if len(called) < len(policy.solution) and later:
            price = policy.solution[len(called)]
            worth = {model: max(q[model], best) - price * costs[model] for model in later}
            to = max(worth, key=worth.get)
            if worth[to] > best:
                called = (*called, to)
                continue
        taken = max(called, key=lambda model: q[model])
        return row_logits[taken].argmax(), called, sum(costs[model] for model in called)


@pytest.mark.parametrize(("m", "embedded", "share"), [(3, False, 0.6), (3, True, 0.2)])
def test_a_policy_does_what_the_definition_says(m, embedded, share):
    fitting, test = problem(4, n=200, n_test=60, m=m, k=5, ragged=True, embedded=embedded)
    fitted = METHODS["cascade-routing"].family(fitting)
    costs = np.sort(fitted.points.cost)
    policy = fitted.published(fitting, ThresholdRule(budget=float(costs[0] + share * (costs[-1] - costs[0]))))
    answered = replay(policy, test.own_chain([stage.name for stage in policy.answering], encoded=embedded))
    query_features = policy.query_odds(test.embeddings) if embedded else np.zeros((60, 0))
    logits = [z.astype(np.float64) for z in test.chain.logits]
    for row in range(60):
        prediction, called, cost = by_definition(policy, [z[row] for z in logits], query_features[row])
        assert answered.predictions[row] == prediction
        assert answered.costs[row] == pytest.approx(cost)
        assert set(np.flatnonzero(answered.calls[row, int(embedded) :])) == set(called)


def fit(name, fitting):
    return METHODS[name].family(fitting)


def traced(name, fitting, test):
    """Return the answers, confidences and worth of a method's only policy."""
    (policy,) = fit(name, fitting).members
    return trace_policy(policy, chain_of(policy, test))


def sorted_probabilities(logits):
    return np.sort([softmax(row) for row in logits], axis=1)[:, ::-1]


def test_ucci_is_isotonic_regression_on_the_margin():
    fitting, test = problem(1, n=300, n_test=200, m=3, embedded=False, k=5)
    worth = traced("ucci", fitting, test).compared
    for stage, logits in enumerate(fitting.calibration.chain.logits[:-1]):
        margins, new = (np.diff(-sorted_probabilities(of)[:, :2])[:, 0] for of in (logits, test.chain.logits[stage]))
        regression = IsotonicRegression(out_of_bounds="clip").fit(margins, fitting.calibration.correct()[:, stage])
        assert worth[:, stage] == pytest.approx(regression.predict(new), abs=0.05)
        assert np.median(np.abs(worth[:, stage] - regression.predict(new))) < 0.005
        order = np.argsort(new)
        assert (np.diff(worth[order, stage]) >= 0).all()  # a threshold of it is one of the margin


def test_two_models_that_agree_are_believed_and_the_last_answers_where_none_do():
    fitting, test = problem(1, n=50, n_test=300, m=4, embedded=False)
    fitted = fit("agreement", fitting)
    assert fitted.default == 1.0
    answers = fitted.answers(test.without_labels(), 1.0)
    votes = np.stack([logits.argmax(axis=1) for logits in test.chain.logits], axis=1)
    for row, prediction, calls in zip(votes, answers.predictions, answers.calls, strict=True):
        n_calls = next((n for n in (2, 3) if len({*row[:n].tolist()}) < n), 4)
        assert calls.sum() == n_calls
        assert prediction == row[3] if n_calls == 4 else (row[:n_calls] == prediction).sum() == 2


def test_logistic_stacking_is_scikit_learn_s_where_rows_have_all_options():
    fitting, test = problem(1, n=300, n_test=100, m=3, embedded=False)
    trace = traced("logistic", fitting, test)
    likelihoods = []
    for stage in range(3):
        inputs = [logs_of(split, stage + 1) for split in (fitting.calibration, fitting.validation, test)]
        mean, deviation = inputs[0].mean(axis=0), inputs[0].std(axis=0)
        training, unseen, new = ((x - mean) / deviation for x in inputs)
        fits = [
            LogisticRegression(C=c, max_iter=2000).fit(training, fitting.calibration.chain.labels)
            for c in (3e-4, 3e-3, 0.03, 0.3, 3.0)
        ]
        labels = fitting.validation.chain.labels
        best = max(fits, key=lambda fit: np.log(fit.predict_proba(unseen))[np.arange(300), labels].sum())
        likelihoods = best.predict_proba(new)
        assert trace.confidences[:, stage] == pytest.approx(likelihoods.max(axis=1), abs=1e-4)
        assert (trace.predictions[:, stage] == likelihoods.argmax(axis=1)).mean() > 0.99


def logs_of(split, n_models):
    """Return the log probabilities of some models side by side, at least -20."""
    probabilities = (np.array([softmax(row) for row in logits]) for logits in split.chain.logits[:n_models])
    return np.column_stack([np.maximum(np.log(np.maximum(p, 1e-300)), -20) for p in probabilities])


def test_logistic_stacking_is_for_few_options_and_answers_what_calibration_has():
    fitting, test = problem(1, n=40, n_test=30, k=4, embedded=False, ragged=True)
    one_class = replace(fitting.calibration, chain=replace(fitting.calibration.chain, labels=np.zeros(40, np.int32)))
    trace = traced("logistic", replace(fitting, calibration=one_class), test)
    assert not trace.predictions.any()
    wide, _ = problem(1, n=40, n_test=1, k=21, embedded=False)
    with pytest.raises(ConfigError, match="up to 20 options"):
        fit("logistic", wide)


def test_the_best_pair_is_the_best_of_rf_on_each_pair_and_model_at_every_budget():
    fitting, _ = problem(1, n=200, n_test=1, m=3, embedded=False)
    calibration, validation = fitting.calibration.chain, fitting.validation.chain
    family = fit("best-pair", fitting)
    chains = [(0,), (1,), (2,), *combinations(range(3), 2)]
    frontiers = []
    for models in chains:
        policy = fit_rf(calibration.of_models(models), rule=ThresholdRule(threshold=2.0))
        pair = validation.of_models(models)
        frontiers.append(trace_policy(policy, pair).frontier(pair))
    for budget in (1.0, 5.0, 12.0, 30.0, 100.0):
        best = max(frontier.best(budget).quality for frontier in frontiers if frontier.cost.min() <= budget)
        chosen = family.published(fitting, ThresholdRule(budget=budget))
        assert chosen.on_selection.accuracy.value == pytest.approx(best)
        assert len(chosen.stages) <= 2
    best = max(frontier.at(0.7).quality for frontier in frontiers)
    assert family.published(fitting, ThresholdRule(threshold=0.7)).expected.accuracy.value == pytest.approx(best)
    with pytest.raises(ConfigError, match="budget or threshold"):
        family.published(fitting, ThresholdRule(price=0.1))
