"""The paper's own numbers, to stand beside measured ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cauc_ray.comparison.comparing import SINGLE
from cauc_ray.comparison.measuring import published


def quoted_table(name: str) -> Mapping[str, Any]:
    """Return what the paper's table of a name holds: its title, caption, figures and columns; empty if it has none."""
    table: Mapping[str, Any] = published().get(name, {})
    return table


def columns_of(name: str) -> Mapping[str, Any]:
    """Return the columns of the paper's table of a name: a data set, or for pairs of models a pair."""
    columns: Mapping[str, Any] = quoted_table(name).get("columns", {})
    return columns


def paper_name(method: str) -> str:
    """Return a method's name as the paper writes it, its own where the paper has none.

    >>> paper_name("rf"), paper_name("routellm-mf"), paper_name("oracle")
    ('CAUC-RF', 'RouteLLM (mf)', 'oracle')
    """
    names: Mapping[str, str] = published()["methods"]
    if method in names:
        return names[method]
    family, _, variant = method.partition("-")
    return f"{names[family]} ({variant})" if family in names and variant else method


def quoted_figures(table: str, column: str, method: str, place: int | None) -> tuple[float, float, float] | None:
    """Return the paper's quality (a share), cost, and cost over that of its last model, for a method of a comparison.

    place: of the model in the chain where the method is a single model, which then stands for the paper's at that
    place. A variant of a method that the paper does not tell apart has the method's. None where the paper has none.
    """
    last = f"{SINGLE}:{quoted_table(table)['models'][-1]}"
    rows = columns_of(table)[column]
    if place is not None:
        method = f"{SINGLE}:{quoted_table(table)['models'][place]}"
    found = rows.get(method, rows.get(method.partition("-")[0]))
    if found is None:
        return None
    quality, cost = found
    return quality / 100.0, cost, cost / rows[last][1]
