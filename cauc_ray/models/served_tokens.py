"""Options in the tokens of a server that scores given tokens, as vLLM's does: by the rule of models here."""

from __future__ import annotations

import asyncio
import string
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.answers import Unusable
from cauc_ray.models.chat import DATE_TEXT, THINKING, open_thought
from cauc_ray.models.endpoint import Bill, value_at
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
# Answers that share no token: what is common to chats that end with these precedes or follows every answer.
_PROBES = ("Q", "7 words")
# Tokens of a prompt in which a thought can be opened after the question.
_LAST_TOKENS = 16


class Post(Protocol):
    """Sends a request, as EndpointModel does."""

    async def __call__(self, path: str, body: dict[str, Any], bill: Bill, *, is_billed: bool = True) -> object:
        """Return the server's answer, parsed JSON."""


class ServedTokens:
    """The tokens of a server's tokenizer, and their log-probabilities."""

    def __init__(self, spec: OpenAISpec, post: Post) -> None:
        self._spec = spec
        self._post = post
        self._chat = spec.endpoint == "chat"
        self._letters = spec.answers_with == "letter"
        self._fixed = self._letters or spec.labels is not None
        self._remembered: defaultdict[int, RememberedOptions] = defaultdict(RememberedOptions)
        self._is_available = None if spec.base_url is not None else False  # unknown before the first question
        self._has_scores = False
        self._n_after = 0
        self._learning = asyncio.Lock()
        self._gate = asyncio.Semaphore(spec.max_concurrency)

    async def log_likelihoods(self, question: Asked, prompt: Mapping[str, Any], bill: Bill) -> Floats | None:
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
        if await self._can_score(bill):
            if self._chat:
                kwargs = {"date_string": DATE_TEXT, **prompt.get("chat_template_kwargs", {})}
                prompt = {**prompt, "chat_template_kwargs": kwargs}
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

    async def _can_score(self, bill: Bill) -> bool:
        async with self._learning:
            if self._is_available is None:
                probe = {"prompt": _PROBES[0]}
                try:
                    whole = await self._tokenized(probe, bill)
                    plain = await self._tokenized({**probe, "add_special_tokens": False}, bill)
                except (ConfigError, DataError):
                    self._is_available = False
                else:
                    self._is_available = True
                    starts = [n for n in range(len(whole)) if whole[n : n + len(plain)] == plain]
                    self._n_after = len(whole) - len(plain) - starts[-1] if starts and not self._chat else 0
            return self._is_available

    async def _tokens(self, question: Asked, prompt: Mapping[str, Any], bill: Bill) -> Tokens:
        """Return a question in tokens."""
        if self._fixed:
            remembered = self._remembered[len(question.options)]
            alone = await self._prompt_alone(prompt, bill)
            joint = remembered.find(alone)
            if joint is None:
                async with self._learning:  # one of those that end alike is encoded with its options
                    if (joint := remembered.find(alone)) is None:
                        joint = await self._joint(question, prompt, bill)
                        remembered.add(alone, joint)
        else:
            joint = await self._joint(question, prompt, bill)
        tokens = tokens_of(0, question, joint, self._letters)
        if isinstance(tokens, Unusable):
            raise DataError(tokens)
        return tokens

    async def _prompt_alone(self, prompt: Mapping[str, Any], bill: Bill) -> list[int]:
        return await self._tokenized({**prompt, **({"add_generation_prompt": True} if self._chat else {})}, bill)

    async def _joint(self, question: Asked, prompt: Mapping[str, Any], bill: Bill) -> Continuations:
        """Encode a prompt with each of its options."""
        is_name = self._spec.answers_with == "name"
        if not self._chat:
            end_of_line = "\n" if is_name else ""
            texts = [f"{prompt['prompt']} {option}{end_of_line}" for option in question.options]
            encoded = await _gathered(self._tokenized({"prompt": text}, bill) for text in texts)
            return Continuations.of([] if self._letters else [await self._prompt_alone(prompt, bill)], encoded)
        alone, *encoded = await _gathered(
            [
                self._prompt_alone(prompt, bill),
                *(self._tokenized(_answered(prompt, answer), bill) for answer in (*_PROBES, *question.options)),
            ]
        )
        texts = await self._token_texts({**prompt, "add_generation_prompt": True}, bill)
        lead = shared_tokens(encoded[:2])
        if lead[: len(alone)] == alone:  # such as an empty thought, or the channel of final answers
            texts += (await self._token_texts(_answered(prompt, _PROBES[0]), bill))[len(alone) : len(lead)]
        if open_thought("".join(texts[-_LAST_TOKENS:])):
            raise ConfigError(f"{self._spec.url}: the chat template opens a thought before the answer; {THINKING}")
        has_lead = any(text.strip(SPACE) for text in texts[len(alone) :])
        end = await self._end(prompt, bill) if is_name else []
        prompts = [] if self._letters else encoded[:2] if has_lead else [alone]
        return Continuations.of(prompts, [tokens + end for tokens in encoded[2:]])

    async def _end(self, prompt: Mapping[str, Any], bill: Bill) -> list[int]:
        """Return the tokens with which the template ends an answer."""
        chats = [_answered(prompt, probe) | {"continue_final_message": False} for probe in _PROBES]
        closed = await _gathered(self._tokenized(chat, bill) for chat in chats)
        end = shared_tokens([tokens[::-1] for tokens in closed])[::-1]
        texts = (await self._token_texts(chats[0], bill))[-len(end) :] if end else []
        # An end of turn, with the white space before it.
        n_tokens = next((n for n, text in enumerate(texts, 1) if text.strip(SPACE)), len(end))
        return end[:n_tokens] or await self._tokenized({"prompt": "\n", "add_special_tokens": False}, bill)

    async def _tokenized(self, body: Mapping[str, Any], bill: Bill) -> list[int]:
        """Return the tokens of a text or of messages. Raises DataError if the server does not tokenise it."""
        tokens = value_at(await self._tokenizer(body, bill), "tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
            raise DataError("the server does not tokenise it")
        return tokens[: len(tokens) - self._n_after] if body.get("add_special_tokens", True) else tokens

    async def _token_texts(self, body: Mapping[str, Any], bill: Bill) -> list[str]:
        texts = value_at(await self._tokenizer({**body, "return_token_strs": True}, bill), "token_strs")
        return [str(text) for text in texts] if isinstance(texts, list) else []

    async def _tokenizer(self, body: Mapping[str, Any], bill: Bill) -> object:
        root = self._spec.url.rstrip("/").removesuffix("/v1")
        async with self._gate:
            return await self._post(f"{root}/tokenize", dict(body), bill, is_billed=False)

    async def _next(
        self, prompt: list[int], before: list[int], ids: Sequence[int], bill: Bill
    ) -> dict[tuple[int, ...], float]:
        """Return the log-probability of each token that may follow a prompt and what comes before it."""
        body = {"prompt": prompt + before, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        body |= {"logprob_token_ids": list(ids), "return_tokens_as_token_ids": True}
        async with self._gate:
            answer = await self._post("/completions", body, bill)
        if not before and open_thought(str(value_at(answer, "choices", 0, "text"))):
            raise (
                DataError(THINKING)
                if self._has_scores
                else ConfigError(f"{self._spec.url}: the model thinks; {THINKING}")
            )
        logprobs = value_at(answer, "choices", 0, "logprobs", "top_logprobs", 0)
        values = {(*before, token): value_at(logprobs, f"token_id:{token}") for token in ids}
        scores = {key: float(value) for key, value in values.items() if isinstance(value, int | float)}
        self._has_scores |= bool(scores)
        return scores


def _answered(prompt: Mapping[str, Any], answer: str) -> dict[str, Any]:
    """Return a chat up to within the answer to its last message."""
    messages = [*prompt["messages"], {"role": "assistant", "content": answer}]
    return {**prompt, "messages": messages, "add_generation_prompt": False, "continue_final_message": True}


async def _gathered(requests: Iterable[Any]) -> list[Any]:
    """Wait for all requests; raise the first error after the last of them."""
    results = await asyncio.gather(*requests, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
