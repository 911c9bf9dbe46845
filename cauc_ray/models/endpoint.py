"""A client of a server that answers questions one by one, for the length of a stage's life."""

from __future__ import annotations

import asyncio
import time
import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import openai

from cauc_ray.errors import CaucError, ConfigError, DataError, ExecutionError
from cauc_ray.models.answers import BELOW, Answers, Batch, Model, ModelFacts, answered, batch_size, little
from cauc_ray.models.background import Background
from cauc_ray.models.openai import DecisionsSpec, EndpointSpec
from cauc_ray.models.prompts import Asked, Prompts
from cauc_ray.numbers.types import Floats

# Parameters common to all requests: a server that rejects one of these rejects every question.
_SETTINGS = {"model", "logprobs", "top_logprobs", "temperature", "max_tokens", "max_completion_tokens"}
# Wrong key, no credit, not allowed, no such model or path.
_ACCOUNT = {401, 402, 403, 404, 405}
_RETRIED = {408, 409, 429}
# The client's longest wait between attempts, whatever the server asks for.
_LONGEST_WAIT_S = 120.0
_SAID_LENGTH = 200


@dataclass(slots=True)
class Bill:
    """What a question has cost so far.   deadline: of its call, by the monotonic clock."""

    deadline: float
    usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one question.

    logits: float (K,), of the model's kind; meaningless if it failed.   n_below: how many are only bounds.
    """

    logits: Floats
    n_below: int = 0
    cost_usd: float = 0.0
    failure: str | None = None


class EndpointModel(Model):
    """A model behind a server.

    One client serves all calls. It retries, with growing waits or those that the server asks for. A question that the
    server rejects is a failed row. Problems of all questions raise: ConfigError for a key, model or setting that the
    server does not accept, ExecutionError for a server that does not answer, or for a budget that is spent. What the
    server has answered until then is kept for the next call with the same rows.
    """

    def __init__(self, spec: EndpointSpec, key: str, deadline_s: float, source: str, *, chat: bool = True) -> None:
        """Connect to nothing yet.   deadline_s: of a call.   source: a phrase.   chat: whether prompts are messages."""
        self.facts = ModelFacts(source, spec.answers_kind, labels=spec.label_names)
        self._spec = spec
        self._key = key
        self._prompts = Prompts(spec, chat)
        self._limit = "max_tokens"  # until a server refuses it in favour of max_completion_tokens
        self._answered_at = -np.inf
        attempts = spec.max_retries + 1
        self._deadline_s = min(attempts * spec.timeout_s + spec.max_retries * _LONGEST_WAIT_S, deadline_s)
        self._spent_usd = 0.0
        self._kept: dict[Asked, Reply] = {}
        self._background = Background(f"{spec.model}: requests")
        self._client = openai.AsyncOpenAI(
            api_key=key, base_url=spec.url, timeout=spec.timeout_s, max_retries=spec.max_retries
        )
        weakref.finalize(self, self._background.end, self._client.close)

    @abstractmethod
    async def ask(self, question: Asked, bill: Bill) -> Reply:
        """Ask one question. Raises DataError for a question that fails, and as described for the class."""

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch of rows, at most max_concurrency at a time.

        Raises DataError if a column is missing, ConfigError and ExecutionError as described for the class. A failed
        row's cost is what the server billed for it, 0 if it reported none.
        """
        questions, faults = self._prompts(batch)
        replies = self._background.run(self._ask_all(questions))
        n = batch_size(batch)
        refused = {row: reply.failure for row, reply in replies.items() if reply.failure is not None}
        found = {row: reply.logits for row, reply in replies.items() if row not in refused}
        costs = np.zeros(n)
        costs[list(replies)] = [reply.cost_usd for reply in replies.values()]
        n_below = sum(reply.n_below for reply in replies.values())
        counts = {BELOW: n_below} if n_below else {}
        counts |= {} if self._spec.answers_with == "text" else little(found.values())
        return answered(n, found, faults | refused, counts, costs=costs if self._spec.prices else None)

    async def _ask_all(self, questions: Mapping[int, Asked]) -> dict[int, Reply]:
        """Ask all questions. After an error that concerns all of them, wait for those under way and ask no more."""
        gate = asyncio.Semaphore(self._spec.max_concurrency)
        deadline = time.monotonic() + self._deadline_s
        kept, self._kept = self._kept, {}
        replies: dict[int, Reply] = {}
        broken: list[CaucError] = []

        async def reply(row: int, question: Asked) -> None:
            async with gate:
                try:
                    if not broken:
                        earlier = kept.pop(question) if question in kept else None
                        replies[row] = earlier or await self._reply(question, deadline)
                except (ConfigError, ExecutionError) as error:
                    broken.append(error)

        await asyncio.gather(*(reply(row, question) for row, question in questions.items()))
        if broken:
            self._kept = kept | {questions[row]: given for row, given in replies.items()}
            raise broken[0]
        return replies

    async def _reply(self, question: Asked, deadline: float) -> Reply:
        """Ask one question; problems of this question or its answer are its failure."""
        if self._spec.max_usd is not None and self._spent_usd >= self._spec.max_usd:
            raise ExecutionError(f"{self.facts.source}: its budget of {self._spec.max_usd:g} USD is spent")
        bill = Bill(deadline)
        try:
            return replace(await self.ask(question, bill), cost_usd=bill.usd)
        except DataError as error:
            return Reply(np.empty(0), cost_usd=bill.usd, failure=str(error))
        finally:
            self._spent_usd += bill.usd

    async def post(self, path: str, body: dict[str, Any], bill: Bill, *, is_billed: bool = True) -> object:
        """Return the server's answer, parsed JSON.

        Raises DataError if it rejects this question, ConfigError and ExecutionError as described for the class.
        """
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, bill.deadline - time.monotonic())):
                answer = await self._client.post(path, cast_to=object, body={"model": self._spec.model, **body})
        except openai.APIStatusError as error:
            if "max_tokens" in body and _wants_new_name(error):
                self._limit = "max_completion_tokens"
                rest = {key: value for key, value in body.items() if key != "max_tokens"}
                return await self.post(path, {**rest, self._limit: body["max_tokens"]}, bill)
            raise self._refusal(error, started_at) from None
        except TimeoutError:
            raise ExecutionError(self._no_answer(f"no answer within {self._deadline_s:g} s")) from None
        except openai.APIConnectionError as error:
            raise ExecutionError(self._no_answer(type(error.__cause__ or error).__name__)) from None
        except (openai.APIError, ValueError):
            raise DataError("the server's answer is not JSON") from None
        self._answered_at = time.monotonic()
        if is_billed:
            bill.usd += self._cost_usd(answer)
        return answer

    def _cost_usd(self, answer: object) -> float:
        prices = self._spec.prices
        if prices is None:
            return 0.0
        usage = value_at(answer, "usage")
        n_prompt = value_at(usage, "prompt_tokens") or value_at(usage, "input_tokens")
        n_completion = value_at(usage, "completion_tokens") or value_at(usage, "output_tokens")
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

    def _told(self, text: str) -> str:
        """Return a server's message in one short line, without the key, which some servers repeat."""
        line = " ".join(text.replace(self._key, "…").split())
        return line if len(line) <= _SAID_LENGTH else f"{line[:_SAID_LENGTH]}…"


class DecisionsModel(EndpointModel):
    """A served model that returns a probability for every option; servers' own confidences differ, and are not read."""

    _spec: DecisionsSpec

    async def ask(self, question: Asked, bill: Bill) -> Reply:
        """Ask one question about a row."""
        body = {"input": question.text, "questions": [self._spec.asked(question.options)]}
        answer = await self.post("/decisions", body, bill)
        given = value_at(answer, "answers", 0)
        if value_at(given, "type") == "refusal":
            raise DataError("the model refuses to answer it")
        if self._spec.question == "predicate":
            yes = value_at(given, "probability")
            found = {question.options[1]: yes, question.options[0]: 1 - yes if isinstance(yes, int | float) else None}
        else:
            key = "value" if self._spec.question == "choice" else "label"
            listed = value_at(given, "probabilities")
            found = {
                str(value_at(one, key)): value_at(one, "probability")
                for one in (listed if isinstance(listed, list) else [])
            }
        values = [found.get(option) for option in question.options]
        if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
            raise DataError("the answer has no probability of each option")
        return Reply(np.array(values, dtype=np.float64))


def _wants_new_name(error: openai.APIStatusError) -> bool:
    """Return whether a server rejects max_tokens in favour of its newer name, as for OpenAI's reasoning models."""
    about_limit = value_at(error.body, "param") in (None, "max_tokens")
    return error.status_code == 400 and about_limit and "max_completion_tokens" in _message(error)


def _message(error: openai.APIStatusError) -> str:
    """Return the server's own message, which servers put into different fields, without the client's additions."""
    said = value_at(error.body, "message") or value_at(error.body, "detail") or error.body or error.message
    return str(said)


def value_at(answer: Any, *path: str | int) -> Any:
    """Return the value at a path in parsed JSON, None if the path does not exist."""
    for key in path:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            return None
    return answer
