"""The base class of all kinds of models in a pool file."""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, TypeAlias

from pydantic import BaseModel, ConfigDict, model_validator

from cauc_ray.errors import ConfigError, unknown_name
from cauc_ray.files.paths import AnyPath, RemotePath, path_from
from cauc_ray.models.answers import Model
from cauc_ray.numbers.logits import LogitKind


class Section(BaseModel):
    """A part of a file that people write; unknown keys and numbers that JSON does not have are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        """Name the keys that there are, which pydantic's own error does not."""
        if cls.model_config.get("extra") != "forbid":
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((key for key in value if key not in known), None) if isinstance(value, dict) else None
        if unknown is not None:
            raise ValueError(unknown_name("key", str(unknown), known))
        return value


# auto: a GPU if the stage has one.
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
# auto: bfloat16 on a GPU that computes in it, float32 elsewhere.
Precision: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


class KindSpec(Section):
    """The settings of a model in a pool file: plain until load() is called, in the process that will run it."""

    # Settings that do not change answers.
    HOW: ClassVar[frozenset[str]] = frozenset({"device"})
    # Whether a model may span several GPUs.
    SPANS_GPUS: ClassVar[bool] = False
    # Required columns, and all columns that it reads in addition to example_id; None for all that exist.
    NEEDS: ClassVar[frozenset[str]] = frozenset()
    READS: ClassVar[frozenset[str] | None] = None
    # Whether a call has its own timeout and must be awaited until then: another replica would ask the same server.
    GIVES_UP: ClassVar[bool] = False

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that an input must have."""
        return self.NEEDS

    @property
    def reads(self) -> frozenset[str] | None:
        """Return all columns that are read in addition to example_id; None for all that exist."""
        return self.READS

    @property
    def texts(self) -> frozenset[str]:
        """Return the columns that every row must have as texts."""
        return frozenset()

    @property
    def shown(self) -> str | None:
        """Return the prompt of a language model as one text, None for other models."""
        return None

    @property
    def identity(self) -> str:
        """Return a hash of everything that its answers depend on."""
        content = json.dumps(self.model_dump(mode="json", exclude=set(self.HOW)), sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def files(self) -> frozenset[AnyPath]:
        """Return the local files that its settings name, and the folders that they name by absolute paths."""
        paths = map(Path, _texts(self.model_dump(mode="json")))
        return frozenset(path for path in paths if os.path.isfile(path) or (path.is_absolute() and os.path.isdir(path)))

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits."""
        return "raw"

    @property
    def cost_unit(self) -> str | None:
        """Return the unit of the costs that calls report, None if calls report none."""
        return None

    def located(self, folder: AnyPath) -> Self:
        """Return the same settings with relative paths resolved against the pool file's folder."""
        return self

    @abstractmethod
    def load(self) -> Model:
        """Load the model. Raises CaucError if it or a package is missing."""

    def load_within(self, call_timeout_s: float) -> Model:
        """Load a model whose calls are given up after so many seconds. Raises CaucError as load."""
        return self.load()

    def load_over_gpus(self) -> Model:
        """Load a model over all GPUs that the process sees; user code handles this itself."""
        return self.load()


class DeclaringSpec(KindSpec):
    """A model of user code.   logit_kind: what its logits are, raw ones unless declared."""

    HOW: ClassVar[frozenset[str]] = KindSpec.HOW | {"logit_kind"}
    SPANS_GPUS: ClassVar[bool] = True
    logit_kind: LogitKind | None = None

    @property
    def answers_kind(self) -> LogitKind:
        """Return the declared kind, raw without one."""
        return self.logit_kind or "raw"


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from _texts(each)


def require(extra: str, *packages: str) -> None:
    """Raise ConfigError with the install command if a package of an extra is missing."""
    for package in packages:
        if find_spec(package) is None:
            raise ConfigError(f"this kind of model needs {package}; install it with: pip install 'cauc-ray[{extra}]'")


def local_or_hub(name: str, folder: AnyPath) -> str:
    """Return a model's path relative to folder if it exists there, else its hub id. Raises ConfigError."""
    path = path_from(folder, name)
    return require_here(path) if path.exists() else name


def require_here(path: AnyPath) -> str:
    """Return the path of weights. Raises ConfigError for a URI, which no library can load."""
    if isinstance(path, RemotePath):
        raise ConfigError(f"weights must be local files on the nodes, not {path}; give an absolute path")
    return str(path)
