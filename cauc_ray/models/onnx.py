"""Classifiers in ONNX files as stages: of images, of texts, or of the columns of a table."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping
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
from cauc_ray.models.kind import Device, InputColumns, LocalFile, Placement, Section, TableSpec, TextColumns
from cauc_ray.models.passes import LocalModel, Passes, option_order, row_texts, text_passes
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


class OnnxSpec(Labelled, TableSpec):
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
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = TableSpec.EXCLUDED_FROM_IDENTITY | {"batch_tokens"}
    FILES: ClassVar[tuple[str, ...]] = ("model", "tokenizer")
    kind: Literal["onnx"]
    model: LocalFile
    image: ImageInput | None = None
    tokenizer: LocalFile | None = None
    text: TextColumns = ("text",)
    max_tokens: int = Field(default=512, ge=4)
    batch_tokens: int = Field(default=16384, ge=1)
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
        return super().columns_read


def load(spec: OnnxSpec, placement: Placement) -> OnnxModel:
    """Load the file. Raises ConfigError if it or a package is missing, it has no such output, or no GPU computes it."""
    spec.require("onnx", "onnxruntime", *(["PIL"] if spec.image else []), *(["tokenizers"] if spec.tokenizer else []))
    import onnxruntime

    has_cuda = _CUDA in onnxruntime.get_available_providers()
    on_gpu = spec.device == "cuda" or (spec.device == "auto" and placement.num_gpus > 0)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = _n_cpus()
    options.log_severity_level = 3
    # TF32 has the range of float32 and a precision of 10 bits.
    providers = [*([(_CUDA, {"use_tf32": "0"})] if on_gpu and has_cuda else []), _CPU]
    if on_gpu and hasattr(onnxruntime, "preload_dlls"):
        onnxruntime.preload_dlls()
    try:
        session = onnxruntime.InferenceSession(spec.model, options, providers=providers)
    except Exception as error:  # damaged files raise errors of many types
        raise ConfigError(f"{spec.model} cannot be loaded: {first_line(error)}") from error
    if on_gpu and _CUDA not in session.get_providers():  # ONNX Runtime only logs this
        raise ConfigError(
            f"device {spec.device}: ONNX Runtime has no GPU here, or cannot load CUDA's libraries; "
            "install onnxruntime-gpu[cuda,cudnn], or give device cpu"
        )
    return OnnxModel(spec, session)


def _n_cpus() -> int:
    """Return the CPUs of the stage, 0 for all of the machine's."""
    return int(os.environ.get("OMP_NUM_THREADS") or 0)


class OnnxModel(LocalModel):
    """A network that ONNX Runtime runs; images are read in threads."""

    def __init__(self, spec: OnnxSpec, session: Any) -> None:
        self._spec, self._session = spec, session
        self._inputs = {node.name: node for node in session.get_inputs()}
        outputs = {node.name: node for node in session.get_outputs()}
        self._output = _score_output(spec, outputs)
        self._has_maps = outputs[self._output].type.startswith("seq(map(")
        labels = [name for name, node in outputs.items() if node.type in _LABELS and len(node.shape or ()) == 1]
        # Compared with the scores once, on the first batch; maps name the label of each score.
        self._label_outputs = [] if self._has_maps or len(labels) != 1 else labels
        self._n_rows = self._fixed_size(0)
        if (spec.image or spec.columns) and len(self._inputs) != 1:
            raise ConfigError(f"{spec.model} has inputs {', '.join(self._inputs)}, and one was expected")
        if spec.tokenizer is not None:
            self._tokenizer, self._width = self._new_tokenizer(spec.tokenizer)
        if spec.image is not None:
            self._square, self._channels_last = self._image_steps(spec.image)
            self._pool = ThreadPoolExecutor(_n_cpus() or os.cpu_count())
        halves = any(node.type == "tensor(float16)" for node in (*self._inputs.values(), outputs[self._output]))
        dtype = "float16" if halves else "float32"
        self.facts = ModelFacts(f"onnx {spec.model}", spec.answers_kind, labels=spec.label_names, dtype=dtype)

    def read(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        """Turn a batch into the inputs of its calls. Raises DataError when a column is missing."""
        if self._spec.tokenizer is not None:
            texts = row_texts(batch, self._spec.text)
            return text_passes(texts, self._encoded, self._padded, self._spec.batch_tokens, n_tokens=len)
        return self._numbers(batch) if self._spec.image is None else self._images(batch, self._spec.image)

    def launch(self, inputs: Mapping[str, Values]) -> Floats:
        """Return the network's output for some rows."""
        n = len(next(iter(inputs.values())))
        size = self._n_rows or n
        names = [self._output, *self._label_outputs]
        parts = []
        for start in range(0, n, size):
            # The last call of a fixed size repeats a row.
            rows: Any = np.minimum(np.arange(start, start + size), n - 1) if self._n_rows else slice(None)
            parts.append(self._session.run(names, {name: values[rows] for name, values in inputs.items()}))
        scores, *labels = ([*itertools.chain(*output)][:n] for output in zip(*parts, strict=True))
        if self._has_maps:
            classes = {str(label): label for label in sorted(scores[0])}
            order = option_order(self._spec.model, [*classes], self._spec.label_names or [*map(str, scores[0])])
            keys = [[*classes.values()][at] for at in order]
            scores = [[score[key] for key in keys] for score in scores]
        logits = logits_of(np.asarray(scores), n)[0]
        if labels:
            require_same_labels(self._spec.model, Answers(logits), labels[0], self._spec.label_names)
            self._label_outputs = []
        return logits

    def _fixed_size(self, axis: int) -> int | None:
        """Return the size that inputs must have along an axis, None for any size."""
        sizes = [node.shape[axis] for node in self._inputs.values() if len(node.shape) > axis]
        return min((size for size in sizes if isinstance(size, int) and size > 0), default=None)

    def _numbers(self, batch: Batch) -> tuple[Passes, dict[int, str]]:
        columns = self._spec.columns
        require_columns(batch, *(columns or self._inputs))
        inputs = {
            name: np.hstack([_typed(batch[column], node) for column in columns or [name]])
            for name, node in self._inputs.items()
        }
        n = batch_size(batch)
        nan_mask = np.zeros(n, bool)
        for values in inputs.values():
            if values.dtype.kind == "f":
                nan_mask |= np.isnan(values.reshape(n, -1)).any(axis=1)
        faults = dict.fromkeys(np.flatnonzero(nan_mask).tolist(), "one of its numbers is missing")
        rows = np.flatnonzero(~nan_mask)
        return [(rows.tolist(), {name: values[rows] for name, values in inputs.items()})] if len(rows) else [], faults

    def _new_tokenizer(self, path: str) -> tuple[Any, int | None]:
        """Return the tokenizer, and how many tokens each row must have, None for any number."""
        from tokenizers import Tokenizer

        try:
            tokenizer = Tokenizer.from_file(path)
        except Exception as error:  # the library's errors have no type of their own
            raise ConfigError(f"{path} is not a tokenizer.json: {first_line(error)}") from error
        if unknown := self._inputs.keys() - _ENCODINGS.keys():
            raise ConfigError(f"{self._spec.model} has an input {min(unknown)!r}, which no tokenizer gives")
        width = self._fixed_size(1)
        tokenizer.enable_truncation(min(self._spec.max_tokens, width or self._spec.max_tokens))
        tokenizer.no_padding()
        return tokenizer, width

    def _encoded(self, texts: list[list[str]]) -> list[Any]:
        pairs = [row[0] if len(row) == 1 else tuple(row) for row in texts]
        encodings: list[Any] = self._tokenizer.encode_batch(pairs)
        return encodings

    def _padded(self, encodings: list[Any]) -> dict[str, Values]:
        width = self._width or max(map(len, encodings))
        for encoding in encodings:
            encoding.pad(width)
        return {
            name: np.array([getattr(encoding, _ENCODINGS[name]) for encoding in encodings], _NUMBERS[node.type])
            for name, node in self._inputs.items()
        }

    def _image_steps(self, image: ImageInput) -> tuple[Callable[[Any], Values], bool]:
        """Return what makes a square of an image, of the file's size, and whether the file has channels last."""
        from cauc_ray.models.images import centre_square

        (node,) = self._inputs.values()
        if node.type not in ("tensor(float)", "tensor(float16)", "tensor(uint8)") or len(node.shape) != 4:
            shape = f"{node.type} of shape {node.shape}"
            raise ConfigError(f"{self._spec.model}: its input {node.name!r}, {shape}, takes no images")
        channels_last = node.shape[3] == 3 and node.shape[1] != 3
        sides = node.shape[1:3] if channels_last else node.shape[2:]
        sizes = {side for side in (*sides, image.size) if isinstance(side, int) and side > 0}
        if len(sizes) > 1:
            asked = "; images are cut to squares" if image.size is None else f", image has size {image.size}"
            raise ConfigError(f"{self._spec.model} takes images of {sides[0]} x {sides[1]} pixels{asked}")
        size = min(sizes, default=224)
        shorter = max(size, image.resize or round(size * 256 / 224))
        return partial(centre_square, size=size, shorter=shorter, resample=image.resample), channels_last

    def _images(self, batch: Batch, image: ImageInput) -> tuple[Passes, dict[int, str]]:
        from cauc_ray.models.images import read_images

        squares, faults = read_images(batch, self._square, self._pool.map)
        if not squares:
            return [], faults
        ((name, node),) = self._inputs.items()
        pixels: Values = np.stack([*squares.values()])
        if node.type != "tensor(uint8)":
            mean, std = np.array([image.mean, image.std], np.float32)
            pixels = ((pixels.astype(np.float32) / 255 - mean) / std).astype(_NUMBERS[node.type])
        return [([*squares], {name: pixels if self._channels_last else pixels.transpose(0, 3, 1, 2)})], faults


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
