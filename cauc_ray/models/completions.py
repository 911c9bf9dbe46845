"""Prompts to an OpenAI-compatible server: the log-probabilities of the options, for one token of answer each.

A server with vLLM's /tokenize and logprob_token_ids gives those of exactly the options. Others list the likeliest
first tokens, so that letters which are not among them are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.endpoint import Bill, EndpointModel, Reply, messages
from cauc_ray.models.http_client import value_at
from cauc_ray.models.kind import IN_TIME, Placement
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.prompts import LETTERS, Asked
from cauc_ray.models.served_tokens import SPACE, ServedTokens
from cauc_ray.models.votes import VotesModel
from cauc_ray.numbers.types import Floats

_PATHS = {"chat": "/chat/completions", "completions": "/completions"}
# A reasoning model's first token.
_THINKS = ("<think>", "<|channel|>", "[THINK]", "<thinking>")
_THINKING = (
    "the model reasons before it answers; set chat_template_kwargs: {enable_thinking: false}, or use another one"
)

# The likeliest first tokens and their log-probabilities, in nats.
Alternatives: TypeAlias = Sequence[tuple[str, float]]

# Servers report tokens that are too unlikely as -9999.
NOT_RETURNED = -9999.0
# Where the returned probabilities add up to 1 or more, what is left is below the rounding of float32 numbers near 1.
_LEAST_LEFT = 2.0**-24
_SHOWN_TOKENS = 5


def load(spec: OpenAISpec, placement: Placement) -> EndpointModel:
    """Return a model that asks the server; nothing is sent before the first question. Raises ConfigError as check."""
    spec.check(local=True)
    model = CompletionsModel if spec.votes is None else VotesModel
    return model(spec, spec.key, IN_TIME * placement.call_timeout_s)


class CompletionsModel(EndpointModel):
    """A served model that answers with the log-probabilities of the options."""

    _spec: OpenAISpec

    def __init__(self, spec: OpenAISpec, key: str | None, deadline_s: float) -> None:
        source = f"openai {spec.model} at {spec.url} ({spec.endpoint}), log-probabilities of the options"
        super().__init__(spec, key, deadline_s, source, chat=spec.endpoint == "chat")
        self._has_logprobs = False
        self._never_any = (
            f", and none of {spec.url} had any so far: a model of kind 'openai' needs a server that returns them for "
            f"{spec.model!r}"
        )
        self._tokens = ServedTokens(spec, self.post)

    async def ask(self, question: Asked, bill: Bill) -> Reply:
        """Ask for an answer of one token."""
        # Scored tokens follow a prompt in tokens, which an image has no place in.
        prompt = self._prompt_of(question)
        logprobs = None if question.image else await self._tokens.log_likelihoods(question, prompt, bill)
        if logprobs is None:
            return Reply(*letter_logits(await self._likeliest(question, bill), len(question.options)))
        per_byte = self._spec.answers_with == "text"
        return Reply(logprobs / [len(option.encode()) if per_byte else 1 for option in question.options])

    async def _likeliest(self, question: Asked, bill: Bill) -> Alternatives:
        """Return the likeliest first tokens of an answer with their log-probabilities."""
        spec = self._spec
        body = {"temperature": 0, self._limit: 1, **self._prompt_of(question)}
        if spec.endpoint == "completions":
            body |= {"logprobs": spec.top_logprobs}
        else:
            body |= {"logprobs": True, "top_logprobs": spec.top_logprobs}
        answer = await self.post(_PATHS[spec.endpoint], body, bill)
        if thinks(answer):
            raise DataError(_THINKING) if self._has_logprobs else ConfigError(f"{self.facts.source}: {_THINKING}")
        alternatives = first_alternatives(answer, spec.endpoint)
        if alternatives is None:
            raise DataError(f"the answer has no log-probabilities{'' if self._has_logprobs else self._never_any}")
        self._has_logprobs = True
        return alternatives

    def _prompt_of(self, question: Asked) -> dict[str, Any]:
        """Return a question as the server's endpoint has it."""
        if self._spec.endpoint == "completions":
            return {"prompt": question.text}
        settings = self._spec.chat_template_kwargs
        turns = {"messages": messages(self._spec, question)}
        return turns | ({"chat_template_kwargs": settings} if settings else {})


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
    if not value_at(answer, "choices", 0):
        raise DataError("the server's answer has no choices")
    logprobs = value_at(answer, "choices", 0, "logprobs")
    tokens = value_at(logprobs, "content" if endpoint == "chat" else "top_logprobs")
    if tokens == []:
        hint = "" if endpoint == "chat" else "; a chat model needs endpoint: chat"
        raise DataError(f"the model ended its answer before the first token{hint}")
    if endpoint == "chat":
        listed = value_at(tokens, 0, "top_logprobs")
        entries = listed if isinstance(listed, list) else []
        pairs = [(value_at(entry, "token"), value_at(entry, "logprob")) for entry in entries]
    else:
        named = value_at(tokens, 0)
        pairs = list(named.items()) if isinstance(named, Mapping) else []
    return [(str(token), float(logprob)) for token, logprob in pairs if isinstance(logprob, int | float)] or None


def thinks(answer: object) -> bool:
    """Return whether an answer begins with a reasoning model's thoughts."""
    message = value_at(answer, "choices", 0, "message")
    if value_at(message, "reasoning_content") or value_at(message, "reasoning"):
        return True
    first = value_at(answer, "choices", 0, "logprobs", "content", 0, "token")
    return isinstance(first, str) and first.strip(SPACE) in _THINKS
