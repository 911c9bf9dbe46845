"""The tables of a sweep: a row for each point and budget, and their mean and spread over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cauc_ray.api.grids import Grid, cells

KEYS = ("set", "chain", "method", "budget_kind", "budget")
FIGURES = ("accuracy", "macro_f1", "cost", "relative_cost", "setup_s")
RESULTS = pa.schema(
    [
        ("set", pa.string()),
        ("chain", pa.string()),
        ("method", pa.string()),
        ("seed", pa.int64()),
        ("budget_kind", pa.string()),
        ("budget", pa.float64()),
        ("budget_cost", pa.float64()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("setting", pa.float64()),
        ("steered", pa.bool_()),
        ("accuracy", pa.float64()),
        ("macro_f1", pa.float64()),
        ("cost", pa.float64()),
        ("relative_cost", pa.float64()),
        ("avoided", pa.float64()),
        ("n", pa.int64()),
        ("cost_unit", pa.string()),
        ("setup_s", pa.float64()),
    ]
)
SUMMARY = pa.schema(
    [
        *(RESULTS.field(key) for key in KEYS),
        ("n", pa.int64()),
        ("n_unmet", pa.int64()),
        ("n_missing", pa.int64()),
        *((f"{figure}_{what}", pa.float64()) for figure in FIGURES for what in ("mean", "std")),
    ]
)


def summarise(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return for each set, chain, method and budget what its seeds had, in the order of the rows.

    n: seeds that have figures; n_unmet: those whose budget could not be met; n_missing: those without a value.
    Of each figure its mean over those n, and its standard deviation (n - 1), None below two.
    """
    grouped: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in KEYS), []).append(row)
    return [{**dict(zip(KEYS, key, strict=True)), **_spread(of_key)} for key, of_key in grouped.items()]


def _spread(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    measured = [row for row in rows if row["status"] == "ok"]
    counts = {f"n_{status}": sum(row["status"] == status for row in rows) for status in ("unmet", "missing")}
    spread: dict[str, Any] = {"n": len(measured), **counts}
    for figure in FIGURES:
        values = [row[figure] for row in measured if row[figure] is not None]
        spread[f"{figure}_mean"] = float(np.mean(values)) if values else None
        spread[f"{figure}_std"] = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return spread


def grids(summary: Sequence[Mapping[str, Any]]) -> list[Grid]:
    """Return a table for people of each set and chain: methods by budgets."""
    made = []
    for set_name, chain in dict.fromkeys((row["set"], row["chain"]) for row in summary):
        rows = [row for row in summary if (row["set"], row["chain"]) == (set_name, chain)]
        budgets = list(dict.fromkeys((row["budget_kind"], row["budget"]) for row in rows))
        by_place = {(row["method"], row["budget_kind"], row["budget"]): row for row in rows}
        lines = [
            cells(method, *(_cell(by_place[method, *budget]) for budget in budgets))
            for method in dict.fromkeys(row["method"] for row in rows)
        ]
        headings = [f"{budget:g} of the dearest" if kind == "relative" else f"{budget:g}" for kind, budget in budgets]
        made.append(Grid(f"{set_name}: {chain.replace(',', ' → ')}", ("method", *headings), tuple(lines)))
    return made


def _cell(row: Mapping[str, Any]) -> str:
    if not row["n"]:
        return "not met" if row["n_unmet"] else "missing"
    of_last = row["relative_cost_mean"]
    at = f" at {of_last:.2f}" if of_last is not None else ""
    seeds = f" ({row['n']} of {total})" if (total := row["n"] + row["n_unmet"] + row["n_missing"]) > row["n"] else ""
    spread = "" if row["accuracy_std"] is None else f" ± {100 * row['accuracy_std']:.2f}"
    return f"{100 * row['accuracy_mean']:.2f}{spread}{at}{seeds}"
