"""The OpenAPI description of a service's HTTP application, made of the types of its messages."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from cauc_ray.serving import documents
from cauc_ray.serving.feedback import FeedbackMessage
from cauc_ray.serving.policies_live import PolicyChange

_DESCRIPTION = (
    "A calibrated cascade of models behind the Open Inference Protocol v2. Each row is answered by the cheapest stage "
    "that is confident enough; the response says which stages were called and what they cost."
)
_TYPES = (
    *(documents.Error, documents.ServerMetadata, documents.Live, documents.Ready, documents.ModelReady),
    *(documents.ModelMetadata, documents.InferenceRequest, documents.InferenceResponse, documents.PolicyInForce),
    *(documents.PolicyChanged, documents.FeedbackTaken, documents.WatchReport, PolicyChange, FeedbackMessage),
)
_TEXT = {"type": "string"}
_RAW = {"schema": {"type": "string", "format": "binary"}}
_LENGTH = "Inference-Header-Content-Length"
_ETAG = {"ETag": {"schema": _TEXT, "description": "of this version of the policy"}}
_LATER = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds"}}
_HEADERS: dict[int, dict[str, Any]] = {401: {"WWW-Authenticate": {"schema": _TEXT}}, 429: _LATER, 503: _LATER}
_ERRORS = {
    400: "The request is malformed.",
    401: "The service asks for a token, and this is none that is valid here.",
    403: "The service has no token for this.",
    404: "There is no such model or version.",
    408: "The body does not come.",
    409: "The policy does not fit what runs, and the one before stays; or another change has replaced it at once.",
    412: "Another version than that of If-Match is in force.",
    413: "The body is too long, or has too many rows.",
    415: "The body's Content-Encoding is not known here.",
    422: "A model cannot answer a row.",
    429: "There is too much to do; Retry-After says when to try again.",
    503: "What is needed for an answer is down, late, or does not answer.",
}
_QUESTION = '{"question": "Which is a metal?", "choices": ["iron", "oxygen"]}'
_EXAMPLES: dict[str, Any] = {
    "InferenceRequest": {
        "inputs": [{"name": "question", "shape": [1], "datatype": "BYTES", "data": [_QUESTION]}],
        "outputs": [{"name": "prediction"}, {"name": "confidence"}, {"name": "stage"}],
    },
    "PolicyChange": {"threshold": 0.8},
    "FeedbackMessage": {
        "policy_id": "0" * 12,
        "answer_id": "0" * 32,
        "prediction": [3],
        "confidence": [0.93],
        "stage": [0],
        "label": [3],
    },
}


def openapi() -> dict[str, Any]:
    """Return the description of every address. How inputs are called is the model's own metadata."""
    adapters: list[Any] = [(one.__name__, "validation", TypeAdapter(one)) for one in _TYPES]
    _, schemas = TypeAdapter.json_schemas(adapters, ref_template="#/components/schemas/{model}")
    model, version = "/v2/models/{name}", "/versions/{version}"
    infer_headers = [
        _header(_LENGTH, {"type": "integer", "minimum": 0}, "of the JSON, where raw bytes follow it"),
        _header("Content-Encoding", {"type": "string", "enum": ["identity", "gzip", "deflate"]}, "of the body"),
        _header("x-request-id", _TEXT, "for logs; echoed"),
    ]
    infer = _says(
        "Answer rows", "InferenceResponse", 400, 408, 413, 415, 422, 429, 503, takes="InferenceRequest", bears=True
    )
    infer["requestBody"]["content"]["application/octet-stream"] = _RAW
    infer["responses"]["200"]["headers"] = {_LENGTH: {"schema": {"type": "integer"}}}
    infer["responses"]["200"]["content"]["application/octet-stream"] = _RAW
    policy = _says("The policy in force", "PolicyInForce", 503, bears=True)
    change = _says(
        "Change the policy, on all replicas",
        "PolicyChanged",
        400,
        403,
        408,
        409,
        412,
        413,
        503,
        takes="PolicyChange",
        bears=True,
    )
    change["parameters"] = [_header("If-Match", _TEXT, "the tag of the version to be changed")]
    for one in (policy, change):
        one["responses"]["200"]["headers"] = _ETAG
    paths = {
        "/v2": {"get": _says("What this server is", "ServerMetadata")},
        "/v2/health/live": {"get": _says("Whether the server runs", "Live")},
        "/v2/health/ready": {"get": _ready("Whether requests can be answered", "Ready")},
        f"{model}/policy": {"get": policy, "put": change},
        f"{model}/watch": {"get": _says("Whether the policy still holds", "WatchReport", 503, bears=True)},
        f"{model}/feedback": {
            "post": _says(
                "Tell which answers were right", "FeedbackTaken", 400, 408, 413, takes="FeedbackMessage", bears=True
            )
        },
    }
    for path in (model, model + version):
        paths |= {
            path: {"get": _says("What the model reads and answers", "ModelMetadata")},
            f"{path}/ready": {"get": _ready("Whether the model can answer", "ModelReady")},
            f"{path}/infer": {"post": {**infer, "parameters": infer_headers}},
        }
    for path, operations in paths.items():
        for one in operations.values():
            _complete(one, [part for part in ("name", "version") if f"{{{part}}}" in path])
    return {
        "openapi": "3.1.0",
        "info": {"title": "cauc-ray", "version": "1", "description": _DESCRIPTION},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _says(summary: str, answers: str, *errors: int, takes: str | None = None, bears: bool = False) -> dict[str, Any]:
    """Return what is said of an address.   bears: the service may ask for a token."""
    said: dict[str, Any] = {"summary": summary, "responses": {"200": _content(answers, "OK")}}
    if takes is not None:
        content = {"schema": _ref(takes), "example": _EXAMPLES[takes]}
        said["requestBody"] = {"required": True, "content": {"application/json": content}}
    if bears:
        said["security"] = [{}, {"bearer": []}]
    for status in sorted([*errors, *([401] if bears else [])]):
        said["responses"][str(status)] = _content("Error", _ERRORS[status], **_HEADERS.get(status, {}))
    return said


def _ready(summary: str, answers: str) -> dict[str, Any]:
    said = _says(summary, answers)
    said["responses"]["503"] = _content(answers, "Not now.")
    return said


def _complete(said: dict[str, Any], parts: list[str]) -> None:
    """Add the parts of the path, and that there may be no such model."""
    own = [{"name": part, "in": "path", "required": True, "schema": _TEXT} for part in parts]
    if own:
        said["parameters"] = [*own, *said.get("parameters", [])]
        said["responses"] = {**said["responses"], "404": _content("Error", _ERRORS[404])}


def _content(name: str, says: str, **headers: Any) -> dict[str, Any]:
    content = {"description": says, "content": {"application/json": {"schema": _ref(name)}}}
    return {**content, "headers": headers} if headers else content


def _ref(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _header(name: str, schema: dict[str, Any], says: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": says}
