"""What every part of the benchmark is: a module with three functions."""

from __future__ import annotations

import argparse
import importlib
from importlib.util import find_spec
from typing import Any, Protocol, cast

from cauc_ray.errors import CaucError

# In the order in which they run; each is the module of that name beside this one.
PARTS = (
    "numbers",
    "calibrate",
    "spread",
    "collect",
    "plan",
    "ray_data",
    "saving",
    "controller",
    "memory",
    "sink",
    "serving",
    "serving_bodies",
    "gpu",
    "faults",
)


class Part(Protocol):
    """A module that measures one thing. Its docstring's first line says which."""

    __doc__: str | None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the sizes, each with its full one as the default."""

    def missing(self, options: argparse.Namespace) -> str | None:
        """Return what the part needs and does not find here, None where it can run."""

    def measure(self, options: argparse.Namespace) -> dict[str, Any]:
        """Measure, print what people read, and return the figures, ratios included."""


def load(name: str) -> Part:
    """Import a part's module: only now, since each brings libraries that others do without."""
    return cast(Part, importlib.import_module(f"jobs.bench.{name}"))


def parser_of(name: str, part: Part) -> argparse.ArgumentParser:
    """Return the parser of a part's options."""
    about = (part.__doc__ or "").partition("\n")[0]
    parser = argparse.ArgumentParser(
        prog=f"python -m jobs.bench {name}",
        description=about,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    part.add_options(parser)
    return parser


def measured(name: str, part: Part, options: argparse.Namespace) -> dict[str, Any]:
    """Return a part's figures, or why there are none: it is left out here, or it failed."""
    print(f"== {name}", flush=True)
    if reason := part.missing(options):
        print(f"left out: {reason}", flush=True)
        return {"left_out": reason}
    try:
        return part.measure(options)
    except CaucError as error:  # the figures of the other parts have cost minutes
        print(f"failed: {error}", flush=True)
        return {"failed": str(error)}


def absent(*packages: str) -> str | None:
    """Return a sentence on the first package that is not installed, None where all are."""
    for package in packages:
        if find_spec(package) is None:
            return f"{package} is not installed; pip install -e '.[dev]' brings it"
    return None
