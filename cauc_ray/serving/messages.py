"""Requests and responses of the Open Inference Protocol v2 over HTTP, with its binary extension."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic_core import from_json, to_json

from cauc_ray.serving.faults import RequestError, shown
from cauc_ray.serving.tensors import Tensor

Parameter: TypeAlias = bool | int | float | str

# zlib's `wbits` of the content encodings.
_WINDOWS = {"gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


@dataclass(frozen=True, slots=True)
class RequestedOutput:
    """An output that a request names.   binary: to be written as raw bytes."""

    name: str
    binary: bool


@dataclass(frozen=True, slots=True)
class InferRequest:
    """A request for inference.

    inputs: by name, at least one.   outputs: None where the request names none.   parameters: but for
    `binary_data_output`, which is binary_by_default: how to write outputs that the request does not name.
    """

    id: str | None
    inputs: Mapping[str, Tensor]
    outputs: tuple[RequestedOutput, ...] | None
    parameters: Mapping[str, Parameter]
    binary_by_default: bool


def read_infer_request(body: bytes | memoryview, json_length: int | None) -> InferRequest:
    """Read a request's body: JSON, and after it the raw bytes of those inputs that say so, in their order.

    json_length: the header Inference-Header-Content-Length, None where the body is all JSON.
    Keys that the protocol does not know are passed over, and null is as good as no key.
    Raises RequestError for anything else that is not the protocol; for shared memory and classification, too.

    >>> body = b'{"inputs": [{"name": "x", "datatype": "INT8", "shape": [2], "data": [3, 4]}]}'
    >>> read_infer_request(body, None).inputs["x"].values.tolist()
    [3, 4]
    """
    end = len(body) if json_length is None else json_length
    if not 0 <= end <= len(body):
        raise RequestError(f"Inference-Header-Content-Length is {shown(end)}, but the body has {len(body)} bytes")
    message = _parsed(bytes(body[:end]))
    parameters = _parameters(message, "the request")
    for name, value in parameters.items():
        _check_parameter(name, value)
    by_default = _flag(parameters.pop("binary_data_output", False), "binary_data_output of the request")
    return InferRequest(
        id=_id(message.get("id")),
        inputs=_read_inputs(message.get("inputs"), memoryview(body)[end:]),
        outputs=_read_outputs(message.get("outputs"), by_default),
        parameters=parameters,
        binary_by_default=by_default,
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
    *,
    model: str,
    version: str,
    id: str | None,
    outputs: Sequence[Tensor],
    binary: Collection[str],
    parameters: Mapping[str, object],
) -> tuple[bytes, int | None]:
    """Write a response: its body, and the length of the body's JSON part, None where no output is binary.

    binary: names of the outputs to write as raw bytes.   parameters: a float that is not finite becomes null.
    Raises RequestError naming an output that JSON cannot hold.
    """
    response: dict[str, Any] = {"model_name": model, "model_version": version}
    if id is not None:
        response["id"] = id
    if parameters:
        response["parameters"] = dict(parameters)
    response["outputs"] = described = []
    raw: list[bytes] = []
    for tensor in outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.values.shape}
        if tensor.name in binary:
            raw.append(tensor.to_raw())
            output["parameters"] = {"binary_data_size": len(raw[-1])}
        else:
            output["data"] = tensor.to_json()
        described.append(output)
    text = to_json(response, inf_nan_mode="null")
    return (b"".join([text, *raw]), len(text)) if raw else (text, None)


def _parsed(text: bytes) -> dict[str, Any]:
    """Return a JSON object. Raises RequestError for anything else."""
    try:
        # Keys come again with every request; what clients send as values is not kept.
        message = from_json(text, allow_inf_nan=False, cache_strings="keys")
    except ValueError as error:
        raise RequestError(f"the request is not JSON in UTF-8: {error}") from error
    if not isinstance(message, dict):
        raise RequestError("the request must be a JSON object")
    return message


def _id(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise RequestError(f"the id of the request must be a text, not {shown(value)}")
    return value


def _read_inputs(items: object, raw: memoryview) -> dict[str, Tensor]:
    """Return the inputs by name; raw: what follows the JSON part. Raises RequestError where they do not fit."""
    if not isinstance(items, list) or not items:
        raise RequestError("the request needs 'inputs', a list of at least one tensor")
    inputs: dict[str, Tensor] = {}
    at = 0
    for place, item in enumerate(items):
        name = _name(item, f"inputs[{place}]")
        if name in inputs:
            raise RequestError(f"the request has two inputs named {shown(name)}")
        size = _binary_size(item, name)
        if size is None:
            inputs[name] = Tensor.from_json(name, item.get("datatype"), item.get("shape"), item.get("data"))
            continue
        if size > len(raw) - at:
            raise RequestError(
                f"input {shown(name)} has the binary_data_size {shown(size)}, but {len(raw) - at} bytes are left of "
                "the body after its JSON part, whose length is the header Inference-Header-Content-Length"
            )
        inputs[name] = Tensor.from_raw(name, item.get("datatype"), item.get("shape"), raw[at : at + size])
        at += size
    if at != len(raw):
        raise RequestError(f"the body has {len(raw) - at} bytes more than its JSON part and its inputs take")
    return inputs


def _read_outputs(items: object, by_default: bool) -> tuple[RequestedOutput, ...] | None:
    """Return the outputs that a request names, None where none. Raises RequestError for what cannot be given."""
    if items is None:
        return None
    if not isinstance(items, list):
        raise RequestError("the request's 'outputs' must be a list")
    outputs: dict[str, RequestedOutput] = {}
    for place, item in enumerate(items):
        name = _name(item, f"outputs[{place}]")
        if name in outputs:
            raise RequestError(f"the request names the output {shown(name)} twice")
        parameters = _parameters(item, f"output {shown(name)}")
        if "classification" in parameters:
            raise RequestError(f"output {shown(name)} has the parameter 'classification', which is not supported")
        binary = _flag(parameters.get("binary_data", by_default), f"binary_data of output {shown(name)}")
        outputs[name] = RequestedOutput(name, binary)
    return tuple(outputs.values()) or None


def _name(item: object, place: str) -> str:
    """Return the name of an input or output. Raises RequestError where it has none."""
    if not isinstance(item, dict):
        raise RequestError(f"{place} must be a JSON object")
    name = item.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"{place} needs a 'name'")
    return name


def _parameters(holder: Mapping[str, Any], whose: str) -> dict[str, Any]:
    """Return parameters that are not null. Raises RequestError where they are no object or need shared memory."""
    found = holder.get("parameters")
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise RequestError(f"the parameters of {whose} must be a JSON object")
    for name in found:
        if name.startswith("shared_memory_"):
            raise RequestError(f"{whose} has the parameter {shown(name)}; shared memory is not supported")
    return {name: value for name, value in found.items() if value is not None}


def _check_parameter(name: str, value: object) -> None:
    """Raise RequestError for a parameter of the request that is not one value, or a number that no float can be."""
    if not isinstance(value, bool | int | float | str):
        raise RequestError(f"parameter {shown(name)} must be a boolean, a number or a text")
    if isinstance(value, int | float) and abs(value) > sys.float_info.max:
        raise RequestError(f"parameter {shown(name)} is beyond the range of numbers, {sys.float_info.max:g}")


def _binary_size(item: Mapping[str, Any], name: str) -> int | None:
    """Return how many raw bytes an input has, None where its data are in JSON. Raises RequestError for both."""
    size = _parameters(item, f"input {shown(name)}").get("binary_data_size")
    if size is None:
        return None
    if type(size) is not int or size < 0:
        raise RequestError(f"binary_data_size of input {shown(name)} must be a number of bytes, not {shown(size)}")
    if item.get("data") is not None:
        raise RequestError(f"input {shown(name)} has both 'data' and a binary_data_size")
    return size


def _flag(value: object, what: str) -> bool:
    if not isinstance(value, bool):
        raise RequestError(f"{what} must be true or false, not {shown(value)}")
    return value


def _inflated(body: bytes, encoding: str, limit: int) -> bytes:
    """Inflate a body, up to one byte beyond the limit. Raises RequestError where it is not so encoded."""
    inflater = zlib.decompressobj(wbits=_WINDOWS[encoding])
    try:
        inflated = inflater.decompress(body, limit + 1)
    except zlib.error as error:
        raise RequestError(f"the body is not valid {encoding}: {error}") from error
    if len(inflated) <= limit and not inflater.eof:
        raise RequestError(f"the body ends in the midst of its {encoding} data")
    if inflater.eof and inflater.unused_data:
        raise RequestError(f"the body goes on after the end of its {encoding} data")
    return inflated
