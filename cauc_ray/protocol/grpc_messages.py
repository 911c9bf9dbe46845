"""Requests for inference and their responses, as the Open Inference Protocol v2 has them over gRPC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError

from cauc_ray.protocol.messages import InferRequest, infer_request_of
from cauc_ray.protocol.tensors import RequestError, Tensor, shown

# A pool of its own: in the default one, clients of the same process may have the same names.
_POOL = DescriptorPool()
for _file in FileDescriptorSet.FromString(Path(__file__).with_name("open_inference.binpb").read_bytes()).file:
    _POOL.Add(_file)
_SERVICE: Any = _POOL.FindServiceByName("inference.GRPCInferenceService")
SERVICE: str = _SERVICE.full_name
# By the name of a call: the classes of its request and its response.
CALLS: Mapping[str, tuple[Any, Any]] = {
    method.name: tuple(map(message_factory.GetMessageClass, (method.input_type, method.output_type)))
    for method in _SERVICE.methods
}
_Request, _Response = CALLS["ModelInfer"]
_PARAMETERS = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}


def parsed(kind: Any, body: bytes) -> Any:
    """Return a message of a class. Raises RequestError where the bytes are not one."""
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise RequestError(f"the body is not a {kind.DESCRIPTOR.name}") from error


class GrpcMessage:
    """A request for inference over gRPC."""

    def __init__(self, body: bytes) -> None:
        self.body = body

    def __reduce__(self) -> tuple[type[GrpcMessage], tuple[bytes]]:
        return GrpcMessage, (self.body,)  # classes that are made of descriptors cannot be pickled

    @cached_property
    def message(self) -> Any:
        """Return it as its class has it. Raises RequestError."""
        return parsed(_Request, self.body)

    @property
    def n_slow(self) -> int:
        """Return its length without raw contents."""
        return len(self.body) - sum(map(len, self.message.raw_input_contents))

    @property
    def has_texts(self) -> bool:
        """Return whether an input is BYTES."""
        return any(tensor.datatype == "BYTES" for tensor in self.message.inputs)

    def read(self) -> InferRequest:
        """Read it, with all outputs as raw bytes. Raises RequestError as read_infer_request."""
        message, raw = self.message, self.message.raw_input_contents
        if raw and len(raw) != len(message.inputs):
            raise RequestError(f"the request has {len(raw)} raw_input_contents, but {len(message.inputs)} inputs")
        sizes: list[int | None] = [*map(len, raw)] or [None] * len(message.inputs)
        content = {
            "id": message.id or None,
            "parameters": _values(message.parameters),
            "inputs": [_input(tensor, n_raw) for tensor, n_raw in zip(message.inputs, sizes, strict=True)],
            "outputs": [{"name": one.name, "parameters": _values(one.parameters)} for one in message.outputs],
        }
        request = infer_request_of(content, memoryview(b"".join(raw)))
        return replace(request, outputs=dict.fromkeys(request.outputs, True))

    def write(
        self,
        request: InferRequest,
        model: str,
        version: str,
        outputs: Sequence[Tensor],
        parameters: Mapping[str, object],
    ) -> tuple[bytes, None]:
        """Write the response to it, with raw_output_contents."""
        response = _Response(model_name=model, model_version=version, id=request.id or "")
        for name, value in parameters.items():
            if value is not None:
                setattr(response.parameters[name], _PARAMETERS[type(value)], value)
        for tensor in outputs:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.values.shape)
            response.raw_output_contents.append(tensor.to_raw())
        return response.SerializeToString(), None


def _values(parameters: Any) -> dict[str, Any]:
    """Return parameters by name; those without a value are left out."""
    fields = {name: parameter.WhichOneof("parameter_choice") for name, parameter in parameters.items()}
    return {name: getattr(parameters[name], field) for name, field in fields.items() if field is not None}


def _input(tensor: Any, n_raw: int | None) -> dict[str, Any]:
    """Return an input as JSON has it. Raises RequestError if it has contents of several types.

    Args:
        tensor: Its message.
        n_raw: Length of its raw contents, None if the request has none.
    """
    filled = {field.name: values for field, values in tensor.contents.ListFields()}
    if len(filled) > 1:
        raise RequestError(f"input {shown(tensor.name)} has {' and '.join(filled)}; give one of them")
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "datatype": tensor.datatype,
        "parameters": {**_values(tensor.parameters), "binary_data_size": n_raw},
        "data": [*chain.from_iterable(filled.values())] if tensor.HasField("contents") else None,
    }
