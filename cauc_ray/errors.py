"""The errors that cauc-ray raises for problems that the user can fix, with the command's exit code for each.

CaucError               2
├── DataError           2  a logit table, an input or an output folder is missing, damaged or inconsistent
├── ConfigError         2  a pool file, an option or a name is wrong
│   └── OptionError     2  the same of options, which each door spells in its way
├── PolicyError         2  a policy file is unreadable, has another version or does not fit its chain
├── BudgetError         2  no operating point is within the budget
├── RiskError           2  no threshold meets the risk limit
├── GuardError          3  a fitted policy has warnings where none are allowed
└── ExecutionError      4  infrastructure fails: a cluster is lost, a stage is down; the same command may succeed later
    └── SpendingError   2  calls have cost as much as the pool allows
"""

from __future__ import annotations

import difflib
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.util import find_spec
from typing import Any, ClassVar, Protocol

# A password before a host, and values of a query that grant access: keys, tokens, signatures.
_SECRETS = re.compile(
    r"(?<=://)[^\s/@]*:[^\s/@]*(?=@)|(?<=[?&])([\w-]*(?:key|token|secret|sig|signature|password|credential))=[^&\s'\"]+",
    re.IGNORECASE,
)


def masked(text: str) -> str:
    """Return a text without the secrets of the URIs in it.

    >>> masked("s3://user:password@bucket/a?secret_key=abc&region=b cannot be read")
    's3://***@bucket/a?secret_key=***&region=b cannot be read'
    """
    return _SECRETS.sub(lambda match: "***" if match[1] is None else f"{match[1]}=***", text)


class CaucWarning(UserWarning):
    """Something that works but is probably not intended; the message states what was done."""

    def __str__(self) -> str:
        return masked(super().__str__())


class GuardWarning(CaucWarning):
    """A check of a fitted policy warns (docs/how-to/guards.md); the message is the check's name and what it found."""


# Texts that a block of equal_warnings_once() has issued, None outside of one.
_WARNED: ContextVar[set[str] | None] = ContextVar("warned", default=None)


@contextmanager
def own_warnings(hear: Callable[[str], None]) -> Iterator[None]:
    """Pass the message of each CaucWarning in the block to hear() as it is issued, instead of Python's own report.

    Warnings of other categories are left to Python, its filters and its format.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", CaucWarning)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
            if issubclass(category, CaucWarning):
                hear(str(message))
            else:
                show_other(message, category, *place, **options)

        warnings.showwarning = show
        yield


def warn(text: str, category: type[CaucWarning] = CaucWarning) -> None:
    """Warn at the line outside this package that called it."""
    warned = _WARNED.get()
    if warned is not None and text in warned:
        return
    if warned is not None:
        warned.add(text)
    frame, depth, outermost = sys._getframe().f_back, 1, 0
    while frame is not None:
        if frame.f_globals["__name__"].startswith("cauc_ray."):
            outermost = depth  # past others that call back, as functools does
        frame, depth = frame.f_back, depth + 1
    warnings.warn(text, category, stacklevel=outermost + 2)


@contextmanager
def equal_warnings_once() -> Iterator[None]:
    """Issue equal warnings of a block once: every method that is fitted may give the same."""
    token = _WARNED.set(set())
    try:
        yield
    finally:
        _WARNED.reset(token)


class CaucError(Exception):
    """A problem that the user can fix; the message states in one line what is wrong and what to do.

    Attributes:
        exit_code: The command's exit code.
    """

    exit_code: ClassVar[int] = 2

    def __str__(self) -> str:
        return masked(super().__str__())


class DataError(CaucError):
    """A logit table, an input or an output folder is missing, damaged or inconsistent."""


class ConfigError(CaucError):
    """A pool file, an option or a name is wrong."""


class OptionError(ConfigError):
    """An option is wrong, or several contradict each other; the message has names of options in braces."""

    def __str__(self) -> str:
        return re.sub(r"\{(\w+)\}", r"\1", super().__str__())


class PolicyError(CaucError):
    """A policy is unreadable, has another version, or does not fit the chain it is used on."""


class BudgetError(CaucError):
    """No operating point is within the budget."""


class RiskError(CaucError):
    """No threshold is certified to meet the risk limit."""


class GuardError(CaucError):
    """A fitted policy has warnings, and the caller asked for warnings to be errors.

    Attributes:
        guards: The checks that warn (policies.evidence.Guard).
    """

    exit_code = 3

    def __init__(self, message: str, guards: tuple[Any, ...] = ()) -> None:
        """Take the message and the checks that warn."""
        super().__init__(message)
        self.guards = guards


class ExecutionError(CaucError):
    """Infrastructure fails: a cluster is lost, a stage is down. The same command may succeed later."""

    exit_code = 4


class SpendingError(ExecutionError):
    """The calls of a stage have cost as much as the pool allows; a retry would spend it again."""

    exit_code = 2


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raise ConfigError with the install command if packages are missing.

    Args:
        what: What needs them, for the message.
        extra: The extra of this package that installs them, "" for packages that none does.
        packages: The packages, by the names that they are imported by.
    """
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        target = f"'cauc-ray[{extra}]'" if extra else " ".join(missing)
        raise ConfigError(f"{what} needs {' and '.join(missing)}; install with: pip install {target}")


def unknown_name(kind: str, name: str, known_names: Iterable[str]) -> str:
    """Return the message for an unknown name, with the nearest known name and a list of all names.

    >>> unknown_name("model", "resnet2", ["resnet20", "resnet56"])
    "unknown model 'resnet2'; did you mean 'resnet20'? Available: resnet20, resnet56"
    """
    names = sorted(known_names)
    by_lower = {full.lower(): full for full in reversed(names)}
    near = [by_lower[match] for match in difflib.get_close_matches(name.lower(), by_lower, n=1)]
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Available: {', '.join(names) or 'none'}"


class _Validation(Protocol):
    def errors(self) -> list[Any]: ...


def explain(error: _Validation) -> str:
    """Return one line on the first error that a schema (pydantic) found: the key, the error and the value."""
    faults = error.errors()
    # A misspelt key is also reported as missing; the misspelt one is more useful.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    key = ".".join(str(name) for name in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {key!r}"
    if first["type"] == "missing":
        return f"missing key {key!r}"
    if first["type"] == "value_error":  # our own message, to which pydantic adds a prefix
        message = str(first["ctx"]["error"])
        return f"{key}: {message}" if key else message
    message = f"{first['msg'][0].lower()}{first['msg'][1:]}"
    got = f", got {first['input']!r}" if isinstance(first["input"], str | int | float) else ""
    return f"{key}: {message}{got}" if key else message


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the error type's name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return an error's message as one line, or the error type's name if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__


# Longer messages of other programs are cut to this many characters.
MOST_LETTERS = 500


def printable(text: str) -> str:
    """Return another program's message in a form that any file can store: short, and valid as UTF-8."""
    whole = masked(text.encode("utf-8", "replace").decode())
    return whole if len(whole) <= MOST_LETTERS else f"{whole[:MOST_LETTERS]}…"
