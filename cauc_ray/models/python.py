"""Models that a user writes in Python."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from cauc_ray.errors import ConfigError
from cauc_ray.models.answers import Answers, Batch, Model, as_answers, batch_size


class PythonSpec(BaseModel):
    """`{kind: python, factory: "package.module:function", kwargs: {…}}`.

    function(**kwargs) returns a callable that takes a batch (the input's columns as numpy arrays) and returns
    float32 logits (n, K), or a list of n vectors where K differs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Literal["python"]
    factory: str = Field(pattern=r"^[\w.]+:\w+$")
    kwargs: dict[str, Any] = {}

    def load(self) -> Model:
        """Import the factory and call it. Raises ConfigError when it cannot be imported or gives no callable."""
        module_name, _, function_name = self.factory.partition(":")
        try:
            factory = getattr(importlib.import_module(module_name), function_name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"factory {self.factory!r} cannot be imported: {error}") from error
        function = factory(**self.kwargs)
        if not callable(function):
            raise ConfigError(f"factory {self.factory!r} returned {type(function).__name__}, which cannot be called")
        return PythonModel(function)


class LogitFunction(Protocol):
    """What a user's factory returns."""

    def __call__(self, batch: Batch, /) -> object:
        """Return logits for a batch."""
        ...


@dataclass(frozen=True, slots=True)
class PythonModel:
    """A user's callable, its answers checked."""

    function: LogitFunction

    def __call__(self, batch: Batch) -> Answers:
        """Answer a batch."""
        n = batch_size(batch)  # asked before: the function may do with its batch what it likes
        return as_answers(self.function(batch), n)
