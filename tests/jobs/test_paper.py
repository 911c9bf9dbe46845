"""The paper's tables and figures from synthetic logits: their numbers are the library's; what is missing is named."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from synthetic import chain, softmax, write_table

import cauc_ray
from jobs.paper.__main__ import main
from jobs.paper.pages import methods_table, page_figure, page_tables, results_table

# A second model that fuses well with the first, and one that is far better than it.
STRENGTHS = {"near": (1.0, 1.1, 2.0), "far": (0.5, 1.5, 3.0)}
TWO = {"set": "near", "models": ["m0", "m1"]}
METHODS = ["single", "base", "rf", "rf-shared", "duo", "margin", "random", "oracle"]
FAR = {"name": "far", "set": "far", "models": ["m0", "m2"], "objective": "macro-f1"}
# Fills every table and figure, from sets of which one is not there.
CONFIG = {
    "logits": "sets",
    "output": "out",
    "methods": METHODS,
    "tables": {
        "two-model-language": [
            {"name": "near", **TWO, "published": "MMLU"},
            FAR,
            {"name": "absent", "set": "nowhere", "models": ["m0", "m1"], "published": "PIQA"},
        ],
        "two-model-image": [{"name": "no such model", "set": "far", "models": ["m0", "m9"]}],
        "complementarity": [{"name": "near", **TWO}, FAR],
        "growing-chain": [{"name": "near", "set": "near", "models": ["m0", "m1", "m2"]}],
        "setup-time": [{"name": "near", **TWO}],
    },
    "figures": {
        "calibration-reliability": [
            {"name": "far", "set": "far", "model": "m0", "models": ["m0", "m2"], "counted": ["m0", "m1", "m2"]}
        ],
        "complementarity-gain": ["near", "far"],
    },
}


def write_config(folder, **changes):
    path = folder / "paper.yaml"
    path.write_text(yaml.safe_dump(CONFIG | changes), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("paper")
    for name, strengths in STRENGTHS.items():
        write_table(folder / "sets" / name, strengths=strengths, ragged=name == "far")
    return folder


@pytest.fixture(scope="module")
def made(home):
    """Return the numbers of a whole run."""
    (home / "docs" / "measured").mkdir(parents=True)
    assert main(["--config", write_config(home), "--page", str(home / "docs" / "measured" / "page.json")]) == 0
    return json.loads((home / "out" / "paper.json").read_text())


def quality_and_cost(table, policy, objective="accuracy"):
    measures = cauc_ray.evaluate(table, policy).measures
    return measures.macro_f1 if objective == "macro-f1" else measures.accuracy.value, measures.cost


def test_tables_hold_the_numbers_of_the_library(made, home):
    near, far = home / "sets" / "near", home / "sets" / "far"
    rows = {(row["chain"], row["method"]): row for row in made["tables"]["two-model-language"]}
    comparison = cauc_ray.compare(near, models=["m0", "m1"], methods=METHODS)
    for expected in comparison.rows:
        row = rows["near", expected["method"]]
        point = expected.get({"base": "default", "margin": "matched"}.get(row["method"]), expected)
        assert (row["quality"], row["cost"]) == (point["accuracy"], point["cost"])
        assert (row["quality_at_budget"], row["cost_at_budget"]) == (expected["accuracy"], expected["cost"])
    assert {chain for chain, _ in rows} == {"near", "far"}
    assert all(row["quality"] == row["macro_f1"] for (chain, _), row in rows.items() if chain == "far")
    gains = [rows[name, "base"]["quality"] / rows[name, f"single:{last}"]["quality"] - 1 for name, last in
             (("near", "m1"), ("far", "m2"))]  # fmt: skip
    headline = next(line for line in made["headlines"]["two-model-language"] if line["method"] == "base")
    assert headline["relative_gain"] == pytest.approx(np.mean(gains))
    for pair, table in zip(made["tables"]["complementarity"], (near, far), strict=True):
        base = cauc_ray.fit(table, models=pair["models"])
        quality, cost = quality_and_cost(table, base, pair["objective"])
        assert pair["cr"] == base.stages[0].complementarity_rate
        assert (pair["fuse" if pair["cr"] > 0 else "direct"], pair["base_cost"]) == (quality, cost)
        best = {"budget": base.expected.cost, "objective": pair["objective"]}
        rf = cauc_ray.fit(table, models=pair["models"], method="rf", **best)
        assert (pair["rf_best_quality"], pair["rf_best_cost"]) == quality_and_cost(table, rf, pair["objective"])
    growing = made["tables"]["growing-chain"]
    assert [row["models"] for row in growing] == [["m2"], ["m0", "m2"], ["m0", "m1", "m2"]]
    for row in growing:
        base = cauc_ray.fit(near, models=row["models"])
        rf = cauc_ray.fit(near, models=row["models"], method="rf", threshold=base.threshold)
        for name, policy in (("base", base), ("rf_shared", rf)):
            assert (row[f"{name}_quality"], row[f"{name}_cost"]) == quality_and_cost(near, policy)


def test_direct_deferral_by_a_slow_loop(made, home):
    row = made["tables"]["complementarity"][0]
    policy = cauc_ray.fit(home / "sets" / "near", models=["m0", "m1"])
    test = chain(7, 300, strengths=STRENGTHS["near"], shift=2)
    n_right = 0
    for first, last, label in zip(test.logits[0], test.logits[1], test.labels, strict=True):
        is_sure = softmax(np.float64(first) / policy.stages[0].temperature).max() >= policy.threshold
        n_right += int(np.argmax(first if is_sure else last) == label)
    assert row["direct"] == n_right / 300


@pytest.mark.soak("full")
def test_what_is_missing_is_named_and_everything_is_in_the_report(made, home):
    reasons = {item["what"]: item["why"] for item in made["not_run"]}
    assert "nowhere" in reasons["two-model-language / absent"]
    assert "unknown model 'm9'" in reasons["two-model-image / no such model"]
    assert reasons["growing-chain / ImageNet"] == "no logit table of it is configured"
    assert reasons["two-model-language / Benchmark Routing"] == "the method was not run"
    assert "two-model-language / MMLU" not in reasons
    out = home / "out"
    report = (out / "report.md").read_text()
    for name, rows in made["tables"].items():
        assert pq.read_table(out / "tables" / f"{name}.parquet").num_rows == len(rows)
        assert (out / "tables" / f"{name}.md").read_text().strip() in report
    for figure in made["figures"]:
        assert f"]({figure['image']})" in report
        assert (out / figure["image"]).read_bytes()[:4] == b"\x89PNG"


def test_a_page_has_the_figures_with_their_captions_and_the_setup_times(made, home):
    page = home / "docs" / "measured" / "page.json"
    for figure in made["figures"]:
        text = page_figure(page, Path(figure["image"]).stem)
        assert text.endswith(figure["caption"])
        image = re.search(r"\]\((.+)\)", text)[1]
        assert Path(image).stem.endswith(Path(figure["image"]).stem)
        assert (home / "docs" / image).read_bytes()[:4] == b"\x89PNG"
    (grid,) = page_tables(page, "setup-time", ["shown", "setup_s", "published_setup_ratio"])
    assert len(grid.rows) == len(made["tables"]["setup-time"])


def test_surrogates_are_named_splits_followed_and_failures_leave_the_rest(tmp_path, capsys):
    table = tmp_path / "sets" / "near"
    write_table(table, strengths=STRENGTHS["near"])
    for folder in table.glob("model=*"):
        (folder / "split=test").rename(folder / "split=test-ood")
    info = json.loads((table / "pool.json").read_text())
    (table / "pool.json").write_text(json.dumps(info | {"logit_kind": "surrogate: of answers"}))
    chain = {"name": "near", **TWO, "split": "test-ood"}
    tables = {
        "two-model-language": [{**chain, "published": "MMLU"}],
        "two-model-image": [{**chain, "texts": "nowhere.parquet"}],
    }
    config = write_config(tmp_path, methods=["single", "rf"], tables=tables, figures={})
    assert main(["--config", config, "-o", str(tmp_path / "other")]) == 5
    assert "failed: two-model-image: " in capsys.readouterr().err
    paper = json.loads((tmp_path / "other" / "paper.json").read_text())
    assert "nowhere.parquet" in paper["failed"][0]
    assert {(row["split"], row["published_quality"]) for row in paper["tables"]["two-model-language"]} == {
        ("test-ood", None)
    }
    reasons = {item["what"]: item["why"] for item in paper["not_run"]}
    assert "surrogates" in reasons["two-model-language / MMLU"]
    assert "The logits of m0, m1 are surrogates" in (tmp_path / "other" / "report.md").read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outptu": "x"}, "did you mean 'output'"),
        ({"logits": "absent"}, "is not a folder of logit tables"),
        ({"tables": {"two-model-image": [{**TWO, "name": "a", "models": ["m0"]}]}}, "needs 2 models, got 1"),
        ({"tables": {"two-model-image": [{**TWO, "name": "a", "published": "IMDB"}]}}, "published column"),
        ({"tables": {"complementarity": [{**TWO, "name": "a"}] * 2}}, "two entries are named 'a'"),
    ],
)
def test_bad_configs_are_one_line(home, tmp_path, changes, words, capsys):
    (tmp_path / "sets").symlink_to(home / "sets")
    assert main(["--config", write_config(tmp_path, **changes)]) == 2
    output, error = capsys.readouterr()
    assert (output, error.count("\n")) == ("", 1)
    assert words in error


@pytest.mark.soak("full")
def test_tables_are_means_over_seeds_that_draw_the_splits_again(home, tmp_path):
    tables = {"two-model-language": [{"name": "near", **TWO}], "growing-chain": CONFIG["tables"]["growing-chain"]}
    splits = ["calibration", "validation", "test"]
    seeds = {"seeds": [0, 1, 2], "redrawn": splits}
    config = write_config(home, methods=["base", "rf"], tables=tables, figures={}, **seeds)
    page = tmp_path / "page.json"
    assert main(["--config", config, "-o", str(tmp_path / "out"), "--page", str(page)]) == 0
    made = json.loads((tmp_path / "out" / "paper.json").read_text())["tables"]
    comparison = cauc_ray.compare(
        home / "sets" / "near", models=["m0", "m1"], methods=["base", "rf"], seeds=[0, 1, 2], redrawn=splits
    )
    for row in made["two-model-language"]:
        of_seeds = [measured for measured in comparison.rows if measured["method"] == row["method"]]
        assert len({measured["accuracy"] for measured in of_seeds}) == 3
        assert row["quality_at_budget"] == pytest.approx(np.mean([measured["accuracy"] for measured in of_seeds]))
        assert row["difference"] == of_seeds[0]["difference"]
    # The best pair of two models is a cascade of both or one of them.
    assert [row["models"] for row in made["growing-chain"]] == [["m2"], ["m0", "m2"], ["m0", "m1", "m2"]]
    assert all(row["pair_cost"] <= row["base_cost"] * 1.1 for row in made["growing-chain"])
    (grid,) = page_tables(page, "two-model-language", ["shown", "quality"])
    assert grid.headings[0] == "method"
    assert [row[1] for row in grid.rows] == [f"{100 * row['quality']:.2f}" for row in made["two-model-language"]]


def test_a_page_shows_the_best_other_method_that_is_neither_ours_nor_a_control(tmp_path):
    qualities = {
        ("single:a", "single-model"): 0.6, ("single:b", "single-model"): 0.7, ("rf", "ours"): 0.8,
        ("stacked", "ours"): 0.95, ("recalibrated+margin", "recalibrated"): 0.96, ("oracle", "control"): 1.0,
        ("margin", "cascade"): 0.75, ("embedllm", "router"): 0.85,
    }  # fmt: skip
    rows = [
        {"chain": "a → b", "models": ["a", "b"], "method": method, "paradigm": paradigm}
        | {"quality_at_budget": quality, "relative_cost_at_budget": quality / 2}
        for (method, paradigm), quality in qualities.items()
    ]
    path = tmp_path / "made.json"
    path.write_text(json.dumps({"tables": {"two-model-image": rows}}))
    grid = results_table(path)
    assert grid.rows == (("a → b", "60.00, 70.00", "80.00 at 0.40", "95.00 at 0.47", "EmbedLLM, 85.00 at 0.42"),)
    assert "**95.00" in grid.markdown()
    chosen = methods_table(path, ["rf", "stacked"])
    assert chosen.rows == (("a → b", "80.00 at 0.40", "95.00 at 0.47"),)
    assert "**95.00" in chosen.markdown()
