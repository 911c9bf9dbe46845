"""Cascades of models that answer in words, live: what they say, what it costs, and that it is what a replay says."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stored
import sums
from runs import answers_of, python_model, write_pool

import cauc_ray
from cauc_ray.data.answer_table import AnswerTable, write_answers


@pytest.mark.filterwarnings("ignore::cauc_ray.errors.CaucWarning")  # of few examples
def test_answers_are_collected_and_a_run_gives_those_of_the_replay(tmp_path, ray_session):
    questions, right = sums.questions(160)
    rows = [{"example_id": f"r{n}", "question": text, "label": right[n]} for n, text in enumerate(questions)]
    pool, inputs, table = sums.pool(tmp_path), stored.write(tmp_path / "rows.csv", rows), tmp_path / "ANSWERS"
    cauc_ray.collect(pool, inputs, table)
    for name, most in sums.KNOWS.items():
        answers = AnswerTable(table).read_model(name, "test")
        totals = np.array([right[int(example[1:])] for example in answers.example_ids.to_pylist()])
        assert (answers.correct == (totals <= most)).all()

    policy = cauc_ray.fit(table, rule="confidence", threshold=0.8)
    cauc_ray.run(pool, policy, inputs, tmp_path / "out")
    live = answers_of(tmp_path / "out")
    replayed = cauc_ray.evaluate(table, policy, split="test").predictions.to_arrow().to_pylist()
    assert {row["stage"] for row in replayed} == {0, 1}
    for row in replayed:
        answer, total = live[row["example_id"]], right[int(row["example_id"][1:])]
        assert (answer["prediction"], answer["stage"]) == (row["prediction"], row["stage"])
        assert answer["confidence"] == pytest.approx(row["confidence"], abs=1e-6)
        assert answer["cost"] == pytest.approx(row["cost"], rel=1e-5)
        name = list(sums.PRICES)[row["stage"]]
        assert answer["answer"] == f"It is\n{total if total <= sums.KNOWS[name] else total - 1}."


def spoken_pool(folder, last, **settings):
    small = {**python_model("says", **settings), "words": {"rule": "number", "confidences": ["self"]}}
    stages = [
        {"name": "small", "model": small, "batch_size": 16},
        {"name": "last", "model": {"rule": "number", **last}, "cost": {"usd": 2.0}},
    ]
    return write_pool(folder, stages, "generation", max_failed=0)


def spoken_policy(folder, last_answers):
    """Fit a policy on what `says` says, and what its last stage has answered."""
    numbers = np.arange(200)
    right = numbers % 3 != 0
    texts = [f"It is {n + ok}." for n, ok in zip(numbers.tolist(), right.tolist(), strict=True)]
    by_model = {"small": (texts, {"self": np.where(right, 0.9, 0.4)}), "last": (last_answers(numbers), {})}
    for name, (answers, confidences) in by_model.items():
        correct = right.tolist() if name == "small" else [answer is not None for answer in answers]
        costs = {"cost": 0.25 if name == "small" else 2.0, "cost_unit": "USD", "rule": "number"}
        for split in ("calibration", "validation"):
            ids = [f"{split}{n}" for n in numbers]
            write_answers(folder / "SAID", name, split, ids, answers, confidences, correct, **costs)
    return cauc_ray.fit(folder / "SAID", models=["small", "last"], threshold=0.7, rule="confidence")


def numbers_input(folder, n=40):
    path = folder / "numbers.parquet"
    pq.write_table(pa.table({"example_id": [f"n{x}" for x in range(n)], "x": np.arange(n)}), path)
    return path


def asked_in(queue):
    return [json.loads(line) for path in (queue / "asked").iterdir() for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_rows_wait_for_a_person_who_sees_what_was_said_and_answers_by_id(tmp_path, ray_session):
    pool = spoken_pool(tmp_path, {"kind": "human", "queue": "reviews"}, kills=[7, 20], flag=str(tmp_path / "killed"))
    policy = spoken_policy(tmp_path, lambda numbers: [str(n + 1) for n in numbers])
    rows, queue = numbers_input(tmp_path), tmp_path / "reviews"
    cauc_ray.run(pool, policy, rows, tmp_path / "out")
    assert {path.name for path in tmp_path.glob("killed*")} == {"killed7", "killed20"}
    hard = {f"n{x}" for x in range(0, 40, 3)}
    failed = pq.read_table(tmp_path / "out" / "failed").to_pylist()
    assert {row["example_id"] for row in failed} == hard
    assert {(row["stage"], "waits for a person" in row["reason"]) for row in failed} == {("last", True)}
    assert sorted(row["example_id"] for row in asked_in(queue)) == sorted(hard)
    for row in asked_in(queue):
        (entry,) = row["said"]
        assert entry["stage"] == "small"
        assert entry["answer"] == f"It is {row['columns']['x']}."
        assert entry["confidences"] == {"self": pytest.approx(0.4)}

    (queue / "answered").mkdir()
    answers = [{"example_id": f"n{x}", "answer": f"{x + 1}"} for x in range(0, 30, 3)]
    answers.append({"example_id": "n30", "answer": None})
    (queue / "answered" / "a.jsonl").write_text("".join(f"{json.dumps(answer)}\n" for answer in answers))
    cauc_ray.run(pool, policy, rows, tmp_path / "out", resume=True, retry_failed=True)
    now = answers_of(tmp_path / "out")
    left = {row["example_id"] for row in pq.read_table(tmp_path / "out" / "failed").to_pylist()}
    assert left == {f"n{x}" for x in range(33, 40, 3)}
    assert len(now) + len(left) == 40
    assert (now["n1"]["answer"], now["n1"]["stage"]) == ("It is 2.", 0)
    assert (now["n9"]["answer"], now["n9"]["stage"], now["n9"]["cost"]) == ("10", 1, pytest.approx(2.25))
    assert now["n30"]["answer"] == "It is 30."  # the only answer
    assert sorted(row["example_id"] for row in asked_in(queue)) == sorted(hard)  # nobody is asked twice


def test_rows_that_reach_nobody_have_no_answer(tmp_path, ray_session):
    pool = spoken_pool(tmp_path, {"kind": "abstain"})
    policy = spoken_policy(tmp_path, lambda numbers: [None] * len(numbers))
    cauc_ray.run(pool, policy, numbers_input(tmp_path), tmp_path / "out")
    now = answers_of(tmp_path / "out")
    for x in range(40):
        row = now[f"n{x}"]
        assert (row["answer"], row["stage"]) == ((None, 1) if x % 3 == 0 else (f"It is {x + 1}.", 0))
        assert (row["prediction"] == 0) == (x % 3 == 0)
