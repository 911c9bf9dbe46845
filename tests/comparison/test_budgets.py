"""Comparisons over budgets, seeds and chains, and the files that they write."""

import csv
import json
import re
from statistics import mean, stdev

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import SPLITS, chain, write_table

from cauc_ray.comparison.comparing import compare
from cauc_ray.comparison.differences import AREA_DIFFERENCE, DIFFERENCE, pooled_difference
from cauc_ray.comparison.redrawing import redraw
from cauc_ray.policies.trace import Examples

METHODS = ("single", "base", "rf", "duo", "margin", "oracle", "random")
CHAIN = ("m0", "m1", "m2")
CHAINS = [CHAIN, ("m0", "m2")]
BUDGETS = (2.0, 6.0, 18.0)
FIGURES = ("accuracy", "macro_f1", "cost", "relative_cost", "avoided", "status", "setting", "gain", "difference_p")


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("budgets") / "L"
    write_table(folder, n=200)
    return folder


@pytest.fixture(scope="module")
def compared(table):
    return compare(table, chains=CHAINS, methods=METHODS, budgets=BUDGETS, relative_budgets=[0.4], seed=3)


def test_rows_are_what_a_comparison_at_one_budget_of_one_chain_has(compared, table):
    singles = {models: [f"single:{model}" for model in models] for models in CHAINS}
    expected = [
        (",".join(models), method, *budget)
        for models in CHAINS
        for method in (*singles[models], *METHODS[1:])
        for budget in (("relative", 0.4), *(("cost", budget) for budget in BUDGETS))
    ]
    keys = ("chain", "method", "budget_kind", "budget")
    assert [tuple(row[key] for key in keys) for row in compared.rows] == expected
    alone = compare(table, models=CHAIN, methods=METHODS, budget=6.0, seed=3)
    for row in alone.rows:
        same = compared.row(row["method"], chain="m0,m1,m2", budget=6.0)
        assert {key: same[key] for key in FIGURES} == {key: row[key] for key in FIGURES}
    relative = compared.row("rf", chain="m0,m1,m2", budget_kind="relative")
    assert relative["budget_cost"] == pytest.approx(0.4 * 15)
    assert relative["accuracy"] == alone.row("rf")["accuracy"]
    too_dear = compared.row("single:m2", budget=2.0)
    assert (too_dear["status"], too_dear["cost"]) == ("unmet", 15.0)
    assert "below the cheapest operating point" in too_dear["reason"]


def test_the_area_is_the_mean_over_budgets_that_all_methods_meet(table):
    budgets = [0.5, 4.0, 9.0, 14.0]
    comparison = compare(
        table, models=["m0", "m2"], methods=["single", "rf", "margin", "benchmark-routing"], budgets=budgets
    )
    for method in ("rf", "margin", "benchmark-routing"):
        rows = [comparison.row(method, budget=budget) for budget in budgets[1:]]
        assert [row["status"] for row in rows] == ["ok"] * 3
        assert rows[0]["area"] == pytest.approx(mean(row["accuracy"] for row in rows))
        if method != "rf":
            assert rows[0]["area_difference"] == pytest.approx(rows[0]["area"] - comparison.row("rf")["area"])
            low, high = rows[0]["area_difference_interval"]
            assert low <= rows[0]["area_difference"] <= high
    assert comparison.row("single:m2")["area"] is None
    assert comparison.row("rf")["area_budgets"] == 3


def test_equal_answers_to_several_seeds_are_no_more_evidence_than_to_one(table):
    settings = {"models": CHAIN, "methods": ["single", "rf", "margin"], "budgets": [3.0, 8.0]}
    one, two = compare(table, **settings), compare(table, **settings, seeds=[0, 1], redrawn=[])
    for row in one.rows:
        same = two.row(row["method"], budget=row["budget"])
        for name in (*DIFFERENCE, *AREA_DIFFERENCE[:2]):
            assert same[name] == (None if row[name] is None else pytest.approx(row[name], abs=0.01))


@given(seed=st.integers(0, 10**6), n_terms=st.integers(1, 5))
def test_a_pooled_difference_is_the_mean_with_its_bootstrap_interval_and_honest_p_value(seed, n_terms):
    rng = np.random.default_rng(seed)
    totals = rng.integers(-1, 2, (150, n_terms)).sum(axis=1)
    pooled = pooled_difference(totals, n_terms, 0, 0.05)
    assert pooled.value == pytest.approx(totals.mean() / n_terms)
    drawn = totals[rng.integers(0, 150, (2_000, 150))].mean(axis=1) / n_terms
    assert [pooled.low, pooled.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.03)
    z = abs(totals.sum()) / np.sqrt((totals**2).sum())
    assert (pooled.p_value < 0.05) == (z > 1.96) or abs(z - 1.96) < 0.3


@given(
    sizes=st.lists(st.integers(1, 30), min_size=3, max_size=3),
    seed=st.integers(0, 2**63 - 1),
    names=st.sampled_from([("calibration", "validation"), SPLITS, ("validation", "test")]),
    per_call=st.booleans(),
)
def test_splits_are_drawn_disjoint_in_their_sizes(sizes, seed, names, per_call):
    splits = {}
    for place, (name, n) in enumerate(zip(SPLITS, sizes, strict=True)):
        rows = chain(1, n, k=3 + place, ragged=True, per_call=per_call, shift=place)
        splits[name] = Examples(rows, np.arange(2 * n, dtype=np.float32).reshape(n, 2) + 1000 * place)
    drawn = redraw(splits, names, seed)

    def contents(examples):
        """Yield all of each example; options that a row lacks are left out."""
        for row, example in enumerate(examples.chain.example_ids):
            logits = [z[row][np.isfinite(z[row])].tolist() for z in examples.chain.logits]
            costs = np.broadcast_to(examples.chain.costs.per_call, (len(examples), 3))[row].tolist()
            yield str((example, int(examples.chain.labels[row]), logits, costs, examples.embeddings[row].tolist()))

    assert {name: len(examples) for name, examples in drawn.items()} == dict(zip(SPLITS, sizes, strict=True))
    before, after = (sorted(row for name in names for row in contents(version[name])) for version in (splits, drawn))
    assert before == after
    assert all(drawn[name] is splits[name] for name in set(SPLITS) - set(names))
    again = redraw(splits, names, seed)
    assert all(again[name].chain.example_ids == drawn[name].chain.example_ids for name in SPLITS)


def test_the_summary_is_mean_and_spread_over_seeds(table):
    seeds = [0, 1, 2]
    comparison = compare(table, chains=CHAINS, methods=["base", "duo"], seeds=seeds, budgets=BUDGETS)
    assert len(comparison.summary) == 2 * 2 * len(BUDGETS)
    for row in comparison.summary:
        of_seeds = [r for r in comparison.rows if all(r[key] == row[key] for key in ("chain", "method", "budget"))]
        assert [seed_row["seed"] for seed_row in of_seeds] == seeds
        assert (row["n"], row["n_failed"]) == (3, 0)
        assert row["n_unmet"] == sum(seed_row["status"] == "unmet" for seed_row in of_seeds)
        for figure in ("accuracy", "macro_f1", "cost", "relative_cost", "setup_s"):
            values = [seed_row[figure] for seed_row in of_seeds]
            assert (row[f"{figure}_mean"], row[f"{figure}_std"]) == (
                pytest.approx(mean(values)),
                pytest.approx(stdev(values)),
            )
    assert max(row["accuracy_std"] for row in comparison.summary) > 0  # seeds draw other splits


def test_a_method_whose_fit_fails_is_named_and_the_others_are_measured(table, tmp_path, command):
    pytest.importorskip("transformers")
    ids = pq.read_table(table / "model=m0")["example_id"]
    pq.write_table(pa.table({"example_id": ids, "question": ["why?"] * len(ids)}), tmp_path / "texts.parquet")
    words = ["--methods", "rf,routellm-bert", "--texts", tmp_path / "texts.parquet"]
    code, out, error = command("compare", table, *words, "--checkpoints", "routellm-bert=absent/model", "--json")
    result = json.loads(out)
    assert code == 5
    assert "routellm-bert, seed 0: " in error
    assert {row["method"]: row["status"] for row in result["rows"]} == {"rf": "ok", "routellm-bert": "failed"}
    assert result["rows"][0]["accuracy"] > 0
    code, out, _ = command("compare", table, "--methods", "rf,embedding", "--json")
    (absent,) = json.loads(out)["not_run"]
    assert (code, absent["method"], "give their encoder" in absent["why"]) == (0, "embedding", True)


def test_results_are_written_by_suffix_or_all_into_a_folder_that_keeps_cells(compared, table, tmp_path):
    for form in ("csv", "json", "parquet", "tex"):
        compared.save(tmp_path / f"table.{form}")
    with (tmp_path / "table.csv").open() as file:
        accuracies = [float(row["accuracy"]) for row in csv.DictReader(file)]
    assert accuracies == [row["accuracy"] for row in compared.rows]
    assert json.loads((tmp_path / "table.json").read_text())["rows"] == json.loads(json.dumps(compared.rows))
    assert pq.read_table(tmp_path / "table.parquet")["accuracy"].to_pylist() == accuracies
    tex = (tmp_path / "table.tex").read_text()
    assert tex.count(r"\toprule") == tex.count(r"\end{table}") == 2 * len(CHAINS)  # accuracies, and differences
    low, high = (f"{100 * bound:+.2f}" for bound in compared.summary[-1]["difference_interval"])
    assert f"({low} to {high})" in tex
    assert all(words in tex for words in (r"\textbf{", r"$\pm$", "Holm-adjusted"))
    for form in ("pdf", "png", "svg"):
        pytest.importorskip("matplotlib").use("Agg")
        compared.save(tmp_path / f"figure.{form}")
        assert (tmp_path / f"figure.{form}").stat().st_size > 5_000
    stored = []
    for methods in (["rf"], ["rf", "margin"]):
        compare(table, methods=methods, output=tmp_path / "out", on_cell=lambda cell, *_: stored.append(cell.seconds))
    written = ("comparison.json", "rows.csv", "curves.parquet", "summary.parquet", "comparison.tex", "tasks")
    assert all((tmp_path / "out" / name).exists() for name in written)
    assert stored[0] in stored[2:]  # the cell of rf, as it was


@pytest.mark.parametrize("budget", [1.2, 2.5, 6.0])
def test_what_is_called_the_most_accurate_meets_the_budget_and_is_worth_what_its_figures_say(table, budget):
    result = compare(table, methods=["single", "base", "margin", "duo", "oracle"], budget=budget)
    words = " ".join(result.sheet().text().split())
    headline = re.search(r"\S+ is the most accurate within the budget: .*? points of accuracy", words)[0]
    within = [row for row in result.rows if row["status"] == "ok" and row["method"] != "oracle"]
    best = result.row(headline.split()[0])
    assert best["accuracy"] == max(row["accuracy"] for row in within)
    assert best["cost"] == min(row["cost"] for row in within if row["accuracy"] == best["accuracy"])
    assert any(row["status"] == "unmet" for row in result.rows) or budget == 6.0
    saves = best["relative_cost"] < 1.0
    assert ("saves" in headline, "Worth it" in headline) == (saves, saves and best["gain_interval"][1] >= 0)


def test_panels_of_several_chains_show_the_objective(table):
    pytest.importorskip("matplotlib").use("Agg")
    comparison = compare(table, chains=CHAINS, methods=["base"], objective="macro-f1")
    values = set(np.round(100 * comparison.curves["macro_f1"].to_numpy(), 9))
    for panel in comparison.plot():
        (line,) = (line for line in panel.get_lines() if line.get_label() == "base")
        assert set(np.round(line.get_ydata(), 9)) <= values
