"""Sampled votes: probabilities of options from a server that returns no log-probabilities.

The model answers each question several times at temperature 1, restricted to the options by a JSON schema. With v of k
valid answers for an option, its probability is (v + 1/K) / (k + 1): one more vote is spread over all K options, so that
none has probability 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.models.endpoint import Inquiry
from cauc_ray.models.http_client import value_at
from cauc_ray.models.sampling import SamplingModel, described
from cauc_ray.numbers.types import Floats

TEMPERATURE = 1.0
# Votes that are spread over all options.
PRIOR_VOTES = 1.0
# What Answers.counts has of votes.
INVALID_VOTES = "sampled answers that are none of the options"


class VotesModel(SamplingModel):
    """A served model whose sampled answers are votes."""

    async def ask(self, inquiry: Inquiry) -> Floats:
        """Sample answers until there are enough votes."""
        n, options = self._spec.votes or 0, inquiry.question.options
        schema = {
            "type": "object",
            "properties": {"answer": {"type": "string", "enum": list(dict.fromkeys(options))}},
            "required": ["answer"],
            "additionalProperties": False,
        }
        choices = await self.sampled(inquiry, n, {"temperature": TEMPERATURE, **described(schema)}, None)
        samples = [str(value_at(choice, "message", "content") or "") for choice in choices]
        votes = Counter(vote for sample in samples if (vote := _vote(sample, options)) is not None)
        if not votes:
            raise DataError(f"none of its {n} sampled answers is one of its options")
        inquiry.counts[INVALID_VOTES] = n - votes.total()
        return shares(votes, options)


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
