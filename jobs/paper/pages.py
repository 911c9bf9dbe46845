"""Tables of the documentation's pages, from the numbers that `python -m jobs.paper` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain as joined
from itertools import groupby
from pathlib import Path
from typing import Any

from cauc_ray.comparison.published import paper_name
from cauc_ray.display import Grid
from jobs.paper.config import COMPARED
from jobs.paper.tables import CONTENTS


def page_numbers(made: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a paper.json that pages show: its tables, to six digits."""
    return {"seeds": made["config"]["seeds"], "tables": rounded(made["tables"])}


def rounded(value: Any) -> Any:
    """Return numbers, in lists and mappings too, to six digits."""
    if isinstance(value, dict):
        return {key: rounded(of) for key, of in value.items()}
    if isinstance(value, list):
        return [rounded(of) for of in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def page_tables(path: Path, table: str, keys: Sequence[str]) -> Iterator[Grid]:
    """Yield a table of page_numbers(), with some of its columns: one for each of its chains.

    Args:
        path: The file.
        table: The name of the table.
        keys: The columns, by the first key of a row that each takes.
    """
    spec = CONTENTS["compared" if table in COMPARED else table]
    rows = json.loads(path.read_text(encoding="utf-8"))["tables"][table]
    columns = {column[2]: column for column in joined(spec["columns"], spec.get("published", []))}
    groups = (
        [rows] if table == "complementarity" else [list(of) for _, of in groupby(rows, key=lambda row: row["chain"])]
    )
    for group in groups:
        lines = [{**row, "shown": paper_name(row.get("method", ""))} for row in group]
        named = {"quality_name": "accuracy" if group[0]["objective"] == "accuracy" else "macro-F1", **lines[0]}
        chosen = [(columns[key][0].format(**named), *columns[key][1:]) for key in keys]
        title = "Pairs of models" if table == "complementarity" else group[0]["chain"]
        yield Grid.of(title, lines, chosen, n_left=spec.get("n_left", 1))
