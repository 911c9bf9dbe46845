"""Cascades of models that answer in words, live: what they say, what it costs, and that it is what a replay says."""

import json
import math
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import stored
from completion_server import Fault, scripted_server
from runs import python_model, write_pool

import cauc_ray
from cauc_ray.data.answer_table import AnswerTable, write_answers
from cauc_ray.errors import CaucError

N_ROWS = 160
PRICES = {"small": {"input": 1.0, "output": 4.0}, "large": {"input": 10.0, "output": 40.0}}


def sure_of(number, model):
    """Return how sure a model is of its answer to a question, and whether it is right: often where it is sure."""
    rng = np.random.default_rng([number, len(model)])
    sure = round(float(rng.uniform(0.3, 0.99)), 2)
    return sure, bool(rng.random() < (sure if model == "small" else 0.97))


def reply(model, prompt, before):
    """Return a server's answer to "What is <number> + 1?": an object of the answer and how sure the model is."""
    number = int(prompt.split()[-3])
    if before == 0 and number % 11 == 0:
        return Fault(429, {"error": {"message": "slow down"}}, retry_after="0.01")
    if before == 0 and number % 13 == 0:
        return Fault()
    sure, right = sure_of(number, model)
    answer, logprob = f" {number + 1 if right else number}.", math.log(sure) / 2
    texts = ['{"answer": "', answer[:2], answer[2:], f'", "confidence": {sure}', "}"]
    content = [{"token": t, "logprob": logprob if t and t in answer else -1.0, "bytes": [*t.encode()]} for t in texts]
    usage = {"prompt_tokens": 20 + number % 7, "completion_tokens": len(texts)}
    message = {"role": "assistant", "content": "".join(texts)}
    return {"choices": [{"message": message, "logprobs": {"content": content}}], "usage": usage}


@contextmanager
def answering_server():
    """Serve both models, which differ by name."""
    with scripted_server(lambda prompt, before: {}) as server:

        def answered(path, headers, body):
            prompt = body["messages"][-1]["content"]
            with server.lock:
                before = server.asked[body["model"], prompt]
                server.asked[body["model"], prompt] += 1
            return reply(body["model"], prompt, before)

        server.reply = answered
        yield server


def paid(model, number):
    prices = PRICES[model]
    return ((20 + number % 7) * prices["input"] + 5 * prices["output"]) / 1e6


@pytest.fixture(scope="module")
def sums(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    rows = [{"example_id": f"r{n}", "question": f"What is {n} + 1?", "label": f"{n + 1}.0"} for n in range(N_ROWS)]
    stored.write(folder / "rows.csv", rows)
    return folder


def served_pool(folder, url, **more):
    stages = [
        {
            "name": name,
            "model": {
                "kind": "openai",
                "model": name,
                "base_url": url,
                "prompt": "{{ question }}",
                "prices": PRICES[name],
                "generate": {"rule": "number", "confidences": ["sequence", "verbal"]},
            },
            "batch_size": 16,
        }
        for name in PRICES
    ]
    return write_pool(folder, stages, "generation", **more)


def said_in(out):
    table = pq.read_table(out / "predictions").sort_by("example_id")
    return {row["example_id"]: row for row in table.to_pylist()}


def assert_as_replayed(out, evaluation):
    """Hold a run's predictions against those of a replay, row for row."""
    live = said_in(out)
    replayed = evaluation.predictions.to_arrow().to_pylist()
    assert replayed
    for row in replayed:
        now = live[row["example_id"]]
        assert (now["prediction"], now["stage"]) == (row["prediction"], row["stage"])
        assert now["confidence"] == pytest.approx(row["confidence"], abs=1e-6)
        assert now["cost"] == pytest.approx(row["cost"], rel=1e-5)
    return live


@pytest.mark.slow
def test_generated_answers_are_collected_fitted_and_run_as_replayed_and_billed_by_tokens(sums, ray_session):
    with answering_server() as server:
        pool = served_pool(sums, server.url)
        cauc_ray.collect(pool, sums / "rows.csv", sums / "ANSWERS")
        table = AnswerTable(sums / "ANSWERS")
        rows = table.read_model("small", "test")
        numbers = [int(example[1:]) for example in rows.example_ids.to_pylist()]
        assert table.confidences("small") == ("sequence", "verbal")
        assert rows.correct.tolist() == [sure_of(n, "small")[1] for n in numbers]
        np.testing.assert_allclose(rows.costs, [paid("small", n) for n in numbers], rtol=1e-6)
        np.testing.assert_allclose(np.exp(rows.logits[:, 4]), rows.logits[:, 5], rtol=1e-4)

        policy = cauc_ray.fit(sums / "ANSWERS", rule="confidence")
        cauc_ray.run(pool, policy, sums / "rows.csv", sums / "out")
        live = assert_as_replayed(sums / "out", cauc_ray.evaluate(sums / "ANSWERS", policy, split="test"))
    stages = [row["stage"] for row in live.values()]
    assert 20 < sum(stages) < N_ROWS - 20
    for example, row in live.items():
        number, model = int(example[1:]), ("small", "large")[row["stage"]]
        cost = sum(paid(name, number) for name in list(PRICES)[: row["stage"] + 1])
        assert row["cost"] == pytest.approx(cost, rel=1e-5)
        texts = {f"{number + 1 if sure_of(number, name)[1] else number}." for name in PRICES}
        assert row["answer"] in texts
        if len(texts) == 1:
            assert row["answer"] == texts.pop(), model


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
    answers_of = {"small": (texts, {"self": np.where(right, 0.9, 0.4)}), "last": (last_answers(numbers), {})}
    for name, (answers, confidences) in answers_of.items():
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
    now = said_in(tmp_path / "out")
    left = {row["example_id"] for row in pq.read_table(tmp_path / "out" / "failed").to_pylist()}
    assert left == {f"n{x}" for x in range(33, 40, 3)}
    assert len(now) + len(left) == 40
    assert (now["n1"]["answer"], now["n1"]["stage"]) == ("It is 2.", 0)
    assert (now["n9"]["answer"], now["n9"]["stage"], now["n9"]["cost"]) == ("10", 1, pytest.approx(2.25))
    assert now["n30"]["answer"] == "It is 30."  # the only answer
    assert sorted(row["example_id"] for row in asked_in(queue)) == sorted(hard)  # nobody is asked twice

    (queue / "answered" / "b.jsonl").write_text('{"example_id": "n33"}\n')
    with pytest.raises(CaucError, match="line 1: a JSON object with example_id and answer"):
        cauc_ray.run(pool, policy, rows, tmp_path / "out", resume=True, retry_failed=True)


def test_rows_that_reach_nobody_have_no_answer(tmp_path, ray_session):
    pool = spoken_pool(tmp_path, {"kind": "abstain"})
    policy = spoken_policy(tmp_path, lambda numbers: [None] * len(numbers))
    cauc_ray.run(pool, policy, numbers_input(tmp_path), tmp_path / "out")
    now = said_in(tmp_path / "out")
    for x in range(40):
        row = now[f"n{x}"]
        assert (row["answer"], row["stage"]) == ((None, 1) if x % 3 == 0 else (f"It is {x + 1}.", 0))
        assert (row["prediction"] == 0) == (x % 3 == 0)
