"""A cascade of models that answer in words, from a CSV file to a service, by the commands alone."""

import csv

import openai
import pyarrow.parquet as pq
import pytest
import sums

import cauc_ray


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
    with (
        cauc_ray.serve(pool, policy, port=0, name="sums", local=True) as service,
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client,
    ):
        for row in range(0, 120, 8):
            message = [{"role": "user", "content": questions[row]}]
            answer, offline = client.chat.completions.create(model="sums", messages=message), rows[str(row)]
            assert answer.choices[0].message.content == offline["answer"]
            assert answer.cauc["source"] == offline["source"]
            assert answer.cauc["confidence"] == pytest.approx(offline["confidence"], abs=1e-6)
