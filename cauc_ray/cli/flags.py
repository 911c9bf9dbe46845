"""Flags of the command from the typed options of a verb."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Iterator
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from cauc_ray.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

    from cauc_ray.api.options import Options


def add_options(verb: argparse.ArgumentParser, options: type[Options]) -> None:
    """Give a verb a flag for each of its options, in a group for each class that declares some.

    What is not given is absent from the parsed namespace: a config file may give it, else its default holds.
    """
    groups: dict[str, Any] = {}
    for declaring in options.__mro__:  # a verb's own first, then what it shares with others
        for name, field in options.model_fields.items():
            if _declares(options, name) is not declaring:
                continue
            title = getattr(declaring, "GROUP", "options")
            if title not in groups:
                groups[title] = verb.add_argument_group(title)
            _add(groups[title], name, field)


def _declares(options: type[Options], name: str) -> type:
    """Return the class whose declaration of an option holds."""
    return next(each for each in options.__mro__ if name in inspect.get_annotations(each))


def _add(group: Any, name: str, field: FieldInfo) -> None:
    from cauc_ray.api.options import Flag

    flag = next((each for each in (*field.metadata, *_metadata(field.annotation)) if isinstance(each, Flag)), Flag())
    if flag.config_only or field.description is None:
        return
    kwargs: dict[str, Any] = {"default": argparse.SUPPRESS, "help": _help(field)}
    kind = next(of for of in _types(field.annotation) if of is not type(None))
    if kind is bool:
        kwargs["action"] = "store_true"
    elif get_origin(kind) is Literal:
        kwargs["choices"] = get_args(kind)
    else:
        read = kind if flag.read is str and kind in (int, float) else flag.read
        kwargs |= {"type": _reader(read), "metavar": flag.metavar or name.rpartition("_")[2].upper()}
    if flag.is_positional:
        group.add_argument(name, nargs="?", **kwargs)
        return
    spelling = f"--{name.replace('_', '-')}"
    group.add_argument(*flag.spellings, *(() if "--" in "".join(flag.spellings) else (spelling,)), dest=name, **kwargs)


def _help(field: FieldInfo) -> str:
    default, said = field.get_default(), str(field.description)
    if field.is_required():
        said += " (required)"
    elif not (default is None or default is False or default == {} or "(default" in said):
        said += f" (default: {','.join(default) if isinstance(default, tuple) else default})"
    return said.replace("%", "%%")


def _reader(read: Callable[[str], Any]) -> Callable[[str], Any]:
    def read_flag(text: str) -> Any:
        try:
            return read(text)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    read_flag.__name__ = getattr(read, "__name__", "value")  # argparse names it in its own errors
    return read_flag


def _types(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _metadata(annotation: Any) -> Iterator[Any]:
    for each in _types(annotation):
        yield from getattr(each, "__metadata__", ())
