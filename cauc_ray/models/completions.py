"""Prompts to an OpenAI-compatible server: the log-probabilities of the options, for one token of answer each.

A server with vLLM's /tokenize and logprob_token_ids gives those of exactly the options, by the rule of models here.
Others list the likeliest first tokens, so that letters which are not among them are bounded.
"""

from __future__ import annotations

import asyncio
import math
import string
from collections import ChainMap, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from pydantic_core import to_json

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.answers import BELOW, Unusable
from cauc_ray.models.chat import DATE_TEXT, THINKING, open_thought
from cauc_ray.models.endpoint import EndpointModel, Inquiry, conversation
from cauc_ray.models.http_client import all_until_error, value_at
from cauc_ray.models.kind import Placement
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.prompts import LETTERS
from cauc_ray.models.sampling import GeneratingModel
from cauc_ray.models.tokens import (
    Continuations,
    RememberedOptions,
    Tokens,
    log_likelihoods,
    next_tokens,
    shared_tokens,
    tokens_of,
)
from cauc_ray.models.votes import VotesModel
from cauc_ray.numbers.types import Floats

# White space and its substitutes in vocabularies: sentencepiece's space, byte-level BPE's space and new line.
SPACE = string.whitespace + "▁ĠĊ"
# Answers without a common token: what chats that end with these share precedes or follows every answer.
_PROBES = ("Q", "7 words")
# Tokens of a prompt in which a template can open a thought.
_LAST_TOKENS = 16

# A question as the server's endpoint takes it.
Prompt: TypeAlias = Mapping[str, Any]

# The likeliest first tokens and their log-probabilities, in nats.
Alternatives: TypeAlias = Sequence[tuple[str, float]]

# Servers report tokens that are too unlikely as -9999.
NOT_RETURNED = -9999.0
# Where the returned probabilities add up to 1 or more, what is left is below the rounding of float32 numbers near 1.
_LEAST_LEFT = 2.0**-24
_SHOWN_TOKENS = 5


def load(spec: OpenAISpec, placement: Placement) -> EndpointModel:
    """Return a model that asks the server; nothing is sent before the first question. Raises ConfigError as check."""
    if spec.generate is not None:
        return GeneratingModel(spec, placement)
    return (CompletionsModel if spec.votes is None else VotesModel)(spec, placement)


class CompletionsModel(EndpointModel):
    """A served model that answers with the log-probabilities of the options."""

    _spec: OpenAISpec
    _has_logprobs = False

    def __init__(self, spec: OpenAISpec, placement: Placement) -> None:
        super().__init__(spec, placement)
        self._letters = spec.answers_with == "letter"
        self._remembered: defaultdict[int, RememberedOptions] = defaultdict(RememberedOptions)
        self._scores_tokens = None if spec.base_url is not None else False  # unknown before the first question
        self._learning = asyncio.Lock()
        # Tokens that end a text, those that end an answer, and whether the template writes more than space before one.
        self._n_after, self._end, self._has_lead = 0, list[int](), False

    async def ask(self, inquiry: Inquiry) -> Floats:
        """Ask for an answer of one token."""
        question = inquiry.question
        prompt = conversation(self._spec, question) if self._spec.is_chat else {"prompt": question.text}
        logprobs = await self._log_likelihoods(prompt, inquiry)
        if logprobs is None:
            alternatives = await self._likeliest(prompt, inquiry)
            logits, inquiry.counts[BELOW] = letter_logits(alternatives, len(question.options))
            return logits
        per_byte = self._spec.answers_with == "text"
        return logprobs / [len(option.encode()) if per_byte else 1 for option in question.options]

    async def _likeliest(self, prompt: Prompt, inquiry: Inquiry) -> Alternatives:
        """Return the likeliest first tokens of an answer with their log-probabilities."""
        spec, n = self._spec, self._spec.top_logprobs
        listed = {"logprobs": True, "top_logprobs": n} if spec.is_chat else {"logprobs": n}
        path = "/chat/completions" if spec.is_chat else "/completions"
        answer = await self.post_limited(path, {"temperature": 0, **prompt, **listed}, 1, inquiry)
        if thinks(answer):
            error_class = DataError if self._has_logprobs else ConfigError
            raise error_class(f"{self.facts.source}: the model thinks before it answers; {THINKING}")
        alternatives = first_alternatives(answer, spec.endpoint)
        if alternatives is None:
            never = f", and none of {self.facts.source} had any so far: votes need none"
            raise DataError(f"the answer has no log-probabilities{'' if self._has_logprobs else never}")
        self._has_logprobs = True
        return alternatives

    async def _log_likelihoods(self, prompt: Prompt, inquiry: Inquiry) -> Floats | None:
        """Return the log-likelihood of each option, float64 (K,); None for letters that the server does not score.

        Args:
            prompt: The question as the server's endpoint takes it.
            inquiry: The question.

        Raises:
            ConfigError: Options are longer than letters and the server does not score tokens, or the model thinks
                before it answers.
            DataError: The server does not tokenise the prompt or an option.
        """
        if inquiry.question.image:  # which has no place in tokens
            return None
        if self._spec.is_chat:
            prompt = {**prompt, "chat_template_kwargs": {"date_string": DATE_TEXT, **self._spec.chat_template_kwargs}}
        async with self._learning:
            if self._scores_tokens is None:
                self._scores_tokens = await self._learn(prompt, inquiry)
        if self._scores_tokens:
            tokens = await self._tokens(prompt, inquiry)
            requests = next_tokens(tokens.options)
            jobs = [partial(self._next, tokens.prompt, before, ids, inquiry) for before, ids in requests]
            logprobs = dict(ChainMap(*await all_until_error(jobs, asyncio.Semaphore(self._spec.max_concurrency))))
            try:
                return log_likelihoods(tokens.options, logprobs)
            except KeyError:  # it ignored which tokens to score
                self._scores_tokens = False
        if self._letters:
            return None
        raise ConfigError(
            f"{self._spec.url} does not score the tokens of options: options: {self._spec.answers_with} needs a server "
            "with /tokenize and logprob_token_ids, such as vLLM's; options: letter works with every server"
        )

    async def _learn(self, prompt: Prompt, inquiry: Inquiry) -> bool:
        """Learn what precedes and follows every answer; return whether the server tokenises."""
        try:
            closed = await self._tokenized(
                inquiry, [self._continued(prompt, probe, is_open=False) for probe in _PROBES]
            )
        except (ConfigError, DataError):
            return False
        tail = shared_tokens([tokens[::-1] for tokens, _ in closed])[::-1]
        if not self._spec.is_chat:
            self._n_after = len(tail)
            return True
        texts = closed[0][1][-len(tail) :] if tail else []
        # An end of turn, with the white space before it.
        self._end = tail[: next((n for n, text in enumerate(texts, 1) if text.strip(SPACE)), len(tail))]
        answers = (None, *_PROBES)
        (alone, texts), *opened = await self._tokenized(inquiry, [self._continued(prompt, text) for text in answers])
        lead = shared_tokens([tokens for tokens, _ in opened])
        if lead[: len(alone)] == alone:  # such as an empty thought, or the channel of final answers
            texts = opened[0][1][: len(lead)]
            self._has_lead = any(text.strip(SPACE) for text in texts[len(alone) :])
        if open_thought("".join(texts[-_LAST_TOKENS:])):
            raise ConfigError(f"{self._spec.url}: the chat template opens a thought before the answer; {THINKING}")
        return True

    async def _tokens(self, prompt: Prompt, inquiry: Inquiry) -> Tokens:
        """Return a question in tokens."""
        question = inquiry.question
        ((alone, _),) = await self._tokenized(inquiry, [self._continued(prompt)])
        if self._letters or self._spec.labels is not None:
            remembered = self._remembered[len(question.options)]
            async with self._learning:  # of prompts that end alike, one is encoded with its options
                if (joint := remembered.find(alone)) is None:
                    joint = await self._joint(prompt, alone, inquiry)
                    remembered.add(alone, joint)
        else:
            joint = await self._joint(prompt, alone, inquiry)
        tokens = tokens_of(0, question, joint, letters=self._letters)
        if isinstance(tokens, Unusable):
            raise DataError(tokens)
        return tokens

    async def _joint(self, prompt: Prompt, alone: list[int], inquiry: Inquiry) -> Continuations:
        """Encode a prompt with each of its options."""
        is_name = self._spec.answers_with == "name"
        probes = _PROBES if self._has_lead else ()
        line_end = "\n" if is_name and not self._spec.is_chat else ""
        answers = [*probes, *(option + line_end for option in inquiry.question.options)]
        encoded = await self._tokenized(inquiry, [self._continued(prompt, answer) for answer in answers])
        joint = [tokens + self._end * is_name for tokens, _ in encoded]
        prompts = [] if self._letters else joint[: len(probes)] or [alone]
        return Continuations.of(prompts, joint[len(probes) :])

    def _continued(self, prompt: Prompt, answer: str | None = None, *, is_open: bool = True) -> dict[str, Any]:
        """Return a prompt up to where its answer begins, or with an answer in a message that is open or closed."""
        if not self._spec.is_chat:
            return {"prompt": prompt["prompt"] if answer is None else f"{prompt['prompt']} {answer}"}
        if answer is None:
            return {**prompt, "add_generation_prompt": True}
        turns = [*prompt["messages"], {"role": "assistant", "content": answer}]
        return {**prompt, "messages": turns, "add_generation_prompt": False, "continue_final_message": is_open}

    async def _tokenized(self, inquiry: Inquiry, texts: Sequence[Prompt]) -> list[tuple[list[int], list[str]]]:
        """Return the tokens of texts, and their own texts if the server has them. Raises DataError without them."""
        url = f"{self._spec.url.rstrip('/').removesuffix('/v1')}/tokenize"

        async def tokenize(text: Prompt) -> tuple[list[int], list[str]]:
            content = to_json({"model": self._spec.model, **text, "return_token_strs": True})
            answer = await self.send(url, content, inquiry)
            tokens, strings = value_at(answer, "tokens"), value_at(answer, "token_strs")
            if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
                raise DataError("the server does not tokenise it")
            return tokens[: len(tokens) - self._n_after], [str(string) for string in strings or ()]

        return await all_until_error(
            [partial(tokenize, text) for text in texts], asyncio.Semaphore(self._spec.max_concurrency)
        )

    async def _next(
        self, prompt: list[int], before: list[int], ids: Sequence[int], inquiry: Inquiry
    ) -> dict[tuple[int, ...], float]:
        """Return the log-probability of each token that may follow a prompt and what comes before it."""
        body = {"prompt": prompt + before, "max_tokens": 1, "temperature": 0, "logprobs": 1}
        body |= {"logprob_token_ids": list(ids), "return_tokens_as_token_ids": True}
        choice = value_at(await self.post("/completions", body, inquiry), "choices", 0)
        if not before and open_thought(str(value_at(choice, "text"))):
            raise DataError(f"the model thinks before it answers; {THINKING}")
        values = {token: value_at(choice, "logprobs", "top_logprobs", 0, f"token_id:{token}") for token in ids}
        return {(*before, token): float(value) for token, value in values.items() if isinstance(value, int | float)}


def letter_logits(alternatives: Alternatives, n_options: int) -> tuple[Floats, int]:
    """Return the options' log-probabilities, float64 (K,), and how many of them are only bounded from above.

    "A" and " A" are two tokens for one option, whose probabilities add up; "a" is none of them. An option that
    is not among the alternatives gets the largest log-probability that it can have, see missing_bound.

    Raises:
        DataError: No option is among them.
    """
    returned = [(token, min(logprob, 0.0)) for token, logprob in alternatives if NOT_RETURNED < logprob < math.inf]
    logits = np.full(n_options, -np.inf)
    options = {letter: option for option, letter in enumerate(LETTERS[:n_options])}
    for token, logprob in returned:
        option = options.get(token.strip(SPACE))
        if option is not None:
            logits[option] = np.logaddexp(logits[option], logprob)
    missing_mask = np.isneginf(logits)
    if missing_mask.all():
        first = ", ".join(repr(token) for token, _ in alternatives[:_SHOWN_TOKENS])
        raise DataError(
            f"no option's letter ({LETTERS[0]} to {LETTERS[n_options - 1]}) is among the {len(alternatives)} "
            f"likeliest first tokens; they begin with {first or 'none'}"
        )
    if missing_mask.any():
        logits[missing_mask] = missing_bound([logprob for _, logprob in returned])
    return logits, int(missing_mask.sum())


def missing_bound(logprobs: Sequence[float]) -> float:
    """Return the largest log-probability that a token outside the returned ones can have.

    Neither the least likely of the returned tokens nor the remaining probability is exceeded:
    min(min_i l_i, log(1 - sum_i exp(l_i))). Rounding can leave nothing or less; 2^-24, the distance of 1 from
    the float32 number below it, is then taken as the remainder, so that the bound stays finite.

    Args:
        logprobs: At least one, in nats.

    >>> round(missing_bound([math.log(0.5), math.log(0.3)]), 4) == round(math.log(0.2), 4)
    True
    """
    left = 1.0 - math.fsum(math.exp(logprob) for logprob in logprobs)
    return min([*logprobs, math.log(max(left, _LEAST_LEFT))])


def first_alternatives(answer: object, endpoint: str) -> Alternatives | None:
    """Find the likeliest first tokens in an answer as it came, JSON of the chat or the completions endpoint.

    Returns:
        Tokens and log-probabilities; None if the answer has no log-probabilities.

    Raises:
        DataError: The answer is empty, or it ended before the first token.
    """
    choice = value_at(answer, "choices", 0)
    if not choice:
        raise DataError("the server's answer has no choices")
    tokens = value_at(choice, "logprobs", "content" if endpoint == "chat" else "top_logprobs")
    if tokens == []:
        hint = "" if endpoint == "chat" else "; a chat model needs endpoint: chat"
        raise DataError(f"the model ended its answer before the first token{hint}")
    first = value_at(tokens, 0)
    if endpoint == "chat":
        pairs = [
            (value_at(entry, "token"), value_at(entry, "logprob")) for entry in value_at(first, "top_logprobs") or ()
        ]
    else:
        pairs = list(first.items()) if isinstance(first, Mapping) else []
    return [(str(token), float(logprob)) for token, logprob in pairs if isinstance(logprob, int | float)] or None


def thinks(answer: object) -> bool:
    """Return whether an answer begins with a reasoning model's thoughts."""
    message = value_at(answer, "choices", 0, "message")
    if value_at(message, "reasoning_content") or value_at(message, "reasoning"):
        return True
    first = value_at(answer, "choices", 0, "logprobs", "content", 0, "token")
    return isinstance(first, str) and (first.strip(SPACE) == "<|channel|>" or open_thought(first) is not None)
