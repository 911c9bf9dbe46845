"""Classifiers in ONNX files as stages: of images, of texts, or of the columns of a table."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from cauc_ray.errors import ConfigError, DataError, first_line
from cauc_ray.models.answers import (
    Answers,
    Batch,
    ModelFacts,
    batch_size,
    logits_of,
    require_columns,
    require_same_labels,
)
from cauc_ray.models.kind import (
    DeclaringSpec,
    Device,
    InputColumns,
    LocalFile,
    Placement,
    Section,
    TextColumns,
    require_file,
)
from cauc_ray.models.passes import LocalModel, Passes, text_passes
from cauc_ray.models.prompts import Labelled
from cauc_ray.numbers.types import Floats

# numpy's names of the types of tensors that columns can fill.
_NUMBERS: Mapping[str, str] = {
    **{f"tensor({name})": name for name in ("double", "int64", "int32", "int8", "uint8", "bool", "float16")},
    "tensor(float)": "float32",
}
_LABELS = ("tensor(int64)", "tensor(int32)", "tensor(string)")

# The names of tokenizers' encodings, by those of networks' inputs.
_ENCODINGS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
Values: TypeAlias = npt.NDArray[Any]


class ImageInput(Section):
    """How a network reads images: the shorter side is resized, the centre cut out, the channels normalised.

    Attributes:
        size: Of the square that it gets, by default that of the file's input, else 224.
        resize: Length of the shorter side before that, by default 256/224 of size.
        resample: Filter of the resizing.
        mean: Of each channel, on a scale from 0 to 1; ImageNet's by default.
        std: Of each channel; ImageNet's by default. An input of uint8 gets pixels as they are.
    """

    size: int | None = Field(default=None, ge=1)
    resize: int | None = Field(default=None, ge=1)
    resample: Literal["bilinear", "bicubic"] = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)


class OnnxSpec(Labelled, DeclaringSpec):
    """`{kind: onnx, model: model.onnx, image: {size: 224}}`: a classifier that ONNX Runtime runs.

    Without image, tokenizer and columns, each input reads the column of its name.

    Attributes:
        model: The file.
        image: It reads the column `image`.
        tokenizer: It reads texts, by this tokenizer.json.
        text: The column of texts, or two for a pair.
        max_tokens: Longer texts are cut.
        batch_tokens: Most tokens of one call of the network, padding included.
        columns: It reads these numbers as one input (n, columns).
        output: The output to take: by default `logits`, else `probabilities`, else the only one of rows by classes.
        labels: The pool's labels. A label output of the file must agree with them.
        logit_kind: Of the output, raw unless declared.
        device: Where it computes; auto is a GPU if the stage has one.
    """

    LOADER: ClassVar[str] = "cauc_ray.models.onnx:load"
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = DeclaringSpec.EXCLUDED_FROM_IDENTITY | {"batch_tokens"}
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
    def columns_read(self) -> InputColumns:
        """Return the columns that it reads; all of the input if the settings do not name them."""
        if self.image is not None:
            return InputColumns(frozenset({"image"}))
        if self.tokenizer is not None:
            return InputColumns(frozenset(self.text), texts=frozenset(self.text))
        return InputColumns(frozenset(self.columns), frozenset() if self.columns else None)

    def check(self, local: bool) -> None:
        """Raise ConfigError for a file that does not exist."""
        for path in filter(None, (self.model, self.tokenizer)):
            require_file(path, local)


def load(spec: OnnxSpec, placement: Placement) -> OnnxModel:
    """Load the file. Raises ConfigError if it or a package is missing, it has no such output, or no GPU computes it."""
    spec.require("onnx", "onnxruntime", *(["PIL"] if spec.image else []), *(["tokenizers"] if spec.tokenizer else []))
    import onnxruntime

    available = onnxruntime.get_available_providers()
    if spec.device == "cuda" and _CUDA not in available:
        raise ConfigError("device cuda: this onnxruntime has no GPU; install onnxruntime-gpu, or give device cpu")
    on_gpu = _CUDA in available and (spec.device == "cuda" or (spec.device == "auto" and placement.num_gpus > 0))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _n_cpus()
    options.log_severity_level = 3
    # TF32 has the range of float32 and a precision of 10 bits.
    providers = [*([(_CUDA, {"use_tf32": "0"})] if on_gpu else []), _CPU]
    if on_gpu and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    try:
        session = onnxruntime.InferenceSession(spec.model, options, providers=providers)
    except Exception as error:  # missing or damaged files raise errors of many types
        raise ConfigError(f"{spec.model} cannot be loaded: {first_line(error)}") from error
    if on_gpu and _CUDA not in session.get_providers():  # ONNX Runtime only logs this
        raise ConfigError(
            f"{spec.model}: ONNX Runtime cannot load CUDA's libraries and would compute on the CPU; install them "
            "(onnxruntime-gpu[cuda,cudnn]), or give device cpu"
        )
    return OnnxModel(spec, session)


def _n_cpus() -> int:
    """Return the CPUs of the stage, 0 for all of the machine's."""
    return int(os.environ.get("OMP_NUM_THREADS") or 0)


class OnnxModel(LocalModel):
    """A network that ONNX Runtime runs; images are read in threads."""

    def __init__(self, spec: OnnxSpec, session: Any) -> None:
        self._spec = spec
        self._session = session
        self._inputs = {node.name: node for node in session.get_inputs()}
        outputs = {node.name: node for node in session.get_outputs()}
        self._output = _score_output(spec, outputs)
        self._maps = outputs[self._output].type.startswith("seq(map(")
        labels = [name for name, node in outputs.items() if node.type in _LABELS and len(node.shape or ()) == 1]
        # Compared with the scores once, on the first batch; maps name the label of each score.
        self._label_output = None if self._maps or len(labels) != 1 else labels[0]
        self._n_fixed = _fixed_rows(self._inputs.values())
        self._width = _fixed_width(self._inputs.values()) if spec.tokenizer else None
        self._tokenizer = _tokenizer_of(spec, min(spec.max_tokens, self._width or spec.max_tokens))
        self._pool = ThreadPoolExecutor(_n_cpus() or os.cpu_count())
        if (spec.image or spec.columns) and len(self._inputs) != 1:
            raise ConfigError(f"{spec.model} has inputs {', '.join(self._inputs)}, and one was expected")
        unknown = [name for name in self._inputs if spec.tokenizer and name not in _ENCODINGS]
        if unknown:
            raise ConfigError(f"{spec.model} has an input {unknown[0]!r}, which no tokenizer gives")
        self._preprocess = None if spec.image is None else _preprocessing(spec, next(iter(self._inputs.values())))
        halves = any(node.type == "tensor(float16)" for node in (*self._inputs.values(), outputs[self._output]))
        dtype = "float16" if halves else "float32"
        self.facts = ModelFacts(f"onnx {spec.model}", spec.answers_kind, labels=spec.label_names, dtype=dtype)

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into the inputs of its calls. Raises DataError when a column is missing."""
        if self._tokenizer is not None:
            return text_passes(batch, self._spec.text, self._encoded, self._padded, self._spec.batch_tokens)
        rows, inputs, faults = self._numbers(batch) if self._preprocess is None else self._images(batch)
        return [(rows, inputs)] if rows else [], faults

    def launch(self, inputs: Mapping[str, Values]) -> Floats:
        """Return the network's output for some rows."""
        n = len(next(iter(inputs.values())))
        parts = [self._run(inputs)] if self._n_fixed is None else list(self._in_fixed_calls(inputs, self._n_fixed, n))
        scores = [part for output, _ in parts for part in output][:n]
        if self._maps:
            scores = self._ordered(scores)
        logits = logits_of(scores if self._maps else np.asarray(scores), n)[0]
        if self._label_output is not None:
            labels = [label for _, of_part in parts for label in of_part][:n]
            names = self._spec.label_names
            require_same_labels(self._spec.model, Answers(logits), labels, names)
            self._label_output = None
        return logits

    def _run(self, inputs: Mapping[str, Values]) -> tuple[Any, Sequence[Any]]:
        """Return the scores of some rows, and their labels if these are still to be compared."""
        names = [self._output, *filter(None, [self._label_output])]
        scores, *labels = self._session.run(names, inputs)
        return scores, labels[0].tolist() if labels else []

    def _in_fixed_calls(self, inputs: Mapping[str, Values], n_fixed: int, n: int) -> list[tuple[Any, Sequence[Any]]]:
        """Return the outputs of calls of a fixed number of rows; the last call repeats a row."""
        parts = []
        for start in range(0, n, n_fixed):
            rows = np.minimum(np.arange(start, start + n_fixed), n - 1)
            parts.append(self._run({name: values[rows] for name, values in inputs.items()}))
        return parts

    def _ordered(self, maps: Sequence[Mapping[Any, float]]) -> list[list[float]]:
        """Return scores that a file names by label, in the order of the pool's labels, else in its own."""
        labels = {str(label): label for label in maps[0]}
        names = self._spec.label_names or tuple(labels)
        if labels.keys() != set(names) and labels.keys() == {str(number) for number in range(len(names))}:
            labels = dict(zip(names, sorted(maps[0]), strict=True))
        if labels.keys() != set(names):
            raise ConfigError(
                f"{self._spec.model} scores the labels {', '.join(labels)}, the pool has {', '.join(names)}"
            )
        return [[scores[labels[name]] for name in names] for scores in maps]

    def _images(self, batch: Batch) -> tuple[list[int], dict[str, Values], dict[int, str]]:
        from cauc_ray.models.images import read_images

        assert self._preprocess is not None
        pixels, faults = read_images(batch, self._preprocess, self._pool.map)
        return [*pixels], {name: np.stack([*pixels.values()]) for name in self._inputs if pixels}, faults

    def _numbers(self, batch: Batch) -> tuple[list[int], dict[str, Values], dict[int, str]]:
        columns = self._spec.columns
        if not columns and (missing := [name for name in self._inputs if name not in batch]):
            raise DataError(
                f"{self._spec.model} has an input {missing[0]!r}, and no column has that name; the batch has "
                f"{', '.join(sorted(batch))}. Give columns: the columns that it reads as one input"
            )
        require_columns(batch, *columns)
        inputs = {
            name: np.column_stack([_typed(batch[column], node)[:, 0] for column in columns])
            if columns
            else _typed(batch[name], node)
            for name, node in self._inputs.items()
        }
        n = batch_size(batch)
        numbers = [values.reshape(n, -1) for values in inputs.values() if values.dtype.kind == "f"]
        nan_mask = np.logical_or.reduce([np.zeros(n, bool), *(np.isnan(values).any(axis=1) for values in numbers)])
        rows = np.flatnonzero(~nan_mask)
        faults = dict.fromkeys(np.flatnonzero(nan_mask).tolist(), "one of its numbers is missing")
        return rows.tolist(), {name: values[rows] for name, values in inputs.items()}, faults

    def _encoded(self, texts: list[list[str]]) -> list[dict[str, list[int]]]:
        encodings = self._tokenizer.encode_batch([tuple(pair) if len(pair) > 1 else pair[0] for pair in texts])
        return [{name: getattr(encoding, source) for name, source in _ENCODINGS.items()} for encoding in encodings]

    def _padded(self, encodings: list[dict[str, list[int]]]) -> dict[str, Values]:
        width = self._width or max(len(encoding["input_ids"]) for encoding in encodings)
        return {
            name: np.array([_zeros_after(encoding[name], width) for encoding in encodings], _NUMBERS[node.type])
            for name, node in self._inputs.items()
        }


def _is_fixed(size: object) -> bool:
    return isinstance(size, int) and size > 0


def _fixed_rows(inputs: Any) -> int | None:
    """Return how many rows a call must have, None for any number."""
    sizes = [node.shape[0] for node in inputs if node.shape and _is_fixed(node.shape[0])]
    return min(sizes, default=None)


def _fixed_width(inputs: Any) -> int | None:
    """Return how many tokens each row must have, None for any number."""
    sizes = [node.shape[1] for node in inputs if len(node.shape) > 1 and _is_fixed(node.shape[1])]
    return min(sizes, default=None)


def _zeros_after(numbers: list[int], width: int) -> list[int]:
    return numbers + [0] * (width - len(numbers))


def _tokenizer_of(spec: OnnxSpec, max_tokens: int) -> Any:
    if spec.tokenizer is None:
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(spec.tokenizer)
    except Exception as error:  # the library's errors have no type of their own
        raise ConfigError(f"{spec.tokenizer} is not a tokenizer.json: {first_line(error)}") from error
    tokenizer.enable_truncation(max_tokens)
    tokenizer.no_padding()
    return tokenizer


def _score_output(spec: OnnxSpec, outputs: Mapping[str, Any]) -> str:
    """Return the name of the output with a row's scores. Raises ConfigError if it is ambiguous."""
    if spec.output is not None and spec.output not in outputs:
        raise ConfigError(f"{spec.model} has no output {spec.output!r}; it has {', '.join(outputs)}")
    tables = [name for name, node in outputs.items() if node.type in _NUMBERS and len(node.shape or ()) == 2]
    maps = [name for name, node in outputs.items() if node.type.startswith("seq(map(")]
    only = tables[0] if len(tables) == 1 else maps[0] if len(maps) == 1 and not tables else None
    for name in (spec.output, "logits", "probabilities", only):
        if name in outputs:
            return str(name)
    raise ConfigError(f"{spec.model} has the outputs {', '.join(outputs)}; name the one of rows by classes as output")


def _typed(column: npt.NDArray[Any], node: Any) -> npt.NDArray[Any]:
    """Return a column as an input of the network: (n, 1) if that has two dimensions and the column has one."""
    if node.type == "tensor(string)":
        values = np.array([str(value) for value in column], dtype=object)
    elif node.type in _NUMBERS:
        try:
            values = np.stack([np.asarray(value, _NUMBERS[node.type]) for value in column])
        except (TypeError, ValueError) as error:
            raise DataError(f"input {node.name!r} of the network needs numbers: {first_line(error)}") from error
    else:
        raise ConfigError(f"input {node.name!r} of the network is a {node.type}, which no column gives")
    return values[:, None] if values.ndim == 1 and len(node.shape) == 2 else values


def _preprocessing(spec: OnnxSpec, node: Any) -> Callable[[Any], Values]:
    """Return the function from an image to the values of an input, whose size and layout the file determines."""
    how = spec.image or ImageInput()
    if node.type not in ("tensor(float)", "tensor(float16)", "tensor(uint8)") or len(node.shape) != 4:
        raise ConfigError(f"{spec.model}: its input {node.name!r}, {node.type} of shape {node.shape}, takes no images")
    channels_last = node.shape[3] == 3 and node.shape[1] != 3
    height, width = node.shape[1:3] if channels_last else node.shape[2:]
    sides = {side for side in (height, width) if _is_fixed(side)}
    if len(sides) > 1 or (how.size is not None and sides - {how.size}):
        size = f", image has size {how.size}" if how.size is not None else "; images are cut to squares"
        raise ConfigError(f"{spec.model} takes images of {height} x {width} pixels{size}")
    return partial(
        _pixels, how=how, size=how.size or next(iter(sides), 224), dtype=_NUMBERS[node.type], last=channels_last
    )


def _pixels(image: Any, how: ImageInput, size: int, dtype: str, last: bool) -> Values:
    """Return an image as (3, size, size), or (size, size, 3) with the channels last."""
    from PIL import Image

    shorter = max(size, how.resize or round(size * 256 / 224))
    width, height = (shorter * side // min(image.size) for side in image.size)
    resized = image.resize((width, height), Image.Resampling[how.resample.upper()])
    left, top = round((width - size) / 2), round((height - size) / 2)
    pixels: Values = np.asarray(resized.crop((left, top, left + size, top + size)))
    if dtype != "uint8":
        scaled = (pixels.astype(np.float32) / 255 - np.array(how.mean, np.float32)) / np.array(how.std, np.float32)
        pixels = scaled.astype(dtype)
    return np.ascontiguousarray(pixels if last else pixels.transpose(2, 0, 1))
