"""The paper's own numbers, to stand beside measured ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cauc_ray.comparison.measuring import SINGLE, published


def quoted_table(name: str) -> Mapping[str, Any]:
    """Return what the paper's table of a name holds: its title, caption, figures and columns; empty if it has none."""
    table: Mapping[str, Any] = published().get(name, {})
    return table


def columns_of(name: str) -> Mapping[str, Any]:
    """Return the columns of the paper's table of a name: a data set, or for pairs of models a pair."""
    columns: Mapping[str, Any] = quoted_table(name).get("columns", {})
    return columns


def paper_name(method: str) -> str:
    """Return a method's name as the paper writes it, its own where the paper has none, a single model's as it is.

    >>> paper_name("rf"), paper_name("routellm-mf"), paper_name("oracle"), paper_name("single:small")
    ('CAUC-RF', 'RouteLLM (mf)', 'oracle', 'small')
    """
    kind, is_single, model = method.partition(":")
    if is_single and kind == SINGLE:
        return model
    names: Mapping[str, str] = published()["methods"]
    family, _, variant = method.partition("-")
    return names.get(method) or (f"{names[family]} ({variant})" if family in names and variant else method)


def quoted_figures(
    table: str, column: str | None, method: str, models: Sequence[str]
) -> tuple[float, float, float] | None:
    """Return the paper's quality (a share), cost, and cost over that of its last model, for a method of a comparison.

    models: the chain, whose single models are compared with those of the paper, in order. A variant of a method that
    the paper does not have is compared with the method. None where the paper has none, or column is None.
    """
    if column is None:
        return None
    rows, of_paper = columns_of(table)[column], [f"{SINGLE}:{model}" for model in quoted_table(table)["models"]]
    own = dict(zip((f"{SINGLE}:{model}" for model in models), of_paper, strict=True))
    found = rows.get(own.get(method, method), rows.get(method.partition("-")[0]))
    return None if found is None else (found[0] / 100.0, found[1], found[1] / rows[of_paper[-1]][1])
