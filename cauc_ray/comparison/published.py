"""The paper's own numbers, and its names of methods."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from json import loads
from typing import Any

from cauc_ray.comparison.selection import RECALIBRATED


def published() -> dict[str, Any]:
    """Return the paper's own numbers, by the name of their table."""
    content: dict[str, Any] = loads(files("cauc_ray.comparison").joinpath("published.json").read_text(encoding="utf-8"))
    return content


def paper_name(method: str) -> str:
    """Return a method's name as the paper writes it, its own where the paper has none, a single model's as it is.

    >>> paper_name("rf"), paper_name("routellm-mf"), paper_name("oracle"), paper_name("single:small")
    ('CAUC-RF', 'RouteLLM (mf)', 'oracle', 'small')
    >>> paper_name("recalibrated:small"), paper_name("recalibrated+duo")
    ('small, recalibrated', 'Asymmetric Duo, recalibrated')
    """
    group, _, model = method.partition(":")
    if group.partition("+")[0] == RECALIBRATED:
        return f"{model or paper_name(method.partition('+')[2])}, {RECALIBRATED}"
    if model:
        return model
    names: Mapping[str, str] = published()["methods"]
    family, _, variant = method.partition("-")
    return names.get(method) or (f"{names[family]} ({variant})" if family in names and variant else method)
