"""Tensors of the Open Inference Protocol v2, read from and written to JSON and raw bytes; errors of requests."""

from __future__ import annotations

import math
import reprlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

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
_NUMPY = ("?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "O")
DATATYPES: Mapping[str, np.dtype[Any]] = {
    name: np.dtype(code) for name, code in zip(get_args(Datatype), _NUMPY, strict=True)
}
# Python's types of each kind of dtype. True and 1 are different here; only gRPC has bytes.
_TYPES: Mapping[str, set[type]] = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}, "O": {str, bytes}}

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
            hold NaN, and, where JSON has nulls, be arrays of objects.

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
        values = np.array(data, dtype=np.object_)
        if values.ndim != 1 and values.shape != tuple(shape)[: values.ndim]:
            raise _fault(name, f"has data that are not nested by its shape {shown(shape)}")
        if values.size != n:
            raise _fault(name, f"has {values.size} values, but its shape {shown(shape)} needs {n}")
        return cls(name, datatype, _typed(name, datatype, values.ravel().tolist()).reshape(shape))

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
                return [element if element is None else element.decode() for element in self.values.ravel()]
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


def _typed(name: str, datatype: str, values: list[Any]) -> npt.NDArray[Any]:
    """Return values (n,) as an array, with nulls as a run has them in columns.

    A null is NaN among numbers, and None among others; integers and booleans with nulls are an array of objects.
    Raises RequestError for other types and what the datatype cannot hold.
    """
    dtype = DATATYPES[datatype]
    if None in values:
        present = iter(_typed(name, datatype, [value for value in values if value is not None]))
        null = None if dtype.kind in "bO" else np.float64(np.nan)
        with_nulls = np.fromiter((null if value is None else next(present) for value in values), object, len(values))
        return with_nulls.astype(dtype) if dtype.kind == "f" else with_nulls
    if wrong := sorted(value_type.__name__ for value_type in set(map(type, values)) - _TYPES[dtype.kind]):
        raise _fault(name, f"is {datatype}, but its data have values of type {' and '.join(wrong)}")
    if datatype == "BYTES":
        return np.array([text.encode() if isinstance(text, str) else text for text in values], dtype=dtype)
    try:
        # Rounds as numpy does, and raises where numpy would warn.
        array: npt.NDArray[Any] | None = np.frombuffer(struct.pack(f"{len(values)}{dtype.char}", *values), dtype)
    except (OverflowError, struct.error):
        array = None
    if array is None or np.isinf(array).any():
        raise _fault(name, f"has a number outside the range of {datatype}")
    return array


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


def _fault(name: str, what: str) -> RequestError:
    return RequestError(f"tensor {shown(name)} {what}")
