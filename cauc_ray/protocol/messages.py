"""Requests for inference and their responses, as the Open Inference Protocol v2 has them over HTTP."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import TypedDict

from cauc_ray.errors import explain, printable
from cauc_ray.protocol.tensors import Datatype, RequestError, Tensor, shown

Output: TypeAlias = Literal[
    "prediction",
    "prediction_label",
    "answer",
    "confidence",
    "source",
    "probabilities",
    "logits",
    "stage",
    "cost",
    "degraded",
    "prompt_tokens",
    "completion_tokens",
]
# numpy has no arrays of more dimensions.
_Shape: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64, fail_fast=True)]


class InputParameters(TypedDict, total=False):
    """How the data of a tensor are sent."""

    binary_data_size: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="length of its raw bytes, which follow the JSON part in the order of the tensors"),
    ]
    shared_memory_region: Annotated[None, Field(description="not supported")]


class InputTensor(TypedDict):
    """Rows of one of the model's inputs or outputs."""

    name: Annotated[str, Field(min_length=1)]
    shape: Annotated[_Shape, Field(description="rows first")]
    datatype: Datatype
    parameters: NotRequired[InputParameters | None]
    data: NotRequired[Annotated[list[Any] | None, Field(description="flat, or nested by the shape")]]


class OutputParameters(TypedDict, total=False):
    """How an output is written."""

    binary_data: Annotated[bool | None, Field(description="as raw bytes")]
    shared_memory_region: Annotated[None, Field(description="not supported")]
    classification: Annotated[None, Field(description="not supported")]


class NamedOutput(TypedDict):
    """An output that a request names."""

    name: Output
    parameters: NotRequired[OutputParameters | None]


class RequestParameters(TypedDict, total=False):
    """What a request may ask for; unknown names are ignored."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)  # type: ignore[misc]
    max_cost: Annotated[
        Annotated[float, Field(ge=0)] | None, Field(description="the most that the calls for one row may cost")
    ]
    max_stage: Annotated[
        int | str | None, Field(description="the deepest stage to call: its number from 0, or its name")
    ]
    priority: Annotated[
        Annotated[int, Field(ge=0, lt=2**31)] | None,
        Field(description="1 is answered first, larger numbers later; 0, the default, is the same as 2"),
    ]
    log: Annotated[bool | None, Field(description="false keeps the rows out of the shadow sample and the log")]
    session: Annotated[
        Annotated[str, Field(max_length=1000)] | None,
        Field(description="requests of one session have the same policy, as long as the candidate is the same"),
    ]
    binary_data_output: Annotated[bool | None, Field(description="write outputs that are not named as raw bytes")]
    timeout: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="microseconds that the client waits, 0 for any; rows that are late are not answered"),
    ]


class InferenceRequest(TypedDict):
    """Rows to be answered, as inputs or row by row. Null is the same as a missing key, and unknown keys are ignored."""

    __pydantic_config__ = ConfigDict(cache_strings="keys")  # type: ignore[misc]
    id: NotRequired[str | None]
    parameters: NotRequired[RequestParameters | None]
    inputs: NotRequired[Annotated[list[InputTensor], Field(min_length=1, fail_fast=True)] | None]
    rows: NotRequired[
        Annotated[
            list[dict[str, Any]] | None,
            Field(min_length=1, description="in place of inputs: an object for each row, as in a file of JSON Lines"),
        ]
    ]
    outputs: NotRequired[Annotated[list[NamedOutput], Field(fail_fast=True)] | None]


class InferenceResponse(TypedDict):
    """Rows that have been answered. Unknown keys are ignored."""

    outputs: list[InputTensor]
    parameters: NotRequired[dict[str, Any] | None]


class TensorMetadata(TypedDict):
    """An input or output of a model.

    Attributes:
        name: Name of the tensor.
        datatype: Any datatype of the server.
        shape: Rows first; -1 is any size.
    """

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(TypedDict):
    """What a server reports of a model. Unknown keys are ignored."""

    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: NotRequired[dict[str, Any] | None]


_REQUEST, _RESPONSE = TypeAdapter(InferenceRequest), TypeAdapter(InferenceResponse)
_MODEL_METADATA = TypeAdapter(ModelMetadata)
# An extension that servers report: tensors as raw bytes.
BINARY_DATA = "binary_tensor_data"
T = TypeVar("T")
# What a response holds unless the request names outputs.
DEFAULT_OUTPUTS: tuple[Output, ...] = ("prediction", "prediction_label", "confidence")

# zlib's `wbits` of the content encodings.
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for inference.

    Attributes:
        id: Identifier that the response repeats.
        inputs: Tensors by name.
        rows: The rows by column names in place of inputs, None where there are inputs.
        outputs: Whether each requested output is written as raw bytes, by name.
        parameters: Parameters of the request.
    """

    id: str | None
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, bool]
    parameters: RequestParameters
    rows: Sequence[Mapping[str, Any]] | None = None


def read_infer_request(body: bytes | memoryview, json_length: int | None) -> InferRequest:
    """Read a request's body: JSON, then the raw bytes of those inputs that declare them, in order.

    Args:
        body: The unpacked body.
        json_length: The header Inference-Header-Content-Length, None if the body is all JSON.

    Raises:
        RequestError: The body is not a request of the protocol, or needs shared memory or classification.

    >>> body = b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": [2], "data": [3, 4]}]}'
    >>> read_infer_request(body, None).inputs["x"].values.tolist()
    [3, 4]
    """
    return infer_request_of(*_split_body(body, json_length))


def infer_request_of(content: bytes | Mapping[str, Any], raw: memoryview) -> InferRequest:
    """Read a request in two parts. Raises RequestError as read_infer_request.

    Args:
        content: The JSON part, which may be parsed.
        raw: The raw bytes of the inputs that declare them, in order.
    """
    message = _read(_REQUEST, "request", content)
    parameters, inputs, rows = message.get("parameters") or {}, message.get("inputs"), message.get("rows")
    if (inputs is None) == (rows is None):
        raise RequestError("the request is invalid: it must have either inputs or rows")
    return InferRequest(
        id=message.get("id"),
        rows=rows,
        inputs=_read_tensors("input", inputs or (), raw),
        outputs=_read_outputs(message.get("outputs") or (), parameters.get("binary_data_output") or False),
        parameters=parameters,
    )


def write_infer_request(
    inputs: Sequence[Tensor], outputs: Sequence[str], parameters: Mapping[str, object], *, binary: bool
) -> tuple[bytes, int | None]:
    """Write a request, with its outputs requested as raw bytes.

    Args:
        inputs: Tensors of the rows.
        outputs: Names of the requested outputs.
        parameters: Parameters of the request.
        binary: Whether inputs are sent as raw bytes.

    Returns:
        The body, and the length of its JSON part, None if that is all.

    Raises:
        RequestError: JSON cannot hold an input; names it.

    >>> import numpy as np
    >>> x = Tensor("x", "INT8", np.array([[3, 4]], np.int8))
    >>> body, json_length = write_infer_request([x], ["logits"], {}, binary=True)
    >>> read_infer_request(body, json_length).inputs["x"].values.tolist()
    [[3, 4]]
    """
    requested = [{"name": name, "parameters": {"binary_data": True}} for name in outputs]
    settings = {"parameters": parameters} if parameters else {}
    return _written({**settings, "outputs": requested}, "inputs", [(tensor, binary) for tensor in inputs])


def read_infer_response(
    body: bytes | memoryview, json_length: int | None
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Read a response's body as read_infer_request reads a request's.

    Returns:
        Its tensors by name, and its parameters.

    Raises:
        RequestError: The body is anything else.
    """
    content, raw = _split_body(body, json_length)
    message = _read(_RESPONSE, "response", content)
    return _read_tensors("output", message["outputs"], raw), message.get("parameters") or {}


def read_model_metadata(body: bytes) -> ModelMetadata:
    """Read a model's metadata. Raises RequestError for anything else."""
    return _read(_MODEL_METADATA, "model's metadata", body)


def decoded_body(body: bytes, encoding: str | None, limit: int) -> bytes:
    """Undo a body's Content-Encoding: gzip (of one member), deflate, identity or None.

    Args:
        body: The body as received.
        encoding: The header Content-Encoding.
        limit: Bytes of the result; no more is ever inflated.

    Raises:
        RequestError: 415 for other encodings, 413 beyond the limit, 400 for a damaged body.
    """
    name = (encoding or "").strip().lower() or "identity"
    if name in _WINDOWS:
        inflater = zlib.decompressobj(wbits=_WINDOWS[name])
        try:
            body = inflater.decompress(body, limit + 1)
        except zlib.error as error:
            raise RequestError(f"the body is not valid {name}: {error}") from error
        if len(body) <= limit and (not inflater.eof or inflater.unused_data):
            raise RequestError(f"the body does not end with its {name} data")
    elif name != "identity":
        raise RequestError(f"Content-Encoding is {shown(name)}; supported are gzip, deflate and identity", status=415)
    if len(body) > limit:
        raise RequestError(f"the body has more than {limit} bytes", status=413)
    return body


def write_infer_response(
    request: InferRequest, model: str, version: str, outputs: Sequence[Tensor], parameters: Mapping[str, object]
) -> tuple[bytes, int | None]:
    """Write the response to a request.

    Args:
        request: The request.
        model: Name of the model.
        version: Version of the model.
        outputs: Tensors of the rows.
        parameters: Parameters of the response; a float that is not finite becomes null.

    Returns:
        The body, and the length of its JSON part, None if no output is binary.

    Raises:
        RequestError: JSON cannot hold an output; names it.
    """
    response: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id is not None:
        response["id"] = request.id
    response["parameters"] = parameters
    return _written(response, "outputs", [(tensor, request.outputs[tensor.name]) for tensor in outputs])


def _written(
    message: Mapping[str, object], key: str, tensors: Sequence[tuple[Tensor, bool]]
) -> tuple[bytes, int | None]:
    """Write a message with tensors under a key, each with whether it is written as raw bytes.

    Returns:
        The body, and the length of its JSON part, None if no tensor is binary.
    """
    raw: list[bytes] = []
    items: list[dict[str, Any]] = []
    for tensor, binary in tensors:
        items.append({"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.values.shape})
        if binary:
            raw.append(tensor.to_raw())
            items[-1]["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            items[-1]["data"] = tensor.to_json()
    text = to_json({**message, key: items}, inf_nan_mode="null")
    return (b"".join([text, *raw]), len(text)) if raw else (text, None)


def _split_body(body: bytes | memoryview, json_length: int | None) -> tuple[bytes, memoryview]:
    """Return a message's JSON part and the raw bytes after it."""
    end = len(body) if json_length is None else json_length
    if not 0 <= end <= len(body):
        raise RequestError(f"Inference-Header-Content-Length is {shown(end)}, but the body has {len(body)} bytes")
    return bytes(body[:end]), memoryview(body)[end:]


def _read(adapter: TypeAdapter[T], what: str, content: bytes | Mapping[str, Any]) -> T:
    try:
        if isinstance(content, bytes):
            return adapter.validate_json(content, strict=True)
        return adapter.validate_python(content, strict=True)
    except ValidationError as error:
        raise RequestError(printable(f"the {what} is invalid: {explain(error)}")) from error


def _read_tensors(what: str, items: Sequence[InputTensor], raw: memoryview) -> dict[str, Tensor]:
    """Return tensors by name, from their JSON and the raw bytes after it. Raises RequestError if these disagree."""
    tensors: dict[str, Tensor] = {}
    at = 0
    for item in items:
        name, data = item["name"], item.get("data")
        size = (item.get("parameters") or {}).get("binary_data_size")
        if name in tensors:
            raise RequestError(f"there are two {what}s named {shown(name)}")
        if size is None:
            tensors[name] = Tensor.from_json(name, item["datatype"], item["shape"], data)
            continue
        if data is not None:
            raise RequestError(f"{what} {shown(name)} has both 'data' and a binary_data_size")
        if size > len(raw) - at:
            raise RequestError(
                f"{what} {shown(name)} has the binary_data_size {shown(size)}, but only {len(raw) - at} bytes are left "
                "in the body after its JSON part, whose length is the header Inference-Header-Content-Length"
            )
        tensors[name] = Tensor.from_raw(name, item["datatype"], item["shape"], raw[at : at + size])
        at += size
    if at != len(raw):
        raise RequestError(f"the body has {len(raw) - at} bytes more than its JSON part and its {what}s take")
    return tensors


def _read_outputs(items: Sequence[NamedOutput], by_default: bool) -> dict[str, bool]:
    """Return by name whether outputs are written as raw bytes. Raises RequestError if one is named twice."""
    outputs: dict[str, bool] = {}
    for item in items:
        if item["name"] in outputs:
            raise RequestError(f"the request names the output {shown(item['name'])} twice")
        binary = (item.get("parameters") or {}).get("binary_data")
        outputs[item["name"]] = by_default if binary is None else binary
    return outputs or dict.fromkeys(DEFAULT_OUTPUTS, by_default)
