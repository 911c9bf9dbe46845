"""A cascade of models that answer in words: from a CSV file to a service by the commands, and as a remote stage."""

import csv

import numpy as np
import pyarrow.parquet as pq
import pytest
import sums
import yaml
from asking import answered, outputs_of
from synthetic import SPLITS
from user_models import adder

import cauc_ray
from cauc_ray.data.answer_table import write_answers
from cauc_ray.errors import ConfigError
from cauc_ray.models.pool import load_pool


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")  # of few examples
def test_the_service_answers_as_the_run_and_the_replay_of_the_collected_answers(tmp_path, ray_session):
    questions, right = sums.questions(120, seed=3)
    for name, header, rows in (
        ("labelled", ("id", "question", "answer"), zip(range(120), questions, right, strict=True)),
        ("new", ("id", "question"), enumerate(questions)),
    ):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([header, *rows])
    pool, table, columns = sums.pool(tmp_path), tmp_path / "ANSWERS", {"example_id": "id", "label": "answer"}
    collected = cauc_ray.collect(pool, tmp_path / "labelled.csv", table, columns=columns)
    expected = sum(total <= sums.MOST for total in right) / len(right)
    assert [model["accuracy"] for model in collected["models"]] == pytest.approx([expected, 1.0])
    policy = cauc_ray.fit(table, threshold=0.8)
    assert policy.method == "answers"
    assert cauc_ray.evaluate(table, policy).measures.accuracy.value > expected
    cauc_ray.run(pool, policy, tmp_path / "new.csv", tmp_path / "out", columns={"example_id": "id"})
    rows = {row["example_id"]: row for row in pq.read_table(tmp_path / "out" / "predictions").to_pylist()}
    assert {row["stage"] for row in rows.values()} == {0, 1}
    with sums.client_of(pool, policy) as (_, client):
        for row in range(0, 120, 8):
            answer, offline = sums.asked(client, questions[row]), rows[str(row)]
            assert answer.choices[0].message.content == offline["answer"]
            assert answer.cauc["source"] == offline["source"]
            assert answer.cauc["confidence"] == pytest.approx(offline["confidence"], abs=1e-6)


def edge_pool(folder, url, *confidences):
    """Write a pool of a small model and the cascade of sums at a URL, which reports its costs."""
    content = yaml.safe_load(sums.pool(folder).read_text())
    small, large = content["stages"]
    small["model"]["kwargs"]["most"] = 40
    words = {"rule": "number", "confidences": list(confidences)}
    large |= {"name": "cloud", "model": {"kind": "remote", "url": url, "model": "sums", "words": words}, "cost": None}
    path = folder / "edge.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_cascade_elsewhere_is_a_stage_whose_answers_confidences_and_costs_are_passed_on(tmp_path):
    questions, right = sums.questions(300, seed=3)
    table, outputs = tmp_path / "ANSWERS", ("answer", "confidence", "cost")
    with cauc_ray.serve(sums.pool(tmp_path), sums.policy(tmp_path), port=0, name="sums", local=True) as cloud:
        content = answered(cloud.url, "sums", {"question": questions}, outputs)
        texts, confidences, costs = (outputs_of(content)[name] for name in outputs)
        assert len(set(costs)) == 2
        path = edge_pool(tmp_path, cloud.url, "confidence")
        answers = load_pool(path).stages[1].load()({"question": np.array(questions, dtype=object)})
        assert not answers.failures
        assert (list(answers.texts), answers.logits[:, 4].tolist()) == (list(texts), list(confidences))
        assert (answers.costs.tolist(), answers.cost_unit) == (list(costs), "USD")

        small = adder(40)({"question": questions})
        model_answers = {"small": (small["answer"], {"self": np.array(small["confidence_self"])}, [0.001] * 300)}
        model_answers["cloud"] = answers.texts, {"confidence": answers.logits[:, 4]}, answers.costs
        for model, (model_texts, by_name, paid) in model_answers.items():
            correct = [f"{total}." in text for text, total in zip(model_texts, right, strict=True)]
            for start, split in enumerate(SPLITS):
                rows = slice(start, None, 3)
                ids = [f"{row:03d}" for row in range(start, 300, 3)]
                sure = {name: values[rows] for name, values in by_name.items()}
                columns = ids, model_texts[rows], sure, correct[rows], np.array(paid[rows])
                write_answers(table, model, split, *columns, cost=0.001, cost_unit="USD", rule="number")
        policy = cauc_ray.fit(table, models=["small", "cloud"], threshold=0.8)
        replayed = cauc_ray.evaluate(table, policy, split="test").predictions.to_arrow()
        with cauc_ray.serve(path, policy, port=0, name="edge", local=True) as edge:
            outputs = ("prediction", "stage", "confidence", "cost", "answer", "source")
            live = outputs_of(answered(edge.url, "edge", {"question": questions[2::3]}, outputs))
    for name in outputs[:4]:
        np.testing.assert_allclose(live[name], replayed[name].to_numpy(), rtol=1e-5)
    deferred = [row for row in range(100) if live["stage"][row] == 1]
    assert 15 < len(deferred) < 85
    assert {live["source"][row] for row in deferred} >= {"cloud: confidence"}
    assert [live["answer"][row] for row in deferred] == [texts[2 + 3 * row] for row in deferred]


@pytest.mark.parametrize(("name", "words"), [("self", "no output 'self'"), ("stage", "'stage' as INT8")])
def test_confidences_that_a_server_does_not_give_are_one_line(tmp_path, name, words):
    with cauc_ray.serve(sums.pool(tmp_path), sums.policy(tmp_path), port=0, name="sums", local=True) as service:
        model = load_pool(edge_pool(tmp_path, service.url, name)).stages[1].load()
        with pytest.raises(ConfigError, match=words) as raised:
            model({"question": np.array(["1 + 1"], dtype=object)})
    assert "check confidences" in str(raised.value)
