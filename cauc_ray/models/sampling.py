"""Answers that a server samples: for votes on options, and for what a model says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.models.answers import Answers
from cauc_ray.models.endpoint import EndpointModel, Inquiry, conversation
from cauc_ray.models.generating import ScoredToken, answer_of, read_sample
from cauc_ray.models.http_client import all_until_error, value_at
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.words import in_words
from cauc_ray.numbers.types import Floats


class SamplingModel(EndpointModel):
    """A served model whose answers are sampled."""

    _spec: OpenAISpec
    # Whether a request may sample several answers; unknown before the first that asks for several.
    _samples_several: bool | None = None

    async def sampled(self, inquiry: Inquiry, n: int, body: dict[str, Any], max_tokens: int | None) -> list[object]:
        """Return n sampled choices, in as few requests as the server takes. Raises as EndpointModel.ask does.

        body: fields of a request besides the conversation.   max_tokens: of an answer.
        """
        choices = list[object]()
        if n > 1 and self._samples_several is not False:
            try:
                choices = await self._choices(inquiry, n, body, max_tokens)
                self._samples_several = len(choices) > 1
            except DataError:  # some servers reject n, others ignore it
                if self._samples_several:
                    raise
        jobs = [partial(self._choices, inquiry, 1, body, max_tokens)] * (n - len(choices))
        choices += chain.from_iterable(await all_until_error(jobs, asyncio.Semaphore(self._spec.max_concurrency)))
        if n > 1:
            self._samples_several = bool(self._samples_several)
        return choices

    async def _choices(self, inquiry: Inquiry, n: int, body: dict[str, Any], max_tokens: int | None) -> list[object]:
        asked = conversation(self._spec, inquiry.question) | body | ({"n": n} if n > 1 else {})
        choices = value_at(await self.post_limited("/chat/completions", asked, max_tokens, inquiry), "choices")
        if not choices or not isinstance(choices, list):
            raise DataError("the server's answer has no choices")
        return choices[:n]


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the field of a request that has its answers follow a JSON schema."""
    json_schema = {"name": "answer", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


class GeneratingModel(SamplingModel):
    """A served model that answers in words."""

    async def ask(self, inquiry: Inquiry) -> Floats:
        """Sample answers; return the confidences in the most frequent one, float64 (C,), by their sorted names."""
        asked = self._spec.generate
        assert asked is not None
        body: dict[str, Any] = {"temperature": asked.heat} | ({"logprobs": True} if asked.reads_tokens else {})
        body |= {} if asked.schema_sent is None else described(asked.schema_sent)
        choices = await self.sampled(inquiry, asked.samples, body, asked.max_tokens)
        samples = [
            read_sample(asked, content if isinstance(content, str) else None, _tokens(choice))
            for choice in choices
            for content in [value_at(choice, "message", "content")]
        ]
        inquiry.text, confidences = answer_of(asked, samples)
        return np.array(confidences)

    def answers(self, n: int, inquiries: dict[int, Inquiry], faults: dict[int, str], costs: Floats | None) -> Answers:
        """Return the answers to the questions of n rows."""
        assert self._spec.answer_format is not None
        words = self._spec.answer_format
        texts: list[str | None] = [None] * n
        confidences = np.full((n, len(words.confidences)), np.nan)
        for row, inquiry in inquiries.items():
            texts[row], confidences[row] = inquiry.text, inquiry.logits
        by_name = dict(zip(words.confidences, confidences.T, strict=True))
        return in_words(texts, by_name, words, faults, costs=costs)


def _tokens(choice: object) -> Sequence[ScoredToken] | None:
    """Return the tokens of a choice, None where the server lists none."""
    content = value_at(choice, "logprobs", "content")
    if not isinstance(content, list) or not content:
        return None
    tokens = list[ScoredToken]()
    for entry in content:
        text, logprob, as_bytes = (value_at(entry, name) for name in ("token", "logprob", "bytes"))
        if not isinstance(logprob, int | float) or logprob != logprob:
            return None
        try:
            encoded = bytes(as_bytes) if isinstance(as_bytes, list) else str(text).encode(errors="replace")
            tokens.append((encoded, float(logprob)))
        except (ValueError, TypeError, OverflowError):  # no bytes, or a number that no float holds
            return None
    return tokens
