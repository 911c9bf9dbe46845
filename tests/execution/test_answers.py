"""Cascades of models that answer in words, live: what they say, what it costs, and that it is what a replay says."""

import math
from contextlib import contextmanager

import numpy as np
import pyarrow.parquet as pq
import pytest
import stored
from completion_server import Fault, scripted_server
from runs import write_pool

import cauc_ray
from cauc_ray.data.answer_table import AnswerTable

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
