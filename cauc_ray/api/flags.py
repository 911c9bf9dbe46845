"""Flags of the command from the typed options of a verb, and how their texts are read."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

if TYPE_CHECKING:
    from cauc_ray.api.options import Options


@dataclass(frozen=True, slots=True)
class Flag:
    """How a flag gives a value of a type, as an annotation of that type says: how its text is read, and its name."""

    read: Callable[[str], Any]
    metavar: str


def add_options(verb: argparse.ArgumentParser, options: type[Options]) -> None:
    """Give a verb a flag for each of its options."""
    for name, field in options.model_fields.items():
        default, said = field.get_default(), str(field.description)
        if not (default is None or default is False or default == {}):
            said += f" (default: {','.join(default) if isinstance(default, tuple) else default})"
        kwargs: dict[str, Any] = {"default": default, "help": said.replace("%", "%%")}
        kind = next(of for of in _types(field.annotation) if of is not type(None))
        flag = next((each for each in (*field.metadata, *_metadata(field.annotation)) if isinstance(each, Flag)), None)
        if flag is not None:
            kwargs |= {"type": flag.read, "metavar": flag.metavar}
        elif kind is bool:
            kwargs["action"] = "store_true"
        elif get_origin(kind) is Literal:
            kwargs["choices"] = get_args(kind)
        else:
            kwargs |= {"type": kind, "metavar": name.rpartition("_")[2].upper()}
        verb.add_argument(f"--{name.replace('_', '-')}", **kwargs)


def _types(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _metadata(annotation: Any) -> Iterator[Any]:
    for each in _types(annotation):
        yield from getattr(each, "__metadata__", ())


def names(text: str) -> tuple[str, ...]:
    """Read A,B,C."""
    found = tuple(name.strip() for name in text.split(","))
    if not all(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names separated by commas")
    return found


def pairs(text: str) -> dict[str, str]:
    """Read A=X,B=Y."""
    parts = [pair.partition("=") for pair in text.split(",")]
    found = {name.strip(): own.strip() for name, _, own in parts}
    if not all(found) or not all(found.values()) or len(found) < len(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of NAME=VALUE separated by commas, each name once")
    return found


def text_or_pairs(text: str) -> str | dict[str, str]:
    """Read X, or A=X,B=Y."""
    return pairs(text) if "=" in text else text


def numbers(text: str) -> tuple[float, ...] | dict[str, float]:
    """Read 1,2,3 or A=1,B=2."""
    try:
        if "=" in text:
            return {name: float(number) for name, number in pairs(text).items()}
        return tuple(map(float, text.split(",")))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers separated by commas") from error
