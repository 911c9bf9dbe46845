"""Options of public functions: defined once, by a function's signature and docstring, and checked alike at every door.

Keyword arguments are checked by the model that `options_of` derives; config files are read and JSON schemas written by
it, and the command's flags and help are made from it. Types say what a value may be and how its text is read.
"""

from __future__ import annotations

import inspect
import math
import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, get_origin

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetPydanticSchema,
    PlainSerializer,
    PlainValidator,
    ValidationError,
    ValidationInfo,
    WithJsonSchema,
    create_model,
)

from cauc_ray.api.docstrings import items
from cauc_ray.errors import ConfigError, OptionError, unknown_name
from cauc_ray.files.documents import Settings, read_yaml
from cauc_ray.files.paths import AnyPath, RemotePath, path_of
from cauc_ray.models.resources import Resources

_Type = TypeVar("_Type")
_Function = TypeVar("_Function", bound=Callable[..., Any])
# The folder into which Ray unpacks the working directory of a job, and which it removes afterwards.
_RAY_COPY = "_ray_pkg_"


@dataclass(frozen=True, slots=True)
class Flag:
    """The form of an option on the command line.

    Attributes:
        metavar: Placeholder of its value in the help.
        spellings: Other than its name after two dashes.
        is_positional: Given by its position, not by a name.
        is_several: Given by several positions.
        config_only: Too large for a flag.
    """

    metavar: str | None = None
    spellings: tuple[str, ...] = ()
    is_positional: bool = False
    is_several: bool = False
    config_only: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """The group of an option in the help."""

    title: str


COMMON, OTHER, CHAIN, RAY = map(Group, ("common options", "more options", "models and splits", "Ray"))
# In the order of the help; an option without a mark is one of the second group.
GROUPS = (COMMON, OTHER, CHAIN, RAY)
Common: TypeAlias = Annotated[_Type, COMMON]
OfChain: TypeAlias = Annotated[_Type, CHAIN]
OnRay: TypeAlias = Annotated[_Type, RAY]


@dataclass(frozen=True, slots=True)
class Door:
    """The way by which the values of options come: keywords in Python, or flags and a config file.

    Attributes:
        flags: Each option as a flag; none in Python.
        flagged: Names of the options that flags give.
        config: The config file that gives the others, if any.
    """

    flags: Mapping[str, str] = field(default_factory=dict)
    flagged: Collection[str] = ()
    config: Path | None = None

    def folder_of(self, name: str | None) -> Path | None:
        """Return the folder that an option's relative path is taken from, None for the current one."""
        return None if self.config is None or name in self.flagged else self.config.parent

    def error(self, message: str, about: str | None = None) -> ConfigError:
        """Return an error in the words of this door.

        Args:
            message: Its text, with names of options in braces.
            about: The option that it is about, if it is one.
        """
        braced = message if about is None else f"{{{about}}}{message}"
        if self == PYTHON:
            return OptionError(braced)
        start = ""
        if self.config is not None and not set(re.findall(r"\{(\w+)\}", braced)) & set(self.flagged):
            start = f"{self.config}: "
        return ConfigError(start + re.sub(r"\{(\w+)\}", lambda match: self._spelled(match[1]), braced))

    def _spelled(self, name: str) -> str:
        return name if self.config is not None and name not in self.flagged else self.flags.get(name, name)


PYTHON = Door()


class Options(Settings):
    """Checked options; a subclass states what they must agree on and what follows from them."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def require_agreement(self) -> None:
        """Raise ConfigError, with names of options in braces, where options contradict each other."""

    @classmethod
    def of(cls, values: Mapping[str, Any], door: Door = PYTHON) -> Self:
        """Take the function's options out of values, and check them. Raises ConfigError in one line."""
        own_values = {name: values[name] for name in cls.model_fields if name in values}
        try:
            options = cls.model_validate(own_values, context=door)
            options.require_agreement()
        except ValidationError as error:
            first, *further = error.errors()
            name = str(first["loc"][0])
            # Of an option's types the one that its value comes nearest to: what is wrong there lies deepest.
            fault = max(
                [first, *(fault for fault in further if fault["loc"][0] == name)], key=lambda fault: len(fault["loc"])
            )
            raise door.error(_reason(fault, values.get(name)), name) from error
        except ConfigError as error:
            raise door.error(error.args[0]) from error
        return options

    @classmethod
    def read(cls, config: str | Path, flag_values: Mapping[str, Any] = {}, flags: Mapping[str, str] = {}) -> Self:
        """Read options from a YAML file, and check them; those that are given as well take precedence.

        Relative paths are taken from the file's folder, those that are given from the current one.

        Args:
            config: The file, a mapping of options by name.
            flag_values: Options that the command line gives.
            flags: How it spells them, by name.

        Raises:
            ConfigError: The file is missing or is not YAML, or an option is unknown, missing or wrong; in one line.
        """
        content = read_yaml(Path(config), "config")
        if not isinstance(content, dict):
            keys = ", ".join(name for name, field in cls.model_fields.items() if field.is_required())
            raise ConfigError(f"{config} is not a config: a mapping with {keys} was expected")
        unknown = next((str(name) for name in content if name not in cls.model_fields), None)
        if unknown is not None:
            raise ConfigError(f"{config}: {unknown_name('key', unknown, cls.model_fields)}")
        return cls.of({**content, **flag_values}, Door(flags, flag_values, Path(config)))


class _Pickled:
    """Pickles options by the functions that define them: other processes derive the class anew."""

    FUNCTIONS: ClassVar[tuple[Callable[..., Any], ...]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (self.FUNCTIONS, dict(self))  # type: ignore[call-overload]


def _restored(functions: tuple[Callable[..., Any], ...], values: Mapping[str, Any]) -> Options:
    """Return options that another process has checked."""
    options: Options = options_of(*functions).model_construct(**values)
    return options


def _reason(fault: Any, value: Any) -> str:
    """Return what is wrong with an option's value, as it follows the option's name."""
    if fault["type"] == "missing" and len(fault["loc"]) == 1:
        return " is required"
    path = ""
    for part in fault["loc"][1:]:  # some parts name one of several types
        if (isinstance(value, Mapping) and part in value) or (
            isinstance(value, list | tuple) and isinstance(part, int) and part < len(value)
        ):
            value, path = value[part], f"{path}.{part}"
    if fault["type"] in ("missing", "extra_forbidden"):
        kind = "missing" if fault["type"] == "missing" else "unknown"
        return f"{path}: {kind} key {fault['loc'][-1]!r}"
    if fault["type"] == "value_error":  # our own words
        return f"{path}: {fault['ctx']['error']}"
    message = fault["msg"]
    return f"{path}: {message[0].lower()}{message[1:]}, got {' '.join(reprlib.repr(value).split())}"


_RULES: dict[Callable[..., Any], type[Options]] = {}


def takes(rules: type[Options]) -> Callable[[_Function], _Function]:
    """Return a decorator: the options of a function are checked by rules, besides their types."""

    def bind(function: _Function) -> _Function:
        _RULES[function] = rules
        return function

    return bind


@cache
def options_of(*functions: Callable[..., Any]) -> type[Any]:
    """Return the class of the options that functions define, a subclass of Options.

    Options are the parameters that are given by name or belong to a group of the help; not what only Python can give:
    functions, and values of any type. An option that several functions have is the first one's, whose text is the first
    of all. Rules are the last function's.
    """
    texts, fields = dict[str, str](), dict[str, Any]()
    for function in functions:
        texts = _arguments(function) | texts
    for function in functions:
        for parameter in inspect.signature(function).parameters.values():
            kind = _kind(parameter, function.__globals__)
            if kind is not None and parameter.name not in fields:
                default = ... if parameter.default is parameter.empty else parameter.default
                fields[parameter.name] = (kind, Field(default, description=texts[parameter.name]))
    name = functions[-1].__name__.title().replace("_", "")
    options: type[Any] = create_model(name, __base__=(_Pickled, _RULES.get(functions[-1], Options)), **fields)
    options.FUNCTIONS = functions
    return options


def _kind(parameter: inspect.Parameter, names: dict[str, Any]) -> Any:
    """Return the type of an option, None for a parameter that is not an option."""
    if parameter.annotation == "Any" or parameter.kind is parameter.VAR_KEYWORD:
        return None
    try:
        kind = eval(parameter.annotation, names)
    except NameError:  # a type that is imported for type checkers alone: an object of Python
        return None
    if get_origin(kind) is Callable:
        return None
    is_marked = any(isinstance(mark, Flag | Group) for mark in getattr(kind, "__metadata__", ()))
    return kind if is_marked or parameter.kind is parameter.KEYWORD_ONLY else None


def _arguments(function: Callable[..., Any]) -> dict[str, str]:
    """Return what a docstring's Args section says of each argument, up to what only Python can give."""
    texts = items(function.__doc__, "Args")
    return {name: text.partition(" In Python")[0].removesuffix(".") for name, text in texts.items()}


def several(text: str) -> tuple[str, ...] | dict[str, str]:
    """Read A,B,C, or A=X,B=Y; the values are texts, of which a type makes what it holds."""
    parts = [[part.strip() for part in item.split("=", 1)] for item in text.split(",")]
    named = {part[0]: part[-1] for part in parts if len(part) == 2}
    if not all(map(all, parts)) or len(named) not in ((len(parts),) if "=" in text else (0,)):
        raise ValueError(f"{text!r} is not a list of values, or of NAME=VALUE, separated by commas")
    return named or tuple(name for (name,) in parts)


def _listed(value: Any, info: ValidationInfo) -> Any:
    """Return an array or a list as what types are checked on, a tuple; of the command, which has texts, also a text."""
    if isinstance(value, str):
        return several(_text(value, info))
    return tuple(value) if isinstance(value, np.ndarray | list) else value


def _chains(value: Any, info: ValidationInfo) -> Any:
    """Return chains as tuples; a text is A+B,A+B+C."""
    if isinstance(value, str):
        return tuple(tuple(chain.split("+")) for chain in several(_text(value, info)))
    return _listed(value, info)


def _kinds(value: Any, info: ValidationInfo) -> Any:
    return several(_text(value, info)) if isinstance(value, str) and "=" in value else value


def _text(value: str, info: ValidationInfo) -> str:
    """Return a text that lists values. Raises ValueError in Python, where a name may hold a comma."""
    if isinstance(info.context, Door) and info.context.flags:
        return value
    raise ValueError(f"a list or a mapping was expected, got the text {value!r}")


def located(value: object, info: ValidationInfo) -> AnyPath:
    """Return the path that a text names: a URI as it is, else taken from the folder of the config file if any."""
    if not isinstance(value, str | Path | RemotePath):
        raise ValueError(f"a path or a URI was expected, got {value!r}")
    if not str(value):
        raise ValueError("a path is missing: it is an empty text")
    path, folder = path_of(value), _folder(info)
    return path if folder is None or isinstance(path, RemotePath) else (folder / path).resolve()


def _folder(info: ValidationInfo) -> Path | None:
    """Return the folder of the config file that an option is from, None where it is from none."""
    return info.context.folder_of(info.field_name) if isinstance(info.context, Door) else None


def _output(value: object, info: ValidationInfo) -> AnyPath:
    """Return the path of an output. Raises ValueError where Ray would remove it with the job's working directory."""
    path = located(value, info)
    if isinstance(path, Path) and _folder(info) is not None and any(part.startswith(_RAY_COPY) for part in path.parts):
        raise ValueError(
            f"{path.name} lies in the copy of the working directory that Ray makes for a job and removes afterwards; "
            "give an absolute path"
        )
    return path


def _dataset(value: str, info: ValidationInfo) -> str:
    """Return a dataset's name, with the path in it taken from the config file's folder."""
    from cauc_ray.data.benchmarks import BENCHMARKS  # pyarrow, which other verbs need not have

    name, is_named, path = value.partition("=")
    if is_named and name in BENCHMARKS:
        return f"{name}={located(path, info)}" if path else value
    return value if name in BENCHMARKS or name.startswith("hub:") else str(located(value, info))


def _encoder(value: str, info: ValidationInfo) -> str:
    """Return a folder next to the config file where there is one of that name, else the name of a stage or a hub id."""
    folder = _folder(info)
    return value if folder is None or not (folder / value).exists() else str((folder / value).resolve())


def _budget(value: Any) -> Any:
    """Return a budget as it is. Raises ValueError for one at a confidence that is not two such numbers."""
    if isinstance(value, str) and "@" in value:
        try:
            budget, confidence = map(float, value.split("@"))
        except ValueError:
            budget = confidence = math.nan
        if not (math.isfinite(budget) and 0 < confidence < 1):
            raise ValueError(f"a budget and a confidence between 0 and 1 were expected, such as 6@0.95, got {value!r}")
    return value


def checked_as(kind: Any) -> GetPydanticSchema:
    """Return the mark of a type that is checked, and stored, as another one."""
    return GetPydanticSchema(lambda _, handler: handler(kind))


_PATH = (PlainSerializer(str, when_used="json"), WithJsonSchema({"type": "string", "format": "path"}), Flag("PATH"))
_LISTED = BeforeValidator(_listed)
Location: TypeAlias = Annotated[AnyPath, PlainValidator(located), *_PATH]
InputPath: TypeAlias = Annotated[str | AnyPath, PlainValidator(located), *_PATH]
OutputPath: TypeAlias = Annotated[AnyPath, PlainValidator(_output), *_PATH]
Output: TypeAlias = Annotated[str | AnyPath, PlainValidator(_output), *_PATH, Flag("PATH", ("-o", "--output"))]
DatasetName: TypeAlias = Annotated[str, AfterValidator(_dataset), Flag("NAME|PATH")]
EncoderName: TypeAlias = Annotated[str, AfterValidator(_encoder)]
Cost: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Amount: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
# An amount, or an amount that is kept on new inputs with a confidence.
Budget: TypeAlias = Annotated[
    Annotated[float, Field()] | Annotated[str, Field(pattern="@")], BeforeValidator(_budget), Flag("B|B@CONFIDENCE")
]
Seconds: TypeAlias = Annotated[float, Field(gt=0), Flag("S")]
Seed: TypeAlias = Annotated[int, Field(ge=0, lt=2**63)]
Names: TypeAlias = Annotated[Sequence[str], checked_as(tuple[str, ...]), _LISTED, Flag("A,B,C")]
Amounts: TypeAlias = Annotated[Sequence[float], checked_as(tuple[Amount, ...]), _LISTED, Flag("X,Y,Z")]
Seeds: TypeAlias = Annotated[Sequence[int], checked_as(tuple[Seed, ...]), _LISTED, Flag("0,1,2")]
Pairs: TypeAlias = Annotated[Mapping[str, str], checked_as(dict[str, str]), _LISTED, Flag("NAME=VALUE,…")]
Chains: TypeAlias = Annotated[
    Sequence[Sequence[str]],
    checked_as(tuple[Annotated[tuple[str, ...], Field(min_length=1)], ...]),
    BeforeValidator(_chains),
    Flag("A+B,A+B+C"),
]
Costs: TypeAlias = Annotated[
    Mapping[str, float] | Sequence[float],
    checked_as(dict[str, Cost] | tuple[Cost, ...]),
    _LISTED,
    Flag("X,Y,Z|A=X,…"),
]
Kinds: TypeAlias = Annotated[
    str | Mapping[str, str], checked_as(str | dict[str, str]), BeforeValidator(_kinds), Flag("KIND|A=KIND,…")
]
ShardResources: TypeAlias = OnRay[Annotated[Mapping[str, Any], checked_as(Resources), Flag(config_only=True)]]
ShardCount: TypeAlias = OnRay[Annotated[Annotated[int, Field(ge=1)] | Literal["auto"], Flag("N|auto")]]
# A share of the calibration split; or arrays: (logits, labels), or (logits, labels, example_ids).
Cut: TypeAlias = Annotated[float, Field(gt=0, lt=1), Flag("SHARE")] | tuple[Any, Any] | tuple[Any, Any, Any] | None
