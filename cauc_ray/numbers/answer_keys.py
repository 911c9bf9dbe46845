"""Answers in words as numbers, in place of logits: keys of what was said, and the confidences in it.

A model that says something gives a vector of float32 for each row: the key of its answer, the key by which answers of
several models agree, each in two numbers that float32 holds exactly, then its confidences, -inf where it gave none.
Equal answers have equal keys. Different ones share a key by chance once in 2^31.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cauc_ray.errors import DataError
from cauc_ray.numbers.logits import ANSWERS, LogitKind
from cauc_ray.numbers.types import Floats, Ints

# The key of a row without an answer; the label of a row on which no model is right; and what predictions name of an
# answer that is wrong although its words are those of a right one.
NO_ANSWER, NONE_RIGHT, WRONG = 0, 1, 2
NOT_SAID = {NO_ANSWER: "no answer", NONE_RIGHT: "no model is right", WRONG: "wrong, in the words of a right answer"}
_FIRST_KEY = 3
_LOW_BITS = 16
# Columns before the confidences: two of the key of what was said, two of that by which answers agree.
N_KEYS = 4
_MISSING = frozenset({"None", "nan", "<NA>", "NaT"})
_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class AnswerFormat:
    """How a model answers in words.

    Attributes:
        rule: By which its answers are the same.
        confidences: Names of its confidences, sorted.
    """

    rule: str
    confidences: tuple[str, ...]


def answer_texts(source: str, values: Any) -> list[str | None]:
    """Return answers as texts that any file can store, None where there is none.

    Args:
        source: What they are, for messages.
        values: A text for each row, missing where there is none; bytes are UTF-8.

    Raises:
        DataError: They are not a sequence.
    """
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise DataError(f"{source} must be a text for each row, got {type(values).__name__}")
    texts = (value.decode(errors="replace") if isinstance(value, bytes) else value for value in values)
    return [None if is_missing(text) else str(text).encode(errors="replace").decode() for text in texts]


def is_missing(value: Any) -> bool:
    """Return whether a value is None, or what NumPy and pandas have for it.

    >>> is_missing(None), is_missing(float("nan")), is_missing("nan")
    (True, True, False)
    """
    return not isinstance(value, str) and str(value) in _MISSING


def answer_keys(texts: Sequence[str | None]) -> Ints:
    """Return the keys of answers, int32 (n,), from 3 to 2^31 - 1; NO_ANSWER where there is none.

    >>> first, second, none = answer_keys(["Paris", "Rome", None])
    >>> bool(first != second), int(none)
    (True, 0)
    """
    keys: Ints = np.fromiter(map(_key, texts), dtype=np.int32, count=len(texts))
    return keys


def _key(text: str | None) -> int:
    if text is None:
        return NO_ANSWER
    digest = int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
    return _FIRST_KEY + digest % (2**31 - _FIRST_KEY)


def answer_vectors(keys: Ints, confidences: Floats, predicted: Ints | None = None) -> Floats:
    """Return answers as a policy reads them, float32 (n, N_KEYS + C).

    Args:
        keys: Of the answers, int (n,).
        confidences: Float (n, C); NaN or -inf where a row has none.
        predicted: Keys that predictions name where they are not those of the answers, int (n,): of answers that are
            right although their words differ.
    """
    halves = [
        half for of in (keys if predicted is None else predicted, keys) for half in (of >> _LOW_BITS, of & 0xFFFF)
    ]
    numbers = np.clip(np.where(np.isneginf(confidences), np.nan, confidences), -_LARGEST, _LARGEST)
    vectors = np.column_stack([*halves, numbers]).astype(np.float32)
    vectors[np.isnan(vectors)] = -np.inf
    return vectors


def said_keys(vectors: Floats) -> Ints:
    """Return the keys that predictions name, int32 (n,).   vectors: of answer_vectors.

    >>> said_keys(answer_vectors(np.array([7, 2**31 - 1]), np.zeros((2, 1)))).tolist()
    [7, 2147483647]
    """
    return joined_keys(vectors[:, :2])


def agreement_keys(vectors: Floats) -> Ints:
    """Return the keys by which answers agree, int32 (n,).   vectors: of answer_vectors."""
    return joined_keys(vectors[:, 2:N_KEYS])


def confidences_in(vectors: Floats) -> Floats:
    """Return the confidences, float64 (n, C), NaN where a row has none.   vectors: of answer_vectors."""
    confidences = vectors[:, N_KEYS:].astype(np.float64)
    confidences[np.isneginf(confidences)] = np.nan
    return confidences


def are_vectors(rows: Any) -> bool:
    """Return whether rows are answers as answer_vectors has them.

    >>> are_vectors(answer_vectors(np.array([7]), np.array([[0.5]]))), are_vectors(np.array([["Paris"]]))
    (True, False)
    """
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] < N_KEYS or rows.dtype.kind != "f":
        return False
    halves = rows[:, :N_KEYS]
    return bool(((halves >= 0) & (halves < [1 << 15, 1 << _LOW_BITS] * 2) & (halves == np.floor(halves))).all())


def own_answer(logits: Floats, kind: LogitKind) -> Ints:
    """Return a model's own answers, int (N,): the likeliest options, or the keys of what it has said."""
    return said_keys(logits) if kind == ANSWERS else logits.argmax(axis=1)


def joined_keys(halves: Floats) -> Ints:
    """Return keys, int32 (n,), from the two columns that hold them, float (n, 2)."""
    high, low = halves.astype(np.int64).T
    keys: Ints = ((high << _LOW_BITS) | low).astype(np.int32)
    return keys
