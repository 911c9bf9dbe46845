"""Models that a user writes in Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr

from cauc_ray.errors import ConfigError, one_line
from cauc_ray.models.answers import Answers, Batch, Model, ModelFacts, PreparingModel, as_answers, batch_size
from cauc_ray.models.kind import DeclaringSpec
from cauc_ray.numbers.logits import LogitKind


class PythonSpec(DeclaringSpec):
    """`{kind: python, factory: "package.module:function", kwargs: {…}}`.

    function(**kwargs) returns a callable that takes a batch (the input's columns as numpy arrays) and returns
    float32 logits (n, K), or a list of n vectors where K differs. If it has a method `prepare`, that takes the batch
    and the callable what prepare returns: the next batch is prepared while the callable computes this one.
    """

    kind: Literal["python"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$")
    kwargs: dict[str, Any] = Field(default_factory=dict)
    _folder: str | None = PrivateAttr(None)

    @property
    def folder(self) -> str | None:
        """Return the pool file's folder, which may contain the factory's module."""
        return self._folder

    def model_post_init(self, context: Any, /) -> None:
        """Keep the pool file's folder; modules are imported from local ones only."""
        folder = (context or {}).get("folder")
        self._folder = str(folder.absolute()) if isinstance(folder, Path) else None

    def load(self) -> Model:
        """Import the factory and call it. Raises ConfigError if it cannot be imported or does not return a callable."""
        factory = imported(self.factory)
        return python_model(factory(**self.kwargs), f"python {self.factory}", self.logit_kind)


def imported(factory: str, what: str = "factory") -> Callable[..., object]:
    """Import "package.module:function".   what: it is. Raises ConfigError if that fails."""
    try:
        found: Callable[..., object] = EntryPoint("", factory, "").load()
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"{what} {factory!r} cannot be imported: {one_line(error)}") from error
    return found


def python_model(function: object, source: str, logit_kind: LogitKind | None = None) -> Model:
    """Wrap what a factory returned as a model. Raises ConfigError if it is not callable."""
    if not callable(function):
        raise ConfigError(f"the factory of {source!r} returned {type(function).__name__}, which is not callable")
    kind = PreparingPythonModel if hasattr(function, "prepare") else PythonModel
    return kind(function, ModelFacts(source, logit_kind or "as the model returns them"))


@dataclass(slots=True)
class PythonModel:
    """A user's callable, its answers checked."""

    function: Callable[[Batch], object]
    facts: ModelFacts

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch."""
        n = batch_size(batch)  # before the call: the function may change its batch
        return as_answers(self.function(batch), n)


@dataclass(slots=True)
class PreparingPythonModel(PreparingModel):
    """A user's callable that prepares batches ahead."""

    function: Any
    facts: ModelFacts

    def prepare(self, batch: Batch) -> tuple[int, Any]:
        """Return the batch's size and what the callable's own prepare makes of it."""
        return batch_size(batch), self.function.prepare(batch)

    def answer(self, prepared: tuple[int, Any]) -> Answers:
        """Answer a batch."""
        n, own = prepared
        return as_answers(self.function(own), n)
