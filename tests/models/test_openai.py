import asyncio
import gzip
import itertools
import math
import threading
import time
import traceback

import numpy as np
import pytest
from batches import column, question_batch
from completion_server import Fault, LanguageServer, chat_answer, language_server, scripted_server
from language_models import question_prompt

from cauc_ray.errors import ConfigError, ExecutionError, SpendingError
from cauc_ray.models.answers import BELOW, LITTLE_MASS
from cauc_ray.models.images import data_uri
from cauc_ray.models.kind import Placement
from cauc_ray.models.openai import OpenAISpec

KEY = "sk-0123456789abcdef"


def spec(**settings):
    return OpenAISpec(kind="openai", model="m", **settings)


TWO = [("first?", ["x", "y"]), ("second?", ["x", "y"])]


@pytest.mark.parametrize("place", [0, 1])
def test_an_option_that_a_server_does_not_tokenise_fails_its_question_alone(tiny_model, monkeypatch, place):
    reply = LanguageServer.reply

    def refusing(self, path, headers, body):
        bad = path == "/tokenize" and "unspeakable" in str(body)
        return Fault(422, {"detail": "no such text"}) if bad else reply(self, path, headers, body)

    monkeypatch.setattr(LanguageServer, "reply", refusing)
    with language_server(tiny_model, scores_tokens=True) as url:
        rows = [("q?", ["x", "y z"])] * 2
        rows[place] = ("q?", ["x", "unspeakable"])
        answers = spec(base_url=url, options="text", max_concurrency=1).load()(question_batch(*rows))
    assert list(answers.failures) == [place]
    assert "no such text" in answers.failures[place]


def always_a(prompt, before):
    return chat_answer({"A": 0.9})


def ask(script, *rows, **settings):
    """Ask a server that follows a script about rows, or about TWO; return the answers and the server."""
    with scripted_server(script) as server:
        return spec(base_url=server.url, **settings).load()(question_batch(*(rows or TWO))), server


def test_a_server_that_scores_no_given_tokens_is_refused_for_names():
    with pytest.raises(ConfigError, match="needs a server with /tokenize and logprob_token_ids"):
        ask(always_a, options="name")


@pytest.mark.parametrize(
    ("listed", "expected", "n_below"),
    [
        # The ways to write a letter add up; only the exact letter counts.
        (
            {"A": 0.2, " A": 0.1, "▁A": 0.05, "ĠA": 0.05, "ĊA\n": 0.1, "B": 0.2, "C": 0.1, "a": 0.1, "A.": 0.1},
            (5, 2, 1),
            0,
        ),
        # A letter that is not listed is not likelier than the least likely token, nor than what is left.
        ({"B": 0.5, "The": 0.2, "A": 0.1}, (1, 5, 1), 1),
        ({"B": 0.6, "A": 0.35}, (3.5, 6, 0.5), 1),
        ({"B": 1.0, "A": 1e-3}, (0.01, 10, 10 * 2**-24), 1),
        # One that is said to be too unlikely is as good as not listed.
        ({"A": 0.6, "B": 0.3, "C": None}, (6, 3, 1), 1),
    ],
)
def test_letters_get_the_probability_of_their_tokens_or_the_largest_that_they_can_have(listed, expected, n_below):
    answer = chat_answer({token: probability or 1.0 for token, probability in listed.items()})
    for token in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        token["logprob"] = -9999.0 if listed[token["token"]] is None else token["logprob"]
    answers, _ = ask(lambda prompt, before: answer, ("q?", ["x", "y", "z"]))
    assert np.exp(answers.logits[0]) * 10 == pytest.approx(expected, rel=1e-5)
    assert answers.counts.get(BELOW, 0) == n_below


MORE_FIELDS = {"reasoning_effort": "low", "service_tier": "flex"}


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({}, {"logprobs": True, "top_logprobs": 7}),
        ({"endpoint": "completions"}, {"logprobs": 7}),
        ({"system": "Be brief.", "extra_body": MORE_FIELDS}, {"logprobs": True, "top_logprobs": 7, **MORE_FIELDS}),
    ],
    ids=["chat", "completions", "more fields"],
)
def test_requests_are_as_the_protocol_has_them(monkeypatch, settings, fields):
    monkeypatch.setenv("SOME_KEY", KEY)
    chat = "endpoint" not in settings
    bare = {"choices": [{"text": " A", "logprobs": {"top_logprobs": [{" A": math.log(0.6), "B": math.log(0.3)}]}}]}
    reply = chat_answer({"A": 0.6, "B": 0.3}) if chat else bare
    more = {"api_key_env": "SOME_KEY", "headers": {"api-key": "$SOME_KEY", "x-team": "a"}, "top_logprobs": 7}
    answers, server = ask(lambda prompt, before: reply, TWO[0], **settings, **more)
    ((path, headers, body),) = server.requests
    assert np.exp(answers.logits) == pytest.approx(np.array([[0.6, 0.3]]))
    assert (answers.counts, answers.costs, answers.failures) == ({}, None, {})
    assert (headers["authorization"], headers["api-key"], headers["x-team"]) == (f"Bearer {KEY}", KEY, "a")
    prompt = question_prompt("first?", ["x", "y"], chat=chat)
    turns = [{"role": "system", "content": "Be brief."}] if "system" in settings else []
    asked = {"messages": [*turns, {"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    assert body == {"model": "m", "temperature": 0, "max_tokens": 1, **asked, **fields}
    assert path == ("/v1/chat/completions" if chat else "/v1/completions")


def test_rows_are_counted_failed_and_billed_each_by_its_own_answer():
    probabilities = [{"The": 0.6, "I": 0.3}, {"A": 0.9}, {"The": 0.8, "A": 0.1, "B": 0.05}, {"A": 0.5}]
    last_asked = threading.Event()

    def script(prompt, before):
        row = int(prompt.split("?")[0].rsplit(" ", 1)[1])
        if row == 3:
            last_asked.set()
        assert last_asked.wait(60)  # so that the rows end in any order
        answer = chat_answer(probabilities[row], n_prompt=50 + row)
        return answer if row != 3 else {name: value for name, value in answer.items() if name != "usage"}

    answers, _ = ask(script, *[(f"row {row}?", ["x", "y"]) for row in range(4)], prices={"input": 1.5, "output": 2})
    assert answers.failures.keys() == {0, 3}
    assert "A to B" in answers.failures[0]
    assert "usage" in answers.failures[3]
    assert answers.costs == pytest.approx([77e-6, 78.5e-6, 80e-6, 0])
    assert answers.counts == {BELOW: 1, LITTLE_MASS: 1}


def test_a_rate_limit_is_waited_for_as_long_as_the_server_asks():
    started_at = time.monotonic()
    limit = Fault(429, {"error": {"message": "slow"}}, retry_after="0.7")  # longer than the client's own first wait
    answers, _ = ask(lambda prompt, before: always_a(prompt, before) if before else limit, TWO[0], max_retries=0)
    assert not answers.failures
    assert time.monotonic() - started_at >= 0.7


def test_a_server_that_limits_its_rate_is_asked_by_fewer_at_a_time_until_all_are_answered():
    """It answers two at a time; 20 would exceed every number of attempts."""
    limited = []

    def script(prompt, before):
        if server.n_in_flight > 2:
            limited.append(prompt)
            return Fault(429, {})
        return chat_answer({"A": 0.9})

    rows = [(f"{place}?", ["x", "y"]) for place in range(60)]
    with scripted_server(script, hold_s=0.01) as server:
        model = spec(base_url=server.url, max_concurrency=20, max_retries=0).load()
        assert not model(question_batch(*rows)).failures
    assert len(limited) < len(rows)


@pytest.mark.parametrize("fault", [Fault(500, {}), Fault(503, "busy", content_type="text/plain"), Fault()])
def test_a_passing_fault_is_tried_again(fault):
    answers, server = ask(lambda prompt, before: always_a(prompt, before) if before else fault, max_retries=1)
    assert len(server.requests) == 4
    assert not answers.failures


REFUSAL = "This model's maximum context length is\n8192 tokens " + "…" * 300


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(400, {"error": {"message": REFUSAL, "param": "messages"}}), "context length is 8192 tokens"),
        (Fault(413, {"detail": "too large"}), "413: too large"),
        (Fault(200, gzip.compress(bytes(300 << 20), 1), content_encoding="gzip"), "256 MB"),
        (Fault(422, "no JSON", content_type="text/plain"), "422: no JSON"),
        (Fault(200, "<html>", content_type="text/html"), "not JSON"),
        (Fault(200, {"choices": [{"logprobs": {"content": []}}]}), "ended its answer before"),
        (Fault(200, {"choices": []}), "has no choices"),
        (chat_answer({"A": 0.9}) | {"choices": [{"message": {"content": "A"}}]}, "no log-probabilities"),
    ],
)
def test_a_question_that_a_server_refuses_fails_alone(fault, words):
    answers, server = ask(lambda prompt, _: fault if "first" in prompt else chat_answer({"A": 0.9}))
    assert len(server.requests) == 2
    assert list(answers.failures) == [0]
    assert "\n" not in answers.failures[0]
    assert len(answers.failures[0]) < 300
    assert words in answers.failures[0]
    assert answers.logits[1, 0] == pytest.approx(math.log(0.9), rel=1e-6)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
        Fault(400, {"error": {"message": "logprobs are not supported", "param": "logprobs"}}),
        Fault(400, {"error": {"message": "no such model", "code": "model_not_found"}}),
        Fault(429, {"error": {"message": "quota", "code": "insufficient_quota"}}),
    ],
)
def test_a_fault_of_every_question_ends_the_call_without_showing_the_key(fault, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    with scripted_server(lambda prompt, before: fault) as server:
        model = spec(base_url=server.url, api_key_env="SOME_KEY", max_concurrency=2).load()
        with pytest.raises(ConfigError) as error:
            model(question_batch(*[(f"{place}?", ["x", "y"]) for place in range(50)]))
        assert len(server.requests) < 50
    for part in (server.url, "'m'", "SOME_KEY", str(fault.status)):
        assert part in str(error.value)
    assert "\n" not in str(error.value)
    assert KEY not in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (Fault(429, {}), "429"),
        (Fault(429, {}, retry_after="3600"), "429"),
        (Fault(500, {}), "500"),
        (Fault(), "disconnected"),
    ],
)
def test_a_server_that_does_not_answer_ends_the_call(fault, words):
    with scripted_server(lambda prompt, before: fault) as server:
        settings = spec(base_url=server.url, max_retries=0)
        with pytest.raises(ExecutionError, match=rf"model 'm' .* does not answer .*{words}"):
            settings.load(Placement(call_timeout_s=1.0))(question_batch(*TWO))
    with pytest.raises(ExecutionError, match="connect"):  # the server is gone now
        settings.load()(question_batch(*TWO))


@pytest.mark.parametrize(
    ("settings", "call_timeout_s", "n_asked"),
    [({"max_retries": 1, "timeout_s": 1.0}, math.inf, 2), ({"timeout_s": 60}, 3.0, 1)],
)
def test_a_silent_server_ends_the_call_at_its_deadline(settings, call_timeout_s, n_asked):
    """The call ends before its stage gives it up."""
    released = threading.Event()
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.9}) if released.wait(60) else None) as server:
        model = spec(base_url=server.url, **settings).load(Placement(call_timeout_s=call_timeout_s))
        with pytest.raises(ExecutionError, match="no answer within"):
            model(question_batch(*TWO))
        assert max(server.asked.values()) == n_asked
        released.set()


def test_a_question_that_a_working_server_fails_on_fails_alone():
    third_asked = threading.Event()

    def script(prompt, before):
        if "third" in prompt:
            third_asked.set()
        # With two questions at a time the third is asked once the second's answer has been read.
        if "first" in prompt and (not before or third_asked.wait(60)):
            return Fault(500, {"error": {"message": "broken"}})
        return chat_answer({"A": 0.9})

    answers, _ = ask(script, *TWO, ("third?", ["x", "y"]), max_retries=1, max_concurrency=2)
    assert answers.failures.keys() == {0}
    assert "500: broken" in answers.failures[0]


def test_a_server_that_wants_the_limit_under_its_new_name_gets_it():
    refusal = "'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."

    def script(prompt, before):
        if "max_tokens" in server.requests[-1][2]:
            return Fault(400, {"error": {"message": refusal, "param": "max_tokens"}})
        return chat_answer({"A": 0.9})

    with scripted_server(script) as server:
        model = spec(base_url=server.url).load()
        assert not any(model(question_batch(row)).failures for row in TWO)
        assert ["max_tokens" in body for _, _, body in server.requests] == [True, False, False]
        assert server.requests[1][2]["max_completion_tokens"] == 1


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_are_in_flight_than_allowed(limit):
    rows = [(f"{place}?", ["x", "y"]) for place in range(9)]
    with scripted_server(always_a, hold_s=0.05) as server:  # so that one too many would be in flight as well
        spec(base_url=server.url, max_concurrency=limit).load()(question_batch(*rows))
        assert server.most_in_flight == limit


def test_a_paid_answer_is_kept_when_another_question_ends_the_call():
    """The second question is answered after the first has failed for good; it is not asked again."""
    refused = threading.Event()

    def script(prompt, before):
        if "first" in prompt and not before:
            refused.set()
            return Fault(402, {"error": {"message": "no credit left"}})
        assert refused.wait(60)
        time.sleep(0.1)  # the client reads the refusal first, if it is not slower than this
        return chat_answer({"A": 0.9})

    with scripted_server(script) as server:
        model = spec(base_url=server.url, prices={"input": 1, "output": 1}).load()
        with pytest.raises(ConfigError, match="no credit left"):
            model(question_batch(*TWO))
        assert (model(question_batch(*TWO)).costs > 0).all()
        assert sorted(server.asked.values()) == [1, 2]


@pytest.mark.parametrize("max_concurrency", [1, 32])
@pytest.mark.parametrize("by_length", [False, True])
def test_a_budget_is_never_exceeded_by_requests_in_flight(max_concurrency, by_length):
    billed = []

    def script(prompt, before):
        billed.append(len(prompt) // 4 if by_length else 100)
        return chat_answer({"A": 0.9}, n_prompt=billed[-1])

    rows = [("word " * n + "?", ["x", "y"]) for n in range(100)]
    settings = {"prices": {"input": 1, "output": 0}, "max_usd": 1000e-6, "max_concurrency": max_concurrency}
    with scripted_server(script, hold_s=0.002) as server:
        model = spec(base_url=server.url, **settings).load()
        for batch in (rows, [("another?", ["x", "y"]), ("word " * 50, ["x", "y"])]):
            with pytest.raises(SpendingError, match=r"its budget of 0\.001 USD is spent"):
                model(question_batch(*batch))
            assert 500 < sum(billed) <= 1000


def test_an_attempt_without_an_answer_in_time_is_billed_like_the_one_that_was_answered():
    released = threading.Event()

    def script(prompt, before):
        assert before or released.wait(60)
        return chat_answer({"A": 0.9}, n_prompt=99)

    with scripted_server(script) as server:
        model = spec(base_url=server.url, prices={"input": 1, "output": 1}, timeout_s=0.3).load()
        answers = model(question_batch(TWO[0]))
        released.set()
    assert answers.costs == pytest.approx([200e-6])


# Images.


def test_images_go_before_the_text_that_asks_about_them():
    settings = {"image": True, "labels": ["cat", "dog"], "prompt": "Which animal is this?"}
    picture = np.full((4, 6, 3), 7, np.uint8)
    with scripted_server(always_a) as server:
        answers = spec(base_url=server.url, **settings).load()({"image": column([picture, b"no image", None])})
        ((_, _, body),) = server.requests
    assert answers.failures.keys() == {1, 2}
    image, text = body["messages"][0]["content"]
    assert image["image_url"]["url"] == data_uri(picture)
    assert "A. cat" in text["text"]


# Sampled votes.


def sampled(*texts):
    choices = [{"message": {"content": text}} for text in texts]
    return {"choices": choices, "usage": {"prompt_tokens": 10, "completion_tokens": len(texts)}}


TEXTS = ['{"answer": "B"}', "B", ' {"answer": "B"}\n', '{"answer": "A"}', '{"answer": "C"}', "I think B", "", "[]"]


@pytest.mark.parametrize(("kind", "n_requests"), [("several", 1), ("one by one", 8), ("rejects n", 9)])
def test_the_shares_of_sampled_answers_are_probabilities(kind, n_requests):
    """Servers sample several answers at once, ignore n, or reject it; what they do is asked for once."""
    texts = itertools.cycle(TEXTS)

    def script(prompt, before):
        n = server.requests[-1][2].get("n")
        if n and kind == "rejects n":
            return Fault(400, {"error": {"message": "n must be 1", "param": "n"}})
        return sampled(*itertools.islice(texts, n if kind == "several" else 1))

    with scripted_server(script) as server:
        model = spec(base_url=server.url, votes=8, prices={"input": 1, "output": 1}, max_concurrency=1).load()
        answers = model(question_batch(TWO[0]))
        n_first = len(server.requests)
        model(question_batch(TWO[1]))
    assert model.facts.logit_kind == "probabilities"
    assert answers.logits == pytest.approx(np.array([[(1 + 0.5) / 5, (3 + 0.5) / 5]]))
    assert list(answers.counts.values()) == [4]
    n_answered = 1 if kind == "several" else 8
    assert answers.costs == pytest.approx([(10 * n_answered + 8) * 1e-6])
    assert (n_first, len(server.requests) - n_first) == (n_requests, n_answered)
    body = server.requests[0][2]
    assert (body["temperature"], "logprobs" in body) == (1, False)
    assert body["response_format"]["json_schema"]["schema"]["properties"]["answer"]["enum"] == ["A", "B"]


def test_names_are_voted_for_and_a_question_without_a_vote_fails_alone():
    labels = ["order", "order_status", "billing"]

    def script(prompt, before):
        return sampled(*["none" if "second" in prompt else "order_status"] * 4)

    settings = {"votes": 4, "options": "name", "labels": labels, "prompt": "{{ text }}"}
    with scripted_server(script) as server:
        model = spec(base_url=server.url, **settings).load()
        answers = model({"text": column(["first", "second"])})
    assert answers.logits[0] == pytest.approx([1 / 15, 13 / 15, 1 / 15])
    assert answers.failures.keys() == {1}
    assert "none of its 4 sampled answers" in answers.failures[1]


@pytest.mark.parametrize("field", [{}, {"content": None, "reasoning_content": "Okay"}])
def test_log_probabilities_of_thoughts_are_refused(field):
    """The first token of a reasoning model's answer is not its answer."""
    answer = chat_answer({"Okay" if field else "<think>": 0.9, "A": 0.05})
    answer["choices"][0]["message"] |= field
    with pytest.raises(ConfigError, match="enable_thinking: false"):
        ask(lambda prompt, before: answer)
    answers, server = ask(always_a, chat_template_kwargs={"enable_thinking": False})
    assert not answers.failures
    assert server.requests[-1][2]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_model_answers_where_an_event_loop_runs_already():
    async def answers():
        return ask(always_a)[0]

    assert not asyncio.run(answers()).failures
