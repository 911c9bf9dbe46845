"""From the tensors of a request to the columns that models read."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, NotRequired, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from cauc_ray.errors import explain, printable
from cauc_ray.models.answers import Batch
from cauc_ray.models.pool import InputSpec, Pool, StageSpec
from cauc_ray.models.prompts import QUESTION_COLUMNS
from cauc_ray.protocol.tensors import RequestError, Tensor

_BYTES = InputSpec(datatype="BYTES")
_OPTIONAL = ("context", "subject")
# Of JSON's numbers and truth values, by the kind of numpy's type.
_DATATYPES = {"b": "BOOL", "i": "INT64", "f": "FP64"}

_Choices = Annotated[list[str], Field(min_length=2)]
T = TypeVar("T")


class _Question(TypedDict):
    """A question as JSON."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    question: str
    choices: _Choices
    context: NotRequired[str | None]
    subject: NotRequired[str | None]


_QUESTION, _CHOICES = TypeAdapter(_Question), TypeAdapter(_Choices)


class Inputs:
    """The tensors that a pool's models read, and how they become columns.

    A column `image` takes encoded images (BYTES) or pixels; questions are JSON texts {question, choices, …}, or
    come apart as texts `question` and JSON lists `choices`. Columns of prompts and of text classifiers are texts. If
    the models are a user's own and the pool does not declare its inputs, all tensors are taken as they come.

    Attributes:
        declared: The required inputs.
        names: Names of the required and the optional inputs.
        takes_any: Whether a request may have further inputs.
    """

    def __init__(self, pool: Pool, stages: tuple[StageSpec, ...]) -> None:
        models = [] if pool.inputs else [stage.model for stage in stages]
        reads = [model.columns_read for model in models]
        self._pixels = any("image" in (columns.names or ()) for columns in reads)
        self._questions = any(columns.required >= QUESTION_COLUMNS for columns in reads)
        texts = {name for columns in reads for name in columns.texts}
        self.texts = tuple(sorted(texts))
        declared = dict(pool.inputs) | dict.fromkeys(sorted(texts), _BYTES)
        if self._pixels:
            declared["image"] = _BYTES
        if any(model.kind == "saved" for model in models):
            declared["example_id"] = _BYTES
        self.declared: Mapping[str, InputSpec] = declared
        self._choices = any("choices" in columns.required for columns in reads)
        optional_names = (*(["choices"] if self._choices else []), *(_OPTIONAL if self._questions else ()))
        self.names = tuple(dict.fromkeys([*declared, *optional_names]))
        standard = texts | QUESTION_COLUMNS | {"context", "image"}
        self.takes_any = any(columns.names is None or columns.names - standard for columns in reads)
        # Clients would retry indefinitely with a request that no queue can hold.
        self._most_rows = min(pool.serving.max_request_rows, pool.serving.max_queued_rows)

    def tensors(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the tensors of rows by column names; a missing value is null. Raises RequestError naming a column."""
        self.require_rows(len(rows))
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: self._tensor(name, [row.get(name) for row in rows]) for name in names}

    def _tensor(self, name: str, values: list[Any]) -> Tensor:
        declared, is_image = self.declared.get(name), self._pixels and name == "image"
        if is_image:
            values = [_decoded(value) if isinstance(value, str) else value for value in values]
        elif any(map(_is_text, values)) or (declared is not None and declared.datatype == "BYTES"):
            values = [value if value is None or isinstance(value, str) else json.dumps(value) for value in values]
        try:
            present = np.array([value for value in values if value is not None])
        except ValueError as error:
            raise RequestError(f"rows: column {name!r:.80} has lists of several lengths") from error
        shape = present.shape[1:]
        numbers = np.array([value for value in present.ravel().tolist() if value is not None])
        inferred = _DATATYPES.get(numbers.dtype.kind, "BYTES")
        if is_image:
            datatype = "UINT8" if inferred == "INT64" else "BYTES"
        else:
            datatype = inferred if declared is None else declared.datatype
        null = np.full(shape, None).tolist()
        data = [null if value is None else value for value in values]
        return Tensor.from_json(name, datatype, [len(values), *shape], data)

    def columns(self, tensors: Mapping[str, Tensor]) -> tuple[Batch, int]:
        """Return a request's columns, each (n, ...), and n.

        Raises RequestError naming the tensor that is missing, unknown, or has another type or shape.
        """
        self._check_names(tensors)
        n = self._n_rows(tensors)
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, tensor in tensors.items():
            self._check(tensor)
            columns[name] = _column(tensor)
        return (_questions(columns) if self._questions and "choices" not in columns else columns), n

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        required = [*self.declared, *(["choices"] if self._choices and not self._questions else [])]
        missing = next((name for name in required if name not in tensors), None)
        if missing is not None:
            raise RequestError(f"input {missing!r} is missing; the model reads {', '.join(required)}")
        unknown = next((name for name in tensors if name not in self.names), None)
        if unknown is not None and not self.takes_any:
            raise RequestError(f"unknown input {unknown!r:.80}; the model reads {', '.join(self.names)}")

    def _n_rows(self, tensors: Mapping[str, Tensor]) -> int:
        first, n = "", -1
        for name, tensor in tensors.items():
            if not tensor.values.ndim:
                raise RequestError(f"input {name!r} has no first dimension, which counts the rows")
            if n < 0:
                first, n = name, len(tensor.values)
            elif len(tensor.values) != n:
                raise RequestError(f"input {name!r} has {len(tensor.values)} rows, input {first!r} has {n}")
        self.require_rows(n)
        return n

    def require_rows(self, n: int) -> None:
        """Raise RequestError unless a request may have n rows."""
        if not 1 <= n <= self._most_rows:
            raise RequestError(f"a request must have 1 to {self._most_rows} rows, got {n}", 413 if n else 400)

    def _check(self, tensor: Tensor) -> None:
        """Refuse another type or shape than the models read."""
        name, datatype, shape = tensor.name, tensor.datatype, tensor.values.shape[1:]
        declared = _BYTES if self._questions and name in _OPTIONAL else self.declared.get(name)
        expected = None
        # Independent of the pool: the number of choices is checked against the model's answers.
        if name == "choices" and (datatype != "BYTES" or len(shape) > 1 or shape == (0,)):
            expected = "must be BYTES of shape [rows] (JSON lists of texts) or [rows, choices]"
        elif self._pixels and name == "image" and datatype != "BYTES":
            if datatype != "UINT8" or len(shape) not in (2, 3) or shape[2:] not in ((), (3,)):
                expected = "must be BYTES (encoded images) or UINT8 of shape [rows, height, width, 3]"
        elif declared is not None and datatype != declared.datatype:
            raise RequestError(f"input {name!r} must be {declared.datatype}, got {datatype}")
        elif declared is not None and not _fits(shape, declared):
            dims = ", ".join(["rows", *map(str, declared.shape)])
            raise RequestError(f"input {name!r} must have shape [{dims}], got {list(tensor.values.shape)}")
        if expected is not None:
            raise RequestError(f"input {name!r} {expected}, got {datatype} of shape {list(tensor.values.shape)}")


def _fits(shape: tuple[int, ...], declared: InputSpec) -> bool:
    if declared.datatype == "BYTES" and not declared.shape and shape == (1,):
        return True
    return len(shape) == len(declared.shape) and all(
        dimension in (-1, size) for dimension, size in zip(declared.shape, shape, strict=True)
    )


def _column(tensor: Tensor) -> npt.NDArray[Any]:
    """Return a tensor as a column: numbers as they are, images as bytes, other BYTES as texts, choices as lists."""
    name, values = tensor.name, tensor.values
    if tensor.datatype != "BYTES":
        return values
    values = values.reshape(-1) if values.shape[1:] == (1,) else values
    if name == "image":
        return values
    texts = _by_row(values.ravel(), _text, name).reshape(values.shape)
    if name != "choices":
        return texts
    return _by_row(texts, _read, _CHOICES, name) if texts.ndim == 1 else objects(map(list, texts), len(texts))


def _questions(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Take apart questions that come as JSON texts."""
    questions = _by_row(columns["question"], _read, _QUESTION, "question")
    names = ("question", "choices", *_OPTIONAL)
    columns_of_questions = {
        name: objects(((one or {}).get(name) for one in questions), len(questions)) for name in names
    }
    return {**columns_of_questions, **{name: column for name, column in columns.items() if name != "question"}}


def _by_row(values: npt.NDArray[Any], read: Callable[..., Any], *args: Any) -> npt.NDArray[Any]:
    """Return what a function makes of each value, given its row, too."""
    return objects((read(value, row, *args) for row, value in enumerate(values)), len(values))


def objects(values: Iterable[Any], n: int) -> npt.NDArray[Any]:
    """Return values as a column of objects, (n,)."""
    return np.fromiter(values, dtype=object, count=n)


def _is_text(value: Any) -> bool:
    """Return whether a value is a text, or goes to a model as one of JSON."""
    return isinstance(value, str | dict) or (isinstance(value, list) and any(isinstance(part, str) for part in value))


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise RequestError("rows: an image must be a list of pixels, or a file in base64") from error


def _text(value: bytes | None, row: int, name: str) -> str | None:
    try:
        return value if value is None else value.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"input {name!r}: element {row} is not UTF-8 text") from error


def _read(text: str | None, row: int, kind: TypeAdapter[T], name: str) -> T | None:
    """Read a JSON text, None for null. Raises RequestError where it holds something else."""
    try:
        return None if text is None else kind.validate_json(text, strict=True)
    except ValidationError as error:
        raise RequestError(printable(f"input {name!r}: row {row}: {explain(error)}")) from error
