"""The parts of the benchmark: functions whose keyword arguments are the part's options."""

from __future__ import annotations

import argparse
import importlib
import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias, TypeVar

from cauc_ray.errors import CaucError

# The module of each part, in the order in which they run. Its function of the part's name takes the part's options as
# keyword arguments and returns the figures. An option is a number, a text, a flag, or a tuple of numbers or names; its
# default is the full size, and a tuple of names lists all choices.
PARTS = {
    "numbers": "bench.fitting",
    "doors": "bench.fitting",
    "shards": "bench.fitting",
    "compare": "bench.compare",
    "ray_data": "bench.ray_data",
    "controller": "bench.runs",
    "stages": "bench.stages",
    "gpu": "bench.gpu",
    "serving": "bench.serving",
    "faults": "faults.trial",
}
OFFLINE = "or without a network `pip download -d wheels` elsewhere and `pip install --no-index -f wheels` here"
T = TypeVar("T")
Measure: TypeAlias = Callable[..., dict[str, Any]]


class LeftOut(CaucError):  # noqa: N818  # nothing has failed
    """A part needs something that is not here."""


def load(name: str) -> Measure:
    """Return what measures a part. Its module is imported now, since each imports libraries that others do without."""
    measure: Measure = getattr(importlib.import_module(f"jobs.{PARTS[name]}"), name)
    return measure


def parser_of(name: str, measure: Measure) -> argparse.ArgumentParser:
    """Return the parser of a part's options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m jobs.bench {name}",
        description=inspect.getdoc(measure),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in inspect.signature(measure).parameters.values():
        default, flag = option.default, f"--{option.name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            kind, choices = type(default[0]), ", ".join(map(str, default))
            several: dict[str, Any] = {"nargs": "+", "type": kind, "metavar": kind.__name__.upper()}
            if kind is str:
                several |= {"choices": default, "metavar": "NAME"}
            parser.add_argument(flag, **several, default=default, help=f"default: {choices}")
        else:
            kind = str if default is None else type(default)
            parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    return parser


def measured(name: str, words: Sequence[str]) -> dict[str, Any]:
    """Return a part's figures for the words of its options, or why there are none: it was left out, or it failed."""
    try:
        measure = load(name)
        options = vars(parser_of(name, measure).parse_args(words))
        print(f"== {name}", flush=True)
        figures = measure(**options)
    except LeftOut as error:
        figures = {"left_out": str(error)}
    except ModuleNotFoundError as error:
        figures = {"left_out": f"{error.name} is not installed; pip install {error.name}, {OFFLINE}"}
    except CaucError as error:  # the figures of the other parts have cost minutes
        figures = {"failed": str(error)}
    show(figures)
    return figures


def by_turns(
    sides: Mapping[str, Callable[[int], T]], turns: int, text: Callable[[T], str], until: float = math.inf
) -> dict[str, list[T]]:
    """Have all sides take turns, and return the measurements of each; a text of each turn is printed.

    The second of a pair inherits the first's heat and garbage, so that the order changes from turn to turn.

    Args:
        sides: What measures each side in a turn, by name.
        turns: Number of turns.
        text: Text of a measurement.
        until: Time by time.monotonic() after which no further turn begins; the first one is always taken.
    """
    measurements: dict[str, list[T]] = {side: [] for side in sides}
    for turn in range(turns):
        if turn and time.monotonic() > until:
            print(f"ended after {turn} of {turns} turns: the time is over", flush=True)
            break
        for side in list(sides)[:: 1 if turn % 2 == 0 else -1]:
            measurements[side].append(sides[side](turn))
            print(f"{side:>9}: {text(measurements[side][-1])}", flush=True)
    return measurements


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median and the range."""
    return {"median": median(values), "least": min(values), "most": max(values)}


def show(figures: Mapping[str, Any], indent: str = "") -> None:
    """Print figures, a line each, in four digits; those of a long or nested mapping below its name."""
    for name, value in figures.items():
        if isinstance(value, dict) and (len(value) > 4 or any(isinstance(v, dict | list) for v in value.values())):
            print(f"{indent}{name}:")
            show(value, f"{indent}  ")
        else:
            print(f"{indent}{name}: {_shown(value)}", flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(figure)}" for name, figure in value.items())
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:,.4g}" if isinstance(value, float) else str(value)
