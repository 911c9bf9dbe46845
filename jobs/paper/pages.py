"""Tables of the documentation's pages, from the numbers that `python -m jobs.paper` writes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain as joined
from itertools import groupby
from pathlib import Path
from typing import Any

from cauc_ray.comparison.published import paper_name
from cauc_ray.display import Grid, Mark, decimals, points
from cauc_ray.files.documents import write_bytes, write_json
from cauc_ray.files.paths import AnyPath
from cauc_ray.policies.by_method import SINGLE
from jobs.paper.config import COMPARED
from jobs.paper.tables import CONTENTS


def write_page(path: Path, made: Mapping[str, Any], folder: AnyPath) -> None:
    """Write what a page of the documentation shows: tables, to six digits, and figures, as PNG next to them.

    Args:
        path: File of the numbers; images have its name before theirs.
        made: Content of paper.json.
        folder: The folder that holds it, and figures.
    """
    captions = {}
    for figure in made["figures"]:
        image = folder / figure["image"]
        write_bytes(image_of(path, image.stem), image.read_bytes())
        captions[image.stem] = figure["caption"]
    numbers = {"seeds": made["config"]["seeds"], "tables": rounded(made["tables"]), "figures": captions}
    write_json(path, numbers)


def image_of(path: Path, name: str) -> Path:
    """Return where a page's image of a figure is, next to the file of its numbers."""
    return path.with_name(f"{path.stem}-{name}.png")


def page_figure(path: Path, name: str) -> str:
    """Return a figure of write_page() in Markdown, with its caption, for a page in the folder above."""
    caption = json.loads(path.read_text(encoding="utf-8"))["figures"][name]
    return f"![{name.replace('-', ' ')}]({path.parent.name}/{image_of(path, name).name})\n\n{caption}"


def rounded(value: Any) -> Any:
    """Return numbers, in lists and mappings too, to six digits."""
    if isinstance(value, dict):
        return {key: rounded(of) for key, of in value.items()}
    if isinstance(value, list):
        return [rounded(of) for of in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def page_tables(path: Path, table: str, keys: Sequence[str]) -> Iterator[Grid]:
    """Yield a table of write_page(), with some of its columns: one for each of its chains.

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
        named = {"quality_name": "macro-F1" if group[0].get("objective") == "macro-f1" else "accuracy", **lines[0]}
        chosen = [(columns[key][0].format(**named), *columns[key][1:]) for key in keys]
        title = "Pairs of models" if table == "complementarity" else group[0]["chain"]
        yield Grid.of(title, lines, chosen, n_left=spec.get("n_left", 1))


def results_table(path: Path) -> Grid:
    """Return a line for each chain of write_page(): its models, ours, and the best other method, within one budget.

    Other methods are routers, cascades and ensembles that are not ours. Bold is the most accurate of all.
    """
    lines: list[tuple[str, ...]] = []
    marks: dict[tuple[int, int], Mark] = {}
    for line, by_method in enumerate(_compared_chains(path)):
        ours = [by_method["rf"], by_method["stacked"]]
        alone = [by_method[f"{SINGLE}:{model}"] for model in ours[0]["models"]]
        best = max(
            (row for row in by_method.values() if row["paradigm"] in ("router", "cascade", "ensemble")),
            key=lambda row: row["quality_at_budget"],
        )
        marks |= _most_accurate(line, [alone[-1], *ours, best])
        qualities = ", ".join(points(row["quality_at_budget"]) for row in alone)
        lines.append((ours[0]["chain"], qualities, *map(_at, ours), f"{paper_name(best['method'])}, {_at(best)}"))
    headings = ("chain", "models alone", "CAUC-RF", "stacked", "best other method")
    return Grid("", headings, tuple(lines), marks=marks)


def methods_table(path: Path, methods: Sequence[str]) -> Grid:
    """Return a line for each chain of write_page(): some methods within one budget, the most accurate in bold."""
    lines: list[tuple[str, ...]] = []
    marks: dict[tuple[int, int], Mark] = {}
    for line, by_method in enumerate(_compared_chains(path)):
        chosen = [by_method[method] for method in methods]
        marks |= _most_accurate(line, chosen)
        lines.append((chosen[0]["chain"], *map(_at, chosen)))
    return Grid("", ("chain", *map(paper_name, methods)), tuple(lines), marks=marks)


def _compared_chains(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of each chain of write_page() that methods are compared on, by method."""
    tables = json.loads(path.read_text(encoding="utf-8"))["tables"]
    rows = [row for table in COMPARED if table in tables for row in tables[table]]
    for _, of_chain in groupby(rows, key=lambda row: row["chain"]):
        yield {row["method"]: row for row in of_chain}


def _most_accurate(line: int, rows: Sequence[Mapping[str, Any]]) -> dict[tuple[int, int], Mark]:
    """Return the marks of a line whose columns but the first show these rows."""
    best = max(row["quality_at_budget"] for row in rows)
    return {(line, column): "bold" for column, row in enumerate(rows, start=1) if row["quality_at_budget"] == best}


def _at(row: Mapping[str, Any]) -> str:
    return f"{points(row['quality_at_budget'])} at {decimals(row['relative_cost_at_budget'])}"
