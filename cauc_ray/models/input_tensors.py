"""From the columns of a batch to the tensors that a server reads."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic_core import to_json

from cauc_ray.errors import ConfigError, first_line
from cauc_ray.models.answers import Batch, batch_size, require_columns
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
        tensors = []
        for name in self.elements[int(rows[0])]:
            datatype, shape = self.inputs[name]["datatype"], self.inputs[name]["shape"]
            elements = [self.elements[row][name] for row in rows.tolist()]
            values = np.array(elements, dtype=DATATYPES[datatype])
            tensors.append(Tensor(name, datatype, values.reshape(-1, 1) if shape == [-1, 1] else values))
        return tensors


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
        datatype, shape = tensor["datatype"], tensor["shape"]
        if datatype not in DATATYPES or (shape and shape[0] != -1):
            raise ConfigError(
                f"column {column!r} cannot fill the tensor {tensor['name']!r}: it is {datatype} of shape {shape}; "
                f"expected one of {', '.join(DATATYPES)}, and rows, -1, first"
            )
        for row, value in enumerate(batch[column]):
            if value is None and column in optional:
                continue
            try:
                elements[row][tensor["name"]] = _text(value) if datatype == "BYTES" else _numbers(value, tensor)
            except ValueError as error:
                faults.setdefault(row, f"column {column!r} {first_line(error)}")
    usable = {row: element for row, element in elements.items() if row not in faults}
    return InputTensors({tensor["name"]: tensor for tensor in filled.values()}, usable, faults)


def _numbers(value: Any, tensor: TensorMetadata) -> npt.NDArray[Any]:
    """Return a row's numbers as a tensor takes them. Raises ValueError if it does not."""
    datatype, dims = tensor["datatype"], tensor["shape"][1:]
    dtype, values = DATATYPES[datatype], np.asarray(value)
    if value is None or not np.can_cast(values.dtype, dtype, "same_kind"):
        content = "no value" if value is None else values.dtype
        raise ValueError(f"has {content}, the server takes {datatype}")
    if dims == [1] and not values.ndim:
        values = values.reshape(1)
    if values.ndim != len(dims) or any(size not in (-1, n) for size, n in zip(dims, values.shape, strict=True)):
        raise ValueError(f"is of shape {list(values.shape)}, the server takes {dims}")
    with np.errstate(over="ignore"):
        cast = values.astype(dtype)
    if dtype.kind in "iu" and not np.array_equal(cast, values):
        raise ValueError(f"has a number outside the range of {datatype}")
    return cast


def _text(value: Any) -> bytes:
    """Return texts in UTF-8, bytes as they are, lists as JSON. Raises ValueError for anything else."""
    value = value.tolist() if isinstance(value, np.ndarray) else value
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str | list | tuple):
        content = "no value" if value is None else type(value).__name__
        raise ValueError(f"has {content}, the server takes texts")
    return value.encode() if isinstance(value, str) else to_json(value)
