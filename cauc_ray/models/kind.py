"""The base class of all kinds of models in a pool file."""

from __future__ import annotations

import hashlib
import json
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from cauc_ray.errors import ConfigError, require_packages, unknown_name
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
        known = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(value, dict) and cls.model_config.get("extra") == "forbid" and (unknown := value.keys() - known):
            raise ValueError(unknown_name("key", min(map(str, unknown)), known))
        return value


# auto: a GPU if the stage has one.
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
# auto: bfloat16 on a GPU that computes in it, float32 elsewhere.
Precision: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


def folder_of(info: ValidationInfo) -> AnyPath | None:
    """Return the folder of the file that is being read, None where settings come from elsewhere."""
    return (info.context or {}).get("folder")


def beside(name: str, info: ValidationInfo) -> str:
    """Return the path that a string in a file names. Raises ValueError for a URI, which no library can load."""
    folder = folder_of(info)
    path = name if folder is None else path_from(folder, name)
    if isinstance(path, RemotePath):
        raise ValueError(f"a local file on the nodes is needed, not {path}; give an absolute path")
    return str(path)


def require_file(path: str, here: bool) -> None:
    """Raise ConfigError for a file that does not exist, if it is to be read on this machine."""
    if here and not Path(path).exists():
        raise ConfigError(f"{path} does not exist")


def _here_or_hub(name: str, info: ValidationInfo) -> str:
    folder = folder_of(info)
    return beside(name, info) if folder is not None and path_from(folder, name).exists() else name


def _located(value: Any, info: ValidationInfo) -> Any:
    folder = folder_of(info)
    if not isinstance(value, str | Path | RemotePath):
        return value
    return str(value if folder is None else path_from(folder, str(value)))


# Relative paths are those from the file's folder.
Location: TypeAlias = Annotated[str, BeforeValidator(_located)]
LocalFile: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(beside)]
# A folder if there is one of that name, else a hub id.
HubModel: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_here_or_hub)]
# The column of a text, or two for a pair.
TextColumns: TypeAlias = Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]


class KindSpec(Section):
    """The settings of a model in a pool file: plain until load() is called, in the process that will run it."""

    # Settings that do not change answers.
    HOW: ClassVar[frozenset[str]] = frozenset({"device"})
    # Whether a model may span several GPUs.
    SPANS_GPUS: ClassVar[bool] = False
    # Whether a call has its own timeout and must be awaited until then: another replica would ask the same server.
    GIVES_UP: ClassVar[bool] = False
    # Whether its calls measure what they take of the network.
    REMOTE: ClassVar[bool] = False
    kind: str

    @property
    def needs(self) -> frozenset[str]:
        """Return the columns that an input must have."""
        return frozenset()

    @property
    def reads(self) -> frozenset[str] | None:
        """Return all columns that are read in addition to example_id; None for all that exist."""
        return self.needs or None

    @property
    def texts(self) -> frozenset[str]:
        """Return the columns that every row must have as texts."""
        return frozenset()

    @property
    def label_names(self) -> tuple[str, ...] | None:
        """Return the names of its classes in their order, None where they are not among its settings."""
        return None

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
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits."""
        return "raw"

    @property
    def cost_unit(self) -> str | None:
        """Return the unit of the costs that calls report, None if calls report none."""
        return None

    @property
    def least_gpus(self) -> int:
        """Return how many GPUs its settings require."""
        return int(getattr(self, "device", "auto") == "cuda")

    def require(self, extra: str, *packages: str) -> None:
        """Raise ConfigError with the install command where packages of an extra are missing."""
        require_packages(f"a model of kind {self.kind!r}", extra, *packages)

    def check(self, here: bool) -> None:
        """Raise ConfigError for what can be known of the model without loading it.

        here: it is to run on this machine, so that what is missing is not on other nodes.
        """
        return

    @abstractmethod
    def load(self) -> Model:
        """Load the model. Raises CaucError if it or a package is missing."""

    def load_within(self, call_timeout_s: float) -> Model:
        """Load a model whose calls are given up after so many seconds. Raises CaucError as load."""
        return self.load()

    def load_over_gpus(self) -> Model:
        """Load a model over all GPUs that the process sees; user code handles this itself."""
        return self.load()


class ImageSpec(KindSpec):
    """A model that reads the column `image`."""

    @property
    def needs(self) -> frozenset[str]:
        """Return the column that it reads."""
        return frozenset({"image"})


class DeclaringSpec(KindSpec):
    """A model of user code.   logit_kind: what its logits are, raw ones unless declared."""

    HOW: ClassVar[frozenset[str]] = KindSpec.HOW | {"logit_kind"}
    SPANS_GPUS: ClassVar[bool] = True
    logit_kind: LogitKind | None = None

    @property
    def answers_kind(self) -> LogitKind:
        """Return the declared kind, raw without one."""
        return self.logit_kind or "raw"
