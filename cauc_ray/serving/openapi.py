"""What the OpenAPI page says of each address: what FastAPI's decorators of routes take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from cauc_ray.serving import schemas
from cauc_ray.serving.schemas import Schema

DESCRIPTION = (
    "A calibrated cascade of models behind the Open Inference Protocol v2. Each row is answered by the cheapest stage "
    "that is confident enough; the response says which stages were called and what they cost."
)
Says: TypeAlias = dict[str, Any]

_JSON, _BYTES = "application/json", "application/octet-stream"
_RAW: Schema = {"type": "string", "format": "binary"}
_LENGTH = "Inference-Header-Content-Length"
_ETAG: Mapping[str, Any] = {"ETag": {"schema": schemas.TEXT, "description": "of this version of the policy"}}
_HEADERS: Mapping[int, Mapping[str, Any]] = {
    401: {"WWW-Authenticate": {"schema": schemas.TEXT}},
    429: {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}},
    503: {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}},
}
_INFER_ERRORS = {
    400: "The request is malformed.",
    413: "The body is too long, or has too many rows.",
    415: "The body's Content-Encoding is not known here.",
    422: "A model cannot answer a row.",
    429: "There is too much to do; Retry-After says when to try again.",
    503: "A stage that is needed is down, late or failing.",
}
_SET_ERRORS = {
    400: "The request is malformed.",
    403: "The service has no token for this.",
    409: "The policy does not fit what runs, and the one before stays; or another change has replaced it at once.",
    412: "Another version than that of If-Match is in force.",
    413: "The body is too long.",
    503: "The store of policies does not answer.",
}
_POLICY_ERRORS = {503: "The store of policies does not answer."}
_FEEDBACK_ERRORS = {400: "The feedback makes no sense.", 413: "The body is too long, or has too many rows."}
_WATCH_ERRORS = {503: "Not every replica has answered."}
_UNKNOWN = {404: "There is no such model or version."}
_UNAUTHORIZED = {401: "No token, or none that is valid here."}


@dataclass(frozen=True, slots=True)
class Pages:
    """What is said of each address of one model.

    model, version: in the addresses.   request: the schema of a request for inference, and an example of one.
    infer_asks, policy_asks, change_asks: whether requests for inference, for the policy and for its change need a
    token; how a token is sent is FastAPI's to say.
    """

    model: str
    version: str
    request: Schema
    example: Mapping[str, Any]
    infer_asks: bool
    policy_asks: bool
    change_asks: bool

    def server(self) -> Says:
        """Return what is said of the server's own address."""
        return _says("What this server is", _answer(schemas.SERVER, "Name, version, extensions."))

    def live(self) -> Says:
        """Return what is said of the address of liveness."""
        return _says("Whether the server runs", _answer(schemas.LIVE, "It does."))

    def ready(self) -> Says:
        """Return what is said of the address of readiness."""
        not_now = _answer(schemas.READY, "Not now.")
        return _says("Whether requests can be answered", _answer(schemas.READY, "They can."), {503: not_now})

    def metadata(self, *, versioned: bool) -> Says:
        """Return what is said of the model's address."""
        ok = _answer(schemas.MODEL, "Its metadata.")
        return _says("What the model reads and answers", ok, _errors(_UNKNOWN), self._path(versioned))

    def model_ready(self, *, versioned: bool) -> Says:
        """Return what is said of the address of the model's readiness."""
        ok, not_now = _answer(schemas.MODEL_READY, "It can."), _answer(schemas.MODEL_READY, "Not now.")
        return _says("Whether the model can answer", ok, {**_errors(_UNKNOWN), 503: not_now}, self._path(versioned))

    def infer(self, *, versioned: bool) -> Says:
        """Return what is said of the address of inference."""
        ok = {
            "description": f"The answers. Outputs as raw bytes follow the JSON, whose length is {_LENGTH}.",
            "headers": {_LENGTH: {"schema": {"type": "integer"}}},
            "content": {_JSON: {"schema": schemas.RESPONSE}, _BYTES: {"schema": _RAW}},
        }
        headers = [
            _header(_LENGTH, {"type": "integer", "minimum": 0}, "of the JSON, where raw bytes follow it"),
            _header("Content-Encoding", {"type": "string", "enum": ["identity", "gzip", "deflate"]}, "of the body"),
            _header("x-request-id", schemas.TEXT, "for logs; echoed"),
        ]
        body = {_JSON: {"schema": self.request, "example": self.example}, _BYTES: {"schema": _RAW}}
        errors = _errors(_INFER_ERRORS | _UNKNOWN | (_UNAUTHORIZED if self.infer_asks else {}))
        return _says("Answer rows", ok, errors, [*self._path(versioned), *headers], body)

    def policy(self) -> Says:
        """Return what is said of the policy's address."""
        errors = _errors(_POLICY_ERRORS | _UNKNOWN | (_UNAUTHORIZED if self.policy_asks else {}))
        ok = {**_answer(schemas.POLICY, "Its id and content."), "headers": _ETAG}
        return _says("The policy in force", ok, errors, self._path(False))

    def set_policy(self) -> Says:
        """Return what is said of changes of the policy."""
        ok = {**_answer(schemas.POLICY_CHANGED, "It is in force everywhere."), "headers": _ETAG}
        errors = _errors(_SET_ERRORS | _UNKNOWN | (_UNAUTHORIZED if self.change_asks else {}))
        body = {_JSON: {"schema": schemas.POLICY_CHANGE, "example": {"threshold": 0.8}}}
        parameters = [*self._path(False), _header("If-Match", schemas.TEXT, "the tag of the version to be changed")]
        return _says("Change the policy, on all replicas", ok, errors, parameters, body)

    def watch(self) -> Says:
        """Return what is said of the address that tells whether the policy still holds."""
        errors = _errors(_WATCH_ERRORS | _UNKNOWN | (_UNAUTHORIZED if self.policy_asks else {}))
        ok = _answer(schemas.WATCH, "What all replicas have seen since the policy is in force.")
        return _says("Whether the policy in force still holds", ok, errors, self._path(False))

    def feedback(self) -> Says:
        """Return what is said of the address that takes what has become known of answers."""
        errors = _errors(_FEEDBACK_ERRORS | _UNKNOWN | (_UNAUTHORIZED if self.infer_asks else {}))
        body = {_JSON: {"schema": schemas.FEEDBACK, "example": schemas.FEEDBACK_EXAMPLE}}
        ok = _answer(schemas.FEEDBACK_TAKEN, "How many rows are counted, and why not all, if so.")
        return _says("Tell which answers were right", ok, errors, self._path(False), body)

    def _path(self, versioned: bool) -> list[Says]:
        parts = {"name": self.model, **({"version": self.version} if versioned else {})}
        return [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string", "enum": [only]}}
            for name, only in parts.items()
        ]


def _says(
    summary: str,
    ok: Says,
    others: Mapping[int, Says] | None = None,
    parameters: Sequence[Says] = (),
    body: Mapping[str, Any] | None = None,
) -> Says:
    extra: dict[str, Any] = {"parameters": list(parameters)} if parameters else {}
    if body is not None:
        extra["requestBody"] = {"required": True, "content": dict(body)}
    return {"summary": summary, "responses": {200: ok, **(others or {})}, "openapi_extra": extra}


def _answer(schema: Schema, says: str) -> Says:
    return {"description": says, "content": {_JSON: {"schema": schema}}}


def _errors(says: Mapping[int, str]) -> dict[int, Says]:
    answers = {status: _answer(schemas.ERROR, text) for status, text in sorted(says.items())}
    for status in answers.keys() & _HEADERS.keys():
        answers[status]["headers"] = dict(_HEADERS[status])
    return answers


def _header(name: str, schema: Schema, says: str) -> Says:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": says}
