"""Prompts and options as tokens of a language model's own vocabulary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Batch, Unusable, little, parted
from cauc_ray.models.prompts import IDS_AT_ONCE, LETTERS, Asked, LanguageSpec, Prompts
from cauc_ray.models.transformers import HubLanguageSpec
from cauc_ray.numbers.types import Floats

# Tokens of a prompt's beginning that are worth a cache.
LEAST_HEAD = 32


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


def at_once(ids: Iterable[int]) -> list[list[int]]:
    """Return tokens in their order, as many at a time as vLLM scores in one request."""
    listed = sorted(set(ids))
    return [listed[start : start + IDS_AT_ONCE] for start in range(0, len(listed), IDS_AT_ONCE)]


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
        self._prompts = Prompts(spec, self.chat)
        self._options: dict[str, list[int]] = {}
        self._letters = self._letter_tokens() if spec.answers_with == "letter" else []

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
        n = len(question.options)
        if self._letters and n > len(self._letters):
            return Unusable(
                f"it has {n} options, more than the {len(self._letters)} letters; options: text takes any number"
            )
        options = self._letters[:n] or [self._option(option) for option in question.options]
        asked = Tokens(row, prompt, tuple(options), tuple(len(o.encode()) for o in question.options))
        n_tokens = len(asked.prompt) + asked.longest - 1
        if n_tokens > self._max_tokens:
            return Unusable(f"it has {n_tokens:,} tokens; the model takes up to {self._max_tokens:,}")
        return asked

    def prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of prompts up to where the answer begins."""
        settings = dict(self._spec.chat_template_kwargs)
        if self.chat:  # as texts first: what apply_chat_template returns as tokens has changed between versions
            texts = [
                self._tokenizer.apply_chat_template(
                    [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True, **settings
                )
                for text in texts
            ]
        # At once: the tokenizer then works in threads of its own.
        tokens = self._tokenizer(list(texts), add_special_tokens=not self.chat)["input_ids"] if texts else []
        return list(tokens)

    def _option(self, option: str) -> list[int]:
        """Return an option's tokens; those of labels are the same in every row."""
        if option in self._options:
            return self._options[option]
        tokens = self._encoded(option if self.chat else f" {option}")
        if self._spec.labels is not None:
            self._options[option] = tokens
        return tokens

    def _encoded(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _letter_tokens(self) -> list[list[int]]:
        """Return the letters' tokens at the start of an answer: after a space, or first in a chat's turn.

        Returns as many letters as are single tokens. Raises ConfigError if these are fewer than two.
        """
        letters: list[list[int]] = []
        for letter in LETTERS:
            last = self._encoded(letter if self.chat else f" {letter}")[-1]
            if self._tokenizer.decode([last]).strip() != letter:
                break
            letters.append([last])
        if len(letters) < 2:
            raise ConfigError(f"{self._spec.model}: letters are not single tokens in its vocabulary; use options: text")
        return letters
