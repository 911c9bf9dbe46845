"""Answers in words from Python, without files: the same policy and the same predictions as by a table."""

import numpy as np
import pandas as pd
import pytest

import cauc_ray
from cauc_ray.data.answer_table import write_answers
from cauc_ray.errors import CaucError, ConfigError, DataError, PolicyError

COSTS = {"small": 1.0, "large": 10.0}


def columns_of(n, seed=0, *, judged=True):
    """Return columns of answers by model, and the right answers."""
    rng = np.random.default_rng(seed)
    numbers = rng.integers(0, 50, n)
    columns = {}
    for name, chance in (("small", 0.6), ("large", 0.95)):
        right = rng.random(n) < chance
        answers = [f"It is {number + (not ok)}." for number, ok in zip(numbers.tolist(), right.tolist(), strict=True)]
        answers[3] = None
        sure = np.clip(0.5 + 0.3 * right + rng.normal(0, 0.15, n), 0.01, 0.99).astype(np.float32)
        right[3] = False
        columns[name] = {"answer": answers, "confidence_self": sure, "cost": rng.uniform(1, 2, n) * COSTS[name]}
        columns[name] |= {"rule": "number"} | ({"correct": right.tolist()} if judged else {})
    return columns, [f"{number}.0" for number in numbers.tolist()]


def ids_of(split, n):
    return [f"{split}{row:03d}" for row in range(n)]


def table_of(folder, **splits):
    """Write the splits as a table."""
    for split, columns in splits.items():
        for name, of in columns.items():
            sure = {key.removeprefix("confidence_"): of[key] for key in of if key.startswith("confidence_")}
            facts = {"cost": COSTS[name], "cost_unit": "USD", "rule": of["rule"]}
            ids = ids_of(split, len(of["answer"]))
            write_answers(folder, name, split, ids, of["answer"], sure, of["correct"], of["cost"], **facts)
    return folder


def test_columns_give_the_policy_and_the_predictions_of_a_table_of_the_same_rows(tmp_path):
    splits = {split: columns_of(200, seed)[0] for seed, split in enumerate(("calibration", "validation", "test"))}
    table = table_of(tmp_path, **splits)
    expected = cauc_ray.fit(table, models=["small", "large"], threshold=0.7)
    validation = (splits["validation"], None, ids_of("validation", 200))
    settings = {"models": ["small", "large"], "threshold": 0.7, "cost_unit": "USD"}
    ids = ids_of("calibration", 200)
    policy = cauc_ray.fit(splits["calibration"], example_ids=ids, validation=validation, **settings)
    assert policy.as_json() == expected.as_json()
    assert [stage.rule for stage in policy.stages] == ["number", "number"]

    of_table = cauc_ray.evaluate(table, policy)
    of_columns = cauc_ray.evaluate(splits["test"], policy, example_ids=ids_of("test", 200))
    for measure in ("accuracy", "cost", "stages"):
        assert getattr(of_columns.measures, measure) == getattr(of_table.measures, measure)
    predicted = policy.predict(splits["test"], example_ids=ids_of("test", 200))
    for column in ("prediction", "confidence", "stage"):
        values = of_table.predictions.to_arrow()[column]
        assert of_columns.predictions.to_arrow()[column] == values
        if column != "prediction":  # which has no labels to name by
            assert predicted.to_arrow()[column] == values
    texts = predicted.to_arrow()["prediction_label"].to_pylist()
    assert texts[3] is None
    for row, (stage, text) in enumerate(zip(predicted.stage, texts, strict=True)):
        answers = [splits["test"][name]["answer"][row] for name in ("small", "large")]
        assert text in answers[: stage + 1]


def test_answers_are_certified_and_measured_by_segment_wherever_its_column_stands():
    hour = np.arange(300) % 2
    claim = {"validation": 0.5, "certify": "risk<=0.3@0.8", "by": "hour"}
    policy = cauc_ray.fit({"hour": hour, **columns_of(300)[0]}, **claim)
    assert policy.threshold_choice.certificate.by == "hour"
    test, hour = columns_of(100, 2)[0], np.arange(100) % 2
    whole = cauc_ray.evaluate(test, policy)
    for columns in ({"hour": hour, **test}, {**test, "hour": hour}):
        by_hour = cauc_ray.evaluate(columns, policy, by="hour")
        assert by_hour.measures.accuracy == whole.measures.accuracy
        assert [segment.n for segment in by_hour.segments] == [50, 50]


def test_right_answers_and_frames_and_shares_will_do():
    judged, right = columns_of(300)
    labels = [None, *right[1:]]
    bare, _ = columns_of(300, judged=False)
    frames = {name: pd.DataFrame({k: v for k, v in of.items() if k != "rule"}) for name, of in bare.items()}
    with pytest.warns(cauc_ray.CaucWarning, match="1 of 300 examples have no label"):
        policy = cauc_ray.fit(bare, labels, validation=0.5, seed=1, budget=6.0)
    assert policy.method == "answers"
    assert [stage.rule for stage in policy.stages] == ["number", "number"]
    # Frames name no rule: the policy's is theirs.
    evaluation, as_judged = cauc_ray.evaluate(frames, policy, labels=right), cauc_ray.evaluate(judged, policy)
    assert evaluation.measures.accuracy == as_judged.measures.accuracy
    assert evaluation.measures.accuracy.value > 0.7
    by_cost = cauc_ray.fit(judged, costs=COSTS, validation=0.5, threshold=0.6)
    assert by_cost.costs == "per-model"


def nullable(columns):
    return pd.DataFrame(columns).convert_dtypes()


def as_bytes(columns):
    return columns | {"answer": [None if text is None else text.encode() for text in columns["answer"]]}


def with_extremes(columns):
    """Put in numbers beyond float32, where others would be as extreme."""
    sure = np.where(columns["confidence_self"] > 0.7, 1e300, -1e300)
    return columns | {"confidence_self": sure}


@pytest.mark.parametrize(("form", "as_before"), [(nullable, True), (as_bytes, True), (with_extremes, False)])
def test_columns_of_other_types_are_read_as_plain_ones(form, as_before):
    columns, _ = columns_of(100)
    columns["small"]["correct"][3] = None  # of an answer that is missing
    columns["small"]["confidence_self"][5] = np.nan
    expected = cauc_ray.fit(columns, validation=0.5, threshold=0.7)
    same_columns = {name: form(of) for name, of in columns.items()}
    policy = cauc_ray.fit(same_columns, validation=0.5, threshold=0.7)
    if as_before:
        assert policy.as_json() == expected.as_json()
    assert policy.predict(same_columns).to_arrow()["prediction_label"][3].as_py() is None


def test_answers_that_no_file_can_hold_are_kept_with_question_marks(tmp_path):
    columns, _ = columns_of(60)
    columns["large"]["answer"] = [f"{text} \ud800" for text in columns["large"]["answer"]]
    policy = cauc_ray.fit(columns, validation=0.5, threshold=0.99)
    texts = policy.predict(columns).to_arrow()["prediction_label"].to_pylist()
    assert any(text is not None and text.endswith(" ?") for text in texts)


@pytest.mark.parametrize(
    ("change", "labels", "error", "words"),
    [
        ({"confidence_self": [np.inf] * 40}, None, DataError, "confidence_self must be 40 finite numbers"),
        ({"confidence_self": ["high"] * 40}, None, DataError, "must be numbers"),
        ({"sure": [0.5] * 40}, None, DataError, "'sure' is none of answer, confidence_<name>"),
        ({"correct": [2] * 40}, None, DataError, "true or false"),
        ({"correct": [True] * 40}, None, DataError, "example '3': it is right without an answer"),
        ({"rule": "numeric"}, None, ConfigError, "numeric"),
        ({}, ["1"] * 40, ConfigError, "leave labels out"),
        ({"correct": None}, ["1"] * 39, DataError, "39 labels"),
        ({"correct": None}, "1" * 40, DataError, "labels must be a text for each row, got str"),
        ({"rule": 5}, None, DataError, "rule must be a text"),
        ({"answer": None}, None, DataError, "'answer' has a text for each row"),
        ({"answer": 3}, None, DataError, "must be a text for each row, got int"),
        ({"rule": ["number"] * 39 + ["exact"]}, None, DataError, "all rows have the same rule"),
    ],
)
def test_columns_that_are_no_answers_are_one_line(change, labels, error, words):
    columns, _ = columns_of(40)
    columns["small"] = {name: value for name, value in (columns["small"] | change).items() if value is not None}
    with pytest.raises(CaucError, match=words) as raised:
        cauc_ray.fit(columns, labels, validation=0.5)
    assert type(raised.value) is error


def test_models_of_other_rows_or_without_answers_are_one_line():
    columns, right = columns_of(60)
    cut = {name: of if isinstance(of, str) else of[:50] for name, of in columns["large"].items()}
    with pytest.raises(DataError, match="'large' has 50 answers, others have 60"):
        cauc_ray.fit(columns | {"large": cut}, validation=0.5)
    policy = cauc_ray.fit(columns, validation=0.5, threshold=0.7)
    for no_answers in (np.full((60, 3), 0.5), np.ones(60), ["1"] * 60, "Paris", None):
        arrays = columns | {"large": no_answers}
        for ask in (
            lambda arrays: cauc_ray.fit(arrays, validation=0.5),
            policy.predict,
            lambda arrays: cauc_ray.evaluate(arrays, policy, labels=right),
        ):
            with pytest.raises(DataError, match="needs columns"):
                ask(arrays)
        with pytest.raises(DataError, match="needs columns"):
            policy.predict(dict.fromkeys(columns, no_answers))
    with pytest.raises(DataError, match="1 confidences"):
        policy.predict(dict.fromkeys(columns, np.full((60, 6), 7, dtype=np.float32)))


@pytest.mark.parametrize("change", [{"rule": "exact"}, {"confidence_verbal": np.full(200, 0.5)}])
def test_answers_by_another_rule_or_with_other_confidences_than_the_fit_are_refused(tmp_path, change):
    columns, _ = columns_of(200)
    policy = cauc_ray.fit(columns, validation=0.5, threshold=0.7)
    columns = {model: of | change for model, of in columns.items()}
    table = table_of(tmp_path, test=columns)
    for ask in (policy.predict, lambda answers: cauc_ray.evaluate(answers, policy)):
        with pytest.raises(PolicyError, match="stage 'small'"):
            ask(columns)
    with pytest.raises(PolicyError, match=f"the {'rule' if 'rule' in change else 'confidences'}"):
        cauc_ray.evaluate(table, policy)
