"""Sampled votes: probabilities of options from a server that returns no log-probabilities.

The model answers each question several times at temperature 1, restricted to the options by a JSON schema. With v of k
valid answers for an option, its probability is (v + 1/K) / (k + 1): one more vote is spread over all K options, so that
none has probability 0.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.models.endpoint import Bill, EndpointModel, Reply, messages
from cauc_ray.models.http_client import value_at
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.models.prompts import Asked
from cauc_ray.numbers.types import Floats

TEMPERATURE = 1.0
# Votes that are spread over all options.
PRIOR_VOTES = 1.0


class VotesModel(EndpointModel):
    """A served model whose sampled answers are votes."""

    _spec: OpenAISpec

    def __init__(self, spec: OpenAISpec, key: str | None, deadline_s: float) -> None:
        source = f"openai {spec.model} at {spec.url}, {spec.votes} sampled votes"
        super().__init__(spec, key, deadline_s, source)
        # Whether a request may sample several answers; unknown before the first.
        self._samples_several: bool | None = None

    async def ask(self, question: Asked, bill: Bill) -> Reply:
        """Sample answers until there are enough votes."""
        n, samples = self._spec.votes or 0, list[str]()
        if self._samples_several is not False:
            try:
                samples = await self._sampled(question, n, bill)
            except DataError:
                if self._samples_several:
                    raise
                samples = await self._sampled(question, 1, bill)  # some servers reject n, others ignore it
            self._samples_several = len(samples) > 1
        requests = (self._sampled(question, 1, bill) for _ in range(n - len(samples)))
        results = await asyncio.gather(*requests, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        if errors := [failure for failure in failures if not isinstance(failure, DataError)]:
            raise errors[0]
        samples += [sample for result in results if isinstance(result, list) for sample in result]
        votes = Counter(vote for sample in samples if (vote := _vote(sample, question.options)) is not None)
        if not votes:
            raise failures[0] if failures else DataError(f"none of its {n} sampled answers is one of its options")
        return Reply(shares(votes, question.options), n_invalid=n - votes.total())

    async def _sampled(self, question: Asked, n: int, bill: Bill) -> list[str]:
        """Return the texts of sampled answers."""
        answer = {"type": "string", "enum": list(dict.fromkeys(question.options))}
        schema = {
            "type": "object",
            "properties": {"answer": answer},
            "required": ["answer"],
            "additionalProperties": False,
        }
        body: dict[str, Any] = {
            "messages": messages(self._spec, question),
            "temperature": TEMPERATURE,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "answer", "strict": True, "schema": schema},
            },
        }
        if self._spec.chat_template_kwargs:
            body["chat_template_kwargs"] = self._spec.chat_template_kwargs
        if n > 1:
            body["n"] = n
        choices = value_at(await self.post("/chat/completions", body, bill), "choices")
        if not choices or not isinstance(choices, list):
            raise DataError("the server's answer has no choices")
        return [str(value_at(choice, "message", "content") or "") for choice in choices[:n]]


def shares(votes: Counter[str], options: Sequence[str]) -> Floats:
    """Return the probability of each option, float64 (K,).

    >>> shares(Counter(A=3, B=1), ["A", "B"]).tolist()
    [0.7, 0.3]
    """
    counts = np.array([votes[option] for option in options], dtype=np.float64)
    probabilities: Floats = (counts + PRIOR_VOTES / len(options)) / (counts.sum() + PRIOR_VOTES)
    return probabilities


def _vote(sample: str, options: Sequence[str]) -> str | None:
    """Return the option that a sampled answer names, as the schema has it or as bare text; None if it names none."""
    text = sample.strip()
    with suppress(ValueError, TypeError, KeyError, RecursionError):
        text = json.loads(text)["answer"]
    return text if text in options else None
