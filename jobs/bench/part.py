"""What every part of the benchmark is: a module with `measure`, whose keyword arguments are the part's options."""

from __future__ import annotations

import argparse
import importlib
import inspect
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol, cast

from cauc_ray.errors import CaucError

# In the order in which they run; each is the module of that name in this folder.
PARTS = (
    "numbers",
    "shards",
    "collect",
    "plan",
    "ray_data",
    "saving",
    "controller",
    "memory",
    "sink",
    "serving",
    "bodies",
    "faults",
)


class Part(Protocol):
    """A module that measures one thing, which its docstring describes."""

    def measure(self, **options: Any) -> dict[str, Any]:
        """Return the figures, ratios included.

        Each option is a number, a text, a flag, or a tuple of one or more numbers or names, and its default the full
        size; a tuple of names has all that there are. Raises CaucError; LeftOut where something is missing here.
        """


class LeftOut(CaucError):  # noqa: N818  # nothing has failed
    """A part needs something that is not here."""


def require(*packages: str) -> None:
    """Raise LeftOut for the first package that is not installed."""
    for package in packages:
        if find_spec(package) is None:
            raise LeftOut(f"{package} is not installed; pip install -e '.[dev]' installs it")


def load(name: str) -> Part:
    """Import a part's module: only now, since each imports libraries that others do without."""
    return cast(Part, importlib.import_module(f"jobs.bench.{name}"))


def parser_of(name: str, part: Part) -> argparse.ArgumentParser:
    """Return the parser of a part's options."""
    about = f"{inspect.getdoc(part)}\n\n{inspect.getdoc(part.measure)}"
    parser = argparse.ArgumentParser(
        prog=f"python -m jobs.bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for option in inspect.signature(part.measure).parameters.values():
        default, flag = option.default, f"--{option.name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            kind, shown = type(default[0]), ", ".join(map(str, default))
            several: dict[str, Any] = {"nargs": "+", "type": kind, "metavar": kind.__name__.upper()}
            if kind is str:
                several |= {"choices": default, "metavar": "NAME"}
            parser.add_argument(flag, **several, default=default, help=f"default: {shown}")
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    return parser


def measured(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return a part's figures, or why there are none: it is left out here, or it failed.   words: its options."""
    part = load(name)
    options = vars(parser_of(name, part).parse_args(words))
    print(f"== {name}", flush=True)
    try:
        figures = part.measure(**options)
    except LeftOut as error:
        figures = {"left_out": str(error)}
    except CaucError as error:  # the figures of the other parts have cost minutes
        figures = {"failed": str(error)}
    show(figures)
    return figures


def show(figures: Mapping[str, Any], indent: str = "") -> None:
    """Print figures, a line each, four digits of numbers; those of a mapping or of several below its name."""
    for name, value in figures.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            value = {str(number): each for number, each in enumerate(value, 1)}
        if isinstance(value, dict) and (
            len(value) > 4 or any(isinstance(each, dict | list) for each in value.values())
        ):
            print(f"{indent}{name}:")
            show(value, f"{indent}  ")
        else:
            print(f"{indent}{name}: {_shown(value)}", flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
