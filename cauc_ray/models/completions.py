"""Prompts to an OpenAI-compatible server: the log-probabilities of the options, for one token of answer each.

A server with vLLM's /tokenize and logprob_token_ids gives those of exactly the options. Others list the likeliest
first tokens, so that letters which are not among them are bounded.
"""

from __future__ import annotations

import asyncio
import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.endpoint import Bill, EndpointModel, Reply, messages, value_at
from cauc_ray.models.kind import IN_TIME, Placement
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.prompts import LETTERS, Asked
from cauc_ray.models.tokens import requests
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

# White space and its substitutes in vocabularies: sentencepiece's space, byte-level BPE's space and new line.
_SPACE = string.whitespace + "▁ĠĊ"
# Servers report tokens that are too unlikely as -9999.
_UNSAID = -9999.0
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
        self._options: dict[str, list[int]] = {}
        self._probing = asyncio.Lock()
        # Whether the server scores given tokens; unknown before the first question.
        self._scores_tokens = None if spec.base_url is not None else False

    async def ask(self, question: Asked, bill: Bill) -> Reply:
        """Ask for an answer of one token."""
        # Scored tokens follow a prompt in tokens, which an image has no place in.
        tokens = None if question.image else await self._tokens_of(question.options, bill)
        if tokens is not None:
            logits, n_below = await self._scored(question, tokens, bill)
        else:
            logits, n_below = letter_logits(await self._likeliest(question, bill), len(question.options))
        return Reply(logits, n_below)

    async def _likeliest(self, question: Asked, bill: Bill, ids: Sequence[int] = ()) -> Alternatives:
        """Return the likeliest first tokens of an answer with their log-probabilities, or those of tokens by number."""
        spec = self._spec
        body = {"temperature": 0, self._limit: 1, **self._prompt_of(question)}
        if ids:
            body |= {"logprob_token_ids": list(ids), "return_tokens_as_token_ids": True}
        if spec.endpoint == "completions":
            body |= {"logprobs": 1 if ids else spec.top_logprobs}
        else:
            body |= {"logprobs": True} | ({} if ids else {"top_logprobs": spec.top_logprobs})
        answer = await self.post(_PATHS[spec.endpoint], body, bill)
        if thinks(answer):
            raise DataError(_THINKING) if self._has_logprobs else ConfigError(f"{self.facts.source}: {_THINKING}")
        alternatives = first_alternatives(answer, spec.endpoint)
        if alternatives is None:
            raise DataError(f"the answer has no log-probabilities{'' if self._has_logprobs else self._never_any}")
        self._has_logprobs = True
        return alternatives

    async def _tokens_of(self, options: Sequence[str], bill: Bill) -> list[list[int]] | None:
        """Return each option's tokens after the prompt, None where the server does not score given tokens.

        Raises ConfigError if it does not although options are longer than letters, DataError for an option that it
        rejects.
        """
        async with self._probing:
            if self._scores_tokens is None:
                self._scores_tokens = bool(await self._tokenized({"prompt": LETTERS[0]}, bill))
        if self._scores_tokens:
            found = [await self._option(option, bill) for option in options]
            if not all(found):
                raise DataError("the server does not tokenise one of its options")
            return found
        if self._spec.answers_with == "letter":
            return None
        raise ConfigError(
            f"{self._spec.url} does not score the tokens of options: options: {self._spec.answers_with} needs a server "
            "with /tokenize and logprob_token_ids, such as vLLM's; options: letter works with every server"
        )

    async def _option(self, option: str, bill: Bill) -> list[int]:
        """Return an option's tokens: those of a name or text, or the one that is the letter, as models here have it."""
        if option in self._options:
            return self._options[option]
        lead, letters = "" if self._spec.endpoint == "chat" else " ", self._spec.answers_with == "letter"
        tokens = await self._tokenized({"prompt": lead + option, "add_special_tokens": False}, bill) or []
        tokens = tokens[-1:] if letters else tokens
        if letters or self._spec.labels is not None:  # each question has other choices: these would only pile up
            self._options[option] = tokens
        return tokens

    async def _tokenized(self, what: dict[str, Any], bill: Bill) -> list[int] | None:
        """Return the tokens of a text or of messages as the server has them, None if it does not tokenise."""
        root = self._spec.url.rstrip("/").removesuffix("/v1")
        try:
            answer = await self.post(f"{root}/tokenize", what, bill, is_billed=False)
        except (DataError, ConfigError):
            return None
        ids = value_at(answer, "tokens")
        return ids if isinstance(ids, list) and all(isinstance(token, int) for token in ids) else None

    async def _scored(self, question: Asked, options: list[list[int]], bill: Bill) -> tuple[Floats, int]:
        """Return the log-probability of each option: of its token, or of its tokens after the prompt."""
        logprobs: dict[tuple[int, ...], float] = {}
        prompt = None
        for tokens, ids in requests(options):
            if ids:
                names = {f"token_id:{token}": (token,) for token in ids}
                said = await self._likeliest(question, bill, ids)
                given: dict[tuple[int, ...], float] = {
                    names[token]: logprob for token, logprob in said if token in names
                }
                if len(given) < len(ids):
                    self._scores_tokens = False
                    await self._tokens_of(question.options, bill)  # letters can be bounded, others cannot
                    return letter_logits(await self._likeliest(question, bill), len(options))
                logprobs |= given
            else:
                prompt = prompt or await self._prompt_tokens(question, bill)
                logprobs[tuple(tokens)] = await self._continued(prompt, tokens, bill)
        n_bytes = [len(option.encode()) if self._spec.answers_with == "text" else 1 for option in question.options]
        return np.array([logprobs[tuple(option)] for option in options]) / n_bytes, 0

    async def _prompt_tokens(self, question: Asked, bill: Bill) -> list[int]:
        """Return the tokens of a question, up to where the answer begins."""
        generating = {} if self._spec.endpoint == "completions" else {"add_generation_prompt": True}
        tokens = await self._tokenized(self._prompt_of(question) | generating, bill)
        if tokens is None:
            raise DataError("the server does not tokenise its prompt")
        return tokens

    def _prompt_of(self, question: Asked) -> dict[str, Any]:
        """Return a question as the server's endpoint has it."""
        if self._spec.endpoint == "completions":
            return {"prompt": question.text}
        settings = self._spec.chat_template_kwargs
        turns = {"messages": messages(self._spec, question)}
        return turns | ({"chat_template_kwargs": settings} if settings else {})

    async def _continued(self, prompt: list[int], option: list[int], bill: Bill) -> float:
        """Return the log-probability of an option's tokens after a prompt's."""
        body = {"prompt": prompt + option, "prompt_logprobs": 0, self._limit: 1, "temperature": 0}
        answer = await self.post(_PATHS["completions"], body, bill)
        said = value_at(answer, "choices", 0, "prompt_logprobs")
        own = said[len(prompt) :] if isinstance(said, list) else []
        values = [value_at(at, str(token), "logprob") for at, token in zip(own, option, strict=False)]
        if len(values) < len(option) or not all(isinstance(value, int | float) for value in values):
            raise DataError("the answer has no log-probabilities of the prompt")
        return math.fsum(values)


def letter_logits(alternatives: Alternatives, n_options: int) -> tuple[Floats, int]:
    """Return the options' log-probabilities, float64 (K,), and how many of them are only bounded from above.

    "A" and " A" are two tokens for one option, whose probabilities add up; "a" is none of them. An option that
    is not among the alternatives gets the largest log-probability that it can have, see unsaid_bound.
    Raises DataError when no option is among them.
    """
    said = [(token, min(logprob, 0.0)) for token, logprob in alternatives if _UNSAID < logprob < math.inf]
    logits = np.full(n_options, -np.inf)
    options = {letter: option for option, letter in enumerate(LETTERS[:n_options])}
    for token, logprob in said:
        option = options.get(token.strip(_SPACE))
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
        logits[missing_mask] = unsaid_bound([logprob for _, logprob in said])
    return logits, int(missing_mask.sum())


def unsaid_bound(logprobs: Sequence[float]) -> float:
    """Return the largest log-probability that a token outside the returned ones can have.

    It is no likelier than the least likely of the returned ones, and no likelier than all that is left:
    min(min_i l_i, log(1 - sum_i exp(l_i))). Rounding can leave nothing or less; 2^-24, the distance of 1 from
    the float32 number below it, is then taken as left, so that the bound stays finite.
    logprobs: at least one, in nats.

    >>> round(unsaid_bound([math.log(0.5), math.log(0.3)]), 4) == round(math.log(0.2), 4)
    True
    """
    left = 1.0 - math.fsum(math.exp(logprob) for logprob in logprobs)
    return min([*logprobs, math.log(max(left, _LEAST_LEFT))])


def first_alternatives(answer: object, endpoint: str) -> Alternatives | None:
    """Find the likeliest first tokens in an answer as it came, JSON of the chat or the completions endpoint.

    Returns None where the answer has no log-probabilities at all.
    Raises DataError if there is no answer, or no token with log-probabilities because it ended before the first one.
    """
    if not value_at(answer, "choices", 0):
        raise DataError("the server's answer has no choices")
    logprobs = value_at(answer, "choices", 0, "logprobs")
    said = value_at(logprobs, "content" if endpoint == "chat" else "top_logprobs")
    if said == []:
        hint = "" if endpoint == "chat" else "; a chat model needs endpoint: chat"
        raise DataError(f"the model ended its answer before the first token{hint}")
    if endpoint == "chat":
        listed = value_at(said, 0, "top_logprobs")
        entries = listed if isinstance(listed, list) else []
        pairs = [(value_at(entry, "token"), value_at(entry, "logprob")) for entry in entries]
    else:
        named = value_at(said, 0)
        pairs = list(named.items()) if isinstance(named, Mapping) else []
    return [(str(token), float(logprob)) for token, logprob in pairs if isinstance(logprob, int | float)] or None


def thinks(answer: object) -> bool:
    """Return whether an answer begins with a reasoning model's thoughts."""
    message = value_at(answer, "choices", 0, "message")
    if value_at(message, "reasoning_content") or value_at(message, "reasoning"):
        return True
    first = value_at(answer, "choices", 0, "logprobs", "content", 0, "token")
    return isinstance(first, str) and first.strip(_SPACE) in _THINKS
