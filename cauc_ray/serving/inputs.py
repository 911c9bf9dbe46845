"""From the tensors of a request to the columns that models read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, NotRequired, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from cauc_ray.errors import explain, printable
from cauc_ray.models.answers import Batch
from cauc_ray.models.pool import Pool, StageSpec
from cauc_ray.models.service import InputSpec
from cauc_ray.serving.faults import RequestError, shown
from cauc_ray.serving.tensors import Tensor, all_finite

_BYTES = InputSpec(datatype="BYTES")
_IMAGE_KINDS = ("torchvision", "transformers-image")
_CHOICE_KINDS = ("transformers-choice", "openai")
_OPTIONAL = ("context", "subject", "task")

_Choices = Annotated[list[str], Field(min_length=2)]
T = TypeVar("T")


class _Question(TypedDict):
    """A question as JSON."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[misc]
    question: str
    choices: _Choices
    context: NotRequired[str | None]
    subject: NotRequired[str | None]
    task: NotRequired[str | None]


_QUESTION, _CHOICES = TypeAdapter(_Question), TypeAdapter(_Choices)


class Inputs:
    """The tensors that a pool's models read, and how they become columns.

    A column `image` takes encoded images (BYTES) or pixels; questions are JSON texts {question, choices, …}, or
    come apart as texts `question` and JSON lists `choices`. Where the models are a user's own and the pool does not
    declare its inputs, all tensors are taken as they come.

    declared: the inputs that a request must have.   names: of these, and of those that it may have.   takes_any:
    whether it may have others.   any_pixels: whether `image` may be pixels.
    """

    def __init__(self, pool: Pool, stages: tuple[StageSpec, ...]) -> None:
        kinds = {stage.model.model_dump()["kind"] for stage in stages}
        self.any_pixels = bool(kinds & set(_IMAGE_KINDS)) and not pool.inputs
        self._questions = bool(kinds & set(_CHOICE_KINDS)) and not pool.inputs
        declared = dict(pool.inputs)
        if not declared:
            known = {"image": _BYTES} if self.any_pixels else {"question": _BYTES} if self._questions else {}
            declared = {**known, **({"example_id": _BYTES} if "saved" in kinds else {})}
        self.declared: Mapping[str, InputSpec] = declared
        self.names = tuple(dict.fromkeys([*declared, *(("choices", *_OPTIONAL) if self._questions else ())]))
        self.takes_any = bool(kinds - {*_IMAGE_KINDS, *_CHOICE_KINDS, "saved"}) and not pool.inputs
        # Clients would retry indefinitely with a request that no queue can hold.
        self._most_rows = min(pool.serving.max_request_rows, pool.serving.max_queued_rows)

    def columns(self, tensors: Mapping[str, Tensor]) -> tuple[Batch, int]:
        """Return a request's columns, each (n, ...), and n.

        Raises RequestError naming the tensor that is missing, unknown, has another type or shape, or is not finite.
        """
        self._check_names(tensors)
        n = self._n_rows(tensors)
        columns: dict[str, npt.NDArray[Any]] = {}
        for name, tensor in tensors.items():
            self._check(tensor)
            _require_finite(tensor)
            columns[name] = self._column(tensor)
        if self._questions:
            columns = _questions(columns)
        return columns, n

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        missing = next((name for name in self.declared if name not in tensors), None)
        if missing is not None:
            raise RequestError(f"there is no input {missing!r}; the model reads {', '.join(self.declared)}")
        unknown = next((name for name in tensors if name not in self.names), None)
        if unknown is not None and not self.takes_any:
            raise RequestError(f"unknown input {unknown!r:.80}; the model reads {', '.join(self.names)}")

    def _n_rows(self, tensors: Mapping[str, Tensor]) -> int:
        counts: dict[str, int | None] = {
            name: tensor.values.shape[0] if tensor.values.ndim else None for name, tensor in tensors.items()
        }
        first, n = next(iter(counts.items()))
        for name, count in counts.items():
            if count is None:
                raise RequestError(f"input {name!r} has no first dimension, which counts the rows")
            if count != n:
                raise RequestError(f"input {name!r} has {count} rows, input {first!r} has {n}")
        assert n is not None
        if not 1 <= n <= self._most_rows:
            raise RequestError(f"a request must have 1 to {self._most_rows} rows, got {n}", 413 if n else 400)
        return n

    def _check(self, tensor: Tensor) -> None:
        """Refuse another type or shape than the pool declares."""
        optional = self._questions and tensor.name in _OPTIONAL
        declared = _BYTES if optional else self.declared.get(tensor.name)
        shape = tensor.values.shape[1:]
        # Independent of the pool: the number of choices is checked against the model's answers.
        if tensor.name == "choices" and (tensor.datatype != "BYTES" or len(shape) > 1 or shape == (0,)):
            raise RequestError(
                f"input 'choices' must be BYTES of shape [rows] (JSON lists of texts) or [rows, choices], got "
                f"{tensor.datatype} of shape {list(tensor.values.shape)}"
            )
        if self.any_pixels and tensor.name == "image" and tensor.datatype != "BYTES":
            if tensor.datatype != "UINT8" or len(shape) not in (2, 3) or shape[2:] not in ((), (3,)):
                raise RequestError(
                    f"input 'image' must be BYTES (encoded images) or UINT8 of shape [rows, height, width, 3], got "
                    f"{tensor.datatype} of shape {list(tensor.values.shape)}"
                )
            return
        if declared is None:
            return
        if tensor.datatype != declared.datatype:
            raise RequestError(f"input {tensor.name!r} must be {declared.datatype}, got {tensor.datatype}")
        if tensor.datatype == "BYTES" and not declared.shape and shape in ((), (1,)):
            return
        fits = len(shape) == len(declared.shape) and all(
            wanted in (-1, size) for wanted, size in zip(declared.shape, shape, strict=True)
        )
        if not fits:
            raise RequestError(
                f"input {tensor.name!r} must have shape [rows, {', '.join(map(str, declared.shape))}], got "
                f"{list(tensor.values.shape)}"
                if declared.shape
                else f"input {tensor.name!r} must have shape [rows], got {list(tensor.values.shape)}"
            )

    def _column(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Return a tensor as a column: numbers as they are, images as bytes, other BYTES as texts."""
        if tensor.datatype != "BYTES":
            return tensor.values
        values = tensor.values.reshape(-1) if tensor.values.shape[1:] == (1,) else tensor.values
        if tensor.name == "image":
            return values
        texts = _texts(values.reshape(-1), tensor.name).reshape(values.shape)
        if tensor.name != "choices":
            return texts
        return _lists(texts) if texts.ndim == 1 else _rows_of(texts)


def _require_finite(tensor: Tensor) -> None:
    """Refuse NaN and infinities, which raw bytes can hold and JSON cannot: few models can read them."""
    if tensor.values.dtype.kind != "f":
        return
    if not all_finite(tensor.values):
        row = int(np.argwhere(~np.isfinite(tensor.values))[0, 0])
        raise RequestError(f"input {shown(tensor.name)}: row {row} has NaN or an infinity; give finite numbers")


def _texts(values: npt.NDArray[Any], name: str) -> npt.NDArray[Any]:
    texts = np.empty(len(values), dtype=object)
    for row, value in enumerate(values):
        try:
            texts[row] = value.decode()
        except UnicodeDecodeError as error:
            raise RequestError(f"input {name!r}: element {row} is not UTF-8 text") from error
    return texts


def _lists(texts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Read each row's choices from a JSON list of texts."""
    lists = np.empty(len(texts), dtype=object)
    for row, text in enumerate(texts):
        lists[row] = _read(_CHOICES, text, f"input 'choices': row {row}")
    return lists


def _rows_of(texts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    lists = np.empty(len(texts), dtype=object)
    for row, own in enumerate(texts):
        lists[row] = [str(text) for text in own.ravel()]
    return lists


def _questions(columns: dict[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Take apart questions that come as JSON texts; leave those whose choices are a tensor of their own."""
    if "choices" in columns:
        return columns
    texts = columns["question"]
    apart = {name: np.empty(len(texts), dtype=object) for name in ("question", "choices", *_OPTIONAL)}
    for row, text in enumerate(texts):
        question = _read(_QUESTION, text, f"input 'question': row {row}")
        for name, column in apart.items():
            column[row] = question.get(name)
    return {**apart, **{name: column for name, column in columns.items() if name != "question"}}


def _read(kind: TypeAdapter[T], text: str, where: str) -> T:
    """Read a JSON text. Raises RequestError where it holds something else."""
    try:
        return kind.validate_json(text, strict=True)
    except ValidationError as error:
        raise RequestError(printable(f"{where}: {explain(error)}")) from error
