"""JSON schemas of what the HTTP face takes and answers, and an example of a request."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from cauc_ray.models.service import Datatype, InputSpec

Schema = dict[str, Any]

# Texts that a question's rows may be made of, see Inputs.
_QUESTION = json.dumps({"question": "Which is a metal?", "choices": ["iron", "oxygen"]})


def _object(properties: Mapping[str, Schema], *required: str) -> Schema:
    return {"type": "object", "required": list(required), "properties": dict(properties)}


def _or_null(schema: Schema) -> Schema:
    """Return the schema of what may be null, which is as good as its absence."""
    return {**schema, "type": [*([schema["type"]] if isinstance(schema["type"], str) else schema["type"]), "null"]}


TEXT: Schema = {"type": "string"}
_FLAG: Schema = {"type": "boolean"}
_SIZES: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}}
_ANY_SIZES: Schema = {"type": "array", "items": {"type": "integer", "minimum": -1}}
_DATATYPE: Schema = {"type": "string", "enum": list(get_args(Datatype))}
_PARAMETERS: Schema = {"type": "object", "additionalProperties": {"type": ["boolean", "number", "string", "null"]}}
_RESULT = _object(
    {"name": TEXT, "shape": _SIZES, "datatype": _DATATYPE, "parameters": _PARAMETERS, "data": {"type": "array"}},
    "name",
    "shape",
    "datatype",
)
_DECLARED = _object({"name": TEXT, "datatype": _DATATYPE, "shape": _ANY_SIZES}, "name", "datatype", "shape")
_DECLARED_ALL: Schema = {"type": "array", "items": _DECLARED}

ERROR = _object({"error": {**TEXT, "description": "one sentence"}}, "error")
SERVER = _object(
    {
        "name": TEXT,
        "version": TEXT,
        "extensions": {"type": "array", "items": TEXT},
        "models": {"type": "array", "items": TEXT},
    },
    "name",
    "version",
    "extensions",
    "models",
)
LIVE = _object({"live": _FLAG}, "live")
READY = _object({"ready": _FLAG}, "ready")
MODEL_READY = _object({"name": TEXT, "ready": _FLAG}, "name", "ready")
MODEL = _object(
    {
        "name": TEXT,
        "versions": {"type": "array", "items": TEXT},
        "platform": TEXT,
        "inputs": _DECLARED_ALL,
        "outputs": _DECLARED_ALL,
        "parameters": _PARAMETERS,
    },
    "name",
    "versions",
    "platform",
    "inputs",
    "outputs",
)
POLICY = _object(
    {
        "policy_id": TEXT,
        "version": {"type": "integer", "description": "how many changes there were before it"},
        "policy": {"type": "object"},
        "refused": _or_null(TEXT),
    },
    "policy_id",
    "version",
    "policy",
)
POLICY_CHANGE: Schema = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "properties": {
        "policy": {"type": ["object", "null"], "description": "a policy file's content"},
        "threshold": {"type": ["number", "null"]},
        "budget": {"type": ["number", "null"], "description": "mean cost per example"},
    },
}
POLICY_CHANGED = _object(
    {
        "policy_id": TEXT,
        "previous": TEXT,
        "version": {"type": "integer"},
        "replicas": _or_null({"type": "integer", "description": "that have confirmed it; null where one is silent"}),
        "says": _or_null(TEXT),
    },
    "policy_id",
    "previous",
    "version",
    "replicas",
)
FEEDBACK: Schema = {
    **_object(
        {
            "policy_id": {**TEXT, "description": "as the answers' parameters said"},
            "answer_id": _or_null(
                {**TEXT, "pattern": "^[0-9a-f]{32}$", "description": "as they said; each row counts once"}
            ),
            "rows": _or_null(
                {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0},
                    "uniqueItems": True,
                    "description": "which rows of the answer these are; all of them without it",
                }
            ),
            **{
                name: {"type": "array", "items": item, "description": says}
                for name, item, says in (
                    ("prediction", {"type": "integer", "minimum": 0}, "as answered"),
                    ("confidence", {"type": "number", "minimum": 0, "maximum": 1}, "as answered"),
                    ("stage", {"type": "integer", "minimum": 0}, "as answered; name it among a request's outputs"),
                    ("label", {"type": "integer", "minimum": 0}, "what would have been right"),
                )
            },
        },
        "policy_id",
        "prediction",
        "confidence",
        "stage",
        "label",
    ),
    "additionalProperties": False,
}
FEEDBACK_EXAMPLE = {
    "policy_id": "0" * 12,
    "answer_id": "0" * 32,
    "prediction": [3],
    "confidence": [0.93],
    "stage": [0],
    "label": [3],
}
FEEDBACK_TAKEN = _object(
    {"policy_id": TEXT, "rows": {"type": "integer"}, "counted": {"type": "integer"}, "says": _or_null(TEXT)},
    "policy_id",
    "rows",
    "counted",
)
WATCH = _object(
    {
        "policy_id": TEXT,
        "holds": {"type": ["boolean", "null"], "description": "null where the policy has nothing to be compared with"},
        "says": {**TEXT, "description": "the same in words, and what spoke against it first"},
        "routers": {"type": "integer", "description": "replicas that have said what they saw"},
        "n": {"type": "integer", "description": "answers"},
        "n_labelled": {"type": "integer", "description": "rows of feedback"},
        "n_compared": {"type": "integer", "description": "rows of the shadow sample"},
        "false_alarm_rate": {"type": "number"},
        "needed": {"type": "number", "description": "evidence from which on the policy no longer holds, log10"},
        "features": {"type": "array", "items": {"type": "object"}},
        "stages": {"type": "array", "items": {"type": "object"}},
    },
    "policy_id",
    "holds",
    "says",
    "routers",
)
RESPONSE = _object(
    {
        "model_name": TEXT,
        "model_version": TEXT,
        "id": TEXT,
        "parameters": _object(
            {
                "policy_id": TEXT,
                "answer_id": {**TEXT, "description": "of this answer alone; feedback gives it back"},
                "stage": {"type": "integer", "description": "the deepest stage that answered a row, from 0"},
                "stages_called": {**TEXT, "description": "names, separated by commas"},
                "cost": {"type": "number", "description": "of all calls for the request's rows"},
                "cost_unit": TEXT,
                "degraded": _FLAG,
                "reason": {**TEXT, "description": "why it is degraded"},
            },
            "policy_id",
            "answer_id",
            "stage",
            "stages_called",
            "cost",
            "cost_unit",
            "degraded",
        ),
        "outputs": {"type": "array", "items": _RESULT},
    },
    "model_name",
    "model_version",
    "outputs",
    "parameters",
)


def request_schema(inputs: Iterable[str], outputs: Iterable[str], *, any_input: bool) -> Schema:
    """Return the schema of a request for inference.

    inputs, outputs: the names that there are.   any_input: whether others are taken, too.
    """
    name = TEXT if any_input else {"type": "string", "enum": list(inputs)}
    tensor = _object(
        {
            "name": name,
            "shape": {**_SIZES, "description": "rows first"},
            "datatype": _DATATYPE,
            "parameters": _or_null(_PARAMETERS),
            "data": {"type": ["array", "null"], "description": "flat, or nested as the shape says"},
        },
        "name",
        "shape",
        "datatype",
    )
    output = _object({"name": {"type": "string", "enum": list(outputs)}, "parameters": _or_null(_PARAMETERS)}, "name")
    parameters = {
        "max_cost": {"type": ["number", "null"], "description": "what the calls for one row may cost at most"},
        "max_stage": {
            "type": ["integer", "string", "null"],
            "description": "the deepest stage to call: its number from 0, or its name",
        },
        "binary_data_output": {"type": ["boolean", "null"], "description": "write the outputs as raw bytes"},
    }
    return _object(
        {
            "id": _or_null(TEXT),
            "parameters": {"type": ["object", "null"], "properties": parameters, "additionalProperties": False},
            "inputs": {"type": "array", "items": tensor, "minItems": 1},
            "outputs": {"type": ["array", "null"], "items": output},
        },
        "inputs",
    )


def example_request(declared: Mapping[str, InputSpec], *, pixels: bool) -> dict[str, Any]:
    """Return a request of one row.

    declared: the inputs; a model that takes any is shown one.   pixels: an input `image` takes those.
    """
    inputs = declared or {"x": InputSpec(datatype="FP32")}
    tensors = [_example_tensor(name, spec, pixels and name == "image") for name, spec in inputs.items()]
    return {"inputs": tensors, "outputs": [{"name": "prediction"}, {"name": "confidence"}, {"name": "stage"}]}


def _example_tensor(name: str, spec: InputSpec, pixels: bool) -> dict[str, Any]:
    if pixels:  # JSON could not hold an encoded image
        spec = InputSpec(datatype="UINT8", shape=(2, 2, 3))
    shape = [1, *(max(size, 1) for size in spec.shape)]
    value: Any = 0
    if spec.datatype == "BYTES":
        value = _QUESTION if name == "question" else "row-0"
    elif spec.datatype == "BOOL":
        value = False
    return {"name": name, "shape": shape, "datatype": spec.datatype, "data": [value] * math.prod(shape)}
