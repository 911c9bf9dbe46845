"""Prompts and options as tokens of a language model's own vocabulary.

One rule holds for every backend. A prompt is encoded jointly with each of its options. Tokens that the prompt alone and
all of these share are the prompt's; an option's score is the sum over its tokens after them. With names it includes the
end of the answer, so that a label is not beaten by its own beginning.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Batch, Unusable, little, parted
from cauc_ray.models.chat import ChatTemplate, special_tokens
from cauc_ray.models.passes import texts_in
from cauc_ray.models.prompts import IDS_AT_ONCE, LETTERS, Asked, LanguageSpec, Prompts
from cauc_ray.models.transformers import HubLanguageSpec
from cauc_ray.numbers.types import Floats

# Tokens of a prompt's beginning that are worth a cache.
LEAST_HEAD = 32
# The prompt's last tokens by which options' tokens are remembered, and how many such ends.
_KEY_TOKENS, _MAX_KEYS = 3, 256


@dataclass(frozen=True, slots=True)
class Tokens:
    """A question in tokens.

    Attributes:
        row: Row of the batch.
        prompt: Tokens of the prompt.
        options: Tokens of each option after the prompt.
        n_bytes: Length of each option's text in UTF-8.
    """

    row: int
    prompt: list[int]
    options: tuple[list[int], ...]
    n_bytes: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest option."""
        return max(map(len, self.options))


def shared_tokens(encodings: Sequence[list[int]]) -> list[int]:
    """Return the tokens that all encodings begin with."""
    first, last = min(encodings), max(encodings)
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))]


class Continuations(NamedTuple):
    """The tokens of a prompt, and those of each option after them."""

    prompt: list[int]
    options: tuple[list[int], ...]

    @classmethod
    def of(cls, prompts: Iterable[list[int]], joint: Sequence[list[int]]) -> Continuations:
        """Split joint encodings of a prompt with its options.

        Args:
            prompts: Encodings of the prompt without an option. None for letters: a piece that all of these begin
                with, such as the space of sentencepiece, is the prompt's.
            joint: Encodings of the prompt with each option.
        """
        shared = shared_tokens([*prompts, *joint])
        return cls(shared, tuple(tokens[len(shared) :] for tokens in joint))


class RememberedOptions:
    """The tokens of options that are the same in every row, by the last tokens of the prompt.

    A sequence of byte pairs is an encoding exactly if each two neighbours in it are one; other models encode word by
    word. So prompts that end alike are continued alike.
    """

    def __init__(self) -> None:
        # Tokens of the prompt alone that the option changes, tokens in their place, and those of the options.
        self._by_end: dict[tuple[int, ...], tuple[int, list[int], tuple[list[int], ...]]] = {}

    def add(self, prompt: list[int], joint: Continuations) -> None:
        """Remember what follows the encoding of a prompt alone."""
        n_shared = len(shared_tokens([prompt, joint.prompt]))
        n_changed = len(prompt) - n_shared
        if n_changed < _KEY_TOKENS:
            if len(self._by_end) >= _MAX_KEYS:
                self._by_end.clear()
            self._by_end[tuple(prompt[-_KEY_TOKENS:])] = n_changed, joint.prompt[n_shared:], joint.options

    def find(self, prompt: list[int]) -> Continuations | None:
        """Return the continuations of a prompt, None where they must be encoded."""
        if (entry := self._by_end.get(tuple(prompt[-_KEY_TOKENS:]))) is None:
            return None
        n_changed, replacement, options = entry
        return Continuations(prompt[: len(prompt) - n_changed] + replacement, options)


def scored(
    spec: LanguageSpec, questions: Sequence[Tokens], logprobs: Sequence[Floats], counts: Counter[str]
) -> list[Floats]:
    """Return each question's logits from the log-likelihoods of its options.

    Args:
        spec: How options are scored: texts by byte.
        questions: Questions in tokens.
        logprobs: Log-likelihood of each option, (K,) for each question.
        counts: Updated in place: questions whose options have little probability. Texts always have, since no prompt
            lists them.

    Returns:
        Logits, float32 (K,) for each question.
    """
    per_byte = spec.answers_with == "text"
    counts.update({} if per_byte else little(logprobs))
    pairs = zip(questions, logprobs, strict=True)
    return [(total / (np.array(one.n_bytes) if per_byte else 1)).astype(np.float32) for one, total in pairs]


def next_tokens(options: Iterable[Sequence[int]]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield what an engine must score for options: the tokens that follow the prompt, and the ones that come next.

    A prefix cache makes this cheaper than the log-probabilities of whole prompts.
    """
    following: dict[tuple[int, ...], set[int]] = {}
    for option in options:
        for n, token in enumerate(option):
            following.setdefault(tuple(option[:n]), set()).add(token)
    for before, tokens in following.items():
        ids = sorted(tokens)
        yield from ((list(before), ids[start : start + IDS_AT_ONCE]) for start in range(0, len(ids), IDS_AT_ONCE))


def log_likelihoods(options: Iterable[Sequence[int]], logprobs: Mapping[tuple[int, ...], float]) -> Floats:
    """Return options' log-likelihoods, float64 (K,), from the log-probability of the last token of each beginning."""
    return np.array([sum(logprobs[tuple(option[: n + 1])] for n in range(len(option))) for option in options])


def tokens_of(
    row: int, question: Asked, joint: Continuations, *, letters: bool, max_tokens: int | None = None
) -> Tokens | Unusable:
    """Return a question in tokens, or why it cannot be scored."""
    options = joint.options[: len(question.options)]
    if letters and any(len(option) != 1 for option in options):
        return Unusable("the letters of its options are not single tokens after its prompt; use options: name or text")
    if not joint.prompt or not all(options):
        return Unusable("its prompt or one of its options has no token of its own")
    tokens = Tokens(row, joint.prompt, options, tuple(len(option.encode()) for option in question.options))
    n_tokens = len(tokens.prompt) + tokens.longest - 1
    if max_tokens is not None and n_tokens > max_tokens:
        return Unusable(f"it has {n_tokens:,} tokens; the model takes up to {max_tokens:,}")
    return tokens


class Tokenizing:
    """Turns rows into tokens by a tokenizer of the transformers library, through its chat template if it has one."""

    def __init__(self, spec: HubLanguageSpec, tokenizer: Any, max_tokens: int) -> None:
        """Read the tokenizer's special tokens and chat template.

        Raises:
            ConfigError: The tokenizer lacks a chat template that is required, its template opens a thought, or letters
                are not single tokens.
        """
        uses_template = spec.answers_with != "text" if spec.chat_template is None else spec.chat_template
        with_images = bool(spec.image_columns)
        if (spec.chat_template or with_images) and not tokenizer.chat_template:
            setting = "image" if with_images else "chat_template"
            raise ConfigError(f"{setting}: {spec.model} has no chat template")
        chat = None
        if uses_template and tokenizer.chat_template:
            chat = ChatTemplate(spec.model, tokenizer, spec.chat_template_kwargs, with_images=with_images)
        self._spec, self._tokenizer, self._max_tokens, self._chat = spec, tokenizer, max_tokens, chat
        self.source = chat.source if chat else "without a chat template"
        self._special = chat.special if chat else special_tokens(tokenizer)
        # Whether the tokenizer adds its special tokens, how many come last, and whether those in texts are text.
        self._adds_special, self._as_text = chat is None, False
        mask = tokenizer("Q", return_special_tokens_mask=True)["special_tokens_mask"]
        self._n_after = len(list(itertools.takewhile(bool, reversed(mask))))
        self._before = chat.before if chat else " "
        self._after = (chat.end if chat else "\n") if spec.answers_with == "name" else ""
        self._letters = spec.answers_with == "letter"
        self._fixed = LETTERS[: self._n_letters()] if self._letters else spec.label_names
        self._prompts = Prompts(spec, chat is not None, len(self._fixed or ""))
        # Special tokens of the prompt's own text are meant as such; one that begins with BOS is complete.
        self._as_text = chat is None and not self._special.search(self._prompts.shown)
        self._adds_special &= not (tokenizer.bos_token and self._prompts.shown.startswith(tokenizer.bos_token))
        self._remembered = RememberedOptions()

    def __call__(self, batch: Batch) -> tuple[list[Tokens], dict[int, str]]:
        """Return a batch's questions in tokens, and why the other rows have none.

        Raises DataError when a column is missing.
        """
        questions, faults = self._prompts(batch)
        safe, unsafe = parted({row: self._without_control(batch, row, one) for row, one in questions.items()})
        texts = self._rendered([question.text for question in safe.values()])
        joint = self._with_options(texts, self._encode(texts), [question.options for question in safe.values()])
        check = partial(tokens_of, letters=self._letters, max_tokens=self._max_tokens)
        rows = zip(safe.items(), joint, strict=True)
        asked, unusable = parted({row: check(row, question, split) for (row, question), split in rows})
        return [*asked.values()], faults | unsafe | unusable

    def head(self) -> list[int]:
        """Return the tokens that the prompts of all rows begin with, none where they are too few to matter."""
        head = shared_tokens(self._encode(self._rendered([self._prompts.head + text for text in ("Q", "7 words")])))
        return head if len(head) >= LEAST_HEAD else []

    def _without_control(self, batch: Batch, row: int, question: Asked) -> Asked | Unusable:
        """Return a question, or why it cannot be asked: its row would be read as more than text."""
        if self._as_text:
            return question
        columns = [name for name in self._spec.columns_read.names or () if name in batch]
        mark = self._special.search(" ".join(texts_in(batch[name][row] for name in columns)))
        return question if mark is None else Unusable(f"its text has {mark[0]!r}, a control token of the model")

    def _with_options(
        self, texts: Sequence[str], prompts: Sequence[list[int]], options: Sequence[tuple[str, ...]]
    ) -> list[Continuations]:
        """Return prompts, as texts and alone in tokens, with their options."""
        if self._fixed:
            return [self._with_fixed(text, prompt) for text, prompt in zip(texts, prompts, strict=True)]
        whole = [self._text(text, name) for text, names in zip(texts, options, strict=True) for name in names]
        encoded = iter(self._encode(whole))
        joint = [list(itertools.islice(encoded, len(names))) for names in options]
        return [Continuations.of([prompt], tokens) for prompt, tokens in zip(prompts, joint, strict=True)]

    def _with_fixed(self, text: str, prompt: list[int]) -> Continuations:
        """Return a prompt with the options of all rows."""
        joint = self._remembered.find(prompt)
        if joint is None:
            encoded = self._encode([self._text(text, option) for option in self._fixed or ()])
            joint = Continuations.of([] if self._letters else [prompt], encoded)
            self._remembered.add(prompt, joint)
        return joint

    def _text(self, prompt: str, option: str) -> str:
        return f"{prompt}{self._before}{option}{self._after}"

    def _rendered(self, texts: Sequence[str]) -> list[str]:
        """Return the texts of prompts up to where the answer begins."""
        return self._chat.prompts(texts) if self._chat else list(texts)

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts, at once: the tokenizer then works in threads of its own."""
        if not texts:
            return []
        settings = {"add_special_tokens": self._adds_special, "split_special_tokens": self._as_text}
        encoded = self._tokenizer(list(texts), **settings)["input_ids"]
        n_after = self._n_after if self._adds_special else 0
        return [tokens[: len(tokens) - n_after] for tokens in encoded]

    def _n_letters(self) -> int:
        """Return how many letters are single tokens. Raises ConfigError if these are fewer than two."""
        (prompt,) = self._rendered(["Q\nAnswer:"])
        encoded = self._encode([self._text(prompt, letter) for letter in LETTERS])
        for n in range(len(LETTERS), 1, -1):
            _, letters = Continuations.of([], encoded[:n])
            if all(len(letter) == 1 for letter in letters) and len({*map(tuple, letters)}) == n:
                return n
        raise ConfigError(f"{self._spec.model}: letters are not single tokens in its vocabulary; use options: text")
