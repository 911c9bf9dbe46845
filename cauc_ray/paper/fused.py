"""The tables of fusion: pairs of models, and a chain that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cauc_ray.api.grids import Cell, Grid, PaperTable, cells, marked, number, percent, ratio
from cauc_ray.comparison.quoted import columns_of, quoted_table
from cauc_ray.numbers.sweep import Objective
from cauc_ray.paper.config import Chain, GrowingChain
from cauc_ray.paper.measured import GrownChain, PairMeasures
from cauc_ray.policies.evidence import Measures

ABOUT_PAIRS = (
    "Base at its own threshold, whose deferred examples the second model answers alone (direct) or both together "
    "(fuse), and CAUC-RF at its best on validation within Base's validation cost; quality in percent on the test "
    "split. CR is the complementarity rate on the calibration split, in percentage points: Base fuses where it is "
    "above 0. Bold is the better of direct and fuse."
)
ABOUT_GROWTH = (
    "The last model stays; each row adds the model that it names before it. Base is at its own threshold, CAUC-RF at "
    "that same threshold and at its best on validation within Base's validation cost; quality in percent and mean cost "
    "on the test split. Bold is the best of each column among chains of two and more."
)


def quality(measures: Measures, objective: Objective) -> float:
    """Return the accuracy or the macro-F1 of measures on labelled examples."""
    assert measures.accuracy is not None
    assert measures.macro_f1 is not None
    return measures.accuracy.value if objective == "accuracy" else measures.macro_f1


def gain_of(pair: PairMeasures, objective: Objective = "accuracy") -> float:
    """Return what fusing gained over direct deferral on the test split."""
    return quality(pair.fused, objective) - quality(pair.direct, objective)


def sign_is_right(pair: PairMeasures, objective: Objective = "accuracy") -> bool:
    """Say whether the sign of the complementarity rate chose the better of fusing and direct deferral, or as good."""
    gain = gain_of(pair, objective)
    return gain >= 0 if pair.complementarity_rate > 0 else gain <= 0


def pairs_table(found: Sequence[tuple[Chain, PairMeasures]]) -> PaperTable:
    """Return the table of complementarity and fusion."""
    rows = [_pair_row(chain, pair) for chain, pair in found]
    lines = []
    for row in rows:
        direct, fused = row["direct"], row["fuse"]
        line = [
            *cells(row["chain"], row["set"]),
            *marked([percent(direct), percent(fused)], [direct, fused]),
            *cells(percent(row["rf"]), f"{100 * row['cr']:+.2f}", "yes" if row["cr_chose_the_better"] else "no"),
            *cells(ratio(row["base_relative_cost"]), ratio(row["rf_relative_cost"])),
        ]
        quoted = columns_of("complementarity").get(row["published_column"])
        texts = [f"{value:.2f}" for value in quoted] if quoted else ["–"] * 4
        lines.append((*line, *(cells(*texts) if _any_quoted(rows) else ())))
    headings = ["pair", "set", "direct", "fuse", "CAUC-RF", "CR", "its sign is right", "Base's cost", "RF's cost"]
    if _any_quoted(rows):
        headings += [f"the paper's {figure}" for figure in quoted_table("complementarity")["figures"]]
    n_right = sum(row["cr_chose_the_better"] for row in rows)
    note = f"CR's sign chose the better of the two for {n_right} of {len(rows)} pairs. Costs are over the last model's."
    grid = Grid("Pairs of models", tuple(headings), tuple(lines), (note,), n_left=2)
    return PaperTable(
        "complementarity", "Complementarity and fusion", ABOUT_PAIRS, tuple(rows), (grid,), _quoted_pairs()
    )


def _any_quoted(rows: Sequence[dict[str, Any]]) -> bool:
    return any(row["published_column"] for row in rows)


def _pair_row(chain: Chain, pair: PairMeasures) -> dict[str, Any]:
    assert pair.rf is not None
    return {
        "chain": chain.name,
        "set": chain.set,
        "models": list(chain.models),
        "n": pair.direct.n,
        "objective": chain.objective,
        "direct": quality(pair.direct, chain.objective),
        "fuse": quality(pair.fused, chain.objective),
        "rf": quality(pair.rf, chain.objective),
        "cr": pair.complementarity_rate,
        "gain_of_fusing": gain_of(pair, chain.objective),
        "cr_chose_the_better": sign_is_right(pair, chain.objective),
        "cost_unit": pair.cost_unit,
        "base_cost": pair.direct.cost,
        "base_relative_cost": pair.direct.relative_cost,
        "rf_cost": pair.rf.cost,
        "rf_relative_cost": pair.rf.relative_cost,
        "published_column": chain.published,
    }


def _quoted_pairs() -> Grid:
    table = quoted_table("complementarity")
    return Grid(
        title=f"In the paper: {table['table']}",
        headings=("pair", *table["figures"]),
        rows=tuple(cells(pair, *(f"{value:.2f}" for value in values)) for pair, values in table["columns"].items()),
        notes=(table["caption"],),
    )


def growth_table(found: Sequence[tuple[GrowingChain, Sequence[GrownChain]]]) -> PaperTable:
    """Return the table of growing chains."""
    rows, grids = [], []
    for chain, grown in found:
        of_chain = [_growth_row(chain, step) for step in grown]
        rows += of_chain
        grids.append(_growth_grid(chain, of_chain))
    return PaperTable("growing-chain", "A chain that grows", ABOUT_GROWTH, tuple(rows), tuple(grids), _quoted_growth())


def _growth_row(chain: GrowingChain, grown: GrownChain) -> dict[str, Any]:
    quoted = list(columns_of("growing-chain").get(chain.published or "", {}).values())
    place = len(grown.models) - 1
    row = {
        "chain": chain.name,
        "set": chain.set,
        "models": list(grown.models),
        "n_models": len(grown.models),
        "added": grown.added,
        "n": grown.base.n,
        "objective": chain.objective,
        "cost_unit": grown.cost_unit,
    }
    for name, measures in (("base", grown.base), ("rf_shared", grown.rf_shared), ("rf_best", grown.rf_best)):
        row |= {
            f"{name}_quality": quality(measures, chain.objective),
            f"{name}_cost": measures.cost,
            f"{name}_relative_cost": measures.relative_cost,
        }
    names = ("published_base_quality", "published_base_cost", "published_rf_quality", "published_rf_cost")
    values = quoted[place] if place < len(quoted) else [None] * len(names)
    return row | dict(zip(names, values, strict=True)) | {"published_column": chain.published}


def _growth_grid(chain: GrowingChain, rows: Sequence[dict[str, Any]]) -> Grid:
    unit = rows[0]["cost_unit"]
    heads = {
        "base": "CAUC",
        "rf_shared": "CAUC-RF, CAUC's threshold",
        "rf_best": "CAUC-RF, best within CAUC's cost",
    }
    columns: list[tuple[Cell, ...]] = [
        cells(*(str(row["n_models"]) for row in rows)),
        cells(*(row["added"] for row in rows)),
    ]
    headings = ["models", "newly added"]
    for name, head in heads.items():
        headings += [f"{head} (%)", f"cost ({unit})", "relative"]
        qualities = [row[f"{name}_quality"] for row in rows]
        costs = [row[f"{name}_cost"] for row in rows]
        # The last model alone is no cascade.
        columns += [
            marked([percent(q) for q in qualities], [None, *qualities[1:]]),
            marked([number(cost) for cost in costs], [None, *(-cost for cost in costs[1:])]),
            cells(*(ratio(row[f"{name}_relative_cost"]) for row in rows)),
        ]
    if chain.published:
        headings += [f"the paper's {chain.published}: {figure}" for figure in quoted_table("growing-chain")["figures"]]
        for name in ("base_quality", "base_cost", "rf_quality", "rf_cost"):
            values = [row[f"published_{name}"] for row in rows]
            columns.append(cells(*("–" if value is None else f"{value:.2f}" for value in values)))
    notes = (f"{chain.set}, {rows[0]['n']:,} test examples; {chain.last} stays last.",)
    return Grid(chain.name, tuple(headings), tuple(zip(*columns, strict=True)), notes, n_left=2)


def _quoted_growth() -> Grid:
    table = quoted_table("growing-chain")
    rows = [
        cells(column, str(place), model, *(f"{value:.2f}" for value in values))
        for column, models in table["columns"].items()
        for place, (model, values) in enumerate(models.items(), start=1)
    ]
    return Grid(
        title=f"In the paper: {table['table']}",
        headings=("set", "models", "newly added", *table["figures"]),
        rows=tuple(rows),
        notes=(table["caption"],),
        n_left=3,
    )
