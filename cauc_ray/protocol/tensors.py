"""Tensors of the Open Inference Protocol v2, read from and written to JSON and raw bytes; errors of requests."""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

INTERNAL_ERROR = "an internal error; the service's log has it"
MAX_CHARS = 120
# Reads only the start of a value: it may be as large as a body.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = MAX_CHARS
_SHORT.maxlist = 16


class RequestError(Exception):
    """A request that cannot be answered; the message is for its client.

    Attributes:
        message: The reason.
        status: HTTP status.
        retry_after_s: Seconds until another attempt may succeed, None if none will.
    """

    def __init__(self, message: str, status: int = 400, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after_s = retry_after_s


def shown(value: object) -> str:
    r"""Return a client's value for a message: short, and on one line.

    >>> shown("a\nb")
    "'a\\nb'"
    """
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_CHARS else f"{text[:MAX_CHARS]}…"


Datatype: TypeAlias = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP16", "FP32", "FP64", "BYTES"
]
DATATYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}

# The JSON types of each kind of dtype, and their names in messages. True and 1 are different here.
_JSON_TYPES: Mapping[str, set[type]] = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}, "O": {str}}
_JSON_NAMES: Mapping[type, str] = {
    bool: "booleans",
    int: "whole numbers",
    float: "numbers with a point or an exponent",
    str: "texts",
    list: "lists deeper than its shape",
    dict: "objects",
    type(None): "nulls",
}

# numpy's own limit of an array, which it counts even if another dimension is 0.
MAX_BYTES = 2**63 - 1

# Before each element of a BYTES tensor.
_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named array of one of the protocol's datatypes.

    Attributes:
        name: Name of the tensor.
        datatype: A key of DATATYPES.
        values: Array of its dtype, any shape; of BYTES, objects of `bytes`. Tensors that were read may be read-only,
            and hold NaN if they came as raw bytes.

    >>> Tensor.from_json("x", "INT8", [2, 2], [1, 2, 3, 4]).values.tolist()
    [[1, 2], [3, 4]]
    """

    name: str
    datatype: str
    values: npt.NDArray[Any]

    @classmethod
    def from_json(cls, name: str, datatype: str, shape: Sequence[int], data: object) -> Tensor:
        """Read a tensor from JSON. Raises RequestError naming it if shape or datatype and data disagree.

        Args:
            name: Name of the tensor.
            datatype: A key of DATATYPES.
            shape: Rows first.
            data: A list, flat (row-major) or nested by the shape.
        """
        n = _size(name, datatype, shape)
        if not isinstance(data, list):
            raise _fault(name, "has no 'data', a list of its values")
        flat = _flattened(data, shape)
        if flat is None:
            raise _fault(name, f"has data that are not nested by its shape {shown(shape)}")
        if len(flat) != n:
            raise _fault(name, f"has {len(flat)} values, but its shape {shown(shape)} needs {n}")
        return cls(name, datatype, _read_list(name, datatype, flat).reshape(shape))

    @classmethod
    def from_raw(cls, name: str, datatype: str, shape: Sequence[int], raw: memoryview) -> Tensor:
        """Read a tensor from raw bytes: little-endian, row-major; of BYTES, each element after its uint32 length.

        Raises RequestError naming it if the bytes do not fit datatype and shape.
        """
        dtype, n = DATATYPES[datatype], _size(name, datatype, shape)
        if datatype == "BYTES":
            return cls(name, datatype, _read_elements(name, n, raw).reshape(shape))
        if len(raw) != n * dtype.itemsize:
            raise _fault(
                name, f"has {len(raw)} bytes, but its shape {shown(shape)} of {datatype} needs {n * dtype.itemsize}"
            )
        if datatype == "BOOL" and (np.frombuffer(raw, dtype=np.uint8) > 1).any():
            raise _fault(name, "is BOOL, but has bytes other than 0 and 1")
        values = np.frombuffer(raw, dtype=dtype.newbyteorder("<")).astype(dtype, copy=False)
        return cls(name, datatype, values.reshape(shape))

    def to_json(self) -> list[Any]:
        """Return the values for JSON, flat. Raises RequestError where JSON cannot hold them."""
        try:
            if self.datatype == "BYTES":
                return [element.decode() for element in self.values.ravel()]
        except UnicodeDecodeError as error:
            raise self._not_for_json("bytes that are not UTF-8") from error
        if self.values.dtype.kind == "f" and not all_finite(self.values):
            raise self._not_for_json("NaN or an infinity")
        values: list[Any] = self.values.ravel().tolist()
        return values

    def to_raw(self) -> bytes:
        """Return the values as raw bytes, laid out as `from_raw` reads them."""
        if self.datatype == "BYTES":
            elements = self.values.ravel()
            return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))
        return self.values.astype(self.values.dtype.newbyteorder("<"), copy=False).tobytes()

    def _not_for_json(self, what: str) -> RequestError:
        return RequestError(
            f"tensor {shown(self.name)} has {what}, which JSON cannot represent; ask for it with binary_data"
        )


def _size(name: str, datatype: str, shape: Sequence[int]) -> int:
    """Return how many values a shape holds. Raises RequestError for one that no array can have."""
    n = math.prod(shape)
    if (n or math.prod([dim or 1 for dim in shape])) > MAX_BYTES // DATATYPES[datatype].itemsize:
        raise _fault(name, f"has the shape {shown(shape)}, which is too large")
    return n


def all_finite(values: npt.NDArray[Any]) -> bool:
    """Return whether all values are finite. To count them takes a third of the time of `all` where they are few."""
    return bool(np.count_nonzero(np.isfinite(values)) == values.size)


def _flattened(data: list[Any], dims: Sequence[int]) -> list[Any] | None:
    """Return data row-major, as they are where they are flat; None where they are nested unlike the shape."""
    if not data or not isinstance(data[0], list):
        return data
    level = [data]
    for dim in dims:
        # Both sets and the chain run in C: an image's numbers are too many for a loop.
        if set(map(type, level)) != {list} or set(map(len, level)) != {dim}:
            return None
        level = list(chain.from_iterable(level))
        if not level:
            break
    return level


def _read_list(name: str, datatype: str, flat: list[Any]) -> npt.NDArray[Any]:
    """Return JSON's values as an array (n,). Raises RequestError for other types and what the datatype cannot hold."""
    dtype = DATATYPES[datatype]
    wrong = set(map(type, flat)) - _JSON_TYPES[dtype.kind]
    if wrong:
        raise _fault(name, f"is {datatype}, but its data have {' and '.join(sorted(_JSON_NAMES[t] for t in wrong))}")
    if datatype == "BYTES":
        return np.array([text.encode() for text in flat], dtype=dtype)
    try:
        if dtype.kind != "f":
            return np.array(flat, dtype=dtype)
        # Rounds as numpy does, and raises where numpy would warn.
        values = np.frombuffer(struct.pack(f"{len(flat)}{dtype.char}", *flat), dtype)
    except (OverflowError, struct.error) as error:
        raise _beyond(name, datatype) from error
    if not all_finite(values):
        raise _beyond(name, datatype)
    return values


def _read_elements(name: str, n: int, raw: memoryview) -> npt.NDArray[Any]:
    """Return n BYTES elements as an array (n,). Raises RequestError where the bytes are not just these."""
    elements: list[bytes] = []
    at = 0
    while at + _LENGTH.size <= len(raw) and len(elements) < n:
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(raw, at)[0]
        elements.append(bytes(raw[start:at]))
    if at != len(raw) or len(elements) != n:
        raise _fault(name, f"has {len(raw)} bytes, which are not {n} BYTES, each after its length as a uint32")
    return np.array(elements, dtype=DATATYPES["BYTES"])


def _beyond(name: str, datatype: str) -> RequestError:
    dtype = DATATYPES[datatype]
    if dtype.kind == "f":
        most = float(np.finfo(dtype).max)
        limits = f"{-most:.6g} to {most:.6g}"
    else:
        limits = f"{np.iinfo(dtype).min} to {np.iinfo(dtype).max}"
    return _fault(name, f"has a number outside the range of {datatype}, {limits}")


def _fault(name: str, what: str) -> RequestError:
    return RequestError(f"tensor {shown(name)} {what}")
