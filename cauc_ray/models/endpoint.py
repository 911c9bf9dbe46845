"""A client of a server that answers questions one by one, for the length of a stage's life."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from pydantic_core import to_json

from cauc_ray.errors import CaucError, ConfigError, DataError, ExecutionError
from cauc_ray.models.answers import BELOW, Answers, Batch, Model, ModelFacts, answered, batch_size, little
from cauc_ray.models.http_client import HttpClient, NoAnswerError, Response, all_until_error, value_at
from cauc_ray.models.kind import IN_TIME, Placement
from cauc_ray.models.openai import DecisionsSpec, EndpointSpec
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
# What Answers.counts holds of votes.
INVALID_VOTES = "sampled answers that are none of the options"


@dataclass(slots=True)
class Bill:
    """Costs of a question so far.

    Attributes:
        deadline: When its call ends, by the monotonic clock.
        n_image_bytes: Length of the image in each request.
        usd: Costs.
    """

    deadline: float
    n_image_bytes: int = 0
    usd: float = 0.0


@dataclass(frozen=True, slots=True)
class Reply:
    """The result of one question.

    Attributes:
        logits: Of the model's kind, float (K,); meaningless if it failed.
        n_below: Options whose logits are only bounds.
        n_invalid: Sampled answers that are none of the options.
        cost_usd: Costs of its requests.
        failure: Reason for missing logits.
    """

    logits: Floats
    n_below: int = 0
    n_invalid: int = 0
    cost_usd: float = 0.0
    failure: str | None = None


@dataclass(slots=True)
class Charge:
    """Costs of one request.

    Attributes:
        estimate_usd: Costs that are reserved for it.
        usd: Costs as the server reports them, None without an answer.
        n_lost: Attempts without an answer in time; providers bill them, since they have computed them.
    """

    estimate_usd: float
    usd: float | None = None
    n_lost: int = 0

    @property
    def total_usd(self) -> float:
        """Return the costs of all attempts: those that were lost cost as much as the one that was answered."""
        return self.n_lost * self.estimate_usd if self.usd is None else (1 + self.n_lost) * self.usd

    def lose(self) -> None:
        """Count an attempt without an answer in time."""
        self.n_lost += 1


class Budget:
    """Keeps the costs of all requests, those in flight included, within a limit.

    A request in flight is counted at the costs of the most expensive one so far; each byte that it is longer counts as
    a token of the prompt. Until one has been billed, nothing is known: the first requests are sent one by one.
    """

    def __init__(self, max_usd: float | None, usd_per_token: float) -> None:
        self._max_usd, self._usd_per_byte = np.inf if max_usd is None else max_usd, usd_per_token
        self._spent_usd = self._reserved_usd = self._largest_usd = 0.0
        self._largest_bytes = self._n_in_flight = 0
        self._settled = asyncio.Condition()

    @asynccontextmanager
    async def request(self, n_bytes: int) -> AsyncIterator[Charge]:
        """Reserve the costs of a request of so many bytes, and settle them at the end of the block.

        Raises:
            ExecutionError: Not enough is left.
        """

        def estimate_usd() -> float:
            n_more = n_bytes - self._largest_bytes if self._largest_usd else 0
            return self._largest_usd + max(0, n_more) * self._usd_per_byte

        def fits() -> bool:
            return self._spent_usd + self._reserved_usd + estimate_usd() <= self._max_usd

        async with self._settled:
            if np.isfinite(self._max_usd):
                await self._settled.wait_for(lambda: not self._n_in_flight or (self._largest_usd and fits()))
            if not fits():
                raise ExecutionError(f"its budget of {self._max_usd:g} USD is spent; raise max_usd to continue")
            charge = Charge(estimate_usd())
            self._reserved_usd += charge.estimate_usd
            self._n_in_flight += 1
        try:
            yield charge
        finally:
            async with self._settled:
                self._n_in_flight -= 1
                self._reserved_usd -= charge.estimate_usd
                self._spent_usd += charge.total_usd
                if charge.usd is not None and charge.usd > self._largest_usd:
                    self._largest_usd, self._largest_bytes = charge.usd, n_bytes
                self._settled.notify_all()


class EndpointModel(Model):
    """A model behind a server.

    A question that the server rejects is a failed row. Problems of all questions raise: ConfigError for a key, model
    or setting that the server does not accept, ExecutionError for a server that does not answer, or for a budget that
    is spent. Answers until then are kept for the next call with the same rows.
    """

    def __init__(
        self, spec: EndpointSpec, key: str | None, deadline_s: float, source: str, *, chat: bool = True
    ) -> None:
        """Connect to nothing yet.

        Args:
            spec: Settings.
            key: Sent as a bearer token.
            deadline_s: Time of a call, in seconds.
            source: A phrase that describes the model.
            chat: Whether prompts are messages.
        """
        self.facts = ModelFacts(source, spec.answers_kind, labels=spec.label_names)
        self._spec = spec
        self._prompts = Prompts(spec, chat)
        self._limit = "max_tokens"  # until a server refuses it in favour of max_completion_tokens
        self._answered_at = -np.inf
        attempts = spec.max_retries + 1
        self._deadline_s = min(attempts * spec.timeout_s + spec.max_retries * _LONGEST_WAIT_S, deadline_s)
        self._budget = Budget(spec.max_usd, spec.prices.input / 1e6 if spec.prices else 0.0)
        self._paid_replies: dict[Asked, Reply] = {}
        headers, secrets = spec.http_headers(f"model {spec.model!r}")
        self._http = HttpClient(
            spec.url,
            spec.url,
            token=key,
            headers=headers,
            secrets=secrets,
            transient=_TRANSIENT,
            retries=spec.max_retries,
            max_concurrency=spec.max_concurrency,
            outlasts_rate_limits=True,
        )

    @abstractmethod
    async def ask(self, question: Asked, bill: Bill) -> Reply:
        """Ask one question. Raises DataError for a question that fails, and as described for the class."""

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch of rows, at most max_concurrency at a time.

        A failed row's cost is what the server billed for it, 0 if it reported none.

        Raises:
            DataError: A column is missing.
            ConfigError: As described for the class.
            ExecutionError: As described for the class.
        """
        questions, faults = self._questions(batch)
        replies = self._http.run(self._ask_all(questions))
        n = batch_size(batch)
        failures = {row: reply.failure for row, reply in replies.items() if reply.failure is not None}
        logits = {row: reply.logits for row, reply in replies.items() if row not in failures}
        costs = np.zeros(n)
        costs[list(replies)] = [reply.cost_usd for reply in replies.values()]
        counts = {
            BELOW: sum(reply.n_below for reply in replies.values()),
            INVALID_VOTES: sum(reply.n_invalid for reply in replies.values()),
        }
        counts = {name: count for name, count in counts.items() if count}
        sums_to_one = self._spec.answers_with == "text" or self._spec.answers_kind == "probabilities"
        counts |= {} if sums_to_one else little(logits.values())
        return answered(n, logits, faults | failures, counts, costs=costs if self._spec.prices else None)

    def _questions(self, batch: Batch) -> tuple[dict[int, Asked], dict[int, str]]:
        """Return a batch's questions by row, with their images, and why the other rows have none."""
        questions, faults = self._prompts(batch)
        if not self._spec.image:
            return questions, faults
        from cauc_ray.models.images import read_data_uris

        with ThreadPoolExecutor(_IMAGE_THREADS) as threads:
            images, image_faults = read_data_uris(batch, threads.map)
        pairs = {row: replace(question, image=images[row]) for row, question in questions.items() if row in images}
        return pairs, image_faults | faults

    async def _ask_all(self, questions: Mapping[int, Asked]) -> dict[int, Reply]:
        """Ask all questions. After an error that concerns all of them, wait for those under way and ask no more."""
        deadline = time.monotonic() + self._deadline_s
        paid, self._paid_replies = self._paid_replies, {}
        replies: dict[int, Reply] = {}

        async def reply(row: int, question: Asked) -> None:
            earlier = paid.pop(question) if question in paid else None
            replies[row] = earlier or await self._reply(question, deadline)

        try:
            jobs = [partial(reply, row, question) for row, question in questions.items()]
            await all_until_error(jobs, self._spec.max_concurrency)
        except CaucError:
            self._paid_replies = paid | {questions[row]: answer for row, answer in replies.items()}
            raise
        return replies

    async def _reply(self, question: Asked, deadline: float) -> Reply:
        """Ask one question; problems of this question or its answer are its failure."""
        bill = Bill(deadline, len(question.image or ""))
        try:
            return replace(await self.ask(question, bill), cost_usd=bill.usd)
        except DataError as error:
            return Reply(np.empty(0), cost_usd=bill.usd, failure=str(error))

    async def post(self, path: str, body: dict[str, Any], bill: Bill, *, is_billed: bool = True) -> object:
        """Return the server's answer, parsed JSON.

        Args:
            path: Below the server's address, or a whole URL.
            body: Fields of the request besides the model.
            bill: Gains the costs.
            is_billed: Whether the request costs something.

        Raises:
            DataError: The server rejects this question.
            ConfigError: As described for the class.
            ExecutionError: As described for the class.
        """
        extra = self._spec.extra_body if is_billed else {}
        content = to_json({"model": self._spec.model, **body, **extra})
        if not is_billed:
            return self._parsed(await self._sent(path, content, Charge(0.0), bill.deadline), started_at=np.inf)
        async with self._budget.request(len(content) - bill.n_image_bytes) as charge:
            started_at = time.monotonic()
            response = await self._sent(path, content, charge, bill.deadline)
            if "max_tokens" not in body or not self._wants_new_name(response):
                answer = self._parsed(response, started_at)
                try:
                    charge.usd = self._cost_usd(answer)
                finally:
                    bill.usd += charge.total_usd
                return answer
        self._limit = "max_completion_tokens"
        limits = {self._limit if name == "max_tokens" else name: value for name, value in body.items()}
        return await self.post(path, limits, bill)

    async def _sent(self, path: str, content: bytes, charge: Charge, deadline: float) -> Response:
        headers = {"Content-Type": "application/json"}
        try:
            return await self._http.request(
                "POST",
                path,
                deadline,
                lambda left_s: (headers, content),
                attempt_s=self._spec.timeout_s,
                on_lost=charge.lose,
            )
        except NoAnswerError as error:
            raise ExecutionError(self._no_answer(str(error))) from None

    def _parsed(self, response: Response, started_at: float) -> object:
        """Return an answer, parsed JSON. Raises the error that a rejection is."""
        if response.status != 200:
            raise self._refusal(response, started_at)
        answer = response.json()
        if answer is None:
            raise DataError("the server's answer is not JSON")
        self._answered_at = time.monotonic()
        return answer

    def _cost_usd(self, answer: object) -> float:
        prices = self._spec.prices
        if prices is None:
            return 0.0
        usage = value_at(answer, "usage")
        n_prompt, n_completion = (
            next((n for name in names if (n := value_at(usage, name)) is not None), None)
            for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
        )
        if not isinstance(n_prompt, int) or not isinstance(n_completion, int):
            raise DataError("the answer has no usage, so its cost is unknown")
        return (n_prompt * prices.input + n_completion * prices.output) / 1e6

    def _refusal(self, response: Response, started_at: float) -> CaucError:
        """Return the error of a rejection: DataError if the question is at fault, else one that ends the call."""
        spec, status = self._spec, response.status
        message = f"{status}: {self._http.message(response)}"
        body = response.json()
        error = value_at(body, "error") or body
        is_setting = value_at(error, "param") in _SETTINGS or value_at(error, "code") in _ACCOUNT_CODES
        if status in _ACCOUNT_STATUSES or is_setting:
            return ConfigError(
                f"{spec.url} rejects model {spec.model!r} ({message}); check base_url, model and its settings, "
                f"and the key in the environment variable {spec.api_key_env}"
            )
        if status not in _TRANSIENT:
            return DataError(f"the server rejects it ({message})")
        # An error that repeats for this question while others are answered is the question's; a server that is down
        # answers none.
        if status == 500 and self._answered_at > started_at:
            return DataError(f"the server fails on it ({message})")
        return ExecutionError(self._no_answer(f"{message}, {response.n_attempts} attempts"))

    def _wants_new_name(self, response: Response) -> bool:
        """Return whether a server rejects max_tokens in favour of its newer name, as for OpenAI's reasoning models."""
        is_about_limit = value_at(response.json(), "error", "param") in (None, "max_tokens")
        return response.status == 400 and is_about_limit and "max_completion_tokens" in self._http.message(response)

    def _no_answer(self, why: str) -> str:
        return f"{self._spec.url} does not answer for model {self._spec.model!r} ({why}); continue when it does"


def messages(spec: EndpointSpec, question: Asked) -> list[dict[str, Any]]:
    """Return a question as the messages of a conversation, with the image before the text that asks about it."""
    content: Any = question.text
    if question.image is not None:
        image = {"type": "image_url", "image_url": {"url": question.image}}
        content = [image, {"type": "text", "text": question.text}]
    system = [] if spec.system is None else [{"role": "system", "content": spec.system}]
    return [*system, {"role": "user", "content": content}]


def load_decisions(spec: DecisionsSpec, placement: Placement) -> DecisionsModel:
    """Return a model that asks the server; nothing is sent before the first question. Raises ConfigError as check."""
    spec.check(local=True)
    source = f"decisions of {spec.model} at {spec.url}"
    return DecisionsModel(spec, spec.key, IN_TIME * placement.call_timeout_s, source)


class DecisionsModel(EndpointModel):
    """A served model that returns a probability for every option; servers' own confidences differ, and are not read."""

    _spec: DecisionsSpec

    async def ask(self, question: Asked, bill: Bill) -> Reply:
        """Ask one question about a row."""
        spec, asked = self._spec, self._spec.asked(question.options)
        if spec.format == "systemone":
            body: dict[str, Any] = {"state": question.text, "questions": {"answer": asked}}
            answer = value_at(await self.post("/systemone", body, bill), "answers", "answer")
        else:
            body = {"input": self._input(question), "questions": [asked]}
            answer = value_at(await self.post("/decisions", body, bill), "answers", 0)
        if value_at(answer, "type") == "refusal":
            raise DataError("the model refuses to answer it")
        values = self._probabilities(answer, question.options)
        if not all(isinstance(value, int | float) and 0 <= value <= 1 for value in values):
            raise DataError("the answer has no probability of each option")
        return Reply(np.array(values, dtype=np.float64))

    def _input(self, question: Asked) -> Any:
        """Return the prompt, as messages if it has a system message or an image."""
        system, image = self._spec.system, question.image
        if system is None and image is None:
            return question.text
        images = [] if image is None else [{"type": "input_image", "image_url": image}]
        user = {"role": "user", "content": [*images, {"type": "input_text", "text": question.text}]}
        return [*([] if system is None else [{"role": "system", "content": system}]), user]

    def _probabilities(self, answer: Any, options: tuple[str, ...]) -> list[Any]:
        """Return the probability of each option, None if the answer has none."""
        spec = self._spec
        if spec.question == "predicate":
            yes = value_at(answer, "noul" if spec.format == "systemone" else "probability")
            return [1 - yes if isinstance(yes, int | float) else None, yes]
        listed = value_at(answer, "probabilities")
        if spec.format == "systemone":
            keys = options if spec.question == "choice" else tuple(map(str, range(len(options))))
            return [value_at(listed, key) for key in keys]
        key = "value" if spec.question == "choice" else "label"
        entries = listed if isinstance(listed, list) else []
        by_option = {str(value_at(entry, key)): value_at(entry, "probability") for entry in entries}
        return [by_option.get(option) for option in options]
