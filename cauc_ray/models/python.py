"""Models that a user writes in Python."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field, PrivateAttr

from cauc_ray.errors import ConfigError, one_line
from cauc_ray.models.answers import (
    Answers,
    Batch,
    Model,
    ModelFacts,
    PreparingModel,
    as_answers,
    batch_size,
    require_same_labels,
)
from cauc_ray.models.kind import Placement
from cauc_ray.models.prompts import Labelled
from cauc_ray.models.words import WordsSpec, read_words
from cauc_ray.numbers.answer_keys import AnswerFormat
from cauc_ray.numbers.logits import ANSWERS, LogitKind


class PythonSpec(Labelled, WordsSpec):
    """`{kind: python, factory: "package.module:function", kwargs: {…}}`.

    function(**kwargs) returns a callable. A parameter `device` of the function that kwargs leave out gets "cuda" if the
    stage has a GPU, else "cpu". The callable takes a batch, the input's columns as numpy arrays, and returns logits
    (n, K) as an array or a torch tensor, a list of n vectors if K differs between rows, or `cauc_ray.Answers` with
    logits, costs and failed rows. If it has a method `prepare`, that takes the batch and the callable takes what
    prepare returns: the next batch is prepared while the callable computes this one. A method `close` is called when
    the stage ends.

    Attributes:
        factory: "package.module:function".
        kwargs: Its arguments.
        labels: The pool's labels, with which labels in its Answers are compared.
        words: Of a model that answers in words: its rule and its confidences. The callable then returns a mapping of
            lists: answer, confidence_<name> for each of these, and perhaps cost.
    """

    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = WordsSpec.EXCLUDED_FROM_IDENTITY | {"labels"}
    LOADER: ClassVar[str] = "cauc_ray.models.python:load"
    SPANS_GPUS: ClassVar[bool] = True
    kind: Literal["python"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$")
    kwargs: dict[str, Any] = Field(default_factory=dict)
    _import_paths: tuple[str, ...] = PrivateAttr(())

    @property
    def import_paths(self) -> tuple[str, ...]:
        """Return the folders that may contain the factory's module: the pool file's, and the current one."""
        return self._import_paths

    def model_post_init(self, context: Any, /) -> None:
        """Keep the folders, whose paths are the same on every node that shares them."""
        folder = (context or {}).get("folder")
        self._import_paths = (*([str(folder.absolute())] if isinstance(folder, Path) else []), os.getcwd())


def load(spec: PythonSpec, placement: Placement) -> Model:
    """Import the factory and call it. Raises ConfigError if it cannot be imported or does not return a callable."""
    function = called(imported(spec.factory), spec.kwargs, placement)
    kind = spec.logit_kind if spec.words is None else ANSWERS
    return python_model(function, f"python {spec.factory}", kind, spec.label_names, spec.answer_format)


def imported(factory: str, what: str = "factory") -> Callable[..., object]:
    """Import "package.module:function". Raises ConfigError, which names `what` it is, if that fails."""
    try:
        function: Callable[..., object] = EntryPoint("", factory, "").load()
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"{what} {factory!r} cannot be imported: {one_line(error)}") from error
    return function


def called(factory: Callable[..., object], kwargs: Mapping[str, Any], placement: Placement) -> object:
    """Return what a user's factory returns, which gets its device if it takes one."""
    try:
        takes_device = "device" in inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some callables in C have no signature
        takes_device = False
    device = {"device": "cuda" if placement.num_gpus else "cpu"} if takes_device else {}
    return factory(**{**device, **kwargs})


def python_model(
    function: object,
    source: str,
    logit_kind: LogitKind | None = None,
    labels: tuple[str, ...] | None = None,
    answer_format: AnswerFormat | None = None,
) -> Model:
    """Wrap what a factory returned as a model. Raises ConfigError if it is not callable."""
    if not callable(function):
        raise ConfigError(f"the factory of {source!r} returned {type(function).__name__}, which is not callable")
    kind = PreparingPythonModel if hasattr(function, "prepare") else PythonModel
    return kind(function, ModelFacts(source, logit_kind or "as the model returns them", labels=labels), answer_format)


class PythonModel(Model):
    """A user's callable whose answers are checked."""

    def __init__(self, function: Any, facts: ModelFacts, answer_format: AnswerFormat | None = None) -> None:
        self.function, self.facts, self._format = function, facts, answer_format
        self._is_checked = False

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch."""
        return self.answer((batch_size(batch), batch))

    def answer(self, prepared: tuple[int, Any]) -> Answers:
        """Answer what the callable takes for n rows.

        Raises ConfigError if labels of the first batch do not have the highest scores.
        """
        n, content = prepared
        if self._format is not None:
            return read_words(self.function(content), n, self._format)
        answers = as_answers(self.function(content), n)
        if answers.labels is not None and not self._is_checked:
            require_same_labels(self.facts.source, answers, answers.labels, self.facts.labels)
            self._is_checked = True
        return answers

    def close(self) -> None:
        """Call the callable's own method `close`, if it has one."""
        getattr(self.function, "close", lambda: None)()


class PreparingPythonModel(PythonModel, PreparingModel):
    """A user's callable that prepares batches ahead."""

    __call__ = PreparingModel.__call__

    def prepare(self, batch: Batch) -> tuple[int, Any]:
        """Return the batch's size and what the callable's own prepare makes of it."""
        return batch_size(batch), self.function.prepare(batch)
