"""Tables of answers in words: by which rule answers are the same, who is right, and what is refused."""

import shutil
import time

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import cauc_ray
from cauc_ray.data.answer_table import AnswerTable, open_table, write_answers
from cauc_ray.data.writing import write_logits
from cauc_ray.errors import CaucError, ConfigError, DataError
from cauc_ray.numbers.answer_keys import NONE_RIGHT, agreement_keys, said_keys
from cauc_ray.numbers.answer_rules import rule_of
from cauc_ray.numbers.chain import UNKNOWN_LABEL


def written(folder, model, answers, correct, *, split="test", rule="exact", cost=1.0, **confidences):
    n = len(answers)
    confidences = confidences or {"self": np.full(n, 0.5)}
    ids = [f"q{row}" for row in range(n)]
    return write_answers(
        folder, model, split, ids, answers, confidences, correct, cost=cost, cost_unit="USD", rule=rule
    )


@pytest.mark.parametrize(
    ("rule", "same", "different"),
    [
        ("exact", [" The  Cat.", "the cat", "THE CAT!"], ["a cat", "the cats"]),
        ("number", ["It is 1,234.50", "1234.5", "= 1.2345e3 EUR"], ["-1234.5", "1234.5 %"]),
        ("number", ["5 %", "0.05", "first 7, then .05"], ["5"]),
        ("number", ["-$1,200.00", "x=\u22121\u202f200", "a loss of (-1'200.0)", "-\uff11\uff12\uff10\uff10"], ["1200"]),
        ("number", ["12 m\u00b2", "between 3-12", "one of 1,2,12", "GPT-12", "12 kg of CO\u2082"], ["-12", "1212"]),
        ("number", ["1.234,50", "1 234,50 ".replace(" ", "\u202f"), "1234,5 EUR", "1234.5"], ["50", "1.2345"]),
        ("number", ["0,125", "12,5%", "one of 1,2,0.125"], ["125", "5", "1,2,125"]),
        ("number", ["1,234,567", "1.234.567", "1234567", "12,34,567"], ["567", ".567", "1.234"]),
        ("number", ["\u00bd", "is 0.5", "50%", "+\u00bd."], ["1\u00bd", "2", "-\u00bd", "\u00bd%"]),
        ("number", [f"2^100 = {2**100}"], [f"{2**100 + 1}", "1e9999999", "1e99999999999999999999"]),
        ("user_models:first_word", ["Yes, it is", "yes. of course"], ["no", "it is yes"]),
        ("json:city", ['{"city": "Paris", "why": 1}', 'so: {"city": " paris"}'], ['{"city": "Rome"}']),
        ("json:city", ['["K\u00f6ln"]', '{"city": ["K\\u00f6ln"]}'], ['{"city":' * 100_000 + "}" * 100_000]),
        ("exact", ["\u201cParis.\u201d", "Paris\u3002", "\u00abParis\u00bb"], ["Pari"]),
        (r"regex:answer is \(?([A-J])", ["The answer is (B).", "answer is A? No: answer is b"], ["answer is C"]),
    ],
)
def test_answers_are_the_same_by_a_rule_and_right_where_they_equal_the_reference(rule, same, different):
    forms = rule_of(rule).forms(same)
    if rule.startswith("regex"):
        same, forms = same[:1], forms[:1]
    assert len(set(forms)) == 1
    assert forms[0] is not None
    assert forms[0] not in rule_of(rule).forms(different)
    assert rule_of(rule).references(same[:1]) == forms[:1]
    assert rule_of(rule).references([None, ""]) == [None, None]


@pytest.mark.parametrize("rule", ["exact", "number", "json:answer", r"regex:(\d+)"])
@pytest.mark.parametrize("part", [",22", ",222", "1", "1_", "- ", "\u00bd", "1e", ".", "{", '"a":', " %"])
def test_a_long_answer_takes_no_longer_than_its_length_explains(rule, part):
    began = time.process_time()
    rule_of(rule).forms(["1" + part * 40_000])
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize(
    "rule", ["", "exactly", "json:", "regex:(", "regex:a{99999999999}", "no_such_module:f", "..x:f", "math:pi"]
)
def test_what_is_no_rule_is_refused(rule):
    with pytest.raises(ConfigError):
        rule_of(rule)


def test_a_table_has_answers_or_logits_and_models_of_one_rule(tmp_path):
    for name, rule in (("a", "exact"), ("b", "number")):
        written(tmp_path, name, ["2", "1"], [True, False], rule=rule)
    for model in ("a", "b"):
        AnswerTable(tmp_path).read_chain([model], "test")
    with pytest.raises(DataError, match="'exact' of 'a' and 'number' of 'b'"):
        AnswerTable(tmp_path).read_chain(["a", "b"], "test")
    for name in ("0", "z"):  # before the others in the alphabet, and after them
        write_logits(tmp_path, name, "test", ["q0", "q1"], np.eye(2, dtype=np.float32), np.arange(2))
        with pytest.raises(DataError, match=f"'{name}'"):
            open_table(tmp_path)
        shutil.rmtree(tmp_path / f"model={name}")


@pytest.mark.parametrize(("rule", "why"), [("math:sqrt", "must be real number"), ("builtins:len", "text or None")])
def test_a_function_that_cannot_read_an_answer_is_named_in_one_line(tmp_path, rule, why):
    written(tmp_path, "a", ["x"], [True], rule=rule)
    with pytest.raises(DataError, match=f"the rule {rule} .*{why}"):
        AnswerTable(tmp_path).read_chain(["a"], "test")


def test_missing_values_of_pandas_and_texts_that_no_file_can_hold_are_written(tmp_path):
    answers = pd.array(["x\ud800", None, "y", "z"], dtype=object)
    written(tmp_path, "a", answers, pd.array([True, False, None, False], dtype="boolean"))
    written(tmp_path, "b", pd.Series(["x", None, None, "z"], dtype="string"), [True, np.nan, None, np.False_])
    rows = [AnswerTable(tmp_path).read_model(model, "test") for model in "ab"]
    assert [of.texts.tolist() for of in rows] == [["x?", None, "y", "z"], ["x", None, None, "z"]]
    assert [of.correct.tolist() for of in rows] == [[1, 0, -1, 0], [1, -1, -1, 0]]


def test_answers_that_are_both_right_count_as_right_whatever_their_words_and_agree_by_their_words(tmp_path):
    written(tmp_path, "a", ["Paris", "Rome", None, "x", "Oslo"], [True, False, False, None, True])
    written(tmp_path, "b", ["Paris, France", "rome!", "Bern", "y", "OSLO"], [True, True, True, True, None], cost=9.0)
    chain = AnswerTable(tmp_path).read_chain(["a", "b"], "test")
    named = np.stack([said_keys(vectors) for vectors in chain.logits])
    agreement = np.stack([agreement_keys(vectors) for vectors in chain.logits])
    right = named == chain.labels
    np.testing.assert_array_equal(right[:, [0, 1, 2, 4]].T, [[True, True], [False, True], [False, True], [True, True]])
    np.testing.assert_array_equal(agreement[0] == agreement[1], [False, True, False, False, True])
    assert chain.labels[3] == UNKNOWN_LABEL

    written(tmp_path, "b", ["Bonn"] * 5, [False] * 5, cost=9.0)
    labels = AnswerTable(tmp_path).read_chain(["a", "b"], "test").labels
    np.testing.assert_array_equal(labels == NONE_RIGHT, [False, True, True, False, False])


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("confidence_self", [0.5, np.inf], "q1"),
        ("cost", [1.0, -1.0], "q1"),
        ("cost", [1.0, None], "q1"),
        ("example_id", ["q0", "q0"], "q0"),
        ("example_id", ["q0", None], "row 1"),
        ("answer", [None, "x"], "q0"),
        ("answer", [1.5, 2.5], None),
        ("correct", ["yes", "no"], "correct"),
    ],
)
def test_bad_tables_are_refused_in_one_line_that_names_the_example(tmp_path, column, values, message):
    file = written(tmp_path, "a", ["x", "y"], [True, False])
    table = pq.read_table(file)
    columns = dict(zip(table.column_names, table.columns, strict=True)) | {column: pa.array(values)}
    pq.write_table(pa.table(columns), file)
    if message is None:
        AnswerTable(tmp_path).read_chain(["a"], "test")  # numbers are words, too
        return
    with pytest.raises(DataError, match=message) as refused:
        AnswerTable(tmp_path).read_chain(["a"], "test")
    assert "\n" not in str(refused.value)


def test_each_method_is_refused_on_the_table_that_it_cannot_read(tmp_path, capsys):
    for split in ("calibration", "validation"):
        for model, cost in (("a", 1.0), ("b", 9.0)):
            written(tmp_path, model, ["x", "y"] * 30, [True, False] * 30, split=split, cost=cost)
    with pytest.raises(CaucError, match=r"method base reads.*method answers"):
        cauc_ray.fit(tmp_path, method="base")
    with pytest.raises(CaucError, match="answers reads answers in words"):
        cauc_ray.fit(cauc_ray.sample_logits(), method="answers")
    with pytest.raises(CaucError, match="leave logit_kind out"):
        cauc_ray.fit(tmp_path, logit_kind="raw")
