import asyncio
import math
import re
import subprocess
import sys
import threading
import time
import traceback

import numpy as np
import pyarrow.parquet as pq
import pytest
from batches import question_batch
from completion_server import Fault, LanguageServer, chat_answer, language_server, scripted_server
from conftest import SHARED_DATA
from hypothesis import given
from hypothesis import strategies as st
from language_models import LETTERS, question_prompt
from pydantic import ValidationError
from scipy.special import log_softmax, logsumexp

from cauc_ray.errors import ConfigError, ExecutionError
from cauc_ray.models.answers import BELOW, LITTLE_MASS
from cauc_ray.models.completions import letter_logits, unsaid_bound
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.prompts import Prompts

KEY = "sk-0123456789abcdef"


def spec(**settings):
    return OpenAISpec(kind="openai", model="m", **settings)


def always_a(prompt, before):
    return chat_answer({"A": 0.9})


TWO = [("first?", ["x", "y"]), ("second?", ["x", "y"])]


# What follows needs no server.


@given(
    weights=st.lists(st.floats(1e-12, 1.0), min_size=3, max_size=40),
    n_said=st.integers(1, 20),
    excess=st.floats(0, 1e-3),
)
def test_what_is_not_said_is_no_likelier_than_its_bound(weights, n_said, excess):
    logprobs = np.log(np.sort(weights)[::-1] / np.sum(weights))
    said, unsaid = logprobs[:n_said], logprobs[n_said:]
    bound = unsaid_bound(list(said))
    assert math.isfinite(bound)
    assert bound <= said.min()
    # The slack is what float64 sums of the said ones may be off by.
    assert (np.exp(unsaid) <= math.exp(bound) + 1e-12).all()
    left = 1 - math.fsum(np.exp(said))
    if left > 1e-6:
        assert bound == pytest.approx(min(said.min(), math.log(left)))
    # Rounding may leave nothing: the bound is finite all the same.
    nothing_left = [math.log((1 + excess) / n_said)] * n_said
    assert unsaid_bound(nothing_left) == pytest.approx(min(nothing_left[0], math.log(2**-24)))


def test_the_ways_to_write_a_letter_add_up_and_only_the_exact_letter_counts():
    said = {"A": 0.2, " A": 0.1, "▁A": 0.05, "ĠA": 0.05, "ĊA\n": 0.1, "B": 0.2, "a": 0.1, "AB": 0.1, "A.": 0.05}
    logits, n_below = letter_logits([(token, math.log(p)) for token, p in said.items()], 2)
    assert np.exp(logits) == pytest.approx([0.5, 0.2])
    assert n_below == 0


@given(st.permutations(["A", " B", "C", "The", "I"]), st.integers(2, 7))
def test_logits_are_finite_and_none_that_is_not_said_is_above_one_that_is(tokens, n_options):
    said = [(token, math.log(p)) for token, p in zip(tokens, (0.5, 0.2, 0.1, 0.1, 0.05), strict=True)]
    logits, n_below = letter_logits(said, n_options)
    assert np.isfinite(logits).all()
    assert n_below == max(0, n_options - 3)
    assert logits[3:] == pytest.approx(math.log(0.05))
    assert logits[:3].min() >= logits[3:].max(initial=-np.inf)


@pytest.mark.parametrize("nothing", [-9999.0, -math.inf, math.nan])
def test_a_letter_said_to_be_too_unlikely_is_as_good_as_not_said(nothing):
    said = [("A", math.log(0.6)), ("C", math.log(0.1))]
    assert letter_logits([*said, ("B", nothing)], 3)[0] == pytest.approx(letter_logits(said, 3)[0])
    assert letter_logits([*said, ("B", nothing)], 3)[1] == 1


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 0}, "top_logprobs"),
        ({"prices": {"input": -1, "output": 0}}, "prices.input"),
        ({"prices": {"input": 1}}, "prices.output"),
        ({"base_url": "http://user:password@host/v1"}, "base_url"),
        ({"base_url": "host:8000"}, "base_url"),
        ({"endpoint": "responses"}, "endpoint"),
        ({"api_key": KEY}, "api_key"),
        ({"options": "text"}, "needs a server that scores given tokens"),
        ({"max_usd": 1}, "max_usd needs prices"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(ValidationError) as error:
        spec(**settings)
    faults = [f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.value.errors()]
    assert any(says in fault for fault in faults)
    assert KEY not in "".join(faults)


def test_a_spec_says_what_it_is():
    own = spec(base_url="http://host:8000/v1", prices={"input": 1, "output": 2})
    assert (own.answers_kind, own.cost_unit) == ("log-probabilities", "USD")
    assert spec().cost_unit is None
    assert spec().url == "https://api.openai.com/v1"
    facts = own.load().facts
    assert facts.source == "openai m at http://host:8000/v1 (chat), log-probabilities of the options"
    assert facts.logit_kind == own.answers_kind


def test_openais_own_server_needs_a_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="the environment variable OPENAI_API_KEY has no key"):
        spec().load()
    monkeypatch.setenv("OTHER_KEY", KEY)
    spec(api_key_env="OTHER_KEY").load()


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr("cauc_ray.errors.find_spec", lambda name: None)  # it is installed here
    with pytest.raises(ConfigError, match=r"pip install 'cauc-ray\[openai\]'"):
        spec(base_url="http://host/v1").load()


def test_reading_a_spec_does_not_load_the_client():
    code = "import sys, cauc_ray.models.openai; sys.exit('openai' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# A server with a language model, whose log-probabilities are known.


@pytest.fixture(scope="module")
def served(language_model):
    with language_server(language_model) as url:
        yield url


@pytest.fixture(scope="module")
def questions():
    """Real questions with three, four and five options."""
    folder = SHARED_DATA / "questions"
    if not folder.is_dir():
        pytest.skip("the real questions (../shared/data/questions) are not here")
    rows = []
    for path in ("social_iqa/validation", "openbookqa/test", "commonsense_qa/validation"):
        rows += pq.read_table(folder / f"{path}.parquet").slice(0, 2).to_pylist()
    return [(row["question"], row["choices"]) for row in rows]


@pytest.fixture(scope="module")
def vocabulary(language_model):
    """Return what each token writes, without the space around it."""
    return [language_model.tokenizer.decode([token]).strip() for token in range(len(language_model.tokenizer))]


def assert_true_log_probabilities(vocabulary, next_logits, n_top, logits):
    """Hold options' logits against a plain forward pass; return how many are not among the n_top likeliest tokens."""
    logprobs = log_softmax(next_logits.astype(np.float64))
    likeliest = np.argsort(-logprobs)[:n_top]
    n_below = 0
    for letter, logit in zip(LETTERS, logits, strict=False):
        said, unsaid = [], []
        for token, text in enumerate(vocabulary):
            if text == letter:
                (said if token in likeliest else unsaid).append(logprobs[token])
        if said:
            assert logit == pytest.approx(logsumexp(said), abs=1e-5)
        else:  # the bound that it gets holds for every way to write the letter
            n_below += 1
            assert max(unsaid) - 1e-6 <= logit <= logprobs[likeliest].max() + 1e-6
    return n_below


@pytest.mark.parametrize("n_top", [20, 3])
def test_options_get_the_log_probabilities_of_a_plain_forward_pass(
    served, language_model, vocabulary, questions, n_top
):
    prices = {"input": 2.0, "output": 6.0}
    model = spec(base_url=served, prices=prices, top_logprobs=n_top).load()
    answers = model(question_batch(*questions))
    assert answers.failures == {}
    assert answers.logits.shape == (6, 5)
    assert answers.logits.dtype == np.float32
    assert answers.n_options.tolist() == [3, 3, 4, 4, 5, 5]
    beyond = model(question_batch(("word " * 10_000, ["x", "y"]), questions[0]))
    assert beyond.failures.keys() == {0}
    assert "maximum context length" in beyond.failures[0]
    assert beyond.costs[0] == 0 < beyond.costs[1]
    n_below = 0
    for row, (question, choices) in enumerate(questions):
        logits = answers.logits[row]
        assert np.isneginf(logits[len(choices) :]).all()
        tokens = language_model.chat(question_prompt(question, choices, chat=True))
        next_logits = language_model.logits(tokens)[-1]
        n_below += assert_true_log_probabilities(vocabulary, next_logits, n_top, logits[: len(choices)])
        assert answers.costs[row] == pytest.approx((len(tokens) * prices["input"] + prices["output"]) / 1e6)
        alone = model(question_batch(questions[row])).logits[0]
        assert alone == pytest.approx(logits[: len(alone)], abs=1e-6)
    assert answers.counts.get(BELOW, 0) == n_below
    assert n_below > 0 or n_top == 20
    with pytest.raises(ConfigError, match="needs a server with /tokenize and logprob_token_ids"):
        spec(base_url=served, options="name").load()(question_batch(*questions))


def test_bare_prompts_get_the_log_probabilities_of_a_plain_forward_pass(served, language_model, vocabulary, questions):
    answers = spec(base_url=served, endpoint="completions", top_logprobs=10).load()(question_batch(*questions))
    for row, (question, choices) in enumerate(questions):
        # A chat model would rather end its text after some bare prompts: there is no first token then.
        if row not in answers.failures:
            tokens = language_model.tokenizer.encode(question_prompt(question, choices))
            next_logits = language_model.logits(tokens)[-1]
            assert_true_log_probabilities(vocabulary, next_logits, 10, answers.logits[row, : len(choices)])
    assert all("endpoint: chat" in reason for reason in answers.failures.values())
    assert len(answers.failures) < len(questions)
    assert answers.costs is None


@pytest.fixture(scope="module")
def scoring(language_model):
    """A server that scores given tokens, as vLLM's does."""
    with language_server(language_model, scores_tokens=True) as url:
        yield url


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("options", ["letter", "name", "text"])
def test_a_server_that_scores_tokens_bounds_no_option(scoring, language_model, questions, endpoint, options):
    """Against a plain forward pass over the prompt and each option's own tokens."""
    model = spec(base_url=scoring, endpoint=endpoint, options=options, prices={"input": 2, "output": 6}).load()
    answers = model(question_batch(*questions))
    assert not answers.failures
    assert BELOW not in answers.counts
    assert (answers.costs > 0).all()
    chat = endpoint == "chat"
    prompts, _ = Prompts(spec(options=options, base_url=scoring), chat)(question_batch(*questions))
    for row, (_, choices) in enumerate(questions):
        prompt = prompts[row].text
        tokens = language_model.chat(prompt) if chat else language_model.tokenizer.encode(prompt)
        for option, choice in enumerate(choices):
            if options == "letter":
                letter = language_model.tokenizer.encode(LETTERS[option] if chat else f" {LETTERS[option]}")[-1]
                expected = log_softmax(language_model.logits(tokens)[-1].astype(float))[letter]
            else:
                own = language_model.tokenizer.encode(choice if chat else f" {choice}", add_special_tokens=False)
                logprobs = log_softmax(language_model.logits(tokens + own).astype(float), axis=1)
                expected = sum(logprobs[len(tokens) - 1 + n, token] for n, token in enumerate(own))
                expected /= len(choice.encode()) if options == "text" else 1
            assert answers.logits[row, option] == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_a_server_takes_128_tokens_at_once_and_labels_may_be_more(scoring, language_model):
    tokenizer = language_model.tokenizer
    tokens = [
        token for token in range(2, min(2000, len(tokenizer))) if tokenizer.encode(tokenizer.decode([token])) == [token]
    ]
    tokens = [token for token in tokens if tokenizer.decode([token]).strip()][:200]
    assert len(tokens) > 150
    names = ["a name of several tokens", *(tokenizer.decode([token]) for token in tokens)]
    model = spec(base_url=scoring, labels=names, prompt="{{ text }}")
    answers = model.load()({"text": np.array(["Which?"], dtype=object)})
    prompt = Prompts(model, True)({"text": np.array(["Which?"], dtype=object)})[0][0].text
    expected = log_softmax(language_model.logits(language_model.chat(prompt))[-1].astype(float))[tokens]
    assert answers.logits[0, 1:] == pytest.approx(expected, abs=1e-4)
    assert np.isfinite(answers.logits[0, 0])


@pytest.mark.parametrize("first", [True, False])
def test_an_option_that_a_server_does_not_tokenise_fails_its_question_alone(language_model, monkeypatch, first):
    reply = LanguageServer.reply

    def refusing(self, path, headers, body):
        bad = path == "/tokenize" and "unspeakable" in str(body.get("prompt"))
        return Fault(422, {"detail": "no such text"}) if bad else reply(self, path, headers, body)

    monkeypatch.setattr(LanguageServer, "reply", refusing)
    with language_server(language_model, scores_tokens=True) as url:
        model = spec(base_url=url, options="text", max_concurrency=1).load()
        rows = [("q?", ["x", "unspeakable"]), ("q?", ["x", "y z"])]
        answers = model(question_batch(*rows[:: 1 if first else -1]))
    assert list(answers.failures) == [0 if first else 1]
    assert "does not tokenise" in answers.failures[0 if first else 1]


# A server that does as it is told: rate limits, faults and answers that a real one does not give at will.


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_requests_are_as_the_protocol_has_them(monkeypatch, endpoint):
    monkeypatch.setenv("SOME_KEY", KEY)
    bare = {"choices": [{"text": " A", "logprobs": {"top_logprobs": [{" A": math.log(0.6), "B": math.log(0.3)}]}}]}
    given = chat_answer({"A": 0.6, "B": 0.3}) if endpoint == "chat" else bare
    with scripted_server(lambda prompt, before: given) as server:
        settings = {"base_url": server.url, "api_key_env": "SOME_KEY", "top_logprobs": 7, "endpoint": endpoint}
        answers = spec(**settings).load()(question_batch(TWO[0]))
        ((path, headers, body),) = server.requests
    assert np.exp(answers.logits) == pytest.approx(np.array([[0.6, 0.3]]))
    assert (answers.counts, answers.costs, answers.failures) == ({}, None, {})
    assert headers["authorization"] == f"Bearer {KEY}"
    asked = "Question: first?\nA. x\nB. y\nAnswer"
    expected = {"model": "m", "temperature": 0, "max_tokens": 1}
    if endpoint == "chat":
        content = f"{asked} with the letter of the right option only."
        expected |= {"messages": [{"role": "user", "content": content}], "logprobs": True, "top_logprobs": 7}
    else:
        expected |= {"prompt": f"{asked}:", "logprobs": 7}
    assert body == expected
    assert path == ("/v1/chat/completions" if endpoint == "chat" else "/v1/completions")


def test_a_chat_model_that_ends_a_bare_prompt_is_to_be_asked_as_one():
    answer = {"choices": [{"text": "", "logprobs": {"top_logprobs": []}}]}
    with scripted_server(lambda prompt, before: answer) as server:
        answers = spec(base_url=server.url, endpoint="completions").load()(question_batch(TWO[0]))
    assert "before the first token; a chat model needs endpoint: chat" in answers.failures[0]


def test_rows_without_a_question_fail_and_ask_nothing():
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.6, "B": 0.3})) as server:
        model = spec(base_url=server.url).load()
        rows = [("q?", None), TWO[0], ("\ud800?", ["x", "y"]), ("many?", ["x"] * 53)]
        answers = model(question_batch(*rows))
        assert len(server.requests) == 1
        none = model(question_batch(*rows[:1]))
    assert set(answers.failures) == {0, 2, 3}
    assert "Unicode" in answers.failures[2]
    assert "53 options" in answers.failures[3]
    assert np.isfinite(answers.logits[1, :2]).all()
    assert none.logits.shape == (1, 1)
    assert set(none.failures) == {0}


def test_rows_are_bounded_counted_failed_and_billed_each_by_its_own_answer():
    said = [{"The": 0.6, "I": 0.3}, {"A": 0.9}, {"B": 0.7, "The": 0.2}, {"The": 0.8, "A": 0.1, "B": 0.05}, {"A": 0.5}]

    def script(prompt, before):
        row = int(prompt.split("?")[0].rsplit(" ", 1)[1])
        time.sleep(0.02 * (row % 3))  # so that they end in another order
        answer = chat_answer(said[row], n_prompt=50 + row)
        if row == 4:
            del answer["usage"]
        return answer

    rows = question_batch(*[(f"row {row}?", ["x", "y"]) for row in range(5)])
    with scripted_server(script) as server:
        answers = spec(base_url=server.url, prices={"input": 1.5, "output": 2}).load()(rows)
        unpriced = spec(base_url=server.url).load()(rows)
    assert answers.failures.keys() == {0, 4}
    reason = answers.failures[0]
    assert reason.startswith("no option's letter (A to B) is among the 2 ")
    assert reason.endswith("begin with 'The', 'I'")
    assert "usage" in answers.failures[4]
    assert unpriced.failures.keys() == {0}
    assert answers.costs == pytest.approx([77e-6, 78.5e-6, 80e-6, 81.5e-6, 0])
    assert np.exp(answers.logits[1:4]) == pytest.approx(np.array([[0.9, 0.1], [0.1, 0.7], [0.1, 0.05]]), rel=1e-5)
    assert answers.counts == {BELOW: 2, LITTLE_MASS: 1}


def test_a_server_without_log_probabilities_is_called_one():
    def script(prompt, before):
        answer = chat_answer({"A": 0.9})
        if "second" not in prompt:
            answer["choices"][0]["logprobs"] = None
        return answer

    with scripted_server(script) as server:
        model = spec(base_url=server.url).load()
        first = model(question_batch(TWO[0])).failures[0]
        model(question_batch(TWO[1]))
        later = model(question_batch(TWO[0])).failures[0]
    assert f"none of {server.url} had any so far" in first
    assert "needs a server that returns them" in first
    assert later == "the answer has no log-probabilities"


def test_a_rate_limit_is_waited_for_as_long_as_the_server_says():
    asked_at = []

    def script(prompt, before):
        asked_at.append(time.monotonic())
        return chat_answer({"A": 0.9}) if before else Fault(429, {"error": {"message": "slow"}}, retry_after="1.5")

    with scripted_server(script) as server:
        answers = spec(base_url=server.url, max_retries=1).load()(question_batch(TWO[0]))
    assert not answers.failures
    assert asked_at[1] - asked_at[0] >= 1.5


@pytest.mark.parametrize("fault", [Fault(500, {}), Fault(503, "busy", content_type="text/plain"), Fault()])
def test_passing_faults_are_gone_over(fault):
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.9}) if before else fault) as server:
        answers = spec(base_url=server.url, max_retries=1).load()(question_batch(*TWO))
        assert len(server.requests) == 4
    assert not answers.failures


REFUSAL = "This model's maximum context length is\n8192 tokens " + "…" * 300


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(400, {"error": {"message": REFUSAL, "param": "messages"}}), "context length is 8192 tokens"),
        (Fault(413, {"detail": "too large"}), r"the server rejects it \(413: too large\)"),
        (Fault(422, "no JSON", content_type="text/plain"), r"422: no JSON"),
        (Fault(200, "<html>", content_type="text/html"), "has no choices"),
        (Fault(200, "{", content_type="application/json"), "not JSON"),
        (Fault(200, {"choices": [{"logprobs": {"content": []}}]}), "ended its answer before"),
        (Fault(200, {"choices": []}), "has no choices"),
    ],
)
def test_a_question_that_is_refused_for_its_own_sake_fails_alone(fault, says):
    with scripted_server(lambda prompt, _: fault if "first" in prompt else chat_answer({"A": 0.9})) as server:
        answers = spec(base_url=server.url).load()(question_batch(*TWO))
        assert len(server.requests) == 2
    assert list(answers.failures) == [0]
    assert "\n" not in answers.failures[0]
    assert len(answers.failures[0]) < 300
    assert answers.logits[1, 0] == pytest.approx(math.log(0.9), rel=1e-6)
    assert re.search(says, answers.failures[0])


@pytest.mark.parametrize(
    "fault",
    [
        Fault(401, {"error": {"message": f"Incorrect API key provided: {KEY}"}}),
        Fault(402, {"error": {"message": "no credit left"}}),
        Fault(403, {"detail": "forbidden"}),
        Fault(404, {"error": {"message": "The model `m` does not exist."}}),
        Fault(400, {"error": {"message": "logprobs are not supported", "param": "logprobs"}}),
        Fault(400, {"error": {"message": "no such model", "code": "model_not_found"}}),
    ],
)
def test_what_is_wrong_with_every_question_ends_the_call(fault, monkeypatch):
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
    ("fault", "says"),
    [(Fault(429, {}), "429"), (Fault(500, {}), "500"), (Fault(503, {}), "503"), (Fault(), "RemoteProtocolError")],
)
def test_a_server_that_does_not_answer_ends_the_call(fault, says):
    def asked(url):
        with pytest.raises(ExecutionError) as error:
            spec(base_url=url, max_retries=0).load()(question_batch(*TWO))
        return str(error.value)

    with scripted_server(lambda prompt, before: fault) as server:
        said = asked(server.url)
    assert f"{server.url} does not answer for model 'm' after up to 1 attempts ({says}" in said
    assert "ConnectError" in asked(server.url)  # it is gone now


@pytest.mark.parametrize(
    ("settings", "call_timeout_s", "says"),
    [
        # The client's own limit and that of the whole call run out together: either may be the first.
        ({"max_retries": 0, "timeout_s": 0.2}, math.inf, r"up to 1 attempts \((no answer within|\w+Timeout)"),
        ({"max_retries": 1, "timeout_s": 0.2}, math.inf, r"up to 2 attempts \((no answer within|\w+Timeout)"),
        ({"timeout_s": 60}, 1.0, "no answer within 0.9 s"),  # before the stage gives up on it
    ],
)
def test_a_server_that_is_silent_is_not_waited_for(settings, call_timeout_s, says):
    released = threading.Event()

    def script(prompt, before):
        released.wait(60)
        return chat_answer({"A": 0.9})

    with scripted_server(script) as server:
        model = spec(base_url=server.url, **settings).load_within(call_timeout_s)
        started = time.monotonic()
        with pytest.raises(ExecutionError, match=says):
            model(question_batch(*TWO))
        assert time.monotonic() - started < 10
        assert all(n_asked <= settings.get("max_retries", 0) + 1 for n_asked in server.asked.values())
        released.set()


def test_a_question_that_a_living_server_fails_on_fails_alone():
    third_asked = threading.Event()

    def script(prompt, before):
        if "first" not in prompt:
            if "third" in prompt:
                third_asked.set()
            return chat_answer({"A": 0.9})
        # With two questions at a time the third is asked once the second's answer has been read.
        assert not before or third_asked.wait(60)
        return Fault(500, {"error": {"message": "broken"}})

    with scripted_server(script) as server:
        model = spec(base_url=server.url, max_retries=1, max_concurrency=2).load()
        answers = model(question_batch(*TWO, ("third?", ["x", "y"])))
    assert answers.failures == {0: "the server fails on it (500: broken)"}


def test_a_server_that_wants_the_limit_under_its_new_name_gets_it():
    refusal = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )

    with scripted_server(always_a) as server:

        def script(prompt, before):
            if "max_tokens" in server.requests[-1][2]:
                return Fault(400, {"error": {"message": refusal, "param": "max_tokens"}})
            return chat_answer({"A": 0.9})

        server.script = script
        model = spec(base_url=server.url).load()
        assert not model(question_batch(TWO[0])).failures
        assert not model(question_batch(TWO[1])).failures
        assert ["max_tokens" in body for _, _, body in server.requests] == [True, False, False]
        assert server.requests[1][2]["max_completion_tokens"] == 1


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_are_under_way_than_allowed(limit):
    all_there = threading.Barrier(limit)

    def script(prompt, before):
        all_there.wait(60)
        return chat_answer({"A": 0.9})

    with scripted_server(script, hold_s=0.05) as server:  # so that one too many would be there as well
        rows = [(f"{place}?", ["x", "y"]) for place in range(9)]
        spec(base_url=server.url, max_concurrency=limit).load()(question_batch(*rows))
        assert server.most_in_flight == limit


def test_what_has_been_paid_is_kept_when_another_question_ends_the_call():
    """The second question's answer comes after the first one has failed for good; it is not asked again."""

    def script(prompt, before):
        if "first" in prompt and not before:
            return Fault(402, {"error": {"message": "no credit left"}})
        if "second" in prompt:
            time.sleep(0.3)
        return chat_answer({"A": 0.9}, n_prompt=50)

    with scripted_server(script) as server:
        model = spec(base_url=server.url, prices={"input": 1, "output": 1}).load()
        with pytest.raises(ConfigError, match="no credit left"):
            model(question_batch(*TWO))
        answers = model(question_batch(*TWO))
        assert sorted(server.asked.values()) == [1, 2]
    assert not answers.failures
    assert (answers.costs > 0).all()


def test_a_budget_ends_what_a_model_asks():
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.9}, n_prompt=100)) as server:
        settings = {"prices": {"input": 1, "output": 1}, "max_usd": 450e-6, "max_concurrency": 1}
        model = spec(base_url=server.url, **settings).load()
        with pytest.raises(ExecutionError, match=r"its budget of 0\.00045 USD is spent"):
            model(question_batch(*[(f"{n}?", ["x", "y"]) for n in range(9)]))
        assert len(server.requests) == 5


@pytest.mark.parametrize("how", ["token", "field"])
def test_log_probabilities_of_thoughts_are_refused(how):
    """The first token of a reasoning model's answer is not its answer."""

    def script(prompt, before):
        answer = chat_answer({"<think>": 0.9, "A": 0.05} if how == "token" else {"Okay": 0.9, "A": 0.05})
        if how == "field":
            answer["choices"][0]["message"] = {"content": None, "reasoning_content": "Okay"}
        return answer

    with scripted_server(script) as server:
        with pytest.raises(ConfigError, match="enable_thinking: false"):
            spec(base_url=server.url).load()(question_batch(*TWO))
        server.script = always_a
        own = spec(base_url=server.url, chat_template_kwargs={"enable_thinking": False}).load()
        assert not own(question_batch(TWO[0])).failures
        assert server.requests[-1][2]["chat_template_kwargs"] == {"enable_thinking": False}


def test_a_model_answers_where_an_event_loop_runs_already():
    async def serve(model):
        return model(question_batch(*TWO))

    with scripted_server(always_a) as server:
        assert not asyncio.run(serve(spec(base_url=server.url).load())).failures
