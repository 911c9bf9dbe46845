"""The base class of all kinds of models in a pool file."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationInfo, model_validator

from cauc_ray.errors import ConfigError, require_packages, unknown_name
from cauc_ray.files.documents import Settings
from cauc_ray.files.paths import AnyPath, RemotePath, content_digest, path_from
from cauc_ray.models.answers import Model
from cauc_ray.numbers.answer_keys import AnswerFormat
from cauc_ray.numbers.logits import LogitKind


class Section(Settings):
    """A part of a pool file; numbers that JSON does not have are errors."""

    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, value: Any) -> Any:
        """List the valid keys, which pydantic's own error does not."""
        keys = {field.alias or name for name, field in cls.model_fields.items()}
        if isinstance(value, dict) and cls.model_config.get("extra") == "forbid" and (unknown := value.keys() - keys):
            raise ValueError(unknown_name("key", min(map(str, unknown)), keys))
        return value


# The fraction of call_timeout_s after which a client of a server ends a call by itself.
IN_TIME = 0.9

# auto: a GPU if the stage has one.
Device: TypeAlias = Literal["auto", "cpu", "cuda"]
# Of torch, which also computes on the GPUs of Apple (mps) and Intel (xpu).
TorchDevice: TypeAlias = Literal["auto", "cpu", "cuda", "mps", "xpu"]
# auto: bfloat16 on a GPU that computes in it, float32 elsewhere.
Precision: TypeAlias = Literal["auto", "float32", "bfloat16", "float16"]


def folder_of(info: ValidationInfo) -> AnyPath | None:
    """Return the folder of the file that is being read, None where settings come from elsewhere."""
    return (info.context or {}).get("folder")


def local_path(name: str, info: ValidationInfo) -> str:
    """Return the path that a string in a file names. Raises ValueError for a URI, which no library can load."""
    folder = folder_of(info)
    path = name if folder is None else path_from(folder, name)
    if isinstance(path, RemotePath):
        raise ValueError(f"a local file on the nodes is needed, not {path}; give an absolute path")
    return str(path)


def _here_or_hub(name: str, info: ValidationInfo) -> str:
    folder = folder_of(info)
    return local_path(name, info) if folder is not None and path_from(folder, name).exists() else name


def _located(value: Any, info: ValidationInfo) -> Any:
    folder = folder_of(info)
    if not isinstance(value, str | Path | RemotePath):
        return value
    return str(value if folder is None else path_from(folder, str(value)))


def _listed(columns: Any) -> Any:
    return (columns,) if isinstance(columns, str) else columns


# Relative paths are those from the file's folder.
Location: TypeAlias = Annotated[str, BeforeValidator(_located)]
LocalFile: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(local_path)]
# A folder if there is one of that name, else a hub id.
HubModel: TypeAlias = Annotated[str, Field(min_length=1), AfterValidator(_here_or_hub)]
# The column of a text, or two for a pair.
TextColumns: TypeAlias = Annotated[
    tuple[str, ...],
    Field(min_length=1, max_length=2),
    BeforeValidator(_listed, json_schema_input_type=str | list[str]),
]


@dataclass(frozen=True, slots=True)
class InputColumns:
    """The columns that a model reads in addition to example_id.

    Attributes:
        required: Columns that an input must have.
        optional: Columns that are read if the input has them; None for all columns of the input.
        texts: Required columns whose values must be texts.
    """

    required: frozenset[str] = frozenset()
    optional: frozenset[str] | None = frozenset()
    texts: frozenset[str] = frozenset()

    @property
    def names(self) -> frozenset[str] | None:
        """Return required and optional columns; None for all columns of the input."""
        return None if self.optional is None else self.required | self.optional


@dataclass(frozen=True, slots=True)
class Placement:
    """The process in which a model is loaded.

    Attributes:
        num_gpus: GPUs of the stage, a fraction of one if several replicas share it.
        call_timeout_s: Seconds after which the stage abandons a call.
    """

    num_gpus: float = 0
    call_timeout_s: float = math.inf

    @property
    def over_gpus(self) -> bool:
        """Return whether the model is spread over several GPUs."""
        return self.num_gpus > 1


# transformers replaces its module while it is imported; a second thread that imports it then gets the empty one.
_one_import = Lock()


class KindSpec(Section):
    """The settings of a model in a pool file: plain data until load() is called, in the process that runs the model.

    A kind is a subclass and an entry point of the group `cauc_ray.model_kinds` that names it.

    Attributes:
        LOADER: "module:function" of a function (spec, placement) that returns the loaded model.
        PACKAGES: The extra that installs what the loader imports, "" for none, then the packages.
        EXCLUDED_FROM_IDENTITY: Settings that do not change answers.
        FILES: Settings that are files or folders, which must exist where the model runs.
        LOGITS: The kind of its logits.
        REVISION: Raised when the same settings give other answers than before.
        SPANS_GPUS: Whether a model may span several GPUs.
        ENFORCES_OWN_TIMEOUT: Whether a call ends by itself and must be awaited until then: another replica would ask
            the same server.
        REMOTE: Whether calls measure their network traffic.
        TAKES_LONG: Whether it is a person: rows may be left without an answer that is yet to come, and what other
            stages have said of a row is shown.
        kind: Name of the kind.
    """

    LOADER: ClassVar[str]
    PACKAGES: ClassVar[tuple[str, ...]] = ()
    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = frozenset({"device"})
    FILES: ClassVar[tuple[str, ...]] = ()
    LOGITS: ClassVar[LogitKind] = "raw"
    REVISION: ClassVar[int] = 0
    SPANS_GPUS: ClassVar[bool] = False
    ENFORCES_OWN_TIMEOUT: ClassVar[bool] = False
    REMOTE: ClassVar[bool] = False
    TAKES_LONG: ClassVar[bool] = False
    kind: str

    @property
    def columns_read(self) -> InputColumns:
        """Return the columns that it reads: all of the input unless a kind declares them."""
        return InputColumns(optional=None)

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
        """Return a hash of all settings that its answers depend on, with the content of local files, not their path."""
        unset = {name for name in _LATER if getattr(self, name, None) is None}
        settings = self.model_dump(mode="json", exclude={*self.EXCLUDED_FROM_IDENTITY, *unset})
        for name in _NAMES_OF_FILES & settings.keys():
            path = settings[name]
            if isinstance(path, str) and Path(path).is_absolute():
                settings[name] = content_digest(Path(path), _SAMPLE_BYTES) or path
        content = [settings, *([self.REVISION] if self.REVISION else [])]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def answers_kind(self) -> LogitKind:
        """Return the kind of its logits."""
        return self.LOGITS

    @property
    def answer_format(self) -> AnswerFormat | None:
        """Return how it answers in words; None for models that score options, and where it is unknown."""
        return None

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

    def check(self, local: bool) -> None:
        """Raise ConfigError for faults that can be found without loading the model.

        Args:
            local: Whether it will run on this machine, so that its files and packages must be here.
        """
        for path in filter(None, (getattr(self, name) for name in self.FILES)):
            if local and Path(path).is_absolute() and not Path(path).exists():
                raise ConfigError(f"{path} does not exist")

    def load(self, placement: Placement = Placement()) -> Model:
        """Load the model. Raises CaucError if it or a package is missing."""
        if self.PACKAGES:
            self.require(*self.PACKAGES)
        self.check(local=True)
        module, _, function = self.LOADER.partition(":")
        with _one_import:
            for package in self.PACKAGES[1:]:
                import_module(package)
            loader = import_module(module)
        model: Model = getattr(loader, function)(self, placement)
        return model


# Settings that came later: a model without them is what it was before.
_LATER = ("words", "generate")
# Settings of any kind that may be local files or folders of a model.
_NAMES_OF_FILES = frozenset({"model", "weights", "tokenizer", "lora", "path"})
# Bytes that are read at the start, in the middle and at the end of each file for its digest: a moment for weights of
# many gigabytes.
_SAMPLE_BYTES = 1 << 20


class TorchSpec(KindSpec):
    """A network in torch.

    Attributes:
        device: Where it computes; auto is a GPU if the stage has one.
        dtype: Precision of the computation; auto is bfloat16 on GPUs that have it, else float32.
    """

    device: TorchDevice = "auto"
    dtype: Precision = "auto"


class ImageSpec(KindSpec):
    """A model that reads the column `image`."""

    REVISION: ClassVar[int] = 1  # images are upright

    @property
    def columns_read(self) -> InputColumns:
        """Return the column of images."""
        return InputColumns(frozenset({"image"}))


class DeclaringSpec(KindSpec):
    """A model whose kind of logits its user may declare.

    Attributes:
        logit_kind: The kind of its logits, by default what its kind gives.
    """

    EXCLUDED_FROM_IDENTITY: ClassVar[frozenset[str]] = KindSpec.EXCLUDED_FROM_IDENTITY | {"logit_kind"}
    logit_kind: LogitKind | None = None

    @property
    def answers_kind(self) -> LogitKind:
        """Return the declared kind, that of the class without one."""
        return self.logit_kind or self.LOGITS


class TableSpec(DeclaringSpec):
    """A model that reads columns of a table.

    Attributes:
        columns: The columns that it reads, in its order.
    """

    columns: tuple[str, ...] = ()

    @property
    def columns_read(self) -> InputColumns:
        """Return its columns; all of the input if the settings do not name them."""
        return InputColumns(frozenset(self.columns), frozenset() if self.columns else None)
