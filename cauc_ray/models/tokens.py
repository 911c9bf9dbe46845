"""Prompts and options as tokens of a language model's own vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Batch, Unusable, little, parted
from cauc_ray.models.prompts import IDS_AT_ONCE, LETTERS, Asked, LanguageSpec, Prompts
from cauc_ray.models.transformers import HubLanguageSpec
from cauc_ray.numbers.types import Floats

# Tokens of a prompt's beginning that are worth a cache.
LEAST_HEAD = 32
_KEPT_OPTIONS = 4096


@dataclass(frozen=True, slots=True)
class Tokens:
    """A question in tokens.   options: the tokens of each option.   n_bytes: the length of each option's text."""

    row: int
    prompt: list[int]
    options: tuple[list[int], ...]
    n_bytes: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest option."""
        return max(map(len, self.options))


def scored(
    spec: LanguageSpec, asked: Sequence[Tokens], logprobs: Sequence[Floats], counts: Counter[str]
) -> list[Floats]:
    """Return each question's logits from the log-likelihoods of its options: of texts those per byte, float32.

    counts: gains the questions whose options have little probability, which texts that no prompt lists always have.
    """
    per_byte = spec.answers_with == "text"
    counts.update({} if per_byte else little(logprobs))
    return [
        (own / (np.array(one.n_bytes) if per_byte else 1)).astype(np.float32)
        for one, own in zip(asked, logprobs, strict=True)
    ]


def requests(options: Iterable[Sequence[int]], *, by_token: bool = False) -> Iterator[tuple[list[int], list[int]]]:
    """Yield what an engine is asked for options: tokens that follow the prompt, and the next ones that it scores.

    Where there are no next ones, it scores those that follow the prompt: a longer option at once.   by_token: never.
    """
    following: dict[tuple[int, ...], set[int]] = {}
    longer = []
    for part in {part for option in options for part in parts(option, by_token=by_token)}:
        if len(part) == 1 or by_token:
            following.setdefault(part[:-1], set()).add(part[-1])
        else:
            longer.append((list(part), list[int]()))
    for tokens, own in following.items():
        ids = sorted(own)
        yield from ((list(tokens), ids[start : start + IDS_AT_ONCE]) for start in range(0, len(ids), IDS_AT_ONCE))
    yield from longer


def parts(option: Sequence[int], *, by_token: bool = False) -> list[tuple[int, ...]]:
    """Return the beginnings of an option whose log-probabilities, as requests scores them, add up to its own."""
    return [tuple(option[:n]) for n in range(1 if by_token else len(option), len(option) + 1)]


class Tokenizing:
    """Turns rows into tokens by a tokenizer of the transformers library, through its chat template if it has one."""

    def __init__(self, spec: HubLanguageSpec, tokenizer: Any, max_tokens: int) -> None:
        """Raise ConfigError if the tokenizer lacks a chat template that is asked for, or has no letters."""
        wanted = spec.answers_with != "text" if spec.chat_template is None else spec.chat_template
        if spec.chat_template and not tokenizer.chat_template:
            raise ConfigError(f"chat_template: {spec.model} has no chat template")
        self.chat = bool(wanted and tokenizer.chat_template)
        self.how = "through its chat template" if self.chat else "without a chat template"
        self._spec = spec
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._letters = self._letter_tokens() if spec.answers_with == "letter" else []
        self._prompts = Prompts(spec, self.chat, len(self._letters))
        # Those of labels are the same in every row.
        self._option = lru_cache(_KEPT_OPTIONS)(self._option_tokens)

    def __call__(self, batch: Batch) -> tuple[list[Tokens], dict[int, str]]:
        """Return a batch's questions in tokens, and why the other rows have none.

        Raises DataError when a column is missing.
        """
        questions, faults = self._prompts(batch)
        prompts = self.prompts([question.text for question in questions.values()])
        rows = zip(questions.items(), prompts, strict=True)
        asked, unusable = parted({row: self._tokens(row, question, prompt) for (row, question), prompt in rows})
        return [*asked.values()], faults | unusable

    def head(self) -> list[int]:
        """Return the tokens that the prompts of all rows begin with, none where they are too few to matter."""
        one, other = self.prompts([self._prompts.head + text for text in ("Q", "7 words")])
        n = next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
        return one[:n] if n >= LEAST_HEAD else []

    def _tokens(self, row: int, question: Asked, prompt: list[int]) -> Tokens | Unusable:
        """Return a question in tokens, or why it cannot be asked."""
        options = self._letters[: len(question.options)] or [self._option(option) for option in question.options]
        asked = Tokens(row, prompt, tuple(options), tuple(len(o.encode()) for o in question.options))
        n_tokens = len(asked.prompt) + asked.longest - 1
        if n_tokens > self._max_tokens:
            return Unusable(f"it has {n_tokens:,} tokens; the model takes up to {self._max_tokens:,}")
        return asked

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of prompts up to where the answer begins."""
        if self.chat:  # as texts first: what apply_chat_template returns as tokens has changed between versions
            turns = [[{"role": "user", "content": text}] for text in texts]
            settings = {**self._spec.chat_template_kwargs, "tokenize": False, "add_generation_prompt": True}
            texts = self._tokenizer.apply_chat_template(turns, **settings) if turns else []
        # At once: the tokenizer then works in threads of its own.
        tokens = self._tokenizer(list(texts), add_special_tokens=not self.chat)["input_ids"] if texts else []
        return list(tokens)

    def _option_tokens(self, option: str) -> list[int]:
        """Return the tokens of an option at the start of an answer: after a space, or first in a chat's turn."""
        text = option if self.chat else f" {option}"
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _letter_tokens(self) -> list[list[int]]:
        """Return the tokens of as many letters as are single ones. Raises ConfigError if these are fewer than two."""
        letters: list[list[int]] = []
        for letter in LETTERS:
            last = self._option_tokens(letter)[-1]
            if self._tokenizer.decode([last]).strip() != letter:
                break
            letters.append([last])
        if len(letters) < 2:
            raise ConfigError(f"{self._spec.model}: letters are not single tokens in its vocabulary; use options: text")
        return letters
