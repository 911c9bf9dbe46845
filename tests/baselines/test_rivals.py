"""Methods that learn little: each against its definition, written again slowly or by another library."""

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from planted import problem
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsRegressor
from synthetic import softmax

from cauc_ray.errors import ConfigError
from cauc_ray.policies.family import chain_of
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.methods.rf import fit_rf
from cauc_ray.policies.threshold import ThresholdRule
from cauc_ray.policies.trace import trace_policy


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


def test_carrot_takes_the_best_of_estimated_accuracies_less_the_price_of_estimated_costs():
    fitting, test = problem(1, n=300, n_test=200, m=3, per_call=True)
    fitted = fit("carrot", fitting)
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
    with pytest.raises(ConfigError, match="budget or a threshold"):
        family.published(fitting, ThresholdRule(price=0.1))
