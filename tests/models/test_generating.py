"""Models that generate answers: what is asked, what is read from texts, and what is refused."""

import numpy as np
import pytest
from batches import column
from completion_server import scripted_server
from pydantic import ValidationError

from cauc_ray.errors import ConfigError
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.pool import pool_of
from cauc_ray.numbers.answer_keys import NO_ANSWER, confidences_in, said_keys


def spec(url="http://127.0.0.1:9/v1", generate=None, **more):
    settings = {"prompt": "{{ question }}", "base_url": url, "generate": generate or {}, **more}
    return OpenAISpec(kind="openai", model="m", **settings)


def choice(text, tokens=None):
    listed = [{"token": token, "logprob": logprob} for token, logprob in tokens or ()]
    return {"message": {"role": "assistant", "content": text}, "logprobs": {"content": listed} if listed else None}


def replied(*choices, n_tokens=8):
    return {"choices": [*choices], "usage": {"prompt_tokens": 10, "completion_tokens": n_tokens}}


def ask(script, generate, *texts, **more):
    with scripted_server(script) as server:
        answers = spec(server.url, generate, **more).load()({"question": column(texts)})
    return answers, server


def test_the_most_frequent_of_several_samples_is_the_answer():
    texts = ["It is 7.", "8", "seven is 7"]
    generate = {"rule": "number", "samples": 3, "confidences": ["samples"], "max_tokens": 50}
    prices = {"input": 1.0, "output": 2.0}
    answers, server = ask(lambda p, n: replied(*map(choice, texts)), generate, "3 + 4?", prices=prices)
    assert answers.texts == ["It is 7."]
    assert confidences_in(answers.logits).tolist() == [[pytest.approx(2 / 3)]]
    assert answers.costs[0] == pytest.approx((10 * 1.0 + 8 * 2.0) / 1e6)
    ((_, _, body),) = server.requests
    assert (body["n"], body["temperature"], body["max_tokens"]) == (3, 1.0, 50)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (["<think>", "Paris", "</think>"], []),
        (['{"why": "x', '", "answer": "'], ['", "confidence": ', "0.75", "}"]),
        (['{"why": {"answer": "', "Pa", "ris", '"}, "answer": "'], ['", "confidence": 0.75 }']),
        (['{"answer": "', "Pa", "ris", '", "answer": "'], ['", "confidence": 0.75 }']),
        (['{ "why" : ["\\"answer\\": ", "}"] ,\n "\\u0061nswer"\t:\n"'], ['", "confidence": 0.75 }']),
    ],
)
def test_the_log_probability_is_that_of_the_answers_own_tokens(before, after):
    """Thoughts or another field may contain it; it may come twice, or with escapes."""
    tokens = [(token, -2.0) for token in before]
    tokens += [("Pa", -0.1), ("ris", -0.2)]
    tokens += [(token, -2.0) for token in after]
    content = "".join(token for token, _ in tokens)
    verbal = ["verbal"] if after else []
    answers, _ = ask(lambda p, n: replied(choice(content, tokens)), {"confidences": ["mean", "sequence", *verbal]}, "x")
    assert answers.texts == ["Paris"]
    expected = [-0.15, -0.3, 0.75][: 2 + len(verbal)]
    np.testing.assert_allclose(confidences_in(answers.logits)[0], expected, rtol=1e-6)


def test_the_end_of_a_turn_that_has_the_answers_letters_is_not_the_answer():
    answers, _ = ask(lambda p, n: replied(choice("end", [(" end", -0.5), ("<|end|>", -9.0)])), {}, "x")
    assert confidences_in(answers.logits).tolist() == [[-0.5]]


@pytest.mark.parametrize(
    ("token", "text", "confidence"),
    [
        ({"token": "a", "logprob": -1.0, "bytes": [300]}, "a", np.nan),
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


@pytest.mark.parametrize("usage", [{"prompt_tokens": -5, "completion_tokens": 1}, {"prompt_tokens": 10**30}])
def test_usage_that_is_none_fails_a_row_whose_cost_it_is(usage):
    def script(prompt, before):
        return {"choices": [choice("a")], "usage": usage}

    answers, _ = ask(script, {}, "x")
    assert answers.texts == ["a"]
    answers, _ = ask(script, {}, "x", prices={"input": 1.0, "output": 1.0})
    assert "no usage" in answers.failures[0]


WITHOUT_FIELD = {"json_schema": {"properties": {"confidence": {"type": "number"}}}, "answer_field": None}


@pytest.mark.parametrize(
    ("settings", "content"),
    [
        *(
            ({}, content)
            for content in (None, "no JSON", '{"answer": null', '{"other": 1}', "<think>never ends", "[1]")
        ),
        *((WITHOUT_FIELD, content) for content in ("42", "null")),
    ],
)
def test_what_is_no_answer_is_none_and_is_paid(settings, content):
    generate = {"confidences": ["verbal"], **settings}
    answers, _ = ask(lambda p, n: replied(choice(content)), generate, "x", prices={"input": 1.0, "output": 1.0})
    assert not answers.failures
    assert said_keys(answers.logits).tolist() == [NO_ANSWER]
    assert np.isnan(confidences_in(answers.logits)).all()
    assert answers.costs.tolist() == [pytest.approx(18e-6)]


@pytest.mark.parametrize(
    ("generate", "more", "words"),
    [
        ({"confidences": ["samples"]}, {}, "samples"),
        ({"samples": 2, "confidences": ["samples"], "temperature": 0}, {}, "alike"),
        ({"answer_field": "x"}, {}, "json_schema"),
        ({"json_schema": {"properties": {"a": {}}}}, {}, "no property 'answer'"),
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


@pytest.mark.parametrize(
    ("words", "pool", "why"),
    [
        ({"confidences": ["self", "self"]}, {}, "twice"),
        ({"confidences": [""]}, {}, "no name"),
        ({"rule": "number"}, {"serving": {"shadow": 0.1, "log": {"to": "LOG"}}}, "log writes logits"),
    ],
)
def test_pools_of_answers_in_words_that_no_answer_can_fit_are_refused(tmp_path, words, pool, why):
    model = {"kind": "python", "factory": "user_models:adder", "words": words}
    with pytest.raises(ConfigError, match=why):
        pool_of({"name": "p", "task": "generation", "stages": [{"name": "small", "model": model}], **pool}, tmp_path)
