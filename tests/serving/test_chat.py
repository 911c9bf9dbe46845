"""/v1/chat/completions, as OpenAI's client asks: the cascade's answer, in one piece or streamed, and refusals."""

import json

import numpy as np
import openai
import pytest
import sums
import yaml
from asking import http, infer, outputs_of
from completion_server import Fault, scripted_server

import cauc_ray
from cauc_ray.models.pool import load_pool

QUESTIONS, RIGHT = sums.questions(40, seed=9)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sums")
    with cauc_ray.serve(sums.pool(folder), sums.policy(folder), port=0, name="sums", local=True) as running:
        yield running


@pytest.fixture
def client(service):
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def asked(text):
    return [{"role": "user", "content": text}]


def test_an_unmodified_client_gets_the_answers_of_the_cascade_whole_and_streamed(service, client):
    outputs = ("answer", "stage", "confidence", "source", "cost")
    status, content = infer(service.url, "sums", {"question": QUESTIONS}, outputs, {})
    assert status == 200, content
    expected = outputs_of(content)
    assert set(expected["stage"]) == {0, 1}
    for row, (question, right) in enumerate(zip(QUESTIONS, RIGHT, strict=True)):
        whole = client.chat.completions.create(model="sums", messages=asked(question), temperature=0.5)
        text, details = whole.choices[0].message.content, whole.cauc
        assert text == expected["answer"][row] == f"It is\n{right}."
        assert details["stage"] == ("small", "large")[expected["stage"][row]]
        assert details["source"] == expected["source"][row] == f"{details['stage']}: self"
        assert details["confidence"] == pytest.approx(expected["confidence"][row], abs=1e-6)
        assert details["cost"] == pytest.approx(expected["cost"][row])
        assert details["policy_id"]
        assert not details["degraded"]
    usage = {"include_usage": True}
    stream = client.chat.completions.create(model="sums", messages=asked(question), stream=True, stream_options=usage)
    *parts, last, counts = stream
    assert "".join(part.choices[0].delta.content for part in parts) == text
    assert len(parts) == 3
    assert last.choices[0].finish_reason == "stop"
    assert last.cauc["stage"] == details["stage"]
    assert counts.usage.total_tokens == 0


def test_fields_that_ask_for_a_text_are_taken(client):
    asks_for_text = {
        "tools": [],
        "logprobs": False,
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "n": 1,
    }
    answer = client.chat.completions.create(model="sums", messages=asked("1 + 1"), **asks_for_text)
    assert answer.choices[0].message.content == "It is\n2."


def test_a_cascade_that_has_no_answer_says_so_whole_and_streamed(tmp_path):
    small, _ = yaml.safe_load(sums.pool(tmp_path).read_text())["stages"]
    nobody = {"name": "nobody", "model": {"kind": "abstain", "rule": "number"}, "cost": {"usd": 0.002}}
    columns = {"answer": ["It is 1."] * 100, "confidence_self": [0.5] * 100, "rule": "number"}
    arrays = {"small": columns, "nobody": {"answer": [None] * 100, "rule": "number"}}
    costs = {"small": 0.001, "nobody": 0.002}
    policy = cauc_ray.fit(
        arrays, ["1", "2"] * 50, models=[*arrays], costs=costs, cost_unit="USD", validation=0.5, threshold=0.99
    )
    path = sums.pool(tmp_path, stages=[small, nobody])
    with (
        cauc_ray.serve(path, policy, port=0, name="sums", local=True) as service,
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client,
    ):
        whole = client.chat.completions.create(model="sums", messages=asked("1 + 1")).choices[0].message
        assert whole.content is None
        stream = [*client.chat.completions.create(model="sums", messages=asked("1 + 1"), stream=True)]
    assert "".join(part.choices[0].delta.content or "" for part in stream) == ""
    assert [part.choices[0].delta.refusal for part in stream if part.choices[0].delta.refusal] == [whole.refusal]
    assert "no model" in whole.refusal


def test_a_system_message_precedes_the_question(client):
    messages = [{"role": "system", "content": "Add 1 to"}, *asked([{"type": "text", "text": "2 + 3"}])]
    assert client.chat.completions.create(model="sums", messages=messages).choices[0].message.content == "It is\n6."


def test_the_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["sums"]
    assert client.models.retrieve("sums").id == "sums"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "error", "names"),
    [
        ({"n": 2}, openai.BadRequestError, "n must be 1"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, openai.BadRequestError, "tools"),
        ({"functions": [{"name": "f"}]}, openai.BadRequestError, "functions"),
        ({"logprobs": True, "top_logprobs": 2}, openai.BadRequestError, "logprobs"),
        ({"modalities": ["text", "audio"]}, openai.BadRequestError, "modalities"),
        ({"response_format": {"type": "json_object"}}, openai.BadRequestError, "response_format"),
        ({"messages": asked(None)}, openai.BadRequestError, "no content"),
        ({"messages": asked([])}, openai.BadRequestError, "no content"),
        (
            {"messages": [{"role": "system"}, *asked("1 + 1")]},
            openai.BadRequestError,
            "system's message has no content",
        ),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"messages": [*asked("1 + 1"), {"role": "assistant", "content": "2"}]}, openai.BadRequestError, "one message"),
        ({"messages": asked([{"type": "image_url", "image_url": {"url": "x"}}])}, openai.BadRequestError, "text"),
        ({"model": "gpt"}, openai.NotFoundError, "sums"),
    ],
)
def test_what_no_cascade_gives_is_refused_in_one_line(client, fields, error, names):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": "sums", "messages": asked("1 + 1")} | fields)
    assert names in raised.value.body["message"]
    assert "\n" not in raised.value.body["message"]


def test_an_upstream_that_cuts_and_limits_costs_no_answer_and_one_that_refuses_is_named(tmp_path):
    content, expected = yaml.safe_load(sums.pool(tmp_path).read_text()), dict(zip(QUESTIONS, RIGHT, strict=True))

    def upstream(prompt, before):
        if prompt not in expected:
            return Fault(400, {"error": {"message": "no such question"}})
        if before == 0:
            return Fault() if expected[prompt] % 2 else Fault(429, {"error": {"message": "slow"}}, retry_after="0.01")
        text = f"{expected[prompt]}"
        tokens = [{"token": text, "logprob": -0.1, "bytes": [*text.encode()]}]
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": 20, "completion_tokens": 1}
        return {"choices": [{"message": message, "logprobs": {"content": tokens}}], "usage": usage}

    with scripted_server(upstream) as server:
        generate = {"rule": "number", "confidences": ["sequence"]}
        asks = {"kind": "openai", "model": "up", "base_url": server.url, "prompt": "{{ question }}"}
        content["stages"][1]["model"] = {**asks, "generate": generate}
        path = tmp_path / "upstream.yaml"
        path.write_text(yaml.safe_dump(content))
        policy = sums.policy(tmp_path, large="sequence")
        with (
            cauc_ray.serve(path, policy, port=0, name="sums", local=True) as service,
            openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0) as client,
        ):
            hard = [question for question, right in expected.items() if right > sums.MOST]
            for question in hard[:8]:
                answer = client.chat.completions.create(model="sums", messages=asked(question))
                usage = answer.usage  # of the stage that reports its tokens
                assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (20, 1, 21)
                assert answer.choices[0].message.content == str(expected[question])
                assert answer.cauc["source"] == "large: sequence"
            assert {question: server.asked[question] for question in hard[:8]} == dict.fromkeys(hard[:8], 2)
            remote = {"kind": "remote", "url": service.url, "model": "sums", "words": {"confidences": ["confidence"]}}
            model = load_pool(sums.pool(tmp_path, stages=[{"name": "cloud", "model": remote}])).stages[0].load()
            easy = next(question for question, right in expected.items() if right <= sums.MOST)
            answers = model({"question": np.array([easy, *hard[:4], easy, *hard[4:8]], dtype=object)})
            assert answers.tokens.tolist() == ([[0, 0], *[[20, 1]] * 4]) * 2
            with pytest.raises(openai.APIStatusError) as raised:
                client.chat.completions.create(model="sums", messages=asked("What is 50 + 49?"))
        assert raised.value.status_code in (422, 503)
        assert "no such question" in raised.value.body["message"]


def test_it_asks_for_the_token_and_keeps_within_the_byte_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("CAUC_TOKEN", "secret")
    path = sums.pool(tmp_path, serving={"max_body_mb": 0.001})
    with cauc_ray.serve(path, sums.policy(tmp_path), port=0, name="sums", local=True) as running:
        for key, text, status in (("wrong", "1 + 1", 401), ("secret", "1" * 1000, 413), ("secret", "1 + 1", 200)):
            body = {"model": "sums", "messages": asked(text)}
            answer = http("POST", f"{running.url}/v1/chat/completions", body, Authorization=f"Bearer {key}")
            assert answer[0] == status, answer[1]
        assert http("GET", f"{running.url}/v1/models")[0] == 401


def test_feedback_takes_right_answers_as_texts_and_ends_a_candidate_that_answers_worse(tmp_path):
    policy = sums.policy(tmp_path)
    policy.with_threshold(0.0).save(tmp_path / "hasty.json")
    serving = {"candidate": {"file": "hasty.json", "share": 0.5}, "canary": {"min_rows": 50}}
    outputs = ("prediction", "confidence", "stage")
    with cauc_ray.serve(sums.pool(tmp_path, serving=serving), policy, port=0, name="sums", local=True) as running:
        path = f"{running.url}/v2/models/sums"
        for _ in range(40):
            status, content = infer(running.url, "sums", {"question": QUESTIONS}, outputs, {})
            assert status == 200, content
            answer = {name: content["parameters"][name] for name in ("policy_id", "answer_id")}
            answer |= {name: values.tolist() for name, values in outputs_of(content).items()}
            status, taken, _ = http("POST", f"{path}/feedback", {**answer, "label": [f"{n}.0" for n in RIGHT]})
            assert status == 200, taken
            receipts = json.loads(http("GET", f"{path}/policy")[1])["receipts"]
            if receipts:
                break
        assert receipts[-1]["by"] == "rule"
        watched = json.loads(http("GET", f"{path}/policy")[1])
        assert watched["candidate"] is None
        assert watched["shares"] == {policy.id: 1.0}
