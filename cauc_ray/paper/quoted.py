"""What the paper's tables hold, to be shown next to measured figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cauc_ray.comparison.published import published
from cauc_ray.policies.by_method import SINGLE


def quoted_table(name: str) -> Mapping[str, Any]:
    """Return what the paper's table of a name holds: its title, caption, figures and columns; empty if it has none."""
    table: Mapping[str, Any] = published().get(name, {})
    return table


def columns_of(name: str) -> Mapping[str, Any]:
    """Return the columns of the paper's table of a name: a data set, or for pairs of models a pair."""
    columns: Mapping[str, Any] = quoted_table(name).get("columns", {})
    return columns


def quoted_figures(
    table: str, column: str | None, method: str, models: Sequence[str]
) -> tuple[float, float, float] | None:
    """Return the paper's quality (a share), cost, and cost over that of its last model, for a method of a comparison.

    None where the paper has none, or column is None.

    Args:
        table: The name of the paper's table.
        column: The name of its column.
        method: The method; a variant that the paper does not have is compared with the method itself.
        models: The chain, whose single models are compared with those of the paper, in order.
    """
    if column is None:
        return None
    rows, of_paper = columns_of(table)[column], [f"{SINGLE}:{model}" for model in quoted_table(table)["models"]]
    paper_names = dict(zip((f"{SINGLE}:{model}" for model in models), of_paper, strict=True))
    figures = rows.get(paper_names.get(method, method), rows.get(method.partition("-")[0]))
    return None if figures is None else (figures[0] / 100.0, figures[1], figures[1] / rows[of_paper[-1]][1])
