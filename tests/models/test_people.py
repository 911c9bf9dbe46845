"""A person as a stage: what is read from a queue, and what is written to it."""

import json

import numpy as np
import pytest
from batches import column

from cauc_ray.errors import ConfigError
from cauc_ray.models.pool import pool_of


def person(folder, rule="exact"):
    model = {"kind": "human", "queue": "queue", "rule": rule}
    content = {"name": "p", "task": "generation", "stages": [{"name": "person", "model": model, "cost": {"usd": 1.0}}]}
    return pool_of(content, folder).stages[0].load()


def answer(folder, content):
    (folder / "queue" / "answered").mkdir(parents=True)
    (folder / "queue" / "answered" / "a.jsonl").write_text(content)


@pytest.mark.parametrize(
    ("value", "rule", "text"),
    [
        ('"5"', "number", "5"),
        ("5", "number", "5"),
        ("null", "exact", None),
        ('{"city": "K\u00f6ln"}', "json:city", '{"city": "K\u00f6ln"}'),
        ("true", "exact", "true"),
    ],
)
def test_an_answer_may_be_any_value_of_json(tmp_path, value, rule, text):
    answer(tmp_path, f'{{"example_id": 7, "answer": {value}}}\n')
    answers = person(tmp_path, rule)({"example_id": column([7]), "text": column(["x"])})
    assert answers.texts == [text]
    assert not answers.failures


@pytest.mark.parametrize("line", ["[]", '"example_id answer"', '{"example_id": "a"}', "{", '{"a":' * 100_000])
def test_lines_that_are_no_answer_are_refused_by_their_number(tmp_path, line):
    answer(tmp_path, f'{{"example_id": "a", "answer": "5"}}\n{line}\n')
    with pytest.raises(ConfigError, match="line 2: a JSON object with example_id and answer is needed"):
        person(tmp_path)({"example_id": column(["a"]), "text": column(["x"])})


def test_columns_of_any_type_are_shown(tmp_path):
    values = ["x", b"x", np.float32(0.5), [np.int64(1)], {"a": np.arange(2)}, float("nan"), None, slice(1)]
    rows = {"example_id": column(map(str, range(len(values)))), "value": column(values)}
    assert person(tmp_path)(rows).waiting == frozenset(range(len(values)))
    (path,) = (tmp_path / "queue" / "asked").iterdir()
    columns = [json.loads(line)["columns"]["value"] for line in path.read_text().splitlines()]
    assert columns == ["x", "eA==", 0.5, [1], {"a": [0, 1]}, None, None, "slice(None, 1, None)"]
