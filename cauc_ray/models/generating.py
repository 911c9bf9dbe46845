"""Models that generate answers: what is asked for, and what is read from the texts that they have sampled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from pydantic import Field, model_validator

from cauc_ray.models.chat import without_thoughts
from cauc_ray.models.prompts import ImagePromptSpec
from cauc_ray.models.words import Words
from cauc_ray.numbers.answer_keys import AnswerFormat
from cauc_ray.numbers.answer_rules import rule_of
from cauc_ray.numbers.logits import ANSWERS, LogitKind

Confidence: TypeAlias = Literal["sequence", "mean", "verbal", "samples"]
# A token's bytes, and its log-probability in nats.
ScoredToken: TypeAlias = tuple[bytes, float]
# Servers report tokens that are too unlikely with less.
_LEAST_LOGPROB = -9999.0
# Temperature of one sample, and of several.
_GREEDY, _SAMPLED = 0.0, 1.0


class Generation(Words):
    """What a model generates.

    Attributes:
        max_tokens: Most tokens of an answer.
        json_schema: Schema of the object that it must answer with; by default free text, or with verbal an object of
            the two fields.
        answer_field: Field of that object that is the answer; null for the whole object.
        confidences: sequence, the log-probability of the answer's tokens; mean, the same per token; verbal, a second
            field of the object; samples, the share of samples that give the answer.
        confidence_field: Field of the verbal confidence.
        samples: Number of answers to sample; the most frequent one is the answer.
        temperature: Of sampling, by default 0 for one sample and 1 for several.
    """

    confidences: tuple[Confidence, ...] = ("sequence",)
    max_tokens: int = Field(default=256, ge=1)
    json_schema: dict[str, Any] | None = None
    answer_field: str | None = "answer"
    confidence_field: str = "confidence"
    samples: int = Field(default=1, ge=1, le=128)
    temperature: float | None = Field(default=None, ge=0, le=2)

    @model_validator(mode="after")
    def _can_be_read(self) -> Generation:
        if ("samples" in self.confidences) != (self.samples > 1):
            raise ValueError("samples above 1 and the confidence samples belong together")
        if self.samples > 1 and self.temperature == 0:
            raise ValueError("samples at temperature 0 are all alike")
        fields = [self.answer_field] + [self.confidence_field] * ("verbal" in self.confidences)
        if self.json_schema is None:
            if {"answer_field", "confidence_field"} & self.model_fields_set and "verbal" not in self.confidences:
                raise ValueError("answer_field and confidence_field are fields of json_schema")
        else:
            declared = self.json_schema.get("properties")
            properties = declared if isinstance(declared, dict) else {}
            if missing := [name for name in fields if name is not None and name not in properties]:
                raise ValueError(f"json_schema has no property {missing[0]!r}")
        if len(set(fields)) < len(fields):
            raise ValueError("answer_field and confidence_field must differ")
        if self.answer_field is None and "verbal" in self.confidences and self.json_schema is None:
            raise ValueError("answer_field: null needs json_schema")
        return self

    @property
    def schema_sent(self) -> dict[str, Any] | None:
        """Return the schema of answers, None for free text."""
        if self.json_schema is not None or "verbal" not in self.confidences:
            return self.json_schema
        about = "Probability that the answer is right, from 0 to 1."
        properties = {
            str(self.answer_field): {"type": "string"},
            self.confidence_field: {"type": "number", "description": about},
        }
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties),
            "additionalProperties": False,
        }

    @property
    def reads_tokens(self) -> bool:
        """Return whether a confidence is made of the tokens' log-probabilities."""
        return not {"sequence", "mean"}.isdisjoint(self.confidences)

    @property
    def heat(self) -> float:
        """Return the temperature of sampling."""
        default = _GREEDY if self.samples == 1 else _SAMPLED
        return default if self.temperature is None else self.temperature


class GeneratingSpec(ImagePromptSpec):
    """A language model that chooses among options, or generates an answer.

    Attributes:
        generate: How it generates answers, in a pool of task generation; null for a model that chooses.
    """

    generate: Generation | None = None

    @model_validator(mode="after")
    def _has_no_options(self) -> GeneratingSpec:
        if self.generate is not None and (self.labels is not None or self.options is not None):
            raise ValueError("generate is for answers in words, which have neither labels nor options")
        return self

    @property
    def answer_format(self) -> AnswerFormat | None:
        """Return how it answers in words."""
        return None if self.generate is None else self.generate.answer_format

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits, that of answers in words where it generates."""
        return super().answers_kind if self.generate is None else ANSWERS

    @property
    def shown(self) -> str:
        """Return the prompt as one text, with the schema of the answer if there is one."""
        schema = None if self.generate is None else self.generate.schema_sent
        return super().shown + ("" if schema is None else f"\n\n{json.dumps(schema, ensure_ascii=False)}")


@dataclass(frozen=True, slots=True)
class Sample:
    """An answer that a model has sampled.

    Attributes:
        text: The answer, None if there is none.
        logprobs: Of its tokens, None where they are unknown.
        verbal: How sure the model says that it is, NaN if it does not.
    """

    text: str | None
    logprobs: tuple[float, ...] | None = None
    verbal: float = np.nan


def read_sample(asked: Generation, content: str | None, tokens: Sequence[ScoredToken] | None) -> Sample:
    """Return what a generated text says; no answer for one that is none by the schema.

    Args:
        asked: What was asked for.
        content: The text, None if the model refuses.
        tokens: Its tokens, thoughts and ends of turns included; None where they are unknown.
    """
    whole = (content or "").strip()
    text = without_thoughts(whole).strip()
    if not text:
        return Sample(None)
    start, end, verbal, answer = 0, len(text), np.nan, text
    if asked.schema_sent is not None:
        try:
            fields = json.loads(text)
            if asked.answer_field is not None:
                value = fields[asked.answer_field]
                answer = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                start, end = _place(text, asked.answer_field)
            if "verbal" in asked.confidences:
                verbal = _number(fields.get(asked.confidence_field))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return Sample(None)
    logprobs = None if tokens is None else _logprobs(tokens, whole, len(text) - start, len(text) - end)
    return Sample(answer.strip() or None, logprobs, verbal)


def answer_of(asked: Generation, samples: Sequence[Sample]) -> tuple[str | None, list[float]]:
    """Return the most frequent answer of samples, the first among equals, and its confidences by their sorted names.

    Confidences other than the share are means over the samples that give it; NaN where none has one.
    """
    forms = rule_of(asked.rule).forms([sample.text for sample in samples])
    counts = Counter(form for form in forms if form is not None)
    if not counts:
        return samples[0].text, [np.nan] * len(asked.confidences)
    likeliest, n = counts.most_common(1)[0]
    agreeing = [sample for sample, form in zip(samples, forms, strict=True) if form == likeliest]
    scored = [sample.logprobs for sample in agreeing if sample.logprobs]
    values = {
        "samples": n / len(samples),
        "verbal": _mean([sample.verbal for sample in agreeing if sample.verbal == sample.verbal]),
        "sequence": _mean([sum(logprobs) for logprobs in scored]),
        "mean": _mean([sum(logprobs) / len(logprobs) for logprobs in scored]),
    }
    return agreeing[0].text, [values[name] for name in asked.answer_format.confidences]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else np.nan


def _number(value: object) -> float:
    """Return a number, or a text that is one; NaN for anything else."""
    try:
        number = float(value) if isinstance(value, int | float | str) else np.nan
    except (ValueError, OverflowError):
        return np.nan
    return number if np.isfinite(number) else np.nan


def _place(text: str, field: str) -> tuple[int, int]:
    """Return where the value of an object's field begins and ends in its JSON text, without the quotes of a text."""
    read, at, place = json.JSONDecoder().raw_decode, text.index("{") + 1, (0, len(text))
    while text[at] != "}":
        if text[at] != '"':  # white space, or a comma
            at += 1
            continue
        name, at = read(text, at)
        start = text.index(":", at) + 1
        while text[start].isspace():
            start += 1
        value, at = read(text, start)
        if name == field:  # the last of several, as json.loads has it
            place = (start + 1, at - 1) if isinstance(value, str) else (start, at)
    return place


def _logprobs(tokens: Sequence[ScoredToken], whole: str, start: int, end: int) -> tuple[float, ...] | None:
    """Return the log-probabilities of the tokens of an answer; None where the text is not that of the tokens.

    They may have more than the text: thoughts before it, and the end of the turn. A token without text begins a
    character that the next one ends.

    Args:
        tokens: The tokens.
        whole: The text, without white space around it.
        start: Where the answer begins, as the number of letters from there to the end of the text.
        end: Where it ends, likewise.
    """
    joined, text = b"".join(token for token, _ in tokens), whole.encode(errors="replace")
    # Thoughts and the end of the turn may have the text, too.
    before = joined.find(text) if joined.lstrip().startswith(text) else joined.rfind(text)
    if before < 0:
        return None
    first, last = (before + len(whole[: len(whole) - rest].encode(errors="replace")) for rest in (start, end))
    logprobs, at = [], 0
    for token, logprob in tokens:
        if at < last and at + max(len(token), 1) > first:
            logprobs.append(min(max(logprob, _LEAST_LOGPROB), 0.0))
        at += len(token)
    return tuple(logprobs)
