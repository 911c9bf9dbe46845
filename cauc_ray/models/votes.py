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
from functools import partial
from itertools import chain

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.models.endpoint import EndpointModel, Inquiry, conversation
from cauc_ray.models.http_client import all_until_error, value_at
from cauc_ray.models.openai import OpenAISpec
from cauc_ray.numbers.types import Floats

TEMPERATURE = 1.0
# Votes that are spread over all options.
PRIOR_VOTES = 1.0
# What Answers.counts has of votes.
INVALID_VOTES = "sampled answers that are none of the options"


class VotesModel(EndpointModel):
    """A served model whose sampled answers are votes."""

    _spec: OpenAISpec
    # Whether a request may sample several answers; unknown before the first.
    _samples_several: bool | None = None

    async def ask(self, inquiry: Inquiry) -> Floats:
        """Sample answers until there are enough votes."""
        n, samples = self._spec.votes or 0, list[str]()
        if self._samples_several is not False:
            try:
                samples = await self._sampled(inquiry, n)
                self._samples_several = len(samples) > 1
            except DataError:  # some servers reject n, others ignore it
                if self._samples_several:
                    raise
        jobs = [partial(self._sampled, inquiry, 1)] * (n - len(samples))
        samples += chain.from_iterable(await all_until_error(jobs, asyncio.Semaphore(self._spec.max_concurrency)))
        self._samples_several = bool(self._samples_several)
        options = inquiry.question.options
        votes = Counter(vote for sample in samples if (vote := _vote(sample, options)) is not None)
        if not votes:
            raise DataError(f"none of its {n} sampled answers is one of its options")
        inquiry.counts[INVALID_VOTES] = n - votes.total()
        return shares(votes, options)

    async def _sampled(self, inquiry: Inquiry, n: int) -> list[str]:
        """Return the texts of sampled answers."""
        answer = {"type": "string", "enum": list(dict.fromkeys(inquiry.question.options))}
        schema = {
            "type": "object",
            "properties": {"answer": answer},
            "required": ["answer"],
            "additionalProperties": False,
        }
        described = {"name": "answer", "strict": True, "schema": schema}
        body = conversation(self._spec, inquiry.question) | {
            "temperature": TEMPERATURE,
            "response_format": {"type": "json_schema", "json_schema": described},
        }
        answers = await self.post("/chat/completions", body | ({"n": n} if n > 1 else {}), inquiry)
        choices = value_at(answers, "choices")
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
