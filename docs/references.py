"""Writes the generated parts of the pages: the command's verbs, keys of files, methods, and the Python functions.

`python docs/references.py` writes them anew, between `<!-- generated: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import cauc_ray
from cauc_ray import sample_logits
from cauc_ray.api.docstrings import items, sections
from cauc_ray.api.options import options_of
from cauc_ray.cli.command import VERBS as ABOUT
from cauc_ray.cli.command import add_options
from cauc_ray.cli.verbs import VERBS
from cauc_ray.display import Grid
from cauc_ray.files.entry_points import is_ours, registered
from cauc_ray.policies.method import METHODS
from cauc_ray.policies.policy import METHOD_GROUP
from cauc_ray.schemas import SCHEMAS
from jobs.bench.ratios import by_name, grid
from jobs.paper import answers, claims
from jobs.paper.pages import methods_table, page_figure, page_tables, results_table
from jobs.paper.public_sets import FILES

PAGES = Path(__file__).parent
MEASURED = PAGES / "measured"
_KINDS = {"string": "text", "integer": "whole number", "number": "number", "path": "path"}
_PART = re.compile(r"(<!-- generated: ([-\w.: ]+) -->\n)(?:.*?)(^<!-- end -->)", re.DOTALL | re.MULTILINE)


def written(page: str) -> str:
    """Return a page with its generated parts as the code has them now."""
    return _PART.sub(lambda match: f"{match[1]}{_text(match[2])}\n{match[3]}", page)


def _text(name: str) -> str:
    return "\n".join([*_generated(*name.split(": ")), ""])


def _generated(what: str, name: str = "") -> Iterator[str]:
    if what == "verbs":
        for verb in VERBS:
            yield from _verb(verb)
    elif what == "configs":
        for verb in VERBS:
            yield from _schema(SCHEMAS[verb](), f"cauc {verb}", level=2)
    elif what == "methods":
        yield from _methods()
    elif what == "python":
        yield from _python(name)
    elif what == "speed":
        figures = json.loads((MEASURED / "speed.json").read_text("utf-8"))["figures"]
        rows = [row for row in figures if (row["part"] == name if name else "column" not in row)]
        yield from _tables([by_name(rows) if name else grid(rows)])
    elif what in ("answers", "claims"):
        grids = {"answers": answers.grids, "claims": claims.grids}[what]
        yield from _tables(grids(json.loads((MEASURED / f"{what}.json").read_text("utf-8"))))
    elif what == "results":
        yield from _tables([results_table(MEASURED / f"{name}.json")])
    elif what == "methods of":
        file, *methods = name.split()
        yield from _tables([methods_table(MEASURED / f"{file}.json", methods)])
    elif what == "public files":
        for clone in FILES.values():
            yield from ("", f"{clone['url']}, commit `{clone['commit']}`:", "", "| file | SHA-256 |", "| --- | --- |")
            at = f"{clone['url']}/blob/{clone['commit']}"
            yield from (f"| [{Path(path).name}]({at}/{path}) | {digest} |" for path, digest in clone["files"].items())
    elif what == "figure":
        file, figure = name.split()
        yield f"\n{page_figure(MEASURED / f'{file}.json', figure)}"
    elif what == "paper":
        file, table, *keys = name.split()
        yield from _tables(page_tables(MEASURED / f"{file}.json", table, keys))
    else:
        yield from _schema(SCHEMAS[name](), None, level=2)


def _tables(grids: Iterable[Grid]) -> Iterator[str]:
    return (f"\n{table.markdown().rstrip()}" for table in grids)


def _methods() -> Iterator[str]:
    yield from (
        "",
        "| method | paradigm | what it does | `cauc fit`, `run` and `serve` take it | install |",
        "| --- | --- | --- | --- | --- |",
    )
    modules = {name: entry.module for name, entry in registered(METHOD_GROUP).items() if is_ours(entry)}
    for name, method in METHODS.items():
        if name in modules:
            state = f"no: it {method.unpublished}" if method.unpublished else "yes"
            extra = f"`cauc-ray[{method.extra}]`" if method.packages else ""
            about = [importlib.import_module(modules[name]), method.fit][: [*modules.values()].count(modules[name])]
            texts = " ".join((inspect.getdoc(part) or "").partition("\n")[0] for part in about)
            yield f"| `{name}` | {method.paradigm} | {_cell(texts)} | {state} | {extra} |"


def _python(names: str) -> Iterator[str]:
    """Yield an object's signature and docstring, then those of the members that follow its name."""
    path, *members = names.split()
    module, _, name = path.rpartition(".")
    content = getattr(importlib.import_module(module), name)
    yield from _documented(content, path if module == cauc_ray.__name__ else name, level=3)
    for member in members:
        yield from _documented(inspect.getattr_static(content, member), f"{name}.{member}", level=4)


def _documented(content: Any, name: str, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {name}", "")
    if isinstance(content, property | cached_property):
        content = content.fget if isinstance(content, property) else content.func
    content = getattr(content, "__func__", content)  # of a class method
    if inspect.isfunction(content) or "__init__" in vars(content):
        yield from ("```text", *_signature(content, name), "```", "")
    yield from _sections(inspect.getdoc(content) or "")


def _signature(content: Any, name: str) -> Iterator[str]:
    parameters = [
        parameter
        for parameter in inspect.signature(content).parameters.values()
        if parameter.name not in ("self", "cls")
    ]
    returns = inspect.get_annotations(content).get("return") if inspect.isfunction(content) else None
    end = "" if returns is None else f" -> {returns}"
    if not parameters:
        yield f"{name}(){end}"
        return
    yield f"{name}("
    is_starred = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not is_starred:
            is_starred = True
            yield "    *,"
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        annotation = "" if parameter.annotation is parameter.empty else f": {_annotation(content, parameter)}"
        value = repr(parameter.default)
        default = "" if parameter.default is parameter.empty else f" = {'…' if value.startswith('<') else value}"
        yield f"    {prefix}{parameter.name}{annotation}{default},"
    yield f"){end}"


def _annotation(content: Any, parameter: inspect.Parameter) -> str:
    """Return a parameter's type; that of an option of the command without what only the command reads."""
    if not any(content in verb.options.FUNCTIONS for verb in VERBS.values()):
        return str(parameter.annotation)
    if parameter.name not in options_of(content).model_fields:
        return str(parameter.annotation)
    holder = type("Holder", (), {"__annotations__": {parameter.name: parameter.annotation}})
    kind = get_type_hints(holder, globalns=content.__globals__)[parameter.name]
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    names = ("None" if kind is NoneType else kind.__name__ if isinstance(kind, type) else str(kind) for kind in kinds)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", " | ".join(names))


def _sections(docstring: str) -> Iterator[str]:
    """Yield a docstring's text, its sections as lists, and its examples as code."""
    for title, body in sections(docstring).items():
        if title:
            yield from ("", f"**{title}**", "")
        if title in ("Args", "Attributes", "Raises"):
            yield from (f"- `{name}`: {meaning}" for name, meaning in items(docstring, title).items())
        else:
            yield from re.sub(
                r"((?:^(?:>>>|\.\.\.).*\n?(?:^\S.*\n?)*)+)", r"```pycon\n\1\n```", body, flags=re.MULTILINE
            ).split("\n")


def _verb(name: str) -> Iterator[str]:
    verb, about = VERBS[name], ABOUT[name]
    example = verb.example.replace(str(sample_logits()), "LOGITS")
    yield from ("", f"## cauc {name}", "", f"{about[0].upper()}{about[1:]}.", "", "```sh", example, "```")
    parser = argparse.ArgumentParser(add_help=False)
    add_options(parser, verb.options)
    for group in parser._action_groups:
        if group._group_actions:
            yield from ("", f"| {group.title} | |", "| --- | --- |")
            for action in group._group_actions:
                yield f"| {_spelling(action)} | {_cell(action.help or '').replace('%%', '%')} |"


def _spelling(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else action.metavar or "|".join(map(str, action.choices or ()))
    spelling = f"{', '.join(action.option_strings)} {value}".strip()
    return f"`{_cell(spelling)}`"


def _schema(schema: Mapping[str, Any], title: str | None, level: int) -> Iterator[str]:
    """Yield a table of an object's keys, then one of each kind of object within it.

    title: its heading; None where the page has it.
    """
    if "properties" in schema:
        if title is not None:
            yield from ("", f"{'#' * level} {title}")
        yield from _object(schema, title is not None)
    for name, definition in _within(schema).items():
        if "properties" in definition:
            yield from ("", f"{'#' * (level if title is None else level + 1)} {_heading(name)}")
            yield from _object(definition, True)


def _within(schema: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the kinds of objects within one by name, in the order in which their names come up."""
    definitions: dict[str, Mapping[str, Any]] = {}
    waiting: list[Any] = [{key: value for key, value in schema.items() if key != "$defs"}]
    while waiting:
        for name in re.findall(r"#/\$defs/(\w+)", json.dumps(waiting.pop(0))):
            if name not in definitions:
                definitions[name] = schema["$defs"][name]
                waiting.append(definitions[name])
    return definitions


def _heading(name: str) -> str:
    """Return what the reader calls a kind of object."""
    first, *words = re.sub(r"(?<=[a-zA-Z])(?=[A-Z][a-z])", " ", name.removesuffix("Spec")).split()
    return " ".join([first, *map(str.lower, words)])


def _object(definition: Mapping[str, Any], described: bool) -> Iterator[str]:
    paragraphs = definition.get("description", "").split("\n\n")
    if described:
        yield from (line for paragraph in filter(None, paragraphs) for line in ("", " ".join(paragraph.split())))
    yield from ("", "| key | value | meaning |", "| --- | --- | --- |")
    for key, value in definition["properties"].items():
        default = "required" if key in definition.get("required", ()) else _default(value)
        yield f"| `{key}` | {', '.join(filter(None, (_cell(_type(value)), default)))} | {_cell(value['description'])} |"


def _default(value: Mapping[str, Any]) -> str:
    default = value.get("default")
    if default is None or default in ([], ()) or isinstance(default, dict) or "const" in value:
        return ""
    return f"default `{', '.join(map(str, default)) if isinstance(default, list) else default}`"


def _type(value: Mapping[str, Any]) -> str:
    """Return in words what a key holds."""
    if "$ref" in value:
        name = value["$ref"].rpartition("/")[2]
        return f"[{_heading(name)}](#{_heading(name).lower().replace(' ', '-')})"
    for key in ("anyOf", "oneOf"):
        if key in value:
            kinds = [_type(option) for option in value[key] if option.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if "enum" in value:
        return " or ".join(f"`{option}`" for option in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    kind = value.get("type") if value.get("format") != "path" else "path"
    if kind == "array":
        inner = _type(value["items"]) if value.get("items") else ""
        return f"list of {inner}{'s' if inner in _KINDS.values() else ''}" if inner else "list"
    if kind == "object":
        inner = value.get("additionalProperties")
        return f"by name: {_type(inner)}" if isinstance(inner, dict) else "mapping"
    if isinstance(kind, list):
        return " or ".join(_type({"type": option}) for option in kind if option != "null")
    return _KINDS.get(kind, "true or false" if kind == "boolean" else "")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    """Write every page whose generated parts have changed."""
    for page in [PAGES.parent / "README.md", *sorted(PAGES.rglob("*.md"))]:
        before = page.read_text(encoding="utf-8")
        if (after := written(before)) != before:
            page.write_text(after, encoding="utf-8")
            print(page)


if __name__ == "__main__":
    main()
