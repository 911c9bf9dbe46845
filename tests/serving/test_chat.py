"""/v1/chat/completions, as OpenAI's client asks: the cascade's answer, in one piece or streamed, and refusals."""

import json

import numpy as np
import openai
import pytest
import sums
import yaml
from asking import FEEDBACK, answered, http, outputs_of, send_labels, until
from completion_server import Fault, scripted_server

import cauc_ray
from cauc_ray.models.pool import load_pool

QUESTIONS, RIGHT = sums.questions(40, seed=9)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    with sums.client_of(sums.pool(folder), sums.policy(folder)) as running:
        yield running


@pytest.fixture
def client(served):
    return served[1]


def test_an_unmodified_client_gets_the_answers_of_the_cascade_whole_and_streamed(served):
    (service, client), outputs = served, ("answer", "stage", "confidence", "source", "cost")
    expected = outputs_of(answered(service.url, "sums", {"question": QUESTIONS}, outputs))
    assert set(expected["stage"]) == {0, 1}
    for row, (question, right) in enumerate(zip(QUESTIONS, RIGHT, strict=True)):
        whole = sums.asked(client, question, temperature=0.5)
        text, details = whole.choices[0].message.content, whole.cauc
        assert text == expected["answer"][row] == f"It is\n{right}."
        assert details["stage"] == ("small", "large")[expected["stage"][row]]
        assert details["source"] == expected["source"][row] == f"{details['stage']}: self"
        assert details["confidence"] == pytest.approx(expected["confidence"][row], abs=1e-6)
        assert details["cost"] == pytest.approx(expected["cost"][row])
        assert details["policy_id"]
        assert not details["degraded"]
    *parts, last, counts = sums.asked(client, question, stream=True, stream_options={"include_usage": True})
    assert "".join(part.choices[0].delta.content for part in parts) == text
    assert len(parts) == 3
    assert last.choices[0].finish_reason == "stop"
    assert last.cauc["stage"] == details["stage"]
    assert counts.usage.total_tokens == 0


def test_a_system_message_precedes_the_question_and_fields_that_ask_for_a_text_are_taken(client):
    asks_for_text = {"tools": [], "logprobs": False, "modalities": ["text"], "response_format": {"type": "text"}}
    system = {"role": "system", "content": "Add 1 to"}
    user = {"role": "user", "content": [{"type": "text", "text": "2 + 3"}]}
    assert sums.asked(client, system, user, **asks_for_text, n=1).choices[0].message.content == "It is\n6."


def test_a_cascade_that_has_no_answer_says_so_whole_and_streamed(tmp_path):
    small, _ = yaml.safe_load(sums.pool(tmp_path).read_text())["stages"]
    nobody = {"name": "nobody", "model": {"kind": "abstain", "rule": "number"}, "cost": {"usd": 0.002}}
    columns = {"answer": ["It is 1."] * 100, "confidence_self": [0.5] * 100, "rule": "number"}
    arrays = {"small": columns, "nobody": {"answer": [None] * 100, "rule": "number"}}
    costs = {"small": 0.001, "nobody": 0.002}
    policy = cauc_ray.fit(
        arrays, ["1", "2"] * 50, models=[*arrays], costs=costs, cost_unit="USD", validation=0.5, threshold=0.99
    )
    with sums.client_of(sums.pool(tmp_path, stages=[small, nobody]), policy) as (_, client):
        whole = sums.asked(client, "1 + 1").choices[0].message
        assert whole.content is None
        stream = [*sums.asked(client, "1 + 1", stream=True)]
    assert "".join(part.choices[0].delta.content or "" for part in stream) == ""
    assert [part.choices[0].delta.refusal for part in stream if part.choices[0].delta.refusal] == [whole.refusal]
    assert "no model" in whole.refusal


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["sums"]
    assert client.models.retrieve("sums").id == "sums"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def message(content, role="user"):
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("fields", "error", "names"),
    [
        ({"n": 2}, openai.BadRequestError, "n must be 1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions"),
        ({"logprobs": True, "top_logprobs": 2}, openai.BadRequestError, "logprobs"),
        ({"modalities": ["text", "audio"]}, openai.BadRequestError, "modalities"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        *(({"messages": [message(nothing)]}, openai.BadRequestError, "no content") for nothing in (None, [])),
        ({"messages": [message(None, "system"), message("1 + 1")]}, openai.BadRequestError, "system's message has no"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [message("1 + 1"), message("2", "assistant")]}, openai.BadRequestError, "one message"),
        ({"messages": [message([{"type": "image_url"}])]}, openai.BadRequestError, "text"),
        ({"model": "gpt"}, openai.NotFoundError, "sums"),
    ],
)
def test_what_no_cascade_gives_is_refused_in_one_line(client, fields, error, names):
    with pytest.raises(error) as raised:
        sums.asked(client, "1 + 1", **fields)
    assert names in raised.value.body["message"]
    assert "\n" not in raised.value.body["message"]


def test_the_tokens_of_an_upstream_are_passed_on_and_one_that_refuses_is_named(tmp_path):
    stages = yaml.safe_load(sums.pool(tmp_path).read_text())["stages"]
    expected = dict(zip(QUESTIONS, RIGHT, strict=True))

    def upstream(prompt, before):
        if prompt not in expected:
            return Fault(400, {"error": {"message": "no such question"}})
        text = f"{expected[prompt]}"
        tokens = [{"token": text, "logprob": -0.1, "bytes": [*text.encode()]}]
        choice = {"message": message(text, "assistant"), "logprobs": {"content": tokens}}
        return {"choices": [choice], "usage": {"prompt_tokens": 20, "completion_tokens": 1}}

    with scripted_server(upstream) as server:
        generate = {"rule": "number", "confidences": ["sequence"]}
        asks = {"kind": "openai", "model": "up", "base_url": server.url, "prompt": "{{ question }}"}
        small, large = stages
        path = sums.pool(tmp_path, stages=[small, {**large, "model": {**asks, "generate": generate}}])
        with sums.client_of(path, sums.policy(tmp_path, large="sequence")) as (service, client):
            hard = [question for question, right in expected.items() if right > sums.MOST]
            for question in hard[:8]:
                answer = sums.asked(client, question)
                usage = answer.usage  # of the stage that reports its tokens
                assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 1, 21)
                assert answer.choices[0].message.content == str(expected[question])
                assert answer.cauc["source"] == "large: sequence"
            remote = {"kind": "remote", "url": service.url, "model": "sums", "words": {"confidences": ["confidence"]}}
            model = load_pool(sums.pool(tmp_path, stages=[{"name": "cloud", "model": remote}])).stages[0].load()
            easy = next(question for question, right in expected.items() if right <= sums.MOST)
            answers = model({"question": np.array([easy, *hard[:4], easy, *hard[4:8]], dtype=object)})
            assert answers.tokens.tolist() == ([[0, 0], *[[20, 1]] * 4]) * 2
            with pytest.raises(openai.APIStatusError) as raised:
                sums.asked(client, "What is 50 + 49?")
        assert raised.value.status_code in (422, 503)
        assert "no such question" in raised.value.body["message"]


def test_it_asks_for_the_token_and_keeps_within_the_byte_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUC_TOKEN", "secret")
    path = sums.pool(tmp_path, serving={"max_body_mb": 0.001})
    with cauc_ray.serve(path, sums.policy(tmp_path), port=0, name="sums", local=True) as running:
        for key, text, status in (("wrong", "1 + 1", 401), ("secret", "1" * 1000, 413), ("secret", "1 + 1", 200)):
            body = {"model": "sums", "messages": [message(text)]}
            answer = http("POST", f"{running.url}/v1/chat/completions", body, Authorization=f"Bearer {key}")
            assert answer[0] == status, answer[1]
        assert http("GET", f"{running.url}/v1/models")[0] == 401


def test_feedback_takes_right_answers_as_texts(served):
    url = served[0].url
    content = answered(url, "sums", {"question": QUESTIONS}, FEEDBACK)
    send_labels(url, "sums", content, [f"{right if row < 30 else right + 1}.0" for row, right in enumerate(RIGHT)])
    stages = []

    def all_labelled():
        stages[:] = json.loads(http("GET", f"{url}/v2/models/sums/watch")[1])["stages"]
        return sum(stage["n_labelled"] for stage in stages) == len(QUESTIONS)

    until(all_labelled)
    assert sum(stage["n_labelled"] * stage["accepted_accuracy"][0] for stage in stages) == pytest.approx(30)
