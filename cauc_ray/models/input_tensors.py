"""From the columns of a batch to the tensors that a server reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Batch, Unusable, batch_size, require_columns
from cauc_ray.numbers.types import Ints
from cauc_ray.protocol.messages import TensorMetadata
from cauc_ray.protocol.tensors import DATATYPES, Tensor

# A row's element of a tensor: bytes, or numbers of the tensor's dtype.
Element: TypeAlias = "bytes | npt.NDArray[Any]"


@dataclass(frozen=True, slots=True)
class InputTensors:
    """Rows as a server reads them.

    Attributes:
        inputs: Tensors by name.
        elements: Elements of each row, by the inputs that it has.
        faults: Why rows cannot be sent, by row.
    """

    inputs: Mapping[str, TensorMetadata]
    elements: Mapping[int, Mapping[str, Element]]
    faults: Mapping[int, str]

    def requests(self, max_rows: int) -> Iterator[Ints]:
        """Yield rows that can share a request: they have the same inputs, of the same shapes."""
        groups: defaultdict[Any, list[int]] = defaultdict(list)
        for row, elements in self.elements.items():
            groups[tuple((name, np.shape(element)) for name, element in elements.items())].append(row)
        for rows in groups.values():
            yield from (np.array(rows[start : start + max_rows]) for start in range(0, len(rows), max_rows))

    def of(self, rows: Ints) -> list[Tensor]:
        """Return the tensors of rows that can share a request."""
        return [
            _stacked(self.inputs[name], [self.elements[row][name] for row in rows.tolist()])
            for name in self.elements[int(rows[0])]
        ]


def input_tensors(
    batch: Batch, inputs: Mapping[str, TensorMetadata], optional: Mapping[str, TensorMetadata]
) -> InputTensors:
    """Return a batch as a server reads it.

    Args:
        batch: Columns, each (n, ...).
        inputs: Tensors by the columns that fill them.
        optional: Tensors that are left out of rows without a value, by their columns.

    Raises:
        DataError: A column is missing.
        ConfigError: No column can fill a tensor.
    """
    require_columns(batch, *inputs)
    filled = {**inputs, **{column: tensor for column, tensor in optional.items() if column in batch}}
    elements: dict[int, dict[str, Element]] = {row: {} for row in range(batch_size(batch))}
    faults: dict[int, str] = {}
    for column, tensor in filled.items():
        read = _reader(column, tensor)
        for row, value in enumerate(batch[column]):
            if value is None and column in optional:
                continue
            element = read(value)
            if isinstance(element, Unusable):
                faults.setdefault(row, f"column {column!r} {element}")
            else:
                elements[row][tensor["name"]] = element
    for row in faults:
        del elements[row]
    return InputTensors({tensor["name"]: tensor for tensor in filled.values()}, elements, faults)


def _reader(column: str, tensor: TensorMetadata) -> Callable[[Any], Element | Unusable]:
    """Return the function that reads a value of a column for a tensor. Raises ConfigError if no column can fill it."""
    datatype, shape = tensor["datatype"], tensor["shape"]
    if datatype not in DATATYPES or (shape and shape[0] != -1):
        raise ConfigError(
            f"column {column!r} cannot fill the tensor {tensor['name']!r}: it is {datatype} of shape {shape}; "
            f"expected one of {', '.join(DATATYPES)}, and rows, -1, first"
        )
    if datatype == "BYTES":
        return lambda value: _bytes(value)
    dtype, dims = DATATYPES[datatype], shape[1:]

    def number(value: Any) -> Element | Unusable:
        if value is None:
            return Unusable("has no value")
        try:
            values = np.asarray(value)
        except ValueError:  # lists of several lengths
            return Unusable(f"is not of the shape {dims}")
        if not np.can_cast(values.dtype, dtype, "same_kind"):
            return Unusable(f"has {values.dtype}, the server takes {datatype}")
        if dims == [1] and not values.ndim:
            values = values.reshape(1)
        if values.ndim != len(dims) or any(size not in (-1, n) for size, n in zip(dims, values.shape, strict=True)):
            return Unusable(f"is of shape {list(values.shape)}, the server takes {dims}")
        with np.errstate(over="ignore"):
            cast = values.astype(dtype)
        if dtype.kind in "iu" and not np.array_equal(cast, values):
            return Unusable(f"has a number outside the range of {datatype}")
        return cast

    return number


def _bytes(value: Any) -> Element | Unusable:
    """Return texts in UTF-8, bytes as they are, lists as JSON."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, str | list | tuple):
        return Unusable("has no value" if value is None else f"has {type(value).__name__}, the server takes texts")
    try:
        return value.encode() if isinstance(value, str) else to_json(value)
    except ValueError:
        return Unusable("has text that is not valid Unicode")


def _stacked(tensor: TensorMetadata, elements: Sequence[Element]) -> Tensor:
    name, datatype = tensor["name"], tensor["datatype"]
    if datatype != "BYTES":
        return Tensor(name, datatype, np.stack(elements))
    values = np.fromiter(elements, dtype=object, count=len(elements))
    return Tensor(name, datatype, values.reshape(-1, 1) if tensor["shape"] == [-1, 1] else values)
