"""Chains made of answers in words that are here: for each model columns as an answer table has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from cauc_ray.errors import ConfigError, DataError, unknown_name
from cauc_ray.numbers.answer_keys import (
    NO_ANSWER,
    NONE_RIGHT,
    WRONG,
    AnswerFormat,
    agreement_keys,
    answer_keys,
    answer_texts,
    answer_vectors,
    confidences_in,
    is_missing,
)
from cauc_ray.numbers.answer_rules import DEFAULT_RULE, AnswerRule, rule_of
from cauc_ray.numbers.arrays import refuse_rows, row_ids
from cauc_ray.numbers.chain import UNKNOWN_LABEL, ChainLogits, Costs
from cauc_ray.numbers.logits import ANSWERS
from cauc_ray.numbers.types import Floats, Ints

ANSWER, CORRECT, CONFIDENCE, COST, RULE = "answer", "correct", "confidence_", "cost", "rule"


@dataclass(frozen=True, slots=True)
class AnswerColumns:
    """What one model has said of N rows.

    Attributes:
        rule: By which its answers are the same.
        texts: Its answers (N,), None where there is none.
        vectors: Of its answers, float32 (N, N_KEYS + C).
        confidences: Names of its confidences, sorted.
        correct: Int8 (N,): 1 if right, 0 if wrong, -1 if unknown; None without that column.
        costs: Of its calls, float64 (N,); None without that column.
    """

    rule: AnswerRule
    texts: Sequence[str | None]
    vectors: Floats
    confidences: tuple[str, ...]
    correct: Ints | None
    costs: Floats | None

    @classmethod
    def of(cls, place: str, columns: Any, rule: str | None = None) -> AnswerColumns:
        """Read columns, a mapping or a data frame: answer, confidence_<name>, and perhaps correct, cost and rule.

        Args:
            place: Model and split, for messages.
            columns: The columns.
            rule: By which answers are the same where the columns name none.

        Raises:
            DataError: They are not columns of answers, or one is unknown, of another length, or holds other values.
            ConfigError: The rule is unknown.
        """
        if not _are_columns(columns):
            raise DataError(f"{place}: it needs columns, of which {ANSWER!r} has a text for each row")
        values = {str(name): columns[name] for name in columns}
        by = rule_of(_rule_in(place, values.pop(RULE, None)) or rule or DEFAULT_RULE)
        texts = answer_texts(f"{place}: {ANSWER}", values.pop(ANSWER))
        numbers = {name: _numbers(place, name, column, len(texts)) for name, column in values.items()}
        names = sorted(name.removeprefix(CONFIDENCE) for name in numbers if name.startswith(CONFIDENCE))
        if unknown := sorted(numbers.keys() - {CORRECT, COST, *(CONFIDENCE + name for name in names)}):
            raise DataError(f"{place}: {unknown[0]!r} is none of {ANSWER}, {CONFIDENCE}<name>, {CORRECT} and {COST}")
        confidences = [numbers[CONFIDENCE + name] for name in names]
        keys = answer_keys(by.forms(texts))
        vectors = answer_vectors(keys, np.column_stack(confidences) if names else np.zeros((len(texts), 0)))
        correct, costs = numbers.get(CORRECT), numbers.get(COST)
        if correct is not None and not np.isin(correct[~np.isnan(correct)], (0, 1)).all():
            raise DataError(f"{place}: {CORRECT} must be true or false, or None where that is unknown")
        return cls(
            by,
            texts,
            vectors,
            tuple(names),
            None if correct is None else np.where(np.isnan(correct), -1, correct).astype(np.int8),
            None if costs is None else costs.astype(np.float32).astype(np.float64),  # as a table keeps them
        )

    @property
    def answer_format(self) -> AnswerFormat:
        """Return how the model answers, as a policy compares it."""
        return AnswerFormat(self.rule.text, self.confidences)

    @property
    def keys(self) -> Ints:
        """Return the keys of the answers, int32 (N,)."""
        return agreement_keys(self.vectors)


def _are_columns(of: Any) -> bool:
    return (isinstance(of, Mapping) or hasattr(of, "columns")) and ANSWER in of


def _rule_in(place: str, rule: Any) -> str | None:
    """Return the rule that is given, or that every row of a column has."""
    if rule is None or isinstance(rule, str):
        return rule
    rules = list(dict.fromkeys(answer_texts(f"{place}: {RULE}", rule)))
    if len(rules) != 1:
        raise DataError(f"{place}: all rows have the same {RULE}, got {rules[:5]}")
    return rules[0]


def _numbers(place: str, name: str, values: Any, n: int) -> Floats:
    try:
        numbers = np.array([np.nan if is_missing(value) else value for value in values], dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"{place}: {name} must be numbers: {error}") from error
    if numbers.shape != (n,) or np.isinf(numbers).any():
        raise DataError(f"{place}: {name} must be {n} finite numbers, got shape {numbers.shape}")
    return numbers


def holds_columns(arrays: Mapping[str, Any]) -> bool:
    """Return whether arrays by model are columns of answers in words.

    >>> holds_columns({"small": {"answer": ["Paris"], "confidence_self": [0.9]}})
    True
    """
    return any(map(_are_columns, arrays.values()))


def answer_columns_of(
    arrays: Mapping[str, Any],
    models: Sequence[str],
    source: str = "the answers",
    rules: Mapping[str, str | None] = MappingProxyType({}),
) -> dict[str, AnswerColumns]:
    """Return what models have said of the same rows, by their names.

    Raises as AnswerColumns.of, ConfigError if a model is missing, DataError where numbers of rows differ.
    """
    missing = next((model for model in models if model not in arrays), None)
    if missing is not None:
        raise ConfigError(f"{source}: {unknown_name('model', missing, arrays)}")
    places = {model: f"{source}: model {model!r}" for model in models}
    columns = {model: AnswerColumns.of(place, arrays[model], rules.get(model)) for model, place in places.items()}
    n = len(columns[models[0]].texts)
    for model, of in columns.items():
        if len(of.texts) != n:
            raise DataError(f"{places[model]} has {len(of.texts)} answers, others have {n}")
    return columns


def texts_of(answers: Iterable[tuple[Ints, Sequence[str | None]]]) -> dict[int, str]:
    """Return what keys of answers stand for: the first text of each.

    Args:
        answers: Of each model the keys of its answers, int (N,), and the answers (N,).
    """
    pairs = ((key, text) for keys, texts in answers for key, text in zip(keys.tolist(), texts, strict=True))
    return {key: text for key, text in reversed(list(pairs)) if text is not None and key != NO_ANSWER}


def answer_chain(
    answers: Mapping[str, AnswerColumns],
    labels: Any,
    *,
    costs: Costs,
    example_ids: Any = None,
    source: str = "the answers",
) -> ChainLogits:
    """Return a chain made of answers, as a table of the same rows gives.

    Args:
        answers: Of models on the same N rows, the cheapest first.
        labels: Right answers (N,), None where one is unknown; None where columns or nothing says what is right.
        costs: Of the models' calls.
        example_ids: (N,), unique, converted to str; without them row i is named "i".
        source: Name of the answers, for messages.

    Raises:
        ConfigError: There are both labels and columns of what is right.
        DataError: There is another number of labels, or an answer that is missing is right.
    """
    n = len(next(iter(answers.values())).texts)
    ids = row_ids(source, example_ids, n)
    correct = []
    for model, columns in answers.items():
        place = f"{source}: model {model!r}"
        right = np.full(n, -1, dtype=np.int8) if columns.correct is None else columns.correct
        if labels is not None:
            if columns.correct is not None:
                raise ConfigError(f"{place} has a column {CORRECT!r}: leave labels out, or the column")
            right = _matches(place, columns, labels)
        refuse_rows(place, ids, (columns.keys == NO_ANSWER) & (right == 1), lambda row: "it is right without an answer")
        correct.append(right)
    all_labels, named = joined_answers(np.column_stack([of.keys for of in answers.values()]), np.column_stack(correct))
    return ChainLogits(
        models=tuple(answers),
        logits=tuple(
            answer_vectors(of.keys, confidences_in(of.vectors), names)
            for of, names in zip(answers.values(), named, strict=True)
        ),
        example_ids=ids,
        labels=all_labels,
        costs=costs,
        per_call_costs=costs.per_call.ndim == 2,
        source=source,
        logit_kind=(ANSWERS,) * len(answers),
    )


def _matches(place: str, columns: AnswerColumns, labels: Any) -> Ints:
    """Return whether answers are the right ones, int8 (N,), -1 where no right one is known."""
    texts = answer_texts(f"{place}: the labels", labels)
    if len(texts) != len(columns.texts):
        raise DataError(f"{place} has {len(columns.texts)} answers for {len(texts)} labels")
    references = columns.rule.references(texts)
    matches = columns.keys == answer_keys(references)
    return np.where([reference is None for reference in references], -1, matches).astype(np.int8)


def joined_answers(keys: Ints, correct: Ints) -> tuple[Ints, list[Ints]]:
    """Return the labels of examples, int32 (N,), and what predictions name of each model's answers, int32 (N,) each.

    An example's label is the key of a right answer of the first model that has one; it is unknown where it is unknown
    of some model whether it is right.

    Args:
        keys: Of the answers, int32 (N, M).
        correct: Int8 (N, M): 1 if right, 0 if wrong, -1 if unknown.
    """
    n, right, correct = np.arange(len(keys)), correct == 1, correct.copy()
    labels = np.where(right.any(axis=1), keys[n, right.argmax(axis=1)], NONE_RIGHT).astype(np.int32)
    for column in range(keys.shape[1]):  # an answer that is not judged may be one that is, by another model
        same = (keys == keys[:, [column]]) & (correct >= 0)
        of_same = correct[n, same.argmax(axis=1)]
        judged = np.where(same.any(axis=1), of_same, np.where(keys[:, column] == NO_ANSWER, 0, -1))
        correct[:, column] = np.where(correct[:, column] < 0, judged, correct[:, column])
    labels[(correct < 0).any(axis=1)] = UNKNOWN_LABEL
    same_words = keys == labels[:, None]
    named = np.where(correct == 1, labels[:, None], np.where(same_words, WRONG, keys))
    named = np.where(labels[:, None] == UNKNOWN_LABEL, keys, named)
    return labels, list(named.astype(np.int32).T)
