"""A client of a server that answers questions one by one, for the length of a stage's life."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

import httpx2
import numpy as np
from pydantic_core import to_json

from cauc_ray.errors import CaucError, ConfigError, DataError, SpendingError
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, answered, batch_size, little
from cauc_ray.models.http_client import HttpClient, all_until_error, json_of, value_at
from cauc_ray.models.kind import IN_TIME, Placement
from cauc_ray.models.openai import DecisionsSpec, EndpointSpec, OpenAISpec
from cauc_ray.models.prompts import Asked, Prompts
from cauc_ray.numbers.types import Floats

# Parameters common to all requests: a server that rejects one of these rejects every question.
_SETTINGS = {"model", "logprobs", "top_logprobs", "temperature", "max_tokens", "max_completion_tokens"}
# Wrong key, no credit, not allowed, no such model or path.
_ACCOUNT_STATUSES = {401, 402, 403, 404, 405}
_ACCOUNT_CODES = {"model_not_found", "insufficient_quota"}
_TRANSIENT = frozenset({408, 409, 425, 429, *range(500, 600)})
# Time for the pauses between attempts, per attempt, in a call that the stage does not limit.
_LONGEST_WAIT_S = 120.0
_IMAGE_THREADS = 8
# Of a request; a server that reports more is wrong.
_MOST_TOKENS = 1 << 31
# Answers of failed calls that are kept for the next calls with their questions, the latest ones.
MOST_PAID = 10_000


@dataclass(slots=True, eq=False)
class Inquiry:
    """A question on its way, and what came of it.

    Attributes:
        question: The question.
        deadline: When its call ends, by the monotonic clock.
        usd: Costs of its requests so far.
        tokens: Of its prompts, and generated, as far as the server reports them.
        counts: What Answers.counts has of it.
        logits: Of the model's kind, float (K,), None without an answer; the confidences of an answer in words.
        text: Of an answer in words.
        failure: Reason for missing logits.
    """

    question: Asked
    deadline: float
    usd: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    counts: Counter[str] = field(default_factory=Counter)
    logits: Floats | None = None
    text: str | None = None
    failure: str | None = None


class Budget:
    """Keeps the costs of all requests, those in flight included, within a limit.

    A request in flight is counted at the costs of the most expensive one so far; each byte that it is longer counts as
    a token of the prompt. Until one has been billed, nothing is known: the first requests are sent one by one.
    """

    def __init__(self, max_usd: float | None, usd_per_token: float) -> None:
        self._max_usd, self._usd_per_byte = np.inf if max_usd is None else max_usd, usd_per_token
        self._spent_usd = self._largest_usd = 0.0  # what is reserved counts as spent
        self._largest_bytes = self._n_in_flight = 0
        self._settled = asyncio.Condition()

    @asynccontextmanager
    async def request(self, n_bytes: int, bill: Sequence[float]) -> AsyncIterator[float]:
        """Reserve the costs of a request, yield those of one attempt, and settle them at the end of the block.

        Args:
            n_bytes: Length of the request.
            bill: Costs of each attempt in USD, which the block notes.

        Raises:
            ExecutionError: Not enough is left.
        """

        def estimate_usd() -> float:
            n_more = n_bytes - self._largest_bytes if self._largest_usd else 0
            return self._largest_usd + max(0, n_more) * self._usd_per_byte

        def fits() -> bool:
            return self._spent_usd + estimate_usd() <= self._max_usd

        async with self._settled:
            if np.isfinite(self._max_usd):
                await self._settled.wait_for(lambda: not self._n_in_flight or (self._largest_usd and fits()))
            if not fits():
                raise SpendingError(f"its budget of {self._max_usd:g} USD is spent; raise max_usd to continue")
            reserved_usd = estimate_usd()
            self._spent_usd += reserved_usd
            self._n_in_flight += 1
        try:
            yield reserved_usd
        finally:
            async with self._settled:
                self._n_in_flight -= 1
                self._spent_usd += sum(bill) - reserved_usd
                if max(bill, default=0.0) > self._largest_usd:
                    self._largest_usd, self._largest_bytes = max(bill), n_bytes
                self._settled.notify_all()


class EndpointModel(Model):
    """A model behind a server.

    A question that the server rejects is a failed row. Problems of all questions raise: ConfigError for a key, model
    or setting that the server does not accept, ExecutionError for a server that does not answer, or for a budget that
    is spent. Answers until then are kept for the next call with the same rows.

    Several threads may call it: while one call waits for its last answers, requests of the next one go out.
    """

    def __init__(self, spec: EndpointSpec, placement: Placement) -> None:
        """Connect to nothing yet. Raises ConfigError if a key or a header's variable is missing."""
        self.facts = ModelFacts(spec.source, spec.answers_kind, labels=spec.label_names, overlaps=True)
        self._spec = spec
        self._prompts = Prompts(spec, spec.is_chat)
        self._answered_at = -np.inf
        self._limit = "max_tokens"  # until the server refuses it in favour of max_completion_tokens
        longest_s = (spec.max_retries + 1) * spec.timeout_s + spec.max_retries * _LONGEST_WAIT_S
        self._deadline_s = min(longest_s, IN_TIME * placement.call_timeout_s)
        self._budget = Budget(spec.max_usd, spec.prices.input / 1e6 if spec.prices else 0.0)
        self._paid: dict[Asked, Inquiry] = {}
        self._gate = asyncio.Semaphore(spec.max_concurrency)  # questions of earlier calls go first
        self._http = HttpClient(
            spec.server(),
            transient=_TRANSIENT,
            retries=spec.max_retries,
            max_concurrency=spec.max_concurrency,
            outlasts_rate_limits=True,
        )

    @abstractmethod
    async def ask(self, inquiry: Inquiry) -> Floats:
        """Return a question's logits. Raises DataError for a question that fails, and as described for the class."""

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch of rows, at most max_concurrency at a time, those of other calls included.

        A failed row's cost is what the server billed for it, 0 if it reported none.

        Raises:
            DataError: A column is missing.
            ConfigError: As described for the class.
            ExecutionError: As described for the class.
        """
        questions, faults = self._prompts(batch)
        if self._spec.image:
            questions, faults = self._with_images(batch, questions, faults)
        inquiries = self._http.run(self._ask_all(questions))
        n, costs = batch_size(batch), None
        tokens = np.zeros((n, 2), dtype=np.int64)
        tokens[list(inquiries)] = np.reshape([inquiry.tokens for inquiry in inquiries.values()], (-1, 2))
        if self._spec.prices:
            costs = np.zeros(n)
            costs[list(inquiries)] = [inquiry.usd for inquiry in inquiries.values()]
        faults |= {row: inquiry.failure for row, inquiry in inquiries.items() if inquiry.failure is not None}
        inquiries = {row: inquiry for row, inquiry in inquiries.items() if inquiry.logits is not None}
        answers = self.answers(n, inquiries, faults, costs)
        return replace(answers, tokens=tokens) if tokens.any() else answers

    def answers(self, n: int, inquiries: dict[int, Inquiry], faults: dict[int, str], costs: Floats | None) -> Answers:
        """Return the answers to the questions of n rows.

        Args:
            n: Number of rows.
            inquiries: Questions that are answered, by row.
            faults: Why the other rows have no answer.
            costs: Of each row, float64 (n,).
        """
        logits = {row: inquiry.logits for row, inquiry in inquiries.items() if inquiry.logits is not None}
        counts = sum((inquiry.counts for inquiry in inquiries.values()), Counter[str]())
        if self._spec.answers_with != "text" and self._spec.answers_kind != "probabilities":
            counts.update(little(logits.values()))
        return answered(n, logits, faults, counts, costs=costs)

    def _with_images(
        self, batch: Batch, questions: Mapping[int, Asked], faults: Mapping[int, str]
    ) -> tuple[dict[int, Asked], dict[int, str]]:
        """Return the questions that have an image, with it, and why the other rows have none."""
        from cauc_ray.models.images import data_uri, read_images

        with ThreadPoolExecutor(_IMAGE_THREADS) as threads:
            images, image_faults = read_images(batch, data_uri, threads.map)
        pairs = {row: replace(question, image=images[row]) for row, question in questions.items() if row in images}
        return pairs, image_faults | dict(faults)

    async def _ask_all(self, questions: Mapping[int, Asked]) -> dict[int, Inquiry]:
        """Ask all questions. After an error that concerns all of them, wait for those under way and ask no more."""
        deadline = time.monotonic() + self._deadline_s
        inquiries = {row: self._paid.pop(question, Inquiry(question, deadline)) for row, question in questions.items()}
        jobs = [partial(self._ask, inquiry) for inquiry in inquiries.values() if inquiry.logits is None]
        try:
            await all_until_error(jobs, self._gate)
        except CaucError:
            self._paid |= {inquiry.question: inquiry for inquiry in inquiries.values() if inquiry.logits is not None}
            self._paid = dict(islice(self._paid.items(), max(0, len(self._paid) - MOST_PAID), None))
            raise
        return inquiries

    async def _ask(self, inquiry: Inquiry) -> None:
        """Ask one question; problems of this question or its answer are its failure."""
        try:
            inquiry.logits = await self.ask(inquiry)
        except DataError as error:
            inquiry.failure = str(error)

    async def post(self, path: str, body: dict[str, Any], inquiry: Inquiry) -> object:
        """Return the server's answer to a request that is billed, parsed JSON.

        Args:
            path: Below the server's address.
            body: Fields of the request besides the model.
            inquiry: Gains the costs.

        Raises:
            DataError: The server rejects this question.
            ConfigError: As described for the class.
            ExecutionError: As described for the class.
        """
        content = to_json({"model": self._spec.model, **body, **self._spec.extra_body})
        n_bytes, bill = len(content) - len(inquiry.question.image or ""), list[float]()
        async with self._budget.request(n_bytes, bill) as attempt_usd:
            try:
                # Providers have computed the attempts that were not answered in time, too.
                answer = await self.send(path, content, inquiry, partial(bill.append, attempt_usd))
                tokens = _tokens(answer)
                bill[:] = [self._cost_usd(tokens)] * (len(bill) + 1)
                inquiry.tokens = inquiry.tokens[0] + (tokens[0] or 0), inquiry.tokens[1] + (tokens[1] or 0)
            finally:
                inquiry.usd += sum(bill)
        return answer

    async def post_limited(self, path: str, body: dict[str, Any], max_tokens: int | None, inquiry: Inquiry) -> object:
        """Return the server's answer to a request for an answer of so many tokens; None for no limit. As post."""
        limit = self._limit
        try:
            return await self.post(path, body | ({limit: max_tokens} if max_tokens else {}), inquiry)
        except (ConfigError, DataError) as error:  # as OpenAI's reasoning models do
            if limit != "max_tokens" or not max_tokens or "max_completion_tokens" not in str(error):
                raise
        self._limit = "max_completion_tokens"
        return await self.post_limited(path, body, max_tokens, inquiry)

    async def send(
        self, path: str, content: bytes, inquiry: Inquiry, on_lost: Callable[[], None] = lambda: None
    ) -> object:
        """Return the server's answer, parsed JSON. Raises as post does.

        Args:
            path: Below the server's address, or a whole URL.
            content: The request's body.
            inquiry: The question that it is part of.
            on_lost: Called when an attempt had no answer in time.
        """
        started_at = time.monotonic()
        response = await self._http.request(
            "POST",
            path,
            inquiry.deadline,
            lambda left_s: ({"Content-Type": "application/json"}, content),
            attempt_s=self._spec.timeout_s,
            on_lost=on_lost,
        )
        if response.status_code != 200:
            raise self._rejection(response, started_at)
        answer = json_of(response)
        if answer is None:
            raise DataError("the server's answer is not JSON")
        self._answered_at = time.monotonic()
        return answer

    def _cost_usd(self, tokens: tuple[int | None, int | None]) -> float:
        prices, (n_prompt, n_completion) = self._spec.prices, tokens
        if prices is None:
            return 0.0
        if n_prompt is None or n_completion is None:
            raise DataError("the answer has no usage, so its cost is unknown")
        return (n_prompt * prices.input + n_completion * prices.output) / 1e6

    def _rejection(self, response: httpx2.Response, started_at: float) -> CaucError:
        """Return the error of a rejection: DataError if the question is at fault, else one that ends the call."""
        status, body, message = response.status_code, json_of(response), self._http.message(response)
        error = value_at(body, "error") or body
        is_setting = value_at(error, "param") in _SETTINGS or value_at(error, "code") in _ACCOUNT_CODES
        if status in _ACCOUNT_STATUSES or is_setting:
            return self._http.refusal(response)
        # An error that repeats for this question while others are answered is the question's; a server that is down
        # answers none.
        if status not in _TRANSIENT or (status == 500 and self._answered_at > started_at):
            return DataError(f"the server rejects it ({message})")
        return self._http.away(message)


def _tokens(answer: object) -> tuple[int | None, int | None]:
    """Return the tokens of the prompt and of the answer that a server reports, None where it does not."""
    usage = value_at(answer, "usage")
    n_prompt, n_completion = (
        next((n for name in names if isinstance(n := value_at(usage, name), int) and 0 <= n <= _MOST_TOKENS), None)
        for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    )
    return n_prompt, n_completion


def messages(spec: EndpointSpec, text: dict[str, Any], image: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the messages of a conversation, with the image before the text that asks about it."""
    system = [] if spec.system is None else [{"role": "system", "content": spec.system}]
    return [*system, {"role": "user", "content": text["text"] if image is None else [image, text]}]


def conversation(spec: OpenAISpec, question: Asked) -> dict[str, Any]:
    """Return a question as the chat endpoint takes it."""
    image = None if question.image is None else {"type": "image_url", "image_url": {"url": question.image}}
    turns = {"messages": messages(spec, {"type": "text", "text": question.text}, image)}
    return turns | ({"chat_template_kwargs": spec.chat_template_kwargs} if spec.chat_template_kwargs else {})


class DecisionsModel(EndpointModel):
    """A served model that returns a probability for every option; servers' own confidences differ, and are not read."""

    _spec: DecisionsSpec

    async def ask(self, inquiry: Inquiry) -> Floats:
        """Ask one question about a row."""
        spec, question = self._spec, inquiry.question
        decision = spec.decision(question.options)
        if spec.format == "systemone":
            body: dict[str, Any] = {"state": question.text, "questions": {"answer": decision}}
        else:
            text = {"type": "input_text", "text": question.text}
            image = None if question.image is None else {"type": "input_image", "image_url": question.image}
            is_bare = spec.system is None and image is None
            body = {"input": question.text if is_bare else messages(spec, text, image), "questions": [decision]}
        answers = value_at(await self.post(f"/{spec.format}", body, inquiry), "answers")
        answer = value_at(answers, "answer" if spec.format == "systemone" else 0)
        if value_at(answer, "type") == "refusal":
            raise DataError("the model refuses to answer it")
        values = self._probabilities(answer, question.options)
        if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
            raise DataError("the answer has no probability of each option")
        return np.array(values, dtype=np.float64)

    def _probabilities(self, answer: Any, options: tuple[str, ...]) -> list[Any]:
        """Return the probability of each option, None if the answer has none."""
        spec = self._spec
        if spec.question == "predicate":
            yes = value_at(answer, "noul" if spec.format == "systemone" else "probability")
            return [1 - yes if isinstance(yes, int | float) else None, yes]
        by_option = value_at(answer, "probabilities")
        if spec.format == "systemone":
            keys = options if spec.question == "choice" else tuple(map(str, range(len(options))))
            return [value_at(by_option, key) for key in keys]
        key = "value" if spec.question == "choice" else "label"
        entries = by_option if isinstance(by_option, list) else []
        by_option = {str(value_at(entry, key)): value_at(entry, "probability") for entry in entries}
        return [by_option.get(option) for option in options]
