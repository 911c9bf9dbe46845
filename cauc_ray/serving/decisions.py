"""POST /v1/decisions: questions about one input, each answered by the cascade with calibrated probabilities.

This is what OpenAI's client sends for `client.decisions.create`. In a pool of multiple-choice questions each question
brings its own options; in one with labels, the options of a question are the labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictStr

from cauc_ray.models.answers import Batch
from cauc_ray.numbers.logits import softmax
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.inputs import objects
from cauc_ray.serving.request_state import RequestState

MOST_QUESTIONS = 400


class _Part(BaseModel):
    """A piece of text in a message or in instructions; pieces of other types are refused."""

    model_config = ConfigDict(extra="ignore")
    type: Literal["input_text", "output_text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[_Part]


class _Choice(BaseModel):
    value: StrictBool | StrictStr
    description: str = ""


class _Level(BaseModel):
    label: str = Field(min_length=1)
    description: str = ""


class _Predicate(BaseModel):
    type: Literal["predicate"]
    instructions: str | list[_Part]
    name: str | None = None


class _ChoiceQuestion(BaseModel):
    type: Literal["choice"]
    instructions: str | list[_Part]
    choices: list[_Choice] = Field(min_length=2, max_length=255)
    name: str | None = None


class _ScoreQuestion(BaseModel):
    type: Literal["score"]
    instructions: str | list[_Part]
    levels: list[_Level] = Field(min_length=2, max_length=255)
    name: str | None = None


Question = _Predicate | _ChoiceQuestion | _ScoreQuestion


class DecisionRequest(BaseModel):
    """The body of a request; what only OpenAI's own servers know is ignored."""

    model_config = ConfigDict(extra="ignore")
    model: str
    input: str | list[_Message]
    questions: list[Annotated[Question, Field(discriminator="type")]] = Field(min_length=1, max_length=MOST_QUESTIONS)

    @property
    def text(self) -> str:
        """Return the input as one text."""
        if isinstance(self.input, str):
            return self.input
        return "\n\n".join(_text(message.content) for message in self.input)


def require_decisions(labels: Sequence[str] | None, reads: Sequence[str]) -> None:
    """Raise RequestError unless models read one text; arguments as columns_of."""
    if len(reads) != 1 or (labels is None and reads[0] != "question"):
        raise RequestError(f"this service reads {', '.join(reads) or 'no text'}; ask it at /v2/models/NAME/infer")


def columns_of(
    request: DecisionRequest, labels: Sequence[str] | None, reads: Sequence[str]
) -> tuple[Batch, list[list[int] | None]]:
    """Return a row of columns for each question, and where its options are among the labels.

    Args:
        request: The request.
        labels: The pool's labels, None if each row has its own choices.
        reads: The columns of texts that the models read.

    Raises:
        RequestError: The options are not the labels.
    """
    n = len(request.questions)
    if labels is None:
        rows = [
            {
                "question": _text(question.instructions),
                "choices": [_described(*option) for option in _options(question)],
                "context": request.text,
            }
            for question in request.questions
        ]
        return {name: objects((row[name] for row in rows), n) for name in rows[0]}, [None] * n
    orders: list[list[int] | None] = []
    for index, question in enumerate(request.questions):
        names = list(labels) if question.type == "predicate" else [str(name) for name, _ in _options(question)]
        if sorted(names) != sorted(labels) or (question.type == "predicate" and len(labels) != 2):
            raise RequestError(f"question {index}: its options must be the labels of this service, {', '.join(labels)}")
        orders.append([labels.index(name) for name in names])
    return {reads[0]: objects([request.text] * n, n)}, orders


def response(
    request: DecisionRequest, answered: RequestState, orders: Sequence[list[int] | None], parameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the body of a response: for each question an answer, its stage, its cost and whether it is degraded."""
    probabilities = softmax(answered.vectors["scores"])
    answers = []
    for row, question in enumerate(request.questions):
        order = orders[row]
        shares = probabilities[row][: len(_options(question))] if order is None else probabilities[row][order]
        extra = {
            "stage": answered.policy.models[int(answered.stages[row])],
            "cost": float(answered.costs[row]),
            "degraded": bool(answered.degraded[row]),
        }
        confidence = float(answered.confidences[row])
        answers.append({**_answer(question, [float(p) for p in shares], confidence), "name": question.name, **extra})
    n_input, n_output = answered.tokens.sum(axis=0).tolist()
    usage = {
        "input_tokens": n_input,
        "input_tokens_details": {"cache_write_tokens": 0, "cached_tokens": 0},
        "output_tokens": n_output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": n_input + n_output,
    }
    return {"answers": answers, "model": request.model, "usage": usage, **parameters}


def _answer(question: Question, probabilities: list[float], confidence: float) -> dict[str, Any]:
    if isinstance(question, _Predicate):
        return {"type": "predicate", "probability": probabilities[1], "confidence": confidence}
    best = int(np.argmax(probabilities))
    if isinstance(question, _ChoiceQuestion):
        listed = [
            {"value": choice.value, "probability": p} for choice, p in zip(question.choices, probabilities, strict=True)
        ]
        chosen = question.choices[best].value
        return {"type": "choice", "choice": chosen, "confidence": confidence, "probabilities": listed}
    levels = [
        {"label": level.label, "value": value, "probability": p}
        for value, (level, p) in enumerate(zip(question.levels, probabilities, strict=True))
    ]
    score = sum(value * p for value, p in enumerate(probabilities))
    return {"type": "score", "score": score, "confidence": confidence, "probabilities": levels}


def _options(question: Question) -> list[tuple[str, str]]:
    """Return the name and the description of each option. The second one of a predicate is that it is true."""
    if isinstance(question, _Predicate):
        return [("false", ""), ("true", "")]
    if isinstance(question, _ChoiceQuestion):
        names = [str(c.value).lower() if isinstance(c.value, bool) else c.value for c in question.choices]
        return [(name, choice.description) for name, choice in zip(names, question.choices, strict=True)]
    return [(level.label, level.description) for level in question.levels]


def _described(name: str, description: str) -> str:
    return f"{name}: {description}" if description else name


def _text(content: str | list[_Part]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
