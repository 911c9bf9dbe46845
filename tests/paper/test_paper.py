"""The paper's tables and figures from synthetic logits: their numbers are the library's; what is missing is told."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from in_process import in_process, tasks_in_process
from synthetic import chain, softmax, write_table

import cauc_ray
from cauc_ray.cli.verbs import VERBS
from cauc_ray.comparison.comparing import compare
from cauc_ray.paper.run import plan_of, run_paper, status_page

__all__ = ["in_process"]  # a fixture

ROOT = Path(__file__).parents[2]
# A second model that fuses well with the first, and one that is far better than it.
STRENGTHS = {"near": (1.0, 1.1, 2.0), "far": (0.5, 1.5, 3.0)}
TWO = {"set": "near", "models": ["m0", "m1"]}


def content(root):
    """Return a config that fills every table and figure, from sets of which one is not there."""
    return {
        "logits": str(root),
        "methods": ["single", "base", "rf", "rf-shared", "duo", "margin", "random", "oracle"],
        "tables": {
            "two-model-language": [
                {"name": "near", **TWO, "published": "MMLU"},
                {"name": "far", "set": "far", "models": ["m0", "m2"], "objective": "macro-f1"},
                {"name": "absent", "set": "nowhere", "models": ["m0", "m1"], "published": "PIQA"},
            ],
            "two-model-image": [{"name": "no such model", "set": "far", "models": ["m0", "m9"]}],
            "complementarity": [
                {"name": "near", **TWO},
                {"name": "far", "set": "far", "models": ["m0", "m2"], "objective": "macro-f1"},
            ],
            "growing-chain": [{"name": "near", "set": "near", "models": ["m0", "m1"], "last": "m2"}],
            "three-model-language": [
                {"name": "all", "set": "far", "models": ["m0", "m1", "m2"], "published": "PIQA"},
                {"name": "more", "set": "near", "models": ["m0", "m1", "m2"]},
            ],
            "setup-time": [{"name": "near", **TWO}],
        },
        "figures": {
            "calibration-reliability": [
                {"name": "far", "set": "far", "model": "m0", "models": ["m0", "m2"], "counted": ["m0", "m1", "m2"]}
            ],
            "complementarity-gain": ["near", "far"],
        },
    }


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for name, strengths in STRENGTHS.items():
        (folder / name).mkdir()
        write_table(folder / name, strengths=strengths, ragged=name == "far")
    return folder


def load_config(path):
    return VERBS["paper"].options.read(path)


def written(path, config):
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def made(root, tmp_path_factory):
    """Return a whole run, and its folder."""
    folder = tmp_path_factory.mktemp("paper")
    config = load_config(written(folder / "paper.yaml", content(root)))
    with tasks_in_process():
        return run_paper(config, folder / "out"), folder / "out"


def rows_of(made, name):
    return next(table for table in made[0].tables if table.name == name).rows


def test_everything_is_written_once_and_says_the_same(made, root):
    paper, out = made
    assert paper.failed == ()
    tables = ["two-model-language", "complementarity", "growing-chain", "three-model-language", "setup-time"]
    assert [table.name for table in paper.tables] == tables
    report = (out / "report.md").read_text()
    for table in paper.tables:
        assert pq.read_table(out / "tables" / f"{table.name}.parquet").num_rows == len(table.rows)
        assert (out / "tables" / f"{table.name}.md").read_text().strip() in report
    assert (out / "status.md").read_text() == status_page(paper.config, plan_of(paper.config)[1])
    assert len(paper.figures) == 4
    for figure in paper.figures:
        assert f"](figures/{figure.name}.png)" in report
        assert (out / "figures" / f"{figure.name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "</svg>" in (out / "figures" / f"{figure.name}.svg").read_text()
        assert pq.read_table(out / "figures" / f"{figure.name}.parquet").num_rows > 0
    assert json.loads((out / "paper.json").read_text()) == json.loads(json.dumps(paper.as_json()))


def test_comparisons_are_those_of_the_library(made, root):
    rows = [row for row in rows_of(made, "two-model-language") if row["chain"] == "near"]
    alone = compare(root / "near", models=["m0", "m1"], methods=made[0].config.methods)
    assert {row["method"] for row in rows} == {row["method"] for row in alone.rows}
    for row in rows:
        same = alone.row(row["method"])
        shown = same.get({"base": "default", "margin": "matched"}.get(row["method"]), same)
        assert (row["quality"], row["cost"]) == (shown["accuracy"], shown["cost"])
        assert (row["quality_at_budget"], row["cost_at_budget"]) == (same["accuracy"], same["cost"])
    far = [row for row in rows_of(made, "two-model-language") if row["chain"] == "far"]
    assert all(row["quality"] == row["macro_f1"] for row in far)
    assert {row["chain"] for row in rows_of(made, "two-model-language")} == {"near", "far"}


def test_surrogate_logits_are_named_and_no_published_figure_is_next_to_them(root, in_process, tmp_path):
    shutil.copytree(root / "near", tmp_path / "sets" / "near")
    info = json.loads((tmp_path / "sets" / "near" / "pool.json").read_text())
    (tmp_path / "sets" / "near" / "pool.json").write_text(json.dumps(info | {"logit_kind": "surrogate: of answers"}))
    tables = {
        "two-model-language": [{"name": "near", **TWO, "published": "MMLU"}],
        "complementarity": [{"name": "near", **TWO}],
    }
    content = {"logits": str(tmp_path / "sets"), "methods": ["single", "rf"], "tables": tables}
    content["figures"] = {"complementarity-gain": ["near"]}
    paper = run_paper(load_config(written(tmp_path / "c.yaml", content)), tmp_path / "out")
    banner = "The logits of m0, m1 are surrogates"
    for table in paper.tables:
        assert banner in table.markdown()
        assert all(row["surrogates"] == ["m0", "m1"] for row in table.rows)
    assert all(row["published_quality"] is None for row in paper.tables[0].rows)
    assert all("are surrogates" in figure.caption for figure in paper.figures)
    assert paper.not_run["two-model-language / MMLU"] == "the only logits of it here are surrogates"


@pytest.mark.parametrize("name", STRENGTHS)
def test_pairs_are_base_with_and_without_fusion(made, root, name):
    row = next(row for row in rows_of(made, "complementarity") if row["chain"] == name)
    measured = "macro_f1" if name == "far" else "accuracy"
    policy = cauc_ray.fit(root / name, models=row["models"])
    assert row["cr"] == policy.stages[0].complementarity_rate
    own = cauc_ray.evaluate(root / name, policy).measures
    value = own.macro_f1 if measured == "macro_f1" else own.accuracy.value
    assert row["fuse" if row["cr"] > 0 else "direct"] == value
    assert row["base_cost"] == own.cost
    objective = "macro-f1" if name == "far" else "accuracy"
    rf = cauc_ray.fit(root / name, models=row["models"], method="rf", budget=policy.expected.cost, objective=objective)
    of_rf = cauc_ray.evaluate(root / name, rf).measures
    assert row["rf_best_quality"] == (of_rf.macro_f1 if measured == "macro_f1" else of_rf.accuracy.value)
    assert row["rf_best_cost"] == of_rf.cost
    assert row["rf_shared_cost"] == own.cost  # one threshold for both


def test_direct_deferral_by_a_slow_loop(made, root):
    row = next(row for row in rows_of(made, "complementarity") if row["chain"] == "near")
    policy = cauc_ray.fit(root / "near", models=["m0", "m1"])
    test = chain(7, 300, strengths=STRENGTHS["near"], shift=2)
    right = 0
    for first, last, label in zip(test.logits[0], test.logits[1], test.labels, strict=True):
        sure = softmax(np.float64(first) / policy.stages[0].temperature).max() >= policy.threshold
        right += int(np.argmax(first if sure else last) == label)
    assert row["direct"] == right / 300
    assert row["gain_of_fusing"] == row["fuse"] - row["direct"]


def test_a_growing_chain_is_that_of_each_length(made, root):
    rows = rows_of(made, "growing-chain")
    assert [row["models"] for row in rows] == [["m2"], ["m0", "m2"], ["m0", "m1", "m2"]]
    assert [row["added"] for row in rows] == ["m2", "m0", "m1"]
    for row in rows:
        base = cauc_ray.fit(root / "near", models=row["models"])
        rf = cauc_ray.fit(root / "near", models=row["models"], method="rf", threshold=base.threshold)
        for name, policy in (("base", base), ("rf_shared", rf)):
            measures = cauc_ray.evaluate(root / "near", policy).measures
            assert (row[f"{name}_quality"], row[f"{name}_cost"]) == (measures.accuracy.value, measures.cost)
    alone = rows[0]
    assert alone["base_quality"] == alone["rf_shared_quality"] == alone["rf_best_quality"]
    assert rows[1]["rf_shared_cost"] == rows[1]["base_cost"]  # two models: one schedule for both
    assert "published_base_quality" in alone


def test_the_page_in_the_docs_is_that_of_the_shipped_config(shared_logits):
    config = VERBS["paper"].options.read(ROOT / "jobs" / "paper.yaml").model_copy(update={"logits": shared_logits})
    assert (ROOT / "docs" / "reference" / "paper.md").read_text() == status_page(config, plan_of(config)[1])


def test_headlines_are_means_over_chains(made):
    rows = rows_of(made, "two-model-language")
    table = next(table for table in made[0].tables if table.name == "two-model-language")
    by_method = {line["method"]: line for line in table.headlines}
    assert set(by_method) == {"base", "rf", "rf-shared"}
    base = {row["chain"]: row for row in rows if row["method"] == "base"}
    last = {row["chain"]: row for row in rows if row["method"] == f"single:{row['models'][-1]}"}
    gains = [base[chain]["quality"] / last[chain]["quality"] - 1 for chain in ("near", "far")]
    assert by_method["base"]["relative_gain"] == pytest.approx(np.mean(gains))
    for figure in ("avoided", "quality"):
        assert by_method["base"][figure] == pytest.approx(np.mean([row[figure] for row in base.values()]))
    assert by_method["base"]["largest_saving"] == max(1 - row["relative_cost"] for row in base.values())


def test_what_is_not_measured_is_listed(made):
    lines = [f"{what}: {why}" for what, why in made[0].not_run.items()]
    assert any("two-model-language / absent: " in line for line in lines)
    assert any("two-model-image / no such model:" in line and "unknown model 'm9'" in line for line in lines)
    assert "growing-chain / ImageNet: no logit table of it is configured" in lines
    assert not any(line.startswith("two-model-language / MMLU") for line in lines)
    assert "two-model-language / Benchmark Routing: the method was not run" in lines
    report = (made[1] / "report.md").read_text()
    assert all(f"- {line}" in report for line in lines)


def test_a_chain_is_measured_on_its_split_and_a_task_that_fails_leaves_the_rest(root, in_process, tmp_path, command):
    shutil.copytree(root, tmp_path / "sets")
    for folder in (tmp_path / "sets" / "near").glob("model=*"):
        shutil.copytree(folder / "split=test", folder / "split=test-ood")
    chains = [{**TWO, "name": "good", "split": "test-ood"}, {**TWO, "name": "bad", "texts": "nowhere.parquet"}]
    config = {"logits": "sets", "methods": ["single", "rf"], "tables": {"two-model-image": chains}, "output": "out"}
    code, out, error = command("paper", "--config", written(tmp_path / "paper.yaml", config), "--json")
    result = json.loads(out)
    (failure,) = result["failed"]
    assert (code, "nowhere.parquet" in failure) == (1, True)
    rows = result["tables"]["two-model-image"]
    assert {(row["chain"], row["split"]) for row in rows} == {("good", "test-ood")}
    assert any(line.startswith("cauc: failed: two-model-image: bad") for line in error.splitlines())
    assert "## Failed" in (tmp_path / "out" / "report.md").read_text()
    budget = next(row for row in rows if row["method"] == "rf")
    policy = cauc_ray.fit(root / "near", models=TWO["models"], method="rf", budget=budget["budget"])
    assert budget["quality"] == cauc_ray.evaluate(root / "near", policy).measures.accuracy.value  # there named test
