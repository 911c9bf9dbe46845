"""POST /v1/chat/completions: a message that a cascade of models which answer in words answers.

This is what OpenAI's client sends for `client.chat.completions.create`. A streamed response begins once an answer is
accepted, since a later stage may replace what an earlier one has said.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cauc_ray.models.answers import TOKENS, Batch
from cauc_ray.protocol.tensors import RequestError
from cauc_ray.serving.inputs import Inputs, objects
from cauc_ray.serving.request_state import RequestState

# The column that takes the system message, if the models read it; otherwise it precedes the user's message.
SYSTEM = "system"
# Fields that ask for more than a text, and what they are where they do not.
_AS_TEXT: Mapping[str, Sequence[Any]] = {
    "tools": (None, []),
    "functions": (None, []),
    "logprobs": (None, False),
    "modalities": (None, ["text"]),
    "response_format": (None, {"type": "text"}),
}
_NO_ANSWER = "no model of the cascade has given an answer"
_ANSWERS_ONE = "this service answers one message of a user after those of the system, without earlier turns"


class _ChatPart(BaseModel):
    """A piece of a message."""

    model_config = ConfigDict(extra="ignore")
    type: str
    text: str = ""


class _ChatMessage(BaseModel):
    model_config = ConfigDict(extra="ignore")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[_ChatPart] | None = None

    @property
    def text(self) -> str:
        """Return the content as one text. Raises RequestError for images, other content and none."""
        if isinstance(self.content, str):
            return self.content
        if not self.content:
            raise RequestError(f"the {self.role}'s message has no content")
        if unread := next((part.type for part in self.content if part.type != "text"), None):
            raise RequestError(f"a message has content of type {unread!r:.40}; models of this service read text")
        return "\n".join(part.text for part in self.content)


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="ignore")
    include_usage: bool = False


class ChatRequest(BaseModel):
    """The body of a request; parameters of sampling are ignored: the pool decides how models answer."""

    model_config = ConfigDict(extra="ignore")
    model: str
    messages: list[_ChatMessage] = Field(min_length=1)
    stream: bool = False
    stream_options: _StreamOptions | None = None
    n: int | None = None
    logprobs: bool | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    modalities: Any = None
    response_format: Any = None

    def columns(self, inputs: Inputs) -> Batch:
        """Return the message as a row of the columns that the models read.

        Args:
            inputs: What they read: one text, and perhaps `system`.

        Raises:
            RequestError: They read more, or the request asks for what no cascade gives.
        """
        if self.n not in (None, 1):
            raise RequestError(f"n must be 1: a cascade gives one answer, not {self.n}")
        if asked := next((name for name, as_text in _AS_TEXT.items() if getattr(self, name) not in as_text), None):
            raise RequestError(f"{asked} is not supported: a cascade answers in text, as its pool says")
        *before, last = self.messages
        if last.role != "user" or any(message.role not in ("system", "developer") for message in before):
            raise RequestError(_ANSWERS_ONE)
        texts = [name for name, spec in inputs.declared.items() if name != SYSTEM and spec.datatype == "BYTES"]
        if len(texts) != 1 or inputs.declared.keys() - {*texts, SYSTEM}:
            reads = ", ".join(inputs.declared) or "no declared input"
            raise RequestError(f"this service reads {reads}; ask it at /v2/models/NAME/infer")
        system = "\n\n".join(message.text for message in before)
        if SYSTEM in inputs.names:
            return {texts[0]: objects([last.text], 1), SYSTEM: objects([system], 1)}
        return {texts[0]: objects(["\n\n".join(filter(None, (system, last.text)))], 1)}


def completion(request: ChatRequest, answered: RequestState, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the body of a response that is not streamed.

    Args:
        request: The request.
        answered: Its one row.
        parameters: How it was answered, which goes into the field `cauc`.
    """
    text = _answer(answered)
    message = {"role": "assistant", "content": text, "refusal": _NO_ANSWER if text is None else None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    return {
        **_head(request, parameters, "chat.completion"),
        "choices": [choice],
        "usage": _usage(answered),
        "cauc": _details(answered, parameters),
    }


def events(request: ChatRequest, answered: RequestState, parameters: Mapping[str, Any]) -> bytes:
    """Return the body of a streamed response, server-sent events; arguments as completion."""
    return b"".join(f"data: {event}\n\n".encode() for event in _events(request, answered, parameters))


def _events(request: ChatRequest, answered: RequestState, parameters: Mapping[str, Any]) -> Iterator[str]:
    head, text = _head(request, parameters, "chat.completion.chunk"), _answer(answered)
    deltas = (
        [{"refusal": _NO_ANSWER}] if text is None else [{"content": line} for line in text.splitlines(keepends=True)]
    )
    for delta in ({"role": "assistant", "content": ""}, *deltas):
        yield json.dumps({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    end = {"index": 0, "delta": {}, "finish_reason": "stop"}
    yield json.dumps({**head, "choices": [end], "cauc": _details(answered, parameters)})
    if request.stream_options is not None and request.stream_options.include_usage:
        yield json.dumps({**head, "choices": [], "usage": _usage(answered)})
    yield "[DONE]"


def _usage(answered: RequestState) -> dict[str, int]:
    """Return the tokens of all stages that were called, as far as they report them."""
    counts = answered.tokens[0].tolist()
    return dict(zip(TOKENS, counts, strict=True)) | {"total_tokens": sum(counts)}


def _answer(answered: RequestState) -> str | None:
    text: str | None = None if answered.texts is None else answered.texts[0]
    return text


def _head(request: ChatRequest, parameters: Mapping[str, Any], what: str) -> dict[str, Any]:
    created, answer_id = int(time.time()), parameters["answer_id"]
    return {"id": f"chatcmpl-{answer_id}", "object": what, "created": created, "model": request.model}


def _details(answered: RequestState, parameters: Mapping[str, Any]) -> dict[str, Any]:
    confidence = float(answered.confidences[0])
    return {
        **parameters,
        "stage": answered.policy.models[int(answered.stages[0])],
        "confidence": confidence if np.isfinite(confidence) else None,
        "source": answered.source(0),
    }


def model_card(model: str) -> dict[str, Any]:
    """Return a cascade as OpenAI's client lists models."""
    return {"id": model, "object": "model", "created": 0, "owned_by": "cauc-ray"}
