"""Multiple-choice questions to an OpenAI-compatible server, one request and one token of answer each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import openai

from cauc_ray.data.prompts import LETTERS, Question, letter_prompt, letter_request
from cauc_ray.errors import CaucError, ConfigError, DataError, ExecutionError
from cauc_ray.models.answers import Answers, Batch, ModelFacts, batch_size, ragged
from cauc_ray.models.letters import first_alternatives, letter_logits, value_at
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.questions import read_questions
from cauc_ray.numbers.types import Floats

BELOW = "options below the returned log-probabilities"

_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
# Parameters common to all requests: a server that rejects one of these rejects every question.
_SETTINGS = {"model", "logprobs", "top_logprobs", "temperature", "max_tokens", "max_completion_tokens"}
# Wrong key, no credit, not allowed, no such model or path.
_ACCOUNT = {401, 402, 403, 404, 405}
_RETRIED = {408, 409, 429}
# The client's longest wait between attempts, whatever the server asks for.
_LONGEST_WAIT_S = 120.0
_SAID_LENGTH = 200

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Reply:
    """The result of one question.   logits: float (K,), all -inf if it failed.   n_below: how many are only bounds."""

    logits: Floats
    n_below: int = 0
    cost_usd: float = 0.0
    failure: str | None = None


class OpenAIModel:
    """A served model that answers multiple-choice questions with the log-probabilities of the options' letters.

    The client retries, with growing waits or those that the server asks for. A question that the server
    rejects is a failed row. Problems of all questions raise: ConfigError for a key, model or setting
    that the server does not accept, ExecutionError for a server that does not answer.
    """

    def __init__(self, spec: OpenAISpec, key: str) -> None:
        self.facts = ModelFacts(spec.source, spec.answers_kind)
        self._spec = spec
        self._key = key
        self._limit = "max_tokens"  # until a server refuses it in favour of max_completion_tokens
        self._has_logprobs = False
        self._answered_at = -np.inf
        attempts = spec.max_retries + 1
        self._deadline_s = attempts * spec.timeout_s + spec.max_retries * _LONGEST_WAIT_S

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch of questions, at most max_concurrency at a time.

        Raises DataError if a column is missing, ConfigError and ExecutionError as described for the class. A failed
        row's cost is what the server billed for it, 0 if it reported none.
        """
        questions, faults = read_questions(batch)
        replies = _run(self._ask_all(questions))
        n = batch_size(batch)
        refused = {row: reply.failure for row, reply in replies.items() if reply.failure is not None}
        logits, n_options = ragged(n, {row: reply.logits for row, reply in replies.items()})
        costs = np.zeros(n)
        costs[list(replies)] = [reply.cost_usd for reply in replies.values()]
        n_below = sum(reply.n_below for reply in replies.values())
        counts = {BELOW: n_below} if n_below else {}
        return Answers(logits, n_options, costs if self._spec.prices else None, faults | refused, counts)

    async def _ask_all(self, questions: Mapping[int, Question]) -> dict[int, _Reply]:
        """Ask all questions; the first error that concerns all of them ends the rest."""
        gate = asyncio.Semaphore(self._spec.max_concurrency)
        client = openai.AsyncOpenAI(
            api_key=self._key,
            base_url=self._spec.url,
            timeout=self._spec.timeout_s,
            max_retries=self._spec.max_retries,
        )

        async def ask(question: Question) -> _Reply:
            async with gate:
                return await self._reply(client, question)

        async with client:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = {row: group.create_task(ask(question)) for row, question in questions.items()}
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return {row: task.result() for row, task in tasks.items()}

    async def _reply(self, client: openai.AsyncOpenAI, question: Question) -> _Reply:
        """Ask one question; problems of this question or its answer are its failure."""
        nothing = np.full(len(question.choices), -np.inf)
        cost_usd = 0.0
        try:
            if len(question.choices) > len(LETTERS):
                raise DataError(f"it has {len(question.choices)} options; letters support up to {len(LETTERS)}")
            answer = await self._answer(client, question)
            cost_usd = self._cost_usd(answer)
            alternatives = first_alternatives(answer, self._spec.endpoint)
            if alternatives is None:
                raise DataError(self._no_logprobs())
            self._has_logprobs = True
            logits, n_below = letter_logits(alternatives, len(question.choices))
        except DataError as error:
            return _Reply(nothing, cost_usd=cost_usd, failure=str(error))
        return _Reply(logits, n_below, cost_usd)

    async def _answer(self, client: openai.AsyncOpenAI, question: Question) -> object:
        """Return the server's answer, parsed JSON. Raises DataError if it rejects this question."""
        started_at = time.monotonic()
        limit = self._limit
        try:
            async with asyncio.timeout(self._deadline_s):
                answer = await client.post(_PATHS[self._spec.endpoint], cast_to=object, body=self._body(question))
        except openai.APIStatusError as error:
            if limit == "max_tokens" and _wants_new_name(error):
                self._limit = "max_completion_tokens"
                return await self._answer(client, question)
            raise self._refusal(error, started_at) from None
        except TimeoutError:
            raise ExecutionError(self._no_answer(f"no answer within {self._deadline_s:g} s")) from None
        except openai.APIConnectionError as error:
            raise ExecutionError(self._no_answer(type(error.__cause__ or error).__name__)) from None
        except openai.APIError as error:
            raise DataError(f"the server's answer cannot be read: {self._told(error.message)}") from None
        except UnicodeEncodeError:
            raise DataError("its text is not valid Unicode") from None
        except ValueError:
            raise DataError("the server's answer is not JSON") from None
        self._answered_at = time.monotonic()
        return answer

    def _body(self, question: Question) -> dict[str, Any]:
        spec = self._spec
        text = letter_request(question) if spec.endpoint == "chat" else letter_prompt(question)
        text.encode()  # what is not Unicode fails here; some versions of the client would send it
        body: dict[str, Any] = {"model": spec.model, "temperature": 0, self._limit: 1}
        if spec.endpoint == "completions":
            return body | {"prompt": text, "logprobs": spec.top_logprobs}
        messages = [{"role": "user", "content": text}]
        return body | {"messages": messages, "logprobs": True, "top_logprobs": spec.top_logprobs}

    def _cost_usd(self, answer: object) -> float:
        prices = self._spec.prices
        if prices is None:
            return 0.0
        n_prompt = value_at(answer, "usage", "prompt_tokens")
        n_completion = value_at(answer, "usage", "completion_tokens")
        if not isinstance(n_prompt, int) or not isinstance(n_completion, int):
            raise DataError("the answer has no usage, so its cost is unknown")
        return (n_prompt * prices.input + n_completion * prices.output) / 1e6

    def _refusal(self, error: openai.APIStatusError, started_at: float) -> CaucError:
        """Return the error of a rejection: DataError if the question is at fault, else one that ends the call."""
        spec, status = self._spec, error.status_code
        said = f"{status}: {self._told(_message(error))}"
        param, code = value_at(error.body, "param"), value_at(error.body, "code")
        if status in _ACCOUNT or param in _SETTINGS or code == "model_not_found":
            return ConfigError(
                f"{spec.url} rejects model {spec.model!r} ({said}); check base_url, model and its settings, "
                f"and the key in the environment variable {spec.api_key_env}"
            )
        if status not in _RETRIED and status < 500:
            return DataError(f"the server rejects it ({said})")
        # An error that repeats for this question while others are answered is the question's; a server that is down
        # answers none.
        if status == 500 and self._answered_at > started_at:
            return DataError(f"the server fails on it ({said})")
        return ExecutionError(self._no_answer(said))

    def _no_answer(self, why: str) -> str:
        spec = self._spec
        return (
            f"{spec.url} does not answer for model {spec.model!r} after up to {spec.max_retries + 1} attempts ({why}); "
            "continue when it does, with a lower max_concurrency if it limits its rate"
        )

    def _no_logprobs(self) -> str:
        if self._has_logprobs:
            return "the answer has no log-probabilities"
        return (
            f"the answer has no log-probabilities, and none of {self._spec.url} had any so far: "
            f"a model of kind 'openai' needs a server that returns them for {self._spec.model!r}"
        )

    def _told(self, text: str) -> str:
        """Return a server's message in one short line, without the key, which some servers repeat."""
        line = " ".join(text.replace(self._key, "…").split())
        return line if len(line) <= _SAID_LENGTH else f"{line[:_SAID_LENGTH]}…"


def _wants_new_name(error: openai.APIStatusError) -> bool:
    """Return whether a server rejects max_tokens in favour of its newer name, as for OpenAI's reasoning models."""
    about_limit = value_at(error.body, "param") in (None, "max_tokens")
    return error.status_code == 400 and about_limit and "max_completion_tokens" in _message(error)


def _message(error: openai.APIStatusError) -> str:
    """Return the server's own message, which servers put into different fields, without the client's additions."""
    said = value_at(error.body, "message") or value_at(error.body, "detail") or error.body or error.message
    return str(said)


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop in another thread, since this thread may have a running loop."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
