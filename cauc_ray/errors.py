"""The errors that cauc-ray raises for what a user can put right.

CaucError
├── DataError      a logit table, an input or an output does not hold what it must
├── ConfigError    a pool file, an option or a name is wrong
├── PolicyError    a policy file is unreadable, of another version or does not fit its chain
├── BudgetError    no operating point costs so little
├── RiskError      no threshold's risk is certified
├── GuardError     a guard has fired where none may
└── ExecutionError a run could not be started or finished
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol


class CaucWarning(UserWarning):
    """Something that works but is seldom meant; the message says what was done."""


class GuardWarning(CaucWarning):
    """A guard has fired on a policy (docs/how-to/guards.md); the message is its name and what it found."""


@contextmanager
def own_warnings(hear: Callable[[str], None]) -> Iterator[None]:
    """Give the message of each CaucWarning of the block to hear() as it arises, in place of Python's own report.

    Warnings of other categories are left to Python, its filters and its format.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("always", CaucWarning)
        show_other = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, CaucWarning):
                hear(str(message))
            else:
                show_other(message, category, *place, **more)

        warnings.showwarning = show
        yield


class CaucError(Exception):
    """Something a user can put right; its message is one line that says what and how."""


class DataError(CaucError):
    """A logit table, an input or an output folder does not hold what it must."""


class ConfigError(CaucError):
    """A pool file, an option or a name is wrong."""


class PolicyError(CaucError):
    """A policy is unreadable, of another version, or does not fit the chain it is used on."""


class BudgetError(CaucError):
    """No operating point costs as little as the budget asks."""


class RiskError(CaucError):
    """No threshold's risk is certified to be as low as is asked for."""


class GuardError(CaucError):
    """A fitted policy has something that guards warn of, where that was to be an error.

    guards: those that have fired (policies.evidence.Guard).
    """

    def __init__(self, message: str, guards: tuple[Any, ...] = ()) -> None:
        """Take the message and what fired."""
        super().__init__(message)
        self.guards = guards


class ExecutionError(CaucError):
    """A run could not be started or finished."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Say that a name is unknown, with the nearest known one and all that there are.

    >>> unknown_name("model", "resnet2", ["resnet20", "resnet56"])
    "unknown model 'resnet2'; did you mean 'resnet20'? Available: resnet20, resnet56"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Available: {', '.join(names) or 'none'}"


class _Validation(Protocol):
    def errors(self) -> list[Any]: ...


def explain(error: _Validation) -> str:
    """Say in one line what a file's schema (pydantic) found wrong first: the place, the fault, the value."""
    faults = error.errors()
    # A key that is misspelt is also missing: the key that stands there says more.
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return f"unknown key {place!r}"
    if first["type"] == "missing":
        return f"missing key {place!r}"
    if first["type"] == "value_error":  # our own words, which pydantic puts two of its own before
        said = str(first["ctx"]["error"])
        return f"{place}: {said}" if place else said
    said = f"{first['msg'][0].lower()}{first['msg'][1:]}"
    got = f", got {first['input']!r}" if isinstance(first["input"], str | int | float) else ""
    return f"{place}: {said}{got}" if place else said


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, its type's name where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def one_line(error: BaseException) -> str:
    """Return an error's message as one line, its type's name where it has none."""
    return " ".join(str(error).split()) or type(error).__name__


# Of a foreign message, the letters that are kept.
MOST_LETTERS = 500


def printable(text: str) -> str:
    """Return a foreign message as any file can hold it: short, and without lone surrogates, which UTF-8 has not."""
    whole = text.encode("utf-8", "replace").decode()
    return whole if len(whole) <= MOST_LETTERS else f"{whole[:MOST_LETTERS]}…"
