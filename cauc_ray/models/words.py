"""Models that answer in words: what they have said, and how sure they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import AfterValidator, model_validator

from cauc_ray.errors import ConfigError, DataError
from cauc_ray.models.answers import Answers
from cauc_ray.models.kind import DeclaringSpec, Section
from cauc_ray.numbers.answer_arrays import ANSWER, CONFIDENCE, COST
from cauc_ray.numbers.answer_keys import N_KEYS, AnswerFormat, answer_keys, answer_texts, answer_vectors
from cauc_ray.numbers.answer_rules import DEFAULT_RULE, rule_of
from cauc_ray.numbers.logits import ANSWERS, LogitKind
from cauc_ray.numbers.types import Floats


def _is_rule(text: str) -> str:
    try:
        rule_of(text)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return text


# The rule by which answers are the same (numbers.answer_rules).
Rule: TypeAlias = Annotated[str, AfterValidator(_is_rule)]


class Words(Section):
    """How a model answers in words.

    Attributes:
        rule: By which answers are the same, and right: exact, number, json:FIELD, regex:PATTERN, or
            module:function, which returns an answer's normal form.
        confidences: Names of the confidences that it gives.
    """

    rule: Rule = DEFAULT_RULE
    confidences: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _has_names(self) -> Words:
        if len(set(self.confidences)) < len(self.confidences):
            raise ValueError("a confidence is listed twice")
        if "" in self.confidences:
            raise ValueError("a confidence has no name")
        return self

    @property
    def answer_format(self) -> AnswerFormat:
        """Return it as a policy compares it."""
        return AnswerFormat(self.rule, tuple(sorted(self.confidences)))


class WordsSpec(DeclaringSpec):
    """A model that scores options, or answers in words.

    Attributes:
        words: How it answers in words; null for a model that scores options.
    """

    words: Words | None = None

    @property
    def answers_kind(self) -> LogitKind:
        """Return the declared kind, that of answers in words where it gives these."""
        return super().answers_kind if self.words is None else ANSWERS

    @property
    def answer_format(self) -> AnswerFormat | None:
        """Return how it answers in words."""
        return None if self.words is None else self.words.answer_format


def in_words(
    texts: Sequence[str | None],
    confidences: Mapping[str, Floats | Sequence[float | None]],
    answer_format: AnswerFormat,
    failures: Mapping[int, str] | None = None,
    **more: Any,
) -> Answers:
    """Return what a model has said as its answers.

    Args:
        texts: (n,), None where it has no answer.
        confidences: By name, float (n,), NaN or None where it gave none.
        answer_format: The rule, and the names.
        failures: Why some rows could not be asked.
        **more: Other fields of Answers.

    Raises:
        DataError: A confidence is missing, unknown, infinite, or of another length.
    """
    if sorted(confidences) != list(answer_format.confidences):
        raise DataError(
            f"the model gave the confidences {', '.join(sorted(confidences)) or 'none'}, declared are "
            f"{', '.join(answer_format.confidences) or 'none'}"
        )
    texts = answer_texts(ANSWER, texts)
    n = len(texts)
    columns = [np.array(confidences[name], dtype=np.float64) for name in answer_format.confidences]
    for name, column in zip(answer_format.confidences, columns, strict=True):
        if column.shape != (n,) or np.isinf(column).any():
            raise DataError(f"confidence {name!r} must be {n} finite numbers, NaN where there is none")
    keys = answer_keys(rule_of(answer_format.rule).forms(texts))
    vectors = answer_vectors(keys, np.column_stack(columns) if columns else np.zeros((n, 0)))
    return Answers(vectors, texts=texts, failures=dict(failures or {}), **more)


def read_words(output: object, n: int, answer_format: AnswerFormat) -> Answers:
    """Return what a user's callable has said of n rows.

    Args:
        output: A mapping with `answer`, `confidence_<name>` and perhaps `cost`, (n,) each.
        n: Number of rows.
        answer_format: The rule, and the names of the confidences.

    Raises:
        DataError: It is no such mapping.
    """
    if isinstance(output, Answers):
        if output.texts is None or np.shape(output.logits) != (n, N_KEYS + len(answer_format.confidences)):
            raise DataError("Answers of a model that answers in words need texts")
        return output
    if not isinstance(output, Mapping) or ANSWER not in output:
        raise DataError(
            f"a model that answers in words must return a mapping with {ANSWER!r} and {CONFIDENCE}<name>, not "
            f"{type(output).__name__}"
        )
    unknown = [name for name in output if name not in (ANSWER, COST) and not str(name).startswith(CONFIDENCE)]
    if unknown:
        raise DataError(f"the model returned {unknown[0]!r}; expected {ANSWER}, {CONFIDENCE}<name> and {COST}")
    texts = answer_texts(f"the model's {ANSWER}", output[ANSWER])
    if len(texts) != n:
        raise DataError(f"the model returned {len(texts)} answers for {n} inputs")
    confidences = {
        name.removeprefix(CONFIDENCE): values for name, values in output.items() if name.startswith(CONFIDENCE)
    }
    costs = None if COST not in output else np.asarray(output[COST], dtype=np.float64)
    if costs is not None and (costs.shape != (n,) or not np.isfinite(costs).all() or (costs < 0).any()):
        raise DataError(f"the model returned costs that are not {n} finite numbers of at least 0")
    return in_words(texts, confidences, answer_format, costs=costs)
