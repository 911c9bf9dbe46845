"""Comparisons of routers on tables of scores, which have a row per query and model and no logits."""

import json

import numpy as np
import planted
import pyarrow as pa
import pyarrow.csv as pa_csv
import pytest

import cauc_ray
from cauc_ray.cli.command import main
from cauc_ray.errors import CaucWarning, ConfigError, DataError
from cauc_ray.files.parquet import write_parquet

MODELS, COSTS = ("small", "middle", "large"), (1.0, 3.0, 10.0)
QUICK = ("single", "benchmark-routing", "routellm-sw", "carrot", "random", "oracle")


def scores(n=600, seed=0, *, with_costs=True):
    """Return rows of a table: the small model answers arithmetic, the large one everything."""
    rng, rows = np.random.default_rng(seed), []
    for query in range(n):
        is_easy = rng.random() < 0.5
        text = (
            f"What is {rng.integers(99)} plus {query}?" if is_easy else f"Who wrote the novel number {query} on this?"
        )
        chances = (0.95, 0.95, 0.95) if is_easy else (0.1, 0.4, 0.95)
        for model, chance, cost in zip(MODELS, chances, COSTS, strict=True):
            row = {"query": text, "model": model, "score": float(rng.random() < chance)}
            rows.append(row | ({"cost": cost * float(rng.uniform(0.5, 1.5))} if with_costs else {}))
    return rows


def written(path, rows):
    """Write rows in random order, as Parquet or CSV."""
    order = np.random.default_rng(1).permutation(len(rows))
    table = pa.Table.from_pylist(rows).take(pa.array(order))
    pa_csv.write_csv(table, path) if path.suffix == ".csv" else write_parquet(path, table)
    return path


def figures(comparison, method):
    row = comparison.row(method)
    return row["accuracy"], row["cost"]


def test_routers_and_controls_run_on_texts_and_others_are_named_with_the_reason(tmp_path, monkeypatch):
    planted.train_quickly(monkeypatch)
    rows = scores()
    comparison = cauc_ray.compare(written(tmp_path / "t.parquet", rows), methods=["all"], budget=6.0, seed=3)
    for row in comparison.rows:
        assert row["macro_f1"] is None
        assert row["status"] == "ok" or row["method"] == "single:large"
    not_run = {entry["method"]: entry["why"] for entry in comparison.not_run}
    for method in ("base", "rf", "stacked", "margin", "frugalgpt", "cascade-routing", "embedding", "shuffled", "duo"):
        assert "logits" in not_run[method]
    measured = {row["method"] for row in comparison.rows}
    assert {"single:small", "single:large", "carrot", "benchmark-routing", "random", "oracle"} <= measured
    # Words tell which query is easy, so a router is better than chance at a cost like its own.
    accuracy, cost = figures(comparison, "carrot")
    assert accuracy > comparison.row("carrot")["random_mix"] + 0.05
    assert cost < 7.0
    assert figures(comparison, "oracle")[0] >= accuracy
    by_model = {model: np.mean([row["score"] for row in rows if row["model"] == model]) for model in MODELS}
    assert figures(comparison, "single:large")[0] == pytest.approx(by_model["large"], abs=0.06)


def test_splits_and_embeddings_are_used_and_numbers_categories_and_booleans_stand_for_their_texts(tmp_path):
    rows, noise = scores(400), np.random.default_rng(0).normal(size=400)
    for number, row in enumerate(rows):
        query = number // 3
        row |= {"split": str(query % 3), "embedding": [float("plus" in row["query"]), noise[query]]}
        row["query"] = str(1000 + query)
    texts = pa.Table.from_pylist(rows)
    numbers = texts.set_column(0, "query", texts.column("query").cast(pa.int64()))
    numbers = numbers.set_column(1, "model", numbers.column("model").combine_chunks().dictionary_encode())
    numbers = numbers.set_column(2, "score", numbers.column("score").cast(pa.bool_()))
    numbers = numbers.set_column(4, "split", numbers.column("split").cast(pa.int64()))
    comparisons = []
    for name, table in (("texts", texts), ("numbers", numbers)):
        write_parquet(tmp_path / f"{name}.parquet", table)
        splits = {"calibration_split": "0", "validation_split": "1", "split": "2"}
        comparisons.append(cauc_ray.compare(tmp_path / f"{name}.parquet", methods=QUICK, budget=6.0, **splits))
    for method in ("single:small", "benchmark-routing", "oracle"):
        assert figures(comparisons[1], method) == figures(comparisons[0], method)
    right = [row["score"] for row in rows if row["split"] == "2" and row["model"] == "small"]
    assert {row["n"] for row in comparisons[0].rows} == {len(right)}
    assert figures(comparisons[0], "single:small")[0] == pytest.approx(np.mean(right))
    routed = comparisons[0].row("benchmark-routing")
    assert routed["accuracy"] > routed["random_mix"] + 0.05


def test_parquet_csv_and_the_command_agree_whatever_the_order_of_rows(tmp_path, capsys):
    rows = scores(200)
    files = [written(tmp_path / f"t.{kind}", rows) for kind in ("parquet", "csv")]
    parquet, csv = (cauc_ray.compare(file, methods=QUICK, budgets=[4.0, 8.0]) for file in files)
    with pytest.raises(SystemExit):
        main(["compare", str(files[1]), "--methods", ",".join(QUICK), "--budgets", "4,8", "--json"])
    printed = json.loads(capsys.readouterr().out)["rows"]
    names = ("method", "budget", "accuracy", "cost", "setting")
    for one, two, three in zip(parquet.rows, csv.rows, printed, strict=True):
        assert [one[name] for name in names] == [two[name] for name in names] == [three[name] for name in names]


def test_a_file_without_costs_takes_them_from_the_options_and_fractions_are_warned_of(tmp_path):
    rows = scores(200, with_costs=False)
    file = written(tmp_path / "t.parquet", rows)
    with pytest.raises(ConfigError, match="cost"):
        cauc_ray.compare(file, methods=QUICK, budget=6.0)
    rows[0]["score"] = 0.7
    with pytest.warns(CaucWarning, match="1 of 600 scores"):
        comparison = cauc_ray.compare(
            written(file, rows), methods=QUICK, budget=6.0, models=MODELS, costs=COSTS, cost_unit="USD"
        )
    assert comparison.row("single:large")["cost"] == 10.0
    assert comparison.row("single:large")["cost_unit"] == "USD"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: rows[4].update(score=1.5), ["between 0 and 1", "1.5", "middle"]),
        (lambda rows: rows.append(dict(rows[4])), ["duplicate", "middle"]),
        (lambda rows: rows.pop(4), ["no score", "middle"]),
        (lambda rows: rows[4].update(cost=-1.0), ["cost", "-1"]),
        (lambda rows: rows[4].update(model=None), ["no model"]),
        (lambda rows: [row.pop("score") for row in rows], ["'score' is missing"]),
        (lambda rows: embedded(rows, [0.1, np.nan]), ["embedding", "small", "not finite"]),
        (lambda rows: embedded(rows, [0.1, None]), ["embedding", "small", "not finite"]),
        (lambda rows: embedded(rows, [0.1]), ["embedding", "1 numbers"]),
        (lambda rows: embedded(rows, []), ["embedding", "0 numbers"]),
        (lambda rows: embedded(rows, [0.1, 0.3]), ["another embedding"]),
        (lambda rows: [row.update(embedding=0.5) for row in rows], ["embedding", "double"]),
        (lambda rows: [row.update(embedding=["a", "b"]) for row in rows], ["embedding", "string"]),
        (lambda rows: [row.update(split=row["model"][:1]) for row in rows], ["another split"]),
    ],
)
def test_what_is_no_such_table_is_refused_in_one_line_that_names_the_place(tmp_path, change, words):
    rows = scores(20)
    change(rows)
    with pytest.raises(DataError) as refused:
        cauc_ray.compare(written(tmp_path / "t.parquet", rows), methods=["random"], budget=6.0, models=MODELS)
    assert all(word in str(refused.value) for word in words)
    assert "\n" not in str(refused.value)


def embedded(rows, vector):
    """Give all rows an embedding, and the second query's first row another one."""
    for row in rows:
        row["embedding"] = [0.1, 0.2]
    rows[3]["embedding"] = vector


def test_a_csv_file_has_no_embeddings(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text('query,model,score,cost,embedding\n"q",a,1,1,"[0.1, 0.2]"\n"q",b,1,2,"[0.1, 0.2]"\n')
    with pytest.raises(DataError, match="Parquet"):
        cauc_ray.compare(file, methods=["random"], budget=6.0)


def test_fits_and_options_that_need_logits_are_refused(tmp_path):
    file = written(tmp_path / "t.parquet", scores(40))
    for options in ({}, {"budget": 6.0, "objective": "macro-f1"}, {"budget": 6.0, "embedding": "minilm"}):
        with pytest.raises(ConfigError, match="no logits"):
            cauc_ray.compare(file, methods=["random"], **options)
    with pytest.raises(ConfigError, match="logits"):
        cauc_ray.compare(file, methods=["base"], budget=6.0)
    with pytest.raises(ConfigError, match="`cauc compare` reads scores"):
        cauc_ray.fit(file)
