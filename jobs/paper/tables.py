"""The paper's tables: measured rows for machines, the same for people, and the paper's own numbers."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain as joined
from itertools import product, zip_longest
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from cauc_ray.comparison.published import paper_name, published
from cauc_ray.comparison.selection import RECALIBRATED
from cauc_ray.display import FORMATS, Grid, Mark, decimals
from cauc_ray.files.paths import AnyPath
from cauc_ray.policies.by_method import SINGLE
from cauc_ray.policies.method import METHODS
from jobs.paper.config import Chain, PaperConfig, published_columns, published_tables
from jobs.paper.measured import MeasuredChain, fusion, grown

Row: TypeAlias = Mapping[str, Any]
Marks: TypeAlias = dict[tuple[int, str], Mark]
# Rows for machines, tables for people, and the paper's own.
Made: TypeAlias = tuple[list[dict[str, Any]], list[Grid], Grid]

CONTENTS: Mapping[str, Any] = tomllib.loads((Path(__file__).parent / "contents.toml").read_text("utf-8"))
# From top to bottom; METHODS has ours first.
_ORDER = ("single-model", "router", "cascade", "ensemble", "ours", "recalibrated", "control")
# What a paradigm's row shows, where not its best within the budget: routers choose by quality first, cascades are at
# about the cost of Base.
_POINT_OF = {"router": "default", "cascade": "matched"}


@dataclass(frozen=True, slots=True)
class PaperTable:
    """One of the paper's tables.

    Attributes:
        name: The name of its files.
        title: Its title.
        about: How its numbers are to be read.
        rows: Its numbers, flat, for machines.
        grids: Its numbers for people.
        quoted: The paper's own numbers.
        headlines: Means of our methods over all chains of the table.
    """

    name: str
    title: str
    about: str
    rows: tuple[dict[str, Any], ...]
    grids: tuple[Grid, ...]
    quoted: Grid
    headlines: tuple[dict[str, Any], ...] = ()

    def markdown(self) -> str:
        """Return the table as a section of a report."""
        parts = [f"## {self.title}", self.about, *(grid.markdown() for grid in self.grids), self.quoted.markdown()]
        return "\n\n".join(parts)


def table_of(name: str, measured: Sequence[MeasuredChain], config: PaperConfig) -> PaperTable:
    """Return a table by its name, from its chains that have figures."""
    makers = {"complementarity": _pairs, "growing-chain": _growth, "setup-time": _setup}
    rows, grids, quoted = makers.get(name, _compared)(name, measured, config)
    about = CONTENTS[name if name in makers else "compared"]["about"].strip()
    headlines = () if name in makers else tuple(headlines_of(rows))
    if headlines:
        notes = [published_tables()[name].get("headline", "")]
        grids.insert(0, _grid("headlines", "Over all chains", headlines, notes=notes))
    return PaperTable(name, CONTENTS["titles"][name], about, tuple(rows), tuple(grids), quoted, headlines)


def headlines_of(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return means of each of our methods over the chains of a table; none of one chain.

    Returns:
        relative_gain, the mean quality over that of the last model, less 1; avoided, the mean share of examples that
        never called it; largest_saving of a chain's cost relative to it; and other means.
    """
    by_chain: dict[str, dict[str, Row]] = {}
    for row in rows:
        by_chain.setdefault(row["chain"], {})[row["method"]] = row
        if row["method"] == f"{SINGLE}:{row['models'][-1]}":
            by_chain[row["chain"]]["last"] = row
    headlines: list[dict[str, Any]] = []
    for method in dict.fromkeys(row["method"] for row in rows if row["paradigm"] == "ours"):
        pairs = [(of[method], of["last"]) for of in by_chain.values() if {method, "last"} <= of.keys()]
        costs = [row["relative_cost"] for row, _ in pairs if row["relative_cost"] is not None]
        if len(by_chain) > 1 and len(costs) == len(by_chain):
            values = {
                "quality": [row["quality"] for row, _ in pairs],
                "last_quality": [last["quality"] for _, last in pairs],
                "relative_gain": [row["quality"] / last["quality"] - 1 for row, last in pairs],
                "avoided": [row["avoided"] for row, _ in pairs],
                "relative_cost": costs,
            }
            means = {key: float(np.mean(of_chains)) for key, of_chains in values.items()}
            headlines.append({"method": method, "n_chains": len(pairs), **means, "largest_saving": 1 - min(costs)})
    return headlines


def _comparable(chain: Chain, root: AnyPath) -> dict[str, Any]:
    """Return the models whose logits are surrogates, and the column of the paper to compare with, None with any."""
    surrogates = chain.surrogates(root)
    return {"surrogates": surrogates, "published_column": None if surrogates else chain.published}


def _compared(name: str, measured: Sequence[MeasuredChain], config: PaperConfig) -> Made:
    """Make a table of comparisons, one after the other, with an overview of all of them first."""
    by_chain = [(of.chain, _compared_rows(name, of, config.logits)) for of in measured]
    grids = [_overview(by_chain)] if len(by_chain) > 1 else []
    table, columns = published_tables()[name], published_columns(name)
    for index, (chain, rows) in enumerate(by_chain, start=1):
        notes = []
        if rows[0]["published_column"]:
            about = {"models": " → ".join(table["models"]), "cost": table["figures"][1]}
            notes.append(CONTENTS["compared"]["published_note"].format(**chain.keys | about))
        differing = [f"{paper_name(row['method'])}: {row['note']}" for row in rows if row["note"]]
        notes += [f"As run here: {'; '.join(differing)}."] if differing else []
        quality = "accuracy" if chain.objective == "accuracy" else "macro-F1"
        grids.append(_grid("compared", f"[{index}] {chain.name}", rows, _marks(rows), notes, quality_name=quality))
    # Accuracies have a mean over data sets, in the paper's text; next to macro-F1 they do not.
    averaged = table["figures"][0] == "accuracy (%)"
    lines, headings = [], [*columns, *(["mean"] if averaged else [])]
    for method in dict.fromkeys(joined(*columns.values())):
        figures = [of_set.get(method, (None, None)) for of_set in columns.values()]
        if averaged:
            figures.append((None, None) if (None, None) in figures else tuple(np.mean(figures, axis=0)))
        lines.append((paper_name(method), *map(decimals, joined(*figures))))
    note = f"{', '.join(table['figures'])}. {table['caption']} {table.get('remark', '')}".strip()
    quoted = _quoted(table, ("method", *joined(*((column, "cost") for column in headings))), lines, note)
    return [row for _, rows in by_chain for row in rows], grids, quoted


def _compared_rows(table: str, measured: MeasuredChain, root: AnyPath) -> list[dict[str, Any]]:
    """Return the rows of one comparison, flat, in the order of the paper's tables."""
    chain, facts = measured.chain, measured.facts
    quality = "accuracy" if chain.objective == "accuracy" else "macro_f1"
    comparable, rows = _comparable(chain, root), []
    for row in _in_order(measured.rows):
        plain = row["method"].removeprefix(f"{RECALIBRATED}+")
        paradigm = METHODS[plain].paradigm if plain in METHODS else row["paradigm"]
        point = row.get("default" if plain == "base" else _POINT_OF.get(paradigm, ""), row)
        quoted = quoted_figures(table, comparable["published_column"], row["method"], chain.models)
        rows.append(
            chain.keys
            | comparable
            | {"n": facts["n"], "cost_unit": facts["cost_unit"], "budget": row["budget_cost"]}
            | {key: row[key] for key in ("method", "paradigm", "note")}
            | {key: point[key] for key in ("accuracy", "macro_f1", "cost", "relative_cost", "avoided")}
            | {"quality": point[quality], "quality_at_budget": row[quality]}
            | {f"{key}_at_budget": row[key] for key in ("cost", "relative_cost", "gain", "random_mix")}
            | _named(("accuracy_low", "accuracy_high"), point["accuracy_interval"])
            | _named(("gain_low", "gain_high"), row["gain_interval"])
            | {"reference": paper_name(facts["reference"]), "difference": row["difference"]}
            | _named(("difference_low", "difference_high"), row["difference_interval"])
            | _named(("published_quality", "published_cost", "published_relative_cost"), quoted)
        )
    return rows


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
    rows = published_columns(table)[column]
    of_paper = [f"{SINGLE}:{model}" for model in published_tables()[table]["models"]]
    paper_names = dict(zip((f"{SINGLE}:{model}" for model in models), of_paper, strict=True))
    figures = rows.get(paper_names.get(method, method), rows.get(method.partition("-")[0]))
    return None if figures is None else (figures[0] / 100.0, figures[1], figures[1] / rows[of_paper[-1]][1])


def _overview(by_chain: Sequence[tuple[Chain, Sequence[Row]]]) -> Grid:
    """Return all chains side by side, as the paper's table has them: quality and relative cost."""
    by_method: dict[str, dict[str, Any]] = {}
    columns, legend = [("method", "text", "shown")], []
    for index, (chain, rows) in enumerate(by_chain, start=1):
        quality, cost = (f"[{index}] {'acc.' if chain.objective == 'accuracy' else 'F1'}", f"cost {index}")
        columns += [(quality, "points", quality), ("rel. cost", "ratio", cost)]
        legend.append(f"[{index}] {chain.name}")
        for row in rows:
            group, _, model = row["method"].partition(":")
            alone = f"model {chain.models.index(model) + 1} alone" if model else ""
            name = (alone if group == SINGLE else f"{alone}, {group}") if alone else row["method"]
            line = by_method.setdefault(name, {"shown": paper_name(name), "paradigm": row["paradigm"]})
            line |= {quality: row["quality"], cost: row["relative_cost"]}
    if len({chain.objective for chain, _ in by_chain}) == 1:
        for heading, form, name in (("mean", "points", 1), ("rel. cost", "ratio", 2)):
            keys = [key for _, _, key in columns[name::2]]
            for line in by_method.values():
                values = [line[key] for key in keys if line.get(key) is not None]
                line[f"mean {name}"] = float(np.mean(values)) if len(values) == len(keys) else None
            columns.append((heading, form, f"mean {name}"))
    lines = [dict.fromkeys(key for _, _, key in columns) | line for line in _in_order(by_method.values())]
    marks = {
        cell: mark for _, form, quality in columns if form == "points" for cell, mark in _marks(lines, quality).items()
    }
    note = f"Quality in percent, cost over the last model's. {'; '.join(legend)}."
    return Grid.of("All chains", lines, columns, marks, [note])


def _setup(name: str, measured: Sequence[MeasuredChain], config: PaperConfig) -> Made:
    """Make the table of setup times, with the paper's ratios next to them."""
    (timed,) = measured
    chain, rows = timed.chain, []
    seconds = dict(published()["setup_s"])
    title = {"table": seconds.pop("table")}
    for row in _in_order(timed.rows):
        if row["paradigm"] not in ("single-model", "recalibrated"):
            ratio = row["paper_setup_ratio"]
            quoted = None if ratio is None else (ratio * seconds["base"], ratio)
            times = {key: row[key] for key in ("method", "paradigm", "setup_s", "setup_ratio", "note")}
            rows.append({**times, "chain": chain.name} | _named(("published_setup_s", "published_setup_ratio"), quoted))
    lines = [(paper_name(method), f"{s:,}", FORMATS["times"](s / seconds["base"])) for method, s in seconds.items()]
    grid = _grid(name, f"{chain.name}: {' → '.join(chain.models)}", rows)
    return rows, [grid], _quoted(title, ("method", "seconds", "over Base's"), lines)


def _pairs(name: str, measured: Sequence[MeasuredChain], config: PaperConfig) -> Made:
    """Make the table of complementarity and fusion."""
    table, columns = published_tables()[name], published_columns(name)
    keys = ("published_direct", "published_fuse", "published_rf", "published_cr")
    rows, marks = [], Marks()
    for index, pair in enumerate(measured):
        chain, facts = pair.chain, {key: pair.facts[key] for key in ("n", "cost_unit")}
        row = chain.keys | facts | fusion(config.logits / chain.set, chain) | pair.ours(chain.models)
        row |= _comparable(chain, config.logits)
        rows.append(row | _named(keys, columns.get(row["published_column"] or "")))
        best = max(row["direct"], row["fuse"])
        marks |= {(index, key): "bold" for key in ("direct", "fuse") if row[key] == best}
    n_right = sum(row["cr_chose_the_better"] for row in rows)
    grid = _grid(name, "Pairs of models", rows, marks, n_right=n_right, n_pairs=len(rows))
    lines = [(pair, *map(decimals, values)) for pair, values in columns.items()]
    return rows, [grid], _quoted(table, ("pair", *table["figures"]), lines)


def _growth(name: str, measured: Sequence[MeasuredChain], config: PaperConfig) -> Made:
    """Make the table of growing chains."""
    table, columns = published_tables()[name], published_columns(name)
    keys = ("published_base_quality", "published_base_cost", "published_rf_quality", "published_rf_cost")
    all_rows, grids = [], []
    for growing in measured:
        chain, facts = growing.chain, {key: growing.facts[key] for key in ("n", "cost_unit")}
        comparable = _comparable(chain, config.logits)
        *added, last = chain.models
        chains = grown(config, chain)
        of_paper = list(columns.get(comparable["published_column"] or "", {}).values())[: len(chains)]
        rows = []
        for models, new, quoted in zip_longest(chains, (last, *added), of_paper):
            row = chain.keys | {"models": list(models), "n_models": len(models), "added": new}
            rows.append(row | facts | growing.ours(models) | comparable | _named(keys, quoted))
        marks = Marks()
        for key, best in product(("base", "rf_shared", "rf_best", "pair"), (("quality", max), ("cost", min))):
            marks |= _best(rows, f"{key}_{best[0]}", range(1, len(rows)), best[1])  # one model is not a cascade
        grids.append(_grid(name, chain.name, rows, marks))
        all_rows += rows
    lines = [
        (column, str(index), model, *map(decimals, values))
        for column, models in columns.items()
        for index, (model, values) in enumerate(models.items(), start=1)
    ]
    return all_rows, grids, _quoted(table, ("set", "models", "newly added", *table["figures"]), lines, n_left=3)


def _marks(rows: Sequence[Row], key: str = "quality") -> Marks:
    """Return how qualities stand out: the best of what need not call every model, over it the best of all."""
    unranked = ("recalibrated", "control")
    ranked = [index for index, row in enumerate(rows) if row["paradigm"] not in unranked and row[key] is not None]
    early = [index for index in ranked if rows[index]["paradigm"] != "ensemble"]
    return _best(rows, key, early, mark="underline") | _best(rows, key, ranked)


def _best(
    rows: Sequence[Row], key: str, ranked: Sequence[int], best: Callable[..., float] = max, mark: Mark = "bold"
) -> Marks:
    """Mark the best value of some rows, or all that share it."""
    return {(index, key): mark for index in ranked if rows[index][key] == best(rows[row][key] for row in ranked)}


def _grid(
    kind: str, title: str, rows: Sequence[Row], marks: Marks | None = None, notes: Sequence[str] = (), **more: Any
) -> Grid:
    """Return rows as people read them, with columns and notes of a kind: their texts name values of the first row."""
    spec, named = CONTENTS[kind], {**rows[0], **more}
    quoted = spec.get("published", []) if any(row.get("published_column") for row in rows) else []
    columns = [(heading.format(**named), *rest) for heading, *rest in [*spec["columns"], *quoted]]
    lines = [{**row, "shown": paper_name(row.get("method", ""))} for row in rows]
    notes = [*(note.format(**named) for note in spec.get("notes", ())), *filter(None, notes)]
    notes += surrogate_notes(joined(*(row.get("surrogates", ()) for row in rows)))
    return Grid.of(title, lines, columns, marks or {}, notes, spec.get("n_left", 1))


def surrogate_notes(models: Iterable[str]) -> list[str]:
    """Return the banner of figures of models whose logits are surrogates."""
    names = ", ".join(dict.fromkeys(models))
    return [CONTENTS["surrogates"].format(models=names)] if names else []


def _quoted(
    table: Mapping[str, Any], headings: Sequence[str], lines: Iterable[Sequence[str]], note: str = "", n_left: int = 1
) -> Grid:
    """Return a table of the paper, with a note in place of its caption if there is one."""
    title = ", ".join([f"In the paper: {table['table']}", *filter(None, [" → ".join(table.get("models", ()))])])
    notes = tuple(filter(None, [note or table.get("caption")]))
    return Grid(title, tuple(headings), tuple(map(tuple, lines)), notes, n_left)


def _in_order(rows: Iterable[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: _ORDER.index(row["paradigm"]))


def _named(names: Sequence[str], values: Sequence[float] | None) -> dict[str, float | None]:
    return dict.fromkeys(names) if values is None else dict(zip(names, values, strict=True))
