"""The tables of methods on chains of two and three models, and of their setup times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cauc_ray.api.grids import Cell, Grid, Mark, PaperTable, cells, number, percent, ratio
from cauc_ray.comparison.comparing import SINGLE, Comparison
from cauc_ray.comparison.measuring import published
from cauc_ray.comparison.quoted import columns_of, paper_name, quoted_figures, quoted_table
from cauc_ray.paper.config import ComparedChain
from cauc_ray.policies.methods import METHODS

TITLES = {
    "two-model-language": "Two-model results, language models",
    "two-model-image": "Two-model results, image models",
    "three-model-language": "Three-model results, language models",
}
ABOUT = (
    "Quality in percent on the test split; cost is the mean per example of all calls made. As in the paper, Base is at "
    "its own threshold and routers choose by quality first; everything else is at its best validation accuracy within "
    "the cost that Base has on validation. Bold is the highest quality, underlined the highest of what need not call "
    "every model for every example; controls stand last and take no part in that."
)
ABOUT_SETUP = (
    "Seconds to fit a method and choose its threshold, measured while nothing else runs; models' outputs are given. "
    "The paper's seconds are of another machine and of larger sets: the ratios to Base are what compares."
)

Rows = Sequence[Mapping[str, Any]]


def compared_table(name: str, found: Sequence[tuple[ComparedChain, Comparison]]) -> PaperTable:
    """Return a table of comparisons, one after the other, with all of them side by side on top."""
    by_chain = [(chain, comparison_rows(name, chain, comparison)) for chain, comparison in found]
    grids = [_overview(by_chain)] if len(by_chain) > 1 else []
    for number_, (chain, rows) in enumerate(by_chain, start=1):
        grids.append(_chain_grid(name, f"[{number_}] {chain.name}", chain, rows))
    every = tuple(row for _, of_chain in by_chain for row in of_chain)
    return PaperTable(name, TITLES[name], ABOUT, every, tuple(grids), quoted_grid(name))


def comparison_rows(table: str, chain: ComparedChain, comparison: Comparison) -> list[dict[str, Any]]:
    """Return the rows of one comparison, flat, ordered as the paper's tables are."""
    about = comparison.about
    rows = []
    for row in comparison.rows:
        place = _place(chain, row["method"])
        # What the paper does with each: cost-matched, but routers at quality first and Base as it is.
        shown = row["default"] if row["paradigm"] == "router" or row["method"] == "base" else row
        quoted = quoted_figures(table, chain.published, row["method"], place) if chain.published else None
        flat = {
            "chain": chain.name,
            "set": chain.set,
            "models": list(chain.models),
            "n": about["n"],
            "method": row["method"],
            "paradigm": row["paradigm"],
            "objective": chain.objective,
            "quality": _quality(chain, shown),
            **{key: shown[key] for key in ("accuracy", "macro_f1", "cost", "relative_cost", "avoided")},
            "accuracy_low": shown["accuracy_interval"][0],
            "accuracy_high": shown["accuracy_interval"][1],
            "cost_unit": about["cost_unit"],
            "budget": about["budget"],
            "quality_at_budget": _quality(chain, row),
            "cost_at_budget": row["cost"],
            "relative_cost_at_budget": row["relative_cost"],
            "gain_at_budget": row["gain"],
            "gain_low": row["gain_interval"][0],
            "gain_high": row["gain_interval"][1],
            "by_lot_at_budget": row["by_lot"],
            "published_column": chain.published,
            "published_quality": quoted[0] if quoted else None,
            "published_cost": quoted[1] if quoted else None,
            "published_relative_cost": quoted[2] if quoted else None,
            "note": row["note"],
        }
        rows.append(flat)
    return sorted(rows, key=lambda row: _ORDER.index(row["paradigm"]))


# The paper's tables from top to bottom; METHODS has ours first.
_ORDER = ("single-model", "router", "cascade", "ensemble", "ours", "control")


def setup_table(chain: ComparedChain, comparison: Comparison) -> PaperTable:
    """Return the table of setup times, with the paper's ratios beside."""
    seconds: Mapping[str, Any] = published()["setup_s"]
    rows = []
    for row in comparison.rows:
        if row["paradigm"] != "single-model":
            quoted = row["paper_setup_ratio"]
            rows.append(
                {
                    "chain": chain.name,
                    "method": row["method"],
                    "paradigm": row["paradigm"],
                    "setup_s": row["setup_s"],
                    "setup_ratio": row["setup_ratio"],
                    "published_setup_s": None if quoted is None else quoted * seconds["base"],
                    "published_setup_ratio": quoted,
                    "note": row["note"],
                }
            )
    rows.sort(key=lambda row: _ORDER.index(row["paradigm"]))
    grid = Grid(
        title=f"{chain.name}: {' → '.join(chain.models)}",
        headings=("method", "seconds", "over Base's", "the paper's seconds", "over its Base's", "as run here"),
        rows=tuple(
            cells(
                paper_name(row["method"]),
                number(row["setup_s"]),
                f"{number(row['setup_ratio'])} ×",
                number(row["published_setup_s"]),
                "–" if row["published_setup_ratio"] is None else f"{number(row['published_setup_ratio'])} ×",
                row["note"],
            )
            for row in rows
        ),
    )
    quoted_rows = [(paper_name(name), s) for name, s in seconds.items() if name != "table"]
    quoted_grid = Grid(
        title=f"In the paper: {seconds['table']}",
        headings=("method", "seconds", "over Base's"),
        rows=tuple(cells(name, f"{s:,}", f"{number(s / seconds['base'])} ×") for name, s in quoted_rows),
    )
    return PaperTable("setup-time", "Setup times", ABOUT_SETUP, tuple(rows), (grid,), quoted_grid)


def quoted_grid(name: str) -> Grid:
    """Return the paper's own table of methods by data sets."""
    table, columns = quoted_table(name), columns_of(name)
    methods = dict.fromkeys(method for rows in columns.values() for method in rows)
    rows = []
    for method in methods:
        figures = [columns[column].get(method, [None, None]) for column in columns]
        texts = ("–" if value is None else f"{value:.2f}" for pair in figures for value in pair)
        rows.append(cells(_shown_name(method), *texts))
    quality, cost = table["figures"]
    return Grid(
        title=f"In the paper: {table['table']}, {' → '.join(table['models'])}",
        headings=("method", *(heading for column in columns for heading in (column, "cost"))),
        rows=tuple(rows),
        notes=(f"{quality}, {cost}. {table['caption']} {table.get('remark', '')}".strip(),),
    )


def _quality(chain: ComparedChain, row: Mapping[str, Any]) -> float:
    quality: float = row["accuracy" if chain.objective == "accuracy" else "macro_f1"]
    return quality


def _place(chain: ComparedChain, method: str) -> int | None:
    prefix, _, model = method.partition(":")
    return chain.models.index(model) if prefix == SINGLE else None


def _shown_name(method: str) -> str:
    prefix, _, model = method.partition(":")
    return model if prefix == SINGLE else paper_name(method)


def _quality_heading(chain: ComparedChain) -> str:
    return "accuracy" if chain.objective == "accuracy" else "macro-F1"


def _marks(rows: Rows) -> list[Mark]:
    """Return how each row's quality stands out."""
    counted = [row for row in rows if row["paradigm"] != "control"]
    early = [row for row in counted if row["paradigm"] != "ensemble"]
    marks: list[Mark] = []
    for row in rows:
        if row in counted and row["quality"] == max(each["quality"] for each in counted):
            marks.append("bold")
        elif row in early and row["quality"] == max(each["quality"] for each in early):
            marks.append("underline")
        else:
            marks.append("")
    return marks


def _chain_grid(table: str, title: str, chain: ComparedChain, rows: Rows) -> Grid:
    """Return one comparison, with the paper's numbers beside where a column is named."""
    unit = rows[0]["cost_unit"]
    headings = ["method", f"{_quality_heading(chain)} (%)", "95 % of accuracy", f"cost ({unit})", "relative", "avoided"]
    headings += ["at Base's cost (%)", "relative", "there less the last model's (points)"]
    if chain.published:
        headings += [f"the paper's {chain.published} (%)", "relative"]
    lines = []
    for row, mark in zip(rows, _marks(rows), strict=True):
        line = [
            Cell(_shown_name(row["method"])),
            Cell(percent(row["quality"]), mark),
            Cell(f"{percent(row['accuracy_low'])} – {percent(row['accuracy_high'])}"),
            *cells(number(row["cost"]), ratio(row["relative_cost"]), percent(row["avoided"])),
            *cells(percent(row["quality_at_budget"]), ratio(row["relative_cost_at_budget"])),
            Cell(f"{100 * row['gain_at_budget']:+.2f} ({100 * row['gain_low']:+.2f} – {100 * row['gain_high']:+.2f})"),
        ]
        if chain.published:
            line += cells(percent(row["published_quality"]), ratio(row["published_relative_cost"]))
        lines.append(tuple(line))
    notes = [
        f"{chain.set}, {rows[0]['n']:,} test examples; Base's validation cost is {number(rows[0]['budget'])} {unit}."
    ]
    if chain.published:
        paper = " → ".join(quoted_table(table)["models"])
        cost = quoted_table(table)["figures"][1]
        notes.append(f"The paper's {chain.published} is of other models, {paper}, with {cost}: compare relative costs.")
    differing = [f"{_shown_name(row['method'])}: {row['note']}" for row in rows if row["note"]]
    if differing:
        notes.append(f"As run here: {'; '.join(differing)}.")
    return Grid(title, tuple(headings), tuple(lines), tuple(notes))


def _overview(by_chain: Sequence[tuple[ComparedChain, Rows]]) -> Grid:
    """Return all chains side by side, as the paper's table has them: quality and relative cost."""
    singles = max(len(chain.models) for chain, _ in by_chain)
    methods = [f"model {place + 1} alone" for place in range(singles)]
    by_name: list[dict[str, tuple[str, str, Mark]]] = []
    for chain, rows in by_chain:
        of_chain = {}
        for row, mark in zip(rows, _marks(rows), strict=True):
            place = _place(chain, row["method"])
            name = row["method"] if place is None else methods[place]
            of_chain[name] = (percent(row["quality"]), ratio(row["relative_cost"]), mark)
        by_name.append(of_chain)
    present = dict.fromkeys(name for of_chain in by_name for name in of_chain)
    ordered = sorted(present, key=lambda name: _ORDER.index(METHODS[name].paradigm if name in METHODS else _ORDER[0]))
    lines = []
    for name in ordered:
        line = [Cell(paper_name(name))]
        for of_chain in by_name:
            quality, cost, mark = of_chain.get(name, ("–", "–", ""))
            line += [Cell(quality, mark), Cell(cost)]
        lines.append(tuple(line))
    headings = ["method"]
    for place, (chain, _) in enumerate(by_chain, start=1):
        headings += [f"[{place}] {'acc.' if chain.objective == 'accuracy' else 'F1'}", "rel. cost"]
    legend = "; ".join(f"[{place}] {chain.name}" for place, (chain, _) in enumerate(by_chain, start=1))
    return Grid(
        "All chains", tuple(headings), tuple(lines), (f"Quality in percent, cost over the last model's. {legend}.",)
    )
