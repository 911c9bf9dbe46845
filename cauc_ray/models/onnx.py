"""Classifiers in ONNX files as stages: of images, of texts, or of the columns of a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError, DataError, first_line
from cauc_ray.files.paths import AnyPath, path_from
from cauc_ray.models.answers import (
    Answers,
    Batch,
    ModelFacts,
    PreparingModel,
    as_answers,
    batch_size,
    bucketed,
    require_columns,
    spread,
)
from cauc_ray.models.kind import DeclaringSpec, Device, Section, require, require_here
from cauc_ray.numbers.types import Floats

_NUMBERS: Mapping[str, str] = {
    **{f"tensor({name})": name for name in ("double", "int64", "int32", "uint8", "bool")},
    "tensor(float)": "float32",
}


class ImageInput(Section):
    """How a network reads images: the shorter side is resized, the centre cut out, the channels normalised.

    size: of the square that it gets.   resize: the shorter side before that, 256/224 of size without it.   mean, std:
    of each channel, on a scale from 0 to 1; ImageNet's by default.
    """

    size: int = Field(default=224, ge=1)
    resize: int | None = Field(default=None, ge=1)
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


class OnnxSpec(DeclaringSpec):
    """`{kind: onnx, model: model.onnx, image: {size: 224}}`: a classifier that ONNX Runtime runs.

    image: it reads the column `image`.   tokenizer: it reads texts, by this tokenizer.json; text: their column, or two
    for a pair; max_tokens: longer ones are cut.   columns: it reads these numbers as one input (n, columns); without
    any of these, each of its inputs reads the column of its name.   output: the output to take, else `logits`, else
    `probabilities`, else its only one of rows by classes.   logit_kind: of that output, raw unless declared.
    """

    HOW: ClassVar[frozenset[str]] = DeclaringSpec.HOW | {"device"}
    SPANS_GPUS: ClassVar[bool] = False
    kind: Literal["onnx"]
    model: str = Field(min_length=1)
    image: ImageInput | None = None
    tokenizer: str | None = None
    text: tuple[str, ...] = Field(default=("text",), min_length=1, max_length=2)
    max_tokens: int = Field(default=512, ge=4)
    batch_tokens: int = Field(default=16384, ge=1)
    columns: tuple[str, ...] = ()
    output: str | None = None
    device: Device = "auto"

    @model_validator(mode="after")
    def _one_input(self) -> OnnxSpec:
        if sum([self.image is not None, self.tokenizer is not None, bool(self.columns)]) > 1:
            raise ValueError("give one of image, tokenizer and columns: they say what the network reads")
        return self

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that it reads, as far as its settings tell."""
        if self.image is not None:
            return frozenset({"image"})
        return frozenset(self.columns if self.tokenizer is None else self.text)

    @property
    def reads(self) -> frozenset[str] | None:
        """Return the columns that it reads; None where only the file tells."""
        return self.needs or None

    @property
    def texts(self) -> frozenset[str]:
        """Return the columns of texts."""
        return frozenset(self.text if self.tokenizer is not None else ())

    def located(self, folder: AnyPath) -> Self:
        """Return the same with relative paths resolved against the pool file's folder."""
        named = {"model": self.model, "tokenizer": self.tokenizer}
        return self.model_copy(
            update={key: require_here(path_from(folder, path)) for key, path in named.items() if path is not None}
        )

    def load(self) -> OnnxModel:
        """Load the file. Raises ConfigError if it or a package is missing, or it has no such output."""
        require("onnx", "onnxruntime", *(["PIL"] if self.image else []), *(["tokenizers"] if self.tokenizer else []))
        import onnxruntime

        if self.device == "cuda" and "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
            raise ConfigError("device cuda: this onnxruntime has no GPU; install onnxruntime-gpu, or give device cpu")
        known = onnxruntime.get_available_providers()
        providers = [name for name in ("CUDAExecutionProvider", "CPUExecutionProvider") if name in known]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(os.environ.get("OMP_NUM_THREADS") or 0)  # the CPUs of the stage
        options.log_severity_level = 3
        if not Path(self.model).is_file():
            raise ConfigError(f"there is no file {self.model}")
        try:
            session = onnxruntime.InferenceSession(
                self.model, options, providers=providers if self.device != "cpu" else ["CPUExecutionProvider"]
            )
        except Exception as error:  # damaged files raise errors of many types
            raise ConfigError(f"{self.model} cannot be loaded: {first_line(error)}") from error
        return OnnxModel(self, session)


class OnnxModel(PreparingModel):
    """A network that ONNX Runtime runs."""

    def __init__(self, spec: OnnxSpec, session: Any) -> None:
        self._spec = spec
        self._session = session
        self._inputs = {given.name: given for given in session.get_inputs()}
        self._output = _output_of(spec, {given.name: given for given in session.get_outputs()})
        self._tokenizer = _tokenizer_of(spec)
        single = spec.image is not None or bool(spec.columns)
        if single and len(self._inputs) != 1:
            raise ConfigError(f"{spec.model} has inputs {', '.join(self._inputs)}, and one was expected")
        self.facts = ModelFacts(f"onnx {spec.model}", spec.answers_kind, dtype="float32")

    def prepare(self, batch: Batch) -> tuple[int, list[tuple[list[int], dict[str, npt.NDArray[Any]]]], dict[int, str]]:
        """Turn a batch into the inputs of its calls. Raises DataError when a column is missing."""
        n = batch_size(batch)
        if self._spec.image is not None:
            return n, *self._images(batch, self._spec.image)
        if self._tokenizer is not None:
            return n, *self._texts(batch)
        if not self._spec.columns:
            require_columns(batch, *self._inputs)
            inputs = {name: _typed(batch[name], given) for name, given in self._inputs.items()}
        else:
            require_columns(batch, *self._spec.columns)
            ((name, given),) = self._inputs.items()
            inputs = {name: np.column_stack([_typed(batch[column], given)[:, 0] for column in self._spec.columns])}
        bad = {row: "one of its numbers is missing" for row in range(n) if _has_nan(inputs, row)}
        rows = [row for row in range(n) if row not in bad]
        return n, [(rows, {name: values[rows] for name, values in inputs.items()})] if rows else [], bad

    def answer(
        self, prepared: tuple[int, list[tuple[list[int], dict[str, npt.NDArray[Any]]]], dict[int, str]]
    ) -> Answers:
        """Answer a batch; rows that cannot be read are failures."""
        n, calls, failures = prepared
        rows, found = list[int](), list[Floats]()
        for own, inputs in calls:
            (output,) = self._session.run([self._output], inputs)
            rows += own
            found.append(as_answers(np.asarray(output), len(own)).logits)
        logits = np.concatenate(found) if found else np.zeros((0, 1), np.float32)
        return Answers(spread(n, rows, logits), failures=failures)

    def _images(
        self, batch: Batch, how: ImageInput
    ) -> tuple[list[tuple[list[int], dict[str, npt.NDArray[Any]]]], dict[int, str]]:
        from cauc_ray.models.images import ImageError, decode_image

        require_columns(batch, "image")
        pixels, faults = {}, {}
        for row, image in enumerate(batch["image"]):
            try:
                pixels[row] = _pixels(decode_image(image), how)
            except ImageError as error:
                faults[row] = str(error)
        (name,) = self._inputs
        return [(list(pixels), {name: np.stack(list(pixels.values()))})] if pixels else [], faults

    def _texts(self, batch: Batch) -> tuple[list[tuple[list[int], dict[str, npt.NDArray[Any]]]], dict[int, str]]:
        from cauc_ray.models.texts import read_texts

        texts, faults = read_texts(batch, self._spec.text)
        encoded = {row: self._tokenizer.encode(*own) for row, own in texts.items()}
        calls = []
        for rows in bucketed({row: len(own.ids) for row, own in encoded.items()}, self._spec.batch_tokens):
            width = max(len(encoded[row].ids) for row in rows)
            inputs = {}
            for name in self._inputs:
                source = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}.get(
                    name
                )
                if source is None:
                    raise DataError(f"{self._spec.model} has an input {name!r}, which no tokenizer gives")
                padded = np.zeros((len(rows), width), np.int64)
                for place, row in enumerate(rows):
                    values = getattr(encoded[row], source)
                    padded[place, : len(values)] = values
                inputs[name] = padded
            calls.append((rows, inputs))
        return calls, faults


def _tokenizer_of(spec: OnnxSpec) -> Any:
    if spec.tokenizer is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(spec.tokenizer)
    except Exception as error:  # the library's errors have no type of their own
        raise ConfigError(f"{spec.tokenizer} is not a tokenizer.json: {first_line(error)}") from error
    tokenizer.enable_truncation(spec.max_tokens)
    tokenizer.no_padding()
    return tokenizer


def _output_of(spec: OnnxSpec, outputs: Mapping[str, Any]) -> str:
    """Return the name of the output with a row's numbers. Raises ConfigError if it cannot be told."""
    if spec.output is not None and spec.output not in outputs:
        raise ConfigError(f"{spec.model} has no output {spec.output!r}; it has {', '.join(outputs)}")
    tables = [name for name, given in outputs.items() if given.type in _NUMBERS and len(given.shape or ()) == 2]
    for name in (spec.output, "logits", "probabilities", tables[0] if len(tables) == 1 else None):
        if name in outputs:
            return str(name)
    raise ConfigError(f"{spec.model} has the outputs {', '.join(outputs)}; name the one of rows by classes as output")


def _typed(column: npt.NDArray[Any], given: Any) -> npt.NDArray[Any]:
    """Return a column as an input of the network: (n, 1) where that has two dimensions and the column has one."""
    if given.type == "tensor(string)":
        values = np.array([str(value) for value in column], dtype=object)
    elif given.type in _NUMBERS:
        try:
            values = np.stack([np.asarray(value, _NUMBERS[given.type]) for value in column])
        except (TypeError, ValueError) as error:
            raise DataError(f"input {given.name!r} of the network needs numbers: {first_line(error)}") from error
    else:
        raise ConfigError(f"input {given.name!r} of the network is a {given.type}, which no column gives")
    return values[:, None] if values.ndim == 1 and len(given.shape) == 2 else values


def _has_nan(inputs: Mapping[str, npt.NDArray[Any]], row: int) -> bool:
    return any(values.dtype.kind == "f" and bool(np.isnan(values[row]).any()) for values in inputs.values())


def _pixels(image: Any, how: ImageInput) -> Floats:
    """Return an image as float32 (3, size, size)."""
    from PIL import Image

    shorter = max(how.size, how.resize or round(how.size * 256 / 224))
    width, height = (shorter * side // min(image.size) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - how.size) / 2), round((height - how.size) / 2)
    cut = resized.crop((left, top, left + how.size, top + how.size))
    values = (np.asarray(cut) / 255 - np.array(how.mean)) / np.array(how.std)
    pixels: Floats = np.ascontiguousarray(values.transpose(2, 0, 1), np.float32)
    return pixels
