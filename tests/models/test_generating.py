"""Models that generate answers: what is asked, what is read from texts, and what is refused."""

import math

import numpy as np
import pytest
from completion_server import Fault, scripted_server
from pydantic import ValidationError

from cauc_ray.errors import ConfigError
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.pool import pool_of
from cauc_ray.numbers.answer_keys import NO_ANSWER, confidences_in, said_keys


def spec(url="http://127.0.0.1:9/v1", generate=None, **more):
    settings = {"prompt": "{{ question }}", "base_url": url, "generate": generate or {}, **more}
    return OpenAISpec(kind="openai", model="m", **settings)


def questions(*texts):
    batch = np.empty(len(texts), dtype=object)
    batch[:] = texts
    return {"question": batch}


def choice(text, tokens=None):
    listed = [{"token": token, "logprob": logprob} for token, logprob in tokens or ()]
    return {"message": {"role": "assistant", "content": text}, "logprobs": {"content": listed} if listed else None}


def replied(*choices, n_tokens=8):
    return {"choices": [*choices], "usage": {"prompt_tokens": 10, "completion_tokens": n_tokens}}


def ask(script, generate, *texts, **more):
    with scripted_server(script) as server:
        answers = spec(server.url, generate, **more).load()(questions(*texts))
    return answers, server


@pytest.mark.parametrize("several", [True, False])
def test_the_most_frequent_of_several_samples_is_the_answer_whether_a_server_samples_several_or_not(several):
    texts = ["It is 7.", "8", "seven is 7"]

    def script(prompt, before):
        return replied(*map(choice, texts)) if several else replied(choice(texts[before % 3]))

    generate = {"rule": "number", "samples": 3, "confidences": ["samples"]}
    answers, server = ask(script, generate, "3 + 4?", prices={"input": 1.0, "output": 2.0})
    assert answers.texts == ["It is 7."]
    assert confidences_in(answers.logits).tolist() == [[pytest.approx(2 / 3)]]
    assert answers.costs[0] == pytest.approx(len(server.requests) * (10 * 1.0 + 8 * 2.0) / 1e6)
    assert len(server.requests) == (1 if several else 3)
    assert {body["temperature"] for _, _, body in server.requests} == {1.0}


def test_the_log_probability_is_that_of_the_answers_own_tokens():
    thought = [("<think>", -3.0), ("7?", -3.0), ("</think>", -3.0)]
    free = [*thought, ("Pa", -0.1), ("ris", -0.2), ("<|end|>", -5.0)]
    fields = [('{"why": "x', -2.0), ('", "answer": "', -2.0), ("Pa", -0.1), ("ris", -0.2), ('", "confidence": ', -2.0)]
    fields += [("0.75", -1.0), ("}", -1.0)]
    text = "".join(token for token, _ in fields)
    for content, tokens, confidences in (
        ("<think>7?</think>Paris", free, ["mean", "sequence"]),
        (text, fields, ["mean", "sequence", "verbal"]),
    ):
        answers, _ = ask(lambda p, n, c=content, t=tokens: replied(choice(c, t)), {"confidences": confidences}, "x")
        assert answers.texts == ["Paris"]
        expected = [-0.15, -0.3, 0.75][: len(confidences)]
        np.testing.assert_allclose(confidences_in(answers.logits)[0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("before", "answer", "after"),
    [
        ('{"why": {"answer": "', None, '"}, "answer": "'),
        ('{"answer": "', None, '", "answer": "'),
        ('{ "why" : ["\\"answer\\": ", "}"] ,\n "\\u0061nswer"\t:\n"', "Rome", ""),
    ],
)
def test_the_tokens_of_the_answer_are_those_of_its_own_field(before, answer, after):
    """Another field may contain it; it may come twice, or with escapes."""
    tokens = [(before, -2.0), *([] if answer else [("Rome", -4.0), (after, -2.0)]), ("Rome", -0.5)]
    tokens.append(('", "confidence": 0.75 }', -2.0))
    content = "".join(token for token, _ in tokens)
    answers, _ = ask(lambda p, n: replied(choice(content, tokens)), {"confidences": ["sequence", "verbal"]}, "x")
    assert answers.texts == ["Rome"]
    assert confidences_in(answers.logits).tolist() == [[-0.5, 0.75]]


def test_the_end_of_a_turn_that_has_the_answers_letters_is_not_the_answer():
    answers, _ = ask(lambda p, n: replied(choice("end", [(" end", -0.5), ("<|end|>", -9.0)])), {}, "x")
    assert confidences_in(answers.logits).tolist() == [[-0.5]]


@pytest.mark.parametrize(
    ("token", "text", "confidence"),
    [
        ({"token": "a", "logprob": -1.0, "bytes": [300]}, "a", np.nan),
        ({"token": "a", "logprob": -1.0, "bytes": ["a"]}, "a", np.nan),
        ({"token": "a", "logprob": -(10**400)}, "a", np.nan),
        ({"token": "a", "logprob": "-1"}, "a", np.nan),
        ({"token": "\ud800", "logprob": -1.0}, "a", np.nan),
        ({"token": "\ud800", "logprob": -1.0}, "\ud800", -1.0),
    ],
)
def test_tokens_that_are_none_leave_an_answer_without_their_likelihood(token, text, confidence):
    reply = {"message": {"content": text}, "logprobs": {"content": [token]}}
    answers, _ = ask(lambda p, n: replied(reply), {}, "x")
    assert answers.texts == [text.replace("\ud800", "?")]
    np.testing.assert_array_equal(confidences_in(answers.logits), [[confidence]])


@pytest.mark.parametrize("usage", [None, {"prompt_tokens": -5, "completion_tokens": 1}, {"prompt_tokens": 10**30}])
def test_usage_that_is_none_fails_a_row_whose_cost_it_is(usage):
    def script(prompt, before):
        return {"choices": [choice("a")], "usage": usage}

    answers, _ = ask(script, {}, "x")
    assert answers.texts == ["a"]
    answers, _ = ask(script, {}, "x", prices={"input": 1.0, "output": 1.0})
    assert "no usage" in answers.failures[0]


@pytest.mark.parametrize("content", ["42", "[1]", "null", '"text"'])
def test_what_is_no_object_has_no_answer_in_it(content):
    schema = {"type": "object", "properties": {"confidence": {"type": "number"}}}
    generate = {"json_schema": schema, "answer_field": None, "confidences": ["verbal"]}
    answers, _ = ask(lambda p, n: replied(choice(content)), generate, "x")
    assert answers.texts == [None]
    assert not answers.failures


@pytest.mark.parametrize(
    "content", [None, "", "no JSON", '{"answer": null', '{"other": 1}', "<think>never ends", "[1]"]
)
def test_what_is_no_answer_is_none_and_is_paid(content):
    generate = {"confidences": ["verbal"]}
    answers, _ = ask(lambda p, n: replied(choice(content)), generate, "x", prices={"input": 1.0, "output": 1.0})
    assert not answers.failures
    assert said_keys(answers.logits).tolist() == [NO_ANSWER]
    assert np.isnan(confidences_in(answers.logits)).all()
    assert answers.costs.tolist() == [pytest.approx(18e-6)]


def test_servers_that_cut_limit_and_refuse_cost_what_they_bill_and_fail_one_row():
    def script(prompt, before):
        if prompt == "bad":
            return Fault(400, {"error": {"message": "policy"}})
        if before == 0:
            return Fault(429, {"error": {"message": "slow"}}, retry_after="0.01") if prompt == "slow" else Fault()
        return replied(choice("yes", [("yes", math.log(0.5))]))

    answers, server = ask(script, {}, "slow", "cut", "bad", prices={"input": 1.0, "output": 1.0})
    assert answers.texts == ["yes", "yes", None]
    assert list(answers.failures) == [2]
    assert "policy" in answers.failures[2]
    assert server.asked == {"slow": 2, "cut": 2, "bad": 1}
    assert answers.costs[0] == pytest.approx(18e-6)
    assert np.exp(confidences_in(answers.logits)[:2, 0]) == pytest.approx([0.5, 0.5])


def test_servers_that_want_another_name_of_the_limit_get_it():
    def script(prompt, before):
        message = "Unsupported parameter: use max_completion_tokens"
        return replied(choice("a")) if before else Fault(400, {"error": {"message": message, "param": "max_tokens"}})

    answers, server = ask(script, {"max_tokens": 50}, "x")
    assert answers.texts == ["a"]
    assert [body.get("max_completion_tokens") for _, _, body in server.requests] == [None, 50]


@pytest.mark.parametrize(
    ("generate", "more", "words"),
    [
        ({"samples": 3}, {}, "samples"),
        ({"confidences": ["samples"]}, {}, "samples"),
        ({"confidences": ["verbal", "verbal"]}, {}, "twice"),
        ({"samples": 2, "confidences": ["samples"], "temperature": 0}, {}, "alike"),
        ({"answer_field": "x"}, {}, "json_schema"),
        ({"json_schema": {"properties": {"a": {}}}}, {}, "no property 'answer'"),
        ({"json_schema": {"properties": None}}, {}, "no property 'answer'"),
        ({"json_schema": {"properties": ["answer"]}}, {}, "no property 'answer'"),
        ({"confidences": ["verbal"], "answer_field": "confidence"}, {}, "must differ"),
        ({"rule": "roughly"}, {}, "unknown rule"),
        ({}, {"labels": ["a", "b"]}, "labels"),
        ({}, {"votes": 3}, "votes"),
        ({}, {"endpoint": "completions"}, "chat"),
        ({}, {"extra_body": {"max_tokens": 5}}, "max_tokens of generate"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(generate, more, words):
    with pytest.raises(ValidationError, match=words):
        spec(generate=generate, **more)


@pytest.mark.parametrize(("confidences", "why"), [(["self", "self"], "twice"), ([""], "no name")])
def test_names_of_confidences_that_no_answer_can_have_are_refused_before_it_is_asked(tmp_path, confidences, why):
    model = {"kind": "python", "factory": "user_models:adder", "words": {"confidences": confidences}}
    with pytest.raises(ConfigError, match=why):
        pool_of({"name": "p", "task": "generation", "stages": [{"name": "small", "model": model}]}, tmp_path)


def test_a_log_of_logits_is_refused_where_models_answer_in_words(tmp_path):
    model = {"kind": "python", "factory": "user_models:adder", "words": {"rule": "number"}}
    content = {"name": "p", "task": "generation", "stages": [{"name": "small", "model": model}]}
    assert pool_of(content, tmp_path).rule == "number"
    with pytest.raises(ConfigError, match="log writes logits"):
        pool_of(content | {"serving": {"shadow": 0.1, "log": {"to": "LOG"}}}, tmp_path)
