"""Requests for inference and their responses, as the Open Inference Protocol v2 has them over HTTP."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import to_json
from typing_extensions import TypedDict

from cauc_ray.errors import explain, printable
from cauc_ray.protocol.tensors import Datatype, RequestError, Tensor, shown

Output: TypeAlias = Literal[
    "prediction", "prediction_label", "confidence", "probabilities", "stage", "cost", "degraded"
]
# numpy has no arrays of more dimensions.
_Shape: TypeAlias = Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64, fail_fast=True)]


class InputParameters(TypedDict, total=False):
    """How the data of an input are sent."""

    binary_data_size: Annotated[
        Annotated[int, Field(ge=0)] | None,
        Field(description="length of its raw bytes, which follow the JSON part in the order of the inputs"),
    ]
    shared_memory_region: Annotated[None, Field(description="not supported")]


class InputTensor(TypedDict):
    """Rows of one of the model's inputs."""

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
    """What a request may ask for."""

    __pydantic_config__ = ConfigDict(extra="forbid", allow_inf_nan=False)  # type: ignore[misc]
    max_cost: Annotated[
        Annotated[float, Field(ge=0)] | None, Field(description="the most that the calls for one row may cost")
    ]
    max_stage: Annotated[
        int | str | None, Field(description="the deepest stage to call: its number from 0, or its name")
    ]
    session: Annotated[
        Annotated[str, Field(max_length=1000)] | None,
        Field(description="requests of one session have the same policy, as long as the candidates are the same"),
    ]
    binary_data_output: Annotated[bool | None, Field(description="write outputs that are not named as raw bytes")]


class InferenceRequest(TypedDict):
    """Rows to be answered. Null is the same as a missing key, and unknown keys are ignored."""

    __pydantic_config__ = ConfigDict(cache_strings="keys")  # type: ignore[misc]
    id: NotRequired[str | None]
    parameters: NotRequired[RequestParameters | None]
    inputs: Annotated[list[InputTensor], Field(min_length=1, fail_fast=True)]
    outputs: NotRequired[Annotated[list[NamedOutput], Field(fail_fast=True)] | None]


_REQUEST = TypeAdapter(InferenceRequest)
# What a response holds unless the request names outputs.
DEFAULT_OUTPUTS: tuple[Output, ...] = ("prediction", "prediction_label", "confidence")

# zlib's `wbits` of the content encodings.
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for inference.   inputs: by name.   outputs: by name, whether they are to be written as raw bytes."""

    id: str | None
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, bool]
    parameters: RequestParameters


def read_infer_request(body: bytes | memoryview, json_length: int | None) -> InferRequest:
    """Read a request's body: JSON, and after it the raw bytes of those inputs that declare them, in order.

    json_length: the header Inference-Header-Content-Length, None where the body is all JSON.
    Raises RequestError for anything else that is not the protocol; for shared memory and classification, too.

    >>> body = b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": [2], "data": [3, 4]}]}'
    >>> read_infer_request(body, None).inputs["x"].values.tolist()
    [3, 4]
    """
    end = len(body) if json_length is None else json_length
    if not 0 <= end <= len(body):
        raise RequestError(f"Inference-Header-Content-Length is {shown(end)}, but the body has {len(body)} bytes")
    try:
        message = _REQUEST.validate_json(bytes(body[:end]), strict=True)
    except ValidationError as error:
        raise RequestError(printable(f"the request is invalid: {explain(error)}")) from error
    parameters = message.get("parameters") or {}
    return InferRequest(
        id=message.get("id"),
        inputs=_read_inputs(message["inputs"], memoryview(body)[end:]),
        outputs=_read_outputs(message.get("outputs") or (), parameters.get("binary_data_output") or False),
        parameters=parameters,
    )


def decoded_body(body: bytes, encoding: str | None, limit: int) -> bytes:
    """Undo a body's Content-Encoding: gzip (of one member), deflate, identity or None.

    limit: in bytes, of what comes out; no more is ever inflated.
    Raises RequestError: 415 for other encodings, 413 beyond the limit, 400 for what is not so encoded.
    """
    name = (encoding or "").strip().lower() or "identity"
    if name in _WINDOWS:
        body = _inflated(body, name, limit)
    elif name != "identity":
        raise RequestError(f"Content-Encoding is {shown(name)}; supported are gzip, deflate and identity", status=415)
    if len(body) > limit:
        raise RequestError(f"the body has more than {limit} bytes", status=413)
    return body


def write_infer_response(
    request: InferRequest, model: str, version: str, outputs: Sequence[Tensor], parameters: Mapping[str, object]
) -> tuple[bytes, int | None]:
    """Write the response to a request: its body, and the length of the JSON part, None where no output is binary.

    parameters: a float that is not finite becomes null. Raises RequestError naming an output that JSON cannot hold.
    """
    response: dict[str, Any] = {"model_name": model, "model_version": version}
    if request.id is not None:
        response["id"] = request.id
    response["parameters"] = parameters
    response["outputs"] = described = []
    raw: list[bytes] = []
    for tensor in outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.values.shape}
        if request.outputs[tensor.name]:
            raw.append(tensor.to_raw())
            output["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            output["data"] = tensor.to_json()
        described.append(output)
    text = to_json(response, inf_nan_mode="null")
    return (b"".join([text, *raw]), len(text)) if raw else (text, None)


def _read_inputs(items: Sequence[InputTensor], raw: memoryview) -> dict[str, Tensor]:
    """Return the inputs by name; raw: what follows the JSON part. Raises RequestError where they do not fit."""
    inputs: dict[str, Tensor] = {}
    at = 0
    for item in items:
        name, data = item["name"], item.get("data")
        size = (item.get("parameters") or {}).get("binary_data_size")
        if name in inputs:
            raise RequestError(f"the request has two inputs named {shown(name)}")
        if size is None:
            inputs[name] = Tensor.from_json(name, item["datatype"], item["shape"], data)
            continue
        if data is not None:
            raise RequestError(f"input {shown(name)} has both 'data' and a binary_data_size")
        if size > len(raw) - at:
            raise RequestError(
                f"input {shown(name)} has the binary_data_size {shown(size)}, but only {len(raw) - at} bytes are left "
                "in the body after its JSON part, whose length is the header Inference-Header-Content-Length"
            )
        inputs[name] = Tensor.from_raw(name, item["datatype"], item["shape"], raw[at : at + size])
        at += size
    if at != len(raw):
        raise RequestError(f"the body has {len(raw) - at} bytes more than its JSON part and its inputs take")
    return inputs


def _read_outputs(items: Sequence[NamedOutput], by_default: bool) -> dict[str, bool]:
    """Return by name whether outputs are to be written as raw bytes. Raises RequestError where one is named twice."""
    outputs: dict[str, bool] = {}
    for item in items:
        if item["name"] in outputs:
            raise RequestError(f"the request names the output {shown(item['name'])} twice")
        binary = (item.get("parameters") or {}).get("binary_data")
        outputs[item["name"]] = by_default if binary is None else binary
    return outputs or dict.fromkeys(DEFAULT_OUTPUTS, by_default)


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """Inflate a body, up to one byte beyond the limit. Raises RequestError where it is not so encoded."""
    inflater = zlib.decompressobj(wbits=_WINDOWS[encoding])
    try:
        inflated = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not valid {encoding}: {error}") from error
    if len(inflated) <= limit and not inflater.eof:
        raise RequestError(f"the body ends within its {encoding} data")
    if inflater.eof and inflater.unused_data:
        raise RequestError(f"the body continues after the end of its {encoding} data")
    return inflated
