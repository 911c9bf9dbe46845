"""The paper's tables and figures from synthetic logits: their numbers are the library's; what is missing is told."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from synthetic import chain, softmax, write_table

import cauc_ray
from cauc_ray.cli.verbs import VERBS
from cauc_ray.comparison.comparing import compare
from cauc_ray.comparison.measuring import quoted_figures
from cauc_ray.files.parquet import read_parquet
from cauc_ray.files.paths import path_of
from cauc_ray.paper.config import PaperConfig
from cauc_ray.paper.run import plan_of, run_paper, status_page
from cauc_ray.paper.tables import CONTENTS

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
def made(root, ray_session, tmp_path_factory):
    """Return a whole run, and its folder."""
    folder = tmp_path_factory.mktemp("paper")
    config = load_config(written(folder / "paper.yaml", content(root)))
    return run_paper(config, folder / "out"), folder / "out"


def rows_of(made, name):
    return next(table for table in made[0].tables if table.name == name).rows


def test_everything_is_written_once_and_says_the_same(made, root):
    import ray

    paper, out = made
    assert paper.failed == ()
    assert ray.is_initialized()  # the session was there before, and stays
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


def test_only_what_depends_on_a_changed_table_is_measured_again(root, ray_session, tmp_path):
    shutil.copytree(root, tmp_path / "sets")
    chains = [{"name": name, "set": name, "models": ["m0", "m2"]} for name in STRENGTHS]
    content = {"logits": str(tmp_path / "sets"), "tables": {"complementarity": chains}}
    config = load_config(written(tmp_path / "c.yaml", content))
    before = run_paper(config, tmp_path / "out")
    kept = set((tmp_path / "out" / "tasks").iterdir())
    write_table(tmp_path / "sets" / "near", strengths=(0.2, 0.3, 3.0))
    after = run_paper(config, tmp_path / "out")
    assert len(set((tmp_path / "out" / "tasks").iterdir()) - kept) == 1
    (near, far), (changed, same) = before.tables[0].rows, after.tables[0].rows
    assert (changed["chain"], far) == ("near", same)
    assert changed["direct"] != near["direct"]


def test_a_papers_output_may_be_remote(root, ray_session, s3):
    content = {"logits": root, "methods": ["single", "base"], "tables": {"two-model-image": [{**TWO, "name": "near"}]}}
    out = path_of(f"{s3}/paper")
    for _ in range(2):  # the second reads what the first has kept
        paper = run_paper(PaperConfig.model_validate(content), str(out))
        assert len(list((out / "tasks").iterdir())) == 2
    assert json.loads((out / "paper.json").read_text()) == json.loads(json.dumps(paper.as_json()))
    assert (out / "figures" / "accuracy-cost-two-model-image.png").read_bytes()[:4] == b"\x89PNG"
    rows = read_parquet(out / "tables" / "two-model-image.parquet").to_pylist()
    assert [row["method"] for row in rows] == ["single:m0", "single:m1", "base"]


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


def test_headlines_are_means_over_chains(made):
    rows = rows_of(made, "two-model-language")
    table = next(table for table in made[0].tables if table.name == "two-model-language")
    by_method = {line["method"]: line for line in table.headlines}
    assert set(by_method) == {"base", "rf", "rf-shared"}
    own = {row["chain"]: row for row in rows if row["method"] == "base"}
    last = {row["chain"]: row for row in rows if row["method"] == f"single:{row['models'][-1]}"}
    gains = [own[chain]["quality"] / last[chain]["quality"] - 1 for chain in ("near", "far")]
    assert by_method["base"]["relative_gain"] == pytest.approx(np.mean(gains))
    assert by_method["base"]["avoided"] == pytest.approx(np.mean([row["avoided"] for row in own.values()]))
    assert by_method["base"]["largest_saving"] == max(1 - row["relative_cost"] for row in own.values())
    assert by_method["base"]["quality"] == pytest.approx(np.mean([row["quality"] for row in own.values()]))
    assert json.loads((made[1] / "paper.json").read_text())["headlines"]["two-model-language"] == list(table.headlines)
    assert "Over all chains" in (made[1] / "tables" / "two-model-language.md").read_text()
    averaged = (made[1] / "tables" / "two-model-language.md").read_text().split("In the paper: ")[-1]
    three = rows_of(made, "three-model-language")
    mean = np.mean([row["quality"] for row in three if row["method"] == "rf"])
    overview = (made[1] / "tables" / "three-model-language.md").read_text().split("All chains**")[1].split("\n\n")[1]
    assert f"{100 * mean:.2f}" in next(line for line in overview.splitlines() if "| CAUC-RF |" in line)
    assert "70.44" in averaged  # the mean of CAUC-RF over the paper's six data sets
    assert "21.7" in averaged


def test_surrogate_logits_are_named_and_no_published_figure_is_next_to_them(root, ray_session, tmp_path):
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


def test_chains_are_measured_on_the_split_that_they_name(root, ray_session, tmp_path):
    shutil.copytree(root, tmp_path / "sets")
    for folder in (tmp_path / "sets" / "near").glob("model=*"):
        (folder / "split=test").rename(folder / "split=test-ood")
    there = {"name": "ood", **TWO, "split": "test-ood", "objective": "macro-f1"}
    growing = {"name": "ood", "set": "near", "models": ["m0"], "last": "m1", "split": "test-ood"}
    tables = {
        "two-model-image": [there, {"name": "gone", **TWO}],
        "complementarity": [there],
        "growing-chain": [growing],
    }
    content = {"logits": str(tmp_path / "sets"), "methods": ["base", "rf"], "tables": tables}
    paper = run_paper(load_config(written(tmp_path / "c.yaml", content)), tmp_path / "out")
    assert paper.failed == ()
    assert "unknown split 'test'" in paper.not_run["two-model-image / gone"]
    assert all(row["split"] == "test-ood" for table in paper.tables for row in table.rows)
    policy = cauc_ray.fit(
        root / "near", models=TWO["models"], method="rf", objective="macro-f1", budget=paper.tables[0].rows[0]["budget"]
    )
    measures = cauc_ray.evaluate(root / "near", policy).measures  # the same examples, there named test
    row = next(row for row in paper.tables[0].rows if row["method"] == "rf")
    assert (row["quality"], row["cost"]) == (pytest.approx(measures.macro_f1), pytest.approx(measures.cost))


def test_the_papers_numbers_are_shown_where_a_column_is_named(made):
    for row in rows_of(made, "two-model-language"):
        if row["chain"] == "far":
            assert row["published_quality"] is None
    beside = {row["method"]: row for row in rows_of(made, "two-model-language") if row["chain"] == "near"}
    assert beside["rf"]["published_quality"] == pytest.approx(0.8051)
    assert beside["single:m1"]["published_cost"] == 26.0
    assert beside["single:m0"]["published_relative_cost"] == 8 / 26
    assert beside["random"]["published_quality"] is None
    assert "**80.51" not in (made[1] / "tables" / "two-model-language.md").read_text()  # only measured ones stand out
    of_variant = quoted_figures("two-model-language", "MMLU", "routellm-mf", ["m0", "m1"])
    assert of_variant == pytest.approx((0.7838, 15.98, 15.98 / 26))
    assert quoted_figures("two-model-image", "ImageNet", "routellm-mf", ["m0", "m1"]) is None


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


def test_the_setup_table_has_ratios_and_those_of_the_paper(made):
    rows = {row["method"]: row for row in rows_of(made, "setup-time")}
    assert rows["base"]["setup_ratio"] == rows["base"]["published_setup_ratio"] == 1
    assert rows["rf"]["published_setup_ratio"] == pytest.approx(20 / 12)
    assert rows["margin"]["published_setup_s"] == pytest.approx(16)
    assert rows["rf"]["setup_ratio"] == rows["rf"]["setup_s"] / rows["base"]["setup_s"]
    assert {row["with_encoder_s"] for row in rows.values()} == {None}
    assert not any(name.startswith("single") for name in rows)


def test_figures_show_what_was_measured(made, root):
    out = made[1] / "figures"
    bins = pq.read_table(out / "calibration-reliability-far.parquet").to_pylist()
    test = chain(7, 300, strengths=STRENGTHS["far"], ragged=True, shift=2)
    for model in ("m0", "m2"):
        place = int(model[1])
        for calibrated in (False, True):
            of = [row for row in bins if row["model"] == model and row["calibrated"] is calibrated]
            sure = [softmax(np.float64(z) / of[0]["temperature"]).max() for z in test.logits[place]]
            assert sum(row["n"] for row in of) == 300
            assert of[0]["n_high"] == sum(each >= 0.85 for each in sure)
            mean = sum(row["n"] * row["confidence"] for row in of if row["n"]) / 300
            assert mean == pytest.approx(np.mean(sure))
    gains = pq.read_table(out / "complementarity-gain.parquet").to_pylist()
    assert {(row["set"], row["first"], row["last"]) for row in gains} >= {("far", "m0", "m2"), ("near", "m0", "m2")}
    pair = next(row for row in rows_of(made, "complementarity") if row["chain"] == "near")
    same = next((row for row in gains if (row["set"], row["first"], row["last"]) == ("near", "m0", "m1")), None)
    if same is not None:  # where m1 is the better on calibration
        assert (same["complementarity_rate"], same["gain_of_fusing"]) == (pair["cr"], pair["gain_of_fusing"])
    curves = pq.read_table(out / "accuracy-cost-two-model-language.parquet").to_pylist()
    assert {row["chain"] for row in curves} == {"near", "far"}


def test_what_is_not_here_is_listed_and_never_made_up(made):
    told = [f"{what}: {why}" for what, why in made[0].not_run.items()]
    assert any("two-model-language / absent: there is no logit table at" in line for line in told)
    assert any("two-model-image / no such model:" in line and "unknown model 'm9'" in line for line in told)
    for column in ("two-model-language / LogiQA", "two-model-image / ImageNet", "growing-chain / ImageNet"):
        assert f"{column}: no logit table of it is configured" in told
    assert not any(line.startswith("two-model-language / MMLU") for line in told)
    assert "two-model-language / Benchmark Routing: the method was not run" in told
    report = (made[1] / "report.md").read_text()
    assert all(f"- {line}" in report for line in told)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"tables": {"two-model-image": [{"name": "a", "set": "near", "models": ["m0"]}]}}, "needs 2 models, got 1"),
        ({"tables": {"complementarity": [{"name": "a", "set": "near", "models": ["m0", "m0"]}]}}, "'m0'"),
        ({"tables": {"two-model-image": [{**TWO, "name": "a", "published": "MMLU"}]}}, "column 'MMLU'"),
        ({"tables": {"complementarity": [{**TWO, "name": "a"}] * 2}}, "two entries are named 'a'"),
    ],
)
def test_a_bad_config_is_one_line_and_code_2(root, tmp_path, command, change, says):
    path = written(tmp_path / "bad.yaml", {**content(root), "output": "out", **change})
    code, out, error = command("paper", "--config", path)
    assert (code, out, len(error.splitlines())) == (2, "", 1)
    assert says in error
    assert not (tmp_path / "out").exists()


def test_a_task_that_fails_is_told_and_the_rest_is_made(root, ray_session, tmp_path, command):
    chains = [
        {"name": "good", "set": "near", "models": ["m0", "m1"]},
        {"name": "bad", "set": "near", "models": ["m0", "m1"], "texts": "nowhere.parquet"},
    ]
    config = {"logits": str(root), "methods": ["single", "rf"], "tables": {"two-model-image": chains}}
    path = written(tmp_path / "paper.yaml", {**config, "output": "out"})
    code, out, error = command("paper", "--config", path, "--json")
    assert code == 1
    result = json.loads(out)
    assert [re.sub(r":.*", "", failure) for failure in result["failed"]] == ["two-model-image"]
    assert "nowhere.parquet" in result["failed"][0]
    assert {row["chain"] for row in result["tables"]["two-model-image"]} == {"good"}
    assert any(line.startswith("cauc: failed: two-model-image: bad") for line in error.splitlines())
    assert "## Failed" in (tmp_path / "out" / "report.md").read_text()
    assert [figure["name"] for figure in result["figures"]] == ["accuracy-cost-two-model-image"]


def test_the_status_page_lists_every_table_and_figure(root, tmp_path):
    config = load_config(written(tmp_path / "paper.yaml", content(root)))
    status, items = status_page(config, plan_of(config)[1]), CONTENTS["status"]["items"]
    assert {item.get("part") for item in items} - {None} == set(config.parts)
    rows = [line for line in status.splitlines() if line.startswith("| ")][2:]
    assert [line.split(" | ")[0].removeprefix("| ") for line in rows] == [item["paper"] for item in items]
    by_item = {line.split(" | ")[0].removeprefix("| "): line.split(" | ") for line in rows}
    assert by_item["Table 1"][2:4] == ["made", "near; far"]
    assert "absent: there is no logit table at" in by_item["Table 1"][-1]
    assert by_item["Table 2"][2:4] == ["not made", "–"]
    assert by_item["Figure 1"][2] == "–"
    page = (ROOT / "docs" / "reference" / "paper.md").read_text()
    assert all(f"| {item['paper']} | {item['shows']} |" in page for item in items)


def test_the_page_in_the_docs_is_that_of_the_shipped_config(shared_logits):
    config = VERBS["paper"].options.read(ROOT / "jobs" / "paper.yaml").model_copy(update={"logits": shared_logits})
    assert (ROOT / "docs" / "reference" / "paper.md").read_text() == status_page(config, plan_of(config)[1])


def test_the_shipped_config_finds_all_that_it_names(shared_logits):
    config = VERBS["paper"].options.read(ROOT / "jobs" / "paper.yaml")
    tasks, not_run = plan_of(config.model_copy(update={"logits": shared_logits}))
    reasons = {"no logit table of it is configured", "the only logits of it here are surrogates"}
    assert set(not_run.values()) == reasons
    assert {task.part for task in tasks} == {part for part, entries in config.parts.items() if entries}
