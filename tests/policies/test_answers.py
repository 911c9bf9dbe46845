"""Cascades of models that answer in words."""

import re

import numpy as np
import pytest
from scipy.special import expit, logit
from sklearn.ensemble import GradientBoostingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss

import cauc_ray
from cauc_ray.data.answer_table import AnswerTable, write_answers
from cauc_ray.errors import ConfigError, DataError
from cauc_ray.numbers.correctness import fit_correctness
from cauc_ray.numbers.metrics import calibration_error

STRENGTHS = {"small": 0.0, "medium": 0.9, "large": 1.8}
COSTS = {"small": 1.0, "medium": 4.0, "large": 16.0}


def answered(rng, n):
    """Return what three models say of n rows: answers, confidences, whether they are right."""
    ease = rng.normal(0, 1.2, n)
    answers = {}
    for name, strength in STRENGTHS.items():
        chance = expit(strength + ease + rng.normal(0, 0.5, n))
        right = rng.random(n) < chance
        wrong = rng.integers(1, 4, n)
        texts = [f"The answer is {0 if is_right else number}." for is_right, number in zip(right, wrong, strict=True)]
        verbal = np.round(np.clip(0.6 + 0.4 * chance + rng.normal(0, 0.1, n), 0, 1), 1)
        verbal[rng.random(n) < 0.1] = np.nan
        answers[name] = texts, {"sequence": np.log(chance), "verbal": verbal}, right
    return answers


def table_of(folder, seed=0, **sizes):
    rng = np.random.default_rng(seed)
    for split, n in (sizes or {"calibration": 600, "validation": 600, "test": 4000}).items():
        for name, (texts, confidences, right) in answered(rng, n).items():
            ids = [f"{split}{row}" for row in range(n)]
            costs = {"cost": COSTS[name], "cost_unit": "USD"}
            write_answers(folder, name, split, ids, texts, confidences, right, rule="number", **costs)
    return folder


@pytest.mark.parametrize("n", [500, 4000])
def test_its_probabilities_are_as_good_as_the_best_of_scikit_learn(n):
    rng = np.random.default_rng(n)
    answers = answered(rng, n + 20_000)
    texts, confidences, right = answers["medium"]
    agrees = np.array(texts) == np.array(answers["small"][0])
    signals = np.column_stack([*confidences.values(), *answers["small"][1].values()])
    train, test = slice(None, n), slice(n, None)
    ours = expit(fit_correctness(signals[train], agrees[train, None], right[train]).log_odds(signals, agrees[:, None]))
    features = np.column_stack([np.nan_to_num(signals, nan=0.8), agrees])
    features[:, [0, 2]] = logit(np.clip(np.exp(features[:, [0, 2]]), 1e-3, 0.999))
    trees = [{"n_estimators": n_trees, "max_depth": depth} for n_trees in (50, 100) for depth in (2, 3)]
    rivals = [
        *(LogisticRegression(C=c) for c in (0.1, 1.0, 10.0)),
        *(GradientBoostingClassifier(learning_rate=0.05, random_state=0, **size) for size in trees),
    ]
    fits = [rival.fit(features[train], right[train]).predict_proba(features[test]) for rival in rivals]
    assert log_loss(right[test], ours[test]) <= 1.01 * min(log_loss(right[test], fitted) for fitted in fits)


def test_at_a_hundred_rows_agreement_counts_for_as_much_as_in_the_best_of_scikit_learn():
    ours, rivals = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        ease = rng.normal(0, 1, 5000)
        right = rng.random(5000) < expit(ease + 1)
        agrees = rng.random(5000) < np.where(right, 0.9, 0.15)
        signals = np.column_stack([expit(ease + rng.normal(0, 1, 5000)), (2 * agrees - 1) * rng.normal(1, 1, 5000)])
        train, test = slice(None, 100), slice(100, None)
        fitted = fit_correctness(signals[train], agrees[train, None], right[train], plain=1)
        features = np.column_stack([logit(np.clip(signals[:, 0], 1e-3, 0.999)), signals[:, 1], agrees])
        ours.append(log_loss(right[test], expit(fitted.log_odds(signals[test], agrees[test, None]))))
        logistic = [LogisticRegression(C=c).fit(features[train], right[train]) for c in (1.0, 10.0)]
        rivals.append([log_loss(right[test], rival.predict_proba(features[test])[:, 1]) for rival in logistic])
    assert np.mean(ours) <= 1.01 * np.mean(rivals, axis=0).min()


def test_probabilities_rise_with_each_confidence_and_no_model_is_infallible():
    rng = np.random.default_rng(0)
    signals = rng.random((300, 2))
    right = rng.random(300) < 1 - signals[:, 1] / 2  # the second is worse than useless
    none = np.zeros((300, 0), dtype=bool)
    fitted = fit_correctness(signals, none, right)
    grid = np.linspace(0, 1, 101)
    for column in range(2):
        rows = np.full((101, 2), 0.5)
        rows[:, column] = grid
        assert (np.diff(fitted.log_odds(rows, np.zeros((101, 0), dtype=bool))) >= 0).all()
    certain = expit(fit_correctness(signals[:100], none[:100], np.ones(100, dtype=bool)).log_odds(signals, none))
    assert 0.97 < certain[:100].mean() < 1 - 1 / 1000


def test_rows_of_different_confidences_have_different_probabilities_so_that_any_budget_can_be_spent():
    rng = np.random.default_rng(0)
    graded, misleading = rng.integers(8, 11, 300) / 10, rng.random(300)
    right = rng.random(300) < 0.4 + 0.5 * (graded > 0.85) - 0.3 * misleading
    signals, none = np.column_stack([misleading, graded]), np.zeros((300, 0), dtype=bool)
    odds = fit_correctness(signals, none, right).log_odds(signals, none)
    assert len(np.unique(odds)) == 300


def test_a_cascade_keeps_its_budget_and_beats_raw_confidences_and_random_routing(tmp_path):
    policy = cauc_ray.fit(table_of(tmp_path), budget=10.0)
    assert policy.method == "answers"
    assert [stage.rule for stage in policy.stages] == ["number"] * 3
    evaluation = cauc_ray.evaluate(tmp_path, policy, split="test")
    measured = evaluation.measures
    assert measured.cost < 10.5
    assert abs(measured.accuracy.value - policy.expected.accuracy.value) < 0.04
    compared = cauc_ray.compare(
        tmp_path, methods=["answers", "confidence", "random", "oracle"], budget=8.0, split="test"
    )
    accuracies = {row["method"]: row["accuracy"] for row in compared.as_json()["rows"]}
    assert accuracies["oracle"] > accuracies["answers"] > max(accuracies["confidence"], accuracies["random"]) + 0.005


@pytest.mark.filterwarnings("ignore:'nobody' costs 0 USD, no more than 'small'")
def test_a_stage_that_never_answers_is_the_last_and_a_cascade_is_compared_with_those_that_do(tmp_path):
    table_of(tmp_path, calibration=300, validation=300, test=600)
    for split, n in {"calibration": 300, "validation": 300, "test": 600}.items():
        ids = [f"{split}{row}" for row in range(n)]
        nobody = [None] * n, {}, [False] * n
        write_answers(tmp_path, "nobody", split, ids, *nobody, rule="number", cost=0.0, cost_unit="USD")
    for models in (["small", "nobody", "large"], ["nobody", "small"]):
        with pytest.raises(ConfigError, match="'nobody' never answers"):
            cauc_ray.fit(tmp_path, models=models)
    policy = cauc_ray.fit(tmp_path, models=["small", "large", "nobody"], threshold=0.5)
    evaluation = cauc_ray.evaluate(tmp_path, policy, split="test")
    assert [model.name for model in evaluation.models] == ["small", "large"]
    saving = 1 - evaluation.measures.cost / COSTS["large"]
    assert f"saves {100 * saving:.1f} % of the cost of large" in evaluation.verdict.answer


def test_confidences_of_another_scale_are_refused_and_those_just_outside_are_not(tmp_path):
    policy = cauc_ray.fit(table_of(tmp_path, calibration=300, validation=300), models=["small", "large"])
    rng = np.random.default_rng(1)
    columns = {
        name: {"answer": texts, **{f"confidence_{of}": values for of, values in confidences.items()}, "rule": "number"}
        for name, (texts, confidences, _) in answered(rng, 40).items()
        if name != "medium"
    }
    columns["small"]["confidence_verbal"][0] = 1.01
    assert len(policy.predict(columns)) == 40
    columns["small"]["confidence_verbal"][0] = 85.0
    with pytest.raises(DataError, match="confidence 'verbal' is 85, where it was a share"):
        policy.predict(columns)


def test_a_hundred_rows_are_enough_and_answers_have_no_classes_of_which_there_were_an_f1(tmp_path):
    policy = cauc_ray.fit(table_of(tmp_path, calibration=100, validation=100, test=4000), budget=8.0)
    evaluation = cauc_ray.evaluate(tmp_path, policy, split="test")
    assert evaluation.measures.accuracy.value > evaluation.models[0].accuracy.value + 0.1
    compared = cauc_ray.compare(tmp_path, methods=["answers", "confidence"], budget=8.0, split="test")
    figures = [evaluation.as_json(), *compared.as_json()["rows"]]
    assert [of["macro_f1"] for of in figures] == [None] * len(figures)
    assert "F1" not in str(evaluation) + str(compared)
    for call in (cauc_ray.fit, cauc_ray.compare):
        with pytest.raises(ConfigError, match="objective"):
            call(tmp_path, budget=8.0, objective="macro-f1")


def test_a_report_of_answers_shows_their_words_and_the_calibration_of_their_confidences(tmp_path):
    table_of(tmp_path / "LOGITS", calibration=300, validation=300, test=400)
    policy = cauc_ray.fit(tmp_path / "LOGITS", budget=8.0)
    policy.save(tmp_path / "policy.json")
    page = cauc_ray.report(tmp_path).page.read_text()
    text = re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page))
    assert re.search(r"The answer is 0\. The answer is [123]\. \d", text)
    assert not re.search(r"\b\d{8,10} \d{8,10} \d", text)  # no keys
    errors = dict(re.findall(r"(small|medium|large) calibration error [\d.]+ → ([\d.]+)", text))
    chain = AnswerTable(tmp_path / "LOGITS").read_chain(policy.models, "test")
    for stage, vectors in zip(policy.stages, chain.logits, strict=True):
        keys, confidences, _ = stage.by_itself(vectors)
        expected = calibration_error(confidences, keys == chain.labels)
        assert float(errors[stage.name]) == pytest.approx(expected, abs=6e-4)
        assert expected < 0.1


def test_a_check_is_quiet_on_like_rows_and_announces_answers_that_have_become_worse(tmp_path):
    table_of(tmp_path, calibration=600, validation=600, test=600)
    policy = cauc_ray.fit(tmp_path, budget=8.0)
    assert cauc_ray.check(tmp_path, policy).valid
    rng = np.random.default_rng(5)
    for name, (texts, confidences, right) in answered(rng, 600).items():
        wrong = (rng.random(600) < 0.5) & (name == "medium")  # as sure as before
        answers = ["The answer is 9." if is_wrong else text for text, is_wrong in zip(texts, wrong, strict=True)]
        ids, facts = [f"later{row}" for row in range(600)], {"cost": COSTS[name], "cost_unit": "USD", "rule": "number"}
        write_answers(tmp_path, name, "later", ids, answers, confidences, right & ~wrong, **facts)
    later = cauc_ray.check(tmp_path, policy, split="later")
    assert not later.valid
    assert "accurac" in later.verdict
