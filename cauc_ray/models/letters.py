"""From a server's log-probabilities of its answer's first token to a logit for each option's letter.

K is a question's number of options.
"""

from __future__ import annotations

import math
import string
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cauc_ray.data.prompts import LETTERS
from cauc_ray.errors import DataError
from cauc_ray.numbers.types import Floats

# The likeliest first tokens and their log-probabilities, in nats.
Alternatives: TypeAlias = Sequence[tuple[str, float]]

# White space and its substitutes in vocabularies: sentencepiece's space, byte-level BPE's space and new line.
_SPACE = string.whitespace + "▁ĠĊ"
# Servers report tokens that are too unlikely as -9999.
_UNSAID = -9999.0
# Where the returned probabilities add up to 1 or more, what is left is below the rounding of float32 numbers near 1.
_LEAST_LEFT = 2.0**-24
_SHOWN_TOKENS = 5


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


def value_at(answer: Any, *path: str | int) -> Any:
    """Return the value at a path in parsed JSON, None if the path does not exist."""
    for key in path:
        try:
            answer = answer[key]
        except (KeyError, IndexError, TypeError):
            return None
    return answer
