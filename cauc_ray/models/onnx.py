"""Classifiers in ONNX files as stages: of images, of texts, or of the columns of a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError, DataError, first_line
from cauc_ray.models.answers import Batch, ModelFacts, batch_size, logits_of, require_columns
from cauc_ray.models.kind import DeclaringSpec, Device, LocalFile, Section, TextColumns, require_file
from cauc_ray.models.passes import LocalModel, Passes, text_passes
from cauc_ray.numbers.types import Floats

_NUMBERS: Mapping[str, str] = {
    **{f"tensor({name})": name for name in ("double", "int64", "int32", "uint8", "bool")},
    "tensor(float)": "float32",
}


# What tokenizers call the inputs of networks.
_ENCODED = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
Values: TypeAlias = npt.NDArray[Any]


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

    SPANS_GPUS: ClassVar[bool] = False
    kind: Literal["onnx"]
    model: LocalFile
    image: ImageInput | None = None
    tokenizer: LocalFile | None = None
    text: TextColumns = ("text",)
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
    def texts(self) -> frozenset[str]:
        """Return the columns of texts."""
        return frozenset(self.text if self.tokenizer is not None else ())

    def check(self, here: bool) -> None:
        """Raise ConfigError for a file that does not exist."""
        for path in filter(None, (self.model, self.tokenizer)):
            require_file(path, here)

    def load(self) -> OnnxModel:
        """Load the file. Raises ConfigError if it or a package is missing, or it has no such output."""
        self.require(
            "onnx", "onnxruntime", *(["PIL"] if self.image else []), *(["tokenizers"] if self.tokenizer else [])
        )
        import onnxruntime

        providers = {"cpu": [_CPU], "cuda": [_CUDA], "auto": [_CUDA, _CPU]}[self.device]
        providers = [name for name in providers if name in onnxruntime.get_available_providers()]
        if not providers:
            raise ConfigError("device cuda: this onnxruntime has no GPU; install onnxruntime-gpu, or give device cpu")
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = _cpus()
        options.log_severity_level = 3
        try:
            session = onnxruntime.InferenceSession(self.model, options, providers=[*dict.fromkeys([*providers, _CPU])])
        except Exception as error:  # missing or damaged files raise errors of many types
            raise ConfigError(f"{self.model} cannot be loaded: {first_line(error)}") from error
        return OnnxModel(self, session)


def _cpus() -> int:
    """Return the CPUs of the stage, 0 for all of the machine's."""
    return int(os.environ.get("OMP_NUM_THREADS") or 0)


class OnnxModel(LocalModel):
    """A network that ONNX Runtime runs; images are read in threads."""

    def __init__(self, spec: OnnxSpec, session: Any) -> None:
        self._spec = spec
        self._session = session
        self._inputs = {given.name: given for given in session.get_inputs()}
        self._output = _output_of(spec, {given.name: given for given in session.get_outputs()})
        self._tokenizer = _tokenizer_of(spec)
        self._pool = ThreadPoolExecutor(_cpus() or os.cpu_count())
        if (spec.image or spec.columns) and len(self._inputs) != 1:
            raise ConfigError(f"{spec.model} has inputs {', '.join(self._inputs)}, and one was expected")
        unknown = [name for name in self._inputs if spec.tokenizer and name not in _ENCODED]
        if unknown:
            raise ConfigError(f"{spec.model} has an input {unknown[0]!r}, which no tokenizer gives")
        self.facts = ModelFacts(f"onnx {spec.model}", spec.answers_kind, dtype="float32")

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into the inputs of its calls. Raises DataError when a column is missing."""
        if self._tokenizer is not None:
            return text_passes(batch, self._spec.text, self._encoded, self._padded, self._spec.batch_tokens)
        rows, inputs, faults = self._images(batch) if self._spec.image else self._numbers(batch)
        return [(rows, inputs)] if rows else [], faults

    def launch(self, inputs: Mapping[str, Values]) -> Floats:
        """Return the network's output for some rows."""
        (output,) = self._session.run([self._output], inputs)
        return logits_of(output, len(next(iter(inputs.values()))))[0]

    def _images(self, batch: Batch) -> tuple[list[int], dict[str, Values], dict[int, str]]:
        from cauc_ray.models.images import read_images

        pixels, faults = read_images(batch, partial(_pixels, how=self._spec.image or ImageInput()), self._pool.map)
        return [*pixels], {name: np.stack([*pixels.values()]) for name in self._inputs if pixels}, faults

    def _numbers(self, batch: Batch) -> tuple[list[int], dict[str, Values], dict[int, str]]:
        columns = self._spec.columns
        require_columns(batch, *(columns or self._inputs))
        inputs = {
            name: np.column_stack([_typed(batch[column], given)[:, 0] for column in columns])
            if columns
            else _typed(batch[name], given)
            for name, given in self._inputs.items()
        }
        n = batch_size(batch)
        numbers = [values.reshape(n, -1) for values in inputs.values() if values.dtype.kind == "f"]
        bad_mask = np.logical_or.reduce([np.zeros(n, bool), *(np.isnan(own).any(axis=1) for own in numbers)])
        rows = np.flatnonzero(~bad_mask)
        faults = dict.fromkeys(np.flatnonzero(bad_mask).tolist(), "one of its numbers is missing")
        return rows.tolist(), {name: values[rows] for name, values in inputs.items()}, faults

    def _encoded(self, texts: list[list[str]]) -> list[dict[str, list[int]]]:
        encodings = [self._tokenizer.encode(*own) for own in texts]
        return [{name: getattr(own, source) for name, source in _ENCODED.items()} for own in encodings]

    def _padded(self, encoded: list[dict[str, list[int]]]) -> dict[str, Values]:
        width = max(len(own["input_ids"]) for own in encoded)
        return {
            name: np.array([own[name] + [0] * (width - len(own[name])) for own in encoded]) for name in self._inputs
        }


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


def _pixels(image: Any, how: ImageInput) -> Floats:
    """Return an image as float32 (3, size, size)."""
    from PIL import Image

    shorter = max(how.size, how.resize or round(how.size * 256 / 224))
    width, height = (shorter * side // min(image.size) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - how.size) / 2), round((height - how.size) / 2)
    cut = resized.crop((left, top, left + how.size, top + how.size))
    values = (np.asarray(cut, np.float32) / 255 - np.array(how.mean, np.float32)) / np.array(how.std, np.float32)
    pixels: Floats = np.ascontiguousarray(values.transpose(2, 0, 1))
    return pixels
