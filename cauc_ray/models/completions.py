"""Prompts to an OpenAI-compatible server: the log-probabilities of the options, for one token of answer each.

A server with vLLM's /tokenize and logprob_token_ids gives those of exactly the options. Others list the likeliest
first tokens, so that letters which are not among them are bounded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.answers import BELOW
from cauc_ray.models.chat import THINKING, open_thought
from cauc_ray.models.endpoint import EndpointModel, Inquiry, conversation
from cauc_ray.models.http_client import value_at
from cauc_ray.models.kind import Placement
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.prompts import LETTERS
from cauc_ray.models.served_tokens import SPACE, Prompt, TokensModel
from cauc_ray.models.votes import VotesModel
from cauc_ray.numbers.types import Floats

# The likeliest first tokens and their log-probabilities, in nats.
Alternatives: TypeAlias = Sequence[tuple[str, float]]

# Servers report tokens that are too unlikely as -9999.
NOT_RETURNED = -9999.0
# Where the returned probabilities add up to 1 or more, what is left is below the rounding of float32 numbers near 1.
_LEAST_LEFT = 2.0**-24
_SHOWN_TOKENS = 5


def load(spec: OpenAISpec, placement: Placement) -> EndpointModel:
    """Return a model that asks the server; nothing is sent before the first question. Raises ConfigError as check."""
    return (CompletionsModel if spec.votes is None else VotesModel)(spec, placement)


class CompletionsModel(TokensModel):
    """A served model that answers with the log-probabilities of the options."""

    _limit = "max_tokens"  # until a server refuses it in favour of max_completion_tokens
    _has_logprobs = False

    async def ask(self, inquiry: Inquiry) -> Floats:
        """Ask for an answer of one token."""
        question = inquiry.question
        prompt = conversation(self._spec, question) if self._spec.is_chat else {"prompt": question.text}
        logprobs = await self.log_likelihoods(prompt, inquiry)
        if logprobs is None:
            alternatives = await self._likeliest(prompt, inquiry)
            logits, inquiry.counts[BELOW] = letter_logits(alternatives, len(question.options))
            return logits
        per_byte = self._spec.answers_with == "text"
        return logprobs / [len(option.encode()) if per_byte else 1 for option in question.options]

    async def _likeliest(self, prompt: Prompt, inquiry: Inquiry) -> Alternatives:
        """Return the likeliest first tokens of an answer with their log-probabilities."""
        spec, limit, n = self._spec, self._limit, self._spec.top_logprobs
        listed = {"logprobs": True, "top_logprobs": n} if spec.is_chat else {"logprobs": n}
        path = "/chat/completions" if spec.is_chat else "/completions"
        try:
            answer = await self.post(path, {"temperature": 0, limit: 1, **prompt, **listed}, inquiry)
        except (ConfigError, DataError) as error:  # as OpenAI's reasoning models do
            if limit != "max_tokens" or "max_completion_tokens" not in str(error):
                raise
            self._limit = "max_completion_tokens"
            return await self._likeliest(prompt, inquiry)
        if thinks(answer):
            error_class = DataError if self._has_logprobs else ConfigError
            raise error_class(f"{self.facts.source}: the model thinks before it answers; {THINKING}")
        alternatives = first_alternatives(answer, spec.endpoint)
        if alternatives is None:
            never = f", and none of {self.facts.source} had any so far: votes need none"
            raise DataError(f"the answer has no log-probabilities{'' if self._has_logprobs else never}")
        self._has_logprobs = True
        return alternatives


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
    return isinstance(first, str) and (first.strip(SPACE) == "<|channel|>" or open_thought(first) is not None)
