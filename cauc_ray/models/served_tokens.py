"""Options in the tokens of a server that scores given tokens, as vLLM's does: by the rule of models here."""

from __future__ import annotations

import asyncio
import string
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias
from weakref import WeakMethod

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.answers import Unusable
from cauc_ray.models.chat import DATE_TEXT, THINKING, open_thought
from cauc_ray.models.endpoint import Bill
from cauc_ray.models.http_client import value_at
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.prompts import Asked
from cauc_ray.models.tokens import (
    Continuations,
    RememberedOptions,
    Tokens,
    log_likelihoods,
    next_tokens,
    shared_tokens,
    tokens_of,
)
from cauc_ray.numbers.types import Floats

# White space and its substitutes in vocabularies: sentencepiece's space, byte-level BPE's space and new line.
SPACE = string.whitespace + "▁ĠĊ"
# Answers without a common token: what chats that end with these share precedes or follows every answer.
_PROBES = ("Q", "7 words")
# Tokens of a prompt in which a template can open a thought.
_LAST_TOKENS = 16

# A question as the server's endpoint takes it.
Prompt: TypeAlias = Mapping[str, Any]


class ServedTokens:
    """The tokens of a server's tokenizer, and their log-probabilities."""

    def __init__(self, spec: OpenAISpec, post: Callable[..., Awaitable[object]]) -> None:
        """Send nothing yet; post is a method of an EndpointModel."""
        self._spec = spec
        self._post = WeakMethod(post)  # the model has this object, and must end its thread as soon as it is dropped
        self._chat = spec.endpoint == "chat"
        self._letters = spec.answers_with == "letter"
        self._remembered: defaultdict[int, RememberedOptions] = defaultdict(RememberedOptions)
        self._is_available = None if spec.base_url is not None else False  # unknown before the first question
        self._learning = asyncio.Lock()
        self._gate = asyncio.Semaphore(spec.max_concurrency)
        # Tokens that end a text, those that end an answer, and whether the template writes more than space before one.
        self._n_after, self._end, self._has_lead = 0, list[int](), False

    async def log_likelihoods(self, question: Asked, prompt: Prompt, bill: Bill) -> Floats | None:
        """Return the log-likelihood of each option, float64 (K,); None for letters that the server does not score.

        Args:
            question: The question.
            prompt: The question as the server's endpoint takes it.
            bill: The bill of the question.

        Raises:
            ConfigError: Options are longer than letters and the server does not score tokens, or the model thinks
                before it answers.
            DataError: The server does not tokenise the prompt or an option.
        """
        if self._chat:
            kwargs = {"date_string": DATE_TEXT, **prompt.get("chat_template_kwargs", {})}
            prompt = {**prompt, "chat_template_kwargs": kwargs}
        async with self._learning:
            if self._is_available is None:
                self._is_available = await self._learn(prompt, bill)
        if self._is_available:
            tokens = await self._tokens(question, prompt, bill)
            requests = (self._next(tokens.prompt, before, ids, bill) for before, ids in next_tokens(tokens.options))
            logprobs = {key: value for scores in await _gathered(requests) for key, value in scores.items()}
            try:
                return log_likelihoods(tokens.options, logprobs)
            except KeyError:  # it ignored which tokens to score
                self._is_available = False
        if self._letters:
            return None
        raise ConfigError(
            f"{self._spec.url} does not score the tokens of options: options: {self._spec.answers_with} needs a server "
            "with /tokenize and logprob_token_ids, such as vLLM's; options: letter works with every server"
        )

    async def _learn(self, prompt: Prompt, bill: Bill) -> bool:
        """Learn what precedes and follows every answer; return whether the server tokenises."""
        try:
            closed = await _gathered(self._tokenized(self._answered(prompt, probe, False), bill) for probe in _PROBES)
        except (ConfigError, DataError):
            return False
        tail = shared_tokens([tokens[::-1] for tokens, _ in closed])[::-1]
        if not self._chat:
            self._n_after = len(tail)
            return True
        texts = closed[0][1][-len(tail) :] if tail else []
        # An end of turn, with the white space before it.
        self._end = tail[: next((n for n, text in enumerate(texts, 1) if text.strip(SPACE)), len(tail))]
        (alone, texts), *opened = await _gathered(
            self._tokenized(body, bill)
            for body in (self._alone(prompt), *(self._answered(prompt, probe) for probe in _PROBES))
        )
        lead = shared_tokens([tokens for tokens, _ in opened])
        if lead[: len(alone)] == alone:  # such as an empty thought, or the channel of final answers
            texts = opened[0][1][: len(lead)]
            self._has_lead = any(text.strip(SPACE) for text in texts[len(alone) :])
        if open_thought("".join(texts[-_LAST_TOKENS:])):
            raise ConfigError(f"{self._spec.url}: the chat template opens a thought before the answer; {THINKING}")
        return True

    async def _tokens(self, question: Asked, prompt: Prompt, bill: Bill) -> Tokens:
        """Return a question in tokens."""
        alone, _ = await self._tokenized(self._alone(prompt), bill)
        if self._letters or self._spec.labels is not None:
            remembered = self._remembered[len(question.options)]
            async with self._learning:  # of prompts that end alike, one is encoded with its options
                if (joint := remembered.find(alone)) is None:
                    joint = await self._joint(question, prompt, alone, bill)
                    remembered.add(alone, joint)
        else:
            joint = await self._joint(question, prompt, alone, bill)
        tokens = tokens_of(0, question, joint, letters=self._letters)
        if isinstance(tokens, Unusable):
            raise DataError(tokens)
        return tokens

    async def _joint(self, question: Asked, prompt: Prompt, alone: list[int], bill: Bill) -> Continuations:
        """Encode a prompt with each of its options."""
        is_name = self._spec.answers_with == "name"
        probes = _PROBES if self._has_lead else ()
        end, line_end = (self._end, "") if self._chat else ([], "\n")
        answers = [*probes, *(option + line_end * is_name for option in question.options)]
        encoded = await _gathered(self._tokenized(self._answered(prompt, answer), bill) for answer in answers)
        joint = [tokens + end * is_name for tokens, _ in encoded]
        prompts = [] if self._letters else joint[: len(probes)] or [alone]
        return Continuations.of(prompts, joint[len(probes) :])

    def _alone(self, prompt: Prompt) -> dict[str, Any]:
        """Return a prompt up to where its answer begins."""
        return {**prompt, "add_generation_prompt": True} if self._chat else dict(prompt)

    def _answered(self, prompt: Prompt, answer: str, is_open: bool = True) -> dict[str, Any]:
        """Return a prompt with an answer; a chat up to within its last message if that is to be open."""
        if not self._chat:
            return {"prompt": f"{prompt['prompt']} {answer}"}
        messages = [*prompt["messages"], {"role": "assistant", "content": answer}]
        return {**prompt, "messages": messages, "add_generation_prompt": False, "continue_final_message": is_open}

    async def _tokenized(self, body: dict[str, Any], bill: Bill) -> tuple[list[int], list[str]]:
        """Return tokens, and their texts if the server has them. Raises DataError if it does not tokenise."""
        root = self._spec.url.rstrip("/").removesuffix("/v1")
        answer = await self._send(f"{root}/tokenize", {**body, "return_token_strs": True}, bill, is_billed=False)
        tokens, texts = value_at(answer, "tokens"), value_at(answer, "token_strs")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise DataError("the server does not tokenise it")
        return tokens[: len(tokens) - self._n_after], [str(text) for text in texts or ()]

    async def _send(self, *request: Any, **settings: Any) -> object:
        post = self._post()
        assert post is not None  # its model waits for the answer
        async with self._gate:
            return await post(*request, **settings)

    async def _next(
        self, prompt: list[int], before: list[int], ids: Sequence[int], bill: Bill
    ) -> dict[tuple[int, ...], float]:
        """Return the log-probability of each token that may follow a prompt and what comes before it."""
        body = {"prompt": prompt + before, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        body |= {"logprob_token_ids": list(ids), "return_tokens_as_token_ids": True}
        answer = await self._send("/completions", body, bill)
        if not before and open_thought(str(value_at(answer, "choices", 0, "text"))):
            raise DataError(f"the model thinks before it answers; {THINKING}")
        logprobs = value_at(answer, "choices", 0, "logprobs", "top_logprobs", 0)
        values = {(*before, token): value_at(logprobs, f"token_id:{token}") for token in ids}
        return {key: float(value) for key, value in values.items() if isinstance(value, int | float)}


async def _gathered(requests: Iterable[Any]) -> list[Any]:
    """Wait for all requests; raise the first error after the last of them."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
