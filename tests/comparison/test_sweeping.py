"""Budget sweeps: rows are the library's own figures, seeds draw disjoint splits, nothing is measured twice."""

import json
from dataclasses import replace
from statistics import mean, stdev

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_process import in_process, tasks_in_process
from synthetic import SPLITS, chain, write_table

from cauc_ray.api.options import SweepJobOptions
from cauc_ray.comparison.comparing import compare
from cauc_ray.comparison.sweeping import RESULTS, SUMMARY, grids, redraw
from cauc_ray.comparison.tasks import run_sweep
from cauc_ray.data.writing import write_logits
from cauc_ray.policies.trace import Examples

__all__ = ["in_process"]  # a fixture

METHODS = ("single", "base", "rf", "duo", "margin", "random", "oracle")
CHAIN = ("m0", "m1", "m2")
BUDGETS = (2.0, 6.0, 18.0)


def config(folder, **change):
    sets = [{"name": "planted", "logits": str(folder / "L"), "chains": [list(CHAIN), ["m0", "m2"]]}]
    plain = {"sets": sets, "methods": METHODS, "seeds": [3], "budgets": BUDGETS, "redrawn": []}
    return SweepJobOptions.of({**plain, **change})


def rows_of(sweep, **keys):
    return [row for row in sweep.rows if all(row[key] == value for key, value in keys.items())]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    write_table(folder / "L", n=200)
    return folder


@pytest.fixture(scope="module")
def swept(table):
    with tasks_in_process():
        return run_sweep(config(table), table / "out"), table / "out"


@pytest.mark.parametrize("budget", BUDGETS)
def test_rows_are_what_a_comparison_says_at_the_same_budget(swept, table, budget):
    rows = {row["method"]: row for row in rows_of(swept[0], chain="m0,m1,m2", budget=budget)}
    same = compare(table / "L", models=CHAIN, methods=METHODS, budget=budget, seed=3)
    assert rows.keys() == {row["method"] for row in same.rows}
    for name, row in rows.items():
        expected = same.row(name)
        if row["status"] == "ok":
            figures = ("accuracy", "macro_f1", "cost", "relative_cost", "avoided")
            assert {key: row[key] for key in figures} == pytest.approx({key: expected[key] for key in figures})
            assert row["threshold"] == (pytest.approx(expected["setting"]) if expected["steered"] else None)
        else:  # a comparison shows what cannot be steered whatever it costs
            assert row["status"] == "unmet"
            assert not expected["steered"]
            assert expected["cost"] > budget
            assert "below the cheapest operating point" in row["reason"]


def test_there_is_a_row_for_everything_in_order(swept):
    sweep, out = swept
    singles = {"m0,m1,m2": [f"single:{model}" for model in CHAIN], "m0,m2": ["single:m0", "single:m2"]}
    expected = [
        (models, method, budget)
        for models, alone in singles.items()
        for method in (*alone, *METHODS[1:])
        for budget in BUDGETS
    ]
    assert [(row["chain"], row["method"], row["budget"]) for row in sweep.rows] == expected
    table = pq.read_table(out / "results.parquet")
    assert table.schema == RESULTS
    of_rows = [dict.fromkeys(RESULTS.names) | row for row in sweep.rows]
    assert table.to_pylist() == of_rows
    assert pq.read_table(out / "summary.parquet").schema == SUMMARY
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(sweep.as_json()))


def test_a_budget_below_the_cheapest_model_is_a_row_that_says_so(table, in_process, tmp_path):
    sweep = run_sweep(config(table, methods=["rf"], budgets=[0.5], relative_budgets=[0.4]), tmp_path / "out")
    relative, low = rows_of(sweep, chain="m0,m1,m2")
    assert (relative["status"], relative["budget_cost"]) == ("ok", pytest.approx(0.4 * 15))
    assert (low["status"], low.get("accuracy")) == ("unmet", None)
    assert "budget 0.5 GFLOPs" in low["reason"]
    assert sweep.missing == ()
    grid = grids(sweep.summary)[0]
    assert "not met" in grid.markdown()
    assert grid.rows[0][-1] == f"{100 * relative['accuracy']:.1f} %"  # the mean leaves out what is not met


def test_a_seed_fits_on_the_splits_that_it_draws(table, in_process, tmp_path):
    chains = {name: chain(7, 200, shift=place) for place, name in enumerate(SPLITS)}
    table_splits = {
        name: Examples(replace(rows, example_ids=tuple(f"{name}-{example}" for example in rows.example_ids)))
        for name, rows in chains.items()
    }
    redrawn = ["calibration", "validation"]
    for split, rows in redraw(table_splits, redrawn, 5).items():
        drawn = {"example_ids": rows.chain.example_ids, "labels": rows.chain.labels}
        for model, logits in zip(CHAIN, rows.chain.logits, strict=True):
            write_logits(tmp_path / "hand", model, split, **drawn, logits=list(logits))
    methods = ["base", "margin", "random"]
    sweep = run_sweep(config(table, methods=methods, seeds=[5], redrawn=redrawn), tmp_path / "out")
    for budget in BUDGETS:
        costs = [1.0, 4.0, 15.0]
        same = compare(tmp_path / "hand", models=CHAIN, methods=methods, costs=costs, budget=budget, seed=5)
        for row in rows_of(sweep, chain="m0,m1,m2", budget=budget):
            expected = same.row(row["method"])
            assert (row["accuracy"], row["cost"]) == pytest.approx((expected["accuracy"], expected["cost"]))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=3, max_size=3),
    seed=st.integers(0, 2**63 - 1),
    names=st.sampled_from([("calibration", "validation"), SPLITS, ("validation", "test")]),
    per_call=st.booleans(),
)
def test_splits_are_drawn_disjoint_in_their_sizes(sizes, seed, names, per_call):
    splits = {}
    for place, (name, n) in enumerate(zip(SPLITS, sizes, strict=True)):
        of = chain(1, n, k=3 + place, ragged=True, per_call=per_call, shift=place)
        splits[name] = Examples(of, np.arange(2 * n, dtype=np.float32).reshape(n, 2) + 1000 * place)
    drawn = redraw(splits, names, seed)

    def rows(of):
        """Return everything about each example, by its id; options that a row lacks are left out."""
        return {
            example: (
                int(of.chain.labels[row]),
                [logits[row][np.isfinite(logits[row])].tolist() for logits in of.chain.logits],
                np.broadcast_to(of.chain.costs.per_call, (len(of), 3))[row].tolist(),
                of.embeddings[row].tolist(),
            )
            for row, example in enumerate(of.chain.example_ids)
        }

    assert {name: len(of) for name, of in drawn.items()} == dict(zip(SPLITS, sizes, strict=True))
    together = {}
    for name in names:
        found = rows(drawn[name])
        assert not together.keys() & found.keys()
        together |= found
        assert len({id(logits) for logits in drawn[name].chain.logits}) == 3
    expected = {}
    for name in names:
        expected |= rows(splits[name])
    assert together == expected
    for name in set(SPLITS) - set(names):
        assert drawn[name] is splits[name]
    again = redraw(splits, names, seed)
    assert all(again[name].chain.example_ids == drawn[name].chain.example_ids for name in SPLITS)


def test_the_summary_is_mean_and_spread_over_seeds(table, in_process, tmp_path):
    seeds = [0, 1, 2]
    sweep = run_sweep(
        config(table, methods=["base", "duo"], seeds=seeds, redrawn=["calibration", "validation"]), tmp_path / "out"
    )
    assert len(sweep.summary) == 2 * 2 * len(BUDGETS)
    spreads = []
    for row in sweep.summary:
        of = rows_of(sweep, **{key: row[key] for key in ("chain", "method", "budget")})
        assert [each["seed"] for each in of] == seeds
        ok = [each for each in of if each["status"] == "ok"]
        assert (row["n"], row["n_unmet"], row["n_missing"]) == (len(ok), 3 - len(ok), 0)
        for figure in ("accuracy", "macro_f1", "cost", "relative_cost", "setup_s"):
            values = [each[figure] for each in ok]
            assert row[f"{figure}_mean"] == (pytest.approx(mean(values)) if values else None)
            assert row[f"{figure}_std"] == (pytest.approx(stdev(values)) if len(values) > 1 else None)
        spreads.append(row["accuracy_std"] or 0)
    assert max(spreads) > 0  # seeds draw other splits
